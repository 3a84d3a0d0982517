//! Prefetch: which pages to fetch beside the one that faulted.
//!
//! A prefetcher sees only faults: (thread, page). Prefetched pages do not fault, so the only sign
//! that they were used is the next fault: it falls on the first page *after* the run that was
//! fetched. That fault confirms the run, and the next run is longer.
//!
//! The first rule is to do no harm: a page fetched in vain costs the blade, the link and a local
//! frame, so access without a pattern must give (almost) no candidates. `tests/prefetch.rs` checks
//! that as a property.

mod sequential;
mod threads;
mod trend;

pub use sequential::Sequential;
pub use trend::Trend;

use crate::UnknownPolicy;
use std::fmt::Debug;

use farpool_units::at_most;

/// The most candidates per fault: one chunk, 256 KiB. Longer runs gain nothing from batching (0.1
/// us a page from 64 on) and make a wrong guess more expensive. Windows are cut to it.
pub const MAX_PREFETCH_PAGES: u32 = 64;

/// Candidates: `count` pages from `first`, `stride` pages apart, in the order of expected use.
///
/// The caller drops those outside the region, already resident or on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefetchWindow {
    first: u64,
    stride: i64,
    count: u32,
}

impl PrefetchWindow {
    /// No candidates.
    pub const EMPTY: Self = Self { first: 0, stride: 1, count: 0 };

    /// Returns the `count` pages after `fault`, `stride` apart, cut to [`MAX_PREFETCH_PAGES`] and
    /// to valid page numbers.
    fn after(fault: u64, stride: i64, count: u32) -> Self {
        let Some(first) = fault.checked_add_signed(stride) else {
            return Self::EMPTY;
        };
        let room = if stride > 0 { u64::MAX - first } else { first };
        let more = room.checked_div(stride.unsigned_abs()).unwrap_or(0);
        let more = at_most::<u32, _>(more).saturating_add(1);
        Self { first, stride, count: count.min(MAX_PREFETCH_PAGES).min(more) }
    }

    /// Returns the number of candidates.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.count
    }

    /// True if there are no candidates.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the distance in pages between candidates; may be negative.
    #[must_use]
    pub fn stride(&self) -> i64 {
        self.stride
    }

    /// Returns the candidates, in the order of expected use.
    pub fn pages(&self) -> impl Iterator<Item = u64> + use<> {
        let Self { first, stride, count } = *self;
        (0..i64::from(count)).map(move |i| first.wrapping_add_signed(stride.wrapping_mul(i)))
    }

    /// Returns the candidates as one run in address order if they are neighbours.
    #[must_use]
    pub fn as_run(&self) -> Option<std::ops::Range<u64>> {
        let count = u64::from(self.count);
        match self.stride {
            1 => Some(self.first..self.first.saturating_add(count)),
            -1 if count > 0 => Some(self.first + 1 - count..self.first + 1),
            _ => None,
        }
    }
}

/// Learns from faults what to prefetch. No call allocates.
pub trait Prefetcher: Debug + Send {
    /// Handles a fault of `thread` (a kernel's thread ID; 0 if unknown) on `page` and sets `out` to
    /// the candidates, which may be none.
    fn on_fault(&mut self, thread: u32, page: u64, out: &mut PrefetchWindow);
}

/// Prefetches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoPrefetch;

impl Prefetcher for NoPrefetch {
    fn on_fault(&mut self, _thread: u32, _page: u64, out: &mut PrefetchWindow) {
        *out = PrefetchWindow::EMPTY;
    }
}

/// The prefetchers by name.
///
/// The default is `sequential`: it recognises several interleaved streams of a thread, which the
/// majority trend does not, and prefetches nothing at random access; see `tests/prefetch.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PrefetchKind {
    /// No prefetch.
    None,
    /// Read-ahead along runs of neighbouring pages, up or down.
    #[default]
    Sequential,
    /// Majority trend: any stride that most of a thread's last faults share.
    Trend,
}

impl PrefetchKind {
    /// Every kind, in declaration order.
    pub const ALL: [Self; 3] = [Self::None, Self::Sequential, Self::Trend];

    /// The name used on the command line and in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sequential => "sequential",
            Self::Trend => "trend",
        }
    }

    /// Creates a prefetcher without history.
    #[must_use]
    pub fn build(self) -> Box<dyn Prefetcher> {
        match self {
            Self::None => Box::new(NoPrefetch),
            Self::Sequential => Box::new(Sequential::new()),
            Self::Trend => Box::new(Trend::new()),
        }
    }
}

impl std::fmt::Display for PrefetchKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for PrefetchKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let known = Self::ALL.map(Self::name);
        let at = known.iter().position(|k| *k == name);
        at.map(|i| Self::ALL[i]).ok_or_else(|| UnknownPolicy::new("prefetch", name, &known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_stop_where_page_numbers_do() {
        assert_eq!(PrefetchWindow::after(2, -1, 8).pages().collect::<Vec<_>>(), [1, 0]);
        assert_eq!(PrefetchWindow::after(2, -1, 8).as_run(), Some(0..2));
        assert!(PrefetchWindow::after(0, -1, 8).is_empty());
        assert!(PrefetchWindow::after(u64::MAX, 3, 8).is_empty());
        assert_eq!(PrefetchWindow::after(u64::MAX - 7, 3, 8).len(), 2);
        assert_eq!(PrefetchWindow::after(10, 5, 3).pages().collect::<Vec<_>>(), [15, 20, 25]);
        assert_eq!(PrefetchWindow::after(10, 5, 3).as_run(), None);
        assert_eq!(PrefetchWindow::after(10, 1, 1000).len(), MAX_PREFETCH_PAGES);
    }

    #[test]
    fn names_read_back() {
        for kind in PrefetchKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("readahead".parse::<PrefetchKind>().is_err());
    }
}
