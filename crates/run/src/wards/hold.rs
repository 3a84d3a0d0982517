//! Near the limit, processes stand still until they have sidecars and memory has been moved out.
//!
//! To put a sidecar in takes some ms, or some dozens where others want the processors, and there is
//! one keeper: of several children of a fork the last would wait for all the others, and write to
//! all that it shares meanwhile, which nobody sees. So all that are to get a sidecar are stopped at
//! once, and go on together: when what is counted is back where the limit counts as held, when
//! nothing more leaves, or when the time is over.

use std::time::{Duration, Instant};

use farpool_board::Board;
use farpool_inject::{Pid, Standstill, standstill};

use super::{Admission, Sight, Wards, allowed_bytes, number, process};
use crate::sidecars;

/// The longest that processes stand still for their sidecars, and for memory to be moved out.
const STILL_TIME: Duration = Duration::from_secs(1);
/// They do not wait longer for memory to be moved out than since so much has left (1 MiB within 100
/// ms): much of what they have may have to stay.
const STALLED_BYTES: u64 = 1 << 20;
const STALLED_TIME: Duration = Duration::from_millis(100);
/// Between two looks meanwhile.
const STEP: Duration = Duration::from_millis(1);

/// How memory has left, while it is waited for.
#[derive(Debug)]
struct Outflow {
    least_bytes: u64,
    since: Instant,
}

impl Wards {
    /// Puts sidecars into those that are due, and those that become so meanwhile.
    pub(super) fn hold(&mut self, board: &Board, due: Vec<u32>) {
        if standstill(|still| self.hold_here(board, still)).is_err() {
            // There is no thread to be had.
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
            self.warn(board, sight.counted_bytes);
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
            self.hear();
        }
        for ward in &mut self.wards {
            let stopped = still.since(ward.pid);
            if !stopped.is_zero() {
                still.release(ward.pid);
                ward.goes_on(stopped);
            }
        }
    }

    /// Stops those that are due; returns those that stand still. What is attached to may hold far
    /// more than its limit to begin with, and is not kept waiting for that: one at a time is
    /// stopped.
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
        // A child that is about to be handed over is tried again; others may have to do without.
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

    /// Whether memory is above what is allowed, and leaves.
    fn flows(&self, sight: &Sight, outflow: &mut Option<Outflow>) -> bool {
        if !self.has_fit || sight.counted_bytes <= allowed_bytes(sight.limit_bytes) {
            return false;
        }
        let outflow = outflow.get_or_insert_with(|| Outflow::from(sight.counted_bytes));
        outflow.goes_on(sight.counted_bytes, Instant::now())
    }
}

/// Whether somebody without a sidecar stands still.
fn is_awaited(sight: &Sight, still: &Standstill) -> bool {
    let is_native = |pid: Pid| sight.native.iter().any(|(native, _)| *native == number(pid));
    still.pids().any(is_native)
}

impl Outflow {
    fn from(counted_bytes: u64) -> Outflow {
        Outflow { least_bytes: counted_bytes, since: Instant::now() }
    }

    /// Takes note of what is counted now; whether enough has left lately. Pure.
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
