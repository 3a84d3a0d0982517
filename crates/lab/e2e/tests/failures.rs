//! Failures and their results: blades that die, stop, or send wrong answers; programs and keepers
//! that are killed; full pools. Wrong data (exit code 9 of the stress program) is never a result.

use std::time::Duration;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::proxy::{Fault, Proxy};
use farpool_e2e::run::{Door, Outcome, Run, Running};
use farpool_e2e::{PATIENCE, binaries, skip, tree, turn, wait_until};

/// 128 + SIGBUS.
const SIGBUS_CODE: i32 = 135;
/// 128 + SIGABRT.
const SIGABRT_CODE: i32 = 134;
/// 128 + SIGKILL: a sidecar ends its program by a signal that cannot be caught.
const SIGKILL_CODE: i32 = 137;
const THREADS: usize = 2;

/// A stress program of 64 MiB with 16 MiB local.
fn stress(addresses: &[&str], seconds: u32, seed: u32) -> Run {
    let run = addresses.iter().fold(Run::far("16MiB"), |run, address| run.blade(address));
    run.own_program("farpool-stress")
        .args(["--mib", "64", "--threads", &THREADS.to_string(), "--progress"])
        .args(["--seconds", &seconds.to_string(), "--seed", &seed.to_string()])
        .args(["--ops", "discard,heap,pipe,protect"])
}

/// When this returns, every thread has filled its memory, and some of it has been far.
fn start(run: Run) -> Running {
    let mut running = run.start();
    running.wait_for_output("filled", THREADS);
    running.wait_until_far();
    running
}

fn started(addresses: &[&str], seconds: u32, seed: u32) -> Running {
    start(stress(addresses, seconds, seed))
}

/// Has a program meet a fault on its way to the blade and go on for some pages, if it can; then
/// lets it end.
fn meets(fault: Fault, proxy: &Proxy, seed: u32) -> Outcome {
    const MORE_PAGES: u64 = 1_000;
    let folder = tempfile::tempdir().expect("a directory");
    let end = folder.path().join("end");
    let mut running = start(stress(&[proxy.address()], 600, seed).args(["--until"]).args([&end]));
    proxy.order(fault);
    wait_until("the fault", PATIENCE, || (proxy.done() > 0 || !running.is_running()).then_some(()));
    let before = running.fetched().unwrap_or(0);
    wait_until("more pages", PATIENCE, || {
        let goes_on = running.fetched().is_some_and(|it| it > before + MORE_PAGES);
        (goes_on || !running.is_running()).then_some(())
    });
    std::fs::write(&end, "").expect("a file");
    running.finish()
}

fn require_sigbus(outcome: &Outcome, address: &str) {
    assert_eq!(outcome.code, SIGBUS_CODE, "stdout: {} stderr: {}", outcome.stdout, outcome.stderr);
    let named = outcome.stderr.contains("far memory is lost") && outcome.stderr.contains(address);
    assert!(named, "the message does not name the blade {address}: {}", outcome.stderr);
    assert!(outcome.counter("lost") > 0, "lost pages are counted: {:?}", outcome.stats);
}

#[test]
fn a_blade_that_is_killed_ends_the_program_with_a_clear_message() {
    let _turn = turn();
    for (transport, seed) in [(Transport::Tcp, 1), (Transport::Unix, 2)] {
        let mut blade = Blade::start("512MiB");
        let address = blade.address(transport);
        let running = started(&[&address], 60, seed);
        blade.kill();
        require_sigbus(&running.finish(), &address);
    }
}

#[test]
fn of_two_blades_the_dead_one_is_named() {
    let _turn = turn();
    let (mut one, other) = (Blade::start("512MiB"), Blade::start("512MiB"));
    let (first, second) = (one.address(Transport::Tcp), other.address(Transport::Tcp));
    let running = started(&[&first, &second], 60, 3);
    let is_used = |blade: &Blade| used_bytes(blade) > 0;
    wait_until("both blades to be used", PATIENCE, || {
        (is_used(&one) && is_used(&other)).then_some(())
    });
    one.kill();
    let outcome = running.finish();
    require_sigbus(&outcome, &first);
    assert!(
        !outcome.stderr.contains(&second),
        "the other blade is not to blame: {}",
        outcome.stderr
    );
}

