//! Programs with copies of what is far: a blade that dies or stops costs a pause, and neither a
//! page nor the program.

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::checker::{COPYING, Checker, damage};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{PATIENCE, turn, wait_until};
use farpool_units::PAGE_BYTES;

const MEMORY: &str = "1GiB";
/// Pages that the program has, at most.
const ALL_PAGES: u64 = (80 << 20) / PAGE_BYTES as u64;

fn blades(count: usize) -> Vec<Blade> {
    (0..count).map(|_| Blade::start(MEMORY)).collect()
}

fn run_on(door: Door, blades: &[Blade]) -> Run {
    let run = Run::through(door, "16MiB").redundancy("2").patience(COPYING * 2);
    blades.iter().fold(run, |run, blade| run.blade(&blade.address(Transport::Tcp)))
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

/// Blades whose memory is a file that [`damage`] can reach.
fn blades_in_files() -> Vec<Blade> {
    (0..2).map(|_| Blade::start_persistent(MEMORY)).collect()
}

/// The program reads what was damaged from the other copy, and all of it is made anew: then the
/// blade that has the other one may die.
#[test]
fn a_copy_that_is_damaged_while_it_is_used_is_made_anew() {
    let _turn = turn();
    let mut blades = blades_in_files();
    let run = run_on(Door::Usual, &blades).args(["--verify-every", "1s"]);
    let program = Checker::start(run, 7, "discard,heap");
    damage(&blades[0]);
    wait_until("all damage to be mended", COPYING, || {
        (program.total("damaged_pages")? > 0 && program.total("replaced_copies")? > 3).then_some(())
    });
    program.wait_for_copies();
    // One pass over all of it after the last copy that was made anew.
    let mut seen = program.total("replaced_copies");
    wait_until("a time without damage", COPYING, || {
        let verified = program.total("verified_pages")?;
        wait_until("more to be verified", COPYING, || {
            (program.total("verified_pages")? > verified + 2 * ALL_PAGES).then_some(())
        });
        let now = program.total("replaced_copies");
        (std::mem::replace(&mut seen, now) == now).then_some(())
    });
    program.wait_for_copies();
    blades[1].kill();
    program.wait_for_fetches(1000);
    program.require_success();
}

/// Nobody reads these pages before the end.
#[test]
fn damage_is_found_that_no_program_has_met() {
    let _turn = turn();
    let blades = blades_in_files();
    let home = tempfile::tempdir().expect("a directory");
    let end = home.path().join("end");
    let script = "import hashlib, os, sys, time\n\
                  memory = os.urandom(64 << 20)\n\
                  known = hashlib.sha256(memory).digest()\n\
                  print('filled', flush=True)\n\
                  while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n\
                  assert hashlib.sha256(memory).digest() == known";
    let run = run_on(Door::Usual, &blades).args(["--verify-every", "1s"]);
    let mut running = run.program("python3").args(["-c", script]).arg(&end).start();
    running.wait_for_output("filled", 1);
    running.wait_until_far();
    damage(&blades[1]);
    let total = |running: &Running, name: &str| running.told()?["total"][name].as_u64();
    wait_until("the damage to be mended", COPYING, || {
        (total(&running, "replaced_copies")? > 0 && total(&running, "degraded_superpages")? == 0)
            .then_some(())
    });
    std::fs::write(&end, "").expect("a file");
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("has not what was stored there"), "{}", outcome.stderr);
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
