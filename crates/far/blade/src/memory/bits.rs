//! One bit for each page of a superpage.

use farpool_units::PAGES_PER_SUPERPAGE;
use std::ops::Range;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (PAGES_PER_SUPERPAGE / WORD_BITS) as usize;

/// A set of pages of one superpage, empty at first.
#[derive(Clone, Debug)]
pub(super) struct Bits([u64; WORDS]);

impl Default for Bits {
    fn default() -> Self {
        Bits([0; WORDS])
    }
}

/// The words that a range touches, each with the bits of the range in it.
fn words(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    assert!(range.end <= PAGES_PER_SUPERPAGE, "page {} lies beyond a superpage", range.end);
    let first = range.start / WORD_BITS;
    let end = range.end.div_ceil(WORD_BITS).max(first);
    (first..end).map(move |word| {
        let start = range.start.max(word * WORD_BITS) - word * WORD_BITS;
        let count = range.end.min((word + 1) * WORD_BITS) - word * WORD_BITS - start;
        let mask = if count == WORD_BITS { u64::MAX } else { (1u64 << count) - 1 };
        (word as usize, mask << start)
    })
}

impl Bits {
    pub(super) fn has(&self, page: u32) -> bool {
        self.0[(page / WORD_BITS) as usize] >> (page % WORD_BITS) & 1 == 1
    }

    pub(super) fn set(&mut self, page: u32) {
        self.0[(page / WORD_BITS) as usize] |= 1 << (page % WORD_BITS);
    }

    pub(super) fn clear(&mut self, page: u32) {
        self.0[(page / WORD_BITS) as usize] &= !(1 << (page % WORD_BITS));
    }

    /// Clears the bit. True if it was set.
    pub(super) fn take(&mut self, page: u32) -> bool {
        let was = self.has(page);
        self.clear(page);
        was
    }

    pub(super) fn set_all(&mut self, range: Range<u32>) {
        words(range).for_each(|(word, mask)| self.0[word] |= mask);
    }

    pub(super) fn clear_all(&mut self, range: Range<u32>) {
        words(range).for_each(|(word, mask)| self.0[word] &= !mask);
    }

    pub(super) fn count(&self, range: Range<u32>) -> u32 {
        words(range).map(|(word, mask)| (self.0[word] & mask).count_ones()).sum()
    }

    pub(super) fn has_any(&self, range: Range<u32>) -> bool {
        words(range).any(|(word, mask)| self.0[word] & mask != 0)
    }

    /// True if a page of the range is in this set, and not in `other`.
    pub(super) fn has_beyond(&self, other: &Bits, range: Range<u32>) -> bool {
        words(range).any(|(word, mask)| self.0[word] & !other.0[word] & mask != 0)
    }
}

/// Adds a page to runs that are collected in ascending order.
pub(super) fn append(runs: &mut Vec<Range<u32>>, page: u32) {
    match runs.last_mut() {
        Some(last) if last.end == page => last.end += 1,
        _ => runs.push(page..page + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn any_range() -> impl Strategy<Value = Range<u32>> {
        (0..=PAGES_PER_SUPERPAGE, 0..=PAGES_PER_SUPERPAGE)
            .prop_map(|(one, other)| one.min(other)..one.max(other))
    }

    proptest! {
        #[test]
        fn bits_are_a_set(steps in prop::collection::vec((any_range(), any::<bool>()), 1..12)) {
            let (mut bits, mut set) = (Bits::default(), BTreeSet::new());
            for (range, is_set) in steps {
                if is_set {
                    bits.set_all(range.clone());
                    set.extend(range);
                } else {
                    bits.clear_all(range.clone());
                    set.retain(|page| !range.contains(page));
                }
                let probe = 100..3000;
                let inside = set.range(probe.clone()).count();
                prop_assert_eq!(bits.count(probe.clone()) as usize, inside);
                prop_assert_eq!(bits.has_any(probe.clone()), inside > 0);
                prop_assert_eq!(bits.has_beyond(&Bits::default(), probe.clone()), inside > 0);
                prop_assert!(!bits.has_beyond(&bits, probe));
                prop_assert!((0..PAGES_PER_SUPERPAGE).all(|it| bits.has(it) == set.contains(&it)));
            }
        }
    }

    #[test]
    fn neighbours_are_joined() {
        let mut runs = Vec::new();
        [1, 2, 3, 5, 7, 8].into_iter().for_each(|page| append(&mut runs, page));
        assert_eq!(runs, [1..4, 5..6, 7..9]);
    }
}
