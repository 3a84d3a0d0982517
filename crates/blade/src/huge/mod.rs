//! Huge pages for segments of kind `memfd`, made in the background.
//!
//! The kernel builds a memfd of 4 KiB pages (sysfs says `never` by default), and a same-host client
//! pays for each of them. Extents of 2 MiB that are mostly filled are therefore collapsed one after
//! the other; [`plan`] says which. Clients go on reading and writing meanwhile: the kernel makes them
//! wait for the pages that it is copying, and for no others.
//!
//! Nothing here ever fails for anybody: memory that stays as it was is only slower.

mod plan;
#[cfg(test)]
mod tests;
mod window;

use crate::memory::SegmentMemory;
use farpool_wire::SUPERPAGE_BYTES;
use plan::{EXTENT_BYTES, Outcome, Plan};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use window::Window;

pub(crate) use plan::Hole;

/// Between two looks while there is something to do.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// Between two looks when there was nothing: one `fstat` for each segment.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// After the kernel had no huge page to give: to ask at once would make it search memory again.
const SHORT_PAUSE: Duration = Duration::from_secs(10);
/// What one look takes at most: a tenth of a processor.
const LOOK_TIME: Duration = Duration::from_millis(20);
/// Extents collapsed in one look at most: 64 MiB, 0.6 ms each where memory is at hand.
const COLLAPSES_PER_LOOK: u32 = 32;
/// Extents whose pages are counted in one look at most, 50 us each.
const COUNTS_PER_LOOK: u32 = 64;
/// Refusals before the first success after which the kernel is taken to know no collapse.
const REFUSALS_LIMIT: u32 = 8;

/// What a segment's memory and the one who collapses it tell each other.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    punched: Mutex<BTreeMap<u32, Hole>>,
    /// Held while one extent is collapsed and while a freed superpage is given back: a collapse that
    /// had begun before would bring its memory back, and nobody would free it again.
    reshaping: Mutex<()>,
}

impl Holes {
    /// Notes a hole in bytes `offset` to `offset + bytes - 1`.
    pub(crate) fn note(&self, offset: u64, bytes: u64, hole: Hole) {
        let mut punched = self.punched.lock().unwrap_or_else(PoisonError::into_inner);
        let end = (offset + bytes).div_ceil(EXTENT_BYTES);
        for extent in offset / EXTENT_BYTES..end {
            // An extent's number fits: 2^32 of them are 8 PiB.
            let Ok(extent) = u32::try_from(extent) else { continue };
            punched.insert(extent, hole);
        }
    }

    /// Waits for the extent that is being collapsed, if one is.
    pub(crate) fn reshape(&self) -> MutexGuard<'_, ()> {
        self.reshaping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> BTreeMap<u32, Hole> {
        std::mem::take(&mut *self.punched.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Turns filled extents of segments into huge pages, a few at each look.
#[derive(Debug)]
pub struct HugePages {
    window: Option<Window>,
    segments: VecDeque<Watched>,
    next_look: Instant,
    collapsed: u64,
    failed: u64,
    refused: u32,
    is_given_up: bool,
}

/// A segment, and how far the look at it has come.
#[derive(Debug)]
struct Watched {
    memory: Weak<SegmentMemory>,
    plan: Plan,
    /// Blocks of the file when the last full look at it began; as long as they stay, so does all.
    blocks: u64,
    /// The look that is under way.
    under_way: Option<UnderWay>,
}

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    blocks: u64,
    next_extent: u32,
    /// Something in it is to be tried again.
    is_unsettled: bool,
}

/// What one look may still do.
struct Budget<'a> {
    until: Instant,
    collapses: u32,
    counts: u32,
    is_wanted: &'a dyn Fn() -> bool,
}

impl Budget<'_> {
    fn is_spent(&self) -> bool {
        self.collapses == 0
            || self.counts == 0
            || (self.is_wanted)()
            || Instant::now() >= self.until
    }
}

impl Default for HugePages {
    fn default() -> Self {
        HugePages {
            window: None,
            segments: VecDeque::new(),
            next_look: Instant::now(),
            collapsed: 0,
            failed: 0,
            refused: 0,
            is_given_up: false,
        }
    }
}

impl HugePages {
    /// Watches over a segment as long as it lives.
    pub fn watch(&mut self, memory: Weak<SegmentMemory>) {
        if !self.is_given_up {
            let watched = Watched { memory, plan: Plan::default(), blocks: 0, under_way: None };
            self.segments.push_back(watched);
        }
    }

    /// Extents made huge so far, and attempts in vain.
    pub fn counts(&self) -> (u64, u64) {
        (self.collapsed, self.failed)
    }

