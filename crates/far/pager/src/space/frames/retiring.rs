//! Makes trays without frames empty again.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release, SeqCst};

use crate::space::frames::buffer::Frames;
use crate::space::frames::queues::Queues;
use crate::space::units::NO_TRAY;

impl Frames {
    /// The approximate number of pages mapped in the buffer. Recounts the free ones.
    pub fn count(&self) -> u64 {
        let Ok(queues) = self.queues.lock() else {
            return 0;
        };
        let bits = |tray: &u16, busy: bool| {
            let tray = &self.trays[usize::from(*tray)];
            let taken = if busy { 0 } else { tray.busy.load(Relaxed) };
            (tray.filled.load(Relaxed) & !taken).count_ones()
        };
        let free: u32 = queues.clean.iter().map(|tray| bits(tray, false)).sum();
        self.free.store(i64::from(free), Relaxed);
        queues.clean.iter().map(|tray| u64::from(bits(tray, true))).sum()
    }

    /// True when no frame is in the buffer and no write is under way. Retires drained trays.
    pub fn is_empty(&self) -> bool {
        let Ok(mut queues) = self.queues.lock() else {
            return false;
        };
        self.retire_drained(&mut queues);
        queues.empties() == self.trays.len()
    }

    /// True when no tray is being filled or written: everything in the buffer is on the blades,
    /// except kept pages.
    pub fn is_at_rest(&self) -> bool {
        let Ok(queues) = self.queues.lock() else {
            return false;
        };
        queues.empties() + queues.clean.len() == self.trays.len()
    }

    /// Makes drained trays empty at once, so that their chunks can be evicted again.
    pub fn retire_all(&self) {
        if let Ok(mut queues) = self.queues.lock() {
            self.retire_drained(&mut queues);
        }
    }

    /// Takes all trays without frames out of the queue.
    pub(super) fn retire_drained(&self, queues: &mut Queues) {
        for _ in 0..queues.clean.len() {
            let Some(tray) = queues.clean.pop_front() else {
                return;
            };
            if !self.retire(queues, tray) {
                queues.clean.push_back(tray);
            }
        }
    }

    /// Makes a tray (already out of the queue) empty if it has no frames. True if it did.
    pub(super) fn retire(&self, queues: &mut Queues, tray: u16) -> bool {
        let entry = &self.trays[usize::from(tray)];
        let in_use =
            entry.filled.load(SeqCst) | entry.busy.load(SeqCst) | entry.writing.load(SeqCst);
        if in_use != 0 {
            return false;
        }
        if let Some(page) = self.page_of(entry, 0) {
            let known = page.superpage.trays[page.chunk()].swap(NO_TRAY, AcqRel);
            assert_eq!(known, tray, "a chunk has pages in one tray at most");
        }
        entry.valid.store(0, SeqCst);
        entry.superpage.store(std::ptr::null_mut(), Release);
        queues.vacant_of(tray).push_back(tray);
        true
    }
}
