//! The kernel migrates pages while they are moved out and back. No program may be affected.
//!
//! On Linux 6.18 UFFDIO_MOVE moves pages under migration without counting them
//! (`pager::space::moves`). Before the pager checked the page map, one run in three of the first
//! test ended with "a frame of the victim buffer is missing".

use std::time::Duration;

use farpool_e2e::compaction::Compaction;
use farpool_e2e::run::Run;
use farpool_e2e::{have, turn};

const PATIENCE: Duration = Duration::from_secs(150);
const RUNS: u64 = 3;
/// The least rounds of compaction with which the test counts as done under compaction.
const LEAST_ROUNDS: u32 = 10;

#[test]
fn python_under_compaction() {
    let _turn = turn();
    if !have("python3") {
        return;
    }
    let Some(compaction) = Compaction::start() else { return };
    let script = "import hashlib, random
random.seed(1)
d = {i: random.random() for i in range(300000)}
s = sorted(d.values())
print(len(s), sum(s[::1000]), hashlib.md5(repr(s).encode()).hexdigest())";
    let expected = Run::local("python3").args(["-c", script]).patience(PATIENCE).finish();
    for _ in 0..RUNS {
        let run = Run::far("32MiB").program("python3").args(["-c", script]).patience(PATIENCE);
        let outcome = run.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.stdout, expected.stdout, "{}", outcome.stderr);
    }
    assert!(compaction.rounds() >= LEAST_ROUNDS, "{} rounds", compaction.rounds());
}

fn stress(ops: &str, limit: &str, threads: &str) {
    let Some(compaction) = Compaction::start() else { return };
    for seed in 0..RUNS {
        let run = Run::far(limit)
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", threads, "--seconds", "3"])
            .args(["--seed", &seed.to_string(), "--ops", ops])
            .patience(PATIENCE);
        run.finish().require_success().require_far();
    }
    assert!(compaction.rounds() >= LEAST_ROUNDS, "{} rounds", compaction.rounds());
}

/// The program checks every page while it makes memory calls of every kind except forks.
#[test]
fn every_memory_call_under_compaction() {
    let _turn = turn();
    stress("discard,free,advise,protect,unmap,mremap,heap,pipe,file,direct,uring", "10MiB", "4");
}

/// A child inherits a page that is under migration during the fork like any other.
#[test]
fn forks_under_compaction() {
    let _turn = turn();
    stress("discard,unmap,mremap,heap,fork", "40MiB", "3");
}
