//! The seals of one segment: its keys, and for each page the tag and the version it was last sealed
//! with. They stay with the client, so nothing that a blade answers is believed.
//!
//! Only who made a key seals under it. A child of fork opens its parent's pages with its parent's
//! key, and what it writes once the segment is its own it seals under another: else both could seal
//! different bytes under the same version.
//!
//! A page's seal is written by whoever writes the page, and read by whoever reads it; both are
//! never under way at once, and a page passes from thread to thread by its owner's synchronization.
//! A page's version counts up for as long as the segment lives, also over memory that was freed and
//! allocated anew: no version is sealed twice under one key.
//!
//! Memory: 23 bytes a page, 0.56 % of what is far. What a freed superpage had is used again by the
//! next one of its number, and freed with the segment.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};

use farpool_seal::{PageVersion, SealKey, TAG_BYTES, Tag};
use farpool_units::{PAGE_BYTES, exactly};

use crate::digests::Digests;
use crate::map::SEGMENT_LIMIT_SUPERPAGES;
use crate::{PageError, PoolError, SUPERPAGE_PAGES};

/// Superpages of one chunk, which is made when the first of them is.
const CHUNK_SUPERPAGES: u32 = 1024;
/// Pages whose seals are made together, when the first of them is written: 736 bytes.
const GROUP_PAGES: u32 = 32;
/// Most sealings of one page, over two years at a million a second; a page that has had them can no
/// longer be written.
const VERSION_LIMIT: u64 = 1 << 46;
/// Marks a page that has been written; beside the upper 14 bits of the version.
const WRITTEN: u16 = 1 << 15;
/// Marks one that was given back: nobody reads it, though its blade has it and the parity counts it
/// ([`crate::parity`]).
const GIVEN_BACK: u16 = 1 << 14;
/// The same beside an exported version.
const EXPORTED_GIVEN_BACK: u64 = 1 << 63;
/// Most keys of one segment: one for each generation of children that wrote to it. With more, a
/// segment that was shared stays frozen.
const KEY_LIMIT: usize = u8::MAX as usize;
/// Bytes of one exported seal: page, the key's number, version, tag.
const EXPORTED_BYTES: usize = 4 + 1 + 8 + TAG_BYTES;
/// Says that digests of parity follow the keys.
const WITH_DIGESTS: u8 = 1;

/// The seals of one segment.
#[derive(Debug)]
pub struct Seals {
    /// Keys of others, who may still seal under them: pages are only opened with these.
    inherited: Vec<SealKey>,
    /// The key that pages are sealed under; its number is the next after those of others.
    own: OnceLock<SealKey>,
    table: Arc<Table>,
}

/// The seals of all superpages.
#[derive(Debug)]
struct Table {
    chunks: Box<[OnceLock<Box<Chunk>>]>,
    /// Of the parity, where there is any.
    digests: OnceLock<Digests>,
}

type Chunk = [OnceLock<Box<SuperpageSeals>>; CHUNK_SUPERPAGES as usize];

/// The seals of one superpage, a group of pages at a time: a superpage is often written in few
/// places, above all by children of fork, of which each has a segment of its own.
type SuperpageSeals = [OnceLock<Box<Group>>; (SUPERPAGE_PAGES / GROUP_PAGES) as usize];

/// The seals of some neighbouring pages, field by field.
#[derive(Debug, Default)]
struct Group {
    tags: [[AtomicU64; 2]; GROUP_PAGES as usize],
    /// The lower 32 bits of the versions.
    versions: [AtomicU32; GROUP_PAGES as usize],
    /// The upper 14 bits, and whether the page is written, and was given back.
    upper: [AtomicU16; GROUP_PAGES as usize],
    /// The numbers of the keys.
    keys: [AtomicU8; GROUP_PAGES as usize],
}

/// Most of a client's memory that its far memory may take: 0.6 %.
const _: () = assert!(size_of::<Group>() <= GROUP_PAGES as usize * PAGE_BYTES * 6 / 1000);

/// What a page must be opened with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seal {
    key: u8,
    version: u64,
    tag: Tag,
}

