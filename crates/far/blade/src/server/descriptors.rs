//! Descriptors of this process: each segment and each connection takes one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open descriptors (often 1024) to the hard one, which needs no
/// privilege. A program that starts others afterwards restores their limit itself.
pub(super) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    let raised = Rlimit { current: maximum, maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?current, ?maximum, "the limit on open descriptors stays as it is");
    }
}
