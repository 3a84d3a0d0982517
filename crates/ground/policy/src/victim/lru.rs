//! Least recently used, exact: needs to see every reference, which only a simulator does.

use super::VictimPolicy;
use crate::{list::IndexList, tables::Renumber};

/// Evicts the page with the oldest last reference.
#[derive(Debug)]
pub struct Lru {
    queue: IndexList,
}

impl Lru {
    /// Creates a policy for pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { queue: IndexList::new(page_count) }
    }
}

impl VictimPolicy for Lru {
    #[inline]
    fn insert(&mut self, page: u32) {
        if !self.queue.move_to_front(page) {
            self.queue.push_front(page);
        }
    }

    #[inline]
    fn touch(&mut self, page: u32) -> bool {
        self.queue.move_to_front(page)
    }

    fn contains(&self, page: u32) -> bool {
        self.queue.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.queue.remove(page)
    }

    #[inline]
    fn victim(&mut self) -> Option<u32> {
        self.queue.pop_back()
    }

    fn len(&self) -> usize {
        self.queue.len() as usize
    }
}

impl Renumber for Lru {
    fn rename(&mut self, from: u32, to: u32) {
        self.queue.rename(from, to);
    }

    fn resize(&mut self, page_count: usize) {
        self.queue.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.queue.bytes()
    }
}
