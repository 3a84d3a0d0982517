//! The steward lets pieces of memory rest that the program gives up and uses again all the time,
//! see [`crate::life::rest`].
//!
//! A piece begins to rest in this order:
//! 1. every change of the address space is applied, so the states of the piece are of its current
//!    memory;
//! 2. the registry is locked, so that nothing is moved out; no page of the piece is away;
//! 3. the piece is unregistered. The kernel wakes the threads that wait for its pages; a fault that
//!    was read and is served later fills nothing, and wakes its thread;
//! 4. if no change was made meanwhile, the registry and the page states forget it. Otherwise it is
//!    registered again as it was.
//!
//! While it rests the pager knows nothing of it. When its rest is over it is found in the list of
//! mappings, like new memory.
//!
//! A thread that drops pages (madvise) continues when its event is read, and drops them some time
//! later. So the states of pages in phase Dropped outlast a rest: such a page must not be moved out
//! while it may still be dropped. That ends when the page has been missing once: its later content
//! was written since, and a drop that hits it is an earlier one. On registered memory a fault shows
//! that; here the page map is checked.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use crate::life::activation::register;
use crate::life::rest::PIECE_BYTES;
use crate::life::steward::state::Steward;
use crate::shared::budget::{Tree, limit_pages};
use crate::space::page::{PageState, Phase};
use crate::space::registry::Region;
use crate::space::units::CHUNK_PAGES;
use crate::space::{Page, known_pages, moves};
use crate::sys;

/// How often the missing pages of resting memory, which may grow unseen, are counted. A piece takes
/// 1 us.
const UNSEEN_STEP: Duration = Duration::from_millis(20);
/// Rests end when memory has been short for this long, with nothing to move out.
const SHORT_TIME: Duration = Duration::from_millis(100);
/// The first kernel that continues a madvise whose mapping was split while the event waited to be
/// read. An older one leaves out what lies after the split.
const SPLITS_SAFELY: (u32, u32) = (6, 17);

impl Steward {
    /// Allows no rests where they would be unsafe. Mappings shorter than `threshold_bytes` are not
    /// registered.
    pub(super) fn prepare_rests(&mut self, threshold_bytes: usize) {
        self.resting.threshold_bytes = threshold_bytes;
        if sys::kernel_version().is_none_or(|version| version < SPLITS_SAFELY) {
            self.rests.end_all();
        }
    }

    /// Begins and ends rests. True: a rest is over, and the list of mappings has to be read.
    pub(super) fn look_after_rests(&mut self) -> bool {
        let now = Instant::now();
        // Changes made while they were not registered have been reported by now, and applied.
        if !self.resting.disturbed.is_empty() && self.core.layout.is_still(&self.core.uffd) {
            self.resting.disturbed.clear();
        }
        let mut given_up = std::mem::take(&mut self.resting.given_up);
        self.core.take_given_up(&mut given_up);
        given_up.drain(..).for_each(|range| self.rests.note(range.start, range.end, now));
        self.resting.given_up = given_up;
        if !self.core.leaving.load(SeqCst) {
            self.begin_rests(now);
        }
        let is_short = self.core.barren.load(Relaxed);
        let since = if is_short { self.resting.short_since.or(Some(now)) } else { None };
        self.resting.short_since = since;
        let is_short = since.is_some_and(|since| now.duration_since(since) > SHORT_TIME);
        let due = self.rests.take_due(now, is_short);
        due.iter().for_each(|range| {
            self.settle_dropped(range);
        });
        if !due.is_empty() || now.duration_since(self.resting.looked) > UNSEEN_STEP {
            self.resting.looked = now;
            let resting = self.rests.ranges();
            let missing: usize = resting.iter().map(|range| self.settle_dropped(range)).sum();
            self.core.budget.set_unseen(missing as u64);
        }
        !due.is_empty()
    }

