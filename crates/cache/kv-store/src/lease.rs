//! Leases: clients on the same host read a value where it lies, instead of a copy of it.
//!
//! While a segment has a lease, no bytes of its items change, and it is neither freed nor reused.
//! Everything else goes on: its items may be replaced, deleted, flushed, expire or be evicted, and
//! a segment with nothing else left is *held* until its last lease ends. So a lease shows the value
//! as it was when the lease was granted.
//!
//! Memory pinned by leases cannot make room. It is bounded by [`LEASED_PERCENT_MAX`], and eviction
//! takes other segments first, so there is always one to take.

use std::os::fd::BorrowedFd;

use super::arena::{Queue, SegmentId};
use super::item::ItemParts;
use super::{Found, Store, StoreError, StoreSettings};

/// The share of the memory for items that leased segments may take: enough for clients that read
/// what they lease at once, while three quarters remain for eviction. Beyond it values are copied.
pub const LEASED_PERCENT_MAX: usize = 25;

/// The right to read a value; released with [`Store::release`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not released pins its segment for ever"]
pub struct Lease(SegmentId);

/// A lease, and the position of its value in the memory that clients map.
#[derive(Debug)]
pub struct LeasedValue {
    pub lease: Lease,
    /// Offset in that memory.
    pub at: usize,
    pub bytes: usize,
}

/// The leases of a shard, and the memory that they pin.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LeasesHeld {
    pub leases: usize,
    /// Segments with leases, and their memory.
    pub segments: usize,
    pub bytes: usize,
}

impl Store {
    /// As [`Store::new`], with items in memory that other processes may read, so that they can be
    /// leased.
    pub fn leasing(settings: StoreSettings) -> Result<Self, StoreError> {
        Self::with_memory(settings, true)
    }

    /// The descriptor with which clients map the items, and its size in bytes. None without leases.
    #[must_use]
    pub fn readable_by_others(&self) -> Option<(BorrowedFd<'_>, usize)> {
        self.arena.readable_by_others()
    }

    #[must_use]
    pub const fn leases_held(&self) -> LeasesHeld {
        self.leases
    }

    const fn leased_bytes_max(&self) -> usize {
        let beside = self.index_bytes + self.ghost.bytes() + self.ranked_bytes;
        self.settings.limit_bytes.saturating_sub(beside) / 100 * LEASED_PERCENT_MAX
    }

    /// Leases an item's value. None if too much is leased already, or the item is not in shared
    /// memory.
    #[must_use]
    pub fn lease(&mut self, found: Found) -> Option<LeasedValue> {
        let lease = self.try_lease(found);
        match lease {
            Some(_) => self.counts.leases += 1,
            None => self.count_lease_refused(),
        }
        lease
    }

    /// Counts a lease that was requested but replaced by a copy.
    pub const fn count_lease_refused(&mut self) {
        self.counts.leases_refused += 1;
    }

    fn try_lease(&mut self, found: Found) -> Option<LeasedValue> {
        let header = self.view(found).header();
        let value_at = header.key_at() + usize::from(header.key_bytes);
        let at = self.arena.shared_at(found.place, value_at)?;
        let id = SegmentId::of(found.place);
        assert!(!self.arena.segment(id).is_held, "a segment that is held has nothing to lease");
        let leases = self.arena.segment(id).leases.checked_add(1)?;
        if leases == 1 {
            let bytes = self.leases.bytes + self.arena.taken_bytes(id);
            if bytes > self.leased_bytes_max() {
                return None;
            }
            self.leases.bytes = bytes;
            self.leases.segments += 1;
        }
        self.arena.segment_mut(id).leases = leases;
        self.leases.leases += 1;
        Some(LeasedValue { lease: Lease(id), at, bytes: header.value_bytes as usize })
    }

    /// Ends a lease, and frees the segment if nothing else keeps it.
    pub fn release(&mut self, Lease(id): Lease) {
        let segment = self.arena.segment_mut(id);
        assert!(segment.leases > 0 && self.leases.leases > 0, "a lease ends once");
        self.leases.leases -= 1;
        segment.leases -= 1;
        if segment.leases > 0 {
            return;
        }
        let is_held = segment.is_held;
        assert!(self.leases.segments > 0, "a segment with leases was counted");
        self.leases.segments -= 1;
        self.leases.bytes -= self.arena.taken_bytes(id);
        if is_held {
            self.arena.free(id);
            self.release_idle(0);
        }
    }

    /// Releases pages that readers made the kernel put into the holes of shared memory. To be
    /// called now and then.
    pub fn cut_strays(&mut self) {
        self.arena.cut_strays(self.settings.limit_bytes);
    }

    /// Frees a segment that was taken out of its queue, or holds it while it has leases.
    pub(super) fn free_or_hold(&mut self, id: SegmentId) {
        let segment = self.arena.segment_mut(id);
        assert!(!segment.is_held, "a segment is given up once");
        assert!(segment.live_items == 0, "no item is left in a segment that is given up");
        if segment.leases > 0 {
            segment.is_held = true;
        } else {
            self.arena.free(id);
        }
    }

    /// The oldest segment of a queue that can make room. Those with leases go to the queue's end,
    /// for another round.
    pub(super) fn oldest_unleased(&mut self, queue: Queue) -> Option<SegmentId> {
        for _ in 0..=self.leases.segments {
            let id = self.queues[queue as usize].oldest()?;
            if self.arena.segment(id).leases == 0 {
                return Some(id);
            }
            self.queues[queue as usize].remove(&mut self.arena, id);
            self.queues[queue as usize].push(&mut self.arena, id);
        }
        None
    }

    /// Stores an item anew with another value and CAS number; everything else stays as it was.
    pub(super) fn overwrite_elsewhere(
        &mut self,
        found: Found,
        hash: u64,
        value: &[u8],
        cas: u64,
    ) -> Result<Found, StoreError> {
        let view = self.view(found);
        let key = view.key().to_vec();
        let parts = ItemParts {
            key: &key,
            value: [value, b""],
            client_flags: view.client_flags(),
            expires_s: view.expires_s(),
            marks: view.header().marks & !super::mark::LAYOUT,
            wide_cas: None,
        };
        self.put(&parts, hash, Some(cas))
    }
}
