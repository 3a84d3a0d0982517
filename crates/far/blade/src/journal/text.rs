//! The form of the file that keeps a blade's table, and what one says. Pure.
//!
//! A file is a list of lines: `CHECKSUM JSON`, the checksum (CRC-32 in hex) being of the JSON text.
//! The first is the [`Header`], each other one a change that is whole or not at all. The process
//! may have ended in the middle of a write: an incomplete last line was never answered for, and
//! does not count. Anything else that is not as written is damage.

use crate::table::{Image, ImageError, Row};
use farpool_wire::PagesChecksum;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of this form; another one is not read.
pub(crate) const VERSION: u32 = 1;

/// Hex digits of a line's checksum.
const CHECKSUM_DIGITS: usize = 8;

/// What the table is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) blade_id: u64,
    /// Processes that have served it, this one included.
    pub(crate) starts: u64,
    /// The kernel's name for the time since the machine was started.
    pub(crate) boot: String,
    pub(crate) memory: MemoryFile,
}

/// Which file or device the memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct MemoryFile {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// When it was made, where the file system knows that.
    pub(crate) born_ns: Option<u64>,
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Line {
    Header(Header),
    Change(Vec<Row>),
    /// All memory is in the file itself, whatever happens to the machine.
    Closed,
}

/// What a file says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Past {
    pub(crate) header: Header,
    pub(crate) image: Image,
    pub(crate) is_closed: bool,
}

/// Why what a file says cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum Unusable {
    #[error("line {line} of it is damaged")]
    Damaged { line: usize },
    #[error("line {line} of it contradicts those before: {source}")]
    Contradiction { line: usize, source: ImageError },
    #[error("it has version {found}, and this farpool reads version {VERSION}")]
    Version { found: u32 },
    #[error("it is of another file or device than the memory: that was made anew or exchanged")]
    OtherMemory,
    #[error(
        "the machine has been started since, and what was not yet written to the file is lost; \
         --persist=reboot outlives an orderly reboot"
    )]
    Rebooted,
    #[error("its clients and segments do not fit together: {0}")]
    Image(#[from] ImageError),
}

/// Appends a line.
pub(crate) fn append(line: &Line, out: &mut Vec<u8>) -> serde_json::Result<()> {
    let text = serde_json::to_vec(line)?;
    out.extend_from_slice(checksum(&text).as_bytes());
    out.push(b' ');
    out.extend_from_slice(&text);
    out.push(b'\n');
    Ok(())
}

fn checksum(text: &[u8]) -> String {
    format!("{:0width$x}", PagesChecksum::of(text), width = CHECKSUM_DIGITS)
}

fn parse(line: &[u8]) -> Option<Line> {
    let (digits, rest) = line.split_at_checked(CHECKSUM_DIGITS)?;
    let text = rest.strip_prefix(b" ")?;
    let is_whole = digits == checksum(text).as_bytes();
    is_whole.then(|| serde_json::from_slice(text).ok()).flatten()
}

/// Returns what a file says; nothing if its process ended before it said anything.
///
/// # Errors
/// It is damaged, or of another version.
pub(crate) fn read(bytes: &[u8]) -> Result<Option<Past>, Unusable> {
    let mut past: Option<Past> = None;
    for (index, bytes) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let line = index + 1;
        let Some(text) = bytes.strip_suffix(b"\n") else {
            break; // the write of the last line did not end
        };
        match (parse(text).ok_or(Unusable::Damaged { line })?, &mut past) {
            (Line::Header(header), None) if header.version == VERSION => {
                past = Some(Past { header, image: Image::default(), is_closed: false });
            }
            (Line::Header(Header { version: found, .. }), None) => {
                return Err(Unusable::Version { found });
            }
            (Line::Change(rows), Some(past)) if !past.is_closed => {
                let applied = rows.into_iter().try_for_each(|row| past.image.apply(row));
                applied.map_err(|source| Unusable::Contradiction { line, source })?;
            }
            (Line::Closed, Some(past)) => past.is_closed = true,
            _ => return Err(Unusable::Damaged { line }),
        }
    }
    Ok(past)
}

