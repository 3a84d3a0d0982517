//! The distribution of latencies, in constant memory.

use std::time::Duration;

use farpool_units::{at_most, exactly};

/// Linear steps in each power of two: buckets are at most 1.6 % wide, their middles at most 0.8 %
/// off.
const STEPS: usize = 64;
/// Latencies below 2^6 ns have a bucket each.
const FIRST_POWER: u32 = 6;
/// Powers of two covered: up to 2^34 ns = 17 s. Longer latencies count as that.
const POWERS: usize = 28;
const BUCKETS: usize = STEPS * (POWERS + 1);

/// Counts latencies in log-linear buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    longest_ns: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, longest_ns: 0 }
    }
}

/// The number, from 1, of a histogram line that cannot be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line {0} of the histogram is not `LATENCY_NS COUNT`")]
pub struct BadLine(pub usize);

impl Latencies {
    pub fn record(&mut self, latency: Duration) {
        self.record_ns(at_most(latency.as_nanos()), 1);
    }

    /// Records the same latency `times` times.
    pub fn record_ns(&mut self, latency_ns: u64, times: u64) {
        self.buckets[bucket_of(latency_ns)] += times;
        self.count += times;
        self.longest_ns = self.longest_ns.max(latency_ns);
    }

    pub fn merge(&mut self, other: &Self) {
        for (bucket, count) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket += count;
        }
        self.count += other.count;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }

    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    #[must_use]
    pub const fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    /// The latency that `fraction` of all are at or below; 0 if nothing was recorded.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub fn quantile_ns(&self, fraction: f64) -> u64 {
        let rank = (fraction * self.count as f64).ceil().max(1.0);
        let mut seen = 0u64;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen as f64 >= rank {
                return middle_ns(bucket).min(self.longest_ns);
            }
        }
        0
    }

    /// Formats the nonempty buckets as lines of `LATENCY_NS COUNT`.
    #[must_use]
    pub fn to_text(&self) -> String {
        let used = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        used.map(|(bucket, count)| format!("{} {count}\n", middle_ns(bucket))).collect()
    }

    /// Parses the output of [`Self::to_text`]; lines that begin with # are skipped.
    pub fn from_text(text: &str) -> Result<Self, BadLine> {
        let mut latencies = Self::default();
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let pair = line.split_once(' ').and_then(|(latency_ns, count)| {
                Some((latency_ns.parse().ok()?, count.parse().ok()?))
            });
            let (latency_ns, count) = pair.ok_or(BadLine(at + 1))?;
            latencies.record_ns(latency_ns, count);
        }
        Ok(latencies)
    }
}

fn bucket_of(latency_ns: u64) -> usize {
    let power = latency_ns.max(1).ilog2();
    if power < FIRST_POWER {
        return exactly(latency_ns);
    }
    let row = (power - FIRST_POWER) as usize;
    if row >= POWERS {
        return BUCKETS - 1;
    }
    let step = exactly::<usize, _>(latency_ns >> (power - FIRST_POWER)) % STEPS;
    STEPS * (row + 1) + step
}

fn middle_ns(bucket: usize) -> u64 {
    let (row, step) = (bucket / STEPS, (bucket % STEPS) as u64);
    if row == 0 {
        return step;
    }
    let width = 1u64 << (row - 1);
    (STEPS as u64 + step) * width + width / 2
}

#[cfg(test)]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "small counts"
)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn quantiles_are_within_one_percent(mut values in prop::collection::vec(1u64..10_000_000_000, 1..400), fraction in 0.01..1.0f64) {
            let mut latencies = Latencies::default();
            values.iter().for_each(|&value| latencies.record_ns(value, 1));
            values.sort_unstable();
            let rank = (fraction * values.len() as f64).ceil().max(1.0) as usize;
            let (exact, found) = (values[rank - 1] as f64, latencies.quantile_ns(fraction) as f64);
            prop_assert!((found - exact).abs() <= exact * 0.01 + 0.5, "{found} for {exact}");
            let again = Latencies::from_text(&latencies.to_text()).unwrap();
            prop_assert_eq!(again.count(), latencies.count());
            let (was, is) = (latencies.quantile_ns(fraction) as f64, again.quantile_ns(fraction) as f64);
            prop_assert!((was - is).abs() <= was * 0.01 + 0.5);
        }
    }

    #[test]
    fn a_bad_line_is_named() {
        assert_eq!(Latencies::from_text("# text\n100 5\nnothing\n"), Err(BadLine(3)));
    }
}
