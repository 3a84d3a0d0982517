//! `farpool trace --via fault` and `farpool attach --trace`: the pager's faults of real programs,
//! as a trace.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use farpool_e2e::jobs::{allowed_bytes, compile_c, scratch};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{binaries, have, tree, turn, wait_until};
use farpool_trace::{Batch, Columns, PROCESS_SHIFT, Record, TraceInfo, TraceReader};
use farpool_units::{MIB, PAGE_BYTES_U64};

fn capture(out: &Path, local: &str, program: &[&str]) -> Run {
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["trace", "--via", "fault", "--children", "--json", "--local", local, "--out"]);
    command.arg(out);
    command.arg("--").args(program);
    Run::with(command, None, None)
}

fn read(path: &Path) -> (TraceInfo, Vec<Record>) {
    let mut reader = TraceReader::open(path, Columns::ALL).expect("a whole trace");
    let (mut records, mut batch) = (Vec::new(), Batch::default());
    while reader.next_batch(&mut batch).expect("an undamaged trace") {
        records.extend(batch.records());
    }
    (reader.info().clone(), records)
}

fn farpool() -> String {
    binaries::program("farpool").to_str().expect("a plain path").to_owned()
}

#[test]
fn the_faults_of_a_program_are_its_uses_of_what_is_not_local() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("faults.parquet");
    let farpool = farpool();
    // Each page is written once, then used once in random order.
    let program = [&farpool, "workload", "faults", "--bytes", "64MiB", "--write-percent", "40"];
    let local = Run::local(&farpool).args(&program[1..]).finish();
    let outcome = capture(&out, "16MiB", &program).finish();
    outcome.require_success();
    let checksum = |stdout: &str| {
        let line = stdout.lines().find(|line| line.contains("checksum")).expect("a report");
        let report: serde_json::Value = serde_json::from_str(line).expect("JSON");
        report["checksum"].as_str().expect("a checksum").to_owned()
    };
    assert_eq!(checksum(&outcome.stdout), checksum(&local.stdout));
    let (info, records) = read(&out);
    assert_eq!((info.source.as_str(), info.block_bytes), ("pager faults", PAGE_BYTES_U64));
    assert!(info.notes.iter().all(|note| !note.contains("missing")), "{:?}", info.notes);
    // Three quarters of the pages are far when they are used. Some are prefetched, or taken for
    // first touches in runs.
    let pages = 64 * MIB / PAGE_BYTES_U64;
    let touched: HashSet<u64> = records.iter().map(|record| record.block).collect();
    assert!(touched.len() as u64 > pages / 2, "{} of {pages} pages", touched.len());
    assert!(records.len() as u64 > pages / 2 && (records.len() as u64) < 3 * pages);
    let writes = records.iter().filter(|record| record.access.is_write()).count();
    assert!(writes > 0 && writes < records.len(), "{writes} writes of {}", records.len());
}

#[test]
fn processes_of_a_tree_are_told_apart() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("tree.parquet");
    let one = format!("{} workload mstress --bytes 48MiB", farpool());
    let both = format!("{one} & {one} --seed 2; wait");
    capture(&out, "24MiB", &["sh", "-c", &both]).finish().require_success();
    let (info, records) = read(&out);
    let processes: HashSet<u64> =
        records.iter().map(|record| record.block >> PROCESS_SHIFT).collect();
    assert!(processes.len() >= 2, "{processes:?}");
    assert!(info.notes.iter().any(|note| note.contains("processes")), "{:?}", info.notes);
    let threads: HashSet<u32> = records.iter().map(|record| record.thread).collect();
    assert!(threads.len() >= 2, "{threads:?}");
}

#[test]
fn a_program_that_is_killed_leaves_the_trace_of_what_it_did() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("killed.parquet");
    let farpool = farpool();
    let running = capture(
        &out,
        "16MiB",
        &[&farpool, "workload", "faults", "--bytes", "64MiB", "--passes", "10000"],
    )
    .start();
    running.wait_until_far();
    tree::signal(running.program_pid(), libc::SIGKILL);
    let outcome = running.finish();
    assert_eq!(outcome.code, 128 + libc::SIGKILL, "{}", outcome.stderr);
    assert!(!read(&out).1.is_empty());
}

#[test]
fn nothing_is_left_where_nothing_could_be_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("none.parquet");
    let outcome = capture(&out, "16MiB", &["/no/such/program"]).finish();
    assert!(outcome.code != 0 && outcome.stderr.contains("no such program"), "{}", outcome.stderr);
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["trace", "--via", "fault", "--out"]).arg(&out).args(["--", "true"]);
    let outcome = Run::with(command, None, None).finish();
    assert!(outcome.code == 2 && outcome.stderr.contains("--local"), "{}", outcome.stderr);
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["trace", "--via", "fault", "--local", "16MiB", "--pages", "--out"]).arg(&out);
    let outcome = Run::with(command, None, None).args(["--", "true"]).finish();
    assert!(outcome.code == 2 && outcome.stderr.contains("--pages needs"), "{}", outcome.stderr);
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["trace", "--via", "fault", "--local", "16MiB", "--out"]).arg(&out);
    command.args(["--process", "cc1", "--skip", "5"]);
    let outcome = Run::with(command, None, None).args(["--", "true"]).finish();
    let refusal = "--process, --skip needs a capture under qemu-user";
    assert!(outcome.code == 2 && outcome.stderr.contains(refusal), "{}", outcome.stderr);
    let left = std::fs::read_dir(folder.path()).expect("the folder").count();
    assert_eq!(left, 0, "a trace that was not made");
}

