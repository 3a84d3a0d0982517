//! The server of a connection, its requests under way, and why a run ends early.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use farpool_keyvault::frame::FrameError;
use rustix::io::Errno;

use super::reply::Wrong;
use super::request::Expected;

/// The address that a server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Server {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot connect to {server}: {source}; is the server running?")]
    Connect { server: Server, source: std::io::Error },
    #[error("the server closed a connection")]
    Closed,
    #[error("a connection to the server: {0}")]
    Io(#[from] Errno),
    #[error("the server does not speak KeyVault here ({0}); give the address of its --keyvault")]
    Greeting(String),
    #[error("an answer of the server: {0}")]
    Frame(#[from] FrameError),
    #[error("the server answered request {0}, which is not under way")]
    Unasked(u32),
    #[error(transparent)]
    Wrong(#[from] Wrong),
    #[error("the server did not answer within {0:?}")]
    Silent(Duration),
    #[error("a thread cannot start: {0}")]
    Thread(std::io::Error),
    #[error("a thread of the client panicked")]
    Panicked,
}

/// A request under way: its expected reply, and its start for latencies, in ns of the run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) expected: Expected,
    pub(super) begin_ns: u64,
}
