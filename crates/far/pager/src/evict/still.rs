//! Memory that can be moved out only while the program stands still ([`crate::sys::standstill`]).
//!
//! The victim policy chooses it like any other. It is put aside until there is enough to stop the
//! program for, or until there is nothing else to move out.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use super::own::{Tried, Wanted};
use super::{Evictor, MAX_TRAYS_IN_FLIGHT};
use crate::abort::fail_closed;
use crate::space::Superpage;
use crate::space::maps::{self, Eligible};
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, chunk_bits, runs};
use crate::space::way::Way;
use crate::sys::standstill::{MAX_STANDING, PAUSE_PARTS};
use crate::sys::{self, Protection};

/// So many chunks at the most are put aside (16 MiB): the program stands still for some 5 ms then.
const MOST_CHUNKS: usize = 64;
/// Less than so much (1 MiB) is not worth a standstill.
const LEAST_PAGES: u64 = 256;
/// What is put aside waits so long at the most, if it is worth a standstill.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the keeper may take to stop the program.
const ASKING_TIME: Duration = Duration::from_millis(300);
/// So much is moved out at a standstill at the least (4 MiB), if it is there, though less is
/// wanted: to stop the program costs more than to move it.
const WORTH_PAGES: i64 = 1024;
/// No chunk is begun when the program has stood still for so long.
const WORKING_TIME: Duration = Duration::from_millis(10);
/// Instead of [`PAUSE_PARTS`] as long as more than this has to go (16 MiB): it loses a fifth.
const SHORT_PAUSE_PARTS: u32 = 4;
const MUCH_PAGES: i64 = 4096;
/// The pause after a standstill that did not come, or in which nothing could be moved; twice as
/// long after each further one, up to 32 s.
const VAIN_PAUSE: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 6;

/// What is put aside.
#[derive(Debug)]
pub(super) struct Aside {
    chunks: Vec<usize>,
    pages: u64,
    since: Instant,
    /// Nothing is done before.
    not_before: Instant,
    /// Standstills since the last one in which something was moved.
    in_vain: u32,
    /// What was moved out at the standstill and is still to be written.
    moved: Vec<Moved>,
    /// The mappings at the standstill that may not be written to, by address.
    mappings: Vec<Eligible>,
    began: Instant,
}

/// Pages of a chunk that are in a tray.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) superpage: &'static Superpage,
    pub(super) tray: u16,
    pub(super) layer: usize,
}

/// A piece of memory that has other rights for a moment.
#[derive(Clone, Copy, Debug)]
struct Loan {
    start: usize,
    bytes: usize,
    own: Protection,
}

/// Rights of parts of a chunk that are to be given back.
#[derive(Debug)]
pub(super) struct Loans(Vec<Loan>);

impl Aside {
    pub(super) fn new() -> Aside {
        let now = Instant::now();
        Aside {
            chunks: Vec::with_capacity(MOST_CHUNKS),
            pages: 0,
            since: now,
            not_before: now,
            in_vain: 0,
            moved: Vec::with_capacity(MOST_CHUNKS),
            mappings: Vec::new(),
            began: now,
        }
    }

    /// Puts a chunk aside of which so many pages could be moved out.
    pub(super) fn put(&mut self, number: usize, pages: u64) {
        if self.chunks.is_empty() {
            self.since = Instant::now();
        }
        if self.chunks.len() < MOST_CHUNKS && !self.chunks.contains(&number) {
            self.chunks.push(number);
            self.pages += pages;
        }
    }

    /// Whether the program is to stand still now. `is_barren`: nothing else can be moved out.
    fn is_due(&self, is_barren: bool) -> bool {
        if self.pages < LEAST_PAGES {
            return false;
        }
        let now = Instant::now();
        let is_enough = is_barren
            || self.chunks.len() == MOST_CHUNKS
            || now.saturating_duration_since(self.since) >= PATIENCE;
        is_enough && now >= self.not_before
    }

