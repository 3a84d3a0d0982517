// SPDX-License-Identifier: GPL-2.0-or-later
//! Which uses of pages are recorded: the first in each window of a thread's accesses, and the first
//! write after reads. No use is hidden for longer than the window, as it would be behind a cache.

use std::collections::HashMap;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// The last record of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    /// The page's number.
    pub page: u64,
    /// Accesses up to this one need no other record, counted as in [`PageFilter::reference`].
    pub until: u64,
    /// It was recorded as written; otherwise a write has to be recorded.
    pub is_written: bool,
}

/// One thread's memory of its records.
#[derive(Debug)]
pub struct PageFilter {
    window: u64,
    recorded: HashMap<u64, Recorded>,
    /// Pages remembered before those outside the window are dropped.
    room: usize,
}

/// The least value of `room`: dropping walks over all remembered pages.
const LEAST_ROOM: usize = 1 << 12;

impl PageFilter {
    /// Creates a filter that passes a page once in `window` accesses.
    #[must_use]
    pub fn new(window: u64) -> Self {
        Self { window, recorded: HashMap::new(), room: LEAST_ROOM }
    }

    /// Handles the thread's access number `count`, which never falls. Returns what is now
    /// remembered of the page, and whether this access is to be recorded.
    pub fn reference(&mut self, page: u64, is_store: bool, count: u64) -> (Recorded, bool) {
        if let Some(&last) = self.recorded.get(&page)
            && count <= last.until
            && (last.is_written || !is_store)
        {
            return (last, false);
        }
        if self.recorded.len() >= self.room {
            self.recorded.retain(|_, last| count <= last.until);
            self.room = LEAST_ROOM.max(self.recorded.len() * 2);
        }
        let until = count.saturating_add(self.window);
        let record = Recorded { page, until, is_written: is_store };
        self.recorded.insert(page, record);
        (record, true)
    }
}
