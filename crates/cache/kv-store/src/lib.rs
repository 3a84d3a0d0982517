//! The items of one shard: owned by one thread, without locks, clocks or I/O of its own; and what
//! is observed of them ([`observe`]).
//!
//! Items are in append-only segments ([`arena`]); one word of the [`index`] points to each. A
//! segment belongs to a class of lifetimes, so that expiry frees whole segments, and to one of
//! S3-FIFO's two queues, so that eviction does ([`evict`]); under another policy items are evicted
//! one by one, and segments full of holes are emptied (`ranked`). Overwriting leaves a hole,
//! unless the new value fits exactly.
//!
//! Invariants: an entry of tier `Memory` points to an item whose segment counts it as live; the sum
//! of all memory never exceeds the limit by more than what one insertion needs; time is set by the
//! caller, never read.

pub mod arena;
pub mod clock;
pub mod evict;
pub mod extents;
pub mod ghost;
pub mod index;
pub mod item;
pub mod key;
pub mod lease;
pub mod lower;
pub mod mapping;
mod numbers;
pub mod observe;
mod put;
pub mod queue;
pub mod quota;
mod ranked;
pub mod record;
pub mod walk;

use farpool_units::exactly;

use crate::observe::journal::{Journal, ReadStatus};

use arena::{Arena, SegmentId};
use ghost::Ghost;
use index::{Entry, EntryAt, Index, Place, Tier};
use item::{AccessTime, ItemParts, ItemView, mark};
use key::HashSeed;
use queue::SegmentQueue;

/// How many entries loaded ahead are remembered: a few batches.
const SEEN: usize = 128;
/// Classes of lifetimes: none, then powers of two from 8 seconds on.
const TTL_CLASSES: usize = 24;
/// Log2 of the longest lifetime of the first class, in seconds.
const TTL_FIRST_LOG2: u32 = 3;
/// The least memory of a shard: its index and a few segments.
pub const SHARD_BYTES_MIN: usize = 4 << 20;

/// How far `cache_memlimit` can raise the limit: this many times the limit of address space is
/// reserved at the start.
const LIMIT_GROWTH: usize = 4;

/// The class of lifetimes that an item belongs to.
#[must_use]
pub fn ttl_class(expires_s: u32, now_s: u32) -> u8 {
    if expires_s == 0 {
        return 0;
    }
    let left = expires_s.saturating_sub(now_s).max(1);
    // Of the next power of two, which may be beyond u32.
    let log2 = (left - 1).checked_ilog2().map_or(0, |log2| log2 + 1);
    let log2 = log2.max(TTL_FIRST_LOG2) - TTL_FIRST_LOG2 + 1;
    exactly((log2 as usize).min(TTL_CLASSES - 1))
}

#[inline]
fn seen_slot(hash: u64) -> usize {
    exactly(hash % SEEN as u64)
}

/// Why an item was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("object too large for cache")]
    TooLarge,
    #[error("out of memory storing object")]
    OutOfMemory,
}

/// How a shard is set up.
#[derive(Debug, Clone, Copy)]
pub struct StoreSettings {
    /// All memory of the shard: segments, index and everything else it keeps.
    pub limit_bytes: usize,
    /// The size limit of one item, `-I` of memcached.
    pub item_bytes_max: usize,
    /// Whether old items are evicted to make room for new ones; if not, new ones are refused
    /// (`-M`).
    pub evicts: bool,
}

/// The shard's counts since its start or `stats reset`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct StoreCounts {
    /// Live items that were evicted to make room.
    pub evictions: u64,
    /// How many of these had not been read since they were stored.
    pub evicted_unfetched: u64,
    /// Items found expired when they were requested.
    pub get_expired: u64,
    /// Items found flushed when they were requested.
    pub get_flushed: u64,
    /// How many of these had an expiry.
    pub evicted_nonzero: u64,
    /// For how long the last of these had not been read or stored, in seconds.
    pub evicted_idle_s: u64,
    /// Items whose room was reclaimed after they had expired.
    pub reclaimed: u64,
    /// How many of these had not been read since they were stored.
    pub expired_unfetched: u64,
    /// Rounds that found segments whose items have all expired, the items that they looked at, and
    /// how many of these had expired and not been replaced.
    pub expiry_rounds: u64,
    pub expiry_checked: u64,
    pub expiry_reclaimed: u64,
    /// Items that were moved, because they had earned another round or to close holes.
    pub moved: u64,
    /// Items ever stored.
    pub total_items: u64,
    /// Leases granted, and leases requested but not granted.
    pub leases: u64,
    pub leases_refused: u64,
}