impl Seals {
    /// A new segment's: nothing is written.
    ///
    /// # Errors
    /// The kernel gave no random numbers for a key.
    pub(crate) fn fresh() -> Result<Seals, PoolError> {
        let seals = Seals::of(Vec::new(), Arc::new(Table::new()));
        seals.make_own().map(|()| seals)
    }

    /// Prepares for parity.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub(crate) fn with_parity(self) -> Result<Seals, PoolError> {
        let digests = Digests::new()?;
        self.table.digests.get_or_init(|| digests);
        Ok(self)
    }

    /// Notes what is written as a page of the parity.
    pub(crate) fn note_parity(&self, page: u32, bytes: &[u8; PAGE_BYTES]) {
        if let Some(digests) = self.table.digests.get() {
            digests.note(page, bytes);
        }
    }

    /// Checks a page of the parity, as far as anything is known of it.
    ///
    /// # Errors
    /// It is not what was written.
    pub(crate) fn check_parity(
        &self,
        page: u32,
        bytes: &[u8; PAGE_BYTES],
    ) -> Result<(), PageError> {
        self.table.digests.get().map_or(Ok(()), |digests| digests.check(page, bytes))
    }

    /// Notes that nobody knows any more what a page of the parity should be.
    pub(crate) fn doubt_parity(&self, page: u32) {
        if let Some(digests) = self.table.digests.get() {
            digests.doubt(page);
        }
    }

    /// True if nobody knows what a page of the parity should be.
    pub(crate) fn is_parity_doubtful(&self, page: u32) -> bool {
        self.table.digests.get().is_some_and(|digests| digests.is_doubtful(page))
    }

    /// Nothing is known of a group's parity any more: its memory is fresh, or gone.
    pub(crate) fn begin_parity(&self, group: u32) {
        if let Some(digests) = self.table.digests.get() {
            digests.begin(group);
        }
    }

    /// Pages of a group's parity of which nobody knows what they should be.
    pub(crate) fn doubtful_parity(&self, group: u32) -> impl Iterator<Item = u32> {
        self.table.digests.get().into_iter().flat_map(move |digests| digests.doubtful(group))
    }

    fn of(inherited: Vec<SealKey>, table: Arc<Table>) -> Seals {
        Seals { inherited, own: OnceLock::new(), table }
    }

    /// What a child of fork has of its parent's seals, of which its memory is a copy. To be called
    /// in the child.
    #[must_use]
    pub fn inherit(&self) -> Seals {
        let keys = self.inherited.iter().chain(self.own.get()).cloned().collect();
        Seals::of(keys, Arc::clone(&self.table))
    }

    /// Makes the key that pages are sealed under, if there is none yet.
    ///
    /// # Errors
    /// The kernel gave no random numbers, or there are too many keys.
    pub(crate) fn make_own(&self) -> Result<(), PoolError> {
        if self.own.get().is_none() {
            if self.inherited.len() >= KEY_LIMIT {
                return Err(PoolError::TooManyKeys { limit: KEY_LIMIT });
            }
            let key = SealKey::fresh().map_err(|_| PoolError::NoRandom)?;
            self.own.get_or_init(|| key);
        }
        Ok(())
    }

    /// The superpages that have a page that was written.
    pub(crate) fn written_superpages(&self) -> impl Iterator<Item = u32> {
        let all = 0..SEGMENT_LIMIT_SUPERPAGES;
        // Whole chunks that were never made are most of them.
        let made = all.step_by(CHUNK_SUPERPAGES as usize).zip(&self.table.chunks);
        let made = made.filter(|(_, chunk)| chunk.get().is_some());
        let of_chunk = made.flat_map(|(first, _)| first..first + CHUNK_SUPERPAGES);
        of_chunk.filter(|superpage| self.is_any_written(*superpage))
    }

    /// The pages that were written.
    pub(crate) fn written_pages(&self) -> impl Iterator<Item = u32> {
        let pages = |superpage| superpage * SUPERPAGE_PAGES..(superpage + 1) * SUPERPAGE_PAGES;
        self.written_superpages().flat_map(pages).filter(|page| self.is_written(*page))
    }

    /// True if the page was written since its superpage has its memory.
    pub(crate) fn is_written(&self, page: u32) -> bool {
        self.of_stored(page).is_some()
    }

    /// Nobody reads a superpage's pages any more before they are written anew, though they are what
    /// they are.
    pub(crate) fn give_back(&self, superpage: u32) {
        let groups = self.table.of_superpage(superpage).into_iter().flatten();
        for upper in groups.filter_map(OnceLock::get).flat_map(|group| &group.upper) {
            upper.fetch_or(GIVEN_BACK, Relaxed);
        }
    }

    fn is_any_written(&self, superpage: u32) -> bool {
        let groups = self.table.of_superpage(superpage).into_iter().flatten();
        let mut upper = groups.filter_map(OnceLock::get).flat_map(|group| &group.upper);
        upper.any(|upper| upper.load(Relaxed) & WRITTEN != 0)
    }

    /// Nothing is written to a superpage any more: its memory is fresh, or gone.
    pub(crate) fn begin(&self, superpage: u32) {
        let groups = self.table.of_superpage(superpage).into_iter().flatten();
        for upper in groups.filter_map(OnceLock::get).flat_map(|group| &group.upper) {
            upper.fetch_and(!(WRITTEN | GIVEN_BACK), Relaxed);
        }
    }

    /// Nothing can be said of a page whose last write failed: its blade may have what was there
    /// before, or a part of what was sent.
    pub(crate) fn forget(&self, page: u32) {
        let groups = self.table.of_superpage(page / SUPERPAGE_PAGES);
        if let Some(group) = groups.and_then(|groups| groups[group_number(page)].get()) {
            let upper = &group.upper[(page % GROUP_PAGES) as usize];
            upper.fetch_and(!(WRITTEN | GIVEN_BACK), Relaxed);
        }
    }

    /// Encrypts a page that is about to be sent, under its next version.
    ///
    /// # Errors
    /// The segment is not this client's to write to, or the page was sealed too often.
    pub(crate) fn seal(&self, page: u32, bytes: &mut [u8; PAGE_BYTES]) -> Result<(), PageError> {
        // Only who may write to a segment has a key of his own.
        let key = self.own.get().ok_or(PageError::Frozen)?;
        let group = self.table.group_of(page);
        let version = group.version(page) + 1;
        if version >= VERSION_LIMIT {
            return Err(PageError::WornOut);
        }
        let tag = key.seal(PageVersion { page, version }, bytes);
        group.set(page, Seal { key: exactly(self.inherited.len()), version, tag });
        Ok(())
    }

    /// What the page must be opened with. None: it was never written, or was given back.
    pub(crate) fn of_page(&self, page: u32) -> Option<Seal> {
        self.of_stored(page).filter(|_| !self.is_given_back(page))
    }

    /// The same of what its blade has, also if it was given back.
    pub(crate) fn of_stored(&self, page: u32) -> Option<Seal> {
        self.group(page)?.get(page)
    }

    fn is_given_back(&self, page: u32) -> bool {
        let at = (page % GROUP_PAGES) as usize;
        self.group(page).is_some_and(|group| group.upper[at].load(Relaxed) & GIVEN_BACK != 0)
    }

    fn group(&self, page: u32) -> Option<&Group> {
        let groups = self.table.of_superpage(page / SUPERPAGE_PAGES)?;
        Some(groups[group_number(page)].get()?)
    }

    /// Decrypts a page that a blade returned.
    ///
    /// # Errors
    /// It is not what was stored; its bytes are of no use.
    pub(crate) fn open(
        &self,
        page: u32,
        seal: Seal,
        bytes: &mut [u8; PAGE_BYTES],
    ) -> Result<(), PageError> {
        let key = self.key(seal.key).ok_or(PageError::Forged)?;
        let at = PageVersion { page, version: seal.version };
        key.open(at, bytes, &seal.tag).map_err(|_| PageError::Forged)
    }

    fn key(&self, number: u8) -> Option<&SealKey> {
        let number = usize::from(number);
        let own = || self.own.get().filter(|_| number == self.inherited.len());
        self.inherited.get(number).or_else(own)
    }

    /// Encodes the seals of these pages and the keys that open them, for a process on this host
    /// that shares the segment while it is frozen; and what is known of its parity. Pages that were
    /// never written are left out.
    pub(crate) fn export(&self, pages: impl Iterator<Item = u32>) -> Vec<u8> {
        let (mut keys, mut entries) = (Vec::new(), Vec::new());
        for page in pages {
            let Some(seal) = self.of_stored(page) else { continue };
            let mark = if self.is_given_back(page) { EXPORTED_GIVEN_BACK } else { 0 };
            let number = keys.iter().position(|it| *it == seal.key).unwrap_or_else(|| {
                keys.push(seal.key);
                keys.len() - 1
            });
            entries.extend_from_slice(&page.to_le_bytes());
            entries.push(exactly(number));
            entries.extend_from_slice(&(seal.version | mark).to_le_bytes());
            entries.extend_from_slice(&seal.tag.0);
        }
        let mut bytes = vec![exactly(keys.len())];
        for number in keys {
            bytes.extend_from_slice(&self.key(number).expect("a page has a key").to_bytes());
        }
        match self.table.digests.get() {
            Some(digests) => {
                bytes.push(WITH_DIGESTS);
                digests.export(&mut bytes);
            }
            None => bytes.push(0),
        }
        bytes.append(&mut entries);
        bytes
    }

    /// The inverse of [`crate::Pool::export_seals`]. None: these bytes are something else.
    pub fn import(bytes: &[u8]) -> Option<Seals> {
        let (count, mut bytes) = bytes.split_first()?;
        let (mut keys, table) = (Vec::new(), Table::new());
        for _ in 0..*count {
            let (key, rest) = bytes.split_first_chunk()?;
            keys.push(SealKey::from_bytes(key)?);
            bytes = rest;
        }
        let (with_digests, rest) = bytes.split_first()?;
        bytes = rest;
        match *with_digests {
            0 => {}
            WITH_DIGESTS => {
                let (digests, rest) = Digests::import(bytes)?;
                table.digests.get_or_init(|| digests);
                bytes = rest;
            }
            _ => return None,
        }
        let (entries, rest) = bytes.as_chunks::<EXPORTED_BYTES>();
        for entry in entries {
            let (page, entry) = entry.split_first_chunk()?;
            let ([key], entry) = entry.split_first_chunk()?;
            let (version, tag) = entry.split_first_chunk()?;
            let (page, version) = (u32::from_le_bytes(*page), u64::from_le_bytes(*version));
            let is_given_back = version & EXPORTED_GIVEN_BACK != 0;
            let version = version & !EXPORTED_GIVEN_BACK;
            if usize::from(*key) >= keys.len() || version >= VERSION_LIMIT {
                return None;
            }
            let seal = Seal { key: *key, version, tag: Tag(tag.try_into().ok()?) };
            let group = table.group_of(page);
            group.set(page, seal);
            if is_given_back {
                group.upper[(page % GROUP_PAGES) as usize].fetch_or(GIVEN_BACK, Relaxed);
            }
        }
        rest.is_empty().then(|| Seals::of(keys, Arc::new(table)))
    }
}

