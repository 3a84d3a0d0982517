//! Predicts the next pages: runs of first touches, and the prefetcher.
//!
//! Shared by all fault threads, because the scheduler decides which of them takes a fault.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use farpool_board::Settings;
use farpool_policy::reserve::zero_run_pages;
use farpool_policy::{PrefetchKind, PrefetchWindow, Prefetcher};
use farpool_units::{PAGE_BYTES, exactly};

/// Threads whose first touches are followed separately; more threads share a place by their id.
const PLACES: usize = 16;
/// The run's length shares a word with the address it ends at, in the page's low bits.
const LENGTH_BITS: u64 = PAGE_BYTES as u64 - 1;

/// See the module's description.
#[derive(Debug)]
pub struct Streams {
    /// Where the last run of first touches ended, and its length.
    zero_runs: [AtomicU64; PLACES],
    prefetcher: Mutex<Box<dyn Prefetcher>>,
}

impl Streams {
    pub fn new(settings: &Settings) -> Streams {
        let kind: PrefetchKind = settings.prefetch_policy.parse().unwrap_or_default();
        Streams {
            zero_runs: [const { AtomicU64::new(0) }; PLACES],
            prefetcher: Mutex::new(kind.build()),
        }
    }

    /// Pages to fill at a first touch: one, or twice as many as the run that ended right here.
    pub fn zero_run(&self, thread: u32, address: usize) -> usize {
        let last = self.zero_runs[place(thread)].load(Relaxed);
        let follows = last & !LENGTH_BITS == address as u64;
        let run = exactly(last & LENGTH_BITS);
        zero_run_pages(follows.then_some(run))
    }

    /// Notes that a run of `pages` first touches now ends at `end`.
    pub fn filled(&self, thread: u32, end: usize, pages: usize) {
        let length = (pages as u64).min(LENGTH_BITS);
        self.zero_runs[place(thread)].store(end as u64 | length, Relaxed);
    }

    /// Predicts what to fetch besides the page at `address`.
    pub fn expect(&self, thread: u32, address: usize, window: &mut PrefetchWindow) {
        match self.prefetcher.lock() {
            Ok(mut prefetcher) => {
                prefetcher.on_fault(thread, (address / PAGE_BYTES) as u64, window);
            }
            Err(_) => *window = PrefetchWindow::EMPTY,
        }
    }
}

fn place(thread: u32) -> usize {
    thread as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> Streams {
        Streams {
            zero_runs: [const { AtomicU64::new(0) }; PLACES],
            prefetcher: Mutex::new(PrefetchKind::None.build()),
        }
    }

    #[test]
    fn runs_double_while_touches_follow_each_other() {
        let streams = streams();
        assert_eq!(streams.zero_run(1, 0x10_000), 1);
        streams.filled(1, 0x11_000, 1);
        assert_eq!(streams.zero_run(1, 0x11_000), 2);
        streams.filled(1, 0x13_000, 2);
        assert_eq!(streams.zero_run(1, 0x13_000), 4);
        assert_eq!(streams.zero_run(1, 0x50_000), 1, "elsewhere");
        assert_eq!(streams.zero_run(2, 0x13_000), 1, "another thread");
    }
}
