//! What a process's evictor publishes on the board: the pages that are far, in the buffer, the
//! pager's own, and those that could be moved out. How often each is counted depends on how often
//! it changes and what counting it costs.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_uffd::{PageRange, category};
use farpool_units::PAGE_BYTES;

use crate::core::Core;
use crate::space::Superpage;
use crate::sys;

/// How often the pager's own memory is counted.
const OWN_STEP: Duration = Duration::from_millis(200);
/// How often the pages that a small process shares with others since a fork are counted.
const SHARED_STEP: Duration = Duration::from_millis(50);
/// How often at most the pages of a small process that can be moved out are counted; less often
/// where counting would take more than 1/[`THERE_PART`] of a processor.
const THERE_STEP: Duration = Duration::from_millis(10);
const THERE_PART: u32 = 50;
/// Below this size the pages that could be moved out are counted one by one: much of so small a
/// process is code, stacks and tables of the C library. Above it, all resident pages up to the size
/// of the memory that may be far pass for movable.
const SMALL_PROCESS_PAGES: u64 = 4096;

/// How often pages that came back and are out again are counted, which checks each page.
const USED_STEP: Duration = Duration::from_millis(250);

/// Resident pages of a small process besides those that can be moved out and the buffer. Taken as
/// constant between two counts: what comes and goes is memory that can be moved.
#[derive(Clone, Copy, Debug, Default)]
struct Besides {
    pages: u64,
}

impl Besides {
    /// Of the pages outside the buffer `there_pages` can be moved out. The count may have changed
    /// meanwhile.
    fn counted(outside_buffer_pages: u64, there_pages: u64) -> Besides {
        Besides { pages: outside_buffer_pages.saturating_sub(there_pages) }
    }

    /// The pages that can be moved out, when `outside_buffer_pages` are outside the buffer.
    fn there(self, outside_buffer_pages: u64) -> u64 {
        outside_buffer_pages.saturating_sub(self.pages)
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct Gauges {
    core: &'static Core,
    own_counted: Instant,
    shared_counted: Instant,
    /// Pages that can be moved out.
    there_pages: u64,
    /// For a small process: when they are to be counted again.
    there_due: Option<Instant>,
    besides: Besides,
    /// The keeper's epoch since which uses are counted, and when those that are out were last
    /// counted.
    use_epoch: u32,
    used_counted: Instant,
}

impl Gauges {
    pub fn new(core: &'static Core) -> Gauges {
        let now = Instant::now();
        Gauges {
            core,
            own_counted: now,
            shared_counted: now,
            there_pages: 0,
            there_due: None,
            besides: Besides::default(),
            use_epoch: 0,
            used_counted: now,
        }
    }

    /// Publishes all gauges on the board. The board must hold a fresh count of resident pages.
    pub fn publish(&mut self) {
        let (core, slot) = (self.core, self.core.slot);
        if self.own_counted.elapsed() >= OWN_STEP {
            self.own_counted = Instant::now();
            slot.set(Counter::PagerPages, present_pages(core, sys::own_mappings()));
        }
        let far =
            |id| core.space.by_id(id).map_or(0, |page| u64::from(page.far_pages.load(Relaxed)));
        slot.set(Counter::FarPages, (0..core.space.count()).map(far).sum());
        slot.set(Counter::BufferPages, core.frames.count());
        let is_small = slot.get(Counter::ResidentPages) < SMALL_PROCESS_PAGES;
        if self.shared_counted.elapsed() >= SHARED_STEP && core.shares.load(Relaxed) {
            self.shared_counted = Instant::now();
            core.budget.look_at_shared(is_small);
        }
        self.count_there(is_small);
        slot.set(Counter::EvictablePages, self.there_pages);
        let is_short = core.full.load(Relaxed) || core.refused.load(Relaxed);
        slot.set(Counter::WithoutRoom, is_short.into());
        self.count_used();
    }

    /// Counts the pages that came back since the keeper last reset the count, and are out again.
    fn count_used(&mut self) {
        let (core, epoch) = (self.core, self.core.board.header().use_epoch.load(Relaxed));
        let superpages = || (0..core.space.count()).filter_map(|id| core.space.by_id(id));
        if epoch != self.use_epoch {
            self.use_epoch = epoch;
            superpages().for_each(Superpage::forget_uses);
        } else if epoch == 0 || self.used_counted.elapsed() < USED_STEP {
            return;
        }
        self.used_counted = Instant::now();
        let away_pages = superpages().map(Superpage::used_and_away).sum();
        core.slot.set(Counter::UsedAwayPages, away_pages);
    }

    fn count_there(&mut self, is_small: bool) {
        let core = self.core;
        let resident_pages = core.slot.get(Counter::ResidentPages);
        let outside_buffer_pages = resident_pages.saturating_sub(core.frames.count());
        let is_counted = self.there_due.is_some_and(|due| Instant::now() < due);
        if is_small && is_counted {
            self.there_pages = self.besides.there(outside_buffer_pages);
            return;
        }
        // Does not wait: the steward holds the lock while it waits, before a fork, for the
        // evictor's writes.
        let Ok(registry) = core.registry.try_lock() else { return };
        if is_small {
            let began = Instant::now();
            let regions = registry.iter().map(|region| (region.start, region.bytes()));
            self.there_pages = present_pages(core, regions);
            self.besides = Besides::counted(outside_buffer_pages, self.there_pages);
            let took = began.elapsed();
            self.there_due = Some(began + took + THERE_STEP.max(took * THERE_PART));
        } else {
            self.there_due = None;
            let mapped = (registry.bytes() / PAGE_BYTES) as u64;
            self.there_pages = resident_pages.min(mapped);
        }
    }
}

/// Counts the pages that are present in ranges, given as (start, bytes).
fn present_pages(core: &Core, places: impl Iterator<Item = (usize, usize)>) -> u64 {
    let mut ranges = [PageRange::default(); 64];
    let mut pages = 0;
    for (start, bytes) in places {
        let (mut from, end) = (start, start + bytes);
        while from < end {
            let found = core.pagemap.scan(from, end, category::PRESENT, &mut ranges);
            let Ok((found, walked)) = found else { break };
            pages += found.iter().map(|range| range.pages() as u64).sum::<u64>();
            if walked <= from {
                break;
            }
            from = walked;
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_between_two_counts_can_be_moved_out_again() {
        let besides = Besides::counted(2_000, 1_700);
        assert_eq!(besides.there(2_000), 1_700);
        assert_eq!(besides.there(1_400), 1_100, "600 have left");
        assert_eq!(besides.there(1_900), 1_600, "500 are back");
        assert_eq!(besides.there(200), 0);
    }
}
