//! An item in a lower tier: its bytes as in memory, with the data its segment held, under a
//! checksum.
//!
//! ```text
//!      0   u32  CRC-32C of the seal of the zone's use, of the record's offset in the zone (u32),
//!               and of everything behind this field
//!      4   u32  bytes of the item
//!      8   u64  hash of the key
//!     16   u64  number of the store that made it
//!     24   the item: header, what it has, key, value
//! ```
//!
//! The seal distinguishes one use of a zone from every other. It is not stored: the reader knows
//! it, and a record left by an earlier use has a different checksum. So has one that a medium
//! returns from elsewhere in the same zone: it must not be taken for the record of another key
//! whose hash is equal, because the key that was asked for may be deleted next.

use farpool_units::exactly;

use crate::item::{Header, ItemView};

/// Bytes in front of the item.
pub const HEAD_BYTES: usize = 24;
/// Records begin at multiples of this.
pub const ALIGN_BYTES: usize = 16;

/// A record that is valid.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    pub hash: u64,
    pub stored_as: u64,
    pub item: ItemView<'a>,
    /// The whole record, to be appended elsewhere.
    pub bytes: &'a [u8],
}

fn checksum(seal: u32, offset: usize, bytes: &[u8]) -> u32 {
    let offset: u32 = exactly(offset);
    let sum = crc32c::crc32c(&seal.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(sum, &offset.to_le_bytes()), &bytes[4..])
}

/// Appends a record without its checksum; [`seal`] adds it when seal and place are known.
pub fn push(out: &mut Vec<u8>, hash: u64, stored_as: u64, item: &[u8]) {
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&exactly::<u32, _>(item.len()).to_le_bytes());
    out.extend_from_slice(&hash.to_le_bytes());
    out.extend_from_slice(&stored_as.to_le_bytes());
    out.extend_from_slice(item);
}

/// Writes the checksum of a record that begins `offset` bytes into its zone.
pub fn seal(bytes: &mut [u8], seal: u32, offset: usize) {
    let sum = checksum(seal, offset, bytes);
    bytes[..4].copy_from_slice(&sum.to_le_bytes());
}

/// The length of the record that begins here. None if there is none.
#[must_use]
pub fn length(bytes: &[u8]) -> Option<usize> {
    let length: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
    let item_bytes = u32::from_le_bytes(length) as usize;
    (item_bytes > 0).then_some(HEAD_BYTES + item_bytes)
}

/// The key of a record that was just made.
#[must_use]
pub fn key_of(bytes: &[u8]) -> Option<&[u8]> {
    read_unchecked(bytes).map(|record| record.item.key())
}

/// The record at the start of `bytes`, if it is valid in every respect, and belongs `offset` bytes
/// into its zone.
#[must_use]
pub fn read(bytes: &[u8], seal: u32, offset: usize) -> Option<Record<'_>> {
    let bytes = bytes.get(..length(bytes)?)?;
    let sum = u32::from_le_bytes(bytes[..4].try_into().ok()?);
    if sum != checksum(seal, offset, bytes) {
        return None;
    }
    read_unchecked(bytes)
}

/// A record whose checksum was checked before, or that never left memory.
#[must_use]
pub fn read_unchecked(bytes: &[u8]) -> Option<Record<'_>> {
    let bytes = bytes.get(..length(bytes)?)?;
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let item = &bytes[HEAD_BYTES..];
    if item.len() < crate::item::HEADER_BYTES || Header::read(item).item_bytes() != item.len() {
        return None;
    }
    Some(Record { hash: word(8), stored_as: word(16), item: ItemView::new(item), bytes })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::item::{AccessTime, ItemParts};

    proptest! {
        #[test]
        fn what_was_written_is_read_and_nothing_else(
            key in prop::collection::vec(any::<u8>(), 1..60), value in prop::collection::vec(any::<u8>(), 0..200),
            hash: u64, stored_as: u64, zone: u32, offset in 0usize..1 << 21,
            flip: (prop::sample::Index, u8),
        ) {
            let parts = ItemParts { key: &key, value: [&value, b""], ..ItemParts::default() };
            let header = parts.header(AccessTime(0), 0);
            let mut item = vec![0; header.item_bytes()];
            parts.write(header, &mut item);
            let mut out = Vec::new();
            push(&mut out, hash, stored_as, &item);
            seal(&mut out, zone, offset);
            let bytes = out.len();
            out.extend_from_slice(b"what follows");
            let record = read(&out, zone, offset).unwrap();
            prop_assert_eq!((record.hash, record.stored_as, record.bytes.len()), (hash, stored_as, bytes));
            prop_assert_eq!((record.item.key(), record.item.value()), (&key[..], &value[..]));
            prop_assert!(read(&out, zone.wrapping_add(1), offset).is_none(), "another use of the zone");
            prop_assert!(read(&out, zone, offset ^ 4096).is_none(), "another place in the zone");
            out[flip.0.index(bytes)] ^= 1 << (flip.1 % 8);
            prop_assert!(read(&out, zone, offset).is_none(), "a flipped bit");
        }
    }
}
