//! Blades that refuse pages, or die before they hold any: the program continues with its local
//! memory.

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::jobs::{compile_c, scratch};
use farpool_e2e::run::{Door, Outcome, Run};
use farpool_e2e::{binaries, have, tree, turn};

const LIMIT: &str = "32MiB";
/// A process that may not write to files cannot write to the blade's memory (`shm`), either: each
/// page fails with EFBIG.
const WITHOUT_FILES: &str = "ulimit -f 0; exec \"$0\" \"$@\"";
/// A program that maps three times its limit.
const STRESS: [&str; 6] = ["--mib", "96", "--seconds", "4", "--ops", "touch"];
/// The most pages that may be tried in vain in the few seconds of a test: the first writes, and
/// some tries of 64 pages. A blade that refused everything was once sent 22 million in 100 s.
const MOST_TRIED: u64 = 4096;

fn stress_after(run: Run, script: &str) -> Outcome {
    run.program("sh")
        .args(["-c", script])
        .arg(binaries::program("farpool-stress"))
        .args(STRESS)
        .finish()
}

fn times(outcome: &Outcome, words: &str) -> usize {
    outcome.stderr.matches(words).count()
}

/// prlimit sets the hard limit, too. No pager fits in, and the program's memory stays local.
#[test]
fn a_program_that_may_open_hardly_any_files_is_named_or_ended() {
    const EXIT_OUTSIDE: i32 = 120;
    const SOURCE: &str = "
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        int main(void) { memset(malloc(64 << 20), 7, 64 << 20); for (;;) pause(); }";
    if !have("prlimit") || !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("holds", SOURCE, &["-O0"], directory.path());
    let start = |door, when| {
        let run = Run::through(door, "16MiB").args(["--when-outside", when]);
        run.program("prlimit").arg("-n8").arg(&program).start()
    };
    for door in [Door::Preload, Door::Sidecar] {
        let running = start(door, "warn");
        let line = running.wait_for_line("is not held to the limit");
        assert!(line.contains("(holds)") && line.contains("ulimit -n"), "{line}");
        tree::signal(running.program_pid(), libc::SIGTERM);
        let outcome = running.finish();
        assert_eq!(outcome.code, 128 + libc::SIGTERM, "{}", outcome.stderr);
    }
    // With the sidecar door the keeper would try again, as the limit may be raised.
    let outcome = start(Door::Preload, "fail").finish();
    assert_eq!(outcome.code, EXIT_OUTSIDE, "{}", outcome.stderr);
}

/// Each try injects a sidecar and a warden, which end again. They must not be taken for processes
/// of the program.
#[test]
fn a_program_that_no_sidecar_fits_into_is_named_once_while_it_works() {
    if !have("prlimit") || !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let source = include_str!("sidecar/headless.c");
    let program = compile_c("headless", source, &[], directory.path());
    // The program runs for some seconds, in which injection is tried repeatedly.
    let run = Run::through(Door::Sidecar, LIMIT).program("prlimit").arg("-n8");
    let outcome = run.arg(&program).args(["96", "1500", "stays"]).finish();
    outcome.require_success();
    assert_eq!(times(&outcome, "is not held to the limit"), 1, "{}", outcome.stderr);
    assert_eq!(times(&outcome, "farpool-warden"), 0, "{}", outcome.stderr);
}

#[test]
fn a_blade_that_takes_no_pages_is_left_alone_and_said_once() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    let address = blade.address(Transport::Shm);
    // A sidecar is a separate process, whose limits the keeper raises if it may.
    if may_raise_limits() {
        let beside = stress_after(Run::far(LIMIT).blade(&address), WITHOUT_FILES);
        beside.require_success().require_far();
    } else {
        let run = Run::through(Door::Sidecar, LIMIT).blade(&address);
        require_named(&stress_after(run, WITHOUT_FILES), "(RLIMIT_FSIZE)", "ulimit -f");
    }
    let run = Run::through(Door::Preload, LIMIT).blade(&address);
    require_refused(&stress_after(run, WITHOUT_FILES), &address);
}

/// Requires that the program was named as not held to the limit, had no far memory, and succeeded.
fn require_named(outcome: &Outcome, limit: &str, remedy: &str) {
    outcome.require_success();
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains(limit)).collect();
    assert_eq!(lines.len(), 1, "{}", outcome.stderr);
    assert!(lines[0].contains("is not held to the limit"), "{}", lines[0]);
    assert!(lines[0].contains(remedy), "{}", lines[0]);
    assert_eq!(outcome.counter("pages_written"), 0, "{:?}", outcome.stats);
}

/// The sidecar's memory would count against the program's own RLIMIT_DATA.
#[test]
fn a_program_with_little_room_for_private_memory_is_named() {
    let _turn = turn();
    let script = "ulimit -d 300000; exec \"$0\" \"$@\"";
    let outcome = stress_after(Run::through(Door::Sidecar, LIMIT), script);
    require_named(&outcome, "(RLIMIT_DATA)", "ulimit -d");
}

#[test]
fn a_program_with_little_processor_time_is_named_where_its_sidecar_has_no_more() {
    let _turn = turn();
    let script = "ulimit -t 100; exec \"$0\" \"$@\"";
    let outcome = stress_after(Run::through(Door::Sidecar, LIMIT), script);
    if may_raise_limits() {
        outcome.require_success().require_far();
    } else {
        require_named(&outcome, "(RLIMIT_CPU)", "ulimit -t");
    }
}

