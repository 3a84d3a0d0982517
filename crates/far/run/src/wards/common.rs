//! Shared memory of processes without sidecars. It cannot be moved, but counts: up to half of the
//! limit, as for processes that have one.

use std::time::{Duration, Instant};

use farpool_board::{Board, Counter};
use farpool_units::PAGE_BYTES_U64;

use crate::holder::Holder;

/// Shortest pause between two counts; longer if these take more than this part of a processor. What
/// grows meanwhile could not be moved in any case.
const STEP: Duration = Duration::from_millis(20);
const COUNT_PART: u32 = 50;
/// Less is ignored: nearly every process maps this much of files.
const LEAST_BYTES: u64 = 4 << 20;

/// The most that any process had at the last count: it is mostly the same memory in all.
#[derive(Debug, Default)]
pub(super) struct CommonCount {
    pub bytes: u64,
    due: Option<Instant>,
}

impl CommonCount {
    /// What it adds to the shared memory on the board.
    pub fn count(
        &mut self,
        board: &Board,
        limit_bytes: u64,
        pids: impl Iterator<Item = u32>,
    ) -> u64 {
        let began = Instant::now();
        if self.due.is_none_or(|due| began >= due) {
            self.bytes = pids.fold(0, |most, pid| most.max(shared_bytes(pid, most)));
            self.due = Some(began + STEP.max(began.elapsed() * COUNT_PART));
        }
        let on_board =
            board.processes().map(|slot| slot.get(Counter::SharedPages) * PAGE_BYTES_U64);
        let half = limit_bytes / 2;
        self.bytes.min(half).saturating_sub(on_board.max().unwrap_or(0).min(half))
    }
}

/// Shared memory of a process, if that may be more than `known`; else 0.
pub(crate) fn shared_bytes(pid: u32, known: u64) -> u64 {
    let Some(holder) = Holder::of(pid) else { return 0 };
    if holder.resident().shared_pages * PAGE_BYTES_U64 <= known.max(LEAST_BYTES) {
        return 0;
    }
    let status = std::fs::read_to_string(holder.folder().join("status")).unwrap_or_default();
    shared_in(&status).unwrap_or(0)
}

/// Shared memory in a process's `status`, in bytes. Pure.
fn shared_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_told_apart_from_files() {
        let status = "RssAnon:\t 8 kB\nRssFile:\t 4096 kB\nRssShmem:\t 102400 kB\n";
        assert_eq!(shared_in(status), Some(100 << 20));
        assert_eq!(shared_in("RssAnon:\t 8 kB\n"), None);
        assert_eq!(shared_bytes(std::process::id(), u64::MAX), 0);
    }
}
