//! Where every item is: an 8-byte word for each, in buckets of one cache line.
//!
//! An entry holds the item's place, its tier, its hit count, and the low 19 bits of the upper half
//! of its key's hash. The index keeps no keys: if these bits match, the item's key has to be
//! compared.
//!
//! The hash space is divided into *regions*. Each is a table in which an item has two buckets: its
//! home, in the order of the hash, and another, computed from home and tag; each leads to the
//! other, so entries move between them when both are full (cuckoo hashing). Bucket, tag and one bit
//! that says which of the two buckets it is give the 32 bits of the hash that the index needs. So
//! it grows without reading the items, which may be on flash: a region grows by quarters of its
//! first size, then splits into two. Growth by quarters keeps the tables at least about 72 % full.
//!
//! More keys with one hash than two buckets hold do not occur unless somebody knows the seed of the
//! hash ([`crate::key`]). Their entries go into a list beside the regions, so that no store is
//! refused; each look-up that finds nothing in its buckets then also looks through that list.

use farpool_units::exactly;

use super::mapping::{Mapping, prefetch};

/// Entries of one bucket: one cache line.
const BUCKET_ENTRIES: usize = 8;
/// Buckets of the smallest region: 1 MiB. With fewer, bits of the hash would be lost.
const REGION_BUCKETS: usize = 1 << 14;
/// The steps in which a region grows, in quarters of [`REGION_BUCKETS`]; after the last it splits.
const GROWTH_QUARTERS: std::ops::RangeInclusive<usize> = 4..=7;
/// The most splits: 16,384 regions, about 3.5 billion items in one shard; then no item is added.
const DEPTH_MAX: u32 = 14;

/// How full a region gets before it grows, in percent; above this, entries move too often.
const LOAD_MAX_PERCENT: usize = 92;
/// The most entries that an insertion moves before the region grows.
const MOVES_MAX: usize = 32;

const PLACE_BITS: u32 = 40;
const TIER_SHIFT: u32 = PLACE_BITS;
const HITS_SHIFT: u32 = TIER_SHIFT + 2;
const TAG_SHIFT: u32 = HITS_SHIFT + 2;
const TAG_MASK: u32 = (1 << 19) - 1;
/// The entry is not in its home bucket but in its other one.
const AWAY: u64 = 1 << 63;
/// The bits of an entry that belong to the index itself.
const OURS: u64 = !((1 << TAG_SHIFT) - 1);
/// The most hits that an entry counts; S3-FIFO needs no more.
pub const HITS_MAX: u8 = 3;

/// The tier that holds an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Memory = 1,
    Far = 2,
    Flash = 3,
}

/// Where an item is in its tier: 40 bits whose meaning the tier defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place(u64);

impl Place {
    /// None if `bits` does not fit into 40 bits.
    #[must_use]
    pub const fn new(bits: u64) -> Option<Self> {
        if bits >> PLACE_BITS == 0 { Some(Self(bits)) } else { None }
    }

    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

/// Where an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ItemAt {
    pub tier: Tier,
    pub place: Place,
}

/// The index word of one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// An entry without its tag; [`Index::insert`] adds it.
    #[must_use]
    pub const fn new(tier: Tier, place: Place, hits: u8) -> Self {
        Self(place.0 | (tier as u64) << TIER_SHIFT | (hits as u64 & 3) << HITS_SHIFT)
    }

    #[must_use]
    pub const fn place(self) -> Place {
        Place(self.0 & ((1 << PLACE_BITS) - 1))
    }

    #[must_use]
    pub const fn tier(self) -> Tier {
        match (self.0 >> TIER_SHIFT) & 3 {
            1 => Tier::Memory,
            2 => Tier::Far,
            _ => Tier::Flash,
        }
    }

    /// Place and tier.
    #[must_use]
    pub const fn item_at(self) -> ItemAt {
        ItemAt { tier: self.tier(), place: self.place() }
    }

    #[must_use]
    pub const fn hits(self) -> u8 {
        ((self.0 >> HITS_SHIFT) & 3) as u8
    }

    /// The same entry with one more hit, up to the maximum.
    #[must_use]
    pub const fn hit(self) -> Self {
        if self.hits() < HITS_MAX { Self(self.0 + (1 << HITS_SHIFT)) } else { self }
    }

    const fn tag(self) -> u32 {
        (self.0 >> TAG_SHIFT) as u32 & TAG_MASK
    }

    const fn tagged(self, hash: u32) -> Self {
        Self(self.0 & !OURS | ((hash & TAG_MASK) as u64) << TAG_SHIFT)
    }

    const fn is_away(self) -> bool {
        self.0 & AWAY != 0
    }
}

