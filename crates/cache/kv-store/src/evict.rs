//! Making room: expired segments first, then flushed items, then segments that are mostly holes,
//! then S3-FIFO, or another policy (`super::ranked`).
//!
//! S3-FIFO (Yang et al., SOSP 2023) on segments: the oldest segment of a queue is emptied. Its
//! items that were read move on (from the small queue to the main queue, in the main queue for one
//! more round), the others are evicted. One segment is kept in reserve, so that there is always
//! room for items that move on.

use farpool_policy::cache::S3_FIFO_PROMOTION_REFERENCES;
use farpool_units::exactly;

use super::arena::{Queue, Segment, SegmentId};
use super::index::{Entry, EntryAt, Place, Tier};
use super::item::{AccessTime, Header, mark};
use super::{Opening, SHARD_BYTES_MIN, Store, StoreError};
use crate::observe::journal::Leaving;

/// Segments reserved for items that move on: one, for the class of the segment being emptied.
const RESERVE_SEGMENTS: usize = 1;
/// A segment with a larger share of holes is emptied before its turn.
const HOLES_PERCENT: usize = 50;
/// How many segments are sampled to find one with holes.
const SAMPLES: usize = 16;
/// Holes are searched for when they take more than this share of all segments.
const HOLES_WORTH_PERCENT: usize = 10;
/// How many items ahead of the one being judged index entries are loaded.
const LOOK_AHEAD: usize = 16;

/// Why a segment is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// It is the oldest of its queue: its items are judged.
    Turn,
    /// It is mostly holes: its items move on as they are.
    Holes,
    /// All its items have expired.
    Expired,
}

impl Store {
    /// Makes room for `bytes` more of segments.
    pub(super) fn make_room(&mut self, bytes: usize) -> Result<(), StoreError> {
        let made = self.evict_for(bytes);
        // A usual segment is taken from the free ones, a lone one has memory of its own.
        self.release_idle(if bytes == self.arena.segment_bytes() { 0 } else { bytes });
        made
    }

    /// Returns memory of free segments for which there is no room beside `bytes` that are about to
    /// be added: large items arrive, tables grow, and limits are lowered.
    pub(super) fn release_idle(&mut self, bytes: usize) {
        let idle_bytes_max = self.settings.limit_bytes.saturating_sub(self.used_bytes() + bytes);
        self.arena.release_idle(idle_bytes_max);
    }

    fn evict_for(&mut self, bytes: usize) -> Result<(), StoreError> {
        let reserve = RESERVE_SEGMENTS * self.arena.segment_bytes();
        let mut rounds = 0u8;
        while self.used_bytes() + bytes + reserve > self.settings.limit_bytes {
            let before = self.used_bytes();
            // Scanning all segments is worth it only once a second, the resolution of expiry.
            if self.looked_for_expired_s < self.now_s && self.free_expired() {
                continue;
            }
            if self.free_flushed() {
                continue;
            }
            if !self.settings.evicts {
                return Err(StoreError::OutOfMemory);
            }
            self.has_evicted = true;
            if self.ranked.is_some() {
                return self.make_ranked_room(bytes + reserve);
            }
            self.prepare_ghost();
            let Some((id, why)) = self.victim() else { return Err(StoreError::OutOfMemory) };
            self.empty(id, why, rounds);
            // If everything was read lately, moving on gets harder until something is evicted.
            rounds = if self.used_bytes() < before { 0 } else { rounds.saturating_add(1) };
        }
        Ok(())
    }

    /// Frees every segment whose items have all expired. True if there was one.
    pub fn free_expired(&mut self) -> bool {
        let now_s = self.now_s;
        self.looked_for_expired_s = now_s;
        let expired: Vec<SegmentId> = self
            .arena
            .segments()
            .filter(|(_, segment)| segment.is_sealed && segment.is_expired(now_s))
            .map(|(id, _)| id)
            .collect();
        self.counts.expiry_rounds += u64::from(!expired.is_empty());
        for &id in &expired {
            self.empty(id, Why::Expired, 0);
        }
        !expired.is_empty()
    }

    /// Frees the flushed items in the next segment that has any. False if there are none left. The
    /// policy alone would keep them for long: some were read often.
    fn free_flushed(&mut self) -> bool {
        while let Some(from) = self.flushed_from {
            let next = self.arena.first_in_use(from);
            self.flushed_from = next.map(|(number, _)| number + 1);
            let Some((_, id)) = next.filter(|&(_, id)| self.has_flushed(id)) else { continue };
            if !self.arena.segment(id).is_sealed {
                self.close(id);
            }
            // Closing may have freed it already.
            if self.arena.segment(id).is_sealed {
                self.empty(id, Why::Holes, 0);
            }
            return true;
        }
        false
    }

