//! Caches whose room somebody else measures: the key-value store's, which is bounded by bytes.
//!
//! A [`crate::PageCache`] holds a fixed number of pages and decides itself when one leaves. A
//! [`Ranking`] is told what enters, and gives up a page when it is asked to. Nothing leaves
//! otherwise, not even at a hit. Policies that divide their room into parts take as the whole what
//! fits now: it grows with what is there, and [`Ranking::set_capacity`] lowers it when less fits.
//!
//! Numbers of pages are handed out and taken back by the caller, so a policy that remembers pages
//! that have left says which of them it has *forgotten*. Whoever keeps all known pages numbered
//! from 0 on can let the tables grow and shrink with them: see [`Renumber`].
//!
//! Against [`crate::PageCache`] under the same name: a page to leave is chosen before it is known
//! what comes in its place, which moves ARC's balance one step later; SLRU and LIRS let no page
//! leave at a hit, and the lowest segment or the pages referenced far apart have what the others
//! leave; SLRU's and W-TinyLFU's new pages start at the bottom from the first; W-TinyLFU's sketch
//! knows pages by name and counts to 255, in four counters of eight for each page.
//!
//! `crates/ground/policy/tests/rankings.rs` has the properties.

use std::fmt::Debug;

use crate::cache::{Arc, CacheKind, Lfu, Lirs, NamedTinyLfu, S3Fifo, Slru, TwoQ};
use crate::tables::Renumber;
use crate::victim::{Clock, Fifo, Lru, Random, Sieve, VictimPolicy};

/// The most pages that a ranking can number.
pub const RANKED_PAGES_MAX: usize = u32::MAX as usize - 1;

/// Decides which page leaves when one has to.
///
/// Page numbers at or above the page count are a programmer's error and panic. Pages that are not
/// resident and not remembered any more are appended to `forgotten`; a victim or a removed page is
/// not, ask [`Self::knows`].
pub trait Ranking: Renumber + Debug + Send {
    /// `page`, which must not be resident, came. `name` stays the same when the page comes again
    /// under another number.
    fn insert(&mut self, page: u32, name: u32, forgotten: &mut Vec<u32>);

    /// `page` was referenced; false, and nothing happens, when it is not resident.
    fn touch(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool;

    /// Takes the page that should leave next out of the resident ones; none when nothing is
    /// resident.
    fn victim(&mut self, forgotten: &mut Vec<u32>) -> Option<u32>;

    /// Forgets `page`, resident or not; whether it was resident.
    fn remove(&mut self, page: u32, forgotten: &mut Vec<u32>) -> bool;

    /// No more than so many fit now. It is at least 1 and, whatever is told, what is resident.
    fn set_capacity(&mut self, capacity: u32, forgotten: &mut Vec<u32>);

    /// Whether `page` is resident.
    fn contains(&self, page: u32) -> bool;

    /// Whether `page` is resident or remembered.
    fn knows(&self, page: u32) -> bool;

    /// Resident pages.
    fn len(&self) -> usize;

    /// No page is resident.
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
    /// An empty ranking without tables; `seed` matters to `Random` only.
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
