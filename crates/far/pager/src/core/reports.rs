//! Messages about far memory that is lost, refused or full.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use farpool_board::Counter;
use farpool_kernel::lock;
use farpool_pool::{BladeIndex, PoolError};
use farpool_units::PAGE_BYTES;

use crate::core::state::Core;
use crate::shared::budget::{Tree, limit_pages};
use crate::space::Page;
use crate::sys;

impl Core {
    /// Makes later touches of a lost page a SIGBUS, and reports the first loss.
    pub fn poison(&self, page: Page, reason: &dyn std::fmt::Display) {
        self.count(Counter::Lost, 1);
        // First the message: the woken thread's SIGBUS may end the process at once.
        let mut reported = lock(&self.loss_reported);
        if !std::mem::replace(&mut *reported, true) {
            let lost: Vec<String> = self
                .pool
                .lost()
                .iter()
                .map(|blade| format!("{} ({})", blade.address, blade.reason))
                .collect();
            let all = || self.settings.blades.iter().map(|blade| blade.address.clone()).collect();
            let blades: Vec<String> = if lost.is_empty() { all() } else { lost };
            let blades = blades.join(", ");
            sys::say(&format!(
                "far memory is lost: {reason}; page {} of segment {}, blade {blades}. Touching a \
                 lost page stops the program with SIGBUS; nothing is ever made up. Restart the \
                 blade, then the program.",
                page.segment_page(),
                self.layers.current(),
            ));
        }
        drop(reported);
        let _ = self.uffd.poison(page.address(), PAGE_BYTES);
        let _ = self.uffd.wake(page.address(), PAGE_BYTES);
    }

    /// Reports, once for the whole tree, why a blade cannot be used or takes no pages.
    pub fn report_blade(&self, blade: BladeIndex, reason: &dyn std::fmt::Display) {
        if first_report(&self.board.header().blades_reported, blade) {
            sys::say(&format!(
                "{reason}. What it would have taken goes to other blades or stays in local memory, \
                 also over the limit; it is tried again now and then. `farpool blades` gives the \
                 run another one."
            ));
        }
    }

    /// Reports, once for the whole tree, that a blade is lost of which there are copies.
    pub fn report_spared(&self, blade: BladeIndex, reason: &dyn std::fmt::Display) {
        if first_report(&self.board.header().blades_reported, blade) {
            sys::say(&format!(
                "{reason}. Its pages are read from their copies, which are made again where there \
                 is room. Should it come back, it is used again."
            ));
        }
    }

    /// Reports by how much local memory is over its limit because nothing can be moved out: the
    /// first time, and whenever the overrun has doubled.
    pub fn report_overrun(&self) {
        let tree = Tree::read(self.board);
        let limit = limit_pages(self.board, &tree);
        let bytes = |pages: i64| pages.max(0).unsigned_abs() * PAGE_BYTES as u64;
        let (limit_bytes, over_bytes) = (bytes(limit), bytes(tree.counted_pages(limit) - limit));
        let said = &self.board.header().overrun_reported_bytes;
        let known_bytes = said.load(Relaxed);
        if is_news(limit_bytes, over_bytes, known_bytes)
            && said.compare_exchange(known_bytes, over_bytes, SeqCst, Relaxed).is_ok()
        {
            sys::say(&format!(
                "local memory is {over_bytes} bytes over its limit of {limit_bytes} bytes, for no \
                 blade takes pages. Give the run another blade (farpool blades), or a larger limit \
                 (farpool limit)."
            ));
        }
    }

    /// Reports once for the whole tree that the pool is full.
    pub fn report_full(&self, error: &PoolError) {
        self.full.store(true, Relaxed);
        if self.board.header().full_reported.swap(1, SeqCst) == 0 {
            sys::say(&format!(
                "{error}. The program goes on with the far memory it has; give it more with \
                 --quota, more blades, or a larger --local."
            ));
        }
    }
}

/// Whether this is the first report of the blade on the board.
fn first_report(reported: &AtomicU32, blade: BladeIndex) -> bool {
    let bit = 1 << (u32::from(blade.0) % u32::BITS);
    reported.fetch_or(bit, SeqCst) & bit == 0
}

/// An overrun beyond this part of the limit is reported: a fault may take a page more than there
/// is.
const OVERRUN_PART: u64 = 8;

/// Whether an overrun is to be reported, after one of `known_bytes` was.
fn is_news(limit_bytes: u64, over_bytes: u64, known_bytes: u64) -> bool {
    over_bytes > (limit_bytes / OVERRUN_PART).max(known_bytes.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_blade_is_reported_once_and_an_overrun_when_it_has_doubled() {
        let reported = AtomicU32::new(0);
        let first = [0, 1, 0, 1].map(|blade| first_report(&reported, BladeIndex(blade)));
        assert_eq!(first, [true, true, false, false]);
        assert!(!is_news(800, 100, 0) && is_news(800, 101, 0));
        assert!(!is_news(800, 202, 101) && is_news(800, 203, 101));
    }
}
