//! Distributions of latencies in memory that does not grow: a workload that measures page faults
//! must not cause any by recording them.

use std::time::Duration;

use farpool_units::{at_most, exactly};

/// Linear steps inside each power of two: buckets are at most 1.6 % wide.
const STEPS: usize = 64;
/// Latencies below 2^6 ns have one of the first buckets for each nanosecond.
const FIRST_POWER: u32 = 6;
/// Powers of two covered: up to 2^34 ns = 17 s. Longer latencies count as the longest.
const POWERS: usize = 28;

/// A count of latencies in log-linear buckets; 14 KiB, small enough for a stack.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
    buckets: [u64; STEPS * (POWERS + 1)],
    count: u64,
    sum_ns: u64,
}

impl Latencies {
    pub(crate) fn new() -> Self {
        Self { buckets: [0; STEPS * (POWERS + 1)], count: 0, sum_ns: 0 }
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        let latency_ns = at_most(latency.as_nanos());
        self.buckets[bucket_of(latency_ns)] += 1;
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(latency_ns);
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64
    }

    /// Returns the latency that `fraction` of all latencies do not exceed. Returns 0 if nothing was
    /// counted.
    pub(crate) fn quantile_ns(&self, fraction: f64) -> f64 {
        let rank = (fraction * self.count as f64).ceil().max(1.0);
        let mut seen = 0u64;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen as f64 >= rank {
                return middle_ns(bucket);
            }
        }
        0.0
    }
}

fn bucket_of(latency_ns: u64) -> usize {
    let power = latency_ns.max(1).ilog2();
    if power < FIRST_POWER {
        return exactly(latency_ns);
    }
    let row = (power - FIRST_POWER) as usize;
    if row >= POWERS {
        return STEPS * (POWERS + 1) - 1;
    }
    let step = exactly::<usize, _>(latency_ns >> (power - FIRST_POWER)) % STEPS;
    STEPS * (row + 1) + step
}

fn middle_ns(bucket: usize) -> f64 {
    let (row, step) = (bucket / STEPS, bucket % STEPS);
    if row == 0 {
        return step as f64;
    }
    let width = (1u64 << (row - 1)) as f64;
    ((STEPS + step) as f64 + 0.5) * width - 0.5
}

/// Returns the median of a few measurements, or NaN if there are none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(latencies_ns: impl IntoIterator<Item = u64>) -> Latencies {
        let mut latencies = Latencies::new();
        latencies_ns.into_iter().for_each(|ns| latencies.record(Duration::from_nanos(ns)));
        latencies
    }

    #[test]
    fn every_latency_is_told_within_its_buckets_width() {
        for ns in (0..5000).chain([12_345, 999_999, 1 << 20, (1 << 33) + 17]) {
            let told = counted([ns]).quantile_ns(0.5);
            assert!((told - ns as f64).abs() <= ns as f64 / 64.0 + 0.5, "{ns} told as {told}");
        }
    }

    #[test]
    fn quantiles_are_nearest_ranks() {
        let latencies = counted(1..=50);
        assert_eq!(latencies.quantile_ns(0.5), 25.0);
        assert_eq!(latencies.quantile_ns(0.99), 50.0);
        assert_eq!(latencies.quantile_ns(0.0), 1.0);
        assert_eq!((latencies.mean_ns(), latencies.count()), (25.5, 50));
        assert_eq!(counted([]).quantile_ns(0.5), 0.0);
    }

    #[test]
    fn endless_latencies_count_as_the_longest() {
        assert!(counted([u64::MAX]).quantile_ns(0.5) > 17e9);
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
