//! Watches the resident set of a native process until its tree comes near the limit.
//!
//! Memory grows as fast as its CPUs can touch it, so what counts is how soon the watching thread
//! runs when its pause is over: see [`crate::sys::be_prompt`]. That is not all. It also needs the
//! lock of the address space, after all earlier waiters, and each of those continues with its own
//! time slice once it had the lock: 38 threads that started at once kept it waiting for 41 ms, and
//! grew by 2 MiB each meanwhile. So the margin grows with the threads that want the CPUs, and a
//! thread that is about to make more of them, or to map more memory, waits until memory is
//! registered ([`Pager::before_growth`]).

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter};
use farpool_policy::reserve;
use farpool_units::{PAGE_BYTES, at_most, exactly};

use crate::error::StartError;
use crate::life::process::Pager;
use crate::shared::budget::{self, Tree};
use crate::sys::{self};

/// Memory is registered this much earlier than [`reserve::margin_pages`] says for each growing
/// thread that there is no CPU for: a time slice on a CPU is 4 ms, or 4000 pages, if the thread did
/// nothing but touch new ones; programs do more with a page.
const TURN_PAGES: i64 = 1024;
/// The fastest that memory is assumed to grow unseen, in pages a millisecond: 10 GB/s, two threads
/// touching huge pages.
const GROWTH_PAGES_PER_MS: i64 = 2_500;
/// The shortest and the longest time between two checks of the resident set.
const WATCH_MS: std::ops::RangeInclusive<i64> = 1..=100;
/// A process whose resident memory stays below this, and below 1/32 of the limit, gets no threads
/// to serve faults.
const SMALL_BYTES: u64 = 4 << 20;
const SMALL_PART: u64 = 32;
/// Near the tree's limit every process with this much memory has to give some up.
const WORTH_BYTES: u64 = 1 << 20;
/// How often small processes are checked while they grow, and while they do not. First touches take
/// at least a microsecond a page, so one grows by 40 MB at most before it is noticed.
const SMALL_STEP: Duration = Duration::from_millis(2);
const SMALL_REST: Duration = Duration::from_millis(10);
/// The longest that a thread of the program waits until memory is registered. That takes
/// milliseconds; longer only if the thread itself holds what the pager's threads need to start.
const GROWTH_WAIT: Duration = Duration::from_secs(1);

/// The steward's watch of a native process.
#[derive(Debug)]
pub struct Watch {
    statm: OwnedFd,
    tasks: OwnedFd,
    cpus: i64,
    /// Anonymous pages that were resident at the last check.
    pages: u64,
}

impl Watch {
    pub fn new() -> Result<Watch, StartError> {
        let cpus = at_most(sys::allowed_cpus().len());
        Ok(Watch { statm: budget::open_statm()?, tasks: sys::open_own_tasks()?, cpus, pages: 0 })
    }

    /// Returns when the process may have to give up memory: most processes of a tree never do, and
    /// end before they would have the threads for it.
    pub fn while_small(&mut self, pager: &Pager) {
        let small = (pager.settings.limit_bytes / SMALL_PART).min(SMALL_BYTES) / PAGE_BYTES as u64;
        loop {
            let bell = pager.requests.bell();
            let grows = self.look(pager);
            let pause = next_look(pager.board, grows, self.cpus);
            let has_to_give = self.pages * PAGE_BYTES as u64 >= WORTH_BYTES;
            let is_due = pause.is_none() && has_to_give;
            if is_due || self.pages >= small || pager.growth.is_awaited.load(SeqCst) {
                return;
            }
            let most = if grows { SMALL_STEP } else { SMALL_REST };
            pager.requests.wait(bell, pause.unwrap_or(most).min(most));
        }
    }

    /// Returns when the limit is near.
    pub fn until_near(&mut self, pager: &Pager) {
        loop {
            let bell = pager.requests.bell();
            let grows = self.look(pager);
            let pause = next_look(pager.board, grows, self.cpus);
            let Some(pause) = pause.filter(|_| !pager.growth.is_awaited.load(SeqCst)) else {
                return pager.slot().set(Counter::GrowingThreads, 0);
            };
            pager.requests.wait(bell, pause);
        }
    }

    /// Checks the process and publishes the result. Returns how long until the next check; None:
    /// the limit is near.
    pub fn look_again(&mut self, pager: &Pager) -> Option<Duration> {
        let grows = self.look(pager);
        let pause = next_look(pager.board, grows, self.cpus);
        if pause.is_none() {
            pager.slot().set(Counter::GrowingThreads, 0);
        }
        pause
    }

