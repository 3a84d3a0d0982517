//! Local memories of a fixed size: what a policy keeps when it sees every reference.
//!
//! Pages are dense numbers `0..page_count`. A cache is asked for one page after the other; on a miss the
//! page becomes resident, and the pages that leave for it are named, because somebody may have to write
//! them back. The policies that the pager can run are those of [`crate::victim`], with a capacity put
//! round them ([`Resident`]); those that remember more than the resident pages stand here.

mod resident;

use crate::UnknownPolicy;
use crate::victim::{Clock, Fifo, Lru, Random, Sieve};

pub use resident::Resident;

/// A local memory with room for a fixed number of pages.
///
/// Page numbers at or above the `page_count` of construction are a programmer's error and panic.
pub trait PageCache {
    /// Refers to `page`: true when it was resident. Otherwise it is now, and each page that had to leave
    /// for it is given to `left`.
    fn access(&mut self, page: u32, left: &mut impl FnMut(u32)) -> bool;

    /// Resident pages; never more than the capacity.
    fn len(&self) -> usize;

    /// No page is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The cache policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheKind {
    /// Least recently used.
    Lru,
    /// First in, first out: HPL-2011-31's Round-Robin.
    Fifo,
    /// Second chance with one bit.
    Clock,
    /// SIEVE (Zhang et al., NSDI 2024).
    Sieve,
    /// Any page, seeded.
    Random,
}

/// What is done with a cache once its policy is chosen: the loop over a trace, compiled for each policy.
pub trait CacheVisitor {
    /// What comes out of it.
    type Output;

    /// Runs with the cache that [`CacheKind::visit`] made.
    fn visit(self, cache: impl PageCache + Send + 'static) -> Self::Output;
}

impl CacheKind {
    /// Every kind, in the order of their names' list.
    pub const ALL: [Self; 5] = [Self::Lru, Self::Fifo, Self::Clock, Self::Sieve, Self::Random];

    /// The name used on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::Sieve => "sieve",
            Self::Random => "random",
        }
    }

    /// Makes a cache of `capacity` pages for pages `0..page_count` and gives it to `visitor`; `seed`
    /// matters to `Random` only.
    ///
    /// # Panics
    /// A capacity of no page: nothing could become resident.
    pub fn visit<V: CacheVisitor>(
        self,
        page_count: usize,
        capacity: usize,
        seed: u64,
        visitor: V,
    ) -> V::Output {
        assert!(capacity > 0, "a cache without room");
        match self {
            Self::Lru => visitor.visit(Resident::new(Lru::new(page_count), capacity)),
            Self::Fifo => visitor.visit(Resident::new(Fifo::new(page_count), capacity)),
            Self::Clock => visitor.visit(Resident::new(Clock::new(page_count), capacity)),
            Self::Sieve => visitor.visit(Resident::new(Sieve::new(page_count), capacity)),
            Self::Random => visitor.visit(Resident::new(Random::new(page_count, seed), capacity)),
        }
    }
}

impl std::fmt::Display for CacheKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for CacheKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let known = Self::ALL.map(Self::name);
        let at = known.iter().position(|k| *k == name);
        at.map(|i| Self::ALL[i]).ok_or_else(|| UnknownPolicy::new("cache", name, &known))
    }
}
