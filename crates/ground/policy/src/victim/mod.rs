//! Victim policies over single pages, exact.
//!
//! Pages are dense numbers `0..page_count`. Each policy is told of pages that become resident
//! (`insert`), are referenced (`touch`) or disappear (`remove`), and selects victims on demand. All
//! of them are checked against plain models in `tests/victims.rs`, and compared on synthetic traces
//! in `tests/hit_ratios.rs` (run with `--nocapture` for the table):
//!
//! | hit ratio, local memory | fifo | clock | lru | random | sieve |
//! |---|---|---|---|---|---|
//! | Zipf 0.99, 50 % / 25 % | .866 / .762 | .893 / .804 | .890 / .798 | .867 / .762 | .900 / .828 |
//! | hot/cold 90:10, 50 % / 25 % | .924 / .865 | .936 / .912 | .936 / .912 | .925 / .866 | .936 / .912 |
//! | scan and hot set, 50 % / 25 % | .458 / .381 | .544 / .503 | .540 / .468 | .538 / .384 | .545 / .544 |
//! | loop, 50 % | .000 | .000 | .000 | .196 | .000 |
//!
//! With every reference visible, SIEVE is the best; the pager sees less ([`crate::sweep`]).

mod clock;
mod fifo;
mod lru;
mod random;
mod sieve;

pub use clock::Clock;
pub use fifo::Fifo;
pub use lru::Lru;
pub use random::Random;
pub use sieve::Sieve;

use crate::UnknownPolicy;
use std::fmt::Debug;

/// Decides which resident pages leave.
///
/// No call allocates, except that `victims` pushes to the caller's vector. Page numbers at or above
/// the `page_count` of construction are a programming error and panic.
pub trait VictimPolicy: Debug + Send {
    /// Makes `page` resident. A page that is already resident counts as touched.
    fn insert(&mut self, page: u32);

    /// References `page`. False, without effect, if it is not resident.
    fn touch(&mut self, page: u32) -> bool;

    /// True if `page` is resident.
    fn contains(&self, page: u32) -> bool;

    /// Removes `page`, which disappeared without being a victim (unmapped, discarded). False if it
    /// was not resident.
    fn remove(&mut self, page: u32) -> bool;

    /// Removes and returns the best victim; None if no page is resident.
    fn victim(&mut self) -> Option<u32>;

    /// Removes up to `wanted` victims, best first, and appends them to `out`.
    fn victims(&mut self, wanted: usize, out: &mut Vec<u32>) {
        for _ in 0..wanted {
            let Some(page) = self.victim() else {
                return;
            };
            out.push(page);
        }
    }

    /// Returns the number of resident pages.
    fn len(&self) -> usize;

    /// True if no page is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The victim policies by name, for both shapes: single pages and [`crate::ChunkSweep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum VictimKind {
    /// Round robin: in order of arrival (pages) or of addresses (chunks), regardless of references.
    Fifo,
    /// Second chance: as `Fifo`, but a referenced page is spared once.
    #[default]
    Clock,
    /// Least recently used.
    Lru,
    /// Any page at random, seeded.
    Random,
    /// SIEVE (Zhang et al., NSDI 2024): second chance that leaves survivors where they are.
    Sieve,
}

impl VictimKind {
    /// Every kind, in declaration order.
    pub const ALL: [Self; 5] = [Self::Fifo, Self::Clock, Self::Lru, Self::Random, Self::Sieve];

    /// The name used on the command line and in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Clock => "clock",
            Self::Lru => "lru",
            Self::Random => "random",
            Self::Sieve => "sieve",
        }
    }

    /// Creates an exact policy over pages `0..page_count`; only `Random` uses `seed`.
    #[must_use]
    pub fn build(self, page_count: usize, seed: u64) -> Box<dyn VictimPolicy> {
        match self {
            Self::Fifo => Box::new(Fifo::new(page_count)),
            Self::Clock => Box::new(Clock::new(page_count)),
            Self::Lru => Box::new(Lru::new(page_count)),
            Self::Random => Box::new(Random::new(page_count, seed)),
            Self::Sieve => Box::new(Sieve::new(page_count)),
        }
    }
}

impl std::fmt::Display for VictimKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for VictimKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let known = Self::ALL.map(Self::name);
        let at = known.iter().position(|k| *k == name);
        at.map(|i| Self::ALL[i]).ok_or_else(|| UnknownPolicy::new("victim", name, &known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_an_unknown_one_lists_them_all() {
        for kind in VictimKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let refusal = "mru".parse::<VictimKind>().unwrap_err().to_string();
        assert_eq!(
            refusal,
            "there is no victim policy named \"mru\"; choose one of: fifo, clock, lru, random, \
             sieve"
        );
    }
}
