//! Forgets pages that the program has given up, and frees their memory on the blades.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use crate::core::forget::try_forget;
use crate::life::steward::state::Steward;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::space::registry::Registry;
use crate::space::units::NO_TRAY;
use crate::space::{Page, Superpage, known_pages, known_superpages};
use crate::sys;

/// How often at most memory that could not be freed is retried: each try is a request to a blade.
const EMPTY_STEP: Duration = Duration::from_millis(100);

impl Steward {
    /// MADV_FREE: what can be far is discarded at once. Pages that the kernel may drop at any time
    /// must not get into the victim buffer, where it would drop them, too. Continues after an
    /// error, as the kernel does.
    pub(super) fn free(&self, registry: &Registry, start: usize, end: usize) -> Result<(), i32> {
        let (mut from, mut result) = (start, Ok(()));
        for part in registry.overlapping(start, end) {
            if from < part.start {
                result = result.and(advise(from, part.start, libc::MADV_FREE));
            }
            self.forget(part.start, part.end);
            result = result.and(advise(part.start, part.end, libc::MADV_DONTNEED));
            from = part.end;
        }
        if from < end {
            result = result.and(advise(from, end, libc::MADV_FREE));
        }
        result
    }

    /// Forgets the pager's state of a range: its pages read as zeros from now on, unless they are
    /// resident. The registry must be locked, so that nothing is moved out meanwhile.
    pub(super) fn forget(&self, start: usize, end: usize) {
        self.forget_as(start, end, PageState::UNTOUCHED);
    }

    /// As [`Steward::forget`], but pages that may be present get the state `there`.
    pub(super) fn forget_as(&self, start: usize, end: usize, there: PageState) {
        for page in known_pages(self.core.space, start, end) {
            self.forget_page(page, there);
        }
        for superpage in known_superpages(self.core.space, start, end) {
            superpage.hot.iter().for_each(|hot| hot.store(0, Relaxed));
            self.free_if_empty(superpage);
        }
    }

    pub(super) fn forget_page(&self, page: Page, there: PageState) {
        while !try_forget(self.core, page, there) {
            if matches!(page.cell().load().phase(), Phase::Fetching | Phase::Evicting) {
                // Its owner releases it soon.
                sys::pause();
            }
        }
    }

    /// Frees a superpage's memory on the blade when none of its pages is there any more; later, if
    /// that is not possible now. The registry must be locked.
    pub(super) fn free_if_empty(&self, superpage: &'static Superpage) {
        // The evictor may be about to get memory for it.
        let Ok(_changing) = self.core.layers.changing.lock() else { return };
        let current = self.core.layers.current();
        // Frozen layers are immutable; they go as a whole.
        let is_there =
            current < MAX_LAYERS && superpage.allocated.load(SeqCst) & (1 << current) != 0;
        if !is_there || !superpage.is_empty() {
            return;
        }
        let Some(segment) = self.core.layers.segment(current) else {
            return;
        };
        let in_buffer = superpage.trays.iter().any(|tray| tray.load(SeqCst) != NO_TRAY);
        superpage.allocated.fetch_and(!(1 << current), SeqCst);
        // The blade refuses while any page of the segment is being written. A lost blade has
        // nothing any more.
        let is_kept = || {
            self.core.pool.free_superpage(segment, superpage.id()).is_err()
                && self.core.pool.blade_of(segment, superpage.id()).is_some()
        };
        if in_buffer || is_kept() {
            superpage.allocated.fetch_or(1 << current, SeqCst);
            self.empty.borrow_mut().insert(superpage.id());
        }
    }

    /// Retries to free the memory of superpages that were empty.
    pub(super) fn free_empty(&self) {
        let is_due = self.emptied.get().elapsed() >= EMPTY_STEP;
        if self.empty.borrow().is_empty() || !is_due || self.core.gate.is_shut() {
            return;
        }
        self.emptied.set(Instant::now());
        let Ok(_registry) = self.pager.registry.lock() else { return };
        for id in self.empty.take() {
            if let Some(superpage) = self.core.space.by_id(id as usize) {
                self.free_if_empty(superpage);
            }
        }
    }
}

/// madvise on the program's behalf. The error is an errno.
pub(super) fn advise(start: usize, end: usize, advice: i32) -> Result<(), i32> {
    sys::advise(start, end - start, advice)
        .map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
}