/// The position of an entry; valid until the next insertion or removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EntryAt {
    /// The number of the region, or [`OVERFLOW`].
    region: u32,
    word: u32,
}

/// Says that an entry is not in a region but in the list beside them.
const OVERFLOW: u32 = u32::MAX;

/// The index cannot take the item: memory is refused, or it has its largest size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the index of the shard is full")]
pub struct IndexFull;

#[derive(Debug)]
struct Region {
    memory: Mapping,
    buckets: usize,
    /// How many leading bits of the hash all its items share.
    depth: u32,
    /// Those bits, at the top of the word.
    prefix: u32,
    entries: usize,
}

impl Region {
    fn new(quarters: usize, depth: u32, prefix: u32) -> Option<Self> {
        let buckets = REGION_BUCKETS / 4 * quarters;
        let memory = Mapping::zeroed(buckets * BUCKET_ENTRIES * 8)?;
        Some(Self { memory, buckets, depth, prefix, entries: 0 })
    }

    #[inline]
    const fn home_of(&self, hash: u32) -> usize {
        let within = (hash << self.depth) as u64;
        ((within * self.buckets as u64) >> 32) as usize
    }

    /// The other bucket of an entry with this tag: for each tag, a bucket and its other add up to
    /// the same sum.
    #[inline]
    const fn other_of(&self, bucket: usize, tag: u32) -> usize {
        let mixed = tag.wrapping_mul(0x9e37_79b1) as u64;
        let sum = ((mixed * self.buckets as u64) >> 32) as usize;
        if sum >= bucket { sum - bucket } else { sum + self.buckets - bucket }
    }

    /// The upper half of the hash of an entry in `bucket`.
    fn hash_of(&self, bucket: usize, entry: Entry) -> u32 {
        let home = if entry.is_away() { self.other_of(bucket, entry.tag()) } else { bucket };
        let units = (self.buckets as u64) << self.depth;
        // The smallest hash of this home; the largest is less than a tag's range away.
        let first = self.prefix
            + u32::try_from(((home as u64) << 32).div_ceil(units)).expect("a hash of the region");
        first.wrapping_add(entry.tag().wrapping_sub(first) & TAG_MASK)
    }

    #[inline]
    fn bucket(&self, bucket: usize) -> &[u64; BUCKET_ENTRIES] {
        self.memory.words()[bucket * BUCKET_ENTRIES..]
            .first_chunk()
            .expect("buckets lie inside the region")
    }

    fn gap_in(&self, bucket: usize) -> Option<usize> {
        let gap = self.bucket(bucket).iter().position(|&word| word == 0)?;
        Some(bucket * BUCKET_ENTRIES + gap)
    }

    fn insert(&mut self, hash: u32, entry: Entry) -> Option<u32> {
        if self.entries * 100 >= self.buckets * BUCKET_ENTRIES * LOAD_MAX_PERCENT {
            return None;
        }
        let home = self.home_of(hash);
        let other = self.other_of(home, hash & TAG_MASK);
        let gap =
            self.gap_in(home).or_else(|| self.gap_in(other)).or_else(|| self.make_gap(home))?;
        let away = if gap / BUCKET_ENTRIES == home { 0 } else { AWAY };
        self.memory.words_mut()[gap] = entry.tagged(hash).0 | away;
        self.entries += 1;
        Some(exactly(gap))
    }

