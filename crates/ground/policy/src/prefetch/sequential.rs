//! Read-ahead along runs of neighbouring pages.
//!
//! Each thread has a few streams. A fault next to the last fault of a stream (one page up or down)
//! starts its read-ahead with 4 pages; each fault on the page after the run doubles the window up
//! to 64. A fault inside the run means that the page was evicted again or never arrived: the window
//! is halved. A full window ends at a chunk boundary, so that a long scan faults once per chunk and
//! each fetched chunk can be evicted whole.
//!
//! Two neighbouring faults in a row start a stream, which random access over N pages gives with a
//! probability of 2 * STREAMS / N per fault: negligible from a few thousand pages on. But values
//! that lie across two pages give such pairs all the time without a run behind them (redis with
//! values of 1 KiB: half a page fetched in vain for each fault, a fifth of its throughput). So a
//! thread whose streams end with their first window comes into doubt: then three neighbours are
//! needed, until streams continue again.

use farpool_units::exactly;

use super::{MAX_PREFETCH_PAGES, PrefetchWindow, Prefetcher, threads::ThreadTable};

/// Streams tracked per thread: a merge or a matrix product walks a handful at once. Beyond that the
/// least recently used is dropped.
const STREAMS: usize = 8;
/// First window in pages: little is lost if the run ends at once.
const FIRST_WINDOW_PAGES: u32 = 4;
/// Faults of its thread that a stream survives between two of its own.
const LIVE_FAULTS: u64 = 64;
/// A fault this many pages past the expected one still continues a stream with a window: the pages
/// in between were already resident.
const SLACK_PAGES: u64 = 16;

/// Streams in a row that ended with their first window before the thread comes into doubt; each
/// stream that continues halves the count.
const DOUBT: u32 = 4;
const MOST_DOUBT: u32 = 8;

/// Sequential read-ahead: up, down, several streams per thread.
#[derive(Debug)]
pub struct Sequential {
    threads: ThreadTable<Streams>,
}

#[derive(Debug, Clone, Default)]
struct Streams {
    streams: [Stream; STREAMS],
    faults: u64,
    /// Recent streams that ended with their first window.
    vain: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The last fault.
    page: u64,
    /// The page after the prefetched run, where the next fault is expected.
    expected: u64,
    /// +1 or -1; 0 = one fault seen, direction not known.
    direction: i64,
    /// Window in pages; 0 = none yet.
    window: u32,
    /// The first window has not been confirmed yet.
    is_new: bool,
    /// The thread's fault counter at the last use; 0 = free.
    used_at: u64,
}

/// The relation of a fault to a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// It is on the page after the run (or soon after): the run was used.
    Confirms(i64),
    /// It is inside the run: the page was not resident.
    Misses,
    None,
}

impl Sequential {
    /// Creates a read-ahead without history.
    #[must_use]
    pub fn new() -> Self {
        Self { threads: ThreadTable::new() }
    }
}

impl Default for Sequential {
    fn default() -> Self {
        Self::new()
    }
}

impl Prefetcher for Sequential {
    fn on_fault(&mut self, thread: u32, page: u64, out: &mut PrefetchWindow) {
        *out = self.threads.of(thread).on_fault(page);
    }
}

impl Streams {
    fn on_fault(&mut self, page: u64) -> PrefetchWindow {
        self.faults += 1;
        let fits = self.streams.iter().map(|stream| stream.fit(page)).enumerate();
        let Some((at, fit)) = fits.into_iter().find(|(_, fit)| *fit != Fit::None) else {
            self.start(page);
            return PrefetchWindow::EMPTY;
        };
        let stream = &mut self.streams[at];
        stream.used_at = self.faults;
        if fit != Fit::Misses && stream.is_new {
            stream.is_new = false;
            self.vain /= 2;
        }
        stream.advance(page, fit, self.vain >= DOUBT)
    }

    /// Remembers `page` as the possible start of a stream. Replaces the least recently used entry
    /// that is not yet a stream or has been idle for long.
    fn start(&mut self, page: u64) {
        let now = self.faults;
        let streams = self.streams.iter_mut();
        let oldest = streams.min_by_key(|stream| (stream.is_live(now), stream.used_at));
        if let Some(stream) = oldest {
            self.vain = (self.vain + u32::from(stream.is_new)).min(MOST_DOUBT);
            *stream = Stream { page, used_at: self.faults, ..Stream::default() };
        }
    }
}

impl Stream {
    /// True if the stream was recently in use: then a stray fault does not replace it.
    fn is_live(&self, now: u64) -> bool {
        self.direction != 0 && now - self.used_at < LIVE_FAULTS
    }

    fn fit(&self, page: u64) -> Fit {
        if self.used_at == 0 {
            return Fit::None;
        }
        if self.direction == 0 {
            return match page.wrapping_sub(self.page) {
                1 => Fit::Confirms(1),
                u64::MAX => Fit::Confirms(-1),
                _ => Fit::None,
            };
        }
        // Both distances are measured along the direction, so one comparison serves both ways.
        let (past_expected, past_fault) = if self.direction > 0 {
            (page.wrapping_sub(self.expected), page.wrapping_sub(self.page))
        } else {
            (self.expected.wrapping_sub(page), self.page.wrapping_sub(page))
        };
        let slack = if self.window == 0 { 1 } else { SLACK_PAGES };
        if past_expected < slack {
            Fit::Confirms(self.direction)
        } else if past_fault <= u64::from(self.window) {
            Fit::Misses
        } else {
            Fit::None
        }
    }

    /// Advances the stream to a fault on `page`; with `doubts` two neighbours do not make a stream.
    fn advance(&mut self, page: u64, fit: Fit, doubts: bool) -> PrefetchWindow {
        self.window = match fit {
            Fit::Confirms(direction) => {
                let begins = self.direction == 0;
                self.direction = direction;
                self.is_new = self.window == 0 && !(begins && doubts);
                if begins && doubts {
                    0
                } else {
                    (self.window * 2).clamp(FIRST_WINDOW_PAGES, MAX_PREFETCH_PAGES)
                }
            }
            Fit::Misses | Fit::None if self.window == 0 => 0,
            Fit::Misses | Fit::None => (self.window / 2).max(FIRST_WINDOW_PAGES),
        };
        let window = PrefetchWindow::after(page, self.direction, self.aligned_window(page));
        self.page = page;
        let beyond = i64::from(window.len()) + 1;
        self.expected = page.wrapping_add_signed(self.direction * beyond);
        window
    }

    /// A full window is cut at the end of the chunk, unless that would more than halve it.
    fn aligned_window(&self, page: u64) -> u32 {
        let offset: u32 = exactly(page % u64::from(MAX_PREFETCH_PAGES));
        let to_end = if self.direction > 0 { MAX_PREFETCH_PAGES - 1 - offset } else { offset };
        let cut = self.window == MAX_PREFETCH_PAGES && to_end >= MAX_PREFETCH_PAGES / 2;
        if cut { to_end } else { self.window }
    }
}
