//! Properties that must hold for any bytes as parts of a flash file: used by the layout's tests and
//! by fuzz/.

use farpool_kv_tier::flash::layout::{self, Promises, Superblock, TableEntry, ZONE_BYTES};
use farpool_kv_tier::flash::live::LiveHeader;

/// Decodes the bytes as each part; whatever is accepted must encode to the same bytes.
pub(crate) fn decode_any(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(superblock.encode(), bytes[..Superblock::BYTES]);
    }
    if let Some(header) = LiveHeader::decode(bytes) {
        assert_eq!(header.encode(), bytes[..LiveHeader::BYTES]);
    }
    if let Some(entry) = TableEntry::decode(bytes) {
        assert_eq!(entry.encode(), bytes[..layout::TABLE_ENTRY_BYTES]);
    }
    if let Some(promises) = Promises::newest(bytes) {
        assert_eq!(Promises::decode(&promises.encode()), Some(promises));
    }
    let records = bytes.len() / layout::SUMMARY_ENTRY_BYTES;
    for records in 0..=records {
        let seal = bytes.first().map_or(0, |&byte| u32::from(byte));
        if let Some(entries) = layout::read_summary(bytes, records, seal) {
            assert_eq!(entries.len(), records);
            let ends =
                entries.iter().map(|it| it.unit as usize * layout::UNIT_BYTES + it.bytes as usize);
            assert!(ends.max().unwrap_or(0) <= ZONE_BYTES);
        }
    }
}
