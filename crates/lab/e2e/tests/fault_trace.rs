//! `farpool trace --via fault`: the pager's faults of real programs, as a trace.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use farpool_e2e::run::Run;
use farpool_e2e::{binaries, tree, turn};
use farpool_trace::{Batch, Columns, Record, TraceInfo, TraceReader};
use farpool_units::{MIB, PAGE_BYTES_U64};

/// The position of the process's number in a block number.
const PROCESS_SHIFT: u32 = 44;

fn capture(out: &Path, local: &str, program: &[&str]) -> Run {
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["trace", "--via", "fault", "--json", "--local", local, "--out"]).arg(out);
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
    assert!(outcome.code == 2 && outcome.stderr.contains("--pages"), "{}", outcome.stderr);
    let left = std::fs::read_dir(folder.path()).expect("the folder").count();
    assert_eq!(left, 0, "a trace that was not made");
}
