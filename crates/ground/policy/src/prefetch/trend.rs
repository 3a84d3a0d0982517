//! Majority trend, the idea of Leap (Al Maruf and Chowdhury, ATC 2020).
//!
//! The distances between a thread's last faults vote on a stride: Boyer-Moore finds the one that
//! more than half of them share, first among the newest 8, then 16, then 32, so that a new trend is
//! seen early and a disturbed one is still found. Irregular faults in between do not break it. The
//! window doubles when a fault lands on the page after the last run, halves when it does not, and
//! is zero without a majority. Leap then fetches along the last trend anyway; here it does not:
//! without the swap cache's hit counter there is no sign that such a guess was useful.

use super::{MAX_PREFETCH_PAGES, PrefetchWindow, Prefetcher, threads::ThreadTable};

/// Distances remembered per thread.
const HISTORY: usize = 32;
/// The newest distances that vote first; doubled while they do not agree.
const FIRST_VOTERS: usize = 8;
/// Window of an unconfirmed trend.
const FIRST_WINDOW_PAGES: u32 = 2;
/// A longer stride is not a trend: it is what two regions used in turn look like. 16 MiB.
const STRIDE_MAX_PAGES: u64 = 4096;

/// Majority-trend prefetch, per thread.
#[derive(Debug)]
pub struct Trend {
    threads: ThreadTable<Track>,
}

/// State of one thread. 304 bytes.
#[derive(Debug, Clone, Default)]
struct Track {
    /// Distances between faults, newest at `newest`; 0 where there was none.
    distances: [i64; HISTORY],
    newest: usize,
    last_page: Option<u64>,
    /// The page after the last run and the stride of that run.
    expected: Option<(u64, i64)>,
    window: u32,
}

impl Trend {
    /// Creates a prefetcher without history.
    #[must_use]
    pub fn new() -> Self {
        Self { threads: ThreadTable::new() }
    }
}

impl Default for Trend {
    fn default() -> Self {
        Self::new()
    }
}

impl Prefetcher for Trend {
    fn on_fault(&mut self, thread: u32, page: u64, out: &mut PrefetchWindow) {
        *out = self.threads.of(thread).on_fault(page);
    }
}

impl Track {
    fn on_fault(&mut self, page: u64) -> PrefetchWindow {
        let confirmed = self.expected.filter(|(expected, _)| *expected == page);
        self.remember(page, confirmed);
        let Some(stride) = self.majority() else {
            self.window /= 2;
            self.expected = None;
            return PrefetchWindow::EMPTY;
        };
        self.window = self.next_window(confirmed.is_some());
        let window = PrefetchWindow::after(page, stride, self.window);
        let beyond = stride * (i64::from(window.len()) + 1);
        self.expected = Some((page.wrapping_add_signed(beyond), stride));
        window
    }

    fn next_window(&self, confirmed: bool) -> u32 {
        let window = if confirmed { self.window * 2 } else { self.window / 2 };
        window.clamp(FIRST_WINDOW_PAGES, MAX_PREFETCH_PAGES)
    }

    /// Records a fault. One on the page after a run counts as steps of the run's stride: the
    /// prefetched pages were used without a fault.
    fn remember(&mut self, page: u64, confirmed: Option<(u64, i64)>) {
        let distance = match (confirmed, self.last_page) {
            (Some((_, stride)), _) => stride,
            (None, Some(last)) => page.wrapping_sub(last).cast_signed(),
            (None, None) => 0,
        };
        self.last_page = Some(page);
        self.newest = (self.newest + 1) % HISTORY;
        self.distances[self.newest] = distance;
    }

    /// Returns the stride that most of the newest distances share; asks more of them until they
    /// agree.
    fn majority(&self) -> Option<i64> {
        let mut voters = FIRST_VOTERS;
        while voters <= HISTORY {
            let stride = self.majority_of(voters);
            if stride.is_some() {
                return stride;
            }
            voters *= 2;
        }
        None
    }

    /// A Boyer-Moore vote among the newest `voters`, then the count that proves it.
    fn majority_of(&self, voters: usize) -> Option<i64> {
        let newest = |i: usize| self.distances[(self.newest + HISTORY - i) % HISTORY];
        let (mut candidate, mut lead) = (0, 0usize);
        for distance in (0..voters).map(newest) {
            match (lead, distance == candidate) {
                (0, _) => (candidate, lead) = (distance, 1),
                (_, true) => lead += 1,
                (_, false) => lead -= 1,
            }
        }
        let votes = (0..voters).filter(|i| newest(*i) == candidate).count();
        let is_stride = candidate != 0 && candidate.unsigned_abs() <= STRIDE_MAX_PAGES;
        (is_stride && votes > voters / 2).then_some(candidate)
    }
}
