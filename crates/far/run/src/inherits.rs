//! Which child of which sidecar a process was before it got a sidecar of its own.

use farpool_inject::Pid;

/// A child that was ceded and that its own sidecar does not serve yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inherits {
    /// The sidecar that served it.
    pub(crate) from: Pid,
    /// Its number there.
    pub(crate) number: u64,
}

impl Inherits {
    /// True if it is this child of this sidecar.
    pub fn is(self, from: Pid, number: u64) -> bool {
        (self.from, self.number) == (from, number)
    }
}
