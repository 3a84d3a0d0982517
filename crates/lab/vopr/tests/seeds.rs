//! The trials of every test run: a few thousand seeds of each kind. `make soak` tries as many as
//! are asked for, and `cargo run -p farpool-vopr -- --mode MODE --seed SEED` replays one.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use farpool_pool::Refusals;
use farpool_vopr::{Flaws, Mode, run, run_with};

/// Seeds of each mode.
const SEEDS: u64 = 5_000;
/// Of a program with parity: more hosts take longer.
const PARITY_SEEDS: u64 = 2_000;

/// Tries all seeds on two threads. Returns the pages that were read, those that failed, and those
/// that blades replaced by others.
fn all(mode: Mode, seeds: u64) -> [u64; 3] {
    let [next, read, failed, lies] = [const { AtomicU64::new(0) }; 4];
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    match run(seed, mode) {
                        Ok(report) => {
                            read.fetch_add(report.tally.read, Relaxed);
                            failed.fetch_add(report.tally.failed, Relaxed);
                            lies.fetch_add(report.lies, Relaxed);
                        }
                        Err(violation) => panic!("{mode:?} seed {seed}: {}", violation.0),
                    }
                }
            });
        }
    });
    [read, failed, lies].map(AtomicU64::into_inner)
}

#[test]
fn no_wrong_byte_is_read_under_any_faults() {
    let [read, failed, lies] = all(Mode::Safety, SEEDS);
    assert!(read > 20 * SEEDS, "the trials read: {read}");
    assert!(failed > SEEDS, "the faults strike: {failed}");
    assert!(lies > SEEDS / 4, "blades lie: {lies}");
}

#[test]
fn nothing_fails_or_takes_long_while_blades_live() {
    let [read, failed, lies] = all(Mode::Liveness, SEEDS);
    assert!(read > 20 * SEEDS, "the trials read: {read}");
    assert_eq!((failed, lies), (0, 0));
}

#[test]
fn nothing_fails_or_takes_long_though_one_blade_dies_or_lies_where_there_are_copies() {
    let [read, failed, lies] = all(Mode::Copies, SEEDS);
    assert!(read > 20 * SEEDS, "the trials read: {read}");
    assert_eq!(failed, 0);
    assert!(lies > SEEDS / 4, "blades lie: {lies}");
}

#[test]
fn nothing_fails_or_takes_long_though_one_blade_dies_or_lies_where_there_is_parity() {
    let [read, failed, lies] = all(Mode::Parity, PARITY_SEEDS);
    assert!(read > 20 * PARITY_SEEDS, "the trials read: {read}");
    assert_eq!(failed, 0);
    assert!(lies > PARITY_SEEDS / 4, "blades lie: {lies}");
}

/// Of later seeds those that found something: a blade's lie came into the parity with memory that
/// was given back; what a blade that was given up had not any more was taken for damaged.
#[test]
fn what_later_seeds_found_stays_mended() {
    for seed in [2991, 4988] {
        assert_eq!(run(seed, Mode::Parity).err(), None, "seed {seed}");
    }
}

/// Without copies, or parity, the death of a blade costs pages.
#[test]
fn a_program_without_copies_is_found() {
    let flaws = Flaws { has_one_copy: true, ..Flaws::default() };
    for mode in [Mode::Copies, Mode::Parity] {
        let found = (0..100).filter_map(|seed| run_with(seed, mode, &flaws).err());
        let found: Vec<String> = found.map(|violation| violation.0).collect();
        assert!(found.iter().any(|it| it.contains("failed though blades live")), "{found:?}");
    }
}

/// What a blade says instead of a page is read as the page where nothing is sealed.
#[test]
fn a_program_that_believes_what_a_blade_says_is_found() {
    let flaws = Flaws { believes_lies: true, ..Flaws::default() };
    let found = (0..100).filter_map(|seed| run_with(seed, Mode::Safety, &flaws).err());
    let found: Vec<String> = found.map(|violation| violation.0).collect();
    assert!(found.iter().any(|it| it.contains("should be version")), "{found:?}");
}

/// Without the pauses that a pager leaves to a blade that refused pages, it sends them again and
/// again: some of the first seeds show it.
#[test]
fn a_program_that_never_leaves_a_full_blade_alone_is_found() {
    let refusals = Refusals::with_pauses(Duration::ZERO, Duration::ZERO);
    let restless = Flaws { refusals, ..Flaws::default() };
    let found = (0..100).filter_map(|seed| run_with(seed, Mode::Liveness, &restless).err());
    let found: Vec<String> = found.map(|violation| violation.0).collect();
    assert!(found.iter().any(|it| it.contains("writes refused within")), "{found:?}");
}

/// A blade that is never tried again keeps pages local for ever.
#[test]
fn a_program_that_never_tries_a_blade_again_is_found() {
    let hour = Duration::from_secs(3600);
    let sulky = Flaws { refusals: Refusals::with_pauses(hour, hour), ..Flaws::default() };
    let found = (0..100).filter_map(|seed| run_with(seed, Mode::Liveness, &sulky).err());
    let found: Vec<String> = found.map(|violation| violation.0).collect();
    assert!(found.iter().any(|it| it.contains("never taken")), "{found:?}");
}

#[test]
fn a_seed_replays() {
    for mode in [Mode::Safety, Mode::Liveness, Mode::Copies, Mode::Parity] {
        for seed in 0..50 {
            assert_eq!(run(seed, mode), run(seed, mode), "{mode:?} seed {seed}");
        }
    }
}
