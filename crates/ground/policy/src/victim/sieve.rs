//! SIEVE (Zhang et al., NSDI 2024): a queue in order of arrival and a hand that walks from the
//! oldest to the newest. A referenced page under the hand loses its mark and stays in place; the
//! first unreferenced one is evicted. New pages enter at the front, so they are judged soon after
//! the hand has passed the survivors: one-time visitors are filtered out quickly.

use super::VictimPolicy;
use crate::{bits::Marks, list::IndexList, tables::Renumber};

/// Evicts the first page under the hand that was not referenced since the hand last passed.
#[derive(Debug)]
pub struct Sieve {
    queue: IndexList,
    marks: Marks,
    /// Where the search continues; `None` = at the oldest page.
    hand: Option<u32>,
}

impl Sieve {
    /// Creates a policy for pages `0..page_count`.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        Self { queue: IndexList::new(page_count), marks: Marks::new(page_count), hand: None }
    }
}

impl VictimPolicy for Sieve {
    #[inline]
    fn insert(&mut self, page: u32) {
        if !self.marks.reference(page) {
            self.marks.enter(page);
            self.queue.push_front(page);
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
        if self.hand == Some(page) {
            self.hand = self.queue.newer(page);
        }
        self.marks.leave(page);
        self.queue.remove(page)
    }

    /// Terminates: every page passed loses its mark, so the second lap at the latest finds a
    /// victim.
    #[inline]
    fn victim(&mut self) -> Option<u32> {
        loop {
            let page = self.hand.or_else(|| self.queue.back())?;
            self.hand = self.queue.newer(page);
            if !self.marks.take_reference(page) {
                self.marks.leave(page);
                self.queue.remove(page);
                return Some(page);
            }
        }
    }

    fn len(&self) -> usize {
        self.queue.len() as usize
    }
}

impl Renumber for Sieve {
    fn rename(&mut self, from: u32, to: u32) {
        self.queue.rename(from, to);
        self.marks.rename(from, to);
        if self.hand == Some(from) {
            self.hand = Some(to);
        }
    }

    fn resize(&mut self, page_count: usize) {
        self.queue.resize(page_count);
        self.marks.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.queue.bytes() + self.marks.bytes()
    }
}