#[test]
fn a_blade_that_pauses_is_waited_for() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    for (transport, seed) in [(Transport::Tcp, 4), (Transport::Unix, 5)] {
        let running = started(&[&blade.address(transport)], 5, seed);
        blade.pause(true);
        // The length of the pause is what is tested: well below the deadline of 10 s, well above
        // any usual answer time.
        std::thread::sleep(Duration::from_secs(2));
        blade.pause(false);
        running.finish().require_success().require_far();
    }
}

#[test]
fn a_blade_that_pauses_too_long_is_lost() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    let address = blade.address(Transport::Tcp);
    let running = started(&[&address], 60, 6);
    blade.pause(true);
    let outcome = running.finish();
    blade.pause(false);
    require_sigbus(&outcome, &address);
}

/// After a network fault the program continues with right data, or ends with the message; nothing
/// else is allowed.
fn network_fault(fault: Fault, seed: u32) {
    let blade = Blade::start("512MiB");
    let proxy = Proxy::start(blade.tcp());
    let outcome = meets(fault, &proxy, seed);
    assert_eq!(proxy.done(), 1, "no answer carried pages: {}", outcome.stdout);
    if outcome.code != 0 {
        require_sigbus(&outcome, proxy.address());
    }
    println!("{fault:?}: exit code {}, {}", outcome.code, outcome.stderr.trim());
}

#[test]
fn an_answer_cut_in_mid_page() {
    let _turn = turn();
    network_fault(Fault::CutMidPage, 7);
}

#[test]
fn an_answer_with_a_flipped_bit() {
    let _turn = turn();
    network_fault(Fault::FlipBit, 8);
}

#[test]
fn an_answer_that_comes_twice() {
    let _turn = turn();
    network_fault(Fault::Repeat, 9);
}

#[test]
fn garbage_between_answers() {
    let _turn = turn();
    network_fault(Fault::Garbage, 10);
}

#[test]
fn answers_out_of_order() {
    let _turn = turn();
    network_fault(Fault::Reorder, 11);
}

/// No length is used before it is verified, so nobody waits for bytes that never come.
fn flipped_length(fault: Fault, seed: u32) {
    let blade = Blade::start("512MiB");
    let proxy = Proxy::start(blade.tcp());
    meets(fault, &proxy, seed).require_success().require_far();
    assert_eq!(proxy.done(), 1);
}

#[test]
fn an_answer_with_a_flipped_length() {
    let _turn = turn();
    flipped_length(Fault::FlipLength, 15);
}

#[test]
fn a_request_with_a_flipped_length() {
    let _turn = turn();
    flipped_length(Fault::FlipRequestLength, 18);
}

/// As when a connection table is flushed or an address moves: the blade lives and can be reached.
#[test]
fn flows_that_die_without_a_word_are_replaced() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    let proxy = Proxy::start(blade.tcp());
    let running = started(&[proxy.address()], 4, 16);
    let before = proxy.accepted();
    proxy.let_flows_die();
    wait_until("other connections", PATIENCE, || (proxy.accepted() > before).then_some(()));
    running.finish().require_success().require_far();
}

/// As when a proxy or a virtual address is set up anew.
#[test]
fn a_port_that_refuses_for_a_while_is_tried_again() {
    let _turn = turn();
    let blade = Blade::start("512MiB");
    let proxy = Proxy::start(blade.tcp());
    let running = started(&[proxy.address()], 4, 17);
    proxy.refuse();
    // The length of the refusal is what is tested: many attempts, well below the deadline of 10 s.
    std::thread::sleep(Duration::from_secs(1));
    proxy.serve_again();
    running.finish().require_success().require_far();
}

/// The child has to connect for itself, and what it inherits is on the blade.
#[test]
fn a_child_is_born_while_the_port_refuses() {
    let _turn = turn();
    let directory = tempfile::tempdir().expect("a directory for the gate");
    for door in [Door::Usual, Door::Preload] {
        let gate = directory.path().join(format!("{door:?}"));
        let blade = Blade::start("512MiB");
        let proxy = Proxy::start(blade.tcp());
        let mut running = Run::through(door, "16MiB")
            .blade(proxy.address())
            .own_program("farpool-cases")
            .args(["fork-at-gate"])
            .env("FARPOOL_CASE_GATE", &gate)
            .start();
        running.wait_for_output("filled", 1);
        running.wait_until_far();
        proxy.refuse_more();
        std::fs::write(&gate, "").expect("gate");
        // The length of the refusal is what is tested, as above.
        std::thread::sleep(Duration::from_secs(1));
        proxy.serve_again();
        running.finish().require_success().require_far();
    }
}

