//! How much local memory a process keeps free, and when its evictor works.
//!
//! Between two checks of the kernel's count of resident pages, threads spend from an allowance; at
//! a low mark the evictor refills it and keeps as many victims in the buffer for a second chance.
//! Counts are signed because they are differences of counts taken at different times.

use std::ops::RangeInclusive;

/// The allowance at which the evictor starts: 1/64 of the limit in pages, within these bounds. It
/// refills the allowance to [`FULL_MARKS`] times as much, and keeps one more mark in the victim
/// buffer.
const LOW_MARK_PAGES: RangeInclusive<i64> = 128..=4096;
const LOW_MARK_PART: i64 = 64;
/// Low marks to which the allowance is refilled.
pub const FULL_MARKS: i64 = 3;
/// The least mark: the processes of a tree share it, and below this evicting in batches would not
/// pay.
const LEAST_MARK_PAGES: i64 = 32;

/// Pages that a process may keep whatever the limit says, unless it is another's turn: with fewer,
/// the pages fetched for an instruction are evicted again before it has run, and no process makes
/// progress. A process exceeds its part of the limit by at most this much.
pub const LEAST_WORKING_PAGES: i64 = 256;

/// Runs shorter than this are copied into new pages, which costs a copy; moving a frame in costs a
/// TLB flush, and an interrupt of each other CPU that runs the program.
pub const LEAST_MOVED_PAGES: usize = 8;

/// Consecutive first touches zero up to this many pages ahead.
pub const MAX_ZERO_RUN: usize = 64;

/// How close to its limit a tree is when its memory is registered: 1/32 of it, within these bounds.
const MARGIN_PART: i64 = 32;
const MARGIN_PAGES: RangeInclusive<i64> = 1024..=16_384;

/// What the evictor has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Pages to move out.
    pub evict_pages: i64,
    /// Free frames to return to the kernel.
    pub release_pages: i64,
}

/// A process's part in its tree's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The limit less all pages that count against it; negative if it is exceeded.
    pub headroom_pages: i64,
    /// Processes with far memory that share it.
    pub active_processes: i64,
    /// Pages of all of them that could be evicted.
    pub evictable_pages: i64,
    /// Such pages of this process.
    pub mine_pages: i64,
    /// Free frames in its victim buffer.
    pub free_frames: i64,
}

/// Returns how close to its limit a tree may come before its memory is registered, so that nothing
/// grows unnoticed any more.
#[must_use]
pub fn margin_pages(limit_pages: i64) -> i64 {
    (limit_pages / MARGIN_PART).clamp(*MARGIN_PAGES.start(), *MARGIN_PAGES.end())
}

/// Returns the allowance at which a process's evictor starts. With many processes each keeps less.
#[must_use]
pub fn low_mark_pages(limit_pages: i64, active_processes: i64) -> i64 {
    let mark = (limit_pages / LOW_MARK_PART).clamp(*LOW_MARK_PAGES.start(), *LOW_MARK_PAGES.end());
    (mark / active_processes.max(1)).max(LEAST_MARK_PAGES)
}

/// True if the allowance is low, or, near the limit, the victim buffer.
#[must_use]
pub fn wants_eviction(allowance_pages: i64, low_pages: i64, free_frames: i64) -> bool {
    allowance_pages < low_pages
        || (allowance_pages <= FULL_MARKS * low_pages && free_frames < low_pages / 2)
}

/// Splits the free or the missing pages among the active processes. Returns this one's allowance
/// and its evictor's work.
#[must_use]
pub fn decide(low_pages: i64, standing: &Standing) -> (i64, Work) {
    let Standing { headroom_pages, active_processes, evictable_pages, mine_pages, free_frames } =
        *standing;
    let allowance = (headroom_pages / active_processes.max(1)).max(0);
    let missing = (-headroom_pages).max(0);
    let evictable = evictable_pages.max(mine_pages).max(1);
    // Rounded up, so that all shares together cover the missing pages.
    let my_part = (missing * mine_pages + evictable - 1) / evictable;
    let refill = if allowance < low_pages { FULL_MARKS * low_pages - allowance } else { 0 };
    let surplus = (free_frames - FULL_MARKS * low_pages).max(0);
    let release_pages = (my_part + refill).max(surplus);
    // Released frames leave the buffer; one mark of victims stays there for a second chance.
    let kept = if wants_eviction(allowance, low_pages, free_frames) { low_pages } else { 0 };
    let evict_pages = (my_part + refill + kept - free_frames).clamp(0, spare_pages(mine_pages));
    (allowance, Work { evict_pages, release_pages: release_pages.min(free_frames + evict_pages) })
}

/// Returns the evictable pages that a process need not keep, out of `mine_pages`.
#[must_use]
pub fn spare_pages(mine_pages: i64) -> i64 {
    (mine_pages - LEAST_WORKING_PAGES).max(0)
}

/// Returns the pages to zero at a first touch: one, or twice the length of the run that ended right
/// before the page.
#[must_use]
pub fn zero_run_pages(run_before: Option<usize>) -> usize {
    run_before.map_or(1, |pages| (pages * 2).clamp(1, MAX_ZERO_RUN))
}
