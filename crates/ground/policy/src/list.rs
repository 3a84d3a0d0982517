//! Doubly linked lists threaded through one array: members are the numbers `0..len`.
//!
//! Links are stored plus one, so all-zero memory is the empty list: a table for a large address
//! range costs address space, not memory, until its chunks are used. 8 bytes per number, both links
//! side by side, so that removing a number touches three cache lines and not four.

use crate::tables::{resize_exactly, table_bytes};

/// A link at the end of a list (links are index + 1).
const NONE: u32 = 0;

#[derive(Debug, Clone, Copy, Default)]
struct Link {
    towards_front: u32,
    towards_back: u32,
}

/// The ends of a list. The front is the newest end, the back the oldest.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ends {
    front: u32,
    back: u32,
    len: u32,
}

impl Ends {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the oldest member.
    pub(crate) fn back(&self) -> Option<u32> {
        self.back.checked_sub(1)
    }
}

/// The links of several lists; a number is in at most one of them.
#[derive(Debug, Clone)]
pub(crate) struct Links(Vec<Link>);

impl Links {
    pub(crate) fn new(numbers: usize) -> Self {
        assert!(u32::try_from(numbers).is_ok_and(|n| n < u32::MAX), "a list numbers below 2^32-1");
        Self(vec![Link::default(); numbers])
    }

    #[inline]
    pub(crate) fn push_front(&mut self, ends: &mut Ends, at: u32) {
        self.0[at as usize] = Link { towards_front: NONE, towards_back: ends.front };
        match ends.front.checked_sub(1) {
            Some(old) => self.0[old as usize].towards_front = at + 1,
            None => ends.back = at + 1,
        }
        ends.front = at + 1;
        ends.len += 1;
    }

    /// Removes `at`, which must be in the list of these ends.
    #[inline]
    pub(crate) fn unlink(&mut self, ends: &mut Ends, at: u32) {
        let link = std::mem::take(&mut self.0[at as usize]);
        match link.towards_front.checked_sub(1) {
            Some(newer) => self.0[newer as usize].towards_back = link.towards_back,
            None => ends.front = link.towards_back,
        }
        match link.towards_back.checked_sub(1) {
            Some(older) => self.0[older as usize].towards_front = link.towards_front,
            None => ends.back = link.towards_front,
        }
        ends.len -= 1;
    }

    /// Removes the oldest member.
    #[inline]
    pub(crate) fn pop_back(&mut self, ends: &mut Ends) -> Option<u32> {
        let at = ends.back()?;
        self.unlink(ends, at);
        Some(at)
    }

    /// Renumbers `from`, which must be in the list of these ends, to `to`.
    pub(crate) fn rename(&mut self, ends: &mut Ends, from: u32, to: u32) {
        let link = std::mem::take(&mut self.0[from as usize]);
        self.0[to as usize] = link;
        match link.towards_front.checked_sub(1) {
            Some(newer) => self.0[newer as usize].towards_back = to + 1,
            None => ends.front = to + 1,
        }
        match link.towards_back.checked_sub(1) {
            Some(older) => self.0[older as usize].towards_front = to + 1,
            None => ends.back = to + 1,
        }
    }

    pub(crate) fn resize(&mut self, numbers: usize) {
        assert!(u32::try_from(numbers).is_ok_and(|n| n < u32::MAX), "a list numbers below 2^32-1");
        resize_exactly(&mut self.0, numbers, Link::default());
    }

    pub(crate) fn bytes(&self) -> usize {
        table_bytes(&self.0)
    }

    /// Moves `at`, which must be in the list of these ends, to the newest end.
    #[inline]
    pub(crate) fn move_to_front(&mut self, ends: &mut Ends, at: u32) {
        if ends.front != at + 1 {
            self.unlink(ends, at);
            self.push_front(ends, at);
        }
    }
}

/// A list that can tell whether a number is in it.
#[derive(Debug, Clone)]
pub(crate) struct IndexList {
    links: Links,
    ends: Ends,
}

impl IndexList {
    pub(crate) fn new(numbers: usize) -> Self {
        Self { links: Links::new(numbers), ends: Ends::default() }
    }

    pub(crate) fn grow(&mut self, numbers: usize) {
        assert!(u32::try_from(numbers).is_ok_and(|n| n < u32::MAX), "a list numbers below 2^32-1");
        let numbers = numbers.max(self.capacity());
        self.links.0.resize(numbers, Link::default());
    }

    /// Renumbers `from`, if it is in the list, to `to`.
    pub(crate) fn rename(&mut self, from: u32, to: u32) {
        if self.contains(from) {
            self.links.rename(&mut self.ends, from, to);
        }
    }

    /// Resizes the list to `0..numbers`; no number beyond may be in it.
    pub(crate) fn resize(&mut self, numbers: usize) {
        self.links.resize(numbers);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.links.bytes()
    }

    /// Returns how many numbers the list can hold, not how many it holds.
    pub(crate) fn capacity(&self) -> usize {
        self.links.0.len()
    }

    pub(crate) fn len(&self) -> u32 {
        self.ends.len
    }

    #[inline]
    pub(crate) fn contains(&self, at: u32) -> bool {
        self.links.0[at as usize].towards_front != NONE || self.ends.front == at + 1
    }

    /// Returns the oldest member.
    pub(crate) fn back(&self) -> Option<u32> {
        self.ends.back()
    }

    /// Returns the next newer member after `at`.
    #[inline]
    pub(crate) fn newer(&self, at: u32) -> Option<u32> {
        self.links.0[at as usize].towards_front.checked_sub(1)
    }

    /// Removes the oldest member.
    #[inline]
    pub(crate) fn pop_back(&mut self) -> Option<u32> {
        self.links.pop_back(&mut self.ends)
    }

    #[inline]
    pub(crate) fn push_front(&mut self, at: u32) {
        debug_assert!(!self.contains(at), "{at} is in the list already");
        self.links.push_front(&mut self.ends, at);
    }

    /// Removes `at`. False if it was not in the list.
    #[inline]
    pub(crate) fn remove(&mut self, at: u32) -> bool {
        let was = self.contains(at);
        if was {
            self.links.unlink(&mut self.ends, at);
        }
        was
    }

    /// Makes `at` the newest. False if it was not in the list.
    #[inline]
    pub(crate) fn move_to_front(&mut self, at: u32) -> bool {
        let was = self.contains(at);
        if was {
            self.links.move_to_front(&mut self.ends, at);
        }
        was
    }
}
