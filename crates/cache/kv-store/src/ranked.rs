//! Making room by a policy of `farpool_policy`, which chooses items one by one, wherever they are.
//!
//! An evicted item leaves a hole. Once holes take their share of the memory, segments with many of
//! them are emptied: their items move into other segments as they are, and the free memory becomes
//! one piece again. The fewer holes are allowed, the more items fit and the more are moved for each
//! one stored.

use farpool_policy::CacheKind;

use super::arena::SegmentId;
use super::evict::Why;
use super::index::{Entry, HITS_MAX, Place, Tier};
use super::numbers::Ranked;
use super::{Found, Store, StoreError};

/// Items are evicted until holes take this share of the segments. At 8 % about five items move for
/// each one stored if evicted items are anywhere (`random`), about one under `lru`, and hardly any
/// if items are evicted in the order in which they were stored.
const HOLES_PERCENT: usize = 8;
/// How many segments are sampled to find the one with the most holes.
const SAMPLES: usize = 64;
/// A sealed segment with fewer holes is not worth emptying ...
const HOLLOW_PERCENT: usize = 5;
/// ... nor is one that is still being filled.
const HOLLOW_OPEN_PERCENT: usize = 50;
/// For each segment emptied without making room, this share of a segment more is allowed for holes.
const IN_VAIN_SHARE: usize = 8;
/// Segments for items that move are born no longer ago than twelve days, so that another twelve fit
/// into an [`super::item::AccessTime`]; an item that was not read for longer appears to have been
/// read then.
const MOVED_AGE_MAX_S: u32 = 1 << 20;

impl Store {
    /// Sets the eviction policy; without a call it is [`CacheKind::S3Fifo`], the store's own. Only
    /// for an empty store. A store that does not evict needs none.
    pub fn set_policy(&mut self, kind: CacheKind) -> Result<(), StoreError> {
        self.ranked = None;
        if kind != CacheKind::S3Fifo && self.settings.evicts {
            self.ranked = Some(Box::new(Ranked::new(kind).map_err(|_| StoreError::OutOfMemory)?));
        }
        self.measure_ranked();
        Ok(())
    }

    /// The eviction policy.
    #[must_use]
    pub fn policy(&self) -> CacheKind {
        self.ranked.as_ref().map_or(CacheKind::S3Fifo, |ranked| ranked.kind())
    }

    /// The memory of the policy's own state; S3-FIFO's is in the index.
    #[must_use]
    pub const fn policy_bytes(&self) -> usize {
        self.ranked_bytes
    }

    /// Number of items that the policy can choose from, if it is not the store's own: all, but keys
    /// that share one hash count as one.
    #[must_use]
    pub fn ranked_items(&self) -> Option<usize> {
        self.ranked.as_ref().map(|ranked| ranked.len())
    }

    fn measure_ranked(&mut self) {
        self.ranked_bytes = self.ranked.as_ref().map_or(0, |ranked| ranked.bytes());
    }

    /// Reports a read to the policy. The index counts hits too, for quotas, but stays below the
    /// maximum, so that every read is reported.
    #[cold]
    #[inline(never)]
    pub(super) fn note_ranked_read(&mut self, found: Found, entry: Entry) {
        if entry.hits() + 1 < HITS_MAX {
            self.index.set(found.at, entry.hit());
        }
        let hash = self.hash_of(self.view(found).key());
        if let Some(ranked) = &mut self.ranked {
            ranked.touch(hash);
        }
    }

    /// Grows the policy's tables if one more item needs it, before room is made for the item.
    pub(super) fn prepare_ranked(&mut self) -> Result<(), StoreError> {
        if self.ranked.as_mut().is_some_and(|ranked| ranked.prepare()) {
            self.measure_ranked();
            self.make_room(0)?;
        }
        Ok(())
    }

    /// The birth of a segment for items that move, to which their access times are relative, given
    /// the birth of the segment that they leave. Segments are emptied in any order, so the next has
    /// to be as old as the one before, or it would often have to be closed half full.
    pub(super) fn moved_birth_s(&self, from_s: u32, before_s: Option<u32>) -> u32 {
        let oldest_s = self.now_s.saturating_sub(MOVED_AGE_MAX_S);
        before_s.unwrap_or(from_s).min(from_s).max(oldest_s)
    }

