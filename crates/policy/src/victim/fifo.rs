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
