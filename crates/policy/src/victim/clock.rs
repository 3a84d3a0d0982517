//! Second chance. The ring and hand of the textbook, kept as a queue: the page under the hand is
//! the back, and a spared page goes to the front, where the hand comes to it last.

use super::VictimPolicy;
use crate::{bits::BitSet, list::IndexList};

/// Evicts in the order of arrival, sparing each referenced page once.
#[derive(Debug)]
pub struct Clock {
    ring: IndexList,
    referenced: BitSet,
}

impl Clock {
    /// For pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { ring: IndexList::new(page_count), referenced: BitSet::new(page_count) }
    }
}

impl VictimPolicy for Clock {
    fn insert(&mut self, page: u32) {
        if self.ring.contains(page) {
            self.referenced.set(page);
        } else {
            self.ring.push_front(page);
        }
    }

    fn touch(&mut self, page: u32) {
        if self.ring.contains(page) {
            self.referenced.set(page);
        }
    }

    fn contains(&self, page: u32) -> bool {
        self.ring.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.referenced.clear(page);
        self.ring.remove(page)
    }

    // Ends: every spared page loses its mark, so the second lap at the latest finds a victim.
    fn victim(&mut self) -> Option<u32> {
        loop {
            let page = self.ring.back()?;
            if !self.referenced.take(page) {
                self.ring.remove(page);
                return Some(page);
            }
            self.ring.move_to_front(page);
        }
    }

    fn len(&self) -> usize {
        self.ring.len() as usize
    }
}
