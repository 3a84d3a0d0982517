//! Text files of other tools: unpacked, in lines of a bounded length, with their separator.
//!
//! Traces and utilisation come from the same kinds of tools, so both readers use this. A file is
//! foreign and may be damaged: nothing here holds more of it than its caller allows.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

/// Large enough that the cost of system calls does not show.
const BUFFER_BYTES: usize = 1 << 18;
const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];
/// The rest of the magic number of frames that are skipped; its first byte is one of sixteen.
const ZSTD_SKIPPABLE: &[u8] = &[0x2A, 0x4D, 0x18];
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// What may separate fields. Of those that split a line into equally many, the first does.
const SEPARATORS: [u8; 4] = *b",;\t|";

/// How a compressed file is told from a plain one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToldBy {
    /// By what it begins with, whatever its name: no text begins like that.
    Content,
    /// By its name alone, which ends in `.gz` or `.zst`: any bytes may begin like that.
    Name,
}

/// Opens a file and decompresses gzip and zstd.
///
/// # Errors
/// It cannot be opened or read.
pub fn open(path: &Path, told_by: ToldBy) -> io::Result<Box<dyn BufRead>> {
    let mut file = BufReader::with_capacity(BUFFER_BYTES, File::open(path)?);
    let begins = file.fill_buf()?;
    let is = |ending: &str, magic: &[u8]| match told_by {
        // A skippable frame may come first, as pzstd writes it.
        ToldBy::Content if magic == ZSTD => {
            begins.starts_with(magic)
                || matches!(begins, [0x50..=0x5f, rest @ ..] if rest.starts_with(ZSTD_SKIPPABLE))
        }
        ToldBy::Content => begins.starts_with(magic),
        ToldBy::Name => path.extension().is_some_and(|extension| extension == ending),
    };
    let (is_gzip, is_zstd) = (is("gz", GZIP), is("zst", ZSTD));
    let plain: Box<dyn Read> = if is_gzip {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if is_zstd {
        Box::new(zstd::Decoder::with_buffer(file)?)
    } else {
        return Ok(Box::new(file));
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, plain)))
}

/// What [`read_line`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// A line.
    Whole,
    /// More bytes than allowed without an end.
    TooLong,
    /// The end of the file.
    End,
}

/// Reads a line with its end into `line`, of at most `bytes_max` bytes.
///
/// # Errors
/// The input cannot be read.
pub fn read_line(
    input: &mut dyn BufRead,
    line: &mut Vec<u8>,
    bytes_max: usize,
) -> io::Result<Line> {
    line.clear();
    // One byte over the limit tells a line too long from one just long enough.
    let count = input.take(bytes_max as u64 + 1).read_until(b'\n', line)?;
    Ok(match count {
        0 => Line::End,
        count if count > bytes_max => Line::TooLong,
        _ => Line::Whole,
    })
}

/// Removes the byte-order mark that a file's first line may begin with.
pub fn strip_byte_order_mark(line: &mut Vec<u8>) {
    if line.starts_with(BYTE_ORDER_MARK) {
        line.drain(..BYTE_ORDER_MARK.len());
    }
}

/// Returns the separator that splits a line into most fields, quoted ones left whole; a comma if
/// none does.
#[must_use]
pub fn separator(line: &[u8]) -> u8 {
    let count = |separator: u8| {
        let mut is_quoted = false;
        let counted = line.iter().filter(|byte| {
            is_quoted ^= **byte == b'"';
            **byte == separator && !is_quoted
        });
        counted.count()
    };
    // `max_by_key` returns the last of equal ones.
    SEPARATORS.into_iter().rev().max_by_key(|separator| count(*separator)).unwrap_or(b',')
}

/// Input for a reader of records that itself has no limit: it fails when more bytes than allowed
/// are asked for.
#[derive(Debug)]
pub struct Bounded<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

/// What a [`Bounded`] may still read.
#[derive(Debug)]
pub struct Allowance {
    left: Rc<Cell<u64>>,
}

impl<R: Read> Bounded<R> {
    /// Bounds `inner` by an allowance of no bytes, which its holder renews for each record.
    pub fn new(inner: R) -> (Self, Allowance) {
        let left = Rc::new(Cell::new(0));
        (Self { inner, left: Rc::clone(&left) }, Allowance { left })
    }
}

impl Allowance {
    /// Allows this many bytes from now on.
    pub fn renew(&self, bytes: u64) {
        self.left.set(bytes);
    }

    /// True if nothing is left.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.left.get() == 0
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other("a record has no end"));
        }
        let most = usize::try_from(left).map_or(to.len(), |left| left.min(to.len()));
        let count = self.inner.read(&mut to[..most])?;
        self.left.set(left - count as u64);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        to.write_all(bytes).unwrap();
        to.finish().unwrap()
    }

    #[test]
    fn text_is_unpacked_by_its_content_and_bytes_by_their_name() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, bytes: &[u8], told_by: ToldBy| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let mut all = Vec::new();
            open(&path, told_by).and_then(|mut input| input.read_to_end(&mut all)).map(|_| all)
        };
        let zstd = zstd::encode_all(&b"text"[..], 1).unwrap();
        for packed in [gzip(b"text"), zstd] {
            for name in ["t.csv", "t.gz", "t"] {
                assert_eq!(read(name, &packed, ToldBy::Content).unwrap(), b"text", "{name}");
            }
            assert_eq!(read("t.bin", &packed, ToldBy::Name).unwrap(), packed);
        }
        assert_eq!(read("t.gz", &gzip(b"text"), ToldBy::Name).unwrap(), b"text");
        assert_eq!(read("t.gz", b"text", ToldBy::Content).unwrap(), b"text");
        assert!(read("t.gz", b"text", ToldBy::Name).is_err());
    }

    #[test]
    fn a_line_is_as_long_as_allowed_or_is_not_held() {
        let mut line = Vec::new();
        let mut input = &b"1234\n56789\n"[..];
        assert_eq!(read_line(&mut input, &mut line, 5).unwrap(), Line::Whole);
        assert_eq!(line, b"1234\n");
        assert_eq!(read_line(&mut input, &mut line, 5).unwrap(), Line::TooLong);
        assert_eq!(line.len(), 6);
        assert_eq!(read_line(&mut &b""[..], &mut line, 5).unwrap(), Line::End);
    }

    #[test]
    fn the_separator_that_splits_most_is_taken_outside_of_quotes() {
        for (line, wanted) in [
            (&b"a,b,c"[..], b','),
            (b"a;b;c,d", b';'),
            (b"\"a,b,c,d\"\tb", b'\t'),
            (b"a|b", b'|'),
            (b"a", b','),
            (b"a,b;c", b','),
        ] {
            assert_eq!(separator(line), wanted, "{}", String::from_utf8_lossy(line));
        }
        let mut line = "\u{feff}a".as_bytes().to_vec();
        strip_byte_order_mark(&mut line);
        assert_eq!(line, b"a");
    }

    #[test]
    fn a_record_without_end_is_not_read_to_its_end() {
        let endless = io::repeat(b'x').take(1 << 20);
        let (mut bounded, allowance) = Bounded::new(endless);
        assert!(bounded.read(&mut [0]).is_err(), "nothing is allowed yet");
        allowance.renew(1000);
        let mut all = Vec::new();
        assert!(bounded.read_to_end(&mut all).is_err() && allowance.is_spent());
        assert_eq!(all.len(), 1000);
        assert_eq!(bounded.inner.limit(), (1 << 20) - 1000);
    }
}
