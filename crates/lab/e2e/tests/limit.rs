//! `farpool limit`: the local memory of a running program is made smaller and larger.

use std::process::{Command, Output};
use std::time::Duration;

use farpool_e2e::jobs::{Job, allowed_bytes, compile_c, require_limit, scratch};
use farpool_e2e::run::{Door, Run};
use farpool_e2e::{binaries, have, tree, turn, wait_until};

/// The memory of the program, all of which it reads repeatedly.
const HELD_MIB: u64 = 192;
/// How long to wait for a step; each takes some seconds at most.
const PATIENCE: Duration = Duration::from_secs(60);
/// Larger than any possible process id.
const NO_PROCESS: u32 = 1 << 22;

fn limit(pid: u32, local: &str) -> Output {
    let mut farpool = Command::new(binaries::program("farpool"));
    farpool.args(["limit", &pid.to_string(), local]).output().expect("farpool limit")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The limit is lowered to a quarter, raised to more than the program has, and lowered again. The
/// program finds each byte right all the time.
#[test]
fn the_limit_of_a_running_program_is_lowered_and_raised() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("verify", include_str!("sidecar/verify.c"), &[], directory.path());
    for door in [Door::Sidecar, Door::Preload] {
        println!("{door:?}");
        let run = Run::through(door, "128MiB").program(&program).patience(PATIENCE);
        let mut running = run.args([HELD_MIB.to_string(), "1".to_owned()]).start();
        running.wait_for_output("ready", 1);
        let (keeper, pid) = (running.pid(), running.program_pid());
        let mut checked = 0;
        let mut checks = || {
            tree::signal(pid, libc::SIGUSR1);
            checked += 1;
            running.wait_for_output("checked", checked);
        };
        let mut before = 128;
        for (at, mib) in [(keeper, 32), (keeper, 256), (keeper, 64), (pid, 32), (pid, 256)] {
            let changed = limit(at, &format!("{mib}MiB"));
            assert!(changed.status.success(), "{}", text(&changed.stderr));
            let said = text(&changed.stdout);
            assert_eq!(said, format!("local memory was {before}MiB, is {mib}MiB\n"));
            before = mib;
            let is_right = |resident| match mib {
                0..HELD_MIB => resident <= allowed_bytes(mib),
                _ => resident >= HELD_MIB << 20,
            };
            // Each check reads all memory, which brings in as much as there is room for.
            wait_until("the resident set to follow the limit", PATIENCE, || {
                checks();
                is_right(tree::resident_bytes(pid)?).then_some(())
            });
            checks();
            let resident = tree::resident_bytes(pid).expect("it runs");
            assert!(is_right(resident), "{resident} bytes at {mib} MiB");
        }
        tree::signal(pid, libc::SIGTERM);
        let outcome = running.finish();
        assert!(outcome.stdout.ends_with("ends\n"), "{} {}", outcome.stdout, outcome.stderr);
        outcome.require_success();
    }
}

#[test]
fn a_process_that_is_no_run_and_a_size_that_is_none_are_refused() {
    for (pid, local, word) in
        [(NO_PROCESS, "1GiB", "4194304"), (1, "1GiB", "1"), (NO_PROCESS, "much", "much")]
    {
        let refused = limit(pid, local);
        assert!(!refused.status.success(), "{pid} {local}");
        let error = text(&refused.stderr);
        assert!(error.contains(word), "{error}");
        assert!(error.lines().count() <= 4, "{error}");
    }
}

/// The kernel touches 96 MiB in one call. The library sees the call, and has the memory registered
/// before; the sidecar's case is `memory_that_is_populated_at_once` of sidecar.rs.
#[test]
fn memory_that_is_populated_in_one_call_keeps_to_the_limit_of_the_library() {
    const LIMIT_MIB: u64 = 32;
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let program = compile_c("advice", include_str!("sidecar/advice.c"), &[], directory.path());
    let program = program.to_string_lossy();
    for mode in ["populate-map", "populate-advice"] {
        let job = Job { program: &program, arguments: &[mode], directory: directory.path() };
        let (outcome, peak_bytes) = job.run(Door::Preload, LIMIT_MIB);
        outcome.require_success().require_far();
        assert_eq!(outcome.stdout, "refused 0, child 0, 0 wrong\n", "{mode}");
        require_limit(&outcome, peak_bytes, LIMIT_MIB);
    }
}