    fn take(&mut self) -> Vec<usize> {
        self.pages = 0;
        std::mem::take(&mut self.chunks)
    }

    /// The program runs for a while now: in the standstill so many pages were moved, and so many
    /// have still to go.
    fn rest(&mut self, moved: i64, left: i64) {
        let now = Instant::now();
        let pause = if moved > 0 {
            self.in_vain = 0;
            let parts = if left > MUCH_PAGES { SHORT_PAUSE_PARTS } else { PAUSE_PARTS };
            now.saturating_duration_since(self.began) * parts
        } else {
            self.in_vain = (self.in_vain + 1).min(MOST_DOUBLINGS);
            VAIN_PAUSE * (1 << (self.in_vain - 1))
        };
        self.not_before = now + pause;
    }

    pub(super) fn keep(&mut self, moved: Moved) {
        self.moved.push(moved);
    }
}

impl Evictor {
    /// Moves out what was put aside, about `wanted` pages, if it is time; returns how many it was.
    pub(super) fn move_aside(&mut self, wanted: i64, is_barren: bool) -> i64 {
        if !self.aside.is_due(is_barren) {
            return 0;
        }
        // The program, and the steward perhaps, wait for no blade.
        self.drain();
        let mut chunks = self.aside.take();
        chunks.sort_unstable();
        sys::be_prompt(true);
        let moved = self.stand_still(&chunks, wanted.max(WORTH_PAGES));
        sys::be_prompt(false);
        sys::stand_back();
        self.aside.rest(moved, wanted - moved);
        for Moved { superpage, tray, layer } in std::mem::take(&mut self.aside.moved) {
            self.write(superpage, tray, layer);
            if self.trays_in_flight >= MAX_TRAYS_IN_FLIGHT {
                self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
            }
        }
        moved
    }

    fn stand_still(&mut self, chunks: &[usize], wanted: i64) -> i64 {
        let core = self.core;
        let Some(standing) = core.standstill.ask(ASKING_TIME) else { return 0 };
        self.aside.began = standing.since;
        // Without the list no rights are lent, and nothing moves.
        let list = sys::read_file("/proc/self/maps").unwrap_or_default();
        self.aside.mappings = maps::eligible(&list, &[], 0);
        // A program that may give no memory the right to be executed could not be given it back.
        let is_denied = sys::denies_execution();
        self.aside.mappings.retain(|Eligible { protection, .. }| {
            !(protection.can_write || is_denied && protection.can_execute)
        });
        let mut moved = 0;
        for number in chunks {
            if moved >= wanted || self.aside.began.elapsed() >= WORKING_TIME {
                break;
            }
            if let Some(Tried::Moved(pages)) = self.try_chunk(*number, Wanted::Still) {
                moved += pages;
            }
        }
        drop(standing);
        core.count(Counter::Standstills, 1);
        moved
    }

    /// Gives the parts of a chunk that `pages` are in, and that may not be written to, the rights
    /// of the victim buffer.
    pub(super) fn lend(&self, registry: &Registry, start: usize, pages: u64) -> Loans {
        let mut loans = Loans(Vec::new());
        let mappings = &self.aside.mappings;
        let first = mappings.partition_point(|mapping| mapping.end <= start);
        let end = start + CHUNK_BYTES;
        for mapping in mappings[first..].iter().take_while(|mapping| mapping.start < end) {
            for part in registry.overlapping(mapping.start.max(start), mapping.end.min(end)) {
                if chunk_bits(&(part.start..part.end), start) & pages != 0 {
                    loans.lend(mapping.protection, part.start, part.end);
                }
            }
        }
        loans
    }

    /// Makes those of `pages` this process's own that a fork shares. They are there, and have been
    /// lent.
    pub(super) fn make_own_at_standstill(&self, number: usize, start: usize, pages: u64) {
        if !self.core.shares.load(Relaxed) {
            return;
        }
        for (first, count) in runs(self.shared_pages(number, pages)) {
            // If there is no memory for it they stay.
            let _ = sys::unshare(start + first * PAGE_BYTES, count * PAGE_BYTES);
        }
    }

