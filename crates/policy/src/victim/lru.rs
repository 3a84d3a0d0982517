//! Least recently used, exact: needs to see every reference, which only a simulator does.

use super::VictimPolicy;
use crate::list::IndexList;

/// Evicts the page whose last reference is the longest ago.
#[derive(Debug)]
pub struct Lru {
    queue: IndexList,
}

impl Lru {
    /// For pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { queue: IndexList::new(page_count) }
    }
}

impl VictimPolicy for Lru {
    fn insert(&mut self, page: u32) {
        self.queue.remove(page);
        self.queue.push_front(page);
    }

    fn touch(&mut self, page: u32) {
        self.queue.move_to_front(page);
    }

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