    /// Reports a stored item to the policy, if there is one.
    pub(super) fn rank(&mut self, hash: u64) -> Result<(), StoreError> {
        let Some(ranked) = &mut self.ranked else { return Ok(()) };
        let known = ranked.store(hash);
        self.measure_ranked();
        known.map_err(|_| StoreError::OutOfMemory)
    }

    /// Reports to the policy, if there is one, that an item whose entry is gone no longer exists.
    pub(super) fn unrank(&mut self, place: Place) {
        if self.ranked.is_none() {
            return;
        }
        let hash = self.hash_of(self.arena.item(place).key());
        if self.item_of(hash).is_some() {
            // Another key has the same hash.
            return;
        }
        if let Some(ranked) = &mut self.ranked {
            ranked.remove(hash);
        }
        self.measure_ranked();
    }

    /// An item in memory whose key has this hash.
    fn item_of(&self, hash: u64) -> Option<Found> {
        let is_it = |entry: Entry| {
            entry.tier() == Tier::Memory
                && self.hash_of(self.arena.item(entry.place()).key()) == hash
        };
        self.index.find(hash, is_it).map(|(at, entry)| Found { at, place: entry.place() })
    }

    /// Makes room for `bytes` more.
    pub(super) fn make_ranked_room(&mut self, bytes: usize) -> Result<(), StoreError> {
        if let Some(ranked) = &mut self.ranked {
            ranked.is_full();
        }
        let (mut least, mut in_vain) = (self.used_bytes(), 0);
        while self.used_bytes() + bytes > self.settings.limit_bytes {
            let (used, holes) = self.used_and_holes();
            let wanted =
                used * HOLES_PERCENT / 100 + in_vain * self.arena.segment_bytes() / IN_VAIN_SHARE;
            if holes < wanted && self.evict_one() {
                continue;
            }
            if let Some(id) = self.hollow_segment() {
                // Closing an open segment may have freed it already.
                if self.arena.segment(id).is_sealed {
                    self.empty(id, Why::Holes, 0);
                }
                in_vain = if self.used_bytes() < least { 0 } else { in_vain + 1 };
                least = least.min(self.used_bytes());
            } else if !self.evict_one() && !self.close_fullest() {
                return Err(StoreError::OutOfMemory);
            }
        }
        Ok(())
    }

    /// Evicts the item that the policy chooses. False if there is none.
    fn evict_one(&mut self) -> bool {
        let Some(hash) = self.ranked.as_mut().and_then(|ranked| ranked.victim()) else {
            return false;
        };
        while let Some(Found { at, place }) = self.item_of(hash) {
            let header = self.arena.item(place).header();
            if self.is_gone(place) {
                self.count_reclaimed(header);
            } else {
                self.leave(hash, place, header);
            }
            self.index.remove(at);
            self.forget(place);
        }
        self.measure_ranked();
        true
    }

    /// A segment worth emptying, closed: the one with the most holes among some samples.
    fn hollow_segment(&mut self) -> Option<SegmentId> {
        let mut hollowest: Option<(usize, SegmentId)> = None;
        for _ in 0..SAMPLES {
            let Some(id) = self.next_sample() else { continue };
            let segment = self.arena.segment(id);
            let dead_bytes = segment.dead_bytes();
            let percent = if segment.is_sealed { HOLLOW_PERCENT } else { HOLLOW_OPEN_PERCENT };
            let is_worth_it = segment.leases == 0
                && !segment.is_lone()
                && dead_bytes > 0
                && dead_bytes * 100 >= segment.used_bytes * percent;
            if is_worth_it && hollowest.is_none_or(|(most, _)| dead_bytes > most) {
                hollowest = Some((dead_bytes, id));
            }
        }
        let (_, id) = hollowest?;
        if !self.arena.segment(id).is_sealed {
            self.close(id);
        }
        Some(id)
    }
}
