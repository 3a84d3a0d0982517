//! Times of single requests, all of them kept: a demo has few enough to sort them.

use std::time::Duration;

use farpool_units::at_most;

/// Nanoseconds of each request; longer than 4 s counts as 4 s.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<u32>);

impl Latencies {
    pub fn with_capacity(requests: usize) -> Latencies {
        Latencies(Vec::with_capacity(requests))
    }

    pub fn record(&mut self, took: Duration) {
        self.0.push(at_most(took.as_nanos()));
    }

    pub fn merge(&mut self, other: Latencies) {
        self.0.extend(other.0);
    }

    /// The time that this many of a thousand requests did not exceed.
    pub fn permille_ns(&mut self, permille: usize) -> u32 {
        self.0.sort_unstable();
        let at = (self.0.len() * permille / 1000).min(self.0.len().saturating_sub(1));
        self.0.get(at).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_sorted_times() {
        let mut times = Latencies::default();
        (1..=1000).rev().for_each(|ns| times.record(Duration::from_nanos(ns)));
        assert_eq!(times.permille_ns(500), 501);
        assert_eq!(times.permille_ns(990), 991);
        assert_eq!(times.permille_ns(1000), 1000);
        assert_eq!(Latencies::default().permille_ns(500), 0);
    }
}
