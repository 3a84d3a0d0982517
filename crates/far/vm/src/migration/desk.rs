//! Asks QEMU's pager to hand its guest's memory over, or to take one (the pager's `life::guest`).

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use farpool_run::GUEST_SOCKET;

/// How long it may take. What it waits for, a blade, has its own deadline, and many pages may have
/// to be written.
const ANSWER_TIME: Duration = Duration::from_secs(120);
/// The longest first line of an answer.
const LINE_BYTES_MAX: u64 = 64;
/// The most bytes of an answer: what tells of the largest guest, 4 TiB.
const BYTES_MAX: usize = 1 << 36;

/// Why it did not.
#[derive(Debug, thiserror::Error)]
pub enum DeskError {
    #[error("QEMU's pager cannot be asked: {0}")]
    Unreachable(std::io::Error),
    #[error("QEMU's pager refuses: {0}")]
    Refused(String),
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Give,
    /// Have back what was given, if nobody has taken it.
    Keep,
    /// Have it back, by the caller's word that nobody else has it.
    Force,
    LetGo,
    Bind,
    Take,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The memory of a guest, in words for another pager.
    Given(Vec<u8>),
    /// The guest is this host's.
    Kept,
    /// It is another host's.
    Taken,
    /// Another host had it at hand, and has ended.
    Lost,
    Gone,
    Bound,
    /// The other host has not let go of it yet.
    Held,
}

pub(super) fn socket(folder: &Path) -> PathBuf {
    folder.join(GUEST_SOCKET)
}

/// Gives an order, and waits for its answer.
pub(super) fn ask(folder: &Path, order: Order, bytes: &[u8]) -> Result<Answer, DeskError> {
    let failed = DeskError::Unreachable;
    let mut stream = UnixStream::connect(socket(folder)).map_err(failed)?;
    stream.set_read_timeout(Some(ANSWER_TIME)).map_err(failed)?;
    stream.set_write_timeout(Some(ANSWER_TIME)).map_err(failed)?;
    let word = match order {
        Order::Give => "GIVE",
        Order::Keep => "KEEP",
        Order::Force => "FORCE",
        Order::LetGo => "LET-GO",
        Order::Bind => "BIND",
        Order::Take => "TAKE",
    };
    stream.write_all(format!("{word} {}\n", bytes.len()).as_bytes()).map_err(failed)?;
    stream.write_all(bytes).map_err(failed)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    (&mut reader).take(LINE_BYTES_MAX).read_line(&mut line).map_err(failed)?;
    let nonsense = || failed(std::io::ErrorKind::InvalidData.into());
    let (word, length) = line.trim_end().split_once(' ').ok_or_else(nonsense)?;
    let length = length.parse().ok().filter(|length| *length <= BYTES_MAX).ok_or_else(nonsense)?;
    let mut bytes = vec![0; length];
    reader.read_exact(&mut bytes).map_err(failed)?;
    match word {
        "GIVEN" => Ok(Answer::Given(bytes)),
        "KEPT" => Ok(Answer::Kept),
        "TAKEN" => Ok(Answer::Taken),
        "LOST" => Ok(Answer::Lost),
        "GONE" => Ok(Answer::Gone),
        "BOUND" => Ok(Answer::Bound),
        "HELD" => Ok(Answer::Held),
        "REFUSED" => Err(DeskError::Refused(String::from_utf8_lossy(&bytes).into_owned())),
        _ => Err(nonsense()),
    }
}
