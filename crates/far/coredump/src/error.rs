//! Why there is no core. Each message names the cause and the remedy.

use std::io::Error;
use std::path::PathBuf;

use farpool_inject::InjectError;

/// Why there is no core; no partial file is left.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    #[error(transparent)]
    Halt(#[from] InjectError),
    #[error("there is no process {pid}; it may have ended")]
    NoProcess { pid: u32 },
    #[error("process {pid} is this farpool itself; give the process whose core is wanted")]
    Oneself { pid: u32 },
    #[error(
        "the memory of process {pid} may not be read; run as root or with CAP_SYS_PTRACE, or as \
         the same user with kernel.yama.ptrace_scope=0"
    )]
    NotPermitted { pid: u32 },
    #[error("process {pid} ended while its core was written; the part that was there is removed")]
    Ended { pid: u32 },
    #[error("{path} is there already; remove it, or give another name")]
    Exists { path: PathBuf },
    #[error(
        "{path} cannot be made: {error}; give a file in a folder that is there and that you may \
         write to"
    )]
    NotMade { path: PathBuf, error: Error },
    #[error(
        "no room for {path} after {} MiB; what was written is removed. Free some space there, or \
         give a file on a larger file system (df shows which)",
        written_bytes >> 20
    )]
    NoRoom { path: PathBuf, written_bytes: u64 },
    #[error("{path} cannot be written: {error}; what was written is removed")]
    NotWritten { path: PathBuf, error: Error },
    #[error("{what} of process {pid} cannot be read: {error}")]
    NotRead { pid: u32, what: &'static str, error: Error },
    #[error("told to end; what was written is removed")]
    Cancelled,
}
