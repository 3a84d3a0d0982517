//! First in, first out: HPL-2011-31's Round-Robin.

use super::VictimPolicy;
use crate::{bits::BitSet, list::IndexList, tables::Renumber};

/// Evicts in order of arrival, regardless of references.
#[derive(Debug)]
pub struct Fifo {
    queue: IndexList,
    /// Residency, which the queue knows too, in a sixty-fourth of the memory: most references need
    /// only this.
    resident: BitSet,
}

impl Fifo {
    /// Creates a policy for pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { queue: IndexList::new(page_count), resident: BitSet::new(page_count) }
    }
}

impl VictimPolicy for Fifo {
    #[inline]
    fn insert(&mut self, page: u32) {
        if !self.resident.get(page) {
            self.resident.set(page);
            self.queue.push_front(page);
        }
    }

    #[inline]
    fn touch(&mut self, page: u32) -> bool {
        self.resident.get(page)
    }

    fn contains(&self, page: u32) -> bool {
        self.resident.get(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.resident.clear(page);
        self.queue.remove(page)
    }

    #[inline]
    fn victim(&mut self) -> Option<u32> {
        let page = self.queue.pop_back()?;
        self.resident.clear(page);
        Some(page)
    }

    fn len(&self) -> usize {
        self.queue.len() as usize
    }
}

impl Renumber for Fifo {
    fn rename(&mut self, from: u32, to: u32) {
        self.queue.rename(from, to);
        self.resident.rename(from, to);
    }

    fn resize(&mut self, page_count: usize) {
        self.queue.resize(page_count);
        self.resident.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.queue.bytes() + self.resident.bytes()
    }
}
