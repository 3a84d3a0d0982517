//! A fault on a page that the evictor has in hand, or has moved out recently: the page goes back.

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::{Mover, until_settled};
use crate::fault::thread::FaultThread;
use crate::space::Page;
use crate::space::page::Phase;

impl FaultThread {
    /// Moves a page that is still in the victim buffer back, and spares it the next time.
    pub(super) fn take_back(&mut self, page: Page) -> bool {
        let Some(state) = page.cell().claim(Phase::Victim, Phase::Fetching) else {
            return false;
        };
        let Some((slot, stays)) = self.core.frames.locate(page) else {
            fail_closed(&format!("page {:#x} is a victim but not in the buffer", page.address()));
        };
        let outcome = if stays { None } else { Some(self.move_in(page, slot, 1)) };
        match outcome {
            Some(moved) if moved.has_gone(0) => self.core.frames.moved_away(slot),
            _ => {
                let address = self.core.frames.address(slot);
                let copied = until_settled(self.core, Mover::FaultThread, |_| {
                    self.core.uffd.copy(page.address(), address, PAGE_BYTES, false)
                });
                match copied.errno {
                    None | Some(libc::EEXIST) => {}
                    // A change comes first, and the thread faults again after it. Or the mapping is
                    // gone, or being moved, and the thread that handles that sets the state.
                    Some(libc::ECANCELED | libc::ENOENT | libc::ESRCH) => {
                        self.core.frames.put_back(page, state, slot);
                        self.wake(page);
                        return true;
                    }
                    // As a victim again it could pass for written, which would be wrong.
                    Some(errno) => fail_closed(&format!(
                        "page {:#x} cannot be taken back: {}",
                        page.address(),
                        std::io::Error::from_raw_os_error(errno)
                    )),
                }
                self.core.budget.overdraw(1);
                self.core.frames.invalidate(slot);
            }
        }
        page.mark_used();
        page.superpage.hot[page.chunk()].fetch_or(page.bit(), std::sync::atomic::Ordering::Relaxed);
        page.cell().store(state.with_phase(Phase::Resident));
        self.core.count(Counter::VictimHits, 1);
        self.wake(page);
        true
    }

    /// Unprotects a page that the evictor protected and could not move out after all.
    pub(super) fn unprotect(&mut self, page: Page) -> bool {
        // It fails when the mapping is gone; the thread tries again in any case.
        let _ = self.core.uffd.write_protect(page.address(), PAGE_BYTES, false);
        self.wake(page);
        true
    }

    /// The evictor touched a page that it is moving out, and found nothing there: the program
    /// discarded it behind our back, which leaves zeros. If the evictor itself took the page away,
    /// zeros would be wrong data.
    #[cold]
    pub(super) fn answer_evictor(&self, page: Page) {
        if self.core.is_moved_out(page) {
            fail_closed(&format!(
                "page {:#x} is touched by the evictor, which has it",
                page.address()
            ));
        }
        let _ = self.core.uffd.zero(page.address(), PAGE_BYTES, true);
    }
}
