//! First in, first out: HPL-2011-31's Round-Robin.

use super::VictimPolicy;
use crate::list::IndexList;

/// Evicts in the order of arrival, whatever is referenced.
#[derive(Debug)]
pub struct Fifo {
    queue: IndexList,
}

impl Fifo {
    /// For pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { queue: IndexList::new(page_count) }
    }
}

impl VictimPolicy for Fifo {
    fn insert(&mut self, page: u32) {
        if !self.queue.contains(page) {
            self.queue.push_front(page);
        }
    }

    fn touch(&mut self, _page: u32) {}

    fn contains(&self, page: u32) -> bool {
        self.queue.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.queue.remove(page)
    }

    fn victim(&mut self) -> Option<u32> {
        let page = self.queue.back()?;
        self.queue.remove(page);
        Some(page)
    }

    fn len(&self) -> usize {
        self.queue.len() as usize
    }
}
