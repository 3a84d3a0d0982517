//! A set of pages: one bit for each page of an image.

use farpool_units::exactly;

/// Pages that one word counts.
const WORD_PAGES: u32 = u64::BITS;

/// Some of the pages from 0 to a fixed end. Takes 32 KiB for each GiB of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PageSet {
    words: Vec<u64>,
    end: u32,
    count: u32,
}

impl PageSet {
    /// None of the pages below `end`.
    pub(crate) fn none_of(end: u32) -> PageSet {
        PageSet { words: vec![0; exactly(end.div_ceil(WORD_PAGES))], end, count: 0 }
    }

    /// One more than the largest page that it may have.
    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    /// How many pages it has.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// True if it has the page. It never has one at or beyond its end.
    pub(crate) fn has(&self, page: u32) -> bool {
        let (word, bit) = seat(page);
        self.words.get(word).is_some_and(|it| it & bit != 0)
    }

    /// Adds a page.
    ///
    /// # Panics
    /// It lies beyond the end.
    pub(crate) fn add(&mut self, page: u32) {
        assert!(page < self.end, "page {page} of {}", self.end);
        let (word, bit) = seat(page);
        self.count += u32::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
    }

    /// Takes a page out. True if it was there.
    pub(crate) fn remove(&mut self, page: u32) -> bool {
        let had = self.has(page);
        if had {
            let (word, bit) = seat(page);
            self.words[word] &= !bit;
            self.count -= 1;
        }
        had
    }

    /// The first page from `from` on that it has.
    pub(crate) fn first_from(&self, from: u32) -> Option<u32> {
        let (first, _) = seat(from);
        let rest = self.words.get(first..)?;
        let mut mask = u64::MAX << (from % WORD_PAGES);
        for (word, number) in rest.iter().zip(first..) {
            let found = word & mask;
            if found != 0 {
                return Some(exactly::<u32, _>(number) * WORD_PAGES + found.trailing_zeros());
            }
            mask = u64::MAX;
        }
        None
    }
}

fn seat(page: u32) -> (usize, u64) {
    (exactly(page / WORD_PAGES), 1 << (page % WORD_PAGES))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It is what a set of numbers is.
        #[test]
        fn it_is_a_set(steps in proptest::collection::vec((any::<bool>(), 0_u32..200), 0..99)) {
            let (mut set, mut model) = (PageSet::none_of(200), BTreeSet::new());
            for (adds, page) in steps {
                if adds {
                    set.add(page);
                    model.insert(page);
                } else {
                    prop_assert_eq!(set.remove(page), model.remove(&page));
                }
                prop_assert_eq!(set.has(page), model.contains(&page));
                prop_assert_eq!(set.first_from(page), model.range(page..).next().copied());
            }
            prop_assert_eq!(exactly::<usize, _>(set.count()), model.len());
            prop_assert!(!set.has(200) && !set.remove(u32::MAX));
            prop_assert_eq!(set.first_from(u32::MAX), None);
        }
    }
}