/// The lists of open segments: one for each queue, and one for items that move on, whose segments
/// inherit age and numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Small,
    Main,
    GoingOn,
}

/// An item that was found. Valid until the next change of the store.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    at: EntryAt,
    place: Place,
}

/// The items of one shard.
#[derive(Debug)]
pub struct Store {
    settings: StoreSettings,
    hash_seed: HashSeed,
    index: Index,
    arena: Arena,
    ghost: Ghost,
    queues: [SegmentQueue; 2],
    queue_bytes: [usize; 2],
    open: [[Option<SegmentId>; TTL_CLASSES]; 3],
    items: usize,
    item_bytes: u64,
    index_bytes: usize,
    last_cas: u64,
    now_s: u32,
    /// Items stored under this number or an earlier one were flushed.
    flushed_cas: u64,
    /// The first segment that may still hold flushed items.
    flushed_from: Option<usize>,
    /// When the items stored by then are to be flushed.
    flush_at_s: Option<u32>,
    counts: StoreCounts,
    outbox: Option<lower::Outbox>,
    lower_items: usize,
    /// How many of these are on flash.
    flash_items: usize,
    sample: usize,
    looked_for_expired_s: u32,
    has_evicted: bool,
    quotas: quota::Quotas,
    leases: lease::LeasesHeld,
    /// Positions of entries loaded ahead, by their hashes.
    seen: [EntryAt; SEEN],
    /// The state of a policy other than the store's own.
    ranked: Option<Box<numbers::Ranked>>,
    /// The memory of that state.
    ranked_bytes: usize,
    /// Memory that is used for the shard but not by it: see [`Store::set_beside`].
    beside_bytes: usize,
    /// Events recorded for watchers.
    journal: Option<Box<Journal>>,
}

impl Store {
    /// An empty shard. Fails if the kernel refuses the address space.
    pub fn new(settings: StoreSettings) -> Result<Self, StoreError> {
        Self::with_memory(settings, false)
    }

    fn with_memory(settings: StoreSettings, is_shared: bool) -> Result<Self, StoreError> {
        let settings =
            StoreSettings { limit_bytes: settings.limit_bytes.max(SHARD_BYTES_MIN), ..settings };
        let index = Index::new().map_err(|_| StoreError::OutOfMemory)?;
        Ok(Self {
            arena: Arena::new(
                settings.limit_bytes,
                settings.limit_bytes.saturating_mul(LIMIT_GROWTH),
                is_shared,
            )
            .ok_or(StoreError::OutOfMemory)?,
            index_bytes: index.bytes(),
            index,
            settings,
            hash_seed: HashSeed::default(),
            ghost: Ghost::default(),
            queues: [SegmentQueue::default(); 2],
            queue_bytes: [0; 2],
            open: [[None; TTL_CLASSES]; 3],
            items: 0,
            item_bytes: 0,
            last_cas: 0,
            now_s: 0,
            flushed_cas: 0,
            flushed_from: None,
            flush_at_s: None,
            counts: StoreCounts::default(),
            outbox: None,
            lower_items: 0,
            flash_items: 0,
            sample: 0,
            looked_for_expired_s: 0,
            has_evicted: false,
            quotas: quota::Quotas::default(),
            leases: lease::LeasesHeld::default(),
            seen: [EntryAt::default(); SEEN],
            ranked: None,
            ranked_bytes: 0,
            beside_bytes: 0,
            journal: None,
        })
    }

    /// Sets the seed of all hashes that the store is given. Only for an empty store. A server draws
    /// one at random; without a call it is zero.
    pub fn set_hash_seed(&mut self, seed: HashSeed) {
        assert!(self.items == 0 && self.lower_items == 0, "no item has a hash by another seed");
        self.hash_seed = seed;
    }

    /// The seed of all hashes that the store is given.
    #[inline]
    #[must_use]
    pub const fn hash_seed(&self) -> HashSeed {
        self.hash_seed
    }

    /// The hash of a key, as the store has to be given it.
    #[inline]
    #[must_use]
    pub fn hash_of(&self, key: &[u8]) -> u64 {
        self.hash_seed.hash_of(key)
    }

    /// Sets the time, in seconds of the server's clock (never 0). Time does not go back.
    pub fn set_now(&mut self, now_s: u32) {
        self.now_s = self.now_s.max(now_s);
        if self.flush_at_s.is_some_and(|at_s| at_s <= self.now_s) {
            self.flush_at_s = None;
            self.flushed_cas = self.last_cas;
            self.flushed_from = Some(0);
        }
    }

