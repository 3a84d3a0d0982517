//! 2Q (Johnson, Shasha, VLDB 1994), the full version: a page must be referenced again after it left
//! a first queue before it is kept as a frequently used one.

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity, percent};
use crate::ranking::Ranking;
use crate::tables::Renumber;

/// The percentage of the capacity for pages of the first queue (the paper's Kin).
pub const TWO_Q_FIRST_PERCENT: u32 = 25;

/// Pages remembered after they left the first queue, in percent of the capacity (Kout).
pub const TWO_Q_GHOST_PERCENT: u32 = 50;

/// In order of arrival; a reference here moves nothing.
const FIRST: u8 = 1;
/// Not resident; remembered in the order in which they left `FIRST`.
const GHOST: u8 = 2;
/// In order of last use.
const OFTEN: u8 = 3;

/// Evicts from the first queue while that exceeds its share, else the least recently used of the
/// pages that were referenced again. 9 bytes per page.
#[derive(Debug)]
pub struct TwoQ {
    queues: Lists<3>,
    first_max: u32,
    ghost_max: u32,
    capacity: u32,
}

impl TwoQ {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let queues = Lists::new(page_count);
        let mut cache = Self { queues, first_max: 0, ghost_max: 0, capacity: 0 };
        cache.divide(capacity);
        cache
    }

    /// Gives each queue its share of the capacity.
    fn divide(&mut self, capacity: u32) {
        self.first_max = percent(capacity, TWO_Q_FIRST_PERCENT);
        self.ghost_max = percent(capacity, TWO_Q_GHOST_PERCENT);
        self.capacity = capacity;
    }

    fn resident(&self) -> u32 {
        self.queues.len(FIRST) + self.queues.len(OFTEN)
    }

    fn evict(&mut self, forgot: &mut impl FnMut(u32)) -> Option<u32> {
        if self.queues.len(FIRST) <= self.first_max
            && let Some(victim) = self.queues.pop_back(OFTEN)
        {
            return Some(victim);
        }
        let victim = self.queues.pop_back(FIRST)?;
        self.forget_ghosts(self.ghost_max - 1, forgot);
        self.queues.push_front(GHOST, victim);
        Some(victim)
    }

    fn forget_ghosts(&mut self, kept: u32, forgot: &mut impl FnMut(u32)) {
        while self.queues.len(GHOST) > kept
            && let Some(ghost) = self.queues.pop_back(GHOST)
        {
            forgot(ghost);
        }
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
            && let Some(victim) = self.evict(&mut |_| {})
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

impl Renumber for TwoQ {
    fn rename(&mut self, from: u32, to: u32) {
        self.queues.rename(from, to);
    }

    fn resize(&mut self, page_count: usize) {
        self.queues.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.queues.bytes()
    }
}

impl Ranking for TwoQ {
    fn insert(&mut self, page: u32, _: u32, _: &mut Vec<u32>) {
        let came_back = self.queues.remove(page) == GHOST;
        self.queues.push_front(if came_back { OFTEN } else { FIRST }, page);
        if self.resident() > self.capacity {
            self.divide(self.resident());
        }
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        let place = self.queues.place(page);
        if place == OFTEN {
            self.queues.move_to_front(OFTEN, page);
        }
        matches!(place, FIRST | OFTEN)
    }

    fn victim(&mut self, forgotten: &mut Vec<u32>) -> Option<u32> {
        self.evict(&mut |ghost| forgotten.push(ghost))
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        PageCache::remove(self, page)
    }

    fn set_capacity(&mut self, capacity: u32, forgotten: &mut Vec<u32>) {
        self.divide(capacity.max(self.resident()).max(1));
        self.forget_ghosts(self.ghost_max, &mut |ghost| forgotten.push(ghost));
    }

    fn contains(&self, page: u32) -> bool {
        PageCache::contains(self, page)
    }

    fn knows(&self, page: u32) -> bool {
        self.queues.place(page) != NOWHERE
    }

    fn len(&self) -> usize {
        self.resident() as usize
    }
}