    fn has_flushed(&self, id: SegmentId) -> bool {
        let mut next = self.arena.first(id);
        while let Some(place) = next {
            if self.is_flushed(place) {
                return true;
            }
            next = self.arena.next(place);
        }
        false
    }

    /// Lowers or raises the limit, and returns memory above it to the kernel. A shard keeps its
    /// minimum.
    pub fn set_limit(&mut self, limit_bytes: usize) -> Result<(), StoreError> {
        let limit_bytes = limit_bytes.max(SHARD_BYTES_MIN);
        self.settings.limit_bytes = limit_bytes;
        self.make_room(0)
    }

    /// Counts memory that others use for the shard, such as values that are still being received,
    /// against its limit: items are evicted to make room. On error that room cannot be made, and
    /// what was counted before still is.
    pub fn set_beside(&mut self, bytes: usize) -> Result<(), StoreError> {
        let more = bytes.saturating_sub(self.beside_bytes);
        if more > 0 {
            let made = self.evict_for(more);
            self.release_idle(more);
            made?;
        }
        self.beside_bytes = bytes;
        Ok(())
    }

    /// Memory counted by [`Self::set_beside`].
    #[must_use]
    pub const fn beside_bytes(&self) -> usize {
        self.beside_bytes
    }

    /// Grows the ghost to a place for each item, once it has places for fewer than half of them.
    fn prepare_ghost(&mut self) {
        if self.ghost.capacity() < self.items / 2 {
            self.ghost.resize(self.items);
        }
    }

    /// Chooses the segment to empty next.
    fn victim(&mut self) -> Option<(SegmentId, Why)> {
        if let Some(id) = self.segment_with_holes() {
            return Some((id, Why::Holes));
        }
        let small_first = self.queue_bytes[Queue::Small as usize] > self.small_bytes_max();
        let order =
            if small_first { [Queue::Small, Queue::Main] } else { [Queue::Main, Queue::Small] };
        if let Some(id) = order.into_iter().find_map(|queue| self.oldest_unleased(queue)) {
            return Some((id, Why::Turn));
        }
        // All items are in open segments.
        let fullest = self.fullest_open()?;
        self.close(fullest);
        self.arena.segment(fullest).is_sealed.then_some((fullest, Why::Turn))
    }

    /// The fullest open segment without leases.
    fn fullest_open(&self) -> Option<SegmentId> {
        let open = self.open.iter().flatten().flatten().copied();
        let free = open.filter(|&id| self.arena.segment(id).leases == 0);
        free.max_by_key(|&id| self.arena.segment(id).used_bytes)
    }

    /// Closes the fullest open segment, which frees it if nothing in it is live. False if none is
    /// open.
    pub(super) fn close_fullest(&mut self) -> bool {
        let fullest = self.fullest_open();
        fullest.map(|id| self.close(id)).is_some()
    }

    /// Bytes in segments, and how many of them are dead.
    pub(super) fn used_and_holes(&self) -> (usize, usize) {
        let used: usize = self.queue_bytes.iter().sum();
        let live: usize = exactly(self.item_bytes);
        (used, used.saturating_sub(live))
    }

    /// A different segment with each call, if the sampled number is in use.
    pub(super) fn next_sample(&mut self) -> Option<SegmentId> {
        // A stride that visits all numbers before any repeats.
        self.sample = self.sample.wrapping_add(0x9e37_79b1);
        self.arena.sample(self.sample)
    }

    fn segment_with_holes(&mut self) -> Option<SegmentId> {
        let (used, holes) = self.used_and_holes();
        if holes * 100 < used * HOLES_WORTH_PERCENT {
            return None;
        }
        (0..SAMPLES).find_map(|_| {
            let id = self.next_sample()?;
            let segment = self.arena.segment(id);
            let hollow = segment.dead_bytes() * 100 >= segment.used_bytes * HOLES_PERCENT;
            let makes_room = segment.is_sealed && segment.leases == 0;
            (makes_room && !segment.is_lone() && hollow).then_some(id)
        })
    }

