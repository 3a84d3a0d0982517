//! Programs with copies of what is far: a blade that dies or stops costs a pause, and neither a
//! page nor the program.

use std::time::Duration;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{PATIENCE, turn, wait_until};

const THREADS: usize = 2;
const MEMORY: &str = "1GiB";
/// Copying is slow on purpose while the program uses its far memory.
const COPYING: Duration = Duration::from_secs(120);

fn blades(count: usize) -> Vec<Blade> {
    (0..count).map(|_| Blade::start(MEMORY)).collect()
}

fn run_on(door: Door, blades: &[Blade]) -> Run {
    let run = Run::through(door, "16MiB").redundancy("2").patience(COPYING * 2);
    blades.iter().fold(run, |run, blade| run.blade(&blade.address(Transport::Tcp)))
}

/// A program that checks every page it reads, until it is told to end.
struct Checker {
    running: Running,
    end: tempfile::TempDir,
}

impl Checker {
    /// Starts one of 64 MiB, part of it far.
    fn start(run: Run, seed: u32, operations: &str) -> Checker {
        let end = tempfile::tempdir().expect("a directory");
        let mut running = run
            .own_program("farpool-stress")
            .args(["--mib", "64", "--threads", &THREADS.to_string(), "--progress"])
            .args(["--seconds", "600", "--seed", &seed.to_string()])
            .args(["--ops", operations, "--until"])
            .arg(end.path().join("end"))
            .start();
        running.wait_for_output("filled", THREADS);
        running.wait_until_far();
        Checker { running, end }
    }

    fn degraded(&self) -> Option<u64> {
        self.running.told()?["total"]["degraded_superpages"].as_u64()
    }

    fn wait_for_loss(&self) {
        wait_until("the loss of a blade to be told", PATIENCE, || {
            self.running.stderr().contains("read from their copies").then_some(())
        });
    }

    fn wait_for_copies(&self) {
        wait_until("all copies to be there again", COPYING, || {
            (self.degraded()? == 0).then_some(())
        });
    }

    fn wait_for_fetches(&self, count: u64) {
        let before = self.running.fetched().unwrap_or(0);
        wait_until("pages to be fetched", COPYING, || {
            let has_failed = self.running.stderr().contains("far memory is lost");
            assert!(!has_failed, "{}", self.running.stderr());
            (self.running.fetched()? > before + count).then_some(())
        });
    }

    /// All that it read was right, to the end.
    fn require_success(self) {
        std::fs::write(self.end.path().join("end"), "").expect("a file");
        let outcome = self.running.finish();
        outcome.require_success().require_far();
        assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    }
}

/// Through either door: one is killed, what it had is copied to others, a second one is killed.
fn two_deaths(door: Door, seed: u32) {
    let mut blades = blades(3);
    let program = Checker::start(run_on(door, &blades), seed, "discard,heap,pipe,protect");
    blades[0].kill();
    program.wait_for_loss();
    program.wait_for_copies();
    blades[1].kill();
    wait_until("the second loss", PATIENCE, || (program.degraded()? > 0).then_some(()));
    program.wait_for_fetches(1000);
    program.require_success();
}

#[test]
fn two_blades_die_one_after_the_other_under_a_preloaded_library() {
    let _turn = turn();
    two_deaths(Door::Preload, 1);
}

#[test]
fn two_blades_die_one_after_the_other_under_a_sidecar() {
    let _turn = turn();
    two_deaths(Door::Sidecar, 2);
}

/// A blade that was killed is started again, empty, and gets the copies that are missing: then the
/// other one may die.
#[test]
fn a_blade_that_comes_back_empty_is_used_again() {
    let _turn = turn();
    let mut blades = blades(2);
    let program = Checker::start(run_on(Door::Usual, &blades), 3, "discard,heap,pipe,protect");
    blades[0].kill();
    program.wait_for_loss();
    blades[0].start_again(MEMORY);
    program.wait_for_copies();
    blades[1].kill();
    program.wait_for_fetches(1000);
    program.require_success();
}

/// A stopped blade says nothing, and its connections stay open.
#[test]
fn a_blade_that_says_nothing_is_given_up_long_before_the_deadline() {
    let _turn = turn();
    let blades = blades(2);
    let run = run_on(Door::Usual, &blades).args(["--deadline", "600s"]);
    let program = Checker::start(run, 4, "discard,heap,pipe,protect");
    blades[0].pause(true);
    program.wait_for_loss();
    program.wait_for_fetches(1000);
    program.require_success();
}

/// Children of fork read their parent's pages from the copies, also those born after the loss; what
/// several share is copied, too, so that a second blade may die.
#[test]
fn forks_before_and_after_two_losses_read_what_their_parent_had() {
    let _turn = turn();
    let mut blades = blades(3);
    let program = Checker::start(run_on(Door::Usual, &blades), 5, "fork,discard,heap");
    blades[2].kill();
    program.wait_for_loss();
    program.wait_for_fetches(5_000);
    program.wait_for_copies();
    blades[0].kill();
    program.wait_for_fetches(5_000);
    program.require_success();
}

/// With the last copy the program ends as without copies, and says what was lost.
#[test]
fn when_all_copies_are_lost_the_program_ends_with_a_clear_message() {
    let _turn = turn();
    let mut blades = blades(2);
    let run = run_on(Door::Usual, &blades).args(["--deadline", "8s"]);
    let program = Checker::start(run, 6, "discard,heap");
    blades.iter_mut().for_each(Blade::kill);
    program.running.finish().require_lost("far memory is lost");
}