    /// Moves entries of a full bucket, and those that they displace, to their other buckets.
    fn make_gap(&mut self, bucket: usize) -> Option<usize> {
        // A chain of positions: the entry of each moves to the next one; the last is a gap.
        let mut chain = Vec::with_capacity(MOVES_MAX);
        let mut bucket = bucket;
        for step in 0..MOVES_MAX {
            let words = *self.bucket(bucket);
            let others = words.map(|word| self.other_of(bucket, Entry(word).tag()));
            let with_gap = (0..BUCKET_ENTRIES).find_map(|i| Some((i, self.gap_in(others[i])?)));
            if let Some((i, gap)) = with_gap {
                chain.push(bucket * BUCKET_ENTRIES + i);
                let mut to = gap;
                for &from in chain.iter().rev() {
                    let words = self.memory.words_mut();
                    words[to] = words[from] ^ AWAY;
                    to = from;
                }
                self.memory.words_mut()[chain[0]] = 0;
                return Some(chain[0]);
            }
            // A different victim at each step, and never a bucket that is already in the chain.
            let next = (0..BUCKET_ENTRIES).map(|i| (i + step) % BUCKET_ENTRIES).find(|&i| {
                others[i] != bucket
                    && chain.iter().all(|&place| place / BUCKET_ENTRIES != others[i])
            })?;
            chain.push(bucket * BUCKET_ENTRIES + next);
            bucket = others[next];
        }
        None
    }

    /// Whether it is full only in one place: the two buckets of keys with one hash, say. Enlarging
    /// it would not help.
    const fn is_full_in_one_place(&self) -> bool {
        self.entries < self.buckets * BUCKET_ENTRIES / 2
    }

    fn for_each(&self, mut each: impl FnMut(u32, Entry)) {
        for bucket in 0..self.buckets {
            for &word in self.bucket(bucket).iter().filter(|&&word| word != 0) {
                each(self.hash_of(bucket, Entry(word)), Entry(word));
            }
        }
    }
}

/// Entries for which the buckets of their hashes have no room.
#[derive(Debug, Default)]
struct Overflow {
    /// The upper half of the hash of each.
    hashes: Vec<u32>,
    words: Vec<u64>,
}

impl Overflow {
    const ENTRY_BYTES: usize = 4 + 8;

    /// The first entry of this hash that `is_it` accepts.
    #[cold]
    fn find(&self, hash: u32, mut is_it: impl FnMut(Entry) -> bool) -> Option<(EntryAt, Entry)> {
        let mut same = (0..).zip(&self.hashes).zip(&self.words).filter(|((_, it), _)| **it == hash);
        same.find_map(|((word, _), &entry)| {
            let at = EntryAt { region: OVERFLOW, word };
            is_it(Entry(entry)).then_some((at, Entry(entry)))
        })
    }

    fn insert(&mut self, hash: u32, entry: Entry) -> Result<EntryAt, IndexFull> {
        let word = u32::try_from(self.words.len()).map_err(|_| IndexFull)?;
        self.hashes.push(hash);
        self.words.push(entry.tagged(hash).0);
        Ok(EntryAt { region: OVERFLOW, word })
    }

    fn remove(&mut self, word: usize) {
        self.hashes.swap_remove(word);
        self.words.swap_remove(word);
        if self.words.is_empty() {
            *self = Self::default();
        }
    }

    fn retain(&mut self, mut stays: impl FnMut(Entry) -> bool) {
        for word in (0..self.words.len()).rev() {
            if !stays(Entry(self.words[word])) {
                self.remove(word);
            }
        }
    }
}

/// The index of one shard.
#[derive(Debug)]
pub struct Index {
    regions: Vec<Region>,
    overflow: Overflow,
    /// The region of the hashes that begin with these bits.
    directory: Vec<u32>,
    depth: u32,
}

impl Index {
    /// An empty index of one region.
    pub fn new() -> Result<Self, IndexFull> {
        let region = Region::new(*GROWTH_QUARTERS.start(), 0, 0).ok_or(IndexFull)?;
        let overflow = Overflow::default();
        Ok(Self { regions: vec![region], overflow, directory: vec![0], depth: 0 })
    }

