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

    fn remove(&mut self, page: u32) -> bool {
        self.queue.remove(page)
    }

    fn victims(&mut self, wanted: usize, out: &mut Vec<u32>) {
        for _ in 0..wanted {
            let Some(page) = self.queue.back() else {
                return;
            };
            self.queue.remove(page);
            out.push(page);
        }
    }

    fn len(&self) -> usize {
        self.queue.len() as usize
    }
}