    #[inline]
    #[must_use]
    pub const fn now_s(&self) -> u32 {
        self.now_s
    }

    #[must_use]
    pub const fn counts(&self) -> &StoreCounts {
        &self.counts
    }

    pub fn reset_counts(&mut self) {
        self.counts = StoreCounts::default();
    }

    /// Number of items, including expired ones that have not been noticed.
    #[must_use]
    pub const fn items(&self) -> usize {
        self.items
    }

    /// Bytes of those items, including headers.
    #[must_use]
    pub const fn item_bytes(&self) -> u64 {
        self.item_bytes
    }

    #[must_use]
    pub const fn index_bytes(&self) -> usize {
        self.index_bytes
    }

    /// Items whose place in the index was taken by others of the same hash.
    #[must_use]
    pub const fn overflow_entries(&self) -> usize {
        self.index.overflow_entries()
    }

    /// All memory that counts against the shard's limit.
    #[must_use]
    pub const fn used_bytes(&self) -> usize {
        self.arena.in_use_bytes()
            + self.index_bytes
            + self.ghost.bytes()
            + self.ranked_bytes
            + self.beside_bytes
    }

    /// Memory that the shard holds from the kernel: what it uses, and free segments kept for reuse.
    #[must_use]
    pub const fn resident_bytes(&self) -> usize {
        self.used_bytes() + self.arena.idle_bytes()
    }

    #[must_use]
    pub const fn settings(&self) -> &StoreSettings {
        &self.settings
    }

    /// Returns the next CAS number; `flush_all` and a stale mark take one, too.
    pub const fn next_cas(&mut self) -> u64 {
        self.last_cas += 1;
        self.last_cas
    }

    /// Flushes all items, or those stored by the second `at_s` once that has come: none, if that is
    /// 0, before the first item. A later call replaces a flush that is still to come.
    pub fn flush_all(&mut self, at_s: Option<u32>) {
        match at_s {
            Some(at_s) if at_s > self.now_s => self.flush_at_s = Some(at_s),
            Some(0) => self.flush_at_s = None,
            None | Some(_) => {
                self.flushed_cas = self.next_cas();
                self.flushed_from = Some(0);
                self.flush_at_s = None;
            }
        }
    }

    /// For how long the oldest segment with items has been there, in seconds: an item in it may be
    /// that old. 0 without items.
    #[must_use]
    pub fn age_s(&self) -> u32 {
        let used = self.arena.segments().filter(|(_, segment)| segment.live_items > 0);
        let oldest_s = used.map(|(_, segment)| segment.birth_s).min();
        oldest_s.map_or(0, |birth_s| self.now_s.saturating_sub(birth_s))
    }

    /// The last CAS number issued.
    #[must_use]
    pub const fn last_cas(&self) -> u64 {
        self.last_cas
    }

    /// The number up to which everything was flushed, and the second of a flush still to come (0 =
    /// none).
    #[must_use]
    pub fn flushes(&self) -> (u64, u32) {
        (self.flushed_cas, self.flush_at_s.unwrap_or(0))
    }

    /// Continues where an earlier store stopped: see [`Self::last_cas`] and [`Self::flushes`]. Only
    /// for an empty store.
    pub fn resume(&mut self, last_cas: u64, (flushed_cas, flush_at_s): (u64, u32)) {
        self.last_cas = last_cas;
        self.flushed_cas = flushed_cas;
        self.flush_at_s = (flush_at_s != 0).then_some(flush_at_s);
    }

    /// Begins to load the index entry of a key.
    #[inline]
    pub fn prefetch_entry(&self, hash: u64) {
        self.index.prefetch(hash);
    }

    /// Begins to load the item of a key whose index entry should have arrived by now.
    #[inline]
    pub fn prefetch_item(&mut self, hash: u64) {
        let is_it = |entry: Entry| {
            if entry.tier() == Tier::Memory {
                self.arena.prefetch(entry.place());
            }
            true
        };
        if let Some((at, _)) = self.index.find(hash, is_it) {
            self.seen[seen_slot(hash)] = at;
        }
    }

    /// The item of a key, if there is one that has not expired and was not flushed. Notes the
    /// lookup for watchers.
    #[inline]
    pub fn find(&mut self, key: &[u8], hash: u64) -> Option<Found> {
        let found = self.find_untold(key, hash);
        if self.journal.is_some() {
            self.note_look(key, found);
        }
        found.ok()
    }

