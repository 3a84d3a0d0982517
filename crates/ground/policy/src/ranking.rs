//! Caches whose caller measures the space: the key-value store's, which is bounded by bytes.
//!
//! A [`crate::PageCache`] holds a fixed number of pages and decides itself when one leaves. A
//! [`Ranking`] is told which pages enter, and evicts a page on request. No page leaves otherwise,
//! not even at a hit. Policies that divide their capacity into parts take as the whole the number
//! of pages that fit now: it grows with the resident pages, and [`Ranking::set_capacity`] lowers it
//! when fewer fit.
//!
//! The caller assigns page numbers and reuses them, so a policy that remembers evicted pages
//! reports which of them it has *forgotten*. A caller that numbers all known pages from 0 on can
//! grow and shrink the tables with them: see [`Renumber`].
//!
//! Differences from [`crate::PageCache`] under the same name: the victim is chosen before the page
//! that replaces it is known, which moves ARC's balance one step later; SLRU and LIRS evict no page
//! at a hit, and the lowest segment or the pages referenced far apart take what the others leave;
//! SLRU's and W-TinyLFU's new pages start at the bottom from the first; W-TinyLFU's sketch knows
//! pages by name and counts to 255, in four counters of eight for each page.
//!
//! `crates/ground/policy/tests/rankings.rs` tests the properties.

use std::fmt::Debug;

use crate::cache::{Arc, CacheKind, Lfu, Lirs, NamedTinyLfu, S3Fifo, Slru, TwoQ};
use crate::tables::Renumber;
use crate::victim::{Clock, Fifo, Lru, Random, Sieve, VictimPolicy};

/// The most pages that a ranking can number.
pub const RANKED_PAGES_MAX: usize = u32::MAX as usize - 1;

/// Decides which page leaves on request.
///
/// Page numbers at or above the page count are a programming error and panic. Pages that are
/// neither resident nor remembered any more are appended to `forgotten`; a victim or a removed page
/// is not, ask [`Self::knows`].
pub trait Ranking: Renumber + Debug + Send {
    /// Inserts `page`, which must not be resident. `name` stays the same when the page enters again
    /// under another number.
    fn insert(&mut self, page: u32, name: u32, forgotten: &mut Vec<u32>);

    /// References `page`. False, without effect, if it is not resident.
    fn touch(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool;

    /// Removes and returns the next victim; None if no page is resident.
    fn victim(&mut self, forgotten: &mut Vec<u32>) -> Option<u32>;

    /// Forgets `page`, resident or not. True if it was resident.
    fn remove(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool;

    /// Sets the number of pages that fit now. It is at least 1 and at least the number of resident
    /// pages, whatever is given.
    fn set_capacity(&mut self, capacity: u32, forgotten: &mut Vec<u32>);

    /// True if `page` is resident.
    fn contains(&self, page: u32) -> bool;

    /// True if `page` is resident or remembered.
    fn knows(&self, page: u32) -> bool;

    /// Returns the number of resident pages.
    fn len(&self) -> usize;

    /// True if no page is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Victim policies remember nothing and have no parts.
impl<P: VictimPolicy + Renumber> Ranking for P {
    fn insert(&mut self, page: u32, _: u32, _: &mut Vec<u32>) {
        VictimPolicy::insert(self, page);
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        VictimPolicy::touch(self, page)
    }

    fn victim(&mut self, _: &mut Vec<u32>) -> Option<u32> {
        VictimPolicy::victim(self)
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        VictimPolicy::remove(self, page)
    }

    fn set_capacity(&mut self, _: u32, _: &mut Vec<u32>) {}

    fn contains(&self, page: u32) -> bool {
        VictimPolicy::contains(self, page)
    }

    fn knows(&self, page: u32) -> bool {
        VictimPolicy::contains(self, page)
    }

    fn len(&self) -> usize {
        VictimPolicy::len(self)
    }
}

impl CacheKind {
    /// Creates an empty ranking without tables; only `Random` uses `seed`.
    #[must_use]
    pub fn ranking(self, seed: u64) -> Box<dyn Ranking> {
        match self {
            Self::Lru => Box::new(Lru::new(0)),
            Self::Fifo => Box::new(Fifo::new(0)),
            Self::Clock => Box::new(Clock::new(0)),
            Self::Sieve => Box::new(Sieve::new(0)),
            Self::Random => Box::new(Random::new(0, seed)),
            Self::Lfu => Box::new(Lfu::new(0, 1)),
            Self::S3Fifo => Box::new(S3Fifo::new(0, 1)),
            Self::Arc => Box::new(Arc::new(0, 1)),
            Self::Slru => Box::new(Slru::open()),
            Self::TwoQ => Box::new(TwoQ::new(0, 1)),
            Self::Lirs => Box::new(Lirs::open()),
            Self::TinyLfu => Box::new(NamedTinyLfu::default()),
        }
    }
}