    /// Publishes how much is resident and how many threads make it grow. True if it grew since the
    /// last check.
    fn look(&mut self, pager: &Pager) -> bool {
        let resident = budget::read_resident(&self.statm).unwrap_or_default();
        let slot = pager.slot();
        budget::publish(slot, resident);
        let before = std::mem::replace(&mut self.pages, resident.anonymous_pages);
        let grows = resident.anonymous_pages > before;
        // Excludes the steward itself.
        let threads = if grows { sys::count_tasks(&self.tasks).saturating_sub(1) } else { 0 };
        slot.set(Counter::GrowingThreads, threads);
        grows
    }
}

impl Pager {
    /// As [`Pager::before_growth`], for a thread of the program that is about to start another one.
    pub fn before_thread(&self) {
        if !sys::is_internal_allocation() {
            self.growth.has_threads.store(true, SeqCst);
            self.before_growth();
        }
    }

    /// To be called when a thread of the program is about to start another one, or has mapped new
    /// memory. If the process has more threads than CPUs and what they can touch unseen may exceed
    /// the limit, the thread waits until memory is registered.
    pub fn before_growth(&self) {
        let watched = self.steward_started.load(SeqCst) && !self.is_active();
        if !watched || !self.growth.has_threads.load(SeqCst) || !self.is_of_this_process() {
            return;
        }
        let Ok(tasks) = sys::open_own_tasks() else { return };
        let threads = sys::count_tasks(&tasks).saturating_sub(1);
        let cpus = at_most(sys::allowed_cpus().len());
        if at_most::<i64, _>(threads) <= cpus {
            return;
        }
        self.slot().set(Counter::GrowingThreads, threads);
        if next_look(self.board, true, cpus).is_none() {
            self.await_registration();
        }
    }

    /// To be called when a thread of the program is about to have the kernel touch this much memory
    /// in one call. If the limit would be near then, the thread waits until memory is registered,
    /// so that the call keeps to the limit page by page.
    pub fn before_populating(&self, bytes: usize) {
        let watched = self.steward_started.load(SeqCst) && !self.is_active();
        if !watched || !self.is_of_this_process() {
            return;
        }
        let tree = Tree::read(self.board);
        let limit = budget::limit_pages(self.board, &tree);
        let pages: i64 = at_most(bytes / PAGE_BYTES);
        let pages = tree.counted_pages(limit).saturating_add(pages);
        if pause(limit, pages, 0).is_none() {
            self.await_registration();
        }
    }

    /// Makes the process active, whether or not the limit is near. False: it has not become active
    /// in this time.
    pub(crate) fn activate_within(&'static self, time: Duration) -> bool {
        let until = Instant::now() + time;
        self.start_steward();
        while !self.is_active() && Instant::now() < until {
            self.await_registration();
        }
        self.is_active()
    }

    fn await_registration(&self) {
        self.growth.is_awaited.store(true, SeqCst);
        self.requests.ring();
        self.growth.registered.wait_at_most(GROWTH_WAIT);
    }
}

/// How long until the resident set has to be checked again; None: the limit is near.
fn next_look(board: &Board, grows: bool, cpus: i64) -> Option<Duration> {
    let tree = Tree::read(board);
    let limit = budget::limit_pages(board, &tree);
    let waiting_threads = if grows { (tree.growing_threads - cpus).max(0) } else { 0 };
    pause(limit, tree.counted_pages(limit), waiting_threads)
}

/// As [`next_look`]. A process that does not grow need not keep memory free for those that do.
/// Pure.
fn pause(limit: i64, counted_pages: i64, waiting_threads: i64) -> Option<Duration> {
    let room = limit
        - reserve::margin_pages(limit)
        - waiting_threads.saturating_mul(TURN_PAGES)
        - counted_pages;
    if room <= 0 {
        return None;
    }
    let pause_ms = (room / GROWTH_PAGES_PER_MS).clamp(*WATCH_MS.start(), *WATCH_MS.end());
    Some(Duration::from_millis(exactly(pause_ms)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_the_limit_the_shorter_the_pause() {
        let gib = 1 << 18;
        assert_eq!(pause(gib, 0, 0), Some(Duration::from_millis(100)));
        assert_eq!(pause(gib, gib - 8192 - 25_000, 0), Some(Duration::from_millis(10)));
        assert_eq!(pause(gib, gib - 8192 - 1, 0), Some(Duration::from_millis(1)));
        assert_eq!(pause(gib, gib - 8192, 0), None);
    }

    #[test]
    fn threads_that_wait_for_a_cpu_bring_the_limit_nearer() {
        let limit = 32 << 8;
        assert!(pause(limit, 1000, 2).is_some());
        assert_eq!(pause(limit, 1000, 62), None);
    }
}
