//! A program that locks all its memory (mlockall) locks the victim buffer with it. The kernel then
//! walks over all mappings and touches what is missing, as if the program did, and no longer drops
//! any frame.
//!
//! The buffer is unlocked again. The kernel's walk over one of its mappings ends at a poisoned
//! frame, because the kernel skips the rest of a mapping in which it meets an error. What the
//! program locked is brought in by faults as before, and stays.
//!
//! Invariant: no tray has poison in it while it is used. Only the evictor fills trays, so only the
//! evictor poisons their frames, and drops the poison before it uses a tray.

use farpool_uffd::Outcome;
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::{Mover, until_settled};
use crate::evict::evictor::Evictor;
use crate::space::frames::TRAY_BYTES;
use crate::space::moves;

impl Evictor {
    /// Releases threads that wait for frames, see [`crate::space::frames::Frames::note_touched`].
    pub(super) fn end_walks(&mut self) {
        let core = self.core;
        let touched = core.frames.take_touched();
        if touched.is_empty() {
            return;
        }
        core.frames.unlock();
        for address in touched {
            // A frame that has been filled meanwhile answers the walk by itself.
            if moves::occupied(&core.pagemap, address, 1) == 0 {
                self.poison(address);
            }
            // It fails where no thread waits any more.
            let _ = core.uffd.wake(address, PAGE_BYTES);
        }
    }

    fn poison(&mut self, address: usize) {
        let core = self.core;
        let poisoned =
            until_settled(core, Mover::Evictor, |_| core.uffd.poison(address, PAGE_BYTES));
        match poisoned {
            Outcome { errno: None | Some(libc::EEXIST), .. } => self.poisoned.push(address),
            // A change of the address space comes first: the thread faults again.
            Outcome { errno: Some(libc::ECANCELED), .. } => {}
            Outcome { errno: Some(errno), .. } => fail_closed(&format!(
                "a frame at {address:#x} cannot be poisoned: {}",
                std::io::Error::from_raw_os_error(errno)
            )),
        }
    }

    /// Drops poison from a tray that is to be used.
    pub(super) fn clear_poison(&mut self, tray: u16) {
        if self.poisoned.is_empty() {
            return;
        }
        let core = self.core;
        let start = core.frames.tray_address(tray);
        let frames = start..start + TRAY_BYTES;
        let (cleared, kept) = self.poisoned.drain(..).partition(|it| frames.contains(it));
        self.poisoned = kept;
        for address in Vec::into_iter(cleared) {
            core.frames.release_range(&core.uffd, &core.pagemap, address, PAGE_BYTES);
        }
    }
}