impl Table {
    fn new() -> Table {
        let chunks = SEGMENT_LIMIT_SUPERPAGES.div_ceil(CHUNK_SUPERPAGES);
        let chunks = (0..chunks).map(|_| OnceLock::new()).collect();
        Table { chunks, digests: OnceLock::new() }
    }

    /// The seals of a page and its neighbours, made when they are first needed.
    fn group_of(&self, page: u32) -> &Group {
        let (chunk, slot) = split(page / SUPERPAGE_PAGES);
        // Not on the stack, which is small where a pager's threads run.
        let chunk = self.chunks[chunk].get_or_init(empty);
        chunk[slot].get_or_init(empty)[group_number(page)].get_or_init(Box::default)
    }

    fn of_superpage(&self, superpage: u32) -> Option<&SuperpageSeals> {
        let (chunk, slot) = split(superpage);
        Some(self.chunks.get(chunk)?.get()?[slot].get()?)
    }
}

/// As many empty places as the array has.
pub(crate) fn empty<T, const COUNT: usize>() -> Box<[OnceLock<T>; COUNT]> {
    let places: Box<[_]> = (0..COUNT).map(|_| OnceLock::new()).collect();
    places.try_into().unwrap_or_else(|_| unreachable!("there are as many as were made"))
}

fn group_number(page: u32) -> usize {
    (page % SUPERPAGE_PAGES / GROUP_PAGES) as usize
}