    /// Empties a sealed segment and frees it. The more `rounds` have passed without making room,
    /// the more hits an item needs to move on.
    pub(super) fn empty(&mut self, id: SegmentId, why: Why, rounds: u8) {
        let mut next = self.arena.first(id);
        let mut batch: Vec<(Place, u64)> = Vec::with_capacity(LOOK_AHEAD);
        while next.is_some() {
            batch.clear();
            while let (Some(place), true) = (next, batch.len() < LOOK_AHEAD) {
                let hash = self.hash_of(self.arena.item(place).key());
                self.index.prefetch(hash);
                batch.push((place, hash));
                next = self.arena.next(place);
            }
            for &(place, hash) in &batch {
                if !self.judge(id, why, (place, hash), rounds) {
                    // A lone segment moved on as a whole.
                    return;
                }
            }
            if self.arena.segment(id).live_items == 0 {
                break;
            }
        }
        assert_eq!(self.arena.segment(id).live_items, 0, "every item was judged");
        self.free_sealed(id);
    }

    /// Decides about one item of a segment being emptied. False if the whole segment moves on.
    fn judge(&mut self, id: SegmentId, why: Why, (place, hash): (Place, u64), rounds: u8) -> bool {
        let entry =
            self.index.find(hash, |entry| entry.tier() == Tier::Memory && entry.place() == place);
        let Some((at, entry)) = entry else { return true };
        let header = self.arena.item(place).header();
        self.counts.expiry_checked += u64::from(why == Why::Expired);
        if self.is_gone(place) {
            self.counts.expiry_reclaimed += u64::from(why == Why::Expired);
            self.count_reclaimed(header);
            self.drop_item(at, place, header);
            return true;
        }
        let queue = self.arena.segment(id).queue;
        let hits_wanted = match queue {
            Queue::Small => S3_FIFO_PROMOTION_REFERENCES,
            Queue::Main => 1,
        };
        if why == Why::Holes && rounds == 0 || self.ranked.is_some() {
            let entry = Entry::new(Tier::Memory, place, entry.hits());
            return self.go_on(id, queue, (at, entry), header);
        }
        if entry.hits() >= hits_wanted.saturating_add(rounds) {
            let hits = if queue == Queue::Main { entry.hits() - 1 } else { 0 };
            return self.go_on(
                id,
                Queue::Main,
                (at, Entry::new(Tier::Memory, place, hits)),
                header,
            );
        }
        if queue == Queue::Small {
            self.ghost.insert(hash);
        }
        self.leave(hash, place, header);
        self.drop_item(at, place, header);
        true
    }

    /// Counts an item that has expired or was flushed, and now leaves.
    pub(super) fn count_reclaimed(&mut self, header: Header) {
        self.counts.reclaimed += 1;
        self.counts.expired_unfetched += u64::from(!header.has(mark::FETCHED));
    }

    /// Whether an item has expired or was flushed.
    pub(super) fn is_gone(&self, place: Place) -> bool {
        let expires_s = self.arena.item(place).expires_s();
        expires_s != 0 && expires_s <= self.now_s || self.flushed_cas != 0 && self.is_flushed(place)
    }

    /// Evicts a live item: counts it, notes it for watchers, and passes it to the lower tier.
    pub(super) fn leave(&mut self, hash: u64, place: Place, header: Header) {
        self.counts.evictions += 1;
        self.counts.evicted_unfetched += u64::from(!header.has(mark::FETCHED));
        self.counts.evicted_nonzero += u64::from(header.has(mark::EXPIRES));
        self.counts.evicted_idle_s = u64::from(self.idle_s(place, header));
        self.note_leaving(place, header);
        if let Some(outbox) = &mut self.outbox {
            let first_cas = self.arena.segment(SegmentId::of(place)).first_cas;
            let item = self.arena.item(place);
            outbox.push(hash, item.stored_as(first_cas), item);
        }
    }

    /// For how many seconds an item has not been read or stored.
    fn idle_s(&self, place: Place, header: Header) -> u32 {
        let birth_s = self.arena.segment(SegmentId::of(place)).birth_s;
        self.now_s.saturating_sub(birth_s + header.access.seconds())
    }

    /// Notes the eviction of an item for watchers.
    fn note_leaving(&mut self, place: Place, header: Header) {
        let idle_s = self.idle_s(place, header);
        let Some(journal) = &mut self.journal else { return };
        let view = self.arena.item(place);
        let expires_s = view.expires_s();
        let leaving = Leaving {
            key: view.key(),
            was_fetched: header.has(mark::FETCHED),
            ttl_s: (expires_s != 0).then(|| expires_s.saturating_sub(self.now_s)),
            idle_s,
            value_bytes: view.value().len(),
        };
        journal.left(leaving, self.outbox.is_some());
    }