/// A child that finds no way to what it inherits ends, and says why.
#[test]
fn a_child_that_cannot_reach_its_parents_blade_names_it() {
    let _turn = turn();
    let directory = tempfile::tempdir().expect("a directory for the gate");
    let gate = directory.path().join("gate");
    let blade = Blade::start("512MiB");
    let proxy = Proxy::start(blade.tcp());
    let mut running = Run::through(Door::Preload, "16MiB")
        .blade(proxy.address())
        .args(["--deadline", "2s"])
        .own_program("farpool-cases")
        .args(["fork-at-gate"])
        .env("FARPOOL_CASE_GATE", &gate)
        .start();
    running.wait_for_output("filled", 1);
    running.wait_until_far();
    proxy.refuse_more();
    std::fs::write(&gate, "").expect("gate");
    let outcome = running.finish();
    assert_ne!(outcome.code, 0, "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("there is no blade"), "{}", outcome.stderr);
    let ended = outcome.stderr.lines().filter(|line| line.contains(proxy.address())).count();
    assert!(ended > 0, "{}", outcome.stderr);
}

fn used_bytes(blade: &Blade) -> u64 {
    blade.stat()["blades"][0]["used_bytes"].as_u64().expect("used_bytes")
}

#[test]
fn a_killed_program_gives_its_memory_back() {
    let _turn = turn();
    let blade = Blade::start_with("512MiB", &["--lease", "1s"]);
    for (seed, transport) in [(12, Transport::Shm), (13, Transport::Unix), (14, Transport::Tcp)] {
        let running = started(&[&blade.address(transport)], 60, seed);
        wait_until("memory in use", PATIENCE, || (used_bytes(&blade) > 0).then_some(()));
        tree::signal(running.program_pid(), libc::SIGKILL);
        let outcome = running.finish();
        assert_eq!(outcome.code, 128 + libc::SIGKILL, "{}", outcome.stderr);
        wait_until("the lease to end", PATIENCE, || (used_bytes(&blade) == 0).then_some(()));
    }
}

#[test]
fn programs_killed_at_any_moment_leave_nothing() {
    let _turn = turn();
    let blade = Blade::start_with("1GiB", &["--lease", "1s"]);
    for round in 0..6 {
        let running = Run::far("16MiB")
            .blade(&blade.address(if round % 2 == 0 { Transport::Tcp } else { Transport::Shm }))
            .own_program("farpool-stress")
            .args(["--mib", "64", "--threads", "2", "--seconds", "30", "--seed", "77"])
            .start();
        let pid = running.program_pid();
        // Different moments of start, activation and paging.
        std::thread::sleep(Duration::from_millis(round * 90));
        tree::signal(pid, libc::SIGKILL);
        assert_eq!(running.finish().code, 128 + libc::SIGKILL);
    }
    wait_until("all leases to end", PATIENCE, || (used_bytes(&blade) == 0).then_some(()));
}

#[test]
fn a_program_does_not_outlive_its_keeper() {
    let _turn = turn();
    let running = started(&[], 60, 15);
    let (keeper, program) = (running.pid(), running.program_pid());
    tree::signal(keeper, libc::SIGKILL);
    wait_until("the program to end", PATIENCE, || (!tree::is_alive(program)).then_some(()));
}

/// In debug builds the pager panics on demand.
#[test]
fn a_pager_that_panics_ends_the_program_with_a_clear_message() {
    if !cfg!(debug_assertions) {
        return skip("the pager of a release build does not panic on demand");
    }
    let _turn = turn();
    for thread in ["farpool-fault", "farpool-evict", "farpool-steward"] {
        a_thread_that_panics_is_named(Door::Preload, thread, SIGABRT_CODE);
        a_thread_that_panics_is_named(Door::Sidecar, thread, SIGKILL_CODE);
    }
}

fn a_thread_that_panics_is_named(door: Door, thread: &str, code: i32) {
    let outcome = Run::through(door, "16MiB")
        .own_program("farpool-stress")
        .args(["--mib", "64", "--seconds", "60", "--ops", "discard,heap"])
        .env("FARPOOL_TEST_PANIC", thread)
        .finish();
    assert_eq!(outcome.code, code, "{door:?} {thread}: {}", outcome.stderr);
    for said in ["the pager failed", thread, "please report it", "the program is stopped"] {
        assert!(outcome.stderr.contains(said), "{thread}: no {said:?} in {}", outcome.stderr);
    }
}

#[test]
fn a_full_pool_fails_allocations_if_so_chosen() {
    let _turn = turn();
    for door in [Door::Sidecar, Door::Preload] {
        let blade = Blade::start("32MiB");
        let outcome = Run::through(door, "16MiB")
            .args(["--when-full", "fail"])
            .blade(&blade.address(Transport::Tcp))
            .own_program("farpool-cases")
            .args(["fill-until-refused"])
            .finish();
        outcome.require_success();
        let said = &outcome.stderr;
        assert!(outcome.stdout.contains("refused"), "{door:?}: {}", outcome.stdout);
        assert!(said.contains("--quota"), "{door:?}: the message says what to do: {said}");
    }
}

/// The kernel refuses memory by a limit of the process. That limit must be removed when far memory
/// takes pages again, in the process's children, too, and when the process is detached from.
#[test]
fn what_a_full_pool_takes_is_given_back() {
    let _turn = turn();
    let (small, large) = (Blade::start("32MiB"), Blade::start("512MiB"));
    let directory = tempfile::tempdir().expect("a directory for the gate");
    let gate = directory.path().join("gate");
    let mut running = Run::through(Door::Sidecar, "16MiB")
        .args(["--when-full", "fail"])
        .blade(&small.address(Transport::Tcp))
        .own_program("farpool-cases")
        .args(["fill-until-given-back"])
        .env("FARPOOL_CASE_GATE", &gate)
        .start();
    running.wait_for_output("refused", 1);
    let mut farpool = std::process::Command::new(binaries::program("farpool"));
    farpool.args(["blades", &running.pid().to_string(), "--add", &large.address(Transport::Tcp)]);
    let added = farpool.output().expect("farpool blades");
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    std::fs::write(&gate, "").expect("gate");
    let outcome = running.finish();
    outcome.require_success();
    assert!(outcome.stdout.contains("given back, and to its child"), "{}", outcome.stdout);
}

#[test]
fn a_full_pool_slows_the_program_otherwise() {
    let _turn = turn();
    let blade = Blade::start("64MiB");
    let outcome = Run::far("48MiB")
        .blade(&blade.address(Transport::Tcp))
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", "2", "--seconds", "2", "--ops", "touch"])
        .patience(Duration::from_secs(120))
        .finish();
    outcome.require_success();
    assert!(outcome.stderr.contains("--quota"), "the message says what to do: {}", outcome.stderr);
}

#[test]
fn a_quota_is_a_full_pool_too() {
    let _turn = turn();
    for door in [Door::Sidecar, Door::Preload] {
        let outcome = Run::through(door, "16MiB")
            .args(["--quota", "32MiB", "--when-full", "fail"])
            .own_program("farpool-cases")
            .args(["fill-until-refused"])
            .finish();
        outcome.require_success();
        assert!(outcome.stdout.contains("refused"), "{door:?}: {}", outcome.stdout);
    }
}

#[test]
fn a_blade_that_is_not_there_is_named() {
    let _turn = turn();
    let outcome = Run::far("16MiB")
        .blade("tcp://127.0.0.1:1")
        .own_program("farpool-stress")
        .args(["--mib", "64", "--seconds", "1"])
        .finish();
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("127.0.0.1:1"), "{}", outcome.stderr);
}

#[test]
fn tcp_beyond_loopback_is_refused() {
    let outcome = Run::far("16MiB").blade("tcp://192.0.2.9:7070").program("true").finish();
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("allow-remote-tcp"), "{}", outcome.stderr);
}

#[test]
fn a_static_program_is_refused_by_the_preloaded_library() {
    if !farpool_e2e::have("gcc") {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let (source, program) = (directory.path().join("s.c"), directory.path().join("static-program"));
    std::fs::write(&source, "int main(void) { return 0; }").expect("source");
    let mut gcc = std::process::Command::new("gcc");
    let built = gcc.arg("-static").arg(&source).arg("-o").arg(&program).output().expect("gcc");
    if !built.status.success() {
        return farpool_e2e::skip("gcc builds no static programs here (no libc.a)");
    }
    Run::far("16MiB").program(&program).finish().require_success();
    let outcome = Run::through(Door::Preload, "16MiB").program(program).finish();
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("statically linked"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("static-program"), "{}", outcome.stderr);
    assert!(binaries::program("farpool").exists());
}
