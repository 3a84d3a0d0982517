//! A limit on the bytes written to a device per second, to spare its lifetime: a token bucket.

use std::time::Instant;

/// The bucket's capacity in seconds of the rate: short bursts are written, long ones are not.
const BURST_S: f64 = 2.0;

/// A limit on bytes per second. Time is given by the caller.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    bytes_per_s: f64,
    left_bytes: f64,
    last: Option<Instant>,
}

impl Budget {
    /// Allows at most this many bytes per second in the long run.
    #[must_use]
    pub(super) const fn new(bytes_per_s: f64) -> Self {
        Self { bytes_per_s, left_bytes: bytes_per_s * BURST_S, last: None }
    }

    /// Takes `bytes` from the budget. False if it has fewer.
    pub(super) fn take(&mut self, bytes: usize, now: Instant) -> bool {
        let passed =
            self.last.map_or(0.0, |last| now.saturating_duration_since(last).as_secs_f64());
        self.last = Some(now);
        let most = self.bytes_per_s * BURST_S;
        self.left_bytes = (self.left_bytes + passed * self.bytes_per_s).min(most);
        #[expect(clippy::cast_precision_loss, reason = "records are far shorter than 2^52 bytes")]
        let bytes = bytes as f64;
        let has = self.left_bytes >= bytes;
        if has {
            self.left_bytes -= bytes;
        }
        has
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_more_is_written_than_the_budget_brings() {
        let mut budget = Budget::new(1_000_000.0);
        let start = Instant::now();
        let mut taken = 0;
        for millisecond in 0..10_000u64 {
            let now = start + Duration::from_millis(millisecond);
            while budget.take(1_000, now) {
                taken += 1_000;
            }
        }
        // Ten seconds, and the burst at the start.
        assert!((11_900_000..=12_001_000).contains(&taken), "{taken}");
    }
}
