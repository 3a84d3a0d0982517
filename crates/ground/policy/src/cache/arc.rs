//! ARC (Megiddo, Modha, FAST 2003): two LRU queues, of pages seen once and seen again, whose
//! balance follows the hits on pages that recently left either.

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity};
use crate::ranking::Ranking;
use crate::tables::Renumber;

/// Seen once since they entered (the paper's T1).
const ONCE: u8 = 1;
/// Seen again (T2).
const AGAIN: u8 = 2;
/// Evicted from `ONCE` (B1); not resident.
const ONCE_GHOST: u8 = 3;
/// Evicted from `AGAIN` (B2); not resident.
const AGAIN_GHOST: u8 = 4;

/// Remembers as many evicted pages as it holds. 9 bytes per page.
#[derive(Debug)]
pub struct Arc {
    queues: Lists<4>,
    /// Target size of `ONCE`, the paper's p: a number of pages, but moved by fractions.
    once_wanted: f64,
    capacity: u32,
}

impl Arc {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        Self {
            queues: Lists::new(page_count),
            once_wanted: 0.0,
            capacity: checked_capacity(capacity),
        }
    }

    fn resident(&self) -> u32 {
        self.queues.len(ONCE) + self.queues.len(AGAIN)
    }

    /// Adapts the target: a page that was evicted too early shows which side was too small.
    fn adapt(&mut self, ghost: u8) {
        let once = f64::from(self.queues.len(ONCE_GHOST));
        let again = f64::from(self.queues.len(AGAIN_GHOST));
        self.once_wanted = if ghost == ONCE_GHOST {
            (self.once_wanted + (again / once).max(1.0)).min(f64::from(self.capacity))
        } else {
            (self.once_wanted - (once / again).max(1.0)).max(0.0)
        };
    }

    /// Evicts from the side that exceeds its target; `ghost` is where the new page was.
    fn replace(&mut self, ghost: u8) -> Option<u32> {
        let once = f64::from(self.queues.len(ONCE));
        let tie = ghost == AGAIN_GHOST && once >= self.once_wanted;
        let from_once = once > 0.0 && (once > self.once_wanted || tie);
        let (from, to) = if from_once || self.queues.len(AGAIN) == 0 {
            (ONCE, ONCE_GHOST)
        } else {
            (AGAIN, AGAIN_GHOST)
        };
        let victim = self.queues.pop_back(from)?;
        self.queues.push_front(to, victim);
        Some(victim)
    }

    /// Evicts for an unknown page, and drops the oldest ghost when there are enough.
    fn evict_for_stranger(&mut self) -> Option<u32> {
        let seen_once = self.queues.len(ONCE) + self.queues.len(ONCE_GHOST);
        let seen_again = self.queues.len(AGAIN) + self.queues.len(AGAIN_GHOST);
        if seen_once >= self.capacity {
            if self.queues.pop_back(ONCE_GHOST).is_none() {
                return self.queues.pop_back(ONCE);
            }
        } else if u64::from(seen_once) + u64::from(seen_again) >= 2 * u64::from(self.capacity) {
            self.queues.pop_back(AGAIN_GHOST);
        }
        self.replace(NOWHERE)
    }

    /// Drops the oldest ghosts beyond the paper's number at this capacity.
    fn forget_ghosts(&mut self, forgotten: &mut Vec<u32>) {
        let capacity = u64::from(self.capacity);
        let seen_once =
            |queues: &Lists<4>| u64::from(queues.len(ONCE)) + u64::from(queues.len(ONCE_GHOST));
        let seen_again =
            |queues: &Lists<4>| u64::from(queues.len(AGAIN)) + u64::from(queues.len(AGAIN_GHOST));
        while seen_once(&self.queues) > capacity
            && let Some(ghost) = self.queues.pop_back(ONCE_GHOST)
        {
            forgotten.push(ghost);
        }
        while seen_once(&self.queues) + seen_again(&self.queues) > 2 * capacity
            && let Some(ghost) = self.queues.pop_back(AGAIN_GHOST)
        {
            forgotten.push(ghost);
        }
    }
}

impl PageCache for Arc {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        let place = self.queues.place(page);
        let full = self.resident() == self.capacity;
        let (victim, enters) = match place {
            ONCE | AGAIN => {
                self.queues.move_to_front(AGAIN, page);
                return true;
            }
            ONCE_GHOST | AGAIN_GHOST => {
                self.adapt(place);
                self.queues.remove(page);
                (if full { self.replace(place) } else { None }, AGAIN)
            }
            _ => (if full { self.evict_for_stranger() } else { None }, ONCE),
        };
        if let Some(victim) = victim {
            left(victim);
        }
        self.queues.push_front(enters, page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        matches!(self.queues.place(page), ONCE | AGAIN)
    }

    fn remove(&mut self, page: u32) -> bool {
        matches!(self.queues.remove(page), ONCE | AGAIN)
    }

    fn len(&self) -> usize {
        self.resident() as usize
    }
}

impl Renumber for Arc {
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

impl Ranking for Arc {
    fn insert(&mut self, page: u32, _: u32, forgotten: &mut Vec<u32>) {
        let place = self.queues.place(page);
        let came_back = matches!(place, ONCE_GHOST | AGAIN_GHOST);
        if came_back {
            self.adapt(place);
            self.queues.remove(page);
        }
        self.queues.push_front(if came_back { AGAIN } else { ONCE }, page);
        self.capacity = self.capacity.max(self.resident());
        self.forget_ghosts(forgotten);
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        let is_resident = PageCache::contains(self, page);
        if is_resident {
            self.queues.move_to_front(AGAIN, page);
        }
        is_resident
    }

    fn victim(&mut self, _: &mut Vec<u32>) -> Option<u32> {
        self.replace(NOWHERE)
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        PageCache::remove(self, page)
    }

    fn set_capacity(&mut self, capacity: u32, forgotten: &mut Vec<u32>) {
        self.capacity = capacity.max(self.resident()).max(1);
        self.once_wanted = self.once_wanted.min(f64::from(self.capacity));
        self.forget_ghosts(forgotten);
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
