//! What can go wrong while measuring.

use std::io;

/// Why a measurement could not be made. A row that only lacks something on this machine is not an
/// error but a skipped row.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Memory came back different from what was written: the one unforgivable result.
    #[error("workload {workload} read wrong data: {detail}")]
    WrongData {
        /// Name of the workload.
        workload: &'static str,
        /// Where, and what was expected.
        detail: String,
    },
    /// Something this machine does not have or does not permit: the row is skipped.
    #[error("{0}")]
    Lacking(String),
    /// The user ended the measurement (SIGINT, SIGTERM).
    #[error("interrupted; what was set up has been taken down")]
    Interrupted,
    /// Arguments that are not valid.
    #[error("{0}")]
    Arguments(String),
    /// A call of the operating system failed.
    #[error("cannot {action}: {source}")]
    Os {
        /// What was tried.
        action: String,
        /// The error that the system returned.
        source: io::Error,
    },
    /// A program that was started did not do its work.
    #[error("{program} failed: {detail}")]
    Program {
        /// Its command line, shortened.
        program: String,
        /// Exit status and the end of what it wrote to stderr.
        detail: String,
    },
    /// A program was not done in time and was ended.
    #[error("{program} was not done after {seconds:.0} s")]
    TooSlow {
        /// What it was and where.
        program: String,
        /// The time it was given.
        seconds: f64,
    },
    /// A program was killed (SIGKILL).
    #[error("{program} was killed")]
    Killed {
        /// What it was and where.
        program: String,
    },
    /// The kernel killed a program under a limit of its own: it found nothing more to reclaim.
    #[error("{program} was killed by the kernel: out of memory under its limit, with free swap")]
    OutOfMemory {
        /// What it was and where.
        program: String,
    },
    /// A file of results could not be understood.
    #[error("{path} does not hold results of farpool bench: {source}")]
    Results {
        /// The file.
        path: String,
        /// Where and why it cannot be parsed.
        source: serde_json::Error,
    },
}

impl BenchError {
    /// For `map_err`: the system refused `action`.
    pub(crate) fn os(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Os { action, source }
    }
}