    fn begin_rests(&mut self, now: Instant) {
        if !self.rests.has_hot() {
            return;
        }
        let tree = Tree::read(self.core.board);
        let pages = limit_pages(self.core.board, &tree) / tree.active_processes.max(1);
        // If the limit is negative nothing rests.
        let Ok(limit_pages) = usize::try_from(pages) else { return };
        let limit_bytes = limit_pages * PAGE_BYTES;
        for piece in self.rests.hot() {
            if self.core.layout.is_behind() {
                return;
            }
            if self.rests.may_begin(limit_bytes) && self.begin_rest(&piece) {
                self.rests.begin(piece.start, now);
            } else {
                self.rests.put_off(piece.start, now);
            }
        }
    }

    /// Begins a rest, see the module's description. False: not now.
    fn begin_rest(&mut self, piece: &Range<usize>) -> bool {
        let core = self.core;
        if !core.layout.is_at_rest(&core.uffd) {
            return false;
        }
        self.resting.disturbed.clear();
        let mut registry = self.pager.lock_registry();
        let parts = registry.overlapping(piece.start, piece.end);
        // A shorter part would not be found again.
        let is_whole = |part: &Region| {
            part.bytes() >= self.resting.threshold_bytes && !part.pinned && !part.unshared
        };
        if parts.len() != 1 || !parts.iter().all(is_whole) || !self.may_rest(piece) {
            return false;
        }
        let are_free =
            parts.iter().all(|part| core.uffd.unregister(part.start, part.bytes()).is_ok());
        if !are_free || !core.layout.is_still(&core.uffd) {
            self.resting.disturbed.push(piece.clone());
            for part in parts {
                register(core, &mut registry, part);
            }
            return false;
        }
        registry.remove(piece.start, piece.end);
        self.forget_resting(piece);
        core.count(Counter::Rests, 1);
        true
    }

    /// Whether all of a piece is in the program, or reads as zeros. Memory that was given up and
    /// not used again is not worth a rest, and would count as present. The kernel may yet drop a
    /// present page in phase Dropped: soon (MADV_DONTNEED), or when memory is short (MADV_FREE). If
    /// such pages were forgotten, it could do that in the victim buffer.
    fn may_rest(&self, piece: &Range<usize>) -> bool {
        let there = moves::occupied(&self.core.pagemap, piece.start, CHUNK_PAGES);
        let may_rest = |page: Page| match page.cell().load().phase() {
            Phase::Untouched | Phase::Resident => true,
            Phase::Dropped => there & page.bit() == 0,
            Phase::Evicting | Phase::Victim | Phase::Far | Phase::Fetching | Phase::Lost => false,
        };
        there.count_ones() as usize >= CHUNK_PAGES / 2
            && known_pages(self.core.space, piece.start, piece.end).all(may_rest)
    }

    /// Whether far memory has been moved to a place that was unregistered at that time: a thread
    /// that touched it read zeros.
    pub(super) fn was_disturbed(&self, start: usize, end: usize) -> bool {
        self.resting.disturbed.iter().any(|range| range.start < end && start < range.end)
    }

    /// Forgets the pages of a piece; see the module's description for those that are dropped.
    fn forget_resting(&self, piece: &Range<usize>) {
        let there = moves::occupied(&self.core.pagemap, piece.start, CHUNK_PAGES);
        for page in known_pages(self.core.space, piece.start, piece.end) {
            let is_dropped = page.cell().load().phase() == Phase::Dropped;
            if !(is_dropped && there & page.bit() != 0) {
                self.forget_page(page, PageState::UNTOUCHED);
            }
        }
    }

    /// Settles missing pages of a resting range: if they were to be dropped, they have been.
    /// Returns how many are missing.
    fn settle_dropped(&self, range: &Range<usize>) -> usize {
        let mut missing = 0;
        let registry = self.pager.lock_registry();
        for start in range.clone().step_by(PIECE_BYTES) {
            // Registered memory has been moved there: its pages can be dropped anew at any time.
            if !registry.overlapping(start, start + PIECE_BYTES).is_empty() {
                continue;
            }
            let there = moves::occupied(&self.core.pagemap, start, CHUNK_PAGES);
            missing += there.count_zeros() as usize;
            for page in known_pages(self.core.space, start, start + PIECE_BYTES) {
                let state = page.cell().load();
                if state.phase() == Phase::Dropped && there & page.bit() == 0 {
                    page.cell().change(state, PageState::UNTOUCHED);
                }
            }
        }
        missing
    }
}
