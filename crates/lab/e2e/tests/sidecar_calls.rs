//! Random memory calls against a plain model, with half of the memory far.
//!
//! FARPOOL_CALLS_RUNS is the number of runs, FARPOOL_CALLS_SEED the seed of the first run, and
//! FARPOOL_CALLS_THREADS the number of threads of the program.

use std::time::Duration;

use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Run};
use farpool_e2e::{have, turn};

const LIMIT: &str = "24MiB";
/// Steps of each thread: about 2 s in all.
const STEPS: &str = "4000";
const RUNS: u64 = 10;
const FIRST_SEED: u64 = 101;
const THREADS: u64 = 1;

fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn memory_holds_what_a_model_says() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let source = include_str!("sidecar/memory_calls.c");
    let program = compile_c("memory_calls", source, &["-pthread"], directory.path());
    let first = asked("FARPOOL_CALLS_SEED").unwrap_or(FIRST_SEED);
    let threads = asked("FARPOOL_CALLS_THREADS").unwrap_or(THREADS).to_string();
    for seed in first..first + asked("FARPOOL_CALLS_RUNS").unwrap_or(RUNS) {
        let forks = if seed % 2 == 0 { "0" } else { "1" };
        let run = Run::through(Door::Sidecar, LIMIT).program(&program);
        let run = run.args([&seed.to_string(), STEPS, &threads, forks]);
        let outcome = run.patience(Duration::from_secs(100)).finish();
        assert_eq!(outcome.stdout, "ok\n", "seed {seed}: {}", outcome.stderr);
        outcome.require_far();
    }
}
