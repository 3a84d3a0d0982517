//! How much a node may lend: harvest slowly, give back fast, its own programs first.
//!
//! Pure: observations of the machine's memory and the time are arguments. Steps, times and
//! pressure limits are those of nodes without a controller ([`farpool_acms::next_harvest`]). A
//! controller gets one number, not one for new grants and one for old ones, so the guard band
//! between them is kept here: the offer falls at the limit, and rises only to a margin below it.
//!
//! Invariants: the offer never exceeds the limit or what the node donates; it rises by at most one
//! step per interval; use that changes by less than the margin never makes it oscillate.

use std::time::Duration;

use farpool_acms::{
    Class, HARVEST_MARGIN_PERMILLE, Harvest, MemoryUse, PRESSURE_RESUME_PERMILLE,
    PRESSURE_STOP_PERMILLE, Thresholds, next_harvest,
};
use farpool_host::{MemoryLevel, MemorySight};
use farpool_units::SUPERPAGE_BYTES;

/// Returns what may be lent in all, including what is lent. What others have written is no longer
/// available, so it is added back: a client that fills its grant changes nothing.
#[must_use]
pub fn lend_limit_bytes(sight: &MemorySight, lending: &Lending) -> u64 {
    let of_level = |level: &MemoryLevel| {
        let taken = level.total_bytes.saturating_sub(level.available_bytes);
        let own = MemoryUse {
            used_bytes: taken.saturating_sub(lending.backed_bytes),
            total_bytes: level.total_bytes,
            pressure_permille: sight.pressure_permille,
        };
        farpool_acms::lend_limit_bytes(&lending.thresholds, Class::Server, &own)
    };
    let limit = sight.levels.iter().map(of_level).min().unwrap_or(0);
    match sight.pressure_permille {
        Some(pressure) if pressure >= PRESSURE_STOP_PERMILLE => limit.min(lending.lent_bytes),
        _ => limit,
    }
}

fn may_rise(sight: &MemorySight) -> bool {
    sight.pressure_permille.is_none_or(|pressure| pressure < PRESSURE_RESUME_PERMILLE)
}

/// What a node may lend, and how much of it is lent.
#[derive(Clone, Copy, Debug)]
pub struct Lending {
    /// How much its own programs may use before it lends less.
    pub thresholds: Thresholds,
    /// Most memory it lends.
    pub donate_bytes: u64,
    /// Bytes that others were given.
    pub lent_bytes: u64,
    /// Those of them that take up this machine's memory. What was not written does not: it is still
    /// available, and adding it back would lend it twice.
    pub backed_bytes: u64,
}

/// Returns the offer after one observation of the memory at `now`.
#[must_use]
pub fn next_offer(old: Harvest, sight: &MemorySight, lending: &Lending, now: Duration) -> Harvest {
    let limit = lend_limit_bytes(sight, lending);
    let total = sight.total_bytes();
    let margin = total / 1000 * HARVEST_MARGIN_PERMILLE;
    let floor = limit.min(whole(lending.donate_bytes));
    let ceiling = limit.saturating_sub(margin).min(whole(lending.donate_bytes));
    if whole(floor) < old.offered_bytes {
        return next_harvest(old, floor.saturating_add(margin), total, now);
    }
    if whole(ceiling) <= old.offered_bytes || !may_rise(sight) {
        return old;
    }
    next_harvest(old, ceiling.saturating_add(margin), total, now)
}

