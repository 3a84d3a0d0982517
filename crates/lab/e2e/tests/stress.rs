//! `farpool-stress` and the small cases in real processes, with every transport, and with little
//! and much local memory.

use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::time::Duration;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::merging::Merging;
use farpool_e2e::run::{Door, Outcome, Run, Running};
use farpool_e2e::{binaries, turn};

/// Everything but fork, which has its own tests.
const QUIET_OPS: &str =
    "discard,free,advise,protect,unmap,mremap,spawn,heap,pipe,file,direct,uring";
const ALL_OPS: &str =
    "discard,free,advise,protect,unmap,mremap,spawn,heap,pipe,file,direct,uring,fork";
/// What can go wrong with pages that the kernel merges.
const MERGE_OPS: &str = "merge,discard,free,mremap,pipe,direct,uring,fork";
/// Memory that the stress program maps, in MiB.
const STRESS_MIB: u64 = 96;
/// The memory of a blade for a program that forks. Each layer takes whole superpages: the parent's
/// seven take 5 GiB in the end, and each child that runs or has ended within its lease adds about
/// 0.7 GiB.
const FORKS_MEMORY: &str = "16GiB";

fn stress(run: Run, ops: &str, threads: u32, seed: u64) -> Outcome {
    let mib = STRESS_MIB.to_string();
    let outcome = run
        .own_program("farpool-stress")
        .args(["--mib", &mib, "--threads", &threads.to_string(), "--seconds", "3"])
        .args(["--seed", &seed.to_string(), "--ops", ops])
        .patience(Duration::from_secs(100))
        .finish();
    outcome.require_success();
    outcome
}

fn limit(percent: u64) -> String {
    format!("{}KiB", (STRESS_MIB * 1024 * percent / 100).max(4096))
}

#[test]
fn shm_from_one_to_ninety_percent() {
    let _turn = turn();
    for (door, percent, seed) in [
        (Door::Preload, 1, 11),
        (Door::Usual, 10, 12),
        (Door::Preload, 25, 13),
        (Door::Usual, 50, 14),
        (Door::Usual, 90, 15),
    ] {
        let outcome = stress(Run::through(door, &limit(percent)), QUIET_OPS, 4, seed);
        outcome.require_far();
    }
}

#[test]
fn shm_with_forks() {
    let _turn = turn();
    for (door, percent, seed) in
        [(Door::Usual, 40, 21), (Door::Preload, 70, 22), (Door::Usual, 90, 23)]
    {
        stress(Run::through(door, &limit(percent)), ALL_OPS, 3, seed).require_far();
    }
}

#[test]
fn unix_and_tcp() {
    let _turn = turn();
    let blade = Blade::start("1GiB");
    for (door, transport, percent, seed) in [
        (Door::Usual, Transport::Unix, 10, 31),
        (Door::Preload, Transport::Tcp, 10, 32),
        (Door::Usual, Transport::Tcp, 60, 33),
    ] {
        let run = Run::through(door, &limit(percent)).blade(&blade.address(transport));
        stress(run, QUIET_OPS, 4, seed).require_far();
    }
}

#[test]
fn tcp_with_forks() {
    let _turn = turn();
    let blade = Blade::start(FORKS_MEMORY);
    let run = Run::far(&limit(60)).blade(&blade.address(Transport::Tcp));
    stress(run, ALL_OPS, 3, 41).require_far();
}

#[test]
fn two_blades() {
    let _turn = turn();
    let (one, other) = (Blade::start(FORKS_MEMORY), Blade::start(FORKS_MEMORY));
    for (door, transport, ops, percent, seed) in [
        (Door::Usual, Transport::Shm, QUIET_OPS, 20, 51),
        (Door::Preload, Transport::Tcp, QUIET_OPS, 20, 52),
        (Door::Usual, Transport::Unix, ALL_OPS, 60, 53),
    ] {
        let run = Run::through(door, &limit(percent));
        let run = run.blade(&one.address(transport)).blade(&other.address(transport));
        stress(run, ops, 3, seed).require_far();
    }
    let used = |blade: &Blade| blade.stat()["blades"][0]["pages_written"].as_u64();
    assert!(used(&one) > Some(0) && used(&other) > Some(0), "both blades are used");
}

