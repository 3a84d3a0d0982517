//! A doubly linked list threaded through two arrays: members are the numbers `0..len`.
//!
//! Links are stored plus one, so all-zero memory is the empty list: a table for a large address
//! range costs address space, not memory, until its chunks are used. 8 bytes per number.

/// The front is the newest end, the back the oldest.
#[derive(Debug, Clone)]
pub(crate) struct IndexList {
    towards_front: Vec<u32>,
    towards_back: Vec<u32>,
    front: u32,
    back: u32,
    len: u32,
}

/// What a link says when there is nothing further on (links are index + 1).
const NONE: u32 = 0;

impl IndexList {
    pub(crate) fn new(numbers: usize) -> Self {
        assert!(u32::try_from(numbers).is_ok_and(|n| n < u32::MAX), "a list numbers below 2^32-1");
        Self {
            towards_front: vec![NONE; numbers],
            towards_back: vec![NONE; numbers],
            front: NONE,
            back: NONE,
            len: 0,
        }
    }

    pub(crate) fn grow(&mut self, numbers: usize) {
        assert!(u32::try_from(numbers).is_ok_and(|n| n < u32::MAX), "a list numbers below 2^32-1");
        let numbers = numbers.max(self.towards_front.len());
        self.towards_front.resize(numbers, NONE);
        self.towards_back.resize(numbers, NONE);
    }

    /// How many numbers the list can hold, not how many it holds.
    pub(crate) fn capacity(&self) -> usize {
        self.towards_front.len()
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, at: u32) -> bool {
        self.towards_front[at as usize] != NONE || self.front == at + 1
    }

    /// The oldest member.
    pub(crate) fn back(&self) -> Option<u32> {
        self.back.checked_sub(1)
    }

    /// The member that is next newer than `at`.
    pub(crate) fn newer(&self, at: u32) -> Option<u32> {
        self.towards_front[at as usize].checked_sub(1)
    }

    pub(crate) fn push_front(&mut self, at: u32) {
        debug_assert!(!self.contains(at), "{at} is in the list already");
        self.towards_back[at as usize] = self.front;
        match self.front.checked_sub(1) {
            Some(old) => self.towards_front[old as usize] = at + 1,
            None => self.back = at + 1,
        }
        self.front = at + 1;
        self.len += 1;
    }

    /// Takes `at` out; `false` when it was not in.
    pub(crate) fn remove(&mut self, at: u32) -> bool {
        if !self.contains(at) {
            return false;
        }
        let newer = std::mem::replace(&mut self.towards_front[at as usize], NONE);
        let older = std::mem::replace(&mut self.towards_back[at as usize], NONE);
        match newer.checked_sub(1) {
            Some(newer) => self.towards_back[newer as usize] = older,
            None => self.front = older,
        }
        match older.checked_sub(1) {
            Some(older) => self.towards_front[older as usize] = newer,
            None => self.back = newer,
        }
        self.len -= 1;
        true
    }

    pub(crate) fn move_to_front(&mut self, at: u32) {
        if self.remove(at) {
            self.push_front(at);
        }
    }
}
