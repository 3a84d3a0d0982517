//! A mapping of the program, and a shadow that records what each of its pages must hold.
//!
//! A page holds either zeros (stamp 0) or 512 words made from its stamp, and no two writes use the
//! same stamp, except that pages can be made alike on purpose: so a page that is stale, misplaced,
//! torn, or invented differs from the right one.
//! The shadow is mapped with MAP_STACK, so it is local and cannot be wrong for the same reason as
//! the page.

use crate::rng::mix;
use crate::sys::{self, PAGE};

const WORDS: usize = PAGE / 8;
/// Spreads the stamp over the words of a page.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Exit code after wrong data was read.
pub const WRONG_DATA: i32 = 9;

/// What a page must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The stamp of the last write, or 0 for zeros.
    pub stamp: u64,
    /// The page was freed with MADV_FREE and not written since: zeros are right, too.
    pub or_zero: bool,
}

/// A mapping and its shadow.
#[derive(Debug)]
pub struct Region {
    start: usize,
    shadow: sys::LocalVec<Expected>,
}

impl Region {
    /// A fresh mapping, all zeros.
    pub fn map(pages: usize) -> Region {
        let start = sys::map(0, pages * PAGE, sys::READ_WRITE, 0);
        let mut shadow = sys::LocalVec::new(pages);
        shadow.resize(pages, Expected::default());
        Region { start, shadow }
    }

    /// The number of pages.
    pub fn pages(&self) -> usize {
        self.shadow.len()
    }

    /// Address of a page.
    pub fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    /// What a page must hold.
    pub fn expected(&self, page: usize) -> Expected {
        self.shadow.as_slice()[page]
    }

    /// Notes what a page holds from now on.
    pub fn expect(&mut self, page: usize, expected: Expected) {
        self.shadow.as_mut_slice()[page] = expected;
    }

    /// Notes that pages hold zeros from now on.
    pub fn expect_zeros(&mut self, first: usize, count: usize) {
        self.shadow.as_mut_slice()[first..first + count].fill(Expected::default());
    }

    /// Notes that pages may become zeros until they are written.
    pub fn expect_zeros_too(&mut self, first: usize, count: usize) {
        let pages = &mut self.shadow.as_mut_slice()[first..first + count];
        pages.iter_mut().for_each(|page| page.or_zero = true);
    }

    /// Fills a page with the words of a stamp.
    pub fn write(&mut self, page: usize, stamp: u64) {
        let words = sys::words(self.address(page), WORDS);
        let mut value = stamp;
        for word in words {
            *word = value;
            value = value.wrapping_add(STEP);
        }
        self.expect(page, Expected { stamp, or_zero: false });
    }

    /// Ends the process with [`WRONG_DATA`] and a report if the page does not hold what it must.
    pub fn check(&self, page: usize, what: &str) {
        let expected = self.expected(page);
        let words = sys::words(self.address(page), WORDS);
        let mut value = expected.stamp;
        let step = if expected.stamp == 0 { 0 } else { STEP };
        let mut difference = 0;
        for word in words.iter() {
            difference |= *word ^ value;
            value = value.wrapping_add(step);
        }
        let zero = || expected.or_zero && words.iter().all(|word| *word == 0);
        if difference != 0 && !zero() {
            self.report(page, what, words);
        }
    }

    /// Checks every page.
    pub fn check_all(&self, what: &str) {
        for page in 0..self.pages() {
            self.check(page, what);
        }
    }

    #[cold]
    fn report(&self, page: usize, what: &str, words: &[u64]) -> ! {
        let expected = self.expected(page);
        let step = if expected.stamp == 0 { 0 } else { STEP };
        let right = |index: usize| expected.stamp.wrapping_add(step.wrapping_mul(index as u64));
        let wrong = words.iter().enumerate().filter(|(index, word)| **word != right(*index));
        let (first, count) = (wrong.clone().next().map_or(0, |(index, _)| index), wrong.count());
        let zeros = words.iter().filter(|word| **word == 0).count();
        // Reading the word again distinguishes a race from a lost page.
        let again = words[first];
        sys::say(&format!(
            "WRONG DATA while {what}: pid {} page {page} of {} at {:#x}: {count} of {WORDS} words \
             wrong, first at {first}: {:#x} instead of {:#x}; {zeros} words are zero; stamp {:#x}, \
             found stamp {:#x}, looked again {again:#x}\n",
            std::process::id(),
            self.pages(),
            self.address(page),
            words[first],
            right(first),
            expected.stamp,
            words[first].wrapping_sub(step.wrapping_mul(first as u64)),
        ));
        sys::exit(WRONG_DATA)
    }

    /// Splits off the pages from `page` on. Returns them as a region.
    pub fn split_off(&mut self, page: usize) -> Region {
        let shadow = sys::LocalVec::from_slice(&self.shadow.as_slice()[page..]);
        self.shadow.truncate(page);
        Region { start: self.address(page), shadow }
    }

    /// Unmaps the last `count` pages.
    pub fn unmap_tail(&mut self, count: usize) {
        let keep = self.pages() - count;
        sys::unmap(self.address(keep), count * PAGE);
        self.shadow.truncate(keep);
    }

    /// Resizes and perhaps moves the region with mremap(2). Returns false if the kernel found no
    /// place for it.
    pub fn remap(&mut self, pages: usize, flags: i32, to: usize) -> bool {
        let (old, new) = (self.pages() * PAGE, pages * PAGE);
        let Some(start) = sys::remap(self.start, old, new, flags, to) else {
            return false;
        };
        self.start = start;
        self.shadow.resize(pages, Expected::default());
        true
    }

    /// Notes that the kernel has moved the region.
    pub fn has_moved(&mut self, to: usize) {
        self.start = to;
    }

    /// Unmaps the region.
    pub fn unmap(self) {
        sys::unmap(self.start, self.pages() * PAGE);
    }
}

/// A stamp that no other write uses and that is never 0.
pub fn fresh_stamp(seed: u64, counter: &mut u64) -> u64 {
    *counter += 1;
    mix(seed ^ mix(*counter)) | 1
}
