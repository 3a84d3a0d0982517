//! Memory that can be moved out only while the program stands still ([`crate::sys::standstill`]).
//!
//! The victim policy chooses it like any other memory. It is put aside until there is enough to
//! stop the program for, or until nothing else can be moved out.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use farpool_board::Counter;
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::evict::aside::Moved;
use crate::evict::evictor::Evictor;
use crate::evict::wanted::{Tried, Wanted};
use crate::space::maps::{self, Eligible};
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, chunk_bits, runs};
use crate::sys::standstill::MAX_STANDING;
use crate::sys::{self, Protection};

/// How long the keeper may take to stop the program.
const ASKING_TIME: Duration = Duration::from_millis(300);
/// The least that is moved out at a standstill (4 MiB), if there is that much, even if less is
/// wanted: stopping the program costs more than moving it.
const WORTH_PAGES: i64 = 1024;
/// No chunk is begun once the program has stood still for this long.
const WORKING_TIME: Duration = Duration::from_millis(10);

/// A piece of memory that has other rights for a moment.
#[derive(Clone, Copy, Debug)]
struct Loan {
    start: usize,
    bytes: usize,
    own: Protection,
}

/// Rights of parts of a chunk that have to be restored.
#[derive(Debug)]
pub(super) struct Loans(Vec<Loan>);

impl Evictor {
    /// Moves out the chunks that were put aside, about `wanted` pages, if it is time. Returns how
    /// many pages were moved.
    pub(super) fn move_aside(&mut self, wanted: i64, is_barren: bool) -> i64 {
        if !self.aside.is_due(is_barren) {
            return 0;
        }
        // Neither the program nor the steward may have to wait for a blade.
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
            if self.trays_in_flight >= self.trays_in_flight_limit {
                self.wait_for_blade(self.trays_in_flight_limit / 2);
            }
        }
        moved
    }

    fn stand_still(&mut self, chunks: &[usize], wanted: i64) -> i64 {
        let core = self.core;
        let Some(standing) = core.standstill.ask(ASKING_TIME) else { return 0 };
        self.aside.began = standing.since;
        // Without the list no rights are lent, and nothing is moved.
        let list = sys::read_file("/proc/self/maps").unwrap_or_default();
        self.aside.mappings = maps::eligible(&list, &[], 0);
        // In a program that may not make memory executable, the right to execute could not be
        // restored.
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

    /// Gives the read-only parts of a chunk that `pages` are in the rights of the victim buffer.
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

    /// Makes the pages that a fork shares this process's own. They are present, and have been lent.
    pub(super) fn make_own_at_standstill(&self, number: usize, start: usize, pages: u64) {
        if !self.core.shares.load(Relaxed) {
            return;
        }
        for (first, count) in runs(self.shared_pages(number, pages)) {
            // If there is no memory for it the pages stay.
            let _ = sys::unshare(start + first * PAGE_BYTES, count * PAGE_BYTES);
        }
    }

    /// Restores all rights that were lent.
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
    /// Fails where the kernel has no memory for another mapping, or the memory is sealed: the pages
    /// stay.
    fn lend(&mut self, own: Protection, start: usize, end: usize) {
        let loan = Loan { start, bytes: end - start, own };
        if sys::protect(loan.start, loan.bytes, Protection::READ_WRITE).is_ok() {
            self.0.push(loan);
        }
    }
}