impl Past {
    /// Checks that the memory still has what this says.
    ///
    /// # Errors
    /// It is another file, or the machine was started since without [`Line::Closed`].
    pub(crate) fn check(&self, memory: &MemoryFile, boot: &str) -> Result<(), Unusable> {
        if self.header.memory != *memory {
            return Err(Unusable::OtherMemory);
        }
        if self.header.boot != boot && !self.is_closed {
            return Err(Unusable::Rebooted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::ClientRow;
    use proptest::prelude::*;

    const MEMORY: MemoryFile = MemoryFile { device: 1, inode: 2, born_ns: Some(3) };

    fn header() -> Header {
        Header {
            version: VERSION,
            blade_id: u64::MAX,
            starts: 1,
            boot: "now".into(),
            memory: MEMORY,
        }
    }

    fn client(number: u64) -> Row {
        let row = ClientRow {
            number,
            id: u128::MAX - u128::from(number),
            name: "a \"name\"\n of two lines".into(),
            pid: 7,
            user: Some(1000),
            identity: Some("spiffe://rack/program/payroll".into()),
            quota_superpages: 9,
            grant: Some(u128::MAX),
        };
        Row::Client(row)
    }

    fn file(lines: &[Line]) -> Vec<u8> {
        let mut out = Vec::new();
        lines.iter().for_each(|line| append(line, &mut out).unwrap());
        out
    }

    fn three_clients() -> Vec<u8> {
        let changes = (1..4).map(|number| Line::Change(vec![client(number)]));
        file(&[vec![Line::Header(header())], changes.collect()].concat())
    }

    #[test]
    fn what_was_written_is_read_however_short_the_file_was_cut() {
        let whole = three_clients();
        let ends: Vec<usize> =
            (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
        assert_eq!(ends.len(), 4, "names with line ends stay on their line");
        for cut in 0..=whole.len() {
            let lines = ends.iter().filter(|end| **end <= cut).count();
            let past = read(&whole[..cut]).unwrap();
            let clients = past.as_ref().map(|past| past.image.counts().0);
            assert_eq!(clients, lines.checked_sub(1), "cut at {cut}");
            assert!(past.is_none_or(|past| past.header == header()));
        }
    }

    proptest! {
        /// A flipped bit is found, unless it makes the last line one that has no end.
        #[test]
        fn damage_is_found(at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = three_clients();
            let whole = read(&bytes).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            match read(&bytes) {
                Err(Unusable::Damaged { .. }) => {}
                Ok(past) => {
                    prop_assert_eq!(at, bytes.len() - 1);
                    prop_assert_ne!(past, whole);
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }

    #[test]
    fn another_memory_or_a_crash_of_the_machine_makes_it_unusable() {
        let open = read(&three_clients()).unwrap().unwrap();
        assert_eq!(open.check(&MEMORY, "now"), Ok(()));
        assert_eq!(open.check(&MEMORY, "later"), Err(Unusable::Rebooted));
        let exchanged = MemoryFile { born_ns: Some(4), ..MEMORY };
        assert_eq!(open.check(&exchanged, "now"), Err(Unusable::OtherMemory));
        let closed = [three_clients(), file(&[Line::Closed])].concat();
        assert_eq!(read(&closed).unwrap().unwrap().check(&MEMORY, "later"), Ok(()));
        let after = [closed, file(&[Line::Change(vec![client(9)]), Line::Closed])].concat();
        assert_eq!(read(&after), Err(Unusable::Damaged { line: 6 }), "nothing follows the end");
        let other = file(&[Line::Header(Header { version: 2, ..header() })]);
        assert_eq!(read(&other), Err(Unusable::Version { found: 2 }));
    }
}
