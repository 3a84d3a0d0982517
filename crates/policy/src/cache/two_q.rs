//! 2Q (Johnson, Shasha, VLDB 1994), the full version: a page must come back after it has left a first
//! queue before it is kept as one that is used often.

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity, percent};

/// The percentage of the capacity for pages that came once (the paper's Kin).
pub const TWO_Q_FIRST_PERCENT: u32 = 25;

/// How many pages that left the first queue are remembered, in percent of the capacity (Kout).
pub const TWO_Q_GHOST_PERCENT: u32 = 50;

/// In the order of arrival; a reference here moves nothing.
const FIRST: u8 = 1;
/// Not resident; remembered in the order in which they left `FIRST`.
const GHOST: u8 = 2;
/// Least recently used.
const OFTEN: u8 = 3;

/// Evicts from the first queue while that has more than its share, else the least recently used of
/// those that came back. 9 bytes per page.
#[derive(Debug)]
pub struct TwoQ {
    queues: Lists<3>,
    first_max: u32,
    ghost_max: u32,
    capacity: u32,
}

impl TwoQ {
    /// `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        Self {
            queues: Lists::new(page_count),
            first_max: percent(capacity, TWO_Q_FIRST_PERCENT),
            ghost_max: percent(capacity, TWO_Q_GHOST_PERCENT),
            capacity,
        }
    }

    fn resident(&self) -> u32 {
        self.queues.len(FIRST) + self.queues.len(OFTEN)
    }

    fn evict(&mut self) -> Option<u32> {
        if self.queues.len(FIRST) <= self.first_max
            && let Some(victim) = self.queues.pop_back(OFTEN)
        {
            return Some(victim);
        }
        let victim = self.queues.pop_back(FIRST)?;
        if self.queues.len(GHOST) == self.ghost_max {
            self.queues.pop_back(GHOST);
        }
        self.queues.push_front(GHOST, victim);
        Some(victim)
    }
}

impl PageCache for TwoQ {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        let came_back = match self.queues.place(page) {
            FIRST => return true,
            OFTEN => {
                self.queues.move_to_front(OFTEN, page);
                return true;
            }
            ghost_or_nowhere => ghost_or_nowhere == GHOST,
        };
        self.queues.remove(page);
        if self.resident() == self.capacity
            && let Some(victim) = self.evict()
        {
            left(victim);
        }
        self.queues.push_front(if came_back { OFTEN } else { FIRST }, page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        matches!(self.queues.place(page), FIRST | OFTEN)
    }

    fn remove(&mut self, page: u32) -> bool {
        let was = self.queues.remove(page);
        was != NOWHERE && was != GHOST
    }

    fn len(&self) -> usize {
        self.resident() as usize
    }
}
