//! Latency histogram with log-linear buckets: at most 6.25 % wide, no allocation, relaxed atomics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use farpool_units::exactly;

/// Linear steps inside each power of two.
const STEPS: usize = 16;
/// Latencies below this go into the first bucket: 2^7 ns is under any page fault.
const FIRST_POWER: u32 = 7;
/// Powers of two covered: 2^7 ns to 2^31 ns (2.1 s); longer ones go into the last bucket.
const POWERS: u32 = 24;
/// Buckets of one histogram (3 KiB).
pub const BUCKET_COUNT: usize = (POWERS as usize) * STEPS;

/// The bucket that counts a latency.
pub fn bucket_of(latency_ns: u64) -> usize {
    let latency_ns = latency_ns.max(1 << FIRST_POWER);
    let power = 63 - latency_ns.leading_zeros();
    if power >= FIRST_POWER + POWERS {
        return BUCKET_COUNT - 1;
    }
    let step = (latency_ns >> (power - 4)) & (STEPS as u64 - 1);
    (power - FIRST_POWER) as usize * STEPS + exactly::<usize, _>(step)
}

/// The first latency that no longer belongs to the bucket, in nanoseconds.
pub fn bucket_upper_ns(bucket: usize) -> u64 {
    let power = FIRST_POWER + exactly::<u32, _>(bucket / STEPS);
    let step = (bucket % STEPS) as u64;
    (1 << power) + ((step + 1) << (power - 4))
}

/// Counts latencies; lives in shared memory.
#[repr(C)]
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKET_COUNT],
}

impl Histogram {
    pub fn record(&self, latency_ns: u64) {
        self.buckets[bucket_of(latency_ns)].fetch_add(1, Relaxed);
    }

    /// Adds this histogram's counts to `sums`.
    pub fn add_to(&self, sums: &mut [u64; BUCKET_COUNT]) {
        for (sum, bucket) in sums.iter_mut().zip(&self.buckets) {
            *sum += bucket.load(Relaxed);
        }
    }

    pub(crate) fn clear(&self) {
        self.buckets.iter().for_each(|bucket| bucket.store(0, Relaxed));
    }
}

/// The sum of all counted latencies, to within a bucket's width.
pub fn total_ns(sums: &[u64; BUCKET_COUNT]) -> u64 {
    let counted = sums.iter().enumerate().filter(|(_, count)| **count > 0);
    counted.map(|(bucket, count)| count.saturating_mul(bucket_upper_ns(bucket))).sum()
}

/// The latency below which `fraction` (0 to 1) of the counted ones lie. None if nothing is counted.
pub fn quantile_ns(sums: &[u64; BUCKET_COUNT], fraction: f64) -> Option<u64> {
    let total: u64 = sums.iter().sum();
    if total == 0 {
        return None;
    }
    let mut left = fraction.clamp(0.0, 1.0) * total as f64;
    for (bucket, count) in sums.iter().enumerate() {
        left -= *count as f64;
        if left <= 0.0 && *count > 0 {
            return Some(bucket_upper_ns(bucket));
        }
    }
    Some(bucket_upper_ns(BUCKET_COUNT - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_lies_in_its_bucket() {
        for latency_ns in (128..5_000_u64).chain([1 << 20, (1 << 30) + 12_345, (1 << 31) - 1]) {
            let bucket = bucket_of(latency_ns);
            assert!(latency_ns < bucket_upper_ns(bucket), "{latency_ns}");
            assert!(bucket == 0 || latency_ns >= bucket_upper_ns(bucket - 1), "{latency_ns}");
        }
    }

    #[test]
    fn latencies_add_up() {
        let histogram = Histogram { buckets: [const { AtomicU64::new(0) }; BUCKET_COUNT] };
        (1_000..2_000).for_each(|latency_ns| histogram.record(latency_ns));
        let mut sums = [0; BUCKET_COUNT];
        histogram.add_to(&mut sums);
        assert!((1_500_000..1_600_000).contains(&total_ns(&sums)), "{}", total_ns(&sums));
    }

    #[test]
    fn extremes_are_counted_at_the_ends() {
        assert_eq!(bucket_of(0), 0);
        assert_eq!(bucket_of(u64::MAX), BUCKET_COUNT - 1);
    }

    #[test]
    fn quantiles_follow_the_counts() {
        let mut sums = [0; BUCKET_COUNT];
        assert_eq!(quantile_ns(&sums, 0.5), None);
        sums[bucket_of(1_000)] = 99;
        sums[bucket_of(1_000_000)] = 1;
        assert_eq!(quantile_ns(&sums, 0.5), Some(bucket_upper_ns(bucket_of(1_000))));
        assert_eq!(quantile_ns(&sums, 0.999), Some(bucket_upper_ns(bucket_of(1_000_000))));
    }
}
