//! Pools provisioned below their peak: how often, how long and by how much they run short.

use serde::Serialize;

use super::{Members, Question, quantile};

/// Pools of the size asked for, with memory that is enough in a share of all steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Provisioned {
    /// Percent of a pool's steps in which its memory is enough, at least.
    pub percentile: f64,
    /// Memory of all pools and local memory, relative to the sum of peaks: mean of all groupings.
    pub ratio: f64,
    /// Share of all steps of all pools in which memory is short.
    pub short_share: f64,
    /// Longest shortage of any pool.
    pub longest_short_s: f64,
    /// Shortages per pool and day.
    pub shortages_per_pool_day: f64,
    /// The largest shortage, relative to the pool's memory.
    pub worst_short_share: f64,
}

/// Sums over all pools of all groupings at one percentile.
#[derive(Debug, Default)]
struct Count {
    memory: f64,
    pools: usize,
    short_steps: usize,
    shortages: usize,
    longest_steps: usize,
    worst: f64,
}

impl Count {
    fn add(&mut self, held: &[f64], memory: f64) {
        self.memory += memory;
        self.pools += 1;
        let mut run = 0;
        for used in held {
            if *used <= memory {
                run = 0;
                continue;
            }
            self.shortages += usize::from(run == 0);
            run += 1;
            self.short_steps += 1;
            self.longest_steps = self.longest_steps.max(run);
            let missing = (used - memory) / memory;
            self.worst = self.worst.max(if memory > 0.0 { missing } else { f64::INFINITY });
        }
    }
}

const DAY_S: f64 = 86_400.0;

/// Returns one row for the peak, then one for each percentile.
pub(super) fn provision(
    members: &Members,
    orders: &[Vec<usize>],
    question: &Question,
    step_s: f64,
) -> Vec<Provisioned> {
    let percentiles: Vec<f64> =
        std::iter::once(100.0).chain(question.percentiles.iter().copied()).collect();
    let mut counts: Vec<Count> = percentiles.iter().map(|_| Count::default()).collect();
    for pool in orders.iter().flat_map(|order| order.chunks(question.group)) {
        let held = members.sum(pool);
        let mut sorted = held.clone();
        sorted.sort_by(f64::total_cmp);
        for (count, percentile) in counts.iter_mut().zip(&percentiles) {
            count.add(&held, quantile(&sorted, percentile / 100.0));
        }
    }
    let local: f64 = members.local.iter().sum();
    let row = |(percentile, count): (&f64, &Count)| {
        // Counts of steps and pools, far below where f64 loses an integer.
        #[allow(clippy::cast_precision_loss)]
        let [groupings, pools, steps] =
            [orders.len(), count.pools, members.steps].map(|count| count as f64);
        #[allow(clippy::cast_precision_loss)]
        let [short, shortages, longest] =
            [count.short_steps, count.shortages, count.longest_steps].map(|count| count as f64);
        Provisioned {
            percentile: *percentile,
            ratio: (local + count.memory / groupings) / members.sum_of_peaks,
            short_share: short / (pools * steps),
            longest_short_s: longest * step_s,
            shortages_per_pool_day: shortages / (pools * steps * step_s / DAY_S),
            worst_short_share: count.worst,
        }
    };
    percentiles.iter().zip(&counts).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortages_are_counted_by_their_beginning_their_length_and_their_depth() {
        let mut count = Count::default();
        count.add(&[1.0, 3.0, 4.0, 1.0, 3.0, 2.0], 2.0);
        assert_eq!((count.shortages, count.short_steps, count.longest_steps), (2, 3, 2));
        assert_eq!(count.worst, 1.0);
    }

    #[test]
    fn a_peak_is_always_enough_and_a_percentile_for_its_part() {
        let used: Vec<f64> = (1..=100).map(f64::from).collect();
        let members = Members {
            far: vec![used],
            local: vec![0.0],
            sum_of_peaks: 100.0,
            steps: 100,
            unit_gib: None,
        };
        let question = Question { group: 1, percentiles: vec![95.0], ..Question::default() };
        let rows = provision(&members, &[vec![0]], &question, 300.0);
        assert_eq!((rows[0].ratio, rows[0].short_share), (1.0, 0.0));
        assert_eq!((rows[1].ratio, rows[1].short_share), (0.95, 0.05));
        assert_eq!(rows[1].longest_short_s, 1500.0);
    }
}
