//! Any policy's miss ratio, estimated by a small cache that sees a sample of the pages.

use super::sample::{Rate, Sample, SampleError};
use super::sampled::scaled_down;
use crate::misses::{CacheConfig, DensePages};
use crate::sweep::{self, Progress, sweep};

/// The estimate of one configuration by a cache scaled down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Miniature {
    /// The configuration asked for.
    pub config: CacheConfig,
    /// The estimated share of requests that miss.
    pub miss_ratio: f64,
    /// Capacity of the small cache in pages: from a few dozen on, estimates are good.
    pub scaled_capacity: usize,
}

/// Simulates each configuration on the sampled pages, its capacity scaled down alike. Results are
/// in the order of `configs`. Requests that the sample has above or below its share count as hits.
///
/// # Errors
/// A capacity of 0; no page in the sample.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub fn miniature(
    trace: DensePages<'_>,
    configs: &[CacheConfig],
    rate: Rate,
    seed: u64,
    threads: usize,
    progress: impl FnMut(Progress) + Send,
) -> Result<Vec<Miniature>, SampleError> {
    for config in configs {
        config.check()?;
    }
    let sample = Sample::new(trace, rate, seed)?;
    let scaled = scaled_configs(configs, rate);
    let misses = sweep(sample.as_trace(), &scaled, threads, progress)?;
    let expected = sample.requests_expected();
    let answers =
        configs.iter().zip(&scaled).zip(misses).map(|((config, scaled), misses)| Miniature {
            config: *config,
            miss_ratio: (misses as f64 / expected).min(1.0),
            scaled_capacity: scaled.capacity,
        });
    Ok(answers.collect())
}

fn scaled_configs(configs: &[CacheConfig], rate: Rate) -> Vec<CacheConfig> {
    let scaled = |config: &CacheConfig| CacheConfig {
        capacity: scaled_down(config.capacity, rate).max(1),
        ..*config
    };
    configs.iter().map(scaled).collect()
}

impl Miniature {
    /// Estimates the bytes that [`miniature`] takes beside the trace.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn memory_bytes(
        page_count: u64,
        requests: u64,
        configs: &[CacheConfig],
        rate: Rate,
        threads: usize,
    ) -> u64 {
        let pages = (page_count as f64 * rate.share()).ceil() as u64;
        let sampled = (requests as f64 * rate.share()).ceil() as u64;
        Sample::memory_bytes(page_count, requests, rate)
            + sweep::memory_bytes(pages, sampled, &scaled_configs(configs, rate), threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::misses::{MissPolicy, count_misses};
    use crate::synthetic::Synthetic;

    #[test]
    fn a_tenth_of_the_pages_tells_what_each_policy_misses() {
        let made = Synthetic::zipf(1 << 15, 300_000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let sizes = [3000, 10_000];
        let configs: Vec<_> = MissPolicy::all()
            .flat_map(|policy| sizes.map(|capacity| CacheConfig { policy, capacity }))
            .collect();
        let rate = Rate::new(0.1).unwrap();
        let told = miniature(trace, &configs, rate, 1, 2, |_| {}).unwrap();
        for (told, config) in told.iter().zip(&configs) {
            #[expect(clippy::cast_precision_loss)]
            let exact = count_misses(trace, *config).unwrap() as f64 / 300_000.0;
            assert_eq!(told.config, *config);
            assert_eq!(told.scaled_capacity, config.capacity / 10);
            assert!(
                (told.miss_ratio - exact).abs() < 0.02,
                "{config:?}: {} {exact}",
                told.miss_ratio
            );
        }
    }
}
