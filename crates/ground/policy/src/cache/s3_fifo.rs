//! S3-FIFO (Yang et al., SOSP 2023): a small queue filters out pages that are referenced once, a
//! main queue gives referenced pages further rounds, and pages that the small queue dropped are
//! remembered for a while.

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity, percent};
use crate::ranking::Ranking;
use crate::tables::{Renumber, resize_exactly, table_bytes};

/// The small queue's percentage of the capacity.
pub const S3_FIFO_SMALL_PERCENT: u32 = 10;

/// Pages remembered after they left the small queue, in percent of the capacity.
pub const S3_FIFO_GHOST_PERCENT: u32 = 90;

/// References in the small queue that promote a page to the main queue.
pub const S3_FIFO_PROMOTION_REFERENCES: u8 = 2;

/// The most references counted: a page gets this many more rounds in the main queue.
const REFERENCES_MAX: u8 = 3;

const SMALL: u8 = 1;
const MAIN: u8 = 2;
const GHOST: u8 = 3;

/// Evicts from the small queue, but from the main queue while that exceeds its share. 10 bytes per
/// page.
///
/// Until the first page leaves, the main queue also takes pages that find the small one full.
#[derive(Debug)]
pub struct S3Fifo {
    queues: Lists<3>,
    references: Vec<u8>,
    small_max: u32,
    main_max: u32,
    ghost_max: u32,
    capacity: u32,
    has_evicted: bool,
}

impl S3Fifo {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let mut cache = Self {
            queues: Lists::new(page_count),
            references: vec![0; page_count],
            small_max: 0,
            main_max: 0,
            ghost_max: 0,
            capacity: 0,
            has_evicted: false,
        };
        cache.divide(capacity);
        cache
    }

    /// Gives each queue its share of the capacity.
    fn divide(&mut self, capacity: u32) {
        self.small_max = percent(capacity, S3_FIFO_SMALL_PERCENT);
        self.main_max = capacity - self.small_max;
        self.ghost_max = percent(capacity, S3_FIFO_GHOST_PERCENT);
        self.capacity = capacity;
    }

    #[inline]
    fn reference(&mut self, page: u32) -> bool {
        let is_resident = matches!(self.queues.place(page), SMALL | MAIN);
        if is_resident {
            let references = &mut self.references[page as usize];
            *references = (*references + 1).min(REFERENCES_MAX);
        }
        is_resident
    }

    fn resident(&self) -> u32 {
        self.queues.len(SMALL) + self.queues.len(MAIN)
    }

    fn evict(&mut self, forgot: &mut impl FnMut(u32)) -> Option<u32> {
        self.has_evicted = true;
        if self.queues.len(MAIN) <= self.main_max
            && let Some(victim) = self.evict_from_small(forgot)
        {
            return Some(victim);
        }
        self.evict_from_main()
    }

    /// Evicts as usual, or from the small queue if the main queue is empty.
    fn evict_on_demand(&mut self, forgot: &mut impl FnMut(u32)) -> Option<u32> {
        self.evict(forgot).or_else(|| self.evict_from_small(forgot))
    }

    fn forget_ghosts(&mut self, kept: u32, forgot: &mut impl FnMut(u32)) {
        while self.queues.len(GHOST) > kept
            && let Some(ghost) = self.queues.pop_back(GHOST)
        {
            forgot(ghost);
        }
    }

    fn take_in(&mut self, page: u32) {
        let came_back = self.queues.remove(page) == GHOST;
        let small_has_room = self.has_evicted || self.queues.len(SMALL) < self.small_max;
        let enters = if came_back || !small_has_room { MAIN } else { SMALL };
        self.references[page as usize] = 0;
        self.queues.push_front(enters, page);
    }

    /// Evicts from the small queue. None if all its pages had earned promotion to the main queue.
    fn evict_from_small(&mut self, forgot: &mut impl FnMut(u32)) -> Option<u32> {
        while let Some(page) = self.queues.pop_back(SMALL) {
            let earned = self.references[page as usize] >= S3_FIFO_PROMOTION_REFERENCES;
            self.references[page as usize] = 0;
            if earned {
                self.queues.push_front(MAIN, page);
                continue;
            }
            self.forget_ghosts(self.ghost_max - 1, forgot);
            self.queues.push_front(GHOST, page);
            return Some(page);
        }
        None
    }

    /// Evicts from the main queue. Terminates: each page that is spared loses a reference.
    fn evict_from_main(&mut self) -> Option<u32> {
        loop {
            let page = self.queues.pop_back(MAIN)?;
            let references = &mut self.references[page as usize];
            if *references == 0 {
                return Some(page);
            }
            *references -= 1;
            self.queues.push_front(MAIN, page);
        }
    }
}

impl PageCache for S3Fifo {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.reference(page) {
            return true;
        }
        let place = self.queues.place(page);
        self.queues.remove(page);
        if self.resident() == self.capacity
            && let Some(victim) = self.evict(&mut |_| {})
        {
            left(victim);
        }
        let small_has_room = self.has_evicted || self.queues.len(SMALL) < self.small_max;
        let enters = if place == GHOST || !small_has_room { MAIN } else { SMALL };
        self.references[page as usize] = 0;
        self.queues.push_front(enters, page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        matches!(self.queues.place(page), SMALL | MAIN)
    }

    fn remove(&mut self, page: u32) -> bool {
        matches!(self.queues.remove(page), SMALL | MAIN)
    }

    fn len(&self) -> usize {
        self.resident() as usize
    }
}

impl Renumber for S3Fifo {
    fn rename(&mut self, from: u32, to: u32) {
        self.queues.rename(from, to);
        self.references[to as usize] = self.references[from as usize];
    }

    fn resize(&mut self, page_count: usize) {
        self.queues.resize(page_count);
        resize_exactly(&mut self.references, page_count, 0);
    }

    fn bytes(&self) -> usize {
        self.queues.bytes() + table_bytes(&self.references)
    }
}

impl Ranking for S3Fifo {
    fn insert(&mut self, page: u32, _: u32, _: &mut Vec<u32>) {
        if self.resident() >= self.capacity {
            self.divide(self.resident() + 1);
        }
        self.take_in(page);
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        self.reference(page)
    }

    fn victim(&mut self, forgotten: &mut Vec<u32>) -> Option<u32> {
        self.evict_on_demand(&mut |ghost| forgotten.push(ghost))
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
