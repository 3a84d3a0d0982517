//! The evictor's loop: when it looks, how much it does at a time, and when it rests.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_kernel::thread_cpu_time;
use farpool_policy::reserve::{LEAST_WORKING_PAGES, Work};
use farpool_units::at_most;

use crate::abort::panic_if_asked;
use crate::core::EXPIRY_STEP;
use crate::evict::evictor::{Evictor, MAX_TRAYS_IN_FLIGHT};
use crate::shared::turn::Turn;
use crate::sys;

/// How often the budget is checked when there is nothing to do.
const IDLE_STEP: Duration = Duration::from_millis(20);
/// After a fork memory grows by copy-on-write, unseen: looked at often while it does (2 ms are 8 MB
/// at 1 us a page), and more often than otherwise while it does not.
const GROWING_STEP: Duration = Duration::from_millis(2);
const SHARING_STEP: Duration = Duration::from_millis(10);
const MOST_STEPS: u32 = 16;
/// When nothing could be evicted (all pinned, pool full), wait this long before the next try.
const BACK_OFF: Duration = Duration::from_millis(5);
/// The same when much of the memory cannot be moved at all, or no blade takes any: a lap costs up
/// to a millisecond, so this is 2 % of a CPU.
const UNMOVABLE_BACK_OFF: Duration = Duration::from_millis(50);
/// In Solo the evictor works on the faulting thread's CPU, this much at a time (half a millisecond,
/// or two if its pages are scattered), and pauses this long unless it is called. If it did all at
/// once, one in 130 random faults met a round of 256 pages, which is more than one in a hundred
/// together with the other delays.
const BURST_PAGES: i64 = 512;
/// Frames that are given back at a time: four dense trays, for which other processors are
/// interrupted once.
const STEP_PAGES: i64 = 256;
const BREATH: Duration = Duration::from_micros(100);
/// A rest after rounds that found little ends when this much memory has come (2 MiB), which is
/// checked this often.
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
        // There is nothing to do although memory is short: there is nothing to move out.
        let is_short = self.core.budget.allowance() <= 0 && self.core.frames.free() == 0;
        self.core.barren.store(is_short, Relaxed);
        let there = self.core.slot.get(Counter::EvictablePages);
        self.core.least.store(is_short && there <= LEAST_WORKING_PAGES.unsigned_abs(), Relaxed);
        let shares = self.core.shares.load(Relaxed);
        let resident = self.core.slot.get(Counter::ResidentPages);
        let grows = std::mem::replace(&mut self.resident_before, resident) != resident;
        // In a large tree every process looks less often: together they would look all the time.
        let processes = at_most::<u32, _>(self.core.board.processes().count());
        let growing = GROWING_STEP * processes.clamp(1, MOST_STEPS);
        let most = match (shares, grows) {
            (true, true) => growing.min(IDLE_STEP),
            (true, false) => growing.max(SHARING_STEP),
            (false, _) => IDLE_STEP,
        };
        self.core.budget.wait_for_kick(most);
    }

    /// One burst. On the CPU of the faulting thread it is a short one: faults wait for its end.
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
                // Whoever kicks does not wait, and the next lap would find as little.
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

    /// Alternates between moving pages out and releasing frames to the kernel, this many of each: a
    /// thread that waits for room has it after the first step. Returns the number of pages.
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
            self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
        }
        released += self.give_back(release_pages - released);
        (evicted, released)
    }

    /// Releases about this many frames to the kernel, and notifies threads that wait for room.
    fn give_back(&mut self, pages: i64) -> i64 {
        let released = self.release(pages);
        if released > 0 {
            self.core.budget.refund(released);
            self.core.frames.announce();
        }
        released
    }

    /// Rests after a round that found little, unless memory grows meanwhile. Nobody waits for room.
    fn ease_off(&mut self, rest: Duration) {
        // Others may wait for what is on its way.
        self.drain();
        self.core.barren.store(self.core.frames.free() == 0, Relaxed);
        let (until, before) = (Instant::now() + rest, self.core.budget.allowance());
        while Instant::now() < until && before - self.core.budget.allowance() < GROWN_PAGES {
            std::thread::sleep(REST_STEP);
        }
    }
}