    /// Gives all rights back that were lent.
    pub(super) fn give_rights_back(&self, loans: Loans) {
        for Loan { start, bytes, own } in loans.0 {
            if let Err(error) = sys::protect(start, bytes, own) {
                fail_closed(&format!(
                    "memory at {start:#x} cannot be given back its rights ({own:?}): {error}"
                ));
            }
        }
        if self.aside.began.elapsed() >= MAX_STANDING {
            fail_closed("the program stood still for too long, and may run already");
        }
    }
}

impl Loans {
    /// It fails where the kernel has no memory for another mapping, or the memory is sealed: its
    /// pages stay.
    fn lend(&mut self, own: Protection, start: usize, end: usize) {
        let loan = Loan { start, bytes: end - start, own };
        if sys::protect(loan.start, loan.bytes, Protection::READ_WRITE).is_ok() {
            self.0.push(loan);
        }
    }
}

/// The way in which pages of the chunk at `start` are moved out next, and which of `pages` go that
/// way: first what moves while the program runs. Pure.
pub(super) fn next_way(
    registry: &Registry,
    start: usize,
    pages: u64,
    way_of: impl Fn(Protection) -> Way,
) -> (Way, u64) {
    let mut next = (Way::Nowhere, 0);
    for part in registry.overlapping(start, start + CHUNK_BYTES) {
        let bits = chunk_bits(&(part.start..part.end), start) & pages;
        let way = way_of(part.protection);
        match (next.0, way) {
            _ if bits == 0 || way == Way::Nowhere => {}
            (before, _) if before == way => next.1 |= bits,
            (Way::Nowhere | Way::Standstill, Way::Move(_)) | (Way::Nowhere, Way::Standstill) => {
                next = (way, bits);
            }
            _ => {}
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::frames::Zone;
    use crate::space::registry::Region;

    #[test]
    fn what_moves_while_the_program_runs_comes_first() {
        let start = 8 * CHUNK_BYTES;
        let mut registry = Registry::default();
        let mut add = |pages: std::ops::Range<usize>, can_write, can_execute| {
            let protection = Protection { can_write, can_execute, ..Protection::READ_WRITE };
            let (start, end) = (start + pages.start * PAGE_BYTES, start + pages.end * PAGE_BYTES);
            registry.insert(Region { start, end, protection, ..Region::default() });
        };
        add(0..4, false, false);
        add(4..8, true, false);
        add(8..12, true, true);
        add(12..70, false, true);
        let next = |pages, may_execute| {
            next_way(&registry, start, pages, |protection| protection.way(may_execute))
        };
        assert_eq!(next(u64::MAX, true), (Way::Move(Zone::ReadWrite), 0xf0));
        assert_eq!(next(!0xf0, true), (Way::Move(Zone::ReadWriteExecute), 0xf00));
        assert_eq!(next(!0xff0, true), (Way::Standstill, !0xff0));
        assert_eq!(next(!0xff0, false), (Way::Standstill, 0xf));
        assert_eq!(next(!0xfff, false), (Way::Nowhere, 0));
        assert_eq!(next(0, true), (Way::Nowhere, 0));
    }

    #[test]
    fn little_is_no_reason_to_stop_the_program() {
        let mut aside = Aside::new();
        aside.put(1, LEAST_PAGES - 1);
        assert!(!aside.is_due(true));
        aside.put(1, 5);
        assert!(!aside.is_due(true), "the same chunk");
        aside.put(2, 5);
        assert!(aside.is_due(true) && !aside.is_due(false));
        (3..).take(MOST_CHUNKS).for_each(|number| aside.put(number, 64));
        assert!(aside.is_due(false));
        aside.rest(0, 0);
        assert!(!aside.is_due(true), "it must run for a while");
        assert_eq!(aside.take().len(), MOST_CHUNKS);
        assert_eq!(aside.pages, 0);
    }
}