impl Group {
    fn version(&self, page: u32) -> u64 {
        let at = (page % GROUP_PAGES) as usize;
        let upper = self.upper[at].load(Relaxed) & !(WRITTEN | GIVEN_BACK);
        u64::from(upper) << 32 | u64::from(self.versions[at].load(Relaxed))
    }

    fn get(&self, page: u32) -> Option<Seal> {
        let at = (page % GROUP_PAGES) as usize;
        let is_written = self.upper[at].load(Relaxed) & WRITTEN != 0;
        let [low, high] = [0, 1].map(|half| self.tags[at][half].load(Relaxed));
        let tag = u128::from(high) << 64 | u128::from(low);
        is_written.then(|| Seal {
            key: self.keys[at].load(Relaxed),
            version: self.version(page),
            tag: Tag(tag.to_le_bytes()),
        })
    }

    fn set(&self, page: u32, seal: Seal) {
        let at = (page % GROUP_PAGES) as usize;
        let (tags, _) = seal.tag.0.as_chunks();
        for (into, half) in self.tags[at].iter().zip(tags) {
            into.store(u64::from_le_bytes(*half), Relaxed);
        }
        let (lower, upper) = halves(seal.version);
        self.keys[at].store(seal.key, Relaxed);
        self.versions[at].store(lower, Relaxed);
        self.upper[at].store(upper | WRITTEN, Relaxed);
    }
}

