//! The sidecar door with programs that keep discarding memory and using it again. The pager
//! unregisters such memory for a while (`pager::life::rest`), then registers it again and moves it
//! out. Every page is checked.

use std::path::PathBuf;

use farpool_e2e::jobs::{Job, PATIENCE, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{have, tree, turn};

const LIMIT_MIB: u64 = 32;
const HELD_MIB: &str = "96";
const ROUNDS: &str = "12";
/// Rounds of an attached program before it is detached from: memory rests by then.
const SEEN: usize = 4;
const ENDLESS: &str = "1000000";

fn compiled() -> Option<(PathBuf, tempfile::TempDir)> {
    have("gcc").then(|| {
        let directory = scratch();
        (
            compile_c("hot", include_str!("sidecar/hot.c"), &["-pthread"], directory.path()),
            directory,
        )
    })
}

fn runs(seeds: &[&str], modes: &[&str], judge: impl Fn(&Outcome, u64)) {
    let Some((program, directory)) = compiled() else { return };
    let _turn = turn();
    for seed in seeds {
        let arguments = [&[HELD_MIB, ROUNDS, seed], modes].concat();
        let program = program.to_string_lossy().into_owned();
        let job = Job { program: &program, arguments: &arguments, directory: directory.path() };
        let (outcome, peak_bytes) = job.run(Door::Sidecar, LIMIT_MIB);
        println!("{arguments:?}: peak {peak_bytes} bytes, {} rests", outcome.counter("rests"));
        outcome.require_success().require_far();
        assert!(outcome.stdout.ends_with("round\n0 wrong\n"), "{arguments:?}: {}", outcome.stdout);
        assert!(outcome.counter("rests") > 0, "nothing rested: {}", outcome.stats);
        judge(&outcome, peak_bytes);
    }
}

#[test]
fn memory_that_is_given_up_all_the_time_keeps_to_the_limit() {
    for modes in [&[][..], &["far"]] {
        runs(&["1", "2"], modes, |outcome, peak_bytes| {
            require_limit(outcome, peak_bytes, LIMIT_MIB);
        });
    }
}

#[test]
fn children_have_what_is_given_up_all_the_time() {
    runs(&["1", "2"], &["fork"], |_, _| {});
}

/// Memory rests no more once the program has moved memory.
#[test]
fn memory_that_is_given_up_all_the_time_can_be_moved() {
    runs(&["1"], &["far", "fork", "move"], |_, _| {});
}

#[test]
fn a_program_is_left_while_memory_of_it_rests() {
    let Some((program, _directory)) = compiled() else { return };
    let _turn = turn();
    let run = Run::local(&program).args([HELD_MIB, ENDLESS, "1"]).patience(PATIENCE);
    let mut running = run.start();
    let pid = running.pid();
    running.wait_for_output("round", 1);
    let limit = format!("{LIMIT_MIB}MiB");
    let mut keeper = Run::attach(pid, &limit).patience(PATIENCE).start();
    keeper.wait_for_output("of local memory now", 1);
    for _ in 0..2 {
        let rounds = running.stdout().matches("round").count();
        running.wait_for_output("round", rounds + SEEN);
        tree::signal(keeper.pid(), libc::SIGINT);
        keeper.finish().require_success();
        keeper = Run::attach(pid, &limit).patience(PATIENCE).start();
        keeper.wait_for_output("of local memory now", 1);
    }
    tree::signal(pid, libc::SIGTERM);
    let outcome = running.finish();
    assert!(outcome.require_success().stdout.ends_with("round\n0 wrong\n"));
    keeper.finish().require_success();
}