    /// Looks at some of the segments if it is time to. Ends soon after `is_wanted` says that the
    /// thread is needed elsewhere.
    pub fn look_in_time(&mut self, is_wanted: &dyn Fn() -> bool) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        let pause = if self.look(is_wanted) { BUSY_PAUSE } else { IDLE_PAUSE };
        // Counted from the beginning, and set later where the kernel was out of huge pages.
        self.next_look = self.next_look.max(now + pause);
    }

    /// Looks at some of the segments. Returns whether there is more to do.
    pub fn look(&mut self, is_wanted: &dyn Fn() -> bool) -> bool {
        let mut budget = Budget {
            until: Instant::now() + LOOK_TIME,
            collapses: COLLAPSES_PER_LOOK,
            counts: COUNTS_PER_LOOK,
            is_wanted,
        };
        let mut has_more = false;
        for _ in 0..self.segments.len() {
            if self.is_given_up || budget.is_spent() {
                return !self.is_given_up;
            }
            let Some(mut watched) = self.segments.pop_front() else { break };
            let Some(memory) = watched.memory.upgrade() else { continue };
            has_more |= !self.look_at(&mut watched, &memory, &mut budget);
            self.segments.push_back(watched);
        }
        has_more
    }

    /// Returns whether all of the segment was looked at and nothing is to be tried again.
    fn look_at(
        &mut self,
        watched: &mut Watched,
        memory: &SegmentMemory,
        budget: &mut Budget<'_>,
    ) -> bool {
        let Some((file, holes)) = memory.collapsible() else {
            return true;
        };
        let punched = holes.take();
        let Ok(stat) = rustix::fs::fstat(file) else {
            return true;
        };
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        if punched.is_empty() && watched.under_way.is_none() && blocks == watched.blocks {
            return true;
        }
        for (extent, hole) in punched {
            watched.plan.punched(extent, hole);
        }
        let begin = UnderWay { blocks, next_extent: 0, is_unsettled: false };
        let mut under_way = watched.under_way.take().unwrap_or(begin);
        while let Some(extent) = next_extent(file, &watched.plan, under_way.next_extent) {
            if self.is_given_up || budget.is_spent() {
                watched.under_way = Some(under_way);
                return false;
            }
            under_way.next_extent = extent + 1;
            under_way.is_unsettled |=
                self.try_extent(&mut watched.plan, file, holes, extent, budget);
        }
        // Blocks that no file has: the next look begins anew.
        watched.blocks = if under_way.is_unsettled { u64::MAX } else { under_way.blocks };
        !under_way.is_unsettled
    }

    /// Returns whether the extent is to be tried again though nothing changes.
    fn try_extent(
        &mut self,
        plan: &mut Plan,
        file: BorrowedFd<'_>,
        holes: &Holes,
        extent: u32,
        budget: &mut Budget<'_>,
    ) -> bool {
        budget.counts -= 1;
        // From here on memory that is freed waits: the pages counted must be those collapsed.
        let _reshaping = holes.reshape();
        let Some((pages, result)) = self.collapse(plan, file, extent) else {
            return false;
        };
        budget.collapses -= 1;
        let outcome = match result {
            Ok(()) => Outcome::Huge,
            Err(error) => self.outcome_of(&error, budget),
        };
        match outcome {
            Outcome::Huge => self.collapsed += 1,
            _ => self.failed += 1,
        }
        plan.tried(extent, pages, outcome)
    }

    /// Collapses an extent if that is worth it: the pages it had, and how it went.
    fn collapse(
        &mut self,
        plan: &Plan,
        file: BorrowedFd<'_>,
        extent: u32,
    ) -> Option<(u16, io::Result<()>)> {
        if self.window.is_none() {
            self.window = Window::new().ok();
        }
        let view = self.window.as_mut()?.show(file, u64::from(extent) * EXTENT_BYTES).ok()?;
        let pages = view.pages().ok()?;
        plan.is_worth(extent, pages).then(|| (pages, view.collapse()))
    }

    fn outcome_of(&mut self, error: &io::Error, budget: &mut Budget<'_>) -> Outcome {
        if self.failed == 0 {
            tracing::debug!(%error, "an extent stays of small pages; further ones are not told of");
        }
        match Errno::from_io_error(error) {
            Some(Errno::NOMEM) => {
                budget.until = Instant::now();
                self.next_look = budget.until + SHORT_PAUSE;
                Outcome::Busy
            }
            Some(Errno::AGAIN | Errno::BUSY) => Outcome::Busy,
            _ => {
                self.refused = self.refused.saturating_add(1);
                if self.collapsed == 0 && self.refused >= REFUSALS_LIMIT {
                    self.is_given_up = true;
                    self.segments.clear();
                }
                Outcome::Refused
            }
        }
    }
}

/// The next extent from `from` on that has bytes and is not known to be huge.
fn next_extent(file: BorrowedFd<'_>, plan: &Plan, mut from: u32) -> Option<u32> {
    loop {
        while plan.is_huge(from) {
            from += 1;
        }
        let offset = u64::from(from) * EXTENT_BYTES;
        // An error says that there is nothing up to the end.
        let data = rustix::fs::seek(file, SeekFrom::Data(offset)).ok()?;
        let extent = u32::try_from(data / EXTENT_BYTES).ok()?;
        if !plan.is_huge(extent) {
            return Some(extent);
        }
        from = extent;
    }
}

const _: () =
    assert!(SUPERPAGE_BYTES.is_multiple_of(EXTENT_BYTES), "no extent is in two superpages");

/// Segments made since they were last asked for.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(Mutex<Vec<Weak<SegmentMemory>>>);

impl Arrivals {
    pub(crate) fn add(&self, memory: &Arc<SegmentMemory>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(memory));
    }

    pub(crate) fn take(&self) -> Vec<Weak<SegmentMemory>> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
