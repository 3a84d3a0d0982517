//! What processes with sidecars hold at this moment.
//!
//! A sidecar publishes that on the board itself, but not while it waits for the lock of the address
//! space behind threads that map memory and fill it: with 64 of these the board was 55 MiB behind.
//! Nor while it moves much out at once: then the board has 27 MiB and more that have left.

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
        // One that was not there at the last count would otherwise count as nothing.
        let has_come = || pids.iter().any(|pid| !self.held_bytes.contains_key(pid));
        if self.due.is_none_or(|due| Instant::now() >= due) || has_come() {
            return self.count_now(board, pids);
        }
        pids.iter().filter_map(|pid| self.held_bytes.get(pid)).sum()
    }

    /// As [`FreshCount::count`], whether it is early or not.
    pub fn count_now(&mut self, board: &Board, pids: &[u32]) -> u64 {
        let (began, used) = (Instant::now(), thread_cpu_time());
        let slots = board.processes();
        let elsewhere_pages: HashMap<u32, u64> =
            slots.map(|slot| (slot.pid.load(Relaxed), slot.get(Counter::ElsewherePages))).collect();
        let held = |pid: &u32| {
            let elsewhere = elsewhere_pages.get(pid).copied().unwrap_or(0) * PAGE_BYTES_U64;
            // What is shared was counted earlier, and may have been freed since. A process that has
            // ended holds nothing.
            let held = anonymous_bytes(*pid).map_or(0, |held| held.saturating_sub(elsewhere));
            (*pid, held)
        };
        self.held_bytes = pids.iter().map(held).collect();
        let took = thread_cpu_time().saturating_sub(used);
        self.due = Some(began + took * COUNT_PART);
        self.held_bytes.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_board::{Settings, WhenFull};

    fn board(folder: &std::path::Path) -> Board {
        let settings = Settings {
            limit_bytes: 1 << 30,
            local_percent: 0,
            quota_bytes: 1 << 30,
            sharing_group: None,
            blades: Vec::new(),
            allow_remote_tcp: false,
            secures_tcp: false,
            sealing: farpool_board::Sealing::Sealed,
            redundancy: farpool_board::Redundancy::NONE,
            when_full: WhenFull::Fail,
            victim_policy: "clock".into(),
            prefetch_policy: "none".into(),
            pager_threads: 1,
            threshold_bytes: 65_536,
            deadline_ms: 10_000,
            verify_every_ms: 0,
            program: "test".into(),
        };
        Board::create(&folder.join("board"), &settings).expect("a board")
    }

    #[test]
    fn a_process_counts_as_soon_as_it_is_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let board = board(folder.path());
        let (own, mut fresh) = (std::process::id(), FreshCount::default());
        let alone = fresh.count(&board, &[own]);
        // Nothing is counted anew for what is known.
        fresh.due = Some(Instant::now() + std::time::Duration::from_secs(3600));
        assert_eq!(fresh.count(&board, &[own]), alone);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let both = fresh.count(&board, &[own, child.id()]);
        child.kill().expect("it is killed");
        child.wait().expect("it is ended");
        assert!(fresh.held_bytes[&child.id()] > 0, "{both} {alone}");
        assert_eq!(both, fresh.held_bytes.values().sum::<u64>());
        fresh.due = Some(Instant::now());
        let after = fresh.count(&board, &[own, child.id()]);
        assert_eq!(after, fresh.held_bytes[&own], "who has ended holds nothing");
    }
}
