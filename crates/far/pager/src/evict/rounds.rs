//! The evictor's loop: when it checks the budget, how much it does at a time, and when it rests.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_kernel::thread_cpu_time;
use farpool_policy::reserve::{LEAST_WORKING_PAGES, Work};
use farpool_units::at_most;

use crate::abort::panic_if_asked;
use crate::core::EXPIRY_STEP;
use crate::evict::evictor::Evictor;
use crate::shared::turn::Turn;
use crate::sys;

/// How often the budget is checked when there is nothing to do.
const IDLE_STEP: Duration = Duration::from_millis(20);
/// After a fork memory grows by copy-on-write, unseen. How often the budget is checked while it
/// grows (2 ms are 8 MB at 1 us a page), and while it does not.
const GROWING_STEP: Duration = Duration::from_millis(2);
const SHARING_STEP: Duration = Duration::from_millis(10);
const MOST_STEPS: u32 = 16;
/// The wait before the next try when nothing could be evicted (all pinned, pool full).
const BACK_OFF: Duration = Duration::from_millis(5);
/// The same when much of the memory cannot be moved at all, or no blade takes pages: a lap costs up
/// to a millisecond, so this is 2 % of a CPU.
const UNMOVABLE_BACK_OFF: Duration = Duration::from_millis(50);
/// In Solo the evictor works on the faulting thread's CPU: at most this many pages in a burst (half
/// a millisecond, or two if the pages are scattered), then a pause of [`BREATH`] unless it is
/// called. One burst does all that is wanted: with rounds of 256 pages one random fault in 130 met
/// a round, which together with other delays is more than one fault in a hundred.
const BURST_PAGES: i64 = 512;
/// Frames that are returned to the kernel at a time: four dense trays, for which other processors
/// are interrupted once.
const STEP_PAGES: i64 = 256;
const BREATH: Duration = Duration::from_micros(100);
/// A rest after rounds that found little ends when memory has grown by [`GROWN_PAGES`] (2 MiB),
/// which is checked every [`REST_STEP`].
const GROWN_PAGES: i64 = 512;
const REST_STEP: Duration = Duration::from_millis(1);

impl Evictor {
    /// Evicts until the process ends.
    pub fn run(mut self) -> ! {
        self.core.crew.be_evictor();
        loop {
            self.check_deadlines();
            self.end_walks();
            self.evict_retired();
            let look = self.core.budget.look(self.core.slot);
            self.gauges.publish();
            let free = self.core.frames.free();
            let turn = self.look_for_turn();
            let work = self.core.budget.refresh(look, self.core.board, self.core.slot, free, turn);
            if work == Work::default() || self.core.leaving.load(SeqCst) {
                self.rest();
            } else {
                self.work(work);
            }
        }
    }

    fn look_for_turn(&mut self) -> Turn {
        let (slot, word) = (self.core.slot, &self.core.board.header().turn);
        let (now_ms, overruns) = (sys::shared_clock_ms(), slot.get(Counter::Overruns));
        let wants = self.stall.wants_turn(self.core, now_ms);
        let turn = self.turns.look(word, slot.pid.load(Relaxed), now_ms, overruns, wants);
        self.core.out_of_turn.store(matches!(turn, Turn::Anothers(_)), Relaxed);
        turn
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.trays_in_flight > 0 && now >= self.expired + EXPIRY_STEP {
            self.expired = now;
            self.lane.expire(now, &mut self.done);
            self.settle_done();
        }
    }

