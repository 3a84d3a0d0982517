//! The digest of a trace file: XXH3-64 over all its bytes, with its own sixteen digits as zeros.
//!
//! It is checked before any other content is trusted: a Parquet reader may abort the program on a
//! footer whose numbers make no sense.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read, Seek, SeekFrom, Write};

use twox_hash::XxHash3_64;

/// What precedes the digits in the footer.
const MARK: &[u8] = b"xxh3-64:";
/// Digits of a digest in hexadecimal.
const DIGITS: usize = 16;
/// The last bytes of a Parquet file, after the footer's length in four bytes.
const PARQUET_END: &[u8] = b"PAR1";
/// Upper bound of a footer's bytes: it says little of each row group.
const MAX_FOOTER_BYTES: u64 = 1 << 28;
/// The file is hashed in pieces of this size.
const PIECE_BYTES: usize = 1 << 20;

/// The footer's value until the digest is known.
pub(crate) const PLACEHOLDER: &str = "xxh3-64:0000000000000000";

/// The result of checking a file's digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The file is as it was written.
    Whole,
    /// It has a digest, but of other bytes.
    Damaged,
    /// It is a Parquet file without a digest.
    NoDigest,
    /// It does not end as a Parquet file does.
    NoParquet,
}

/// Writes the digest over its placeholder.
pub(crate) fn seal(file: &mut File) -> io::Result<()> {
    let digits_at = find_digits(file)?.ok_or_else(|| io::Error::other("no place for a digest"))?;
    let digest = hash(file, digits_at)?;
    file.seek(SeekFrom::Start(digits_at))?;
    file.write_all(format!("{digest:016x}").as_bytes())
}

/// Checks the file against its digest.
pub(crate) fn check(file: &mut File) -> io::Result<Verdict> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = [0; 4];
    if length < 12 {
        return Ok(Verdict::NoParquet);
    }
    file.seek(SeekFrom::Start(length - 4))?;
    file.read_exact(&mut end)?;
    if end != PARQUET_END {
        return Ok(Verdict::NoParquet);
    }
    let Some(digits_at) = find_digits(file)? else { return Ok(Verdict::NoDigest) };
    let mut digits = [0; DIGITS];
    file.seek(SeekFrom::Start(digits_at))?;
    file.read_exact(&mut digits)?;
    let digest = hash(file, digits_at)?;
    let is_whole = digits == format!("{digest:016x}").as_bytes();
    Ok(if is_whole { Verdict::Whole } else { Verdict::Damaged })
}

/// Finds the digits in the file. None if the footer has no digest.
fn find_digits(file: &mut File) -> io::Result<Option<u64>> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut bytes = [0; 4];
    file.seek(SeekFrom::Start(length - 8))?;
    file.read_exact(&mut bytes)?;
    let footer_bytes = u64::from(u32::from_le_bytes(bytes)) + 8;
    if footer_bytes > length.min(MAX_FOOTER_BYTES) {
        return Ok(None);
    }
    let footer_at = length - footer_bytes;
    file.seek(SeekFrom::Start(footer_at))?;
    let mut footer = Vec::new();
    file.take(footer_bytes).read_to_end(&mut footer)?;
    let mark_at = footer.windows(MARK.len()).rposition(|window| window == MARK);
    let digits_at = mark_at.map(|at| at + MARK.len()).filter(|at| at + DIGITS <= footer.len());
    Ok(digits_at.map(|at| footer_at + at as u64))
}

fn hash(file: &mut File, digits_at: u64) -> io::Result<u64> {
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = XxHash3_64::with_seed(0);
    let mut before = file.take(digits_at);
    feed(&mut hasher, &mut before)?;
    hasher.write(&[b'0'; DIGITS]);
    file.seek(SeekFrom::Start(digits_at + DIGITS as u64))?;
    feed(&mut hasher, file)?;
    Ok(hasher.finish())
}

fn feed(hasher: &mut XxHash3_64, from: &mut impl Read) -> io::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = from.read(&mut piece)?;
        if count == 0 {
            return Ok(());
        }
        hasher.write(&piece[..count]);
    }
}
