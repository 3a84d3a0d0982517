//! First touches: pages that were never moved out read as zeros.

use farpool_board::Counter;
use farpool_uffd::{Event, Outcome, PAGE_BYTES};

use super::FaultThread;
use crate::core::until_settled;
use crate::frames::{FrameRun, FrameSlot};
use crate::page::{PageState, Phase};
use crate::space::{Page, SUPERPAGE_PAGES};
use crate::sys;

impl FaultThread {
    /// First touch: zero pages, in runs when touches come in a row.
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
            let outcome = until_settled(|_| self.core.uffd.zero(page.address(), PAGE_BYTES, false));
            self.settle_zero(page, 1, outcome);
            self.core.streams.filled(event.thread, page.address() + PAGE_BYTES, 1);
        } else {
            let filled = self.copy_zeros(page, run);
            let end = page.address() + filled.max(1) * PAGE_BYTES;
            self.core.streams.filled(event.thread, end, filled);
        }
        true
    }

    fn claim_untouched(&self, page: Page, wanted: usize) -> usize {
        let last = (page.index + wanted).min(SUPERPAGE_PAGES);
        let claimed = (page.index..last).take_while(|index| {
            let cell = &page.superpage.pages[*index];
            cell.claim(Phase::Untouched, Phase::Fetching).is_some()
        });
        claimed.count()
    }

    /// New memory while there is an allowance; else free frames, which have to be cleared. Returns how many
    /// pages were filled.
    fn copy_zeros(&mut self, page: Page, run: usize) -> usize {
        if self.spend(run, true) {
            return self.place_zeros(page, run);
        }
        let frames = match self.core.frames.take(run) {
            Some((frames, _)) => Some(frames),
            None => self.frame(true).map(|first| FrameRun { first, count: 1 }),
        };
        let count = frames.map_or(1, |frames| frames.count);
        for index in page.index + count..page.index + run {
            page.superpage.pages[index].store(PageState::UNTOUCHED);
            let _ = self.core.uffd.wake(page.superpage.base() + index * PAGE_BYTES, PAGE_BYTES);
        }
        match frames {
            Some(frames) => self.move_zeros(page, frames),
            None => self.place_zeros(page, 1),
        }
    }

    /// Clears frames and moves them into the program; returns how many pages were filled.
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
                self.copy_cleared(page, slot, state);
            } else {
                // The run may end in another mapping, even in the victim buffer: nothing is forced into it.
                self.core.frames.give_back(slot);
                page.cell().store(PageState::UNTOUCHED);
            }
        }
        let _ = self.core.uffd.wake(page.address(), frames.count * PAGE_BYTES);
        moved.gone.count_ones() as usize
    }

    /// A cleared frame that cannot be moved: the page is there already, or takes copies only.
    fn copy_cleared(&mut self, page: Page, slot: FrameSlot, state: PageState) {
        let source = self.core.frames.address(slot);
        let copied =
            until_settled(|_| self.core.uffd.copy(page.address(), source, PAGE_BYTES, false));
        let there = matches!(copied.errno, None | Some(libc::EEXIST));
        let phase = if there { Phase::Resident } else { Phase::Untouched };
        self.core.frames.give_back(slot);
        page.cell().store(state.with_phase(phase));
    }

    fn place_zeros(&mut self, page: Page, run: usize) -> usize {
        let (start, zeros) = (page.address(), self.zeros);
        let outcome = until_settled(|done| {
            self.core.uffd.copy(start + done, zeros, run * PAGE_BYTES - done, false)
        });
        self.settle_zero(page, run, outcome);
        outcome.done_bytes / PAGE_BYTES
    }

    /// Sets the states of a run of first touches, whatever came of it, and wakes its pages.
    fn settle_zero(&mut self, page: Page, run: usize, outcome: Outcome) {
        let done = outcome.done_bytes / PAGE_BYTES;
        for offset in 0..run {
            // A page that was there already was touched before its memory was registered.
            let there = offset < done || (offset == done && outcome.errno == Some(libc::EEXIST));
            let phase = if there { Phase::Resident } else { Phase::Untouched };
            let cell = &page.superpage.pages[page.index + offset];
            cell.store(cell.load().with_phase(phase));
        }
        self.core.budget.refund(i64::try_from(run - done.min(run)).unwrap_or(0));
        let _ = self.core.uffd.wake(page.address(), run * PAGE_BYTES);
    }

    /// A page we know as resident is missing, or was mapped a moment ago: the program discarded it
    /// past us (a raw system call), which leaves zeros.
    pub(super) fn refill(&mut self, page: Page) -> bool {
        if page.cell().claim(Phase::Resident, Phase::Fetching).is_none() {
            return false;
        }
        self.core.budget.overdraw(1);
        let outcome =
            until_settled(|_| self.core.uffd.copy(page.address(), self.zeros, PAGE_BYTES, false));
        if outcome.done_bytes == 0 {
            self.core.budget.refund(1);
        }
        page.cell().store(page.cell().load().with_phase(Phase::Resident));
        self.wake(page);
        true
    }
}
