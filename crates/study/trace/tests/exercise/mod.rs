//! Properties that must hold for any bytes read as a trace; used by the property tests and by
//! fuzz/.

use std::hash::Hasher;
use std::io::{BufRead, BufReader};
use std::path::Path;

use farpool_trace::import::{CsvColumns, Format, ImportOptions, read_records};
use farpool_trace::{
    Access, Batch, Clock, Columns, Record, TraceError, TraceInfo, TraceReader, TraceWriter,
};
use twox_hash::XxHash3_64;

/// Upper bound of the records per byte of text: a file with more would keep an import busy for
/// ever.
const RECORDS_PER_BYTE_MAX: u64 = 128;
/// Records after which an import of sizes is ended: one row may say a size of millions of blocks.
const SIZED_RECORDS_MAX: usize = 1 << 12;
/// Marks the error that ends such an import.
const ENOUGH: &str = "enough";

/// Reads `bytes` as a foreign trace. Nothing panics, the work is in proportion to the bytes, an
/// error names the file, and nothing depends on the pieces in which the bytes arrive.
pub(crate) fn import_any(bytes: &[u8], format: &Format) {
    let at_once = records(&mut &bytes[..], bytes.len(), format);
    let in_pieces = records(&mut BufReader::with_capacity(7, bytes), bytes.len(), format);
    assert_eq!(at_once, in_pieces, "the same bytes in pieces of seven");
    if let Err(refusal) = at_once {
        assert!(refusal.starts_with("any.trace: "), "{refusal}");
    }
}

fn records(input: &mut dyn BufRead, length: usize, format: &Format) -> Result<Vec<Record>, String> {
    let options = ImportOptions { format: format.clone(), block_bytes: 64, sized: false };
    let is_sized = matches!(format, Format::Csv(columns) if columns.size.is_some());
    let mut found = Vec::new();
    let count = read_records(Path::new("any.trace"), input, &options, &mut |record| {
        if is_sized && found.len() == SIZED_RECORDS_MAX {
            return Err(TraceError::Foreign { path: ENOUGH.into(), reason: String::new() });
        }
        found.push(record);
        let most = RECORDS_PER_BYTE_MAX * length as u64;
        assert!(is_sized || found.len() as u64 <= most, "{} records of {length}", found.len());
        Ok(())
    });
    let count = match count {
        Err(TraceError::Foreign { path, .. }) if path == Path::new(ENOUGH) => {
            SIZED_RECORDS_MAX as u64
        }
        count => count.map_err(|refusal| refusal.to_string())?,
    };
    assert_eq!(count, found.len() as u64);
    Ok(found)
}

/// Columns of objects' names and sizes.
pub(crate) fn objects() -> Format {
    let column = |name: &str| Some(name.to_owned());
    Format::Csv(CsvColumns { object: column("key"), size: column("size"), ..Default::default() })
}

/// Columns of addresses and sizes, without a header.
pub(crate) fn sized_addresses() -> Format {
    let column = |name: &str| Some(name.to_owned());
    Format::Csv(CsvColumns {
        address: column("1"),
        size: column("2"),
        has_header: false,
        ..Default::default()
    })
}

/// Reads `bytes` as a trace file at `path`. Nothing panics, and the records agree with the footer.
pub(crate) fn read_any(path: &Path, bytes: &[u8]) -> Result<u64, TraceError> {
    std::fs::write(path, bytes).expect("the file of the exercise");
    let mut reader = TraceReader::open(path, Columns::ALL)?;
    let mut batch = Batch::default();
    let mut count = 0;
    while reader.next_batch(&mut batch)? {
        count += batch.records().count() as u64;
    }
    assert_eq!(count, reader.records(), "as many as the footer says");
    Ok(count)
}

/// A small trace file.
pub(crate) fn whole_file() -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = &folder.path().join("whole.parquet");
    let info = TraceInfo::new("exercise", 64, Clock::Accesses);
    let mut writer = TraceWriter::create(path, info).expect("a new trace");
    for n in 0..200u32 {
        let access = [Access::Read, Access::Write, Access::WriteBack][n as usize % 3];
        let record = Record { block: u64::from(n * n % 97), ticks: 1, access, thread: n / 150 };
        writer.push(record).expect("room for a record");
    }
    writer.finish().expect("a whole trace");
    std::fs::read(path).expect("the trace just written")
}

/// Changes the footer of `whole` at each of `edits` (offset in two bytes, then the new byte),
/// corrects the digest so that the checks behind it run, and opens the file. Records are not read:
/// the Parquet reader aborts the program on some footers that no writer makes, and only the digest
/// protects from that.
pub(crate) fn open_repaired(path: &Path, whole: &[u8], edits: &[u8]) -> Result<u64, TraceError> {
    let mut bytes = whole.to_vec();
    let length_at = bytes.len() - 8;
    let length: [u8; 4] = bytes[length_at..length_at + 4].try_into().expect("four bytes");
    let footer_at = length_at - u32::from_le_bytes(length) as usize;
    let footer = &mut bytes[footer_at..];
    for edit in edits.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % footer.len();
        footer[at] = edit[2];
    }
    repair(&mut bytes);
    std::fs::write(path, bytes).expect("the file of the exercise");
    TraceReader::open(path, Columns::ALL).map(|reader| reader.records())
}

/// Writes the digest that fits the bytes (docs/researchers/trace.md), if there is still a place for
/// one.
fn repair(bytes: &mut [u8]) {
    const MARK: &[u8] = b"xxh3-64:";
    let Some(at) = bytes.windows(MARK.len()).rposition(|window| window == MARK) else { return };
    let Some(digits) = bytes.get_mut(at + MARK.len()..at + MARK.len() + 16) else { return };
    digits.fill(b'0');
    let mut hasher = XxHash3_64::with_seed(0);
    hasher.write(bytes);
    let digest = format!("{:016x}", hasher.finish());
    bytes[at + MARK.len()..][..16].copy_from_slice(digest.as_bytes());
}
