//! Near the limit, processes stand still until they have sidecars and memory has been moved out.
//!
//! Putting a sidecar in takes some ms, or some dozens where others want the processors, and there
//! is one keeper: of several children of a fork the last would wait for all the others, and
//! meanwhile write unseen to all that it shares. So all that are to get a sidecar are stopped at
//! once, and go on together: when what is counted is back where the limit counts as held, when
//! nothing more leaves, or when the time is over.
//!
//! Processes that have sidecars are stopped, too, when the limit is passed by half of the allowed
//! overrun, or would be passed by all of it before they stand still: memory that many threads map
//! and fill at once grows faster than it can be registered.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::Board;
use farpool_inject::{Pid, Standstill, standstill};

use super::{Admission, Sight, Wards, allowed_bytes, number, process};
use crate::sidecars;
use crate::stillness;

/// The longest that processes stand still for their sidecars, and for memory to be moved out.
const STILL_TIME: Duration = Duration::from_secs(1);
/// They go on earlier if less than this has left within this time (1 MiB within 100 ms): much of
/// what they have may have to stay.
const STALLED_BYTES: u64 = 1 << 20;
const STALLED_TIME: Duration = Duration::from_millis(100);
/// Pause between two checks meanwhile.
const STEP: Duration = Duration::from_millis(1);
/// Time until all threads of a process stand still: 64 of them, each of which first ends what it
/// does in the kernel, took 2 to 13 ms, and occasionally some dozens.
const STOPPING_TIME: Duration = Duration::from_millis(24);
/// How long a process with a sidecar that could not be stopped (it is traced or busy) is skipped.
const UNSTOPPABLE_TIME: Duration = Duration::from_secs(1);

/// Decides when processes that have sidecars are stopped.
#[derive(Debug, Default)]
pub(super) struct Overrun {
    /// They stood still for this overrun, and memory did not leave, or not within [`STILL_TIME`]:
    /// no process is stopped for it again.
    is_let_be: bool,
    /// Processes that could not be stopped, and when that was tried.
    unstoppable: HashMap<u32, Instant>,
    /// When memory was last counted, and the result.
    last: Option<(Instant, u64)>,
}

impl Overrun {
    /// Takes the present count. True if processes must stand still. Pure.
    fn is_due(&mut self, counted_bytes: u64, limit_bytes: u64, now: Instant) -> bool {
        let before = self.last.replace((now, counted_bytes));
        let coming_bytes = before.map_or(0, |before| growth(before, (now, counted_bytes)));
        let is_over = counted_bytes > brake_bytes(limit_bytes);
        let will_be = counted_bytes > limit_bytes
            && u128::from(counted_bytes) + coming_bytes > u128::from(allowed_bytes(limit_bytes));
        self.is_let_be &= is_over;
        (is_over || will_be) && !self.is_let_be
    }
}

/// Growth within [`STOPPING_TIME`] at the rate between the two counts. Pure.
fn growth((then, before): (Instant, u64), (now, after): (Instant, u64)) -> u128 {
    let time = now.saturating_duration_since(then).max(STEP);
    // Memory that has shrunk counts as not growing.
    let grown_bytes = u128::from(after.saturating_sub(before));
    grown_bytes * STOPPING_TIME.as_nanos() / time.as_nanos()
}

/// How memory leaves while processes stand still for it.
#[derive(Debug)]
struct Outflow {
    least_bytes: u64,
    since: Instant,
}

impl Wards {
    /// True if processes that have sidecars must stand still.
    pub(super) fn must_stop(&mut self, board: &Board, sight: &Sight) -> bool {
        let (counted, limit) = (sight.counted_bytes, sight.limit_bytes);
        let is_due = self.overrun.is_due(counted, limit, Instant::now());
        let is_share = board.header().local_percent.load(Relaxed) != 0;
        is_due && self.has_fit && !is_share && !self.is_leaving
    }

    /// Puts sidecars into the processes that are due, and those that become due meanwhile. With
    /// `must_stop`, those that have one stand still from the start.
    pub(super) fn hold(&mut self, board: &Board, due: Vec<u32>, must_stop: bool) {
        let held = standstill(|still| {
            if must_stop {
                self.stop_wards(still);
            }
            self.hold_here(board, still);
        });
        if held.is_err() {
            // No thread could be started.
            for pid in due {
                self.admit(pid, None);
            }
        }
    }

    fn hold_here(&mut self, board: &Board, still: &mut Standstill) {
        let (until, mut outflow) = (Instant::now() + STILL_TIME, None);
        while Instant::now() < until {
            let sight = self.see(board);
            // One call can have populated memory before its process could be stopped.
            self.judge(board, &sight);
            if self.must_stop(board, &sight) {
                self.stop_wards(still);
            }
            let due = self.due(&sight);
            let due = self.stop(due, still);
            if let Some(pid) = due.first() {
                self.admit_one(*pid, still);
                outflow = None;
            } else if is_awaited(&sight, still) || self.flows(&sight, &mut outflow) {
                sidecars::wait(&self.wards, None, STEP);
            } else {
                break;
            }
            self.hear(board);
            stillness::grant_all_at(&mut self.wards, still);
        }
        self.overrun.is_let_be |= Instant::now() >= until;
        for ward in &mut self.wards {
            let stopped = still.since(ward.pid);
            if !stopped.is_zero() {
                still.release(ward.pid);
                ward.goes_on(stopped);
            }
        }
    }