/// Runs `farpool blades PID …` on a running program.
fn change_blades(running: &Running, arguments: &[&str]) -> String {
    let mut command = std::process::Command::new(binaries::program("farpool"));
    command.arg("blades").arg(running.pid().to_string()).args(arguments);
    let output = command.output().expect("farpool blades");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stderr, of_program) = (text(&output.stderr), running.stderr());
    assert!(output.status.success(), "{arguments:?}: {stderr}; the program: {of_program}");
    text(&output.stdout)
}

/// A program and its children continue and keep all their data while their memory moves from blade
/// to blade, and each blade is killed after it was left.
#[test]
fn memory_moves_while_programs_run() {
    const MOVES: usize = 5;
    let _turn = turn();
    for (door, transport, ops, percent, seed) in [
        (Door::Usual, Transport::Tcp, QUIET_OPS, 20, 71),
        (Door::Preload, Transport::Shm, QUIET_OPS, 20, 72),
        (Door::Preload, Transport::Tcp, ALL_OPS, 60, 73),
        (Door::Usual, Transport::Unix, ALL_OPS, 60, 74),
    ] {
        let blade = || Blade::start_with(FORKS_MEMORY, &["--lease", "1s"]);
        let mut here = blade();
        let directory = tempfile::tempdir().expect("directory");
        let moved = directory.path().join("moved");
        let mib = STRESS_MIB.to_string();
        let running = Run::through(door, &limit(percent))
            .blade(&here.address(transport))
            .args(["--seal", "remote"]) // where it is TCP
            .own_program("farpool-stress")
            .args(["--mib", &mib, "--threads", "3", "--seconds", "200"])
            .args(["--seed", &seed.to_string(), "--ops", ops, "--until"])
            .args([&moved])
            .patience(Duration::from_secs(100))
            .start();
        running.wait_until_far();
        for _ in 0..MOVES {
            let next = blade();
            let (from, to) = (here.address(transport), next.address(transport));
            let left = change_blades(&running, &["--add", &to, "--leave", &from, "--wait"]);
            assert!(left.contains(&to) && !left.contains(&from), "{left}");
            here.kill(); // nobody may need it any more
            here = next;
        }
        std::fs::write(&moved, "").expect("written");
        let outcome = running.finish();
        outcome.require_success();
        outcome.require_far();
        assert!(!outcome.stderr.contains("lost"), "{}", outcome.stderr);
    }
}

/// Runs a case through both doors, which give the same guarantees.
fn case(name: &str, limit: &str) {
    let _turn = turn();
    for door in [Door::Sidecar, Door::Preload] {
        println!("{door:?}");
        require_case(Run::through(door, limit), name);
    }
}

/// Runs a case that only the preloaded library could fail: it adds threads to the program, and
/// variables to the environments of programs that it starts.
fn case_of_the_library(name: &str, limit: &str) {
    let _turn = turn();
    require_case(Run::through(Door::Preload, limit), name);
}

fn require_case(run: Run, name: &str) {
    let outcome = run.own_program("farpool-cases").args([name]).finish();
    outcome.require_success();
    assert!(outcome.counter("pages_written") > 0, "nothing was far: {:?}", outcome.stats);
}

/// Over a socket the pager reads pages, not the kernel.
#[test]
fn shared_pages_that_nobody_may_read() {
    let _turn = turn();
    let blade = Blade::start("1GiB");
    require_case(Run::far("24MiB").blade(&blade.address(Transport::Unix)), "fork-no-access");
}

