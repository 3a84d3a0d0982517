// SPDX-License-Identifier: GPL-2.0-or-later
//! Which uses of pages are recorded: the first in each window of a thread's accesses, and the first
//! write after reads. No use is lost for longer than the window, as it would be behind a cache.

use std::collections::HashMap;

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// The last record of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recorded {
    /// The page's number.
    pub page: u64,
    /// No access up to this one needs another record, counted as [`PageFilter::reference`] does.
    pub until: u64,
    /// It was recorded as written; otherwise a write is news.
    pub is_written: bool,
}

/// One thread's memory of what it recorded.
#[derive(Debug)]
pub struct PageFilter {
    window: u64,
    recorded: HashMap<u64, Recorded>,
    /// Pages that are remembered before those outside the window are forgotten.
    room: usize,
}

/// The least room: forgetting walks over everything that is remembered.
const LEAST_ROOM: usize = 1 << 12;

impl PageFilter {
    /// A filter that lets a page through once in `window` accesses.
    #[must_use]
    pub fn new(window: u64) -> Self {
        Self { window, recorded: HashMap::new(), room: LEAST_ROOM }
    }

    /// The thread's access number `count`, which never falls: what is remembered of the page now,
    /// and whether this access is to be recorded.
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
