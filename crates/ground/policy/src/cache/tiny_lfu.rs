//! W-TinyLFU (Einziger, Friedman, Manes, ACM ToS 2017): pages pass through a small LRU window, and
//! those that leave it are admitted to the main part only if a sketch has seen them more often than
//! the page they would displace.

use super::sketch::Sketch;
use super::slru::Segments;
use super::{PageCache, checked_capacity, part, percent};
use crate::list::IndexList;

/// The window's percentage of the capacity; the rest is the main part.
pub const TINY_LFU_WINDOW_PERCENT: u32 = 1;

/// The main part is a segmented LRU: the percentage of it that is on probation.
pub const TINY_LFU_PROBATION_PERCENT: u32 = 20;

/// Hits in the main part, per page of it, after which the sketch halves its counts.
pub const TINY_LFU_SAMPLE_PER_PAGE: u64 = 32;

/// Evicts the page at the window's end or the main part's next victim, whichever was seen less. 17
/// bytes per page and 58 per page of capacity.
///
/// Once the main part is full, each new page evicts one: of the two compared, the one that was seen
/// less.
#[derive(Debug)]
pub struct TinyLfu {
    window: IndexList,
    main: Segments<2>,
    sketch: Sketch,
    /// Hits in the main part until the sketch ages.
    until_halved: u64,
    capacity: u32,
}

impl TinyLfu {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let main = Self::main_capacity(capacity);
        let probation = part(main, TINY_LFU_PROBATION_PERCENT);
        // If probation has room for no page, none can be promoted, and the main part is one queue.
        let rooms = match probation {
            0 => [main, 0],
            _ => [probation, part(main, 100 - TINY_LFU_PROBATION_PERCENT)],
        };
        Self {
            window: IndexList::new(page_count),
            main: Segments::new(page_count, main, rooms),
            sketch: Sketch::new(main),
            until_halved: Self::sample(main),
            capacity,
        }
    }

    fn main_capacity(capacity: u32) -> u32 {
        capacity - percent(capacity, TINY_LFU_WINDOW_PERCENT)
    }

    fn sample(main: u32) -> u64 {
        (u64::from(main) * TINY_LFU_SAMPLE_PER_PAGE).max(1)
    }

    /// Returns the bytes of the sketch, which depend on the capacity alone.
    pub(super) fn sketch_bytes(capacity: u32) -> u64 {
        4 * u64::from(Sketch::width(Self::main_capacity(capacity.max(1))))
    }

    fn age(&mut self) {
        self.until_halved -= 1;
        if self.until_halved == 0 {
            self.sketch.halve();
            self.until_halved = Self::sample(self.main.capacity);
        }
    }

    fn evict(&mut self, left: &mut impl FnMut(u32)) {
        while let Some(candidate) = self.window.pop_back() {
            let is_full = self.main.len == self.main.capacity;
            if is_full {
                let seen = self.sketch.estimate(candidate);
                let other = self.main.next_victim();
                if other.is_some_and(|other| seen > self.sketch.estimate(other)) {
                    self.main.evict().into_iter().for_each(&mut *left);
                    self.main.insert(candidate);
                } else {
                    left(candidate);
                }
            } else {
                self.main.insert(candidate);
            }
            self.sketch.add(candidate);
            if is_full {
                return;
            }
        }
        self.main.evict().into_iter().for_each(left);
    }
}

impl PageCache for TinyLfu {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.window.move_to_front(page) {
            return true;
        }
        if self.main.reference(page, left) {
            self.sketch.add(page);
            self.age();
            return true;
        }
        if self.len() == self.capacity as usize {
            self.evict(left);
        }
        self.window.push_front(page);
        self.sketch.add(page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        self.window.contains(page) || self.main.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.window.remove(page) || self.main.remove(page)
    }

    fn len(&self) -> usize {
        (self.window.len() + self.main.len) as usize
    }
}
