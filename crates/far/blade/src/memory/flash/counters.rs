//! What a blade counts of its flash.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters without a lock.
#[derive(Debug, Default)]
pub(super) struct FlashCounters {
    pub(super) pages_fetched: AtomicU64,
    pub(super) pages_written: AtomicU64,
    pub(super) pages_failed: AtomicU64,
    pub(super) writes_failed: AtomicU64,
}

/// What a blade with flash has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlashStat {
    /// Memory of pages that are in memory or on their way there.
    pub memory_used_bytes: u64,
    /// Pages read from flash that were what was written there.
    pub pages_fetched: u64,
    /// Pages written to flash.
    pub pages_written: u64,
    /// Pages that could not be read, or were not what was written: clients were told that they are
    /// lost.
    pub pages_failed: u64,
    /// Writes that failed; what they were to write is still in memory.
    pub writes_failed: u64,
}

impl FlashCounters {
    pub(super) fn stat(&self, memory_used_bytes: u64) -> FlashStat {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FlashStat {
            memory_used_bytes,
            pages_fetched: count(&self.pages_fetched),
            pages_written: count(&self.pages_written),
            pages_failed: count(&self.pages_failed),
            writes_failed: count(&self.writes_failed),
        }
    }
}
