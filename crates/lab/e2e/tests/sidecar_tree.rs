//! `farpool attach --tree` and `--pool`, and `farpool detach` of a process of a run.

use std::num::NonZero;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_e2e::jobs::{allowed_bytes, compile_c, scratch};
use farpool_e2e::rack::{Daemon, answer};
use farpool_e2e::run::{Door, Outcome, Run, Running};
use farpool_e2e::{binaries, have, tree, turn, wait_until};

/// Memory of each program of a tree, and the limit of the tree's local memory.
const HELD_MIB: u64 = 64;
const LIMIT_MIB: u64 = 64;
const LIMIT: &str = "64MiB";
/// How long to wait for a step; each takes some seconds at most.
const PATIENCE: Duration = Duration::from_secs(60);

fn verify(directory: &Path) {
    compile_c("verify", include_str!("sidecar/verify.c"), &[], directory);
}

fn detach(pid: u32) -> Output {
    let mut farpool = Command::new(binaries::program("farpool"));
    farpool.arg("detach").arg(pid.to_string()).output().expect("farpool detach")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until a shell has `count` descendants. Returns their process ids.
fn programs(shell: u32, count: usize) -> Vec<u32> {
    wait_until("the programs to run", PATIENCE, || {
        let below = tree::descendants(shell);
        (below.len() == count).then_some(below)
    })
}

fn resident_bytes(pids: &[u32]) -> u64 {
    pids.iter().filter_map(|pid| tree::resident_bytes(*pid)).sum()
}

fn await_fit(pids: &[u32]) {
    wait_until("the tree to fit", PATIENCE, || {
        let resident = resident_bytes(pids);
        let all_entered = pids.iter().all(|pid| tree::sidecars_in(*pid).len() == 1);
        (all_entered && resident <= allowed_bytes(LIMIT_MIB)).then_some(())
    });
}

/// Makes each program check all of its memory, and waits until `times` checks have been made in
/// total.
fn check(shell: &mut Running, pids: &[u32], times: usize) {
    pids.iter().for_each(|pid| tree::signal(*pid, libc::SIGUSR1));
    shell.wait_for_output("checked", times);
    assert!(!shell.stdout().contains("WRONG"), "{}", shell.stdout());
}

/// Two programs that together have twice the limit, and a third that is started when they fit.
#[test]
fn a_tree_is_attached_to_and_left() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    verify(directory.path());
    let (born, mib) = (directory.path().join("born"), HELD_MIB);
    let script = format!(
        "./verify {mib} 2 & ./verify {mib} 2 & until [ -e born ]; do sleep 0.1; done; ./verify \
         {mib} 2 & wait; wait; wait"
    );
    let mut shell = Run::local("sh").args(["-c", &script]).directory(directory.path());
    shell = shell.patience(PATIENCE);
    let mut shell = shell.start();
    shell.wait_for_output("ready", 2);
    let root = shell.pid();
    let keeper = Run::attach(root, LIMIT).args(["--tree"]).patience(PATIENCE);
    let mut keeper = keeper.start();
    keeper.wait_for_output("its descendants", 1);
    let is_program = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "verify\n")
    };
    let of_tree =
        || -> Vec<u32> { tree::descendants(root).into_iter().filter(is_program).collect() };
    await_fit(&of_tree());
    std::fs::write(&born, b"").expect("a file");
    shell.wait_for_output("ready", 3);
    let pids = of_tree();
    assert_eq!(pids.len(), 3);
    await_fit(&pids);
    check(&mut shell, &pids, 3);
    // By the process id of the shell, which has too little memory to have a sidecar.
    let output = detach(root);
    assert!(output.status.success(), "{}; the keeper: {}", said(&output), keeper.stderr());
    let outcome = keeper.finish();
    outcome.require_success().require_far();
    assert!(!outcome.stderr.contains("more than its limit"), "{}", outcome.stderr);
    assert!(pids.iter().all(|pid| tree::sidecars_in(*pid).is_empty()));
    assert!(resident_bytes(&pids) >= (3 * HELD_MIB) << 20, "everything is there again");
    check(&mut shell, &pids, 6);
    pids.iter().for_each(|pid| tree::signal(*pid, libc::SIGTERM));
    shell.finish().require_success();
}