/// The limit concerns the keeper's own files: the board, and the memory of a private blade.
#[test]
fn a_limit_of_the_size_of_files_is_told_before_the_program_starts() {
    let _turn = turn();
    let run = |script: &str| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script]).arg(binaries::program("farpool"));
        let output = command.output().expect("a shell");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run("ulimit -f 1; \"$0\" run --local 32MiB -- true");
    assert!(code == Some(1) && said.contains("ulimit -f unlimited"), "{code:?} {said}");
    let (code, said) = run("ulimit -f 200000; \"$0\" run --local 32MiB -- true");
    assert!(code == Some(1) && said.contains("--quota"), "{code:?} {said}");
    let (code, said) = run("ulimit -f 200000; \"$0\" run --local 32MiB --quota 64MiB -- true");
    assert_eq!(code, Some(0), "{said}");
    // The keeper raises its own soft limit, and the program keeps the given one.
    let (code, said) = run("ulimit -S -f 200000; \"$0\" run --local 32MiB -- \
 sh -c 'test \"$(ulimit -S -f)\" = 200000'");
    assert_eq!(code, Some(0), "{said}");
}

fn may_raise_limits() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RESOURCE))
}

fn require_refused(outcome: &Outcome, address: &str) {
    outcome.require_success();
    assert_eq!(outcome.counter("pages_written"), 0, "{:?}", outcome.stats);
    assert!(outcome.counter("evictions") <= MOST_TRIED, "{:?}", outcome.stats);
    let said = format!("blade {address} takes no pages");
    assert_eq!(times(outcome, &said), 1, "{}", outcome.stderr);
    // 64 MiB over a limit of 32 MiB: reported at an eighth, then each time it has doubled.
    let overruns = times(outcome, "bytes over its limit of 33554432 bytes");
    assert!((1..=5).contains(&overruns), "{}", outcome.stderr);
}

#[test]
fn what_one_blade_does_not_take_goes_to_another() {
    let _turn = turn();
    let (refusing, other) = (Blade::start("512MiB"), Blade::start("512MiB"));
    let run = Run::through(Door::Preload, LIMIT)
        .blade(&refusing.address(Transport::Shm))
        .blade(&other.address(Transport::Tcp));
    let outcome = stress_after(run, WITHOUT_FILES);
    outcome.require_success().require_far();
    assert_eq!(times(&outcome, "takes no pages"), 1, "{}", outcome.stderr);
    assert_eq!(times(&outcome, "over its limit"), 0, "{}", outcome.stderr);
}

/// Runs the program with these blades. The first is killed before the program needs far memory.
fn after_the_end_of_the_first(blades: &mut [Blade]) -> Outcome {
    let directory = tempfile::tempdir().expect("a directory for the gate");
    let gate = directory.path().join("gate");
    let script = format!(
        "echo up; until [ -e {} ]; do sleep 0.01; done; exec \"$0\" \"$@\"",
        gate.display()
    );
    let run = blades.iter().fold(Run::far(LIMIT), |run, it| run.blade(&it.address(Transport::Tcp)));
    let mut running = run
        .program("sh")
        .args(["-c", &script])
        .arg(binaries::program("farpool-stress"))
        .args(STRESS)
        .start();
    running.wait_for_output("up", 1);
    blades[0].kill();
    std::fs::write(&gate, "").expect("gate");
    let outcome = running.finish();
    outcome.require_success();
    let said = format!("blade {} is lost", blades[0].address(Transport::Tcp));
    assert_eq!(times(&outcome, &said), 1, "{}", outcome.stderr);
    outcome
}

#[test]
fn a_blade_that_dies_before_it_is_needed_costs_nothing() {
    let _turn = turn();
    let outcome = after_the_end_of_the_first(&mut [Blade::start("512MiB")]);
    assert_eq!(outcome.counter("pages_written"), 0, "{:?}", outcome.stats);
    assert!(times(&outcome, "bytes over its limit of 33554432 bytes") > 0, "{}", outcome.stderr);
}

#[test]
fn of_two_blades_the_living_one_is_used() {
    let _turn = turn();
    let outcome = after_the_end_of_the_first(&mut [Blade::start("512MiB"), Blade::start("512MiB")]);
    outcome.require_far();
    assert_eq!(times(&outcome, "over its limit"), 0, "{}", outcome.stderr);
}

/// The library can refuse a fork. Through the sidecar door, the child ends instead when it touches
/// lost memory.
#[test]
fn a_fork_that_cannot_share_fails_and_the_program_goes_on() {
    let _turn = turn();
    let directory = tempfile::tempdir().expect("a directory for the gate");
    let gate = directory.path().join("gate");
    let mut blade = Blade::start("512MiB");
    let mut running = Run::through(Door::Preload, LIMIT)
        .blade(&blade.address(Transport::Shm))
        .own_program("farpool-cases")
        .args(["fork-without-blade"])
        .env("FARPOOL_CASE_GATE", &gate)
        .start();
    running.wait_for_output("filled", 1);
    // The program has the blade's memory by a descriptor, which stays valid when the blade ends.
    blade.kill();
    std::fs::write(&gate, "").expect("gate");
    let outcome = running.finish();
    outcome.require_success();
    assert_eq!(times(&outcome, "fork fails with ENOMEM"), 1, "{}", outcome.stderr);
}
