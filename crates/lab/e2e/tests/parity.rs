//! Programs with parity of what is far: a blade that dies, stops or damages what it has costs a
//! pause, and neither a page nor the program.

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::checker::{COPYING, Checker, damage};
use farpool_e2e::run::{Door, Run};
use farpool_e2e::{PATIENCE, turn, wait_until};

const MEMORY: &str = "1GiB";

fn run_on(door: Door, blades: &[Blade]) -> Run {
    let run = Run::through(door, "16MiB").redundancy("parity").patience(COPYING * 2);
    blades.iter().fold(run, |run, blade| run.blade(&blade.address(Transport::Tcp)))
}

fn blades(count: usize) -> Vec<Blade> {
    (0..count).map(|_| Blade::start(MEMORY)).collect()
}

/// Takes a blade that has memory of the program.
fn take_used(blades: &mut Vec<Blade>) -> Blade {
    let bytes = |blade: &Blade| blade.stat()["blades"][0]["used_bytes"].as_u64();
    let used = blades.iter().position(|blade| bytes(blade).is_some_and(|it| it > 0));
    blades.remove(used.expect("a blade that is used"))
}

/// Through either door: one is killed, what it had is made again on others, a second one is killed.
fn two_deaths(door: Door, seed: u32) {
    let mut blades = blades(6);
    let program = Checker::start(run_on(door, &blades), seed, "discard,heap,pipe,protect");
    program.wait_for_copies();
    let mut first = take_used(&mut blades);
    first.kill();
    program.wait_for_loss();
    program.wait_for_copies();
    program.wait_for_fetches(1000);
    take_used(&mut blades).kill();
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

/// With as many blades as a group needs nothing can be made again before the dead one is back.
#[test]
fn a_blade_that_comes_back_empty_is_used_again() {
    let _turn = turn();
    let mut blades = blades(5);
    let program = Checker::start(run_on(Door::Usual, &blades), 3, "discard,heap,pipe,protect");
    blades[0].kill();
    program.wait_for_loss();
    program.wait_for_fetches(1000);
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
    let mut blades = blades(6);
    let run = run_on(Door::Usual, &blades).args(["--deadline", "600s"]);
    let program = Checker::start(run, 4, "discard,heap,pipe,protect");
    program.wait_for_copies();
    let silent = take_used(&mut blades);
    silent.pause(true);
    program.wait_for_loss();
    program.wait_for_fetches(1000);
    program.require_success();
}

/// Children of fork read their parent's pages by the rest of their groups, also those born after
/// the loss; what several share is made again, too, so that a second blade may die.
#[test]
fn forks_before_and_after_two_losses_read_what_their_parent_had() {
    let _turn = turn();
    let mut blades = blades(6);
    let program = Checker::start(run_on(Door::Usual, &blades), 5, "fork,discard,heap");
    take_used(&mut blades).kill();
    program.wait_for_loss();
    program.wait_for_fetches(5_000);
    program.wait_for_copies();
    take_used(&mut blades).kill();
    program.wait_for_fetches(5_000);
    program.require_success();
}

/// What one blade damaged is made again from the others; then one of these may die.
#[test]
fn what_is_damaged_is_made_anew() {
    let _turn = turn();
    let mut blades: Vec<Blade> = (0..6).map(|_| Blade::start_persistent(MEMORY)).collect();
    let run = run_on(Door::Usual, &blades).args(["--verify-every", "1s"]);
    let program = Checker::start(run, 7, "discard,heap");
    program.wait_for_copies();
    let damaged = take_used(&mut blades);
    damage(&damaged);
    wait_until("all damage to be mended", COPYING, || {
        (program.total("damaged_pages")? > 0 && program.total("replaced_copies")? > 0).then_some(())
    });
    program.wait_for_copies();
    program.wait_for_fetches(1000);
    program.require_success();
}

/// With a second blade the program ends as without parity, and says what was lost.
#[test]
fn when_two_blades_are_lost_at_once_the_program_ends_with_a_clear_message() {
    let _turn = turn();
    let mut blades = blades(5);
    let run = run_on(Door::Usual, &blades).args(["--deadline", "8s"]);
    let program = Checker::start(run, 6, "discard,heap");
    blades.iter_mut().take(3).for_each(Blade::kill);
    program.running.finish().require_lost("far memory is lost");
}
