//! A victim policy with a capacity round it: the code that the pager's policies are judged by.

use super::PageCache;
use crate::victim::VictimPolicy;

/// Evicts when it is full, one page for one page.
#[derive(Debug)]
pub struct Resident<P> {
    policy: P,
    capacity: usize,
}

impl<P: VictimPolicy> Resident<P> {
    /// Room for `capacity` pages, chosen among by `policy`, which must be empty.
    pub fn new(policy: P, capacity: usize) -> Self {
        debug_assert!(policy.is_empty(), "a policy that knows pages already");
        Self { policy, capacity }
    }
}

impl<P: VictimPolicy> PageCache for Resident<P> {
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.policy.contains(page) {
            self.policy.touch(page);
            return true;
        }
        if self.policy.len() == self.capacity
            && let Some(victim) = self.policy.victim()
        {
            left(victim);
        }
        self.policy.insert(page);
        false
    }

    fn len(&self) -> usize {
        self.policy.len()
    }
}
