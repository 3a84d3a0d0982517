//! Read-ahead along runs of neighbouring pages.
//!
//! Each thread has a few streams. A fault next to the last fault of a stream (one page up or down)
//! starts its read-ahead with 4 pages; each fault on the page after the run doubles the window up
//! to 64. A fault inside the run means that it was evicted again or never came: the
//! window is halved. A full window ends at a chunk boundary, so that a long scan faults once
//! per chunk and what it brings in can leave again whole.
//!
//! Streams need two neighbouring faults in a row to start, which random access over N pages gives
//! with a chance of 2 * STREAMS / N a fault: nothing, from a few thousand pages on. But values that
//! lie across two pages give such pairs all the time, and nothing after them (redis with values of
//! 1 KiB: half a page fetched in vain for each fault, a fifth of its throughput). So a thread whose
//! streams end where they began comes into doubt: then three neighbours are needed, until streams
//! go on again.

use farpool_units::exactly;

use super::{MAX_PREFETCH_PAGES, PrefetchWindow, Prefetcher, threads::ThreadTable};

/// Streams followed per thread: a merge or a matrix product walks a handful at once. With more
/// the longest unused is forgotten.
const STREAMS: usize = 8;
/// First window in pages: little is lost if the run ends at once.
const FIRST_WINDOW_PAGES: u32 = 4;
/// Faults of its thread for which a stream outlives stray faults between its own.
const LIVE_FAULTS: u64 = 64;
/// A fault this many pages past the expected one still continues a stream with a window: pages in
/// between were resident already.
const SLACK_PAGES: u64 = 16;

/// Streams in a row that ended with their first window before there is doubt; each that went on
/// halves what was counted.
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
    /// Streams that ended where they began, lately.
    vain: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The last fault.
    page: u64,
    /// The page after the run fetched ahead, where the next fault is expected.
    expected: u64,
    /// +1 or -1; 0 = one fault seen, direction not known.
    direction: i64,
    /// 0 = none yet.
    window: u32,
    /// Nothing has come of the first window so far.
    is_new: bool,
    /// The thread's fault counter at the last use; 0 = free.
    used_at: u64,
}

/// What a fault is to a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// It is the page after the run (or soon after): the run was wanted.
    Confirms(i64),
    /// It is inside the run: the run was not there.
    Misses,
    None,
}

impl Sequential {
    /// A read-ahead that has seen nothing yet.
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

    /// Remembers `page` as the possible start of a stream, in place of the longest unused that
    /// is no stream yet or has rested long.
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
    /// A stream that led somewhere not long ago is not given up for a stray fault.
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
        // Both distances are taken along the direction, so one comparison serves both ways.
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

    /// `doubts`: two neighbours do not make a stream.
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
