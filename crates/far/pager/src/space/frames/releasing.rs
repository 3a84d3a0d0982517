//! Returns frames that were taken to the kernel.

use std::sync::atomic::Ordering::SeqCst;

use farpool_uffd::{Pagemap, Uffd};
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::space::drain;
use crate::space::frames::buffer::Frames;
use crate::space::frames::slots::TakenTray;
use crate::space::frames::zones::TRAY_BYTES;
use crate::space::units::runs;
use crate::sys;

impl Frames {
    /// Returns frames to the kernel and forgets them; `taken` is empty afterwards. The buffer is
    /// registered with `uffd`.
    pub fn release(&self, uffd: &Uffd, pagemap: &Pagemap, taken: &mut Vec<TakenTray>) {
        taken.sort_unstable_by_key(|tray| tray.tray);
        for group in taken.chunk_by(|a, b| a.whole && b.whole && a.tray + 1 == b.tray) {
            if group[0].whole {
                self.release_range(
                    uffd,
                    pagemap,
                    self.tray_address(group[0].tray),
                    group.len() * TRAY_BYTES,
                );
                continue;
            }
            for (first, count) in runs(group[0].frames) {
                let start = self.tray_address(group[0].tray) + first * PAGE_BYTES;
                self.release_range(uffd, pagemap, start, count * PAGE_BYTES);
            }
        }
        for TakenTray { tray, frames, .. } in taken.drain(..) {
            let entry = &self.trays[usize::from(tray)];
            entry.valid.fetch_and(!frames, SeqCst);
            let filled = entry.filled.fetch_and(!frames, SeqCst);
            let busy = entry.busy.fetch_and(!frames, SeqCst);
            assert_eq!(filled & busy & frames, frames, "what is released was taken before");
        }
    }

    /// Returns frames that the caller owns to the kernel.
    pub fn release_range(&self, uffd: &Uffd, pagemap: &Pagemap, start: usize, bytes: usize) {
        if !self.recycles {
            return drain::release(uffd, pagemap, start, bytes, || self.unlock());
        }
        // The program's calls are seen, and none of them locks the buffer.
        if let Err(error) = sys::release(start, bytes) {
            fail_closed(&format!("frames at {start:#x} cannot be dropped: {error}"));
        }
    }

    /// Unlocks the buffer, which is locked by a program that locks all its memory.
    pub fn unlock(&self) {
        let (base, bytes) = self.range();
        if let Err(error) = sys::unlock(base, bytes) {
            fail_closed(&format!("the victim buffer cannot be unlocked: {error}"));
        }
    }
}
