//! S3-FIFO (Yang et al., SOSP 2023): a small queue sifts out pages that come once, a main queue gives
//! referenced pages further rounds, and those that the small queue dropped are remembered for a while.

use super::lists::Lists;
use super::{PageCache, checked_capacity, percent};

/// The small queue's percentage of the capacity.
pub const S3_FIFO_SMALL_PERCENT: u32 = 10;

/// How many pages that left the small queue are remembered, in percent of the capacity.
pub const S3_FIFO_GHOST_PERCENT: u32 = 90;

/// References in the small queue that take a page to the main queue.
pub const S3_FIFO_PROMOTION_REFERENCES: u8 = 2;

/// References that are counted at most: so many rounds more a page gets in the main queue.
const REFERENCES_MAX: u8 = 3;

const SMALL: u8 = 1;
const MAIN: u8 = 2;
const GHOST: u8 = 3;

/// Evicts from the small queue, but from the main queue while that has more than its share.
/// 10 bytes per page.
///
/// Until the first page leaves, the main queue also takes what finds the small one full.
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
    /// `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let small_max = percent(capacity, S3_FIFO_SMALL_PERCENT);
        Self {
            queues: Lists::new(page_count),
            references: vec![0; page_count],
            small_max,
            main_max: capacity - small_max,
            ghost_max: percent(capacity, S3_FIFO_GHOST_PERCENT),
            capacity,
            has_evicted: false,
        }
    }

    fn resident(&self) -> u32 {
        self.queues.len(SMALL) + self.queues.len(MAIN)
    }

    fn evict(&mut self) -> Option<u32> {
        self.has_evicted = true;
        if self.queues.len(MAIN) <= self.main_max
            && let Some(victim) = self.evict_from_small()
        {
            return Some(victim);
        }
        self.evict_from_main()
    }

    /// None when every page of the small queue had earned its way to the main queue.
    fn evict_from_small(&mut self) -> Option<u32> {
        while let Some(page) = self.queues.pop_back(SMALL) {
            let earned = self.references[page as usize] >= S3_FIFO_PROMOTION_REFERENCES;
            self.references[page as usize] = 0;
            if earned {
                self.queues.push_front(MAIN, page);
                continue;
            }
            if self.queues.len(GHOST) == self.ghost_max {
                self.queues.pop_back(GHOST);
            }
            self.queues.push_front(GHOST, page);
            return Some(page);
        }
        None
    }

    /// Ends: each page that is spared loses a reference.
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
        let place = self.queues.place(page);
        if matches!(place, SMALL | MAIN) {
            let references = &mut self.references[page as usize];
            *references = (*references + 1).min(REFERENCES_MAX);
            return true;
        }
        self.queues.remove(page);
        if self.resident() == self.capacity
            && let Some(victim) = self.evict()
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
