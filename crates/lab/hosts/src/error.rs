//! Why hosts could not be made or used.

use std::io;

/// Why hosts could not be made or used on this machine.
#[derive(Debug, thiserror::Error)]
pub enum HostsError {
    /// Something this machine does not have or does not permit.
    #[error("{0}")]
    Lacking(String),
    /// More hosts than there are addresses or interface names for, or too few.
    #[error("{asked} hosts cannot be wired like that: {reason}")]
    Count {
        /// How many were asked for.
        asked: usize,
        /// The obstacle.
        reason: &'static str,
    },
    /// A call of the operating system failed.
    #[error("cannot {action}: {source}")]
    Os {
        /// The attempted step.
        action: String,
        /// What the system said.
        source: io::Error,
    },
    /// `ip` refused a step.
    #[error("`ip` cannot {action}: {said}")]
    Ip {
        /// The attempted step.
        action: String,
        /// What it said.
        said: String,
    },
}

impl HostsError {
    /// For `map_err`: which action failed.
    pub(crate) fn os(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Os { action, source }
    }
}
