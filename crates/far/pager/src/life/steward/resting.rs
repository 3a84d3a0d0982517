//! The steward lets pieces of memory rest that the program gives up and takes again all the time,
//! see [`crate::life::rest`].
//!
//! A piece begins to rest in this order:
//! 1. nothing has been done to the address space that is not applied, so what is known of the piece
//!    is of what is there;
//! 2. the registry is locked, so that nothing is moved out; nothing of the piece is away;
//! 3. it is unregistered. The kernel wakes who waits for a page of it; a fault that was read and is
//!    served later fills nothing, and wakes its thread;
//! 4. if nothing was done meanwhile, the registry and the page states forget it. Else it is
//!    registered again as it was.
//!
//! While it rests the pager knows nothing of it. When its rest is over it is found in the list of
//! mappings, like memory that is new.
//!
//! A thread that drops pages (madvise) goes on when its event is read, and drops them some time
//! after. So the states of pages in phase Dropped outlast a rest: such a page must not be moved out
//! while it may still be dropped. That is over when the page has been missing once: what is there
//! later was written since, and a drop that hits it is one that came before. On registered memory a
//! fault shows that; here the page map is looked at.

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

/// Resting memory may grow unseen; how often its missing pages are counted. A piece takes 1 us.
const UNSEEN_STEP: Duration = Duration::from_millis(20);
/// When memory has been short for this long, and nothing could be moved out, rests end.
const SHORT_TIME: Duration = Duration::from_millis(100);
/// The first kernel that goes on with a madvise whose mapping was split while the event waited to
/// be read. An older one leaves out what lies behind the split.
const SPLITS_SAFELY: (u32, u32) = (6, 17);

impl Steward {
    /// No rests where they would be unsafe. Mappings shorter than `threshold_bytes` are not
    /// registered.
    pub(super) fn prepare_rests(&mut self, threshold_bytes: usize) {
        self.resting.threshold_bytes = threshold_bytes;
        if sys::kernel_version().is_none_or(|version| version < SPLITS_SAFELY) {
            self.rests.end_all();
        }
    }

    /// Begins and ends rests. True: a rest is over, and the list of mappings is to be looked at.
    pub(super) fn look_after_rests(&mut self) -> bool {
        let now = Instant::now();
        // What happened while they were not registered has been told of by now, and applied.
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
        // Without a limit that is one nothing rests.
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

    /// See the module's description. False: not now.
    fn begin_rest(&mut self, piece: &Range<usize>) -> bool {
        let core = self.core;
        if !core.layout.is_at_rest(&core.uffd) {
            return false;
        }
        self.resting.disturbed.clear();
        let mut registry = self.pager.lock_registry();
        let parts = registry.overlapping(piece.start, piece.end);
        // A shorter one would not be found again.
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

    /// Whether all of a piece is in the program, or reads as zeros. What was given up and not taken
    /// again is not worth a rest, and would count as if it were there. The kernel may yet drop a
    /// page that is there and in phase Dropped: soon (MADV_DONTNEED), or when memory is short
    /// (MADV_FREE). It could do that in the victim buffer, were such pages forgotten.
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

    /// True if far memory has come to a place that was unregistered when it came: a thread that
    /// touched it read zeros.
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

    /// Pages of a range that rests that are missing were dropped, if they were to be. Returns how
    /// many are missing.
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
