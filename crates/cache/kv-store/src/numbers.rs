//! Asks a policy of `farpool_policy` which item to evict; keys get numbers for that.
//!
//! Policies know items by dense numbers, while they are there and while the policy remembers them
//! afterwards. A second index maps a key's hash to its number, a table maps the number back to the
//! hash. When a number is freed, the last one takes its place, so all tables are as long as the
//! number of known keys, and shrink with it. This costs 8 bytes of table and about 10 of index for
//! each known key, plus the policy's own memory.
//!
//! Two keys with the same 64-bit hash are one to the policy: they come and go together.

use farpool_policy::{CacheKind, RANKED_PAGES_MAX, Ranking};
use farpool_units::exactly;

use super::index::{Entry, EntryAt, Index, IndexFull, Place, Tier};

/// The tables grow by this share of the known keys, in steps of at least [`STEP_NUMBERS_MIN`].
const GROWTH_SHARE: usize = 8;
/// The smallest step, in numbers: about 30 KiB.
const STEP_NUMBERS_MIN: usize = 1024;
/// Tables that would be less than half full shrink.
const SHRINK_SHARE: usize = 2;
/// An index that takes more bytes than this for each known key is rebuilt ...
const INDEX_BYTES_PER_KEY_MAX: usize = 64;
/// ... unless it is this small: one region.
const INDEX_BYTES_MIN: usize = 1 << 20;
/// Any seed will do: there is nothing to gain by guessing which item is evicted next.
const RANDOM_SEED: u64 = 0x6661_7270_6f6f_6c21;

/// The keys that a policy knows.
#[derive(Debug)]
pub(super) struct Ranked {
    policy: Box<dyn Ranking>,
    kind: CacheKind,
    /// Maps the hash of a key to its number, which is stored in the entry's place.
    numbers: Index,
    /// Maps a number to its hash.
    hashes: Vec<u64>,
    /// How many numbers the policy's tables have room for.
    room: usize,
    /// Numbers to be freed.
    forgotten: Vec<u32>,
}

impl Ranked {
    pub(super) fn new(kind: CacheKind) -> Result<Self, IndexFull> {
        Ok(Self {
            policy: kind.ranking(RANDOM_SEED),
            kind,
            numbers: Index::new()?,
            hashes: Vec::new(),
            room: 0,
            forgotten: Vec::new(),
        })
    }

    pub(super) const fn kind(&self) -> CacheKind {
        self.kind
    }

    /// The memory of all tables and of the policy.
    pub(super) fn bytes(&self) -> usize {
        self.numbers.bytes() + self.hashes.capacity() * 8 + self.policy.bytes()
    }

    /// Number of items; those whose keys share one hash count as one.
    pub(super) fn len(&self) -> usize {
        self.policy.len()
    }

    fn find(&self, hash: u64) -> Option<(EntryAt, u32)> {
        let number = |entry: Entry| exactly::<u32, _>(entry.place().bits());
        let is_it = |entry| self.hashes.get(number(entry) as usize) == Some(&hash);
        self.numbers.find(hash, is_it).map(|(at, entry)| (at, number(entry)))
    }

    /// Notes that an item was read.
    pub(super) fn touch(&mut self, hash: u64) {
        if let Some((_, number)) = self.find(hash) {
            self.policy.touch(number, &mut self.forgotten);
            self.free_forgotten();
        }
    }

    /// Notes that an item was stored: a new one, or a replacement, which counts as a read. Fails if
    /// memory is refused; the policy then does not know the item.
    pub(super) fn store(&mut self, hash: u64) -> Result<(), IndexFull> {
        let number = match self.find(hash) {
            Some((_, number)) if self.policy.touch(number, &mut self.forgotten) => {
                self.free_forgotten();
                return Ok(());
            }
            Some((_, number)) => number,
            None => self.take_number(hash)?,
        };
        #[expect(clippy::cast_possible_truncation, reason = "half a hash is name enough")]
        self.policy.insert(number, hash as u32, &mut self.forgotten);
        self.free_forgotten();
        Ok(())
    }

    /// Notes that an item is gone without the policy having chosen it.
    pub(super) fn remove(&mut self, hash: u64) {
        if let Some((_, number)) = self.find(hash) {
            self.policy.remove(number, &mut self.forgotten);
            self.forgotten.push(number);
            self.free_forgotten();
        }
    }

    /// Notes that the store is full: items are about to be evicted.
    pub(super) fn is_full(&mut self) {
        self.policy.set_capacity(exactly(self.policy.len()), &mut self.forgotten);
        self.free_forgotten();
    }

    /// Chooses the next item to evict. Returns its hash.
    pub(super) fn victim(&mut self) -> Option<u64> {
        let number = self.policy.victim(&mut self.forgotten)?;
        let hash = self.hashes[number as usize];
        if !self.policy.knows(number) {
            self.forgotten.push(number);
        }
        self.free_forgotten();
        Some(hash)
    }

    /// Enlarges the tables if one more key needs it. True if it did.
    pub(super) fn prepare(&mut self) -> bool {
        let is_full = self.hashes.len() == self.room;
        if is_full {
            self.resize(self.hashes.len());
        }
        is_full
    }

    fn take_number(&mut self, hash: u64) -> Result<u32, IndexFull> {
        self.prepare();
        let number = self.hashes.len();
        if number >= RANKED_PAGES_MAX.min(self.room) {
            return Err(IndexFull);
        }
        assert!(self.forgotten.is_empty(), "only numbers behind the last are free");
        let place = Place::new(number as u64).ok_or(IndexFull)?;
        self.numbers.insert(hash, Entry::new(Tier::Memory, place, 0))?;
        self.hashes.push(hash);
        Ok(exactly(number))
    }

