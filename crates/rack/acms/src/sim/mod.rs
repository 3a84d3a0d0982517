//! Many nodes, the real code, one seeded world: time, network, programs' memory use and faults come
//! from one seed, so a run that fails can be repeated (`FARPOOL_SEED`).
//!
//! * [`World`]: nodes, clock, events.
//! * [`Network`]: latency, loss, duplication, reordering, replay, partitions.
//! * [`Load`]: a node's memory use over time.
//! * [`Ledger`]: what is lent and used, checked at every step.

mod ledger;
mod load;
mod network;
mod scale;
mod world;

pub use ledger::{Ledger, Served};
pub use load::Load;
pub use network::Network;
pub use scale::{Report, Scale, run_scale};
pub use world::{Event, Note, Setup, World};

/// Returns the seeds to run: `count` from `first`, or as many as `FARPOOL_SEED_COUNT` says, or only
/// the one in `FARPOOL_SEED`.
#[must_use]
pub fn seeds(first: u64, count: u64) -> Vec<u64> {
    let variable = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match variable("FARPOOL_SEED") {
        Some(seed) => vec![seed],
        None => (first..first + variable("FARPOOL_SEED_COUNT").unwrap_or(count)).collect(),
    }
}
