//! Second chance. The textbook's ring and hand, kept as a queue: the page under the hand is the
//! back, and a spared page goes to the front, where the hand reaches it last.

use super::VictimPolicy;
use crate::{bits::Marks, list::IndexList, tables::Renumber};

/// Evicts in the order of arrival, sparing each referenced page once.
#[derive(Debug)]
pub struct Clock {
    ring: IndexList,
    marks: Marks,
    spared: u64,
}

impl Clock {
    /// Creates a policy for pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { ring: IndexList::new(page_count), marks: Marks::new(page_count), spared: 0 }
    }

    /// Returns the pages examined and spared so far: the cost of choosing beyond one look per
    /// victim.
    #[must_use]
    pub fn spared(&self) -> u64 {
        self.spared
    }
}

impl VictimPolicy for Clock {
    #[inline]
    fn insert(&mut self, page: u32) {
        if !self.marks.reference(page) {
            self.marks.enter(page);
            self.ring.push_front(page);
        }
    }

    #[inline]
    fn touch(&mut self, page: u32) -> bool {
        self.marks.reference(page)
    }

    fn contains(&self, page: u32) -> bool {
        self.marks.resident(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.marks.leave(page);
        self.ring.remove(page)
    }

    /// Terminates: every spared page loses its mark, so the second lap at the latest finds a
    /// victim.
    #[inline]
    fn victim(&mut self) -> Option<u32> {
        loop {
            let page = self.ring.pop_back()?;
            if !self.marks.take_reference(page) {
                self.marks.leave(page);
                return Some(page);
            }
            self.spared += 1;
            self.ring.push_front(page);
        }
    }

    fn len(&self) -> usize {
        self.ring.len() as usize
    }
}

impl Renumber for Clock {
    fn rename(&mut self, from: u32, to: u32) {
        self.ring.rename(from, to);
        self.marks.rename(from, to);
    }

    fn resize(&mut self, page_count: usize) {
        self.ring.resize(page_count);
        self.marks.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.ring.bytes() + self.marks.bytes()
    }
}
