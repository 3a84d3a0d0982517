//! Gives addresses dense numbers in the order of their first touch, once; all computing on a trace
//! then uses plain arrays.
//!
//! An open hash table of 16-byte slots, at most half full. Pages are looked up in groups: the first
//! pass only loads the slots, so that the cache misses of a group overlap; the second resolves
//! them.

/// The most distinct pages: dense numbers are 32 bits wide, and one value means no page.
pub const MAX_PAGES: u64 = (u32::MAX - 1) as u64;

/// Lookups in a group, whose cache misses overlap.
const GROUP: usize = 32;

/// Slots of an empty table.
const FIRST_SLOTS: usize = 1 << 12;

/// Multiplier of Fibonacci hashing: 2^64 divided by the golden ratio, odd.
const HASH_MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// Not a page.
const EMPTY: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Slot {
    page: u64,
    dense: u32,
}

/// There are more distinct pages than allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {limit} distinct pages, from item {at}")]
pub struct PageLimitReached {
    /// The limit.
    pub limit: u64,
    /// Index, among the call's items, of the first page over the limit.
    pub at: usize,
}

/// Gives each distinct page the next number from 0.
#[derive(Debug)]
pub struct Densifier {
    slots: Vec<Slot>,
    /// `slots.len()` is 2^(64 - shift).
    shift: u32,
    page_count: u32,
    limit: u64,
}

impl Densifier {
    /// Creates a table for at most `limit` distinct pages (and never more than [`MAX_PAGES`]).
    #[must_use]
    pub fn new(limit: u64) -> Self {
        let mut table =
            Self { slots: Vec::new(), shift: 0, page_count: 0, limit: limit.min(MAX_PAGES) };
        table.resize(FIRST_SLOTS);
        table
    }

    /// Distinct pages so far.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.page_count as usize
    }

    /// Returns the bytes that a table for `pages` distinct pages takes at its largest (while it
    /// doubles).
    #[must_use]
    pub fn memory_bytes(pages: u64) -> u64 {
        let slots = pages.saturating_mul(2).checked_next_power_of_two().unwrap_or(u64::MAX);
        slots.saturating_mul(size_of::<Slot>() as u64 * 3 / 2)
    }

    /// Appends the dense number of each page to `out`.
    ///
    /// # Errors
    /// A page exceeds the limit; the numbers before it stay in `out`.
    pub fn number(
        &mut self,
        pages: impl Iterator<Item = u64>,
        out: &mut Vec<u32>,
    ) -> Result<(), PageLimitReached> {
        let mut pages = pages;
        let mut group = [0u64; GROUP];
        let mut at = 0;
        loop {
            let mut filled = 0;
            for (place, page) in group.iter_mut().zip(&mut pages) {
                *place = page;
                filled += 1;
            }
            self.number_group(&group[..filled], out)
                .map_err(|offset| PageLimitReached { limit: self.limit, at: at + offset })?;
            at += filled;
            if filled < GROUP {
                return Ok(());
            }
        }
    }

    fn number_group(&mut self, pages: &[u64], out: &mut Vec<u32>) -> Result<(), usize> {
        if (self.page_count as usize + GROUP) * 2 > self.slots.len() {
            self.resize(self.slots.len() * 2);
        }
        let mut first = [Slot { page: 0, dense: EMPTY }; GROUP];
        for (slot, &page) in first.iter_mut().zip(pages) {
            *slot = self.slots[self.home(page)];
        }
        for (offset, (slot, &page)) in first.iter().zip(pages).enumerate() {
            let is_found = slot.page == page && slot.dense != EMPTY;
            let dense = if is_found { slot.dense } else { self.find_or_add(page).ok_or(offset)? };
            out.push(dense);
        }
        Ok(())
    }

    #[allow(clippy::cast_possible_truncation, reason = "shifted to the bits of a slot's number")]
    fn home(&self, page: u64) -> usize {
        (page.wrapping_mul(HASH_MULTIPLIER) >> self.shift) as usize
    }

    fn find_or_add(&mut self, page: u64) -> Option<u32> {
        let mask = self.slots.len() - 1;
        let mut at = self.home(page);
        loop {
            let slot = self.slots[at];
            if slot.dense == EMPTY {
                if u64::from(self.page_count) == self.limit {
                    return None;
                }
                self.slots[at] = Slot { page, dense: self.page_count };
                self.page_count += 1;
                return Some(self.page_count - 1);
            }
            if slot.page == page {
                return Some(slot.dense);
            }
            at = (at + 1) & mask;
        }
    }

    fn resize(&mut self, slot_count: usize) {
        assert!(
            slot_count.is_power_of_two() && slot_count > self.page_count(),
            "a table of slots has room for every page and a free slot to end a search"
        );
        let empty = vec![Slot { page: 0, dense: EMPTY }; slot_count];
        let old = std::mem::replace(&mut self.slots, empty);
        self.shift = 64 - slot_count.ilog2();
        for slot in old.into_iter().filter(|slot| slot.dense != EMPTY) {
            let mut at = self.home(slot.page);
            while self.slots[at].dense != EMPTY {
                at = (at + 1) & (slot_count - 1);
            }
            self.slots[at] = slot;
        }
    }

    /// The page behind each dense number.
    #[must_use]
    pub fn pages(&self) -> Vec<u64> {
        let mut pages = vec![0; self.page_count()];
        for slot in self.slots.iter().filter(|slot| slot.dense != EMPTY) {
            pages[slot.dense as usize] = slot.page;
        }
        pages
    }
}

/// A trace as dense page numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DensePages {
    /// One number in `0..page_count` for each record.
    pub pages: Vec<u32>,
    /// Distinct pages.
    pub page_count: usize,
    /// Bytes of a page.
    pub page_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn numbers_are_those_of_a_plain_map(
            pages in proptest::collection::vec(prop_oneof![0u64..50, any::<u64>()], 0..3000),
            cut in 0usize..3000,
        ) {
            let mut densifier = Densifier::new(MAX_PAGES);
            let mut numbers = Vec::new();
            let cut = cut.min(pages.len());
            densifier.number(pages[..cut].iter().copied(), &mut numbers).unwrap();
            densifier.number(pages[cut..].iter().copied(), &mut numbers).unwrap();
            let mut model = HashMap::new();
            let mut order = Vec::new();
            for (&page, &number) in pages.iter().zip(&numbers) {
                let next = u32::try_from(model.len()).unwrap();
                let expected = *model.entry(page).or_insert_with(|| { order.push(page); next });
                prop_assert_eq!(number, expected);
            }
            prop_assert_eq!(densifier.page_count(), order.len());
            prop_assert_eq!(densifier.pages(), order);
        }
    }

    #[test]
    fn a_page_too_many_is_named_by_its_place() {
        let mut densifier = Densifier::new(3);
        let mut numbers = Vec::new();
        let refused = densifier.number([7, 7, 8, 9, 9, 10].into_iter(), &mut numbers);
        assert_eq!(refused, Err(PageLimitReached { limit: 3, at: 5 }));
        assert_eq!(numbers, [0, 0, 1, 2, 2]);
    }

    #[test]
    fn many_pages_at_one_distance_stay_quick_to_find() {
        // Every page 2^40 apart: a table that hashed only low bits would take quadratic time.
        let mut densifier = Densifier::new(MAX_PAGES);
        let mut numbers = Vec::new();
        densifier.number((0..200_000u64).map(|n| n << 40), &mut numbers).unwrap();
        assert_eq!(numbers, (0..200_000).collect::<Vec<u32>>());
    }
}
