//! Storing: in place if the new item fits exactly, else at the end of an open segment of its kind.

use farpool_policy::cache::S3_FIFO_SMALL_PERCENT;

use super::arena::{Queue, Segment, SegmentId};
use super::index::{self, Entry, EntryAt, Place, Tier};
use super::item::{AccessTime, ItemParts, KEY_BYTES_MAX, VALUE_BYTES_MAX, mark, memcached_bytes};
use super::{Found, Opening, Store, StoreError, expiry_or_never, ttl_class};

/// How far below the last CAS number a new segment's numbers begin, so that older items that are
/// stored anew (after a touch, say) fit into it.
const CAS_BEHIND: u64 = 1 << 31;

impl Store {
    const fn check_size(&self, parts: &ItemParts<'_>) -> Result<(), StoreError> {
        let (key_bytes, value_bytes) = (parts.key.len(), parts.value_bytes());
        let total = memcached_bytes(key_bytes, parts.client_flags, value_bytes);
        if key_bytes > KEY_BYTES_MAX
            || value_bytes > VALUE_BYTES_MAX
            || total > self.settings.item_bytes_max
        {
            return Err(StoreError::TooLarge);
        }
        Ok(())
    }

    /// Stores an item under a new CAS number, replacing the key's item.
    pub fn insert(&mut self, parts: &ItemParts<'_>, hash: u64) -> Result<Found, StoreError> {
        self.counts.total_items += 1;
        self.put(parts, hash, None)
    }

    pub(super) fn put(
        &mut self,
        parts: &ItemParts<'_>,
        hash: u64,
        cas: Option<u64>,
    ) -> Result<Found, StoreError> {
        self.check_size(parts)?;
        let kept = cas.is_some();
        // Eight more bytes, in case the CAS number is too old for the segment.
        let footprint = parts.header(AccessTime(0), 0).footprint_bytes() + if kept { 8 } else { 0 };
        self.make_quota_room(parts.key, hash, footprint)?;
        self.prepare_ranked()?;
        let cas = cas.unwrap_or_else(|| self.next_cas());
        let old = self.entry_of(parts.key, hash);
        if let Some((at, entry)) = old
            && self.put_in_place(parts, entry.place(), cas)
        {
            if !kept {
                self.rank(hash)?;
            }
            return Ok(Found { at, place: entry.place() });
        }
        let queue = self.queue_for(old.map(|(_, entry)| entry.place()), hash);
        let class = ttl_class(parts.expires_s, self.now_s);
        // A number far ahead needs no segment of its own: it is kept with the item.
        let id = self.segment_for(queue, class, footprint, cas.min(self.last_cas))?;
        let segment = self.arena.segment_mut(id);
        segment.last_expiry_s = segment.last_expiry_s.max(expiry_or_never(parts.expires_s));
        // A number that a client gave may be any: too old, or too far ahead.
        let delta = cas.checked_sub(segment.first_cas).and_then(|it| u32::try_from(it).ok());
        let wide_cas = parts.wide_cas.or(delta.is_none().then_some(cas));
        let parts = &ItemParts { wide_cas, ..*parts };
        let delta = delta.unwrap_or_default();
        let header = parts.header(self.access_now(id), delta);
        assert!(header.footprint_bytes() <= footprint, "room was made for all of the item");
        let place = self.arena.append(id, header, parts);
        self.queue_bytes[queue as usize] += header.footprint_bytes();
        self.items += 1;
        self.item_bytes += header.footprint_bytes() as u64;
        self.quotas.born(parts.key, header.footprint_bytes());
        if self.arena.segment(id).is_lone() {
            // Immediately, so that the segment is freed if the index has no room.
            self.queues[queue as usize].push(&mut self.arena, id);
        }
        // Making room may have moved or evicted the key's old item.
        let at = match self.entry_of(parts.key, hash) {
            Some((at, entry)) => {
                self.index.set(at, Entry::new(Tier::Memory, place, entry.hits()));
                self.forget(entry.place());
                if !kept {
                    self.rank(hash)?;
                }
                at
            }
            None => match self.insert_ranked(hash, place) {
                Ok(at) => at,
                Err(error) => {
                    self.forget(place);
                    return Err(error);
                }
            },
        };
        self.index_bytes = self.index.bytes();
        Ok(Found { at, place })
    }

