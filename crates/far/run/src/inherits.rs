//! Which child of which sidecar a process was that has a sidecar of its own.

use farpool_inject::Pid;

/// A child that was ceded, and whose own sidecar does not serve it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inherits {
    /// The sidecar that served it.
    pub(crate) from: Pid,
    /// Its number there.
    pub(crate) number: u64,
}

impl Inherits {
    /// Whether it is this child of this sidecar.
    pub fn is(self, from: Pid, number: u64) -> bool {
        (self.from, self.number) == (from, number)
    }
}