#[test]
fn an_attachment_ends_with_its_tree() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    verify(directory.path());
    let shell = Run::local("sh").args(["-c", "./verify 64 1 & wait"]).directory(directory.path());
    let mut shell = shell.patience(PATIENCE).start();
    shell.wait_for_output("ready", 1);
    let pids = programs(shell.pid(), 1);
    let keeper = Run::attach(shell.pid(), "32MiB").args(["--tree"]).patience(PATIENCE);
    let mut keeper = keeper.start();
    keeper.wait_for_output("its descendants", 1);
    tree::signal(pids[0], libc::SIGTERM);
    shell.finish().require_success();
    let outcome = keeper.finish();
    assert!(outcome.require_success().stdout.contains("has ended"), "{}", outcome.stdout);
}

#[test]
fn a_process_of_a_run_is_left() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    verify(directory.path());
    let program = directory.path().join("verify");
    let run = Run::through(Door::Sidecar, "32MiB").program(program).args(["128", "2"]);
    let mut running = run.patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let pid = running.program_pid();
    wait_until("the sidecar", PATIENCE, || tree::sidecars_in(pid).pop());
    running.wait_until_far();
    let output = detach(pid);
    assert!(output.status.success(), "{}; the keeper: {}", said(&output), running.stderr());
    assert!(tree::resident_bytes(pid).expect("it runs") >= 128 << 20);
    check(&mut running, &[pid], 1);
    assert_eq!(tree::sidecars_in(pid), [0; 0], "it is not entered again");
    let again = detach(pid);
    assert!(!again.status.success() && said(&again).contains("no sidecar"), "{}", said(&again));
    tree::signal(pid, libc::SIGTERM);
    running.finish().require_success();
}

/// The preloaded library cannot be detached from. The message names what can be done instead.
#[test]
fn a_preloaded_process_cannot_be_left() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    verify(directory.path());
    let run = Run::through(Door::Preload, "32MiB").program(directory.path().join("verify"));
    let mut running = run.args(["64", "1"]).patience(PATIENCE).start();
    running.wait_for_output("ready", 1);
    let pid = running.program_pid();
    let output = detach(pid);
    let told = said(&output);
    assert!(!output.status.success(), "{told}");
    assert!(
        ["preloaded", "farpool limit", "farpool core"].iter().all(|it| told.contains(it)),
        "{told}"
    );
    tree::signal(pid, libc::SIGTERM);
    running.finish().require_success();
}

#[test]
fn a_running_process_gets_memory_from_a_rack() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let control = Daemon::control("127.0.0.1:0", &directory.path().join("control.redb"));
    let _nodes = ["A", "B"].map(|name| Daemon::node(&control.address, name, "1GiB"));
    wait_until("both nodes lend", PATIENCE, || {
        let nodes = answer(&control.address, &["node", "list"])["nodes"].as_array()?.clone();
        let lends = |node: &serde_json::Value| node["lendable_bytes"].as_u64() >= Some(1 << 30);
        (nodes.iter().filter(|node| lends(node)).count() == 2).then_some(())
    });
    verify(directory.path());
    let program = Run::local(directory.path().join("verify")).args(["128", "2"]);
    let mut program = program.patience(PATIENCE).start();
    program.wait_for_output("ready", 1);
    let pid = program.pid();
    let pool = ["--pool", &control.address, "--host", "A", "--rate", "1GiB"];
    let mut keeper = Run::attach(pid, "32MiB").args(pool).patience(PATIENCE).start();
    keeper.wait_for_output("of local memory now", 1);
    wait_until("it to fit", PATIENCE, || {
        (tree::resident_bytes(pid)? <= allowed_bytes(32)).then_some(())
    });
    let segments = answer(&control.address, &["segment", "list"]);
    assert_eq!(segments["segments"][0]["host"], "A", "{segments}");
    check(&mut program, &[pid], 1);
    let output = detach(pid);
    assert!(output.status.success(), "{}; the keeper: {}", said(&output), keeper.stderr());
    keeper.finish().require_success().require_far();
    tree::signal(pid, libc::SIGTERM);
    program.finish().require_success();
}

/// Memory that each of the two programs fills whose first threads end or stay.
const HEADLESS_MIB: u64 = 120;

/// The output of two programs of a tree whose first threads end or stay (`sidecar/headless.c`): how
/// long the slower one's passes took, and the larger of their average resident sizes meanwhile. The
/// two may run one after the other, so the sum of their sizes would tell nothing.
#[derive(Debug)]
struct Passes {
    time: Duration,
    held_mib: u64,
}

