//! A network that loses, repeats, delays and damages datagrams by chance, and can be partitioned.

use std::time::Duration;

use crate::rng::Rng;

/// Longest additional delay of a late datagram, milliseconds.
const LATE_MS: u64 = 500;

/// What may happen to a datagram; chances are in thousandths.
#[derive(Clone, Debug)]
pub struct Network {
    /// Shortest delay, microseconds.
    pub latency_us: u64,
    /// Largest additional delay, microseconds.
    pub jitter_us: u64,
    /// Chance that it is lost.
    pub loss_permille: u64,
    /// Chance that a second copy arrives.
    pub twice_permille: u64,
    /// Chance that it arrives up to half a second later, so that others overtake it.
    pub late_permille: u64,
    /// Chance that a further copy arrives up to 30 s later.
    pub replay_permille: u64,
    /// Chance, for each copy, that it arrives with a flipped bit.
    pub damage_permille: u64,
    /// Group of each node; datagrams between groups are lost. Empty: one network.
    pub groups: Vec<u8>,
}

impl Network {
    /// A rack's network without faults.
    #[must_use]
    pub fn good() -> Self {
        Self {
            latency_us: 100,
            jitter_us: 400,
            loss_permille: 0,
            twice_permille: 0,
            late_permille: 0,
            replay_permille: 0,
            damage_permille: 0,
            groups: Vec::new(),
        }
    }

    /// A network with all faults but partitions, with random chances.
    #[must_use]
    pub fn bad(rng: &mut Rng) -> Self {
        Self {
            latency_us: 50 + rng.below(2_000),
            jitter_us: rng.below(20_000),
            loss_permille: rng.below(150),
            twice_permille: rng.below(150),
            late_permille: rng.below(100),
            replay_permille: rng.below(50),
            damage_permille: rng.below(20),
            groups: Vec::new(),
        }
    }

    /// Returns the delays after which copies of a datagram arrive, and whether each is damaged.
    pub(crate) fn deliveries(
        &self,
        from: usize,
        to: usize,
        rng: &mut Rng,
    ) -> Vec<(Duration, bool)> {
        let group = |node: usize| self.groups.get(node).copied().unwrap_or(0);
        if group(from) != group(to) {
            return Vec::new();
        }
        let mut copies = Vec::with_capacity(1);
        let chance = |permille: u64, rng: &mut Rng| permille > 0 && rng.below(1000) < permille;
        if !chance(self.loss_permille, rng) {
            let late = chance(self.late_permille, rng);
            let extra = if late { rng.below(LATE_MS) } else { 0 };
            copies.push(self.delay(rng) + Duration::from_millis(extra));
        }
        if chance(self.twice_permille, rng) {
            copies.push(self.delay(rng));
        }
        if chance(self.replay_permille, rng) {
            copies.push(Duration::from_millis(rng.below(30_000)));
        }
        copies.into_iter().map(|delay| (delay, chance(self.damage_permille, rng))).collect()
    }

    fn delay(&self, rng: &mut Rng) -> Duration {
        Duration::from_micros(self.latency_us + rng.below(self.jitter_us + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_datagram_is_the_same_one_and_no_copy() {
        let mut rng = Rng::new(1);
        let late = Network { late_permille: 1000, ..Network::good() };
        let mut longest = Duration::ZERO;
        for _ in 0..1_000 {
            let all = late.deliveries(0, 1, &mut rng);
            assert_eq!(all.len(), 1, "one datagram is sent, one arrives");
            longest = longest.max(all[0].0);
        }
        assert!(longest > Duration::from_millis(400), "{longest:?}");
        let lost = Network { loss_permille: 1000, ..late };
        assert!(lost.deliveries(0, 1, &mut rng).is_empty(), "what is lost is not late");
    }
}