fn whole(bytes: u64) -> u64 {
    bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_acms::{HARVEST_INTERVAL_MS, HARVEST_STEP_PERMILLE};
    use proptest::prelude::*;

    use farpool_units::GIB;

    fn share(bytes: u64, permille: u64) -> u64 {
        bytes / 1000 * permille
    }

    /// All that is lent was written.
    fn lending(lent_bytes: u64, donate_bytes: u64) -> Lending {
        let thresholds = Thresholds::default();
        Lending { thresholds, donate_bytes, lent_bytes, backed_bytes: lent_bytes }
    }

    fn sight(total_bytes: u64, available_bytes: u64) -> MemorySight {
        let levels = vec![MemoryLevel { total_bytes, available_bytes }];
        MemorySight { levels, pressure_permille: None }
    }

    /// Returns the offer after 200 samples, one every 200 ms.
    fn settled(mut harvest: Harvest, sight: &MemorySight, lent: u64, from_ms: u64) -> Harvest {
        for step in 0..200 {
            let now = Duration::from_millis(from_ms + step * 200);
            harvest = next_offer(harvest, sight, &lending(lent, 64 * GIB), now);
        }
        harvest
    }

    #[test]
    fn everything_above_threshold_and_margin_is_offered_after_a_while() {
        let harvest = settled(Harvest::default(), &sight(16 * GIB, 12 * GIB), 0, 0);
        // Its own programs use 4 GiB, and lending must not take its use over 80 %.
        let most = 16 * GIB / 100 * 80 - 4 * GIB;
        let margin = share(16 * GIB, HARVEST_MARGIN_PERMILLE);
        assert_eq!(harvest.offered_bytes, whole(most - margin));
    }

    #[test]
    fn the_tighter_of_machine_and_cgroup_counts() {
        let mut both = sight(16 * GIB, 12 * GIB);
        both.levels.push(MemoryLevel { total_bytes: GIB, available_bytes: GIB / 2 });
        let alone = settled(Harvest::default(), &sight(GIB, GIB / 2), 0, 0);
        assert_eq!(settled(Harvest::default(), &both, 0, 0), alone);
        assert!(alone.offered_bytes > 0);
        assert_eq!(both.tightest(), both.levels.last());
    }

    #[test]
    fn pressure_withdraws_what_is_unused_and_lets_the_rest_be() {
        let mut seen = sight(16 * GIB, 12 * GIB);
        let before = settled(Harvest::default(), &seen, 2 * GIB, 0);
        assert!(before.offered_bytes > 2 * GIB);
        let later = Duration::from_secs(100);
        seen.pressure_permille = Some(PRESSURE_STOP_PERMILLE - 1);
        assert_eq!(next_offer(before, &seen, &lending(2 * GIB, 64 * GIB), later), before);
        seen.pressure_permille = Some(PRESSURE_STOP_PERMILLE);
        let fallen = next_offer(before, &seen, &lending(2 * GIB, 64 * GIB), later);
        assert_eq!(fallen.offered_bytes, 2 * GIB);
        seen.pressure_permille = Some(PRESSURE_RESUME_PERMILLE);
        assert_eq!(settled(fallen, &seen, 2 * GIB, 200_000).offered_bytes, 2 * GIB);
        seen.pressure_permille = Some(0);
        assert!(settled(fallen, &seen, 2 * GIB, 200_000).offered_bytes > 2 * GIB);
    }

    #[test]
    fn filling_a_grant_changes_nothing() {
        let start = settled(Harvest::default(), &sight(16 * GIB, 12 * GIB), 0, 0);
        let later = Duration::from_secs(1000);
        for backed_bytes in [0, GIB, 4 * GIB] {
            let seen = sight(16 * GIB, 12 * GIB - backed_bytes);
            let lending = Lending { backed_bytes, ..lending(4 * GIB, 64 * GIB) };
            assert_eq!(next_offer(start, &seen, &lending, later), start, "{backed_bytes}");
        }
    }

    #[test]
    fn under_pressure_what_was_given_stays_given_written_or_not() {
        let mut seen = sight(16 * GIB, 12 * GIB);
        seen.pressure_permille = Some(PRESSURE_STOP_PERMILLE);
        let lending = Lending { backed_bytes: 0, ..lending(2 * GIB, 64 * GIB) };
        let before = Harvest { offered_bytes: 4 * GIB, rise_after: Duration::ZERO };
        let fallen = next_offer(before, &seen, &lending, Duration::from_secs(100));
        assert_eq!(fallen.offered_bytes, 2 * GIB);
    }

    #[test]
    fn nothing_seen_means_nothing_lent() {
        let blind = MemorySight { levels: Vec::new(), pressure_permille: None };
        let old = Harvest { offered_bytes: GIB, rise_after: Duration::ZERO };
        assert_eq!(next_offer(old, &blind, &lending(0, GIB), Duration::ZERO).offered_bytes, 0);
    }

    proptest! {
        #[test]
        fn bounds_hold_whatever_the_memory_does(
            total in GIB / 4..512 * GIB,
            donate in 0..512 * GIB,
            looks in prop::collection::vec(
                (0u64..=1000, 0u64..=1000, prop::option::of(0u16..=1000), 0u64..3000), 1..80,
            ),
        ) {
            let mut harvest = Harvest::default();
            let mut now = Duration::ZERO;
            let mut last_rise: Option<Duration> = None;
            let step = whole(share(total, HARVEST_STEP_PERMILLE)).max(SUPERPAGE_BYTES);
            for (available, lent, pressure, pause_ms) in looks {
                now += Duration::from_millis(pause_ms);
                let seen = MemorySight {
                    pressure_permille: pressure,
                    ..sight(total, share(total, available))
                };
                let lent = whole(share(harvest.offered_bytes, lent));
                let next = next_offer(harvest, &seen, &lending(lent, donate), now);
                prop_assert!(next.offered_bytes <= donate);
                // It falls at once: it is always within what the memory allows.
                prop_assert!(next.offered_bytes <= lend_limit_bytes(&seen, &lending(lent, donate)));
                prop_assert_eq!(next.offered_bytes % SUPERPAGE_BYTES, 0);
                if next.offered_bytes > harvest.offered_bytes {
                    prop_assert!(next.offered_bytes - harvest.offered_bytes <= step);
                    if let Some(last) = last_rise {
                        prop_assert!(now - last >= Duration::from_millis(HARVEST_INTERVAL_MS));
                    }
                    last_rise = Some(now);
                }
                harvest = next;
            }
        }

        /// Use that swings by less than the margin, whatever the client does with its grant, no
        /// longer moves the offer once it has settled where most is free.
        #[test]
        fn steady_use_does_not_make_it_swing(
            total in 2 * GIB..512 * GIB,
            base in 200u64..=900,
            lent in 0u64..=1000,
            swings in prop::collection::vec(0u64..=1000, 50..200),
        ) {
            let margin = share(total, HARVEST_MARGIN_PERMILLE) - SUPERPAGE_BYTES;
            let lowest = share(total, base);
            let start = settled(Harvest::default(), &sight(total, lowest + margin), 0, 0);
            for (at, swing) in (0u64..).zip(swings) {
                let lent = whole(share(start.offered_bytes, lent));
                // What a client uses is no longer available; the node's own use swings besides.
                let available = lowest + share(margin, swing);
                let seen = sight(total, available.saturating_sub(lent));
                prop_assume!(available >= lent);
                let now = Duration::from_secs(1000 + at);
                prop_assert_eq!(
                    next_offer(start, &seen, &lending(lent, 64 * GIB), now).offered_bytes,
                    start.offered_bytes
                );
            }
        }
    }
}
