//! Forgetting the pager's state of pages that the program has given up.
//!
//! The steward does this, because it can wait for threads that have a page in hand. But a program
//! thread that gives memory up (madvise) often uses it again at once, and its faults wait until the
//! change is applied: through the steward that costs two more wake-ups of threads. So the thread
//! that reads the event applies it in place where that takes no lock and no waiting ([`give_up`]).

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use crate::core::state::Core;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::space::{Page, known_pages, known_superpages};

/// The most that is applied in place: no pages are moved and no messages are read meanwhile.
const MOST_BYTES: usize = 1024 * PAGE_BYTES;

/// Forgets a page: it reads as zeros from now on unless it is in the program, and is then in the
/// state `there`. False: another thread has it in hand and will release it soon, or its state has
/// changed meanwhile.
pub fn try_forget(core: &Core, page: Page, there: PageState) -> bool {
    let state = page.cell().load();
    match state.phase() {
        Phase::Untouched | Phase::Dropped => state == there || page.cell().change(state, there),
        Phase::Resident | Phase::Lost => {
            let changed = page.cell().change(state, there);
            if changed {
                page.superpage.give_up_copy(state);
            }
            changed
        }
        Phase::Far => {
            let changed = page.cell().change(state, PageState::UNTOUCHED);
            if changed {
                page.superpage.leave_blade();
            }
            changed
        }
        Phase::Victim => forget_victim(core, page, state),
        Phase::Fetching | Phase::Evicting => false,
    }
}

fn forget_victim(core: &Core, page: Page, state: PageState) -> bool {
    if !page.cell().change(state, state.with_phase(Phase::Fetching)) {
        return false;
    }
    if let Some((slot, _)) = core.frames.locate(page) {
        core.frames.invalidate(slot);
    }
    page.cell().store(PageState::UNTOUCHED);
    page.superpage.give_up_copy(state);
    // A thread that touched it meanwhile was told to wait.
    let _ = core.uffd.wake(page.address(), PAGE_BYTES);
    true
}

/// Applies in place that the program is about to drop a range. No earlier change may wait to be
/// applied, and the layout's turnstile must be held exclusively: no pages are being moved then, so
/// a page that no thread has in hand is where its state says. False: the steward has to apply it,
/// all of it.
pub fn give_up(core: &Core, range: &Range<usize>) -> bool {
    let (start, end) = (range.start, range.end);
    if range.len() > MOST_BYTES {
        return false;
    }
    let is_done = |page| try_forget(core, page, PageState::DROPPED);
    if !known_pages(core.space, start, end).all(is_done) {
        return false;
    }
    let current = core.layers.current();
    for superpage in known_superpages(core.space, start, end) {
        superpage.hot.iter().for_each(|hot| hot.store(0, Relaxed));
        let has_memory =
            current < MAX_LAYERS && superpage.allocated.load(SeqCst) & (1 << current) != 0;
        if has_memory && superpage.is_empty() {
            // Freeing its memory on the blade takes a request.
            return false;
        }
    }
    core.count(Counter::GiveUps, 1);
    core.note_given_up(range.clone());
    true
}
