//! Where each superpage of a segment lies: a flat table, read by lanes without a lock.
//!
//! One word per superpage: which blade has it, and which superpage of that blade's memory it is (a
//! client on the same host reads it directly); and, while it moves, which record
//! ([`crate::moving`]) tracks its pages. Writers hold the pool's control lock; a reader sees a
//! superpage either allocated or not. Tables come in chunks, made when first needed, so that a
//! small segment costs a few KiB and the largest, of 16 TiB, 8 MiB.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_units::exactly;

use crate::{BladeIndex, SUPERPAGE_PAGES};

/// Superpages of one segment: 16 TiB, all page numbers of 32 bits.
pub(crate) const SEGMENT_LIMIT_SUPERPAGES: u32 = u32::MAX / SUPERPAGE_PAGES + 1;

/// Superpages of one chunk: 16 GiB of memory for 8 KiB of table.
const CHUNK_SUPERPAGES: usize = 1024;
const CHUNKS: usize = SEGMENT_LIMIT_SUPERPAGES as usize / CHUNK_SUPERPAGES;

const ALLOCATED: u64 = 1 << 63;
const MOVING: u64 = 1 << 62;
const FREED: u64 = 1 << 61;
/// The blade of what is on none.
const NOWHERE: BladeIndex = BladeIndex(u8::MAX);

/// Where a superpage lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) blade: BladeIndex,
    /// The superpage's number in the memory of the blade.
    pub(crate) rmma: u32,
    /// Which of the segment's parts on that blade it is in.
    pub(crate) part: u8,
    /// It is leaving that blade; this record says which pages have moved.
    pub(crate) record: Option<u8>,
    /// The program has given it back; the parity of its group still includes it.
    pub(crate) is_freed: bool,
}

impl Place {
    pub(crate) fn at(blade: BladeIndex, part: u8, rmma: u32) -> Self {
        Place { blade, rmma, part, record: None, is_freed: false }
    }

    /// The place of what was lost with its blade, and can be had from the rest of its group.
    pub(crate) fn nowhere() -> Self {
        Place::at(NOWHERE, 0, 0)
    }

    pub(crate) fn is_nowhere(self) -> bool {
        self.blade == NOWHERE
    }

    pub(crate) fn word(self) -> u64 {
        let moving = self.record.map_or(0, |record| MOVING | u64::from(record) << 40);
        let part = u64::from(self.part) << 48;
        let freed = if self.is_freed { FREED } else { 0 };
        let blade = u64::from(self.blade.0) << 32;
        ALLOCATED | moving | freed | part | blade | u64::from(self.rmma)
    }

    pub(crate) fn of_word(word: u64) -> Option<Place> {
        let [r0, r1, r2, r3, blade, record, part, _] = word.to_le_bytes();
        let place = Place {
            blade: BladeIndex(blade),
            rmma: u32::from_le_bytes([r0, r1, r2, r3]),
            part,
            record: (word & MOVING != 0).then_some(record),
            is_freed: word & FREED != 0,
        };
        (word & ALLOCATED != 0).then_some(place)
    }
}

type Chunk = [AtomicU64; CHUNK_SUPERPAGES];

/// The table of one segment.
pub(crate) struct SuperpageMap {
    chunks: Box<[OnceLock<Box<Chunk>>]>,
}

impl std::fmt::Debug for SuperpageMap {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_map().entries(self.iter()).finish()
    }
}

impl SuperpageMap {
    pub(crate) fn new() -> Self {
        SuperpageMap { chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect() }
    }

    /// The place of the superpage, if it is allocated.
    pub(crate) fn get(&self, superpage: u32) -> Option<Place> {
        let (chunk, slot) = split(superpage);
        Place::of_word(self.chunks.get(chunk)?.get()?[slot].load(Ordering::Acquire))
    }

    /// Records the place of the superpage. False if the number is beyond the segment.
    pub(crate) fn set(&self, superpage: u32, place: Option<Place>) -> bool {
        let (chunk, slot) = split(superpage);
        let Some(chunk) = self.chunks.get(chunk) else {
            return false;
        };
        let chunk = chunk.get_or_init(|| Box::new([const { AtomicU64::new(0) }; CHUNK_SUPERPAGES]));
        chunk[slot].store(place.map_or(0, Place::word), Ordering::Release);
        true
    }

    /// Records that a superpage, which has a place, is at another one; what is said of it stays.
    pub(crate) fn set_moved(&self, superpage: u32, place: Place) {
        let (chunk, slot) = split(superpage);
        let word = &self.chunks[chunk].get().expect("what moves has a place")[slot];
        let moved = |before| Some(place.word() & !FREED | before & FREED);
        let before = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, moved);
        assert!(before.is_ok_and(|word| word & ALLOCATED != 0), "what moves has a place");
    }

    /// All allocated superpages in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Place)> {
        let chunks = self.chunks.iter().enumerate();
        chunks.filter_map(|(number, chunk)| Some((number, chunk.get()?))).flat_map(
            |(number, chunk)| {
                let first = number * CHUNK_SUPERPAGES;
                chunk.iter().enumerate().filter_map(move |(slot, word)| {
                    let place = Place::of_word(word.load(Ordering::Acquire))?;
                    Some((exactly(first + slot), place))
                })
            },
        )
    }

    /// Forgets every superpage; the chunks stay for the next user of the table.
    pub(crate) fn clear(&self) {
        for word in self.chunks.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter()) {
            word.store(0, Ordering::Release);
        }
    }
}

fn split(superpage: u32) -> (usize, usize) {
    let number = superpage as usize;
    (number / CHUNK_SUPERPAGES, number % CHUNK_SUPERPAGES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn superpages() -> impl Strategy<Value = u32> {
        prop_oneof![0u32..40, 1020u32..1030, SEGMENT_LIMIT_SUPERPAGES - 3..SEGMENT_LIMIT_SUPERPAGES]
    }

    fn places() -> impl Strategy<Value = Option<Place>> {
        let record = proptest::option::of(0u8..8);
        proptest::option::of((0u8..8, any::<u32>(), 0u8..4, record)).prop_map(|it| {
            let place = |(blade, rmma, part, record)| Place {
                blade: BladeIndex(blade),
                rmma,
                part,
                record,
                is_freed: part == 1,
            };
            it.map(place)
        })
    }

    proptest! {
        #[test]
        fn the_table_does_what_a_plain_map_does(
            changes in proptest::collection::vec((superpages(), places()), 0..200),
            asked in proptest::collection::vec(superpages(), 0..50),
        ) {
            let (table, mut model) = (SuperpageMap::new(), BTreeMap::new());
            for (superpage, place) in changes {
                prop_assert!(table.set(superpage, place));
                match place {
                    Some(place) => model.insert(superpage, place),
                    None => model.remove(&superpage),
                };
            }
            for superpage in asked {
                prop_assert_eq!(table.get(superpage), model.get(&superpage).copied());
            }
            prop_assert_eq!(table.iter().collect::<Vec<_>>(), model.into_iter().collect::<Vec<_>>());
            table.clear();
            prop_assert_eq!(table.iter().count(), 0);
        }
    }

    #[test]
    fn beyond_the_end_there_is_nothing() {
        let table = SuperpageMap::new();
        assert!(!table.set(SEGMENT_LIMIT_SUPERPAGES, None));
        assert_eq!(table.get(u32::MAX), None);
    }
}
