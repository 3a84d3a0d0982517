//! Which pages leave local memory, which are prefetched, and how fast they may travel.
//!
//! Pure code: no I/O, no clock, no randomness but the seeded [`Rng`], no allocation after
//! construction (or an explicit `grow`). The pager decides and the simulator predicts with it, so
//! what is measured in one holds in the other.
//!
//! * [`victim`]: exact victim policies over single pages. The pager cannot see every reference, so
//!   these are the reference: what a policy could reach with perfect knowledge.
//! * [`cache`]: whole local memories of a fixed size, by these and by policies that remember more;
//!   for the simulator.
//! * [`ranking`]: the same policies for a cache whose caller measures the space; for the key-value
//!   store.
//! * [`sweep`]: what the pager runs. It evicts aligned chunks of 64 pages and knows of each page
//!   only whether it is resident and whether it was taken back soon after its eviction.
//! * [`prefetch`]: which pages a faulting thread will need next.
//! * [`clean`]: whether it pays to tell unchanged pages from changed ones.
//! * [`donor_protection`]: when a blade slows down for the programs of its own host.
//! * [`reserve`]: how much memory is kept free, and when the evictor works.
//! * [`rate`]: how fast bytes may pass, for clients that pace themselves and blades that enforce
//!   it.
//! * [`redundancy`]: what is stored beside what is far.
//!
//! Policies are chosen by name; an unknown name gives an error with the list of names.

mod bits;
pub mod cache;
pub mod clean;
pub mod donor_protection;
mod list;
pub mod prefetch;
pub mod ranking;
pub mod rate;
pub mod redundancy;
pub mod reserve;
mod rng;
pub mod sweep;
pub mod tables;
pub mod victim;

pub use cache::{CacheKind, CacheVisitor, PageCache};
pub use clean::{CleanEstimator, SAMPLED_FETCHES};
pub use prefetch::{MAX_PREFETCH_PAGES, PrefetchKind, PrefetchWindow, Prefetcher};
pub use ranking::{RANKED_PAGES_MAX, Ranking};
pub use rate::{Bucket, Meter, Meters, RateLimit, WaitNs};
pub use rng::Rng;
pub use sweep::{CHUNK_PAGES, Choice, ChunkSweep, SweepPolicy};
pub use tables::Renumber;
pub use victim::{VictimKind, VictimPolicy};

/// An unknown policy name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {what} policy named \"{name}\"; choose one of: {known}")]
pub struct UnknownPolicy {
    what: &'static str,
    name: String,
    known: String,
}

impl UnknownPolicy {
    fn new(what: &'static str, name: &str, known: &[&str]) -> Self {
        Self { what, name: name.to_owned(), known: known.join(", ") }
    }
}
