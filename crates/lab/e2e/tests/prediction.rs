//! `farpool sim predict` compared with the pager: the events that it predicts are the events that
//! happen. Times are left to `farpool bench predict`; counts are the same on a slow machine.

use std::path::Path;
use std::process::Command;

use farpool_e2e::run::Run;
use farpool_e2e::{binaries, have, skip, turn};
use farpool_units::MIB;

/// How far a predicted count of events may be off, in percent.
const APART_PERCENT: u64 = 25;

/// Costs that any machine could have; the counts do not depend on them.
const COSTS: &str = "version = \"0\"\nmachine = \"any\"\nblades = []\nown_bytes = 3500000\nprobes \
                     = []\n\
                     [costs]\nstart_ps = 1\nzero_fill_ps = 1\nzero_page_ps = 1\nvictim_hit_ps = 1\n\
                     demand_fetch_ps = 10000000\nprefetch_ps = 1\nevicted_chunk_ps = 1\n\
                     written_page_ps = 1\nclean_drop_ps = 1\n";

fn farpool(words: &[&str]) -> Run {
    let mut command = Command::new(binaries::program("farpool"));
    command.args(words);
    Run::with(command, None, None)
}

/// The events that `farpool sim predict` counts for a program with this `--local`, by name.
fn predicted(folder: &Path, program: &[&str], local: &str) -> serde_json::Value {
    let path = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    let (trace, costs) = (path("pages.parquet"), path("costs.toml"));
    std::fs::write(&costs, COSTS).expect("the costs are written");
    let capture = farpool(&["trace", "--pages", "--time=1", "--out", &trace, "--"]);
    capture.args(program).finish().require_success();
    let words = ["sim", "predict", &trace, "--costs", &costs, "--local", local, "--json"];
    let outcome = farpool(&words).finish();
    outcome.require_success();
    let answer: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let prediction = &answer["result"]["predictions"][0];
    if let Ok(limit_bytes) = local.parse::<u64>() {
        assert_eq!(prediction["local_bytes"], limit_bytes);
    }
    assert!(prediction["slowdown_permille"].as_u64() > Some(0), "{prediction}");
    prediction["events"].clone()
}

/// Checks that the predicted and the counted events of these names agree.
fn require_alike(program: &[&str], local: &str, names: &[&str]) {
    if !have("qemu-x86_64") {
        return skip("qemu-user is not installed (apt-get install qemu-user)");
    }
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let before = predicted(folder.path(), program, local);
    let run = Run::far(local).program(program[0]).args(&program[1..]);
    let outcome = run.finish();
    outcome.require_success();
    outcome.require_far();
    for name in names {
        let (foretold, counted) = (before[*name].as_u64().unwrap_or(0), outcome.counter(name));
        println!("{name}: {foretold} foretold, {counted} counted");
        let apart = foretold.abs_diff(counted);
        assert!(
            apart * 100 <= counted * APART_PERCENT,
            "{name}: {foretold} foretold, {counted} counted; {before} {}",
            outcome.stats
        );
    }
}

#[test]
fn random_reads_and_writes_are_foretold() {
    let farpool = binaries::program("farpool");
    let farpool = farpool.to_str().expect("a plain path");
    let program = [
        farpool,
        "workload",
        "faults",
        "--bytes",
        "96MiB",
        "--passes",
        "2",
        "--write-percent",
        "30",
    ];
    let names = ["demand_fetches", "evictions", "clean_drops", "pages_written"];
    require_alike(&program, &(48 * MIB).to_string(), &names);
}

/// A share is of what the program has in use so far, in a prediction as in the run: it grows with
/// the first pass.
#[test]
fn a_share_is_foretold() {
    let farpool = binaries::program("farpool");
    let farpool = farpool.to_str().expect("a plain path");
    let faults = ["--bytes", "96MiB", "--passes", "2", "--write-percent", "30"];
    let program = [&[farpool, "workload", "faults"][..], &faults].concat();
    require_alike(&program, "50%", &["demand_fetches", "evictions", "pages_written"]);
}

#[test]
fn a_hot_set_is_foretold() {
    let farpool = binaries::program("farpool");
    let farpool = farpool.to_str().expect("a plain path");
    let program = [farpool, "workload", "mstress", "--bytes", "96MiB"];
    require_alike(
        &program,
        &(48 * MIB).to_string(),
        &["demand_fetches", "evictions", "pages_written"],
    );
}

#[test]
fn a_scan_is_foretold() {
    let farpool = binaries::program("farpool");
    let farpool = farpool.to_str().expect("a plain path");
    let program = [farpool, "workload", "scan", "--bytes", "96MiB", "--passes", "3"];
    require_alike(&program, &(48 * MIB).to_string(), &["evictions", "pages_written"]);
}
