//! Descriptors of this process: a segment costs one, a connection another.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open descriptors (often 1024) to the hard one, which needs no right. A
/// program that starts others afterwards sets their limit back itself.
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