    #[inline]
    fn find_untold(&mut self, key: &[u8], hash: u64) -> Result<Found, ReadStatus> {
        let (at, entry) = self.entry_of(key, hash).ok_or(ReadStatus::NotFound)?;
        let found = Found { at, place: entry.place() };
        let expires_s = self.view(found).expires_s();
        if self.flushed_cas != 0 && self.is_flushed(found.place) {
            self.counts.get_flushed += 1;
            self.remove(found);
            return Err(ReadStatus::Flushed);
        }
        if expires_s != 0 && expires_s <= self.now_s {
            self.counts.get_expired += 1;
            self.remove(found);
            return Err(ReadStatus::Expired);
        }
        Ok(found)
    }

    fn note_look(&mut self, key: &[u8], found: Result<Found, ReadStatus>) {
        let value_bytes = found.map_or(0, |found| self.view(found).value().len());
        if let Some(journal) = &mut self.journal {
            journal.read(key, found.err().unwrap_or(ReadStatus::Found), value_bytes);
        }
    }

    /// Sets the journal that records events from now on; None for no recording.
    pub fn set_journal(&mut self, journal: Option<Box<Journal>>) {
        self.journal = journal;
    }

    /// The journal, if there are watchers.
    #[inline]
    pub fn journal_mut(&mut self) -> Option<&mut Journal> {
        self.journal.as_deref_mut()
    }

    #[inline]
    fn entry_of(&self, key: &[u8], hash: u64) -> Option<(EntryAt, Entry)> {
        let is_it = |entry: Entry| {
            entry.tier() == Tier::Memory && self.arena.item(entry.place()).key() == key
        };
        let seen = self.seen[seen_slot(hash)];
        match self.index.entry_with_tag(seen, hash).filter(|&entry| is_it(entry)) {
            Some(entry) => Some((seen, entry)),
            None => self.index.find(hash, is_it),
        }
    }

    fn is_flushed(&self, place: Place) -> bool {
        let segment = self.arena.segment(SegmentId::of(place));
        self.arena.item(place).stored_as(segment.first_cas) <= self.flushed_cas
    }