/// The lower 32 and the upper 14 bits of a version.
fn halves(version: u64) -> (u32, u16) {
    assert!(version < VERSION_LIMIT, "a version is below its limit");
    (exactly(version & u64::from(u32::MAX)), exactly(version >> 32))
}

fn split(superpage: u32) -> (usize, usize) {
    ((superpage / CHUNK_SUPERPAGES) as usize, (superpage % CHUNK_SUPERPAGES) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u32 = 3 * SUPERPAGE_PAGES + 5;

    fn fresh() -> Seals {
        Seals::fresh().expect("seals")
    }

    fn sealed(seals: &Seals, page: u32, byte: u8) -> [u8; PAGE_BYTES] {
        let mut bytes = [byte; PAGE_BYTES];
        seals.seal(page, &mut bytes).expect("sealed");
        bytes
    }

    fn opened(seals: &Seals, page: u32, mut bytes: [u8; PAGE_BYTES]) -> Result<u8, PageError> {
        let seal = seals.of_page(page).ok_or(PageError::Forged)?;
        seals.open(page, seal, &mut bytes).map(|()| bytes[17])
    }

    #[test]
    fn only_the_last_version_of_the_page_itself_opens() {
        let seals = fresh();
        let old = sealed(&seals, PAGE, 1);
        assert_eq!(opened(&seals, PAGE, old), Ok(1));
        let new = sealed(&seals, PAGE, 2);
        assert_eq!(opened(&seals, PAGE, old), Err(PageError::Forged));
        assert_eq!(opened(&seals, PAGE, new), Ok(2));
        let other = sealed(&seals, PAGE + 1, 3);
        assert_eq!(opened(&seals, PAGE, other), Err(PageError::Forged));
        assert_eq!(opened(&seals, PAGE, [0; PAGE_BYTES]), Err(PageError::Forged));
    }

    #[test]
    fn what_was_never_written_or_is_freed_does_not_open() {
        let seals = fresh();
        assert_eq!(seals.of_page(PAGE), None);
        assert_eq!(seals.of_page(0), None, "nothing is there");
        let bytes = sealed(&seals, PAGE, 1);
        seals.begin(PAGE / SUPERPAGE_PAGES);
        assert_eq!(opened(&seals, PAGE, bytes), Err(PageError::Forged));
    }

    #[test]
    fn no_version_is_sealed_twice_over_memory_that_is_freed() {
        let seals = fresh();
        for round in 1..4 {
            sealed(&seals, PAGE, 1);
            assert_eq!(seals.of_page(PAGE).map(|it| it.version), Some(round));
            seals.begin(PAGE / SUPERPAGE_PAGES);
        }
    }

    #[test]
    fn a_page_that_was_sealed_too_often_is_refused() {
        let seals = fresh();
        let last = Seal { key: 0, version: VERSION_LIMIT - 1, tag: Tag([0; TAG_BYTES]) };
        let known = seals.table.group_of(PAGE);
        known.set(PAGE, Seal { version: VERSION_LIMIT - 2, ..last });
        sealed(&seals, PAGE, 1);
        assert_eq!(known.version(PAGE), last.version);
        assert_eq!(seals.seal(PAGE, &mut [0; PAGE_BYTES]), Err(PageError::WornOut));
    }

    #[test]
    fn who_shares_a_segment_opens_its_pages_and_seals_under_a_key_of_its_own() {
        let seals = fresh();
        let bytes = sealed(&seals, PAGE, 7);
        sealed(&seals, PAGE + 1, 8);
        let exported = seals.export([PAGE, PAGE + 2].into_iter());
        let other = Seals::import(&exported).expect("seals");
        assert_eq!(opened(&other, PAGE, bytes), Ok(7));
        assert_eq!(other.of_page(PAGE + 1), None, "it was not exported");
        assert_eq!(other.seal(PAGE, &mut [0; PAGE_BYTES]), Err(PageError::Frozen));
        other.make_own().expect("a key");
        let (theirs, ours) = (sealed(&other, PAGE, 9), sealed(&seals, PAGE, 9));
        assert_eq!(other.of_page(PAGE).map(|it| it.version), Some(2));
        assert_eq!(seals.of_page(PAGE).map(|it| it.version), Some(2));
        assert_ne!(theirs, ours, "the same bytes and version, and another key");
        let third = Seals::import(&other.export([PAGE].into_iter())).expect("seals");
        assert_eq!(opened(&third, PAGE, theirs), Ok(9));
        assert_eq!(opened(&third, PAGE, ours), Err(PageError::Forged));
    }

    #[test]
    fn a_child_of_fork_does_not_seal_under_its_parents_key() {
        let seals = fresh();
        let bytes = sealed(&seals, PAGE, 7);
        let child = seals.inherit();
        assert_eq!(opened(&child, PAGE, bytes), Ok(7));
        assert_eq!(child.seal(PAGE, &mut [0; PAGE_BYTES]), Err(PageError::Frozen));
        child.make_own().expect("a key");
        let bytes = sealed(&child, PAGE, 7);
        assert_eq!(opened(&child.inherit(), PAGE, bytes), Ok(7));
        assert_eq!(opened(&seals, PAGE, bytes), Err(PageError::Forged));
    }

    #[test]
    fn there_are_not_more_keys_than_numbers() {
        let mut seals = fresh();
        for _ in 1..KEY_LIMIT {
            seals = seals.inherit();
            seals.make_own().expect("a key");
        }
        let bytes = sealed(&seals, PAGE, 7);
        let last = seals.inherit();
        assert_eq!(opened(&last, PAGE, bytes), Ok(7));
        assert!(matches!(last.make_own(), Err(PoolError::TooManyKeys { .. })));
    }

    #[test]
    fn a_part_of_an_export_is_none() {
        let seals = fresh();
        sealed(&seals, PAGE, 7);
        let exported = seals.export([PAGE].into_iter());
        for length in (0..exported.len()).filter(|it| *it != exported.len() - EXPORTED_BYTES) {
            assert!(Seals::import(&exported[..length]).is_none(), "{length} bytes");
        }
    }
}