    /// Stops the processes that have sidecars.
    fn stop_wards(&mut self, still: &mut Standstill) {
        let unstoppable = &mut self.overrun.unstoppable;
        unstoppable.retain(|_, since| since.elapsed() < UNSTOPPABLE_TIME);
        for pid in self.wards.iter().map(|ward| ward.pid) {
            if !unstoppable.contains_key(&number(pid)) && still.stop(pid).is_err() {
                unstoppable.insert(number(pid), Instant::now());
            }
        }
    }

    /// Stops the processes that are due. Returns those that stand still. A tree that is attached to
    /// may hold far more than its limit to begin with, and is not kept waiting for that: one
    /// process at a time is stopped.
    fn stop(&mut self, mut due: Vec<u32>, still: &mut Standstill) -> Vec<u32> {
        if !self.has_fit {
            due.truncate(1);
        }
        due.retain(|pid| match process(*pid).map(|target| still.stop(target)) {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                self.stay_outside(*pid, &error.into());
                false
            }
            None => false,
        });
        due
    }

    fn admit_one(&mut self, pid: u32, still: &mut Standstill) {
        let admission = self.admit(pid, Some(still));
        // A child that is about to be handed over is tried again; others may have to go without.
        let goes_on = match admission {
            Admission::Entered => !self.has_fit,
            Admission::NotYet => false,
            Admission::Refused => true,
        };
        let Some(target) = process(pid).filter(|_| goes_on) else { return };
        let stopped = still.since(target);
        still.release(target);
        if let Some(ward) = self.wards.last_mut().filter(|ward| ward.pid == target) {
            ward.goes_on(stopped);
        }
    }

    /// True if more is counted than the limit allows, and memory is leaving.
    fn flows(&mut self, sight: &Sight, outflow: &mut Option<Outflow>) -> bool {
        if !self.has_fit || sight.counted_bytes <= brake_bytes(sight.limit_bytes) {
            return false;
        }
        let outflow = outflow.get_or_insert_with(|| Outflow::from(sight.counted_bytes));
        let goes_on = outflow.goes_on(sight.counted_bytes, Instant::now());
        self.overrun.is_let_be |= !goes_on;
        goes_on
    }
}

/// Where processes that have sidecars are stopped: half of the allowed overrun. Pure.
pub(super) fn brake_bytes(limit_bytes: u64) -> u64 {
    limit_bytes + (allowed_bytes(limit_bytes) - limit_bytes) / 2
}

/// True if a process without a sidecar stands still.
fn is_awaited(sight: &Sight, still: &Standstill) -> bool {
    let is_native = |pid: Pid| sight.native.iter().any(|(native, _)| *native == number(pid));
    still.pids().any(is_native)
}

impl Outflow {
    fn from(counted_bytes: u64) -> Outflow {
        Outflow { least_bytes: counted_bytes, since: Instant::now() }
    }

    /// Takes the present count. True if enough has left lately. Pure.
    fn goes_on(&mut self, counted_bytes: u64, now: Instant) -> bool {
        if counted_bytes.saturating_add(STALLED_BYTES) <= self.least_bytes {
            (self.least_bytes, self.since) = (counted_bytes, now);
        }
        now.saturating_duration_since(self.since) < STALLED_TIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_stand_still_before_the_limit_is_passed_by_too_much() {
        use farpool_units::MIB;
        let (mut overrun, began) = (Overrun::default(), Instant::now());
        let mut is_due = |counted_mib: u64, ms: u64| {
            overrun.is_due(counted_mib * MIB, 32 * MIB, began + Duration::from_millis(ms))
        };
        assert!(!is_due(20, 0));
        assert!(!is_due(30, 2), "there is room");
        assert!(is_due(40, 4), "80 MiB come before it stands");
        assert!(!is_due(40, 6));
        assert!(!is_due(42, 10), "8 MiB come");
        assert!(!is_due(48, 30));
        assert!(is_due(50, 60), "half of what may be");
        overrun.is_let_be = true;
        assert!(!overrun.is_due(50 * MIB, 32 * MIB, began));
        assert!(!overrun.is_due(40 * MIB, 32 * MIB, began));
        assert!(overrun.is_due(50 * MIB, 32 * MIB, began));
    }

    #[test]
    fn memory_is_waited_for_while_it_leaves() {
        let mut outflow = Outflow::from(64 << 20);
        let at = |time: Duration, began: Instant| began + time;
        let began = outflow.since;
        assert!(outflow.goes_on(64 << 20, at(STALLED_TIME / 2, began)));
        assert!(outflow.goes_on(62 << 20, at(STALLED_TIME * 2, began)));
        assert!(outflow.goes_on(62 << 20, at(STALLED_TIME * 5 / 2, began)));
        // It has grown again, or hardly anything has left.
        assert!(!outflow.goes_on(63 << 20, at(STALLED_TIME * 3, began)));
        assert!(!outflow.goes_on((62 << 20) - 1, at(STALLED_TIME * 3, began)));
    }
}
