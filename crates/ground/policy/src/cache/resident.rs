//! A cache of fixed size around a victim policy: the same code that chooses a program's victims.

use super::PageCache;
use crate::victim::VictimPolicy;

/// Holds at most its capacity; a page that enters a full cache replaces the policy's victim.
#[derive(Debug)]
pub struct Resident<P> {
    policy: P,
    free: usize,
}

impl<P: VictimPolicy> Resident<P> {
    /// Creates a cache of `capacity` pages under an empty `policy`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(policy: P, capacity: usize) -> Self {
        assert!(capacity > 0, "a cache holds 1 page or more");
        debug_assert!(policy.is_empty(), "a policy that knows pages already");
        Self { policy, free: capacity }
    }

    /// Returns the policy, for its counts.
    #[must_use]
    pub fn policy(&self) -> &P {
        &self.policy
    }
}

impl<P: VictimPolicy> PageCache for Resident<P> {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.policy.touch(page) {
            return true;
        }
        if self.free > 0 {
            self.free -= 1;
        } else if let Some(victim) = self.policy.victim() {
            left(victim);
        }
        self.policy.insert(page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        self.policy.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        let was = self.policy.remove(page);
        self.free += usize::from(was);
        was
    }

    fn len(&self) -> usize {
        self.policy.len()
    }
}