    /// Sizes the tables for `numbers` numbers and some more.
    fn resize(&mut self, numbers: usize) {
        let step = (numbers / GROWTH_SHARE).max(STEP_NUMBERS_MIN);
        self.room = (numbers + step).min(RANKED_PAGES_MAX);
        self.policy.resize(self.room);
        if self.hashes.capacity() > self.room {
            self.hashes.shrink_to(self.room);
        } else {
            self.hashes.reserve_exact(self.room - self.hashes.len());
        }
    }

    fn free_forgotten(&mut self) {
        if self.forgotten.is_empty() {
            return;
        }
        // The highest first, so that none of them is the last number that takes another's place.
        self.forgotten.sort_unstable();
        while let Some(number) = self.forgotten.pop() {
            self.free(number);
        }
        if self.hashes.len() < self.room / SHRINK_SHARE && self.room > 4 * STEP_NUMBERS_MIN {
            self.resize(self.hashes.len());
            self.shrink_index();
        }
    }

    fn free(&mut self, number: u32) {
        assert!(!self.policy.knows(number), "a number is free when nothing is known of it");
        if let Some((at, _)) = self.find(self.hashes[number as usize]) {
            self.numbers.remove(at);
        }
        let last = self.hashes.len() - 1;
        if number as usize != last {
            let hash = self.hashes[last];
            let (at, last) = self.find(hash).expect("every number is in the index");
            self.policy.rename(last, number);
            let place = Place::new(u64::from(number)).expect("32 of 40 bits");
            self.numbers.set(at, Entry::new(Tier::Memory, place, 0));
            self.hashes[number as usize] = hash;
        }
        self.hashes.pop();
    }

    /// Rebuilds the index if it is too large for the known keys.
    fn shrink_index(&mut self) {
        let most = INDEX_BYTES_MIN.max(self.hashes.len() * INDEX_BYTES_PER_KEY_MAX);
        if self.numbers.bytes() <= most {
            return;
        }
        let Ok(mut smaller) = Index::new() else { return };
        for (number, &hash) in (0..).zip(&self.hashes) {
            let Some(place) = Place::new(number) else { return };
            if smaller.insert(hash, Entry::new(Tier::Memory, place, 0)).is_err() {
                return;
            }
        }
        self.numbers = smaller;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn hash(key: u64) -> u64 {
        farpool_keyvault::owner::hash_key(&key.to_le_bytes())
    }

    /// Every number leads to its hash and back, and the policy knows every number.
    fn check(ranked: &Ranked) {
        assert_eq!(ranked.numbers.entries(), ranked.hashes.len());
        for (number, &hash) in (0..).zip(&ranked.hashes) {
            assert_eq!(ranked.find(hash).map(|(_, number)| number), Some(number));
            assert!(ranked.policy.knows(number));
        }
    }

    #[test]
    fn tables_shrink_with_what_is_known() {
        for kind in CacheKind::ALL {
            let mut ranked = Ranked::new(kind).unwrap();
            let empty_bytes = ranked.bytes();
            (0..300_000).for_each(|key| ranked.store(hash(key)).unwrap());
            let each = (ranked.bytes() - empty_bytes) as f64 / 300_000.0;
            assert!((16.0..60.0).contains(&each), "{kind}: {each:.1} bytes a key");
            (100..300_000).for_each(|key| ranked.remove(hash(key)));
            check(&ranked);
            assert!((0..100).all(|key| ranked.find(hash(key)).is_some()), "{kind}");
            // The sketch of W-TinyLFU shrinks when it is told that less fits.
            ranked.is_full();
            assert!(ranked.bytes() < empty_bytes + (300 << 10), "{kind}: {} bytes", ranked.bytes());
        }
    }

    #[test]
    fn keys_that_the_index_alone_cannot_tell_apart_are_all_known() {
        let mut ranked = Ranked::new(CacheKind::Lru).unwrap();
        let same_upper_half = |key: u64| 0x1234_5678_0000_0000 | key;
        assert!((0..100).all(|key| ranked.store(same_upper_half(key)).is_ok()));
        check(&ranked);
        assert_eq!(ranked.victim(), Some(same_upper_half(0)));
        assert_eq!(ranked.store(same_upper_half(100)), Ok(()));
        check(&ranked);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 48, ..ProptestConfig::default() })]

        #[test]
        fn numbers_and_hashes_lead_to_each_other(
            steps in prop::collection::vec((0u8..8, 0u64..300), 1..1500),
        ) {
            for kind in CacheKind::ALL {
                let mut ranked = Ranked::new(kind).unwrap();
                let mut there = BTreeSet::new();
                for &(what, key) in &steps {
                    match what {
                        0..4 => {
                            ranked.store(hash(key)).unwrap();
                            there.insert(hash(key));
                        }
                        4 => ranked.touch(hash(key)),
                        5 => {
                            ranked.remove(hash(key));
                            there.remove(&hash(key));
                        }
                        6 => ranked.is_full(),
                        _ => {
                            let victim = ranked.victim();
                            prop_assert_eq!(victim.is_none(), there.is_empty());
                            prop_assert!(victim.is_none_or(|hash| there.remove(&hash)), "{}", kind);
                        }
                    }
                    prop_assert_eq!(ranked.policy.len(), there.len());
                }
                check(&ranked);
            }
        }
    }
}
