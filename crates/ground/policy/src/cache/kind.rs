//! Cache policies by name, and loops made for each of them.

use farpool_units::at_most;

use super::{Arc, Lfu, Lirs, PageCache, Resident, S3Fifo, Slru, TinyLfu, TwoQ};
use crate::UnknownPolicy;
use crate::victim::{Clock, Fifo, Lru, Random, Sieve};

/// The cache policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheKind {
    /// Least recently used.
    Lru,
    /// First in, first out.
    Fifo,
    /// Second chance, one bit.
    Clock,
    /// SIEVE (NSDI 2024).
    Sieve,
    /// Least frequently used.
    Lfu,
    /// S3-FIFO (SOSP 2023).
    S3Fifo,
    /// ARC (FAST 2003).
    Arc,
    /// Segmented LRU, four segments.
    Slru,
    /// 2Q (VLDB 1994).
    TwoQ,
    /// LIRS (SIGMETRICS 2002).
    Lirs,
    /// W-TinyLFU (ToS 2017).
    TinyLfu,
    /// Any page at random, seeded.
    Random,
}

/// Runs over a cache once its policy is chosen, as a loop over a trace compiled for each policy.
pub trait CacheVisitor {
    /// The result.
    type Output;

    /// Runs with the cache that [`CacheKind::visit`] made.
    fn visit(self, cache: impl PageCache + Send + 'static) -> Self::Output;
}

impl CacheKind {
    /// Every kind, in declaration order.
    pub const ALL: [Self; 12] = [
        Self::Lru,
        Self::Fifo,
        Self::Clock,
        Self::Sieve,
        Self::Lfu,
        Self::S3Fifo,
        Self::Arc,
        Self::Slru,
        Self::TwoQ,
        Self::Lirs,
        Self::TinyLfu,
        Self::Random,
    ];

    /// The name used on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::Sieve => "sieve",
            Self::Lfu => "lfu",
            Self::S3Fifo => "s3-fifo",
            Self::Arc => "arc",
            Self::Slru => "slru",
            Self::TwoQ => "2q",
            Self::Lirs => "lirs",
            Self::TinyLfu => "w-tinylfu",
            Self::Random => "random",
        }
    }

    /// Creates an empty cache of `capacity` pages for pages `0..page_count` and passes it to
    /// `visitor`; only `Random` uses `seed`. With room for all pages no policy has a decision to
    /// make, and none evicts (by its own rules SLRU would, at a hit, when its segments leave a page
    /// over).
    ///
    /// # Panics
    /// A capacity of 0: no page could become resident.
    pub fn visit<V: CacheVisitor>(
        self,
        page_count: usize,
        capacity: usize,
        seed: u64,
        visitor: V,
    ) -> V::Output {
        // Page numbers have 32 bits, so a larger capacity is never used.
        let room = at_most(capacity);
        if capacity >= page_count.max(1) {
            return visitor.visit(Resident::new(Fifo::new(page_count), capacity));
        }
        match self {
            Self::Lru => visitor.visit(Resident::new(Lru::new(page_count), capacity)),
            Self::Fifo => visitor.visit(Resident::new(Fifo::new(page_count), capacity)),
            Self::Clock => visitor.visit(Resident::new(Clock::new(page_count), capacity)),
            Self::Sieve => visitor.visit(Resident::new(Sieve::new(page_count), capacity)),
            Self::Random => visitor.visit(Resident::new(Random::new(page_count, seed), capacity)),
            Self::Lfu => visitor.visit(Lfu::new(page_count, room)),
            Self::S3Fifo => visitor.visit(S3Fifo::new(page_count, room)),
            Self::Arc => visitor.visit(Arc::new(page_count, room)),
            Self::Slru => visitor.visit(Slru::new(page_count, room)),
            Self::TwoQ => visitor.visit(TwoQ::new(page_count, room)),
            Self::Lirs => visitor.visit(Lirs::new(page_count, room)),
            Self::TinyLfu => visitor.visit(TinyLfu::new(page_count, room)),
        }
    }

    /// Returns an upper bound of the bytes that one cache takes.
    #[must_use]
    pub fn memory_bytes(self, page_count: u64, capacity: u64, requests: u64) -> u64 {
        let held = capacity.min(page_count);
        match self {
            Self::Lru => 8 * page_count,
            Self::Fifo => 8 * page_count + page_count / 8,
            Self::Clock | Self::Sieve => 8 * page_count + page_count / 4,
            Self::Random => 8 * page_count,
            // k distinct counts take k (k + 1) / 2 references.
            Self::Lfu => 12 * page_count + 64 * held.min((2 * requests).isqrt()),
            Self::S3Fifo => 10 * page_count,
            Self::Arc | Self::Slru | Self::TwoQ => 9 * page_count,
            Self::Lirs => 18 * page_count,
            Self::TinyLfu => 17 * page_count + TinyLfu::sketch_bytes(at_most(capacity)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_an_unknown_one_lists_them_all() {
        for kind in CacheKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let refusal = "mru".parse::<CacheKind>().unwrap_err().to_string();
        assert_eq!(
            refusal,
            "there is no cache policy named \"mru\"; choose one of: lru, fifo, clock, sieve, lfu, \
             s3-fifo, arc, slru, 2q, lirs, w-tinylfu, random"
        );
    }
}