    /// Entries in the list beside the regions: none, or next to none, unless somebody has chosen
    /// keys by their hashes.
    #[must_use]
    pub const fn overflow_entries(&self) -> usize {
        self.overflow.words.len()
    }

    #[must_use]
    pub fn entries(&self) -> usize {
        self.regions.iter().map(|region| region.entries).sum::<usize>() + self.overflow.words.len()
    }

    /// The memory of the index, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.regions.iter().map(|region| region.memory.len()).sum::<usize>()
            + self.directory.len() * 4
            + self.overflow.words.capacity() * Overflow::ENTRY_BYTES
    }

    #[inline]
    const fn upper(hash: u64) -> u32 {
        (hash >> 32) as u32
    }

    #[inline]
    fn region_of(&self, hash: u32) -> u32 {
        self.directory[((u64::from(hash) << self.depth) >> 32) as usize]
    }

    /// Begins to load the home bucket of `hash`.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        let hash = Self::upper(hash);
        let region = &self.regions[self.region_of(hash) as usize];
        prefetch(&region.memory, region.home_of(hash) * BUCKET_ENTRIES * 8);
    }

    /// The first entry with this hash's tag that `is_it` accepts.
    #[inline]
    pub fn find(
        &self,
        hash: u64,
        mut is_it: impl FnMut(Entry) -> bool,
    ) -> Option<(EntryAt, Entry)> {
        let hash = Self::upper(hash);
        let number = self.region_of(hash);
        let region = &self.regions[number as usize];
        let tag = hash & TAG_MASK;
        let mut bucket = region.home_of(hash);
        for away in [0, AWAY] {
            let wanted = u64::from(tag) << TAG_SHIFT | away;
            for (i, &word) in region.bucket(bucket).iter().enumerate() {
                if word & OURS == wanted && word != 0 && is_it(Entry(word)) {
                    let word_at =
                        u32::try_from(bucket * BUCKET_ENTRIES + i).expect("regions are small");
                    return Some((EntryAt { region: number, word: word_at }, Entry(word)));
                }
            }
            bucket = region.other_of(bucket, tag);
        }
        if self.overflow.words.is_empty() { None } else { self.overflow.find(hash, is_it) }
    }

    /// The entry at a position that may have changed, if it has this hash's tag.
    #[inline]
    #[must_use]
    pub fn entry_with_tag(&self, at: EntryAt, hash: u64) -> Option<Entry> {
        // An entry of the list beside the regions is looked up.
        let region = self.regions.get(at.region as usize)?;
        let entry = Entry(*region.memory.words().get(at.word as usize)?);
        (entry.0 != 0 && entry.tag() == Self::upper(hash) & TAG_MASK).then_some(entry)
    }

    #[must_use]
    pub fn entry(&self, at: EntryAt) -> Entry {
        if at.region == OVERFLOW {
            return Entry(self.overflow.words[at.word as usize]);
        }
        Entry(self.regions[at.region as usize].memory.words()[at.word as usize])
    }

    /// Changes tier, place and hits of an entry, for the same key.
    #[inline]
    pub fn set(&mut self, at: EntryAt, entry: Entry) {
        let word = if at.region == OVERFLOW {
            &mut self.overflow.words[at.word as usize]
        } else {
            &mut self.regions[at.region as usize].memory.words_mut()[at.word as usize]
        };
        assert!(*word != 0, "an entry that changes is there");
        *word = *word & OURS | entry.0 & !OURS;
    }

    /// Adds an entry. The caller knows that the key has none.
    pub fn insert(&mut self, hash: u64, entry: Entry) -> Result<EntryAt, IndexFull> {
        let hash = Self::upper(hash);
        loop {
            let region = self.region_of(hash);
            if let Some(word) = self.regions[region as usize].insert(hash, entry) {
                return Ok(EntryAt { region, word });
            }
            if self.regions[region as usize].is_full_in_one_place() {
                return self.overflow.insert(hash, entry);
            }
            self.grow(region)?;
        }
    }

    pub fn remove(&mut self, at: EntryAt) {
        if at.region == OVERFLOW {
            return self.overflow.remove(at.word as usize);
        }
        let region = &mut self.regions[at.region as usize];
        let word = std::mem::take(&mut region.memory.words_mut()[at.word as usize]);
        assert!(word != 0, "an entry is removed once");
        region.entries -= 1;
    }

    /// Removes the entries of one region that `goes` selects. Returns how many, or None if there is
    /// no such region. The list beside the regions counts as the last. An entry never moves to a
    /// region with a lower number than its own, so a walk over all numbers meets every entry.
    pub fn remove_in(
        &mut self,
        number: usize,
        mut goes: impl FnMut(Entry) -> bool,
    ) -> Option<usize> {
        if number == self.regions.len() {
            let before = self.overflow.words.len();
            self.overflow.retain(|entry| !goes(entry));
            return Some(before - self.overflow.words.len());
        }
        let region = self.regions.get_mut(number)?;
        let mut removed = 0;
        for word in region.memory.words_mut() {
            if *word != 0 && goes(Entry(*word)) {
                *word = 0;
                removed += 1;
            }
        }
        region.entries -= removed;
        Some(removed)
    }

    /// Shows the entries of one region, as [`Self::remove_in`] counts them. False if there is no
    /// such region.
    pub fn see_in(&self, number: usize, mut see: impl FnMut(Entry)) -> bool {
        let words = match self.regions.get(number) {
            Some(region) => region.memory.words(),
            None if number == self.regions.len() => &self.overflow.words,
            None => return false,
        };
        words.iter().filter(|&&word| word != 0).for_each(|&word| see(Entry(word)));
        true
    }

    /// Enlarges region `number` by a quarter, or splits it.
    fn grow(&mut self, number: u32) -> Result<(), IndexFull> {
        let old = &self.regions[number as usize];
        for quarters in old.buckets * 4 / REGION_BUCKETS + 1..=*GROWTH_QUARTERS.end() {
            let mut new = Region::new(quarters, old.depth, old.prefix).ok_or(IndexFull)?;
            let mut fits = true;
            old.for_each(|hash, entry| fits = fits && new.insert(hash, entry).is_some());
            if fits {
                assert!(new.entries == old.entries, "a region that grows keeps its entries");
                self.regions[number as usize] = new;
                return Ok(());
            }
        }
        self.split(number)
    }

    fn split(&mut self, number: u32) -> Result<(), IndexFull> {
        let old = &self.regions[number as usize];
        let depth = old.depth + 1;
        if depth > DEPTH_MAX {
            return Err(IndexFull);
        }
        let bit = 1u32 << (32 - depth);
        let quarters = *GROWTH_QUARTERS.start();
        let mut lower = Region::new(quarters, depth, old.prefix).ok_or(IndexFull)?;
        let mut upper = Region::new(quarters, depth, old.prefix | bit).ok_or(IndexFull)?;
        // Groups of keys with one hash may need the same buckets.
        let mut homeless = Vec::new();
        old.for_each(|hash, entry| {
            let half = if hash & bit == 0 { &mut lower } else { &mut upper };
            if half.insert(hash, entry).is_none() {
                homeless.push((hash, entry));
            }
        });
        assert!(
            lower.entries + upper.entries + homeless.len() == old.entries,
            "a region that splits keeps its entries"
        );
        for (hash, entry) in homeless {
            self.overflow.insert(hash, entry)?;
        }
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|&region| [region, region]).collect();
            self.depth = depth;
        }
        let new = u32::try_from(self.regions.len()).expect("at most 16,384 regions");
        let shift = 32 - self.depth;
        let first = (upper.prefix >> shift) as usize;
        self.directory[first..first + (1 << (self.depth - depth))].fill(new);
        self.regions[number as usize] = lower;
        self.regions.push(upper);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn spread(number: u64) -> u64 {
        // SplitMix64's finalizer.
        let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn entry(number: u64) -> Entry {
        Entry::new(Tier::Memory, Place::new(number).unwrap(), 0)
    }

    fn find(index: &Index, number: u64) -> Option<(EntryAt, Entry)> {
        index.find(spread(number), |entry| entry.place().bits() == number)
    }

    #[test]
    fn a_million_entries_are_found_and_take_less_than_eleven_bytes_each() {
        let mut index = Index::new().unwrap();
        let mut worst: f64 = 0.0;
        for number in 0..1_000_000 {
            index.insert(spread(number), entry(number)).unwrap();
            if number > 100_000 {
                worst = worst.max(index.bytes() as f64 / number as f64);
            }
        }
        assert!(worst < 12.5, "{worst:.1} bytes an entry");
        assert!(index.bytes() as f64 / 1e6 < 11.2, "{} bytes", index.bytes());
        for number in 0..1_000_000 {
            assert!(find(&index, number).is_some(), "{number} is lost");
        }
        assert!((1_000_000..2_000_000).all(|number| find(&index, number).is_none()));
        for number in (0..1_000_000).step_by(2) {
            index.remove(find(&index, number).unwrap().0);
        }
        for number in 0..1_000_000 {
            assert_eq!(find(&index, number).is_some(), number % 2 == 1, "{number}");
        }
    }

    #[test]
    fn keys_with_one_hash_are_all_taken_and_found_and_removed() {
        let mut index = Index::new().unwrap();
        let same = 0x1234_5678_9abc_def0;
        let find = |index: &Index, number| {
            index.find(same, |entry| entry.place().bits() == number).map(|it| it.0)
        };
        for number in 0..1000 {
            index.insert(same, entry(number)).unwrap();
        }
        index.insert(spread(1), entry(1000)).unwrap();
        assert_eq!(index.entries(), 1001);
        let mut seen = 0;
        assert!((0..2).all(|part| index.see_in(part, |_| seen += 1)) && !index.see_in(2, |_| ()));
        assert_eq!(seen, 1001);
        for number in 0..1000 {
            let at = find(&index, number).unwrap();
            index.set(at, index.entry(at).hit());
            assert_eq!(index.entry(at).hits(), 1, "{number}");
        }
        let even = |entry: Entry| entry.place().bits().is_multiple_of(2);
        let removed: usize = (0..2).map(|part| index.remove_in(part, even).unwrap()).sum();
        assert_eq!((removed, index.remove_in(2, even)), (501, None));
        for number in 0..1000 {
            assert_eq!(find(&index, number).is_some(), number % 2 == 1, "{number}");
        }
        for number in (1..1000).step_by(2) {
            index.remove(find(&index, number).unwrap());
        }
        assert_eq!((index.entries(), index.overflow.words.capacity()), (0, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, .. ProptestConfig::default() })]
        /// Hashes crowd into a few buckets, so that entries are displaced and gaps closed all the
        /// time.
        #[test]
        fn it_behaves_like_a_map(
            steps in prop::collection::vec((0u64..400, any::<bool>()), 1..4000), buckets in 1u64..40,
        ) {
            let mut index = Index::new().unwrap();
            let mut model = HashMap::new();
            let crowd = |number: u64| (spread(number) % (buckets << 18)) << 32 | 0x5555;
            for (number, add) in steps {
                let found = index.find(crowd(number), |entry| entry.place().bits() == number);
                prop_assert_eq!(found.map(|(_, entry)| entry.hits()), model.get(&number).copied());
                match (add, found) {
                    (true, Some((at, entry))) => {
                        index.set(at, entry.hit());
                        model.insert(number, entry.hit().hits());
                    }
                    (true, None) => {
                        if index.insert(crowd(number), entry(number)).is_ok() {
                            model.insert(number, 0);
                        }
                    }
                    (false, Some((at, _))) => {
                        index.remove(at);
                        model.remove(&number);
                    }
                    (false, None) => {}
                }
            }
            prop_assert_eq!(index.entries(), model.len());
            for number in 0..400 {
                let found = index.find(crowd(number), |entry| entry.place().bits() == number);
                prop_assert_eq!(found.is_some(), model.contains_key(&number));
            }
        }
    }
}