    fn drop_item(&mut self, at: EntryAt, place: Place, header: Header) {
        self.index.remove(at);
        self.unrank(place);
        self.unaccount(place, header);
    }

    /// As [`Store::forget`], but leaves freeing the segment to the caller that empties it.
    fn unaccount(&mut self, place: Place, header: Header) {
        let footprint = header.footprint_bytes();
        self.items -= 1;
        self.item_bytes -= footprint as u64;
        self.quotas.died(self.arena.item(place).key(), footprint);
        self.arena.segment_mut(SegmentId::of(place)).died(footprint);
    }

    /// Moves an item on into `queue`. False if its lone segment moved with it. `entry` is the new
    /// index entry, except for the place.
    fn go_on(
        &mut self,
        from: SegmentId,
        queue: Queue,
        (at, entry): (EntryAt, Entry),
        header: Header,
    ) -> bool {
        let place = entry.place();
        if self.arena.segment(from).is_lone() {
            self.requeue(from, queue);
            self.index.set(at, entry);
            return false;
        }
        let stored_as = self.arena.item(place).stored_as(self.arena.segment(from).first_cas);
        let Some(to) = self.segment_to_go_on(queue, header.footprint_bytes(), from, stored_as)
        else {
            self.counts.evictions += 1;
            self.note_leaving(place, header);
            self.drop_item(at, place, header);
            return true;
        };
        let accessed_s = self.arena.segment(from).birth_s + header.access.seconds();
        let (first_cas, birth_s) =
            (self.arena.segment(to).first_cas, self.arena.segment(to).birth_s);
        let moved = Header {
            marks: header.marks & !mark::ACTIVE,
            access: AccessTime::from_seconds(accessed_s.saturating_sub(birth_s)),
            cas: u32::try_from(stored_as - first_cas)
                .expect("segment_to_go_on looks for one in reach"),
            ..header
        };
        let last_expiry_s = super::expiry_or_never(self.arena.item(place).expires_s());
        let new = self.arena.append_copy(to, moved, place);
        self.queue_bytes[queue as usize] += moved.footprint_bytes();
        let segment = self.arena.segment_mut(to);
        segment.last_expiry_s = segment.last_expiry_s.max(last_expiry_s);
        self.index.set(at, Entry::new(Tier::Memory, new, entry.hits()));
        self.counts.moved += 1;
        // The copy is counted again, because the original is no longer counted.
        self.items += 1;
        self.item_bytes += moved.footprint_bytes() as u64;
        self.quotas.born(self.arena.item(new).key(), moved.footprint_bytes());
        self.unaccount(place, header);
        true
    }

    fn requeue(&mut self, id: SegmentId, queue: Queue) {
        let bytes = self.arena.segment(id).used_bytes;
        let old = self.arena.segment(id).queue as usize;
        self.queues[old].remove(&mut self.arena, id);
        assert!(self.queue_bytes[old] >= bytes, "a queue counts what its segments hold");
        self.queue_bytes[old] -= bytes;
        self.arena.segment_mut(id).queue = queue;
        self.queue_bytes[queue as usize] += bytes;
        self.queues[queue as usize].push(&mut self.arena, id);
    }

    /// An open segment for an item that moves on, with memory from the reserve. Its CAS numbers and
    /// ages are relative to no later than those of `from`.
    fn segment_to_go_on(
        &mut self,
        queue: Queue,
        footprint: usize,
        from: SegmentId,
        stored_as: u64,
    ) -> Option<SegmentId> {
        let from = self.arena.segment(from);
        let (class, first_cas, mut birth_s) = (from.ttl_class, from.first_cas, from.birth_s);
        // Items that stay in the small queue join the new ones there.
        let opening = if queue == Queue::Main { Opening::GoingOn } else { Opening::Small };
        let open = self.open[opening as usize][usize::from(class)];
        if self.ranked.is_some() {
            let before_s = open.map(|id| self.arena.segment(id).birth_s);
            birth_s = self.moved_birth_s(birth_s, before_s);
        }
        if let Some(id) = open {
            let open = self.arena.segment(id);
            let ahead = stored_as.checked_sub(open.first_cas);
            let in_reach = ahead.is_some_and(|ahead| u32::try_from(ahead).is_ok());
            if in_reach && open.birth_s <= birth_s && self.arena.room_bytes(id) >= footprint {
                return Some(id);
            }
        }
        let id = self.arena.open(footprint, Segment::new(queue, class, first_cas, birth_s))?;
        self.open_instead(opening, class, id);
        Some(id)
    }
}