    #[inline]
    #[must_use]
    pub fn view(&self, found: Found) -> ItemView<'_> {
        self.arena.item(found.place)
    }

    #[inline]
    #[must_use]
    pub fn cas(&self, found: Found) -> u64 {
        self.view_with_cas(found).1
    }

    /// An item and the CAS number that clients see.
    #[inline]
    #[must_use]
    pub fn view_with_cas(&self, found: Found) -> (ItemView<'_>, u64) {
        let view = self.view(found);
        (view, view.cas(self.arena.segment(SegmentId::of(found.place)).first_cas))
    }

    /// When the item was last touched, in seconds of the server's clock.
    #[must_use]
    pub fn accessed_s(&self, found: Found) -> u32 {
        self.arena.segment(SegmentId::of(found.place)).birth_s
            + self.view(found).header().access.seconds()
    }

    /// Notes that the item was read: for eviction, and in its marks, as memcached does.
    #[inline]
    pub fn note_read(&mut self, found: Found) {
        let entry = self.index.entry(found.at);
        if entry.hits() < index::HITS_MAX {
            // Under another policy items never have the most hits, so S3-FIFO's hot items skip this
            // test.
            match self.ranked {
                None => self.index.set(found.at, entry.hit()),
                Some(_) => self.note_ranked_read(found, entry),
            }
        }
        let mut header = self.view(found).header();
        if !header.has(mark::ACTIVE) {
            if header.has(mark::FETCHED) {
                header.marks |= mark::ACTIVE;
                header.access = self.access_now(SegmentId::of(found.place));
            } else {
                header.marks |= mark::FETCHED;
            }
            header.write(self.arena.item_mut(found.place));
        }
    }

    /// Sets the time of the last access, without counting a hit.
    pub fn note_touched(&mut self, found: Found) {
        let mut header = self.view(found).header();
        header.access = self.access_now(SegmentId::of(found.place));
        header.write(self.arena.item_mut(found.place));
    }

    fn access_now(&self, id: SegmentId) -> AccessTime {
        AccessTime::from_seconds(self.now_s - self.arena.segment(id).birth_s)
    }

    /// Sets and clears marks that do not describe the layout.
    pub fn set_marks(&mut self, found: Found, set: u8, clear: u8) {
        let mut header = self.view(found).header();
        header.marks = (header.marks & !(clear & !mark::LAYOUT)) | (set & !mark::LAYOUT);
        header.write(self.arena.item_mut(found.place));
    }

    /// Changes the expiry. An item without a field for it is stored anew, so it may have moved
    /// afterwards; its marks, CAS number and time of last access stay.
    pub fn set_expiry(
        &mut self,
        found: Found,
        hash: u64,
        expires_s: u32,
    ) -> Result<Found, StoreError> {
        let header = self.view(found).header();
        let id = SegmentId::of(found.place);
        if header.has(mark::EXPIRES) {
            item::set_expiry(header, self.arena.item_mut(found.place), expires_s);
            let segment = self.arena.segment_mut(id);
            segment.last_expiry_s = segment.last_expiry_s.max(expiry_or_never(expires_s));
            return Ok(found);
        }
        if expires_s == 0 {
            return Ok(found);
        }
        let (cas, accessed_s) = (self.cas(found), self.accessed_s(found));
        self.rebuild(found, hash, cas, |parts| parts.expires_s = expires_s).inspect(|&found| {
            let birth_s = self.arena.segment(SegmentId::of(found.place)).birth_s;
            let mut header = self.view(found).header();
            header.access = AccessTime::from_seconds(accessed_s.saturating_sub(birth_s));
            header.write(self.arena.item_mut(found.place));
        })
    }

    /// Gives the item a new CAS number. As with [`Self::set_expiry`], it may have moved afterwards.
    pub fn set_cas(&mut self, found: Found, hash: u64, cas: u64) -> Result<Found, StoreError> {
        let first_cas = self.arena.segment(SegmentId::of(found.place)).first_cas;
        let mut header = self.view(found).header();
        let delta = cas.checked_sub(first_cas).and_then(|delta| u32::try_from(delta).ok());
        match delta {
            Some(delta) if !header.has(mark::WIDE_CAS) => {
                header.cas = delta;
                header.write(self.arena.item_mut(found.place));
                Ok(found)
            }
            _ => self.rebuild(found, hash, cas, |_| {}),
        }
    }

    /// Stores the item anew, with `cas` and the changes that `change` makes.
    fn rebuild(
        &mut self,
        found: Found,
        hash: u64,
        cas: u64,
        change: impl FnOnce(&mut ItemParts<'_>),
    ) -> Result<Found, StoreError> {
        let view = self.view(found);
        let (key, value) = (view.key().to_vec(), view.value().to_vec());
        let mut parts = ItemParts {
            key: &key,
            value: [&value, b""],
            client_flags: view.client_flags(),
            expires_s: view.expires_s(),
            marks: view.header().marks & !mark::LAYOUT,
            wide_cas: None,
        };
        change(&mut parts);
        self.put(&parts, hash, Some(cas))
    }

    /// Overwrites the value of an item with one of the same length and gives it `cas`.
    pub fn overwrite(
        &mut self,
        found: Found,
        hash: u64,
        value: &[u8],
        cas: u64,
    ) -> Result<Found, StoreError> {
        if self.arena.segment(SegmentId::of(found.place)).leases > 0 {
            return self.overwrite_elsewhere(found, hash, value, cas);
        }
        let found = self.set_cas(found, hash, cas)?;
        let header = self.view(found).header();
        assert_eq!(header.value_bytes as usize, value.len(), "the length stays");
        let at = header.key_at() + usize::from(header.key_bytes);
        self.arena.item_mut(found.place)[at..at + value.len()].copy_from_slice(value);
        Ok(found)
    }

    /// Removes an item.
    pub fn remove(&mut self, found: Found) {
        self.index.remove(found.at);
        self.unrank(found.place);
        self.forget(found.place);
    }

    /// Updates the counts for an item whose entry is gone or now points elsewhere.
    fn forget(&mut self, place: Place) {
        let footprint = self.arena.item(place).header().footprint_bytes();
        self.items -= 1;
        self.item_bytes -= footprint as u64;
        self.quotas.died(self.arena.item(place).key(), footprint);
        let id = SegmentId::of(place);
        let segment = self.arena.segment_mut(id);
        segment.died(footprint);
        if segment.live_items == 0 && segment.is_sealed {
            self.free_sealed(id);
        }
    }

    fn free_sealed(&mut self, id: SegmentId) {
        let queue = self.arena.segment(id).queue as usize;
        self.queues[queue].remove(&mut self.arena, id);
        let bytes = self.arena.segment(id).used_bytes;
        assert!(self.queue_bytes[queue] >= bytes, "a queue counts what its segments hold");
        self.queue_bytes[queue] -= bytes;
        self.free_or_hold(id);
    }
}

const fn expiry_or_never(expires_s: u32) -> u32 {
    if expires_s == 0 { u32::MAX } else { expires_s }
}
