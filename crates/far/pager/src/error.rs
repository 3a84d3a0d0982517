//! Why the pager cannot work in a process.

use farpool_board::BoardError;
use farpool_pool::PoolError;
use farpool_uffd::OpenError;

/// Why the pager cannot work in this process.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Board(#[from] BoardError),
    #[error(transparent)]
    Userfaultfd(#[from] OpenError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("{0}")]
    Address(String),
    #[error(
        "/proc/self/{file} cannot be opened ({error}): the process has changed its user, or has \
         forbidden looking into it (PR_SET_DUMPABLE), and forked after that; run farpool as the \
         user that the process changes to"
    )]
    Hidden { file: &'static str, error: std::io::Error },
    #[error(
        "there is no /proc/self/{file} in the root directory of the process (chroot), and the \
         pager needs it; mount /proc there (mount -t proc proc ROOT/proc)"
    )]
    NoProc { file: &'static str },
    #[error("the kernel refused local memory or a thread to the pager: {0}")]
    Kernel(#[from] std::io::Error),
    #[error("more processes than a run can have ({} at a time)", farpool_board::MAX_SLOTS)]
    TooManyProcesses,
    #[error(
        "the file system of the run's board (/run/farpool, $XDG_RUNTIME_DIR/farpool or /tmp) has \
         no room for another process; free some space on it (df)"
    )]
    NoRoom,
}

impl StartError {
    pub(crate) fn is_lack_of_descriptors(&self) -> bool {
        let error = match self {
            StartError::Kernel(error)
            | StartError::Userfaultfd(OpenError::Denied { device: error, .. }) => error,
            _ => return false,
        };
        error.raw_os_error() == Some(libc::EMFILE)
    }

    pub(crate) fn of_process(file: &'static str, error: std::io::Error) -> StartError {
        match error.kind() {
            std::io::ErrorKind::PermissionDenied => StartError::Hidden { file, error },
            std::io::ErrorKind::NotFound => StartError::NoProc { file },
            _ => StartError::Kernel(error),
        }
    }
}
