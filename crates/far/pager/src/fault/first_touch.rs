//! First touches: pages that were never moved out read as zeros.

use farpool_board::Counter;
use farpool_policy::reserve::MAX_ZERO_RUN;
use farpool_uffd::{Event, Outcome};
use farpool_units::{PAGE_BYTES, exactly};

use crate::core::{Mover, until_settled};
use crate::fault::thread::FaultThread;
use crate::space::Page;
use crate::space::frames::{FrameRun, FrameSlot};
use crate::space::page::{PageState, Phase};
use crate::space::units::SUPERPAGE_PAGES;
use crate::sys;

impl FaultThread {
    /// Answers a first touch with zero pages, in runs when touches are sequential.
    pub(super) fn zero_fill(&mut self, page: Page, event: Event) -> bool {
        let expected = self.core.streams.zero_run(event.thread, page.address());
        let wanted = if self.core.gate.is_shut() { 1 } else { expected };
        let run = self.claim_untouched(page, wanted);
        if run == 0 {
            return false;
        }
        self.core.count(Counter::ZeroFills, 1);
        self.core.count(Counter::PagesZeroed, run as u64);
        if run == 1 && !event.is_write {
            // The kernel's zero page takes no memory, but the write that may follow does, unseen.
            self.core.budget.overdraw(1);
            let outcome = until_settled(self.core, Mover::FaultThread, |_| {
                self.core.uffd.zero(page.address(), PAGE_BYTES, false)
            });
            self.settle_zero(page, run, outcome);
            self.core.streams.filled(event.thread, page.address() + PAGE_BYTES, 1);
        } else {
            let filled = self.copy_zeros(page, run);
            let end = page.address() + filled.max(1) * PAGE_BYTES;
            self.core.streams.filled(event.thread, end, filled);
        }
        true
    }

    /// Claims a run of pages that read as zeros where they are missing. Returns how many it
    /// claimed.
    fn claim_untouched(&mut self, page: Page, wanted: usize) -> usize {
        let most = wanted.min(MAX_ZERO_RUN).min(SUPERPAGE_PAGES - page.index);
        self.dropped = 0;
        for offset in 0..most {
            let cell = &page.superpage.pages[page.index + offset];
            if cell.claim(Phase::Untouched, Phase::Fetching).is_some() {
                continue;
            }
            if cell.claim(Phase::Dropped, Phase::Fetching).is_none() {
                return offset;
            }
            self.dropped |= 1 << offset;
        }
        most
    }

    /// The state of a page of the claimed run that was not filled.
    fn unfilled(&self, offset: usize) -> PageState {
        if self.dropped & (1 << offset) == 0 { PageState::UNTOUCHED } else { PageState::DROPPED }
    }

    /// The state of a page of the claimed run that is present already: it was touched before its
    /// memory was registered, or the kernel has yet to drop it.
    fn already_there(&self, offset: usize) -> PageState {
        let untouched = self.unfilled(offset);
        if untouched.phase() == Phase::Dropped {
            untouched
        } else {
            untouched.with_phase(Phase::Resident)
        }
    }

    /// Fills a run with new memory while there is an allowance, else with free frames, which have
    /// to be cleared. Returns how many pages were filled.
    fn copy_zeros(&mut self, page: Page, run: usize) -> usize {
        if self.spend(run, true) {
            return self.place_zeros(page, run);
        }
        let frames = match self.core.frames.take(run) {
            Some((frames, _)) => Some(frames),
            None => self.frame(true).map(|first| FrameRun { first, count: 1 }),
        };
        let count = frames.map_or(1, |frames| frames.count);
        for offset in count..run {
            let index = page.index + offset;
            page.superpage.pages[index].store(self.unfilled(offset));
            let _ = self.core.uffd.wake(page.superpage.base() + index * PAGE_BYTES, PAGE_BYTES);
        }
        match frames {
            Some(frames) => self.move_zeros(page, frames),
            None => self.place_zeros(page, 1),
        }
    }

    /// Clears frames and moves them into the program. Returns how many pages were filled.
    fn move_zeros(&mut self, page: Page, frames: FrameRun) -> usize {
        let start = self.core.frames.address(frames.first);
        sys::zero_pages(start, frames.count);
        let moved = self.move_in(page, frames.first, frames.count);
        for offset in 0..frames.count {
            let slot = frames.slot(offset);
            let page = Page { index: page.index + offset, ..page };
            let state = page.cell().load();
            if moved.has_gone(offset) {
                self.core.frames.moved_away(slot);
                page.cell().store(state.with_phase(Phase::Resident));
            } else if offset == 0 {
                self.copy_cleared(page, slot);
            } else {
                // The run may end in another mapping, even in the victim buffer: nothing is forced
                // into it.
                self.core.frames.give_back(slot);
                page.cell().store(self.unfilled(offset));
            }
        }
        let _ = self.core.uffd.wake(page.address(), frames.count * PAGE_BYTES);
        moved.gone.count_ones() as usize
    }

    /// Copies a cleared frame that cannot be moved: the page is present already, or takes only
    /// copies.
    fn copy_cleared(&mut self, page: Page, slot: FrameSlot) {
        let source = self.core.frames.address(slot);
        let copied = until_settled(self.core, Mover::FaultThread, |_| {
            self.core.uffd.copy(page.address(), source, PAGE_BYTES, false)
        });
        let state = match copied.errno {
            None => PageState::UNTOUCHED.with_phase(Phase::Resident),
            Some(libc::EEXIST) => self.already_there(0),
            Some(_) => self.unfilled(0),
        };
        self.core.frames.give_back(slot);
        page.cell().store(state);
    }

    fn place_zeros(&mut self, page: Page, run: usize) -> usize {
        let (start, zeros) = (page.address(), self.zeros);
        let outcome = until_settled(self.core, Mover::FaultThread, |done| {
            self.core.uffd.copy(start + done, zeros, run * PAGE_BYTES - done, false)
        });
        self.settle_zero(page, run, outcome);
        outcome.done_bytes / PAGE_BYTES
    }

    /// Sets the states of a run of first touches, whatever the outcome, and wakes its pages.
    fn settle_zero(&mut self, page: Page, run: usize, outcome: Outcome) {
        let done = outcome.done_bytes / PAGE_BYTES;
        for offset in 0..run {
            let state = if offset < done {
                PageState::UNTOUCHED.with_phase(Phase::Resident)
            } else if offset == done && outcome.errno == Some(libc::EEXIST) {
                self.already_there(offset)
            } else {
                self.unfilled(offset)
            };
            page.superpage.pages[page.index + offset].store(state);
        }
        self.core.budget.refund(exactly(run - done.min(run)));
        let _ = self.core.uffd.wake(page.address(), run * PAGE_BYTES);
    }

    /// Fills a page that is known as resident but is missing, or was mapped a moment ago: the
    /// program discarded it behind our back (a raw system call), which leaves zeros.
    pub(super) fn refill(&mut self, page: Page) -> bool {
        if page.cell().claim(Phase::Resident, Phase::Fetching).is_none() {
            return false;
        }
        self.core.budget.overdraw(1);
        let outcome = until_settled(self.core, Mover::FaultThread, |_| {
            self.core.uffd.copy(page.address(), self.zeros, PAGE_BYTES, false)
        });
        if outcome.done_bytes == 0 {
            self.core.budget.refund(1);
        }
        page.cell().store(page.cell().load().with_phase(Phase::Resident));
        self.wake(page);
        true
    }
}