/// Memory of a program that is attached to, and its limit.
const HELD_MIB: u64 = 128;
const LIMIT_MIB: u64 = 32;
/// How long to wait for a step; each takes some seconds at most.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that checks its memory for ever, and a `farpool attach` that records its faults.
struct Attached {
    program: Running,
    keeper: Running,
    directory: tempfile::TempDir,
}

/// Makes the program check all of its memory twice.
fn checks(program: &mut Running, times: usize) {
    tree::signal(program.pid(), libc::SIGUSR1);
    program.wait_for_output("checked", times);
}

impl Attached {
    fn start() -> Attached {
        let directory = scratch();
        let source = include_str!("sidecar/verify.c");
        let path = compile_c("verify", source, &["-static"], directory.path());
        let run = Run::local(path).args([&HELD_MIB.to_string(), "2"]).patience(PATIENCE);
        let mut program = run.start();
        program.wait_for_output("ready", 1);
        // A prefetched page does not fault.
        let keeper = Run::attach(program.pid(), &format!("{LIMIT_MIB}MiB"));
        let keeper = keeper.args(["--prefetch", "none", "--trace"]);
        let keeper = keeper.arg(directory.path().join("faults.parquet")).patience(PATIENCE);
        let mut keeper = keeper.start();
        keeper.wait_for_output("of local memory now", 1);
        // Before that all is resident, and nothing faults.
        wait_until("the resident set to fit", PATIENCE, || {
            let resident_bytes = tree::resident_bytes(program.pid())?;
            (resident_bytes <= allowed_bytes(LIMIT_MIB)).then_some(())
        });
        checks(&mut program, 1);
        Attached { program, keeper, directory }
    }

    /// Requires that the keeper has ended well with a whole trace of two passes.
    fn require_trace(keeper: Running, out: &Path) {
        let outcome = keeper.finish();
        outcome.require_success();
        assert!(outcome.stderr.contains(" references of "), "{}", outcome.stderr);
        let (info, records) = read(out);
        assert_eq!((info.source.as_str(), info.block_bytes), ("pager faults", PAGE_BYTES_U64));
        assert_eq!(info.program.len(), 3, "{:?}", info.program);
        assert!(info.program[0].ends_with("verify") && info.program[2] == "2");
        let has_note = info.notes.iter().any(|note| note.contains("before Farpool was attached"));
        assert!(has_note, "{:?}", info.notes);
        // Nearly half of the pages are far at least when a pass begins, also if the limit is passed
        // by as much as is allowed.
        let pages = HELD_MIB * MIB / PAGE_BYTES_U64;
        let touched: HashSet<u64> = records.iter().map(|record| record.block).collect();
        assert!(touched.len() as u64 > pages / 3, "{} of {pages} pages", touched.len());
        let threads: HashSet<u32> = records.iter().map(|record| record.thread).collect();
        // Those that check, and perhaps the one that waits for them.
        assert!(threads.len() >= 2, "{threads:?}");
        let mut command = Command::new(binaries::program("farpool"));
        let output = command.args(["sim", "mrc"]).arg(out).output().expect("farpool sim mrc");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !output.stdout.is_empty(), "{stderr}");
    }
}

#[test]
fn a_running_program_is_recorded_until_it_ends() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let Attached { program, keeper, directory } = Attached::start();
    tree::signal(program.pid(), libc::SIGTERM);
    program.finish().require_success();
    Attached::require_trace(keeper, &directory.path().join("faults.parquet"));
}

#[test]
fn a_running_program_is_recorded_until_it_is_left() {
    if !have("gcc") {
        return;
    }
    let _turn = turn();
    let Attached { mut program, keeper, directory } = Attached::start();
    tree::signal(keeper.pid(), libc::SIGINT);
    Attached::require_trace(keeper, &directory.path().join("faults.parquet"));
    let left = std::fs::read_dir(directory.path()).expect("the folder");
    let traces = left.filter_map(Result::ok).filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().contains("parquet")
    });
    assert_eq!(traces.count(), 1);
    // It goes on without Farpool.
    assert_eq!(tree::sidecars_in(program.pid()), [0; 0]);
    checks(&mut program, 2);
    tree::signal(program.pid(), libc::SIGTERM);
    program.finish().require_success();
}

#[test]
fn a_trace_that_cannot_be_written_leaves_the_program_alone() {
    let mut sleeper = Command::new("sleep").arg("600").spawn().expect("sleep");
    let keeper = Run::attach(sleeper.id(), "16MiB").args(["--trace", "/no/such/folder/t.parquet"]);
    let outcome = keeper.finish();
    let sidecars = tree::sidecars_in(sleeper.id());
    sleeper.kill().expect("a signal");
    sleeper.wait().expect("its end");
    assert!(outcome.code == 1 && outcome.stderr.contains("/no/such/folder"), "{}", outcome.stderr);
    assert_eq!(sidecars, [0; 0]);
}