/// Pages that are moved out unchanged are not written again, and changed pages are.
#[test]
fn unchanged_pages_are_not_written() {
    let _turn = turn();
    let blade = Blade::start("1GiB");
    for transport in [Transport::Shm, Transport::Tcp] {
        let run = Run::far("16MiB").blade(&blade.address(transport));
        let outcome = run.own_program("farpool-cases").args(["unchanged-pages"]).finish();
        outcome.require_success();
        let (written, not) = (outcome.counter("pages_written"), outcome.counter("clean_drops"));
        assert!(written > 0 && not > written / 4, "{transport:?}: {written} written, {not} not");
    }
}

/// Pages that the kernel has merged with equal ones. The library moves them out as they are, the
/// sidecar makes them the program's own first.
#[test]
fn pages_that_are_merged() {
    let _turn = turn();
    let Some(_merging) = Merging::start() else { return };
    require_case(Run::through(Door::Preload, "24MiB"), "merged-unsplit");
    require_case(Run::through(Door::Sidecar, "24MiB"), "merged");
}

/// Pages that are merged while they are written to, discarded, used for I/O and shared by forks.
#[test]
fn merged_pages_in_use() {
    let _turn = turn();
    let Some(_merging) = Merging::start() else { return };
    for (door, seed) in [(Door::Preload, 81), (Door::Sidecar, 82)] {
        stress(Run::through(door, &limit(25)), MERGE_OPS, 3, seed).require_far();
    }
}

/// Pages that a device writes to while a child shares them and the evictor moves them out.
#[test]
fn reads_past_the_page_cache_beside_a_child() {
    let mut options = std::fs::File::options();
    let path = std::env::temp_dir().join(format!("farpool-direct-{}", std::process::id()));
    options.write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let knows_direct = options.open(&path).is_ok();
    let _made = std::fs::remove_file(&path);
    if !knows_direct {
        return farpool_e2e::skip("the directory for temporary files knows no O_DIRECT");
    }
    case("fork-direct", "24MiB");
}

fn case_of_root(name: &str, limit: &str) {
    let user = std::fs::metadata("/proc/self").expect("/proc").uid();
    if user != 0 {
        return farpool_e2e::skip("only root has rights to give up");
    }
    case_of_the_library(name, limit);
}

/// After MADV_FREE the kernel guarantees zeros or the old contents; with the library there are
/// zeros at once.
#[test]
fn memory_given_up_is_gone_at_once() {
    case_of_the_library("free-at-once", "24MiB");
}

#[test]
fn environments_of_the_programs_making() {
    case_of_the_library("environments", "24MiB");
}

#[test]
fn the_pagers_threads_keep_the_rights_that_the_program_keeps() {
    case_of_root("rights-kept", "24MiB");
}

/// At this limit, a process of up to 96 MiB has no threads of the pager.
#[test]
fn rights_given_up_before_there_is_a_pager() {
    case_of_root("rights-early", "400MiB");
}

macro_rules! cases {
    ($($test:ident $name:literal $limit:literal)*) => {$(
        #[test]
        fn $test() {
            case($name, $limit);
        }
    )*};
}

cases! {
    a_move_leaves_nothing_unknown_behind "mremap-resident-twice" "24MiB"
    mremap_of_read_only_memory "mremap-read-only" "24MiB"
    mremap_keeps_the_protection "mremap-no-access" "24MiB"
    several_mappings_move_together "mremap-several" "24MiB"
    a_munmap_that_fails_changes_nothing "munmap-refused" "24MiB"
    a_mapping_that_fails_changes_nothing "mmap-fixed-refused" "24MiB"
    an_advice_that_fails_changes_nothing "madvise-refused" "24MiB"
    a_discard_of_locked_memory "discard-locked" "24MiB"
    many_small_mappings_are_held_to_the_limit "many-mappings" "24MiB"
    a_chain_of_forks "fork-chain" "96MiB"
    signals_during_forks "fork-signals" "24MiB"
    files_that_are_flushed_during_forks "fork-stdio" "24MiB"
    data_of_other_threads_after_fork "fork-thread-data" "24MiB"
    memory_that_children_do_not_get "fork-unshared" "24MiB"
    pages_lent_to_a_pipe "vmsplice" "24MiB"
}
