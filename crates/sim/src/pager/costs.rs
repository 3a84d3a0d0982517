//! What each event costs on a machine, found from programs that were run all-local and far.
//!
//! A probe gives one equation: events times costs is the time that far memory added. There are more probes than
//! costs; the costs that fit them best, none below zero, are found by coordinate descent on relative errors,
//! so that a short probe counts as much as a long one. Costs come out in picoseconds.

use serde::{Deserialize, Serialize};

use super::Events;

/// Rounds of the descent, far beyond what changes a digit.
const ROUNDS: usize = 20_000;
/// Pulls what the probes cannot tell apart towards zero: this part of a probe's weight.
const RIDGE: f64 = 1e-4;
const PS_PER_NS: f64 = 1000.0;

/// Costs in picoseconds of the program's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// A first touch.
    pub zero_fill_ps: u64,
    /// Each page it is answered with, beyond what the kernel takes for one anyway.
    pub zero_page_ps: u64,
    /// A page taken back from the victim buffer.
    pub victim_hit_ps: u64,
    /// A page fetched because it was touched.
    pub demand_fetch_ps: u64,
    /// Each page fetched with it.
    pub prefetch_ps: u64,
    /// A chunk from which pages are moved out.
    pub evicted_chunk_ps: u64,
    /// Each page that is moved out and written.
    pub written_page_ps: u64,
    /// Each page that is moved out and not written.
    pub clean_drop_ps: u64,
}

const COUNT: usize = 8;
const NAMES: [&str; COUNT] = [
    "first touch",
    "page it is answered with",
    "page taken back",
    "page fetched",
    "page fetched with it",
    "chunk moved out of",
    "page moved out, written",
    "page moved out, unchanged",
];

/// A program that was run both ways.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Its name.
    pub name: String,
    /// Its time with all its memory local.
    pub local_ns: u64,
    /// Its time with part of it far.
    pub far_ns: u64,
    /// What the pager did in that time.
    pub events: Events,
}

impl Costs {
    /// What these events add to a program's time.
    #[must_use]
    pub fn added_ps(&self, events: &Events) -> u64 {
        let parts = self.columns().into_iter().zip(columns(events));
        parts.map(|(cost, count)| cost.saturating_mul(count)).fold(0, u64::saturating_add)
    }

    /// Each cost with the event's name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        NAMES.into_iter().zip(self.columns())
    }

    fn columns(&self) -> [u64; COUNT] {
        [
            self.zero_fill_ps,
            self.zero_page_ps,
            self.victim_hit_ps,
            self.demand_fetch_ps,
            self.prefetch_ps,
            self.evicted_chunk_ps,
            self.written_page_ps,
            self.clean_drop_ps,
        ]
    }

    fn from_columns(costs: [u64; COUNT]) -> Self {
        let [zero_fill, zero_page, victim_hit, demand_fetch, prefetch, chunk, written, clean] =
            costs;
        Self {
            zero_fill_ps: zero_fill,
            zero_page_ps: zero_page,
            victim_hit_ps: victim_hit,
            demand_fetch_ps: demand_fetch,
            prefetch_ps: prefetch,
            evicted_chunk_ps: chunk,
            written_page_ps: written,
            clean_drop_ps: clean,
        }
    }

    /// The costs that explain the probes best. Probes that far memory did not slow down say nothing.
    #[must_use]
    pub fn fit(probes: &[Probe]) -> Self {
        let rows: Vec<[f64; COUNT]> = probes
            .iter()
            .filter(|probe| probe.far_ns > probe.local_ns)
            .map(|probe| {
                let added_ns = (probe.far_ns - probe.local_ns) as f64;
                columns(&probe.events).map(|count| count as f64 / added_ns)
            })
            .collect();
        Self::from_columns(descend(&rows).map(whole_ps))
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Finite and not negative; far below 2^64.
fn whole_ps(cost_ns: f64) -> u64 {
    (cost_ns * PS_PER_NS).round() as u64
}

fn columns(events: &Events) -> [u64; COUNT] {
    [
        events.zero_fills,
        events.pages_zeroed,
        events.victim_hits,
        events.demand_fetches,
        events.prefetches,
        events.evicted_chunks,
        events.pages_written,
        events.clean_drops,
    ]
}

/// Least squares of `row · costs = 1` with no cost below zero.
fn descend(rows: &[[f64; COUNT]]) -> [f64; COUNT] {
    let mut costs = [0.0; COUNT];
    let mut left: Vec<f64> = vec![1.0; rows.len()];
    let squares: [f64; COUNT] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at] * row[at]).sum());
    for _ in 0..ROUNDS {
        for at in 0..COUNT {
            if squares[at] == 0.0 {
                continue;
            }
            let slope: f64 = rows.iter().zip(&left).map(|(row, left)| row[at] * left).sum();
            let weight = squares[at] * (1.0 + RIDGE);
            let wanted = ((slope + squares[at] * costs[at]) / weight).max(0.0);
            let step = wanted - costs[at];
            for (row, left) in rows.iter().zip(&mut left) {
                *left -= row[at] * step;
            }
            costs[at] = wanted;
        }
    }
    costs
}