impl Passes {
    fn of(outcome: &Outcome) -> Passes {
        outcome.require_success();
        let lines: Vec<&str> =
            outcome.stdout.lines().filter(|line| line.starts_with("took ")).collect();
        assert_eq!(lines.len(), 2, "{} {}", outcome.stdout, outcome.stderr);
        assert!(lines.iter().all(|line| line.ends_with(" wrong 0")), "{lines:?}");
        let number = |line: &&str, index| -> u64 {
            line.split(' ').nth(index).and_then(|word| word.parse().ok()).expect("a number")
        };
        let longest_ms = lines.iter().map(|line| number(line, 1)).max();
        Passes {
            time: Duration::from_millis(longest_ms.unwrap_or_default()),
            held_mib: lines.iter().map(|line| number(line, 3)).max().unwrap_or_default(),
        }
    }
}

fn require_as_usual(ended: &Passes, usual: &Passes) {
    /// Allowances for other programs on two processors. It once took whole seconds for each
    /// program.
    const RATIO: u32 = 4;
    const MORE: Duration = Duration::from_millis(1500);
    println!("first threads that ended: {ended:?}; that stayed: {usual:?}");
    for passes in [ended, usual] {
        // A program that is not held to the limit has all the memory it fills resident.
        assert!(passes.held_mib << 20 < allowed_bytes(LIMIT_MIB), "{passes:?}");
    }
    assert!(ended.time <= usual.time * RATIO + MORE, "{ended:?}, usually {usual:?}");
}

/// When the first thread has ended, what the kernel reports under the process id is empty.
#[test]
fn programs_whose_first_threads_have_ended_are_held_to_the_limit() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    compile_c("headless", include_str!("sidecar/headless.c"), &[], directory.path());
    let passes = |what: &str| {
        let program = format!("./headless {HEADLESS_MIB} 4 {what}");
        let script = format!("{program} & {program} & wait; wait");
        let run = Run::through(Door::Sidecar, LIMIT).program("sh").args(["-c", &script]);
        let outcome = run.directory(directory.path()).patience(PATIENCE).finish();
        assert!(!outcome.stderr.contains("more than its limit"), "{}", outcome.stderr);
        Passes::of(outcome.require_far())
    };
    require_as_usual(&passes("ends"), &passes("stays"));
}

#[test]
fn programs_whose_first_threads_have_ended_are_attached_to() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    compile_c("headless", include_str!("sidecar/headless.c"), &[], directory.path());
    let gate = directory.path().join("gate");
    let passes = |what: &str| {
        let program = format!("./headless {HEADLESS_MIB} 4 {what} gate");
        let script = format!("{program} & {program} & wait; wait");
        let shell = Run::local("sh").args(["-c", &script]).directory(directory.path());
        let mut shell = shell.patience(PATIENCE).start();
        shell.wait_for_output("filled", 2);
        let pids = programs(shell.pid(), 2);
        let keeper = Run::attach(shell.pid(), LIMIT).args(["--tree"]).patience(PATIENCE);
        let mut keeper = keeper.start();
        keeper.wait_for_output("its descendants", 1);
        await_fit(&pids);
        std::fs::write(&gate, b"").expect("a file");
        let passes = Passes::of(&shell.finish());
        std::fs::remove_file(&gate).expect("the file");
        keeper.finish().require_success().require_far();
        passes
    };
    require_as_usual(&passes("ends"), &passes("stays"));
}

/// Keeps all processors busy until dropped.
struct Busy {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start() -> Busy {
        let is_over = Arc::new(AtomicBool::new(false));
        let spin = || {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || while !is_over.load(Relaxed) {})
        };
        let count = std::thread::available_parallelism().map_or(1, NonZero::get);
        let threads = (0..count).map(|_| spin()).collect();
        Busy { is_over, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A keeper that reaped with its real-time priority waited in the kernel, for up to a second of
/// processor time, for threads that it kept from the processor: one run in four.
#[test]
fn programs_with_many_threads_end_at_once_on_a_busy_machine() {
    const RUNS: u32 = 24;
    const MOST: Duration = Duration::from_millis(400);
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let ends = compile_c("ends", include_str!("sidecar/ends.c"), &["-pthread"], directory.path());
    let _busy = Busy::start();
    for run in 0..RUNS {
        let running = Run::through(Door::Sidecar, "1GiB").program(&ends).patience(PATIENCE).start();
        let keeper = running.pid();
        wait_until("the keeper to end", PATIENCE, || (!tree::is_alive(keeper)).then_some(()));
        let used = tree::processor_time(keeper).expect("it has not been reaped");
        running.finish().require_success();
        assert!(used < MOST, "run {run}: the keeper used {used:?} of a processor");
    }
}
