//! Opens a connection to an address, before anything is sent on it.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use farpool_record::RecordError;
use farpool_wire::{Address, ErrorCode, WireError};
use rustix::io::Errno;

use crate::channel::Trouble;
use crate::peer::{self, Stranger};
use crate::sys;

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DialError {
    #[error("no blade serves there ({0})")]
    Gone(Errno),
    #[error("this user may not connect to it ({0})")]
    Forbidden(Errno),
    #[error("it is none of the blades that farpool was given")]
    NotMeant,
    #[error("it cannot be reached ({0})")]
    Later(Errno),
    #[error("it closed the connection instead of greeting")]
    Closed,
    #[error("{0}")]
    Refused(ErrorCode),
    #[error("{0}")]
    Wire(WireError),
    #[error("it was started anew and no longer has what this client stored there")]
    Restarted,
    #[error("its process is of user {}", .0.owner)]
    Stranger(Stranger),
    #[error("no descriptor is left in this process")]
    Descriptors,
    #[error("{0}")]
    Untrusted(Words),
    #[error("{0}")]
    Record(RecordError),
    #[error("the process that holds the certificate is gone, or opened it without one")]
    Unsecured,
}

/// A reason in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Words(Arc<str>);

impl Words {
    /// The longest reason in bytes; it is cut there.
    pub(crate) const LIMIT_BYTES: usize = 240;

    pub(crate) fn of(text: &str) -> Self {
        Words(text[..text.floor_char_boundary(Self::LIMIT_BYTES)].into())
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Time between two attempts where certificates are refused: each costs both ends a handshake, and
/// somebody has to replace a file in between.
const DISTRUST_PAUSE: Duration = Duration::from_millis(250);

impl From<Trouble> for DialError {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::System(errno) => DialError::Later(errno),
            Trouble::Record(error) => DialError::Record(error),
        }
    }
}

impl DialError {
    /// True if another attempt may succeed.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            DialError::Later(_) | DialError::Closed => true,
            // Our hello was damaged on its way.
            DialError::Refused(ErrorCode::BadFrame) => true,
            DialError::Record(error) => !matches!(error, RecordError::Alert(_)),
            DialError::Wire(error) => {
                !matches!(error, WireError::Version { .. } | WireError::Magic { .. })
            }
            _ => false,
        }
    }

    /// True if one end refuses the other's certificate.
    pub(crate) fn is_distrust(&self) -> bool {
        matches!(self, DialError::Untrusted(_) | DialError::Record(RecordError::Alert(_)))
    }

    /// Time to let pass before the next attempt.
    pub(crate) fn pause(&self) -> Duration {
        if self.is_distrust() { DISTRUST_PAUSE } else { sys::CONNECT_PAUSE }
    }

    pub(crate) fn of_connect(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED | Errno::NOENT | Errno::NOTSOCK => DialError::Gone(errno),
            Errno::ACCESS | Errno::PERM => DialError::Forbidden(errno),
            Errno::MFILE | Errno::NFILE => DialError::Descriptors,
            other => DialError::Later(other),
        }
    }

    /// The kernel's error, if there was one.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            DialError::Gone(errno) | DialError::Forbidden(errno) | DialError::Later(errno) => {
                *errno
            }
            // Trouble of the opening process (no descriptors, say), not of the asking one.
            _ => Errno::NOBUFS,
        }
    }
}

/// Opens a connection, which may be still connecting. The listener of a unix socket is checked once
/// it is connected, before anything is sent.
pub(crate) fn open(
    address: &Address,
    may_serve: impl Fn(&Stranger) -> bool,
) -> Result<OwnedFd, DialError> {
    let (Address::Unix(path) | Address::Shm(path)) = address else {
        let Address::Tcp(at) = address else { return Err(DialError::NotMeant) };
        return sys::connect_tcp(at).map_err(DialError::of_connect);
    };
    let socket = sys::connect_unix(path).map_err(DialError::of_connect)?;
    match peer::stranger(socket.as_fd(), path).map_err(DialError::Later)? {
        Some(stranger) if !may_serve(&stranger) => Err(DialError::Stranger(stranger)),
        _ => Ok(socket),
    }
}