    fn insert_ranked(&mut self, hash: u64, place: Place) -> Result<EntryAt, StoreError> {
        self.forget_lower(hash);
        let at = self
            .index
            .insert(hash, Entry::new(Tier::Memory, place, 0))
            .map_err(|index::IndexFull| StoreError::OutOfMemory)?;
        self.rank(hash).inspect_err(|_| self.index.remove(at))?;
        Ok(at)
    }

    /// Overwrites the key's item if the new one has exactly its layout and its number fits the
    /// segment.
    fn put_in_place(&mut self, parts: &ItemParts<'_>, place: Place, cas: u64) -> bool {
        let old = self.arena.item(place).header();
        let id = SegmentId::of(place);
        let segment = self.arena.segment(id);
        if segment.leases > 0 {
            return false;
        }
        let Some(delta) =
            cas.checked_sub(segment.first_cas).and_then(|delta| u32::try_from(delta).ok())
        else {
            return false;
        };
        let header = parts.header(self.access_now(id), delta);
        let fits = header.item_bytes() == old.item_bytes()
            && header.key_at() == old.key_at()
            && header.marks & mark::LAYOUT == old.marks & mark::LAYOUT
            && segment.ttl_class == ttl_class(parts.expires_s, self.now_s);
        if fits {
            parts.write(header, self.arena.item_mut(place));
            let segment = self.arena.segment_mut(id);
            segment.last_expiry_s = segment.last_expiry_s.max(expiry_or_never(parts.expires_s));
        }
        fits
    }

    fn queue_for(&mut self, old: Option<Place>, hash: u64) -> Queue {
        if self.ranked.is_some() {
            return Queue::Main;
        }
        if let Some(place) = old {
            return self.arena.segment(SegmentId::of(place)).queue;
        }
        let small_has_room =
            self.has_evicted || self.queue_bytes[Queue::Small as usize] < self.small_bytes_max();
        if self.ghost.take(hash) || !small_has_room { Queue::Main } else { Queue::Small }
    }

    /// The small queue's share of the memory for items.
    pub(super) const fn small_bytes_max(&self) -> usize {
        self.settings.limit_bytes.saturating_sub(self.index_bytes) / 100
            * S3_FIFO_SMALL_PERCENT as usize
    }

    /// An open segment with room for the item, and with `cas` in range unless it is too old for
    /// any.
    fn segment_for(
        &mut self,
        queue: Queue,
        class: u8,
        footprint: usize,
        cas: u64,
    ) -> Result<SegmentId, StoreError> {
        let opening = match queue {
            Queue::Small => Opening::Small,
            Queue::Main => Opening::Main,
        };
        let lone = self.arena.is_lone(footprint);
        if !lone && let Some(id) = self.open[opening as usize][usize::from(class)] {
            let ahead = cas.saturating_sub(self.arena.segment(id).first_cas);
            if u32::try_from(ahead).is_ok() && self.arena.room_bytes(id) >= footprint {
                return Ok(id);
            }
        }
        self.make_room(self.arena.segment_bytes_for(footprint))?;
        let segment =
            Segment::new(queue, class, self.last_cas.saturating_sub(CAS_BEHIND), self.now_s);
        let id = self.arena.open(footprint, segment).ok_or(StoreError::OutOfMemory)?;
        if !lone {
            self.open_instead(opening, class, id);
        }
        Ok(id)
    }

    /// Makes `id` the open segment of its kind and seals the previous one.
    pub(super) fn open_instead(&mut self, opening: Opening, class: u8, id: SegmentId) {
        if let Some(full) = self.open[opening as usize][usize::from(class)].replace(id) {
            self.seal(full);
        }
    }

    /// Closes an open segment.
    pub(super) fn close(&mut self, id: SegmentId) {
        let open = self.open.iter_mut().flatten().find(|open| **open == Some(id));
        if let Some(id) = open.and_then(Option::take) {
            self.seal(id);
        }
    }

    /// Closes a segment that is no longer in any list of open ones.
    pub(super) fn seal(&mut self, id: SegmentId) {
        let queue = self.arena.segment(id).queue as usize;
        self.queues[queue].push(&mut self.arena, id);
        if self.arena.segment(id).live_items == 0 {
            self.free_sealed(id);
        }
    }
}
