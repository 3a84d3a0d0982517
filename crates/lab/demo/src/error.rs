//! What can go wrong in the demo.

use std::fmt;
use std::io;
use std::path::Path;

use farpool_bench::BenchError;
use farpool_hosts::HostsError;

/// Why a row, or the whole demo, could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// SIGINT or SIGTERM: everything is taken down, nothing more is run.
    #[error("interrupted; what the demo had set up is taken down")]
    Interrupted,
    /// This machine does not have or allow what the row needs; the row is skipped.
    #[error("{0}")]
    Unavailable(String),
    /// A program did something other than expected.
    #[error("{0}")]
    Program(String),
    /// A program did not finish under the kernel's swap: a result, not a failure of the demo.
    #[error("{0}")]
    Stopped(Stopped),
    /// Something took longer than the demo waits.
    #[error("not done after {0} s")]
    TooSlow(u64),
    /// A value came back different from what was written: the one unforgivable result.
    #[error("WRONG DATA: {0}")]
    WrongData(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

impl Error {
    /// Says what was being done to `path` when the call failed.
    pub fn at(what: &str, path: &Path, source: io::Error) -> Error {
        Error::Io { what: format!("{what} {}", path.display()), source }
    }
}

impl From<BenchError> for Error {
    fn from(error: BenchError) -> Error {
        match error {
            BenchError::Interrupted => Error::Interrupted,
            BenchError::Lacking(reason) => Error::Unavailable(reason),
            other => Error::Program(other.to_string()),
        }
    }
}

impl From<HostsError> for Error {
    fn from(error: HostsError) -> Error {
        match error {
            HostsError::Lacking(reason) => Error::Unavailable(reason),
            other => Error::Program(other.to_string()),
        }
    }
}

/// How the kernel ended a job that it could not run under its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Killed: out of memory under the limit, although swap had room.
    OutOfMemory,
    /// Not done after this many seconds.
    TooSlow(u64),
}

impl fmt::Display for Stopped {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stopped::OutOfMemory => to.write_str("killed"),
            Stopped::TooSlow(seconds) => write!(to, "> {seconds}"),
        }
    }
}

/// Adds what was being done to an error of the system.
pub trait During<T> {
    /// `what` reads as in "reading a reply".
    fn during(self, what: &str) -> Result<T, Error>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, what: &str) -> Result<T, Error> {
        self.map_err(|source| Error::Io { what: what.to_owned(), source })
    }
}
