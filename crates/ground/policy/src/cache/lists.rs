//! Several queues over the same pages; a page is in at most one of them, and a byte tells which.

use crate::list::{Ends, Links};
use crate::tables::{resize_exactly, table_bytes};

/// Not in any queue.
pub(super) const NOWHERE: u8 = 0;

/// `N` queues, numbered from 1. The front is the newest end. 9 bytes per page.
#[derive(Debug)]
pub(super) struct Lists<const N: usize> {
    links: Links,
    ends: [Ends; N],
    place: Vec<u8>,
}

impl<const N: usize> Lists<N> {
    pub(super) fn new(page_count: usize) -> Self {
        Self {
            links: Links::new(page_count),
            ends: [Ends::default(); N],
            place: vec![NOWHERE; page_count],
        }
    }

    /// Returns the queue that `page` is in.
    #[inline]
    pub(super) fn place(&self, page: u32) -> u8 {
        self.place[page as usize]
    }

    pub(super) fn len(&self, queue: u8) -> u32 {
        self.ends[queue as usize - 1].len()
    }

    /// Returns the oldest page of a queue.
    pub(super) fn back(&self, queue: u8) -> Option<u32> {
        self.ends[queue as usize - 1].back()
    }

    /// Puts a page that is in no queue at the front of `queue`.
    #[inline]
    pub(super) fn push_front(&mut self, queue: u8, page: u32) {
        debug_assert_eq!(self.place(page), NOWHERE, "page {page} is in a queue already");
        self.place[page as usize] = queue;
        self.links.push_front(&mut self.ends[queue as usize - 1], page);
    }

    /// Removes `page` from its queue. Returns that queue, or [`NOWHERE`].
    #[inline]
    pub(super) fn remove(&mut self, page: u32) -> u8 {
        let queue = std::mem::replace(&mut self.place[page as usize], NOWHERE);
        if queue != NOWHERE {
            self.links.unlink(&mut self.ends[queue as usize - 1], page);
        }
        queue
    }

    /// Renumbers `from`, if it is in a queue, to `to`.
    pub(super) fn rename(&mut self, from: u32, to: u32) {
        let queue = std::mem::replace(&mut self.place[from as usize], NOWHERE);
        if queue != NOWHERE {
            self.place[to as usize] = queue;
            self.links.rename(&mut self.ends[queue as usize - 1], from, to);
        }
    }

    pub(super) fn resize(&mut self, page_count: usize) {
        self.links.resize(page_count);
        resize_exactly(&mut self.place, page_count, NOWHERE);
    }

    pub(super) fn bytes(&self) -> usize {
        self.links.bytes() + table_bytes(&self.place)
    }

    /// Removes the oldest page of a queue.
    #[inline]
    pub(super) fn pop_back(&mut self, queue: u8) -> Option<u32> {
        let page = self.links.pop_back(&mut self.ends[queue as usize - 1])?;
        self.place[page as usize] = NOWHERE;
        Some(page)
    }

    /// Moves `page` to the front of `queue`, from wherever it is.
    #[inline]
    pub(super) fn move_to_front(&mut self, queue: u8, page: u32) {
        if self.place(page) == queue {
            self.links.move_to_front(&mut self.ends[queue as usize - 1], page);
        } else {
            self.remove(page);
            self.push_front(queue, page);
        }
    }
}
