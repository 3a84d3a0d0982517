//! Detects that a tree thrashes: its processes do little but bring pages in, which push each
//! other's out.
//!
//! It uses counts that exist anyway: a process is stalled if it fetched many pages recently and had
//! hardly any CPU time for each, about what a fetch takes by itself. One stalled process may simply
//! have more data than memory. When there are more of them than the CPUs could run, each of which
//! would have room alone, they are better served one after the other ([`crate::shared::turn`]): 20
//! sorting PostgreSQL connections at a quarter of their memory were not done after 150 seconds and
//! six million fetches, each with 5 MiB.

use std::time::Duration;

use farpool_board::Counter;
use farpool_kernel::process_cpu_time;
use farpool_units::at_most;

use crate::core::Core;
use crate::shared::budget::{self, Tree};

/// The window in which a process is judged.
const WINDOW_MS: u32 = 100;
/// Fetches in a window below which a process is not stalled but waits for something else.
const LEAST_FETCHES: u64 = 50;
/// CPU time for each fetch, below which a process does little else: a fetch with its eviction takes
/// 10 to 60 us of the CPUs, more with many processes than with few.
const STALLED_CPU: Duration = Duration::from_micros(100);
/// The tree thrashes if it has more stalled processes than this for each CPU: even if they had
/// memory they would wait for a CPU longer than they ran.
const STALLED_PROCESSES_OF_CPU: i64 = 2;
/// And if it makes this many fetches for each CPU in a window, so that a good part of the CPU's
/// time goes there.
const FETCHES_OF_CPU: i64 = 1_000;

/// What one process did in the last window.
#[derive(Debug, Default)]
pub struct Stall {
    since_ms: Option<u32>,
    fetches_before: u64,
    cpu_before: Duration,
}

impl Stall {
    /// Whether the process should ask for a turn. Judges it once per window, and publishes the
    /// result.
    pub fn wants_turn(&mut self, core: &Core, now_ms: u32) -> bool {
        let (slot, board) = (core.slot, core.board);
        let fetches = slot.get(Counter::DemandFetches);
        let Some(stalled) = self.look(now_ms, fetches, process_cpu_time) else {
            return false;
        };
        slot.set(Counter::StalledFetches, stalled);
        if stalled == 0 {
            return false;
        }
        let tree = Tree::read(board);
        let own = slot.get(Counter::ResidentPages) + slot.get(Counter::FarPages);
        let cpus = at_most(core.crew.cpus().len());
        let limit = budget::limit_pages(board, &tree);
        wants_turn(&tree, limit, at_most(own), cpus)
    }

    /// At the end of a window: the fetches in it, or 0 if the process was not stalled. `fetches`
    /// and `cpu` are the process's counts so far; `now_ms` may start anywhere and wraps.
    fn look(&mut self, now_ms: u32, fetches: u64, cpu: impl FnOnce() -> Duration) -> Option<u64> {
        let since_ms = *self.since_ms.get_or_insert(now_ms);
        let elapsed_ms = now_ms.wrapping_sub(since_ms);
        if elapsed_ms < WINDOW_MS {
            return None;
        }
        let cpu = cpu();
        let fetched = fetches - std::mem::replace(&mut self.fetches_before, fetches);
        let used = cpu.saturating_sub(std::mem::replace(&mut self.cpu_before, cpu));
        self.since_ms = Some(now_ms);
        let in_window = fetched * u64::from(WINDOW_MS) / u64::from(elapsed_ms);
        let each = used / at_most::<u32, _>(fetched.max(1));
        Some(if in_window >= LEAST_FETCHES && each <= STALLED_CPU { in_window } else { 0 })
    }
}

/// Whether a stalled process with `own_pages`, local and far, should ask for a turn. Pure.
fn wants_turn(tree: &Tree, limit: i64, own_pages: i64, cpus: i64) -> bool {
    tree.stalled_processes > STALLED_PROCESSES_OF_CPU * cpus
        && tree.stalled_fetches >= FETCHES_OF_CPU * cpus
        && own_pages <= limit - tree.shared_pages.min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_a_window(fetches: u64, cpu_ms: u64) -> Option<u64> {
        let (mut stall, start_ms) = (Stall::default(), u32::MAX - 20);
        assert_eq!(stall.look(start_ms, 0, || Duration::ZERO), None);
        assert_eq!(stall.look(start_ms.wrapping_add(99), fetches, || Duration::ZERO), None);
        stall.look(start_ms.wrapping_add(200), fetches, || Duration::from_millis(cpu_ms))
    }

    #[test]
    fn who_does_little_but_fetch_is_stalled() {
        assert_eq!(after_a_window(400, 10), Some(200), "25 us a fetch");
        assert_eq!(after_a_window(400, 100), Some(0), "it works 250 us with each page");
        assert_eq!(after_a_window(80, 1), Some(0), "hardly any fetches");
    }

    #[test]
    fn turns_are_for_many_that_fit_alone() {
        let limit = 40_000;
        let tree = |stalled_processes, stalled_fetches| Tree {
            stalled_processes,
            stalled_fetches,
            shared_pages: 3_000,
            ..Tree::default()
        };
        assert!(wants_turn(&tree(20, 4_500), limit, 9_000, 2));
        assert!(!wants_turn(&tree(4, 4_500), limit, 9_000, 2), "the CPUs can run them");
        assert!(!wants_turn(&tree(20, 1_500), limit, 9_000, 2), "there is time for more");
        assert!(!wants_turn(&tree(20, 4_500), limit, 38_000, 2), "it does not fit alone");
    }
}
