//! When a blade is given up long before the deadline, because what it has is also elsewhere.
//!
//! One blade at a time: who gives it up takes the permission, which is given again once everything
//! has its copies. So a network that fails on this side costs one blade, and never the last copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a blade may be silent that can be spared. Pauses of a busy machine and a lost packet
/// that is sent again are shorter, and a program notices no second.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_millis(800);
/// How long the network may refuse to reach it: a process that ended does not come back sooner, nor
/// with what it had.
pub(crate) const REFUSED_LIMIT: Duration = Duration::from_millis(100);

/// Whether a blade may be given up early; of all blades of a client.
#[derive(Clone, Debug, Default)]
pub struct Spare(Arc<AtomicBool>);

impl Spare {
    /// Every superpage has all its copies, or not.
    pub fn set(&self, has_copies: bool) {
        self.0.store(has_copies, Ordering::Release);
    }

    /// True while it does.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// True for the one who may give something up of which there are copies.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_blade_is_given_up_until_everything_has_its_copies_again() {
        let spare = Spare::default();
        let other = spare.clone();
        assert!(!spare.take(), "nothing has copies");
        spare.set(true);
        assert!(other.is_set() && other.take());
        assert!(!spare.take() && !spare.is_set());
        other.set(true);
        assert!(spare.take());
    }
}
