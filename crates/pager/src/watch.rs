//! Watching the resident set of a native process until the limit of its tree comes near.
//!
//! Memory grows as fast as its CPUs can touch it, so what counts is how soon the watching thread runs when its
//! pause is over, however many threads of the program want the CPUs: see [`crate::sys::be_prompt`].

use std::os::fd::OwnedFd;
use std::time::Duration;

use farpool_board::Board;
use farpool_uffd::PAGE_BYTES;

use crate::Pager;
use crate::budget::{self, Tree};

/// Memory is registered when the tree is this close to its limit: 1/32 of it, within these bounds.
const MARGIN_PART: i64 = 32;
const MARGIN_PAGES: std::ops::RangeInclusive<i64> = 1024..=16_384;
/// The fastest that memory is assumed to grow unseen, in pages a millisecond: 10 GB/s, two threads
/// touching huge pages.
const GROWTH_PAGES_PER_MS: i64 = 2_500;
/// Between two looks at the resident set, at the least and at the most.
const WATCH_MS: std::ops::RangeInclusive<i64> = 1..=100;
/// A process whose resident memory stays below this, and below 1/32 of the limit, gets no threads to serve faults.
const SMALL_BYTES: u64 = 4 << 20;
const SMALL_PART: u64 = 32;
/// Near the limit of the tree every process with so much memory has to give.
const WORTH_BYTES: u64 = 1 << 20;
/// Small processes are looked at this often while they grow, and while they do not. First touches take at
/// least a microsecond a page, so one grows by 40 MB at most before it is noticed.
const SMALL_STEP: Duration = Duration::from_millis(2);
const SMALL_REST: Duration = Duration::from_millis(10);

impl Pager {
    /// Returns when the process may have to give up memory: most processes of a tree never do, and are over before
    /// they would have the threads for it.
    pub(crate) fn watch_while_small(&self, statm: &OwnedFd) {
        let small = (self.settings.limit_bytes / SMALL_PART).min(SMALL_BYTES) / PAGE_BYTES as u64;
        let mut before = 0;
        loop {
            let bell = self.requests.bell();
            let pages = self.look(statm);
            let pause = next_look(self.board);
            let is_near = pause.is_none() && pages * PAGE_BYTES as u64 >= WORTH_BYTES;
            if is_near || pages >= small {
                return;
            }
            let most = if pages == before { SMALL_REST } else { SMALL_STEP };
            before = pages;
            self.requests.wait(bell, pause.unwrap_or(most).min(most));
        }
    }

    /// Returns when the limit is near.
    pub(crate) fn watch_until_near(&self, statm: &OwnedFd) {
        loop {
            let bell = self.requests.bell();
            self.look(statm);
            let Some(pause) = next_look(self.board) else { return };
            self.requests.wait(bell, pause);
        }
    }

    /// Publishes what is resident, and returns how many anonymous pages are.
    fn look(&self, statm: &OwnedFd) -> u64 {
        let resident = budget::read_resident(statm).unwrap_or_default();
        budget::publish(self.slot(), resident);
        resident.anonymous_pages
    }
}

/// How long until the resident set has to be looked at again; None: the limit is near.
fn next_look(board: &Board) -> Option<Duration> {
    let tree = Tree::read(board);
    let limit = budget::limit_pages(board, &tree);
    let margin = (limit / MARGIN_PART).clamp(*MARGIN_PAGES.start(), *MARGIN_PAGES.end());
    let room = limit - margin - tree.counted_pages(limit);
    if room <= 0 {
        return None;
    }
    let pause_ms = (room / GROWTH_PAGES_PER_MS).clamp(*WATCH_MS.start(), *WATCH_MS.end());
    Some(Duration::from_millis(u64::try_from(pause_ms).unwrap_or(1)))
}
