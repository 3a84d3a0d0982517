//! What a blade counts of its packed pages.

use super::pages::Packed;
use crate::memory::room::Room;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters without a lock.
#[derive(Debug, Default)]
pub(super) struct PackCounters {
    pub(super) pages_filled: AtomicU64,
    pub(super) pages_in_frames: AtomicU64,
    pub(super) zero_pages_found: AtomicU64,
    pub(super) pages_packed: AtomicU64,
    pub(super) pages_unpacked: AtomicU64,
    pub(super) pages_failed: AtomicU64,
}

/// What a blade that packs has now, and has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackStat {
    /// Memory that it may use.
    pub memory_bytes: u64,
    /// Memory of all pages, packed or not, and of the tables of packed ones.
    pub memory_used_bytes: u64,
    /// What of it is packed: frames, and their tables.
    pub frames_bytes: u64,
    /// Pages that one word fills, and that take no memory.
    pub pages_filled: u64,
    /// Pages that are in frames.
    pub pages_in_frames: u64,
    /// Frames: fewer than the pages in them by those that are equal to others.
    pub frames: u64,
    /// Pages that were found to be zero, and given back.
    pub zero_pages_found: u64,
    /// Pages that were packed.
    pub pages_packed: u64,
    /// Packed pages that were unpacked to be sent.
    pub pages_unpacked: u64,
    /// Packed pages that were not what was packed: clients were told that they are lost.
    pub pages_failed: u64,
}

impl PackCounters {
    /// Counts a page that was packed.
    pub(super) fn count(&self, packed: Packed) {
        let counter = match packed {
            Packed::Not => &self.zero_pages_found,
            Packed::Filled(_) => &self.pages_filled,
            Packed::Frame(_) => &self.pages_in_frames,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.pages_packed.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stat(&self, room: &Room, (frames_bytes, frames): (u64, u64)) -> PackStat {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PackStat {
            memory_bytes: room.limit_bytes(),
            memory_used_bytes: room.taken_bytes(),
            frames_bytes,
            pages_filled: count(&self.pages_filled),
            pages_in_frames: count(&self.pages_in_frames),
            frames,
            zero_pages_found: count(&self.zero_pages_found),
            pages_packed: count(&self.pages_packed),
            pages_unpacked: count(&self.pages_unpacked),
            pages_failed: count(&self.pages_failed),
        }
    }
}
