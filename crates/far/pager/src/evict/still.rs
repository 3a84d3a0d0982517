//! Memory that can be moved out only while the program stands still ([`crate::sys::standstill`]).
//!
//! The victim policy chooses it like any other. It is put aside until there is enough to stop the
//! program for, or until there is nothing else to move out.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::evict::aside::Moved;
use crate::evict::evictor::{Evictor, MAX_TRAYS_IN_FLIGHT};
use crate::evict::wanted::{Tried, Wanted};
use crate::space::maps::{self, Eligible};
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, chunk_bits, runs};
use crate::sys::standstill::MAX_STANDING;
use crate::sys::{self, Protection};

/// How long the keeper may take to stop the program.
const ASKING_TIME: Duration = Duration::from_millis(300);
/// So much is moved out at a standstill at the least (4 MiB), if it is there, though less is
/// wanted: to stop the program costs more than to move it.
const WORTH_PAGES: i64 = 1024;
/// No chunk is begun after the program has stood still for this long.
const WORKING_TIME: Duration = Duration::from_millis(10);

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
