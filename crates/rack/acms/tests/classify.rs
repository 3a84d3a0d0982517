//! Classes, thresholds and the harvest, against what Figure 3 of the paper says.

use std::time::Duration;

use farpool_acms::{
    Band, Class, HARVEST_HOLD_MS, HARVEST_INTERVAL_MS, Harvest, MemoryUse, ThresholdError,
    Thresholds, lend_limit_bytes, next_harvest,
};
use farpool_units::GIB;
use proptest::prelude::*;

fn usage(permille: u64) -> MemoryUse {
    MemoryUse { used_bytes: permille, total_bytes: 1_000, pressure_permille: None }
}

fn bands() -> impl Strategy<Value = Thresholds> {
    proptest::sample::subsequence((1..=100u8).collect::<Vec<_>>(), 4).prop_map(|edges| {
        let band = |low, high| Band::new(low, high).expect("ascending");
        Thresholds::new(band(edges[0], edges[1]), band(edges[2], edges[3])).expect("ascending")
    })
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![Just(Class::Server), Just(Class::Neutral), Just(Class::Client)]
}

#[test]
fn thresholds_are_read_and_refused_with_the_reason() {
    let band = |text: &str| text.parse::<Band>();
    assert_eq!(band("40%:50%"), Ok(Band { low_percent: 40, high_percent: 50 }));
    assert_eq!(band("40%:50%").expect("valid").to_string(), "40%:50%");
    for text in
        ["", "40:50", "40%", "40%:50", "+40%:50%", "-1%:5%", "a%:b%", "40%:50%:60%", "256%:1%"]
    {
        assert_eq!(band(text), Err(ThresholdError::Form(text.to_owned())));
    }
    assert_eq!(band("40%:101%"), Err(ThresholdError::AboveAll(101)));
    assert_eq!(band("50%:40%"), Err(ThresholdError::Reversed { low: 50, high: 40 }));
    assert_eq!(band("50%:50%"), Err(ThresholdError::Reversed { low: 50, high: 50 }));
    let both = |min: &str, max: &str| {
        Thresholds::new(band(min).expect("valid"), band(max).expect("valid"))
    };
    let crossed = ThresholdError::Crossed { min_high: 80, max_low: 80 };
    assert_eq!(both("40%:80%", "80%:90%"), Err(crossed));
    assert_eq!(both("0%:80%", "81%:90%"), Err(ThresholdError::NeverServer));
    assert_eq!(both("40%:50%", "80%:90%"), Ok(Thresholds::default()));
}

#[test]
fn figure_3_step_by_step() {
    let thresholds = Thresholds::default();
    let mut class = Class::Neutral;
    let story = [
        (450, Class::Neutral),
        (400, Class::Neutral),
        (399, Class::Server),
        (500, Class::Server),
        (501, Class::Neutral),
        (900, Class::Neutral),
        (901, Class::Client),
        (800, Class::Client),
        (799, Class::Neutral),
        (5_000, Class::Client),
        (0, Class::Neutral),
        (0, Class::Server),
    ];
    for (permille, expected) in story {
        class = thresholds.next(class, &usage(permille));
        assert_eq!(class, expected, "at {permille}");
    }
}

#[test]
fn pressure_stops_lending_and_a_node_without_memory_never_lends() {
    let thresholds = Thresholds::default();
    let pressed = |pressure| MemoryUse { pressure_permille: Some(pressure), ..usage(100) };
    assert_eq!(thresholds.next(Class::Server, &pressed(49)), Class::Server);
    assert_eq!(thresholds.next(Class::Server, &pressed(50)), Class::Neutral);
    assert_eq!(thresholds.next(Class::Neutral, &pressed(10)), Class::Neutral);
    assert_eq!(thresholds.next(Class::Neutral, &pressed(9)), Class::Server);
    let none = MemoryUse { used_bytes: 0, total_bytes: 0, pressure_permille: None };
    assert_eq!(thresholds.next(Class::Server, &none), Class::Neutral);
}

proptest! {
    #[test]
    fn use_that_wanders_in_a_guard_band_never_changes_the_class(
        thresholds in bands(),
        class in class(),
        upper: bool,
        walk in proptest::collection::vec(0.0..=1.0f64, 1..100),
    ) {
        // The bands in which use keeps a class: a server's the lower, a client's the upper, a
        // neutral node's both.
        let upper = match class {
            Class::Server => false,
            Class::Client => true,
            Class::Neutral => upper,
        };
        let band = if upper { thresholds.max() } else { thresholds.min() };
        let (low, high) = (u64::from(band.low_percent) * 10, u64::from(band.high_percent) * 10);
        for share in walk {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss,
                reason = "within 0..=1000")]
            let permille = low + ((high - low) as f64 * share) as u64;
            prop_assert_eq!(thresholds.next(class, &usage(permille)), class);
        }
    }

    #[test]
    fn client_and_server_never_follow_each_other(
        thresholds in bands(),
        uses in proptest::collection::vec(0..2_000u64, 1..200),
    ) {
        let mut class = Class::Neutral;
        for permille in uses {
            let next = thresholds.next(class, &usage(permille));
            prop_assert!(next == class || class == Class::Neutral || next == Class::Neutral);
            class = next;
        }
    }

    #[test]
    fn the_offer_rises_slowly_falls_at_once_and_stays_below_the_limit(
        uses in proptest::collection::vec(0..1_000u64, 1..200),
    ) {
        let (thresholds, total) = (Thresholds::default(), 64 * GIB);
        let mut harvest = Harvest::default();
        let (mut fell_at, mut rose_at): (Option<u64>, Option<u64>) = (None, None);
        for (second, permille) in uses.into_iter().enumerate() {
            let now_ms = second as u64 * 500;
            let usage =
                MemoryUse { used_bytes: total / 1000 * permille, total_bytes: total, pressure_permille: None };
            let limit = lend_limit_bytes(&thresholds, Class::Server, &usage);
            let next = next_harvest(harvest, limit, total, Duration::from_millis(now_ms));
            prop_assert!(next.offered_bytes <= limit);
            if next.offered_bytes > harvest.offered_bytes {
                prop_assert!(next.offered_bytes - harvest.offered_bytes <= total / 16);
                prop_assert!(fell_at.is_none_or(|at| now_ms >= at + HARVEST_HOLD_MS));
                prop_assert!(rose_at.is_none_or(|at| now_ms >= at + HARVEST_INTERVAL_MS));
                rose_at = Some(now_ms);
            } else if next.offered_bytes < harvest.offered_bytes {
                fell_at = Some(now_ms);
            }
            harvest = next;
        }
    }
}

#[test]
fn only_a_server_lends() {
    let thresholds = Thresholds::default();
    let usage = MemoryUse { used_bytes: 20, total_bytes: 100, pressure_permille: None };
    assert_eq!(lend_limit_bytes(&thresholds, Class::Server, &usage), 60);
    assert_eq!(lend_limit_bytes(&thresholds, Class::Neutral, &usage), 0);
    assert_eq!(lend_limit_bytes(&thresholds, Class::Client, &usage), 0);
}
