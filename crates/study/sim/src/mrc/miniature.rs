//! Any policy's miss ratio, estimated by small caches that see a sample of the pages each.

use super::sample::{Population, Rate, Sample, SampleError};
use super::sampled::{Estimate, SAMPLES, Work, expected};
use crate::misses::{CacheConfig, MissPolicy};
use crate::sweep::{self, Progress, sweep};

/// The question of a miniature simulation.
#[derive(Debug, Clone, Copy)]
pub struct Miniature<'q> {
    /// The policy.
    pub policy: MissPolicy,
    /// At which sizes, in pages.
    pub capacities: &'q [usize],
    /// The share of the pages in each sample.
    pub rate: Rate,
    /// Threads to count with.
    pub threads: usize,
}

impl Miniature<'_> {
    /// Simulates the policy on samples of the pages, each capacity scaled down alike.
    ///
    /// Samples of half the rate show whether the policy behaves otherwise in a small cache: where
    /// the working set moves, it may.
    ///
    /// # Errors
    /// A capacity of 0; no page in a sample.
    pub fn estimate(
        &self,
        of: &Population<'_>,
        progress: impl FnMut(Progress) + Send,
    ) -> Result<Estimate, SampleError> {
        let half = Rate::new(self.rate.share() / 2.0)?;
        let requests = of.trace.pages.len() as u64;
        let of_sample = |rate| requests + self.capacities.len() as u64 * expected(requests, rate);
        let total = SAMPLES * (of_sample(self.rate) + of_sample(half));
        let mut work = Work::new(total, progress);
        let mut samples = Vec::new();
        let mut pages_min = usize::MAX;
        for seed in 0..SAMPLES {
            let sample = Sample::new(of, self.rate, seed, |requests| work.add(requests))?;
            pages_min = pages_min.min(sample.occurring);
            samples.push(self.ratios(&sample, &mut work)?);
        }
        let mut halves = Vec::new();
        for seed in SAMPLES..2 * SAMPLES {
            match Sample::new(of, half, seed, |requests| work.add(requests)) {
                Ok(sample) => halves.push(self.ratios(&sample, &mut work)?),
                // Then the deviation of the samples is large enough.
                Err(SampleError::Empty(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Estimate::of(&samples, Some(&halves), pages_min))
    }

    fn ratios(
        &self,
        sample: &Sample,
        work: &mut Work<impl FnMut(Progress) + Send>,
    ) -> Result<Vec<f64>, SampleError> {
        let scaled = |&capacity: &usize| CacheConfig {
            policy: self.policy,
            // A capacity of 0 is refused, not rounded up.
            capacity: if capacity == 0 { 0 } else { sample.scaled_down(capacity) },
        };
        let configs: Vec<CacheConfig> = self.capacities.iter().map(scaled).collect();
        let mut before = 0;
        let misses = sweep(sample.as_trace(), &configs, self.threads, |now: Progress| {
            work.add(now.requests - before);
            before = now.requests;
        })?;
        Ok(misses.into_iter().map(|misses| sample.miss_ratio(misses)).collect())
    }

    /// Estimates the bytes that [`Miniature::estimate`] takes beside the trace: one sample at a
    /// time.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn memory_bytes(&self, page_count: u64, requests: u64) -> u64 {
        let share = self.rate.share();
        let scaled = |capacity: &usize| CacheConfig {
            policy: self.policy,
            capacity: ((*capacity as f64 * share).round() as usize).max(1),
        };
        let configs: Vec<CacheConfig> = self.capacities.iter().map(scaled).collect();
        let pages = expected(page_count, self.rate);
        let sampled = expected(requests, self.rate);
        Sample::memory_bytes(page_count, requests, self.rate)
            + sweep::memory_bytes(pages, sampled, &configs, self.threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::misses::{DensePages, count_misses};
    use crate::synthetic::Synthetic;

    #[test]
    fn a_tenth_of_the_pages_tells_what_each_policy_misses() {
        let made = Synthetic::zipf(1 << 15, 300_000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let (of, sizes) = (Population::new(trace), [3000, 10_000]);
        for policy in MissPolicy::all() {
            let rate = Rate::new(0.1).unwrap();
            let asked = Miniature { policy, capacities: &sizes, rate, threads: 2 };
            let told = asked.estimate(&of, |_| {}).unwrap();
            for (at, &capacity) in sizes.iter().enumerate() {
                let misses = count_misses(trace, CacheConfig { policy, capacity }).unwrap();
                #[expect(clippy::cast_precision_loss)]
                let off = (told.miss_ratios[at] - misses as f64 / 300_000.0).abs();
                assert!(off < 0.02, "{policy} {capacity}: off by {off} {told:?}");
                assert!(told.errors()[at] < 0.05, "{policy} {capacity}: {told:?}");
            }
        }
    }

    #[test]
    fn room_for_all_pages_misses_first_touches_alone_for_every_policy() {
        let made = Synthetic::cycle(6000, 60_000);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let of = Population::new(trace);
        for policy in MissPolicy::all() {
            for rate in [0.01, 0.1] {
                let rate = Rate::new(rate).unwrap();
                let asked = Miniature { policy, capacities: &[6000], rate, threads: 1 };
                let told = asked.estimate(&of, |_| {}).unwrap();
                assert!((told.miss_ratios[0] - 0.1).abs() < 1e-9, "{policy}: {told:?}");
            }
        }
        let asked = Miniature {
            policy: MissPolicy::Belady,
            capacities: &[0],
            rate: Rate::new(0.1).unwrap(),
            threads: 1,
        };
        assert!(asked.estimate(&of, |_| {}).is_err(), "no room at all");
    }
}
