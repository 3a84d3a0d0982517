//! Belady's MIN (IBM Systems Journal 1966): evicts the page whose next use is the furthest away. It
//! needs the future, and is the bound that no policy can beat.

use farpool_units::exactly;

use super::{PageCache, checked_capacity};

/// Not used again.
const NEVER: u32 = u32::MAX;

/// The whole trace and, for each reference, the position of the page's next one. 4 bytes per
/// reference.
#[derive(Debug)]
pub struct Future<'t> {
    pages: &'t [u32],
    next: Vec<u32>,
}

impl<'t> Future<'t> {
    /// Scans a trace of pages `0..page_count` backwards.
    ///
    /// # Panics
    /// A page at or above `page_count`, or 2^32 references or more.
    #[must_use]
    pub fn new(pages: &'t [u32], page_count: usize) -> Self {
        assert!(
            u32::try_from(pages.len()).is_ok_and(|n| n < NEVER),
            "a future is below 2^32-1 long"
        );
        let mut next_of_page = vec![NEVER; page_count];
        let mut next = vec![NEVER; pages.len()];
        let mut at: u32 = exactly(pages.len());
        for (page, next) in pages.iter().zip(&mut next).rev() {
            at -= 1;
            *next = std::mem::replace(&mut next_of_page[*page as usize], at);
        }
        Self { pages, next }
    }
}

/// Evicts the page whose next use is the furthest away. References must be those of the given
/// future, in the same order. 8 bytes per page and an eighth of a byte per reference.
#[derive(Debug)]
pub struct Belady<'f> {
    future: &'f Future<'f>,
    /// References so far.
    now: u32,
    /// Next uses of resident pages.
    uses: PositionSet,
    /// Next use of each resident page; `ABSENT` of the others.
    next_of_page: Vec<u32>,
    /// Resident pages that are not used again.
    never: Vec<u32>,
    len: u32,
    capacity: u32,
}

/// The value in `next_of_page` of a page that is not resident.
const ABSENT: u32 = 0;

impl<'f> Belady<'f> {
    /// Creates a cache for `capacity` of the pages `0..page_count`.
    ///
    /// # Panics
    /// A capacity of 0.
    #[must_use]
    pub fn new(future: &'f Future<'f>, page_count: usize, capacity: u32) -> Self {
        Self {
            future,
            now: 0,
            uses: PositionSet::new(future.next.len()),
            next_of_page: vec![ABSENT; page_count],
            never: Vec::with_capacity((capacity as usize).min(page_count)),
            len: 0,
            capacity: checked_capacity(capacity),
        }
    }

    fn evict(&mut self) -> Option<u32> {
        let victim = self.never.pop().or_else(|| {
            let furthest = self.uses.last()?;
            self.uses.remove(furthest);
            Some(self.future.pages[furthest as usize])
        })?;
        self.next_of_page[victim as usize] = ABSENT;
        self.len -= 1;
        Some(victim)
    }

    fn expect(&mut self, page: u32) {
        let next = self.future.next[self.now as usize];
        // A next use is never the first reference, so 0 stays free for `ABSENT`.
        self.next_of_page[page as usize] = next;
        if next == NEVER {
            self.never.push(page);
        } else {
            self.uses.insert(next);
        }
    }
}

impl Belady<'_> {
    /// Returns the bytes that one cache takes, without the future, which is shared.
    #[must_use]
    pub fn memory_bytes(page_count: u64, capacity: u64, requests: u64) -> u64 {
        4 * page_count + 4 * capacity.min(page_count) + requests / 7
    }
}

impl PageCache for Belady<'_> {
    #[inline]
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool {
        debug_assert_eq!(self.future.pages[self.now as usize], page, "not the future foreseen");
        let hit = self.next_of_page[page as usize] != ABSENT;
        if hit {
            self.uses.remove(self.now);
        } else {
            if self.len == self.capacity
                && let Some(victim) = self.evict()
            {
                left(victim);
            }
            self.len += 1;
        }
        self.expect(page);
        self.now += 1;
        hit
    }

    fn contains(&self, page: u32) -> bool {
        self.next_of_page[page as usize] != ABSENT
    }

    fn remove(&mut self, page: u32) -> bool {
        match std::mem::replace(&mut self.next_of_page[page as usize], ABSENT) {
            ABSENT => return false,
            NEVER => self.never.retain(|other| *other != page),
            next => self.uses.remove(next),
        }
        self.len -= 1;
        true
    }

    fn len(&self) -> usize {
        self.len as usize
    }
}

/// A set of positions with a fast maximum: bits, and above each level one that tells which of its
/// words are not empty.
#[derive(Debug)]
struct PositionSet {
    levels: Vec<Vec<u64>>,
}

impl PositionSet {
    fn new(len: usize) -> Self {
        let mut levels = Vec::new();
        let mut bits = len.max(1);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0u64; words]);
            if words == 1 {
                return Self { levels };
            }
            bits = words;
        }
    }

    #[inline]
    fn insert(&mut self, position: u32) {
        let mut at = position as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            let was_empty = *word == 0;
            *word |= 1 << (at % 64);
            if !was_empty {
                return;
            }
            at /= 64;
        }
    }

    #[inline]
    fn remove(&mut self, position: u32) {
        let mut at = position as usize;
        for level in &mut self.levels {
            let word = &mut level[at / 64];
            *word &= !(1 << (at % 64));
            if *word != 0 {
                return;
            }
            at /= 64;
        }
    }

    fn last(&self) -> Option<u32> {
        let mut at = 0;
        for level in self.levels.iter().rev() {
            let word = level[at];
            let bit = 63u32.checked_sub(word.leading_zeros())?;
            at = at * 64 + bit as usize;
        }
        Some(exactly(at))
    }
}
