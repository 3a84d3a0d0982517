//! Segmented LRU (Karedla, Love, Wherry, 1994): a page climbs one segment at each reference, and a
//! full segment pushes its oldest page down into the one below.

use farpool_units::exactly;

use super::lists::{Lists, NOWHERE};
use super::{PageCache, checked_capacity};
use crate::ranking::Ranking;
use crate::tables::Renumber;

/// Number of equal segments; [`Slru::new`] uses fewer if the capacity is smaller than that.
pub const SLRU_SEGMENTS: u32 = 4;

/// Evicts from the lowest segment that holds a page. 9 bytes per page.
///
/// While the cache fills up, a new page enters the lowest segment with room; after that, the
/// lowest. Pages that the equal segments leave over belong to the lowest too, until it is next
/// full: then a reference can evict a page.
#[derive(Debug)]
pub struct Slru {
    segments: Segments<{ SLRU_SEGMENTS as usize }>,
}

impl Slru {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(page_count: usize, capacity: u32) -> Self {
        let capacity = checked_capacity(capacity);
        let used = SLRU_SEGMENTS.min(capacity);
        let mut rooms = [0; SLRU_SEGMENTS as usize];
        rooms[..used as usize].fill(capacity / used);
        Self { segments: Segments::new(page_count, capacity, rooms) }
    }

    /// Creates a cache for [`Ranking`]: the lowest segment takes all that the others leave.
    pub(crate) fn open() -> Self {
        let mut segments = Segments::new(0, 0, [u32::MAX; SLRU_SEGMENTS as usize]);
        segments.divide(1, [1 / SLRU_SEGMENTS; SLRU_SEGMENTS as usize]);
        Self { segments }
    }

    fn divide(&mut self, capacity: u32) {
        self.segments.divide(capacity, [capacity / SLRU_SEGMENTS; SLRU_SEGMENTS as usize]);
    }
}

impl PageCache for Slru {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        if self.segments.reference(page, left) {
            return true;
        }
        if self.segments.len == self.segments.capacity
            && let Some(victim) = self.segments.evict()
        {
            left(victim);
        }
        self.segments.insert(page);
        false
    }

    fn contains(&self, page: u32) -> bool {
        self.segments.contains(page)
    }

    fn remove(&mut self, page: u32) -> bool {
        self.segments.remove(page)
    }

    fn len(&self) -> usize {
        self.segments.len as usize
    }
}

/// `N` segments of any sizes; segments of size 0 at the top are not used.
#[derive(Debug)]
pub(super) struct Segments<const N: usize> {
    queues: Lists<N>,
    rooms: [u32; N],
    top: u8,
    pub(super) len: u32,
    pub(super) capacity: u32,
}

impl<const N: usize> Segments<N> {
    pub(super) fn new(page_count: usize, capacity: u32, rooms: [u32; N]) -> Self {
        let used = rooms.iter().take_while(|room| **room > 0).count().max(1);
        let top = exactly(used);
        Self { queues: Lists::new(page_count), rooms, top, len: 0, capacity }
    }

    pub(super) fn contains(&self, page: u32) -> bool {
        self.queues.place(page) != NOWHERE
    }

    /// Changes the capacity and the sizes of all segments but the lowest, which takes whatever they
    /// push down.
    pub(super) fn divide(&mut self, capacity: u32, rooms: [u32; N]) {
        self.capacity = capacity;
        self.rooms = rooms;
        self.rooms[0] = u32::MAX;
        for segment in (2..=self.top).rev() {
            while self.overfull(segment)
                && let Some(cooled) = self.queues.pop_back(segment)
            {
                self.queues.push_front(segment - 1, cooled);
            }
        }
    }

    pub(super) fn rename(&mut self, from: u32, to: u32) {
        self.queues.rename(from, to);
    }

    pub(super) fn resize(&mut self, page_count: usize) {
        self.queues.resize(page_count);
    }

    pub(super) fn bytes(&self) -> usize {
        self.queues.bytes()
    }

    fn overfull(&self, segment: u8) -> bool {
        self.queues.len(segment) > self.rooms[segment as usize - 1]
    }

    /// Moves a resident page up. False if it is not resident.
    #[inline]
    pub(super) fn reference(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        let segment = self.queues.place(page);
        if segment == NOWHERE {
            return false;
        }
        if segment == self.top {
            self.queues.move_to_front(segment, page);
            return true;
        }
        self.queues.move_to_front(segment + 1, page);
        // Each segment on the way down takes in one page, so a full one pushes one further down.
        let mut full = segment + 1;
        while self.overfull(full) {
            let Some(cooled) = self.queues.pop_back(full) else { break };
            if full > 1 {
                self.queues.push_front(full - 1, cooled);
                full -= 1;
            } else {
                self.len -= 1;
                left(cooled);
            }
        }
        true
    }

    /// Inserts a page that is not resident; there must be room for it.
    pub(super) fn insert(&mut self, page: u32) {
        let free = (1..=self.top).find(|s| self.queues.len(*s) < self.rooms[*s as usize - 1]);
        self.queues.push_front(free.unwrap_or(1), page);
        self.len += 1;
    }

    /// Returns the next victim.
    pub(super) fn next_victim(&self) -> Option<u32> {
        (1..=self.top).find_map(|segment| self.queues.back(segment))
    }

    pub(super) fn evict(&mut self) -> Option<u32> {
        let victim = (1..=self.top).find_map(|segment| self.queues.pop_back(segment))?;
        self.len -= 1;
        Some(victim)
    }

    pub(super) fn remove(&mut self, page: u32) -> bool {
        let was = self.queues.remove(page) != NOWHERE;
        self.len -= u32::from(was);
        was
    }
}

impl Renumber for Slru {
    fn rename(&mut self, from: u32, to: u32) {
        self.segments.rename(from, to);
    }

    fn resize(&mut self, page_count: usize) {
        self.segments.resize(page_count);
    }

    fn bytes(&self) -> usize {
        self.segments.bytes()
    }
}

impl Ranking for Slru {
    fn insert(&mut self, page: u32, _: u32, _: &mut Vec<u32>) {
        self.segments.insert(page);
        if self.segments.len > self.segments.capacity {
            self.divide(self.segments.len);
        }
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        self.segments.reference(page, &mut |_| unreachable!("the lowest segment takes all"))
    }

    fn victim(&mut self, _: &mut Vec<u32>) -> Option<u32> {
        self.segments.evict()
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        self.segments.remove(page)
    }

    fn set_capacity(&mut self, capacity: u32, _: &mut Vec<u32>) {
        self.divide(capacity.max(self.segments.len).max(1));
    }

    fn contains(&self, page: u32) -> bool {
        self.segments.contains(page)
    }

    fn knows(&self, page: u32) -> bool {
        self.segments.contains(page)
    }

    fn len(&self) -> usize {
        self.segments.len as usize
    }
}
