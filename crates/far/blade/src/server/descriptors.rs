//! Descriptors of this process: each segment and each connection takes one.

use farpool_kernel::raise_to_maximum;
use rustix::process::{Resource, Rlimit, getrlimit};

/// Raises the soft limit on open descriptors (often 1024) to the hard one, which needs no
/// privilege. A program that starts others afterwards restores their limit itself.
pub(super) fn raise_limit() {
    raise_to_maximum(Resource::Nofile);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        tracing::warn!(?current, ?maximum, "the limit on open descriptors stays as it is");
    }
}