    pub(super) fn rest(&mut self) {
        self.drain();
        self.release_copies();
        // There is no work although memory is short: nothing can be moved out.
        let is_short = self.core.budget.allowance() <= 0 && self.core.frames.free() == 0;
        self.core.barren.store(is_short, Relaxed);
        let there = self.core.slot.get(Counter::EvictablePages);
        self.core.least.store(is_short && there <= LEAST_WORKING_PAGES.unsigned_abs(), Relaxed);
        let shares = self.core.shares.load(Relaxed);
        let resident = self.core.slot.get(Counter::ResidentPages);
        let grows = std::mem::replace(&mut self.resident_before, resident) != resident;
        // In a large tree every process checks less often: together they would check all the time.
        let processes = at_most::<u32, _>(self.core.board.processes().count());
        let growing = GROWING_STEP * processes.clamp(1, MOST_STEPS);
        let most = match (shares, grows) {
            (true, true) => growing.min(IDLE_STEP),
            (true, false) => growing.max(SHARING_STEP),
            (false, _) => IDLE_STEP,
        };
        self.core.budget.wait_for_kick(most);
    }

    /// One burst of work. It is short on the CPU of the faulting thread, because faults wait for
    /// its end.
    fn work(&mut self, work: Work) {
        panic_if_asked();
        let began = thread_cpu_time();
        let near = self.core.crew.evictor_is_near();
        let most = if near { BURST_PAGES } else { i64::MAX };
        let (mut evicted, released) =
            self.make_room(work.evict_pages.min(most), work.release_pages.min(most));
        let is_barren = evicted == 0 && released == 0;
        evicted += self.move_aside(work.evict_pages - evicted, is_barren);
        self.core.least.store(false, Relaxed);
        self.density.judge(&self.core.crew);
        self.core.frames.announce();
        if evicted == 0 && released == 0 {
            self.drain();
            self.core.barren.store(self.core.frames.free() == 0, Relaxed);
            let is_refused = self.are_refused();
            if is_refused {
                self.core.report_overrun();
            }
            if is_refused || self.core.is_unmovable.load(Relaxed) {
                // A thread that kicks does not wait, and the next lap would find as little.
                std::thread::sleep(UNMOVABLE_BACK_OFF);
            } else {
                self.core.budget.wait_for_kick(BACK_OFF);
            }
        } else {
            self.core.barren.store(false, Relaxed);
            if near && self.core.budget.allowance() > 0 {
                self.core.budget.wait_for_kick(BREATH);
            }
        }
        let moved = (evicted + released).unsigned_abs();
        let worked = thread_cpu_time().saturating_sub(began);
        if let Some(rest) = self.effort.note(worked, moved) {
            self.ease_off(rest);
        }
    }

    /// Moves pages out and returns frames to the kernel in turns, up to these numbers, so that
    /// threads that wait for free memory have it after the first step. Returns both counts.
    fn make_room(&mut self, evict_pages: i64, release_pages: i64) -> (i64, i64) {
        let (mut evicted, mut released) = (0, 0);
        while evicted < evict_pages {
            let step = STEP_PAGES.min(evict_pages - evicted);
            let moved = self.evict(step);
            evicted += moved;
            if moved < step {
                break;
            }
            released += self.give_back((release_pages - released).min(STEP_PAGES));
        }
        self.collect();
        if self.trays_in_flight > 0 {
            self.wait_for_blade(self.trays_in_flight_limit / 2);
        }
        released += self.give_back(release_pages - released);
        (evicted, released)
    }

    /// Returns about `pages` frames to the kernel, and announces it to threads that wait for free
    /// memory.
    fn give_back(&mut self, pages: i64) -> i64 {
        let released = self.release(pages);
        if released > 0 {
            self.core.budget.refund(released);
            self.core.frames.announce();
        }
        released
    }

    /// Rests after a round that found little, unless memory grows meanwhile. No thread waits for
    /// free memory.
    fn ease_off(&mut self, rest: Duration) {
        // Other threads may wait for writes that are under way.
        self.drain();
        self.core.barren.store(self.core.frames.free() == 0, Relaxed);
        let (until, before) = (Instant::now() + rest, self.core.budget.allowance());
        while Instant::now() < until && before - self.core.budget.allowance() < GROWN_PAGES {
            std::thread::sleep(REST_STEP);
        }
    }
}
