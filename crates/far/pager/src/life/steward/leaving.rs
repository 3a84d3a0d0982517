//! The pager leaves the program: everything that is far or in the victim buffer is brought in, and
//! nothing is registered any more. Faults are served all the while.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

use crate::core::{Core, Mover, until_settled};
use crate::life::fetcher::FETCHED_AT_ONCE;
use crate::life::steward::state::Steward;
use crate::space::Page;
use crate::space::page::Phase;
use crate::space::registry::Registry;

/// Pages that cannot be brought in for this long (their mapping is gone without an event) are given
/// up.
const VAIN_TIME: Duration = Duration::from_secs(10);

/// The outcome of leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The program is as it would be without a pager.
    Clean,
    /// This many pages could not be brought in; the pager has to stay.
    Stuck { pages: usize },
}

/// Ends the paging of a program that has no pages moved out.
pub fn unregister_all(core: &Core, registry: &Registry) {
    for region in registry.iter() {
        // It fails where the mapping is gone.
        let _ = core.uffd.unregister(region.start, region.bytes());
    }
    // A thread that unmaps the buffer must not wait for its event to be read.
    let (start, bytes) = core.frames.range();
    let _ = core.uffd.unregister(start, bytes);
}

impl Steward {
    /// Brings in all pages. None: a change must be applied first, or some pages were not available
    /// at once.
    pub(super) fn leave(&mut self) -> Option<Left> {
        let since = *self.leaving_since.get_or_insert_with(Instant::now);
        self.core.leaving.store(true, SeqCst);
        self.core.budget.kick();
        let mut left = 0;
        for id in 0..self.core.space.count() {
            if self.core.layout.is_behind() {
                return None;
            }
            left += self.bring_in_superpage(id);
        }
        if left > 0 {
            return (since.elapsed() > VAIN_TIME).then_some(Left::Stuck { pages: left });
        }
        let registry = self.pager.lock_registry();
        // The evictor may have moved something out behind us in its current round; from here on it
        // moves nothing.
        if self.core.layout.is_behind() || self.is_anything_away() {
            return None;
        }
        unregister_all(self.core, &registry);
        Some(Left::Clean)
    }

    /// Whether the program would read zeros if the pager left now.
    fn is_anything_away(&self) -> bool {
        let superpages = (0..self.core.space.count()).filter_map(|id| self.core.space.by_id(id));
        let is_there = |phase| {
            matches!(phase, Phase::Untouched | Phase::Resident | Phase::Dropped | Phase::Lost)
        };
        let mut pages = superpages.flat_map(|superpage| superpage.pages.iter());
        pages.any(|cell| !is_there(cell.load().phase()))
    }

    /// Makes sure that a touch of a lost page stays a SIGBUS: the thread that lost the page may not
    /// have poisoned it yet. False: not yet.
    fn is_poisoned(&self, page: Page) -> bool {
        let poisoned = until_settled(self.core, Mover::Evictor, |_| {
            self.core.uffd.poison(page.address(), PAGE_BYTES)
        });
        matches!(poisoned.errno, None | Some(libc::EEXIST))
    }

    /// Brings in the pages of a superpage. Returns how many are not in the program yet.
    fn bring_in_superpage(&mut self, id: usize) -> usize {
        let Some(superpage) = self.core.space.by_id(id) else { return 0 };
        let mut left = 0;
        let mut batch = Vec::with_capacity(FETCHED_AT_ONCE);
        for index in 0..superpage.pages.len() {
            let page = Page { superpage, index };
            match page.cell().load().phase() {
                Phase::Untouched | Phase::Resident | Phase::Dropped => {}
                Phase::Lost => left += usize::from(!self.is_poisoned(page)),
                Phase::Far if page.cell().claim(Phase::Far, Phase::Fetching).is_some() => {
                    batch.push(page);
                }
                Phase::Victim => left += usize::from(!self.bring_in_victim(page)),
                // Its owner releases it soon.
                Phase::Far | Phase::Evicting | Phase::Fetching => left += 1,
            }
            if batch.len() == FETCHED_AT_ONCE {
                left += self.bring_in_batch(&batch);
                batch.clear();
            }
        }
        left + self.bring_in_batch(&batch)
    }

    /// Fetches pages that the caller has claimed, and copies them in. Returns how many stay far.
    fn bring_in_batch(&mut self, batch: &[Page]) -> usize {
        let core = self.core;
        let place = |page: &Page| core.place(*page, page.cell().load().layer());
        let fetched = self.fetcher.fetch(batch.iter().map(place));
        let mut left = 0;
        for (number, page) in batch.iter().enumerate() {
            let source = self.fetcher.address(number);
            let state = page.cell().load();
            let is_in = fetched & (1 << number) != 0 && self.copy_into_program(*page, source);
            if is_in {
                page.cell().store(state.with_phase(Phase::Resident));
                page.superpage.leave_blade();
            } else {
                page.cell().store(state.with_phase(Phase::Far));
                left += 1;
            }
            let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
        }
        left
    }

    fn bring_in_victim(&mut self, page: Page) -> bool {
        let Some(state) = page.cell().claim(Phase::Victim, Phase::Fetching) else { return false };
        let Some((slot, _)) = self.core.frames.locate(page) else {
            // Between the claim and here no other thread can have taken it.
            crate::abort::fail_closed("a victim is not in the buffer");
        };
        let is_in = self.copy_into_program(page, self.core.frames.address(slot));
        if is_in {
            self.core.frames.invalidate(slot);
            page.cell().store(state.with_phase(Phase::Resident));
        } else {
            self.core.frames.keep(slot);
            page.cell().store(state);
        }
        let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
        is_in
    }

    fn copy_into_program(&self, page: Page, source: usize) -> bool {
        // As the evictor: any change that was read comes first.
        let copied = until_settled(self.core, Mover::Evictor, |_| {
            self.core.uffd.copy(page.address(), source, PAGE_BYTES, false)
        });
        matches!(copied.errno, None | Some(libc::EEXIST))
    }
}
