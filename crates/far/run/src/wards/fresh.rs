//! What processes with sidecars hold at this moment.
//!
//! A sidecar publishes that on the board itself, but not while it waits for the lock of the address
//! space behind threads that map memory and fill it: with 64 of these the board was 55 MiB behind.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use farpool_board::{Board, Counter};
use farpool_kernel::thread_cpu_time;
use farpool_units::PAGE_BYTES_U64;

use crate::proc::anonymous_bytes;

/// Counting takes at most this part of a processor: large trees are counted less often.
const COUNT_PART: u32 = 50;

/// What each process held at the last count, and when the next is due.
#[derive(Debug, Default)]
pub(super) struct FreshCount {
    held_bytes: HashMap<u32, u64>,
    due: Option<Instant>,
}

impl FreshCount {
    /// The anonymous bytes of these processes, as the kernel reports them now (or at the last
    /// count, if it is too early for another), each shared page once.
    pub fn count(&mut self, board: &Board, pids: &[u32]) -> u64 {
        let (began, used) = (Instant::now(), thread_cpu_time());
        if self.due.is_none_or(|due| began >= due) {
            let slots = board.processes();
            let elsewhere_pages: HashMap<u32, u64> = slots
                .map(|slot| (slot.pid.load(Relaxed), slot.get(Counter::ElsewherePages)))
                .collect();
            let held = |pid: &u32| {
                let elsewhere = elsewhere_pages.get(pid).copied().unwrap_or(0) * PAGE_BYTES_U64;
                // What is shared was counted earlier, and may have been freed since.
                Some((*pid, anonymous_bytes(*pid)?.saturating_sub(elsewhere)))
            };
            self.held_bytes = pids.iter().filter_map(held).collect();
            let took = thread_cpu_time().saturating_sub(used);
            self.due = Some(began + took * COUNT_PART);
        }
        pids.iter().filter_map(|pid| self.held_bytes.get(pid)).sum()
    }
}
