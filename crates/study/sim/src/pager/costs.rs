//! The cost of each event on a machine, fitted to programs that were run all-local and far.
//!
//! A probe gives one equation: events times costs is the time that far memory added. There are more
//! probes than costs; the best fit without negative costs is found by coordinate descent on
//! relative errors, so that a short probe counts as much as a long one. Costs that the probes
//! cannot separate, because the events always occur together or are rare, stay near those of the
//! machine where Farpool was developed.

use serde::{Deserialize, Serialize};

use super::Events;

/// Rounds of the descent, far more than any digit needs to settle.
const ROUNDS: usize = 20_000;
/// A cost of twice [`USUAL_NS`] weighs as much as a probe that is off by 1 %: squared, this.
const PULL: f64 = 1e-4;
/// What events cost on the development machine, in the order of the columns.
const USUAL_NS: [f64; COUNT] = [5000.0, 100.0, 5000.0, 9000.0, 1000.0, 4000.0, 500.0, 500.0];
const PS_PER_NS: f64 = 1000.0;

/// Costs in picoseconds of the program's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Once per run: setting it up and starting the pager's threads.
    pub start_ps: u64,
    /// A first touch.
    pub zero_fill_ps: u64,
    /// Each page that a first touch zeroes, beyond the kernel's own cost of one.
    pub zero_page_ps: u64,
    /// A page taken back from the victim buffer.
    pub victim_hit_ps: u64,
    /// A page fetched on demand.
    pub demand_fetch_ps: u64,
    /// Each page prefetched with it.
    pub prefetch_ps: u64,
    /// A chunk from which pages are evicted.
    pub evicted_chunk_ps: u64,
    /// Each evicted page that is written.
    pub written_page_ps: u64,
    /// Each evicted page that is not written.
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

/// A program that was run all-local and far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Its name.
    pub name: String,
    /// The whole time of its process with all its memory local.
    pub local_ns: u64,
    /// The same with part of it far, and `farpool run` around it.
    pub far_ns: u64,
    /// The pager's events in that time, all of them.
    pub events: Events,
}

impl Costs {
    /// Returns the time that a run with these events adds to a program's.
    #[must_use]
    pub fn added_ps(&self, events: &Events) -> u64 {
        self.start_ps.saturating_add(self.events_ps(events))
    }

    /// Returns the time that these events take.
    #[must_use]
    pub fn events_ps(&self, events: &Events) -> u64 {
        let parts = self.columns().into_iter().zip(columns(events));
        parts.map(|(cost, count)| cost.saturating_mul(count)).fold(0, u64::saturating_add)
    }

    /// Returns each cost with its event's name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        std::iter::once(("start", self.start_ps)).chain(NAMES.into_iter().zip(self.columns()))
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
            start_ps: 0,
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

    /// Fits the costs of events to the probes, whose far times hold one start of `start_ps` each.
    /// Probes that far memory did not slow down by more than that are ignored.
    #[must_use]
    pub fn fit(probes: &[Probe], start_ps: u64) -> Self {
        let start_ns = start_ps / 1000;
        let rows: Vec<[f64; COUNT]> = probes
            .iter()
            .filter_map(|probe| {
                let added_ns = probe.far_ns.checked_sub(probe.local_ns + start_ns)?;
                (added_ns > 0)
                    .then(|| columns(&probe.events).map(|count| count as f64 / added_ns as f64))
            })
            .collect();
        Self { start_ps, ..Self::from_columns(descend(&rows).map(whole_ps)) }
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
            let usual = USUAL_NS[at];
            let slope: f64 = rows.iter().zip(&left).map(|(row, left)| row[at] * left).sum();
            let weight = squares[at] + PULL / (usual * usual);
            let wanted = ((slope + squares[at] * costs[at] + PULL / usual) / weight).max(0.0);
            let step = wanted - costs[at];
            for (row, left) in rows.iter().zip(&mut left) {
                *left -= row[at] * step;
            }
            costs[at] = wanted;
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(number: u64, costs: &Costs) -> Probe {
        let count = |salt: u64| (number * 7919 + salt * 104_729) % 10_007;
        let events = Events {
            zero_fills: count(1),
            pages_zeroed: count(2) * 8,
            victim_hits: count(3),
            demand_fetches: count(4),
            prefetches: count(5) * 8,
            evicted_chunks: count(6),
            pages_written: count(7) * 8,
            clean_drops: count(8) * 8,
            ..Events::default()
        };
        let local_ns = 1_000_000;
        let far_ns = local_ns + costs.added_ps(&events) / 1000;
        Probe { name: String::new(), local_ns, far_ns, events }
    }

    #[test]
    fn costs_are_found_again_where_the_probes_tell_them_apart() {
        let costs = Costs {
            start_ps: 9_000_000_000,
            zero_fill_ps: 3_000_000,
            zero_page_ps: 250_000,
            victim_hit_ps: 2_000_000,
            demand_fetch_ps: 30_000_000,
            prefetch_ps: 2_500_000,
            evicted_chunk_ps: 9_000_000,
            written_page_ps: 1_200_000,
            clean_drop_ps: 300_000,
        };
        let probes: Vec<Probe> = (0..40).map(|number| probe(number, &costs)).collect();
        let found = Costs::fit(&probes, costs.start_ps);
        for ((name, found_ps), (_, cost_ps)) in found.named().zip(costs.named()) {
            let off = found_ps.abs_diff(cost_ps);
            assert!(off * 10 <= cost_ps, "{name}: {found_ps} for {cost_ps}");
        }
    }

    #[test]
    fn what_no_probe_tells_stays_usual_and_probes_that_cost_nothing_say_nothing() {
        let free = Probe {
            name: String::new(),
            local_ns: 10,
            far_ns: 9,
            events: Events { demand_fetches: 5, ..Events::default() },
        };
        let found = Costs::fit(&[free], 0);
        let usual: Vec<u64> = USUAL_NS.into_iter().map(whole_ps).collect();
        assert_eq!(found.columns().to_vec(), usual);
    }
}
