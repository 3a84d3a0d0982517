//! What processes with sidecars hold at this moment.
//!
//! A sidecar puts that on the board itself, but not while it waits for the lock of the address
//! space behind threads that map memory and fill it: with 64 of these the board was 55 MiB behind.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter, Slot};

use super::{PAGE_BYTES, anonymous_bytes, number};
use crate::sidecars::Ward;

/// Counting takes at most this part of a processor, of large trees too: then it is done less often.
const COUNT_PART: u32 = 50;

/// When what processes hold is counted anew.
#[derive(Debug, Default)]
pub(super) struct FreshCount {
    due: Option<Instant>,
    last_bytes: u64,
}

impl FreshCount {
    /// The anonymous bytes of the processes with sidecars, as the kernel has them now (or had them
    /// lately, if it is too early to count again), each shared page once.
    pub fn count(&mut self, board: &Board, wards: &[Ward]) -> u64 {
        let (began, used) = (Instant::now(), processor_time());
        if self.due.is_some_and(|due| began < due) {
            return self.last_bytes;
        }
        let slots: Vec<&Slot> = board.processes().collect();
        let counted = wards.iter().map(|ward| {
            let pid = number(ward.pid);
            let slot = slots.iter().find(|slot| slot.pid.load(Relaxed) == pid);
            let elsewhere = slot.map_or(0, |slot| slot.get(Counter::ElsewherePages) * PAGE_BYTES);
            // What is shared was counted earlier, and may have been given up since.
            anonymous_bytes(pid).unwrap_or(0).saturating_sub(elsewhere)
        });
        self.last_bytes = counted.sum();
        self.due = Some(began + processor_time().saturating_sub(used) * COUNT_PART);
        self.last_bytes
    }
}

/// What the calling thread has used of processors.
fn processor_time() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}
