//! What far memory costs a program on this machine: probes are run all-local and far, and the costs
//! that explain the difference are given to the simulator (`farpool sim predict`).
//!
//! Each probe is one of this crate's workloads, chosen so that together they separate the costs of
//! the events: first touches, scans, random reads and writes with dense and sparse memory, pages
//! taken back.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use farpool_sim::pager::{Costs, Events, MeasuredCosts, Probe};
use farpool_trace::capture;
use farpool_units::at_most;

use crate::machine::Machine;
use crate::stage::{self, Door, check_interrupted, progress, run_to_end, watch_signals};
use crate::workload::WorkloadReport;
use crate::{BenchError, WorkloadName};

/// How the costs are measured.
#[derive(Debug, Clone)]
pub struct CostsOptions {
    /// The farpool binary that runs the probes.
    pub farpool: PathBuf,
    /// Addresses of the blades. If there are none, each run has a blade of its own, over shared
    /// memory.
    pub blades: Vec<String>,
    /// How Farpool gets into the probes.
    pub door: Door,
    /// Memory of a probe, in bytes.
    pub bytes: u64,
    /// Runs of each probe in each place; the fastest counts.
    pub rounds: u32,
}

/// Longest time that a probe may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Least number of starts measured, which are short. Their local memory may have any size.
const START_ROUNDS: u32 = 10;
const START_LOCAL: &str = "64MiB";

/// Name, workload, its arguments, and local memory in percent.
const PROBES: [(&str, WorkloadName, &[&str], u64); 14] = [
    ("fill 50 %", WorkloadName::Faults, &["--passes", "0"], 50),
    ("fill 20 %", WorkloadName::Faults, &["--passes", "0"], 20),
    ("first touches 60 %", WorkloadName::Touch, &[], 60),
    ("first touches 20 %", WorkloadName::Touch, &[], 20),
    ("scan 75 %", WorkloadName::Scan, &["--passes", "4"], 75),
    ("scan 25 %", WorkloadName::Scan, &["--passes", "4"], 25),
    ("random reads 75 %", WorkloadName::Faults, &["--passes", "4"], 75),
    ("random reads 25 %", WorkloadName::Faults, &["--passes", "3"], 25),
    ("random writes 75 %", WorkloadName::Faults, &["--passes", "4", "--write-percent", "100"], 75),
    ("random writes 25 %", WorkloadName::Faults, &["--passes", "3", "--write-percent", "100"], 25),
    ("hot and cold 75 %", WorkloadName::Mstress, &[], 75),
    ("hot and cold 50 %", WorkloadName::Mstress, &[], 50),
    ("hot and cold 25 %", WorkloadName::Mstress, &[], 25),
    (
        "reads and writes 50 %",
        WorkloadName::Faults,
        &["--passes", "3", "--write-percent", "30"],
        50,
    ),
];

/// Measures the costs.
///
/// # Errors
/// A probe cannot be run, a probe read wrong data from far memory, or an interruption.
pub fn measure_costs(options: &CostsOptions) -> Result<MeasuredCosts, BenchError> {
    watch_signals()?;
    let folder = std::env::temp_dir().join(stage::own_name());
    std::fs::create_dir_all(&folder)
        .map_err(BenchError::os(format!("make the folder {}", folder.display())))?;
    let stats = folder.join("stats.json");
    let measured =
        measure_probes(options, &stats).and_then(|it| Ok((it, measure_start_ps(options)?)));
    let file_bytes = file_bytes(options);
    // The folder holds only the statistics of a run.
    let _ = std::fs::remove_dir_all(&folder);
    progress("");
    let ((probes, mut fixed_bytes), start_ps) = measured?;
    fixed_bytes.sort_unstable();
    let usual_bytes = fixed_bytes.get(fixed_bytes.len() / 2).copied().unwrap_or(0);
    Ok(MeasuredCosts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::here().to_string(),
        blades: options.blades.clone(),
        own_bytes: usual_bytes.saturating_sub(file_bytes?),
        costs: Costs { start_ps, ..Costs::fit(&probes) },
        probes,
    })
}

/// Returns the probes, and the bytes that cannot be far in the last run of each.
fn measure_probes(
    options: &CostsOptions,
    stats: &Path,
) -> Result<(Vec<Probe>, Vec<u64>), BenchError> {
    let (mut probes, mut fixed_bytes) = (Vec::new(), Vec::new());
    for (number, (name, workload, arguments, percent)) in PROBES.into_iter().enumerate() {
        progress(&format!("[{}/{}] {name}", number + 1, PROBES.len()));
        let mut words: Vec<OsString> = vec![options.farpool.clone().into()];
        words.extend(["workload", workload.as_str(), "--bytes"].map(OsString::from));
        words.push(options.bytes.to_string().into());
        words.extend(arguments.iter().map(OsString::from));
        let limit_bytes = options.bytes * percent / 100;
        probes.push(measure_probe(options, name, &words, limit_bytes, stats)?);
        fixed_bytes.push(read_stats(stats)?["fixed_bytes"].as_u64().unwrap_or(0));
    }
    Ok((probes, fixed_bytes))
}

/// Returns the bytes of files in a probe that runs without Farpool: its code and libraries.
fn file_bytes(options: &CostsOptions) -> Result<u64, BenchError> {
    let name = options.farpool.clone().into_os_string();
    let bytes = options.bytes.to_string();
    let mut words = vec![name];
    words.extend(["workload", "scan", "--bytes", &bytes].map(OsString::from));
    let failed = |error: farpool_trace::TraceError| BenchError::Program {
        program: "probe scan".to_owned(),
        detail: error.to_string(),
    };
    let command = capture::resolve(&words, None).map_err(failed)?;
    let native = capture::time_native(&command, 1, &AtomicBool::new(false)).map_err(failed)?;
    Ok(native.file_bytes)
}

/// Returns how much longer a program that does nothing takes under Farpool, as the difference of
/// the least times of several runs.
fn measure_start_ps(options: &CostsOptions) -> Result<u64, BenchError> {
    progress("start");
    let mut least = [Duration::MAX; 2];
    for _ in 0..options.rounds.max(START_ROUNDS) {
        let mut far = Command::new(&options.farpool);
        far.args(["run", "--quiet", "--door", options.door.as_str(), "--local", START_LOCAL]);
        for blade in &options.blades {
            far.args(["--blade", blade]);
        }
        far.args(["--", "true"]);
        for (command, least) in [&mut Command::new("true"), &mut far].into_iter().zip(&mut least) {
            *least = run_to_end("true", command, b"", PATIENCE)?.took.min(*least);
        }
    }
    let added_ns = least[1].saturating_sub(least[0]).as_nanos();
    Ok(at_most(added_ns * 1000))
}

/// Runs a probe in both places in turn, so that a machine that becomes slower does so for both.
fn measure_probe(
    options: &CostsOptions,
    name: &str,
    program: &[OsString],
    limit_bytes: u64,
    stats: &Path,
) -> Result<Probe, BenchError> {
    let mut best = Probe {
        name: name.to_owned(),
        local_ns: u64::MAX,
        far_ns: u64::MAX,
        events: Events::default(),
    };
    for _ in 0..options.rounds {
        check_interrupted()?;
        let mut local = Command::new(&program[0]);
        let local = report(name, local.args(&program[1..]))?;
        let mut far = Command::new(&options.farpool);
        far.args(["run", "--quiet", "--door", options.door.as_str()]);
        far.args(["--local", &limit_bytes.to_string(), "--stats"]).arg(stats);
        for blade in &options.blades {
            far.args(["--blade", blade]);
        }
        let far = report(name, far.arg("--").args(program))?;
        if far.checksum != local.checksum {
            let detail = format!("{name}: {} far, {} local", far.checksum, local.checksum);
            return Err(BenchError::WrongData { workload: "probe", detail });
        }
        best.local_ns = best.local_ns.min(nanoseconds(&local));
        let far_ns = nanoseconds(&far);
        if far_ns < best.far_ns {
            (best.far_ns, best.events) = (far_ns, read_events(stats)?);
        }
    }
    Ok(best)
}

fn report(name: &str, command: &mut Command) -> Result<WorkloadReport, BenchError> {
    let finished = run_to_end(name, command.stderr(Stdio::null()), b"", PATIENCE)?;
    serde_json::from_slice(&finished.stdout).map_err(|source| BenchError::Results {
        path: format!("the output of probe {name}"),
        source,
    })
}

/// Returns the time of filling and working, in which the events were counted, except those at the
/// process's start and end.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Seconds, not negative.
fn nanoseconds(report: &WorkloadReport) -> u64 {
    ((report.seconds + report.fill_seconds) * 1e9) as u64
}

/// Reads the events that the pager counted from a file of `farpool run --stats`.
///
/// # Errors
/// The file cannot be read, or does not hold such statistics.
pub fn read_events(stats: &Path) -> Result<Events, BenchError> {
    let wrong = |source| BenchError::Results { path: stats.display().to_string(), source };
    serde_json::from_value(read_stats(stats)?["total"].clone()).map_err(wrong)
}

fn read_stats(stats: &Path) -> Result<serde_json::Value, BenchError> {
    let path = stats.display().to_string();
    let bytes = std::fs::read(stats).map_err(BenchError::os(format!("read {path}")))?;
    serde_json::from_slice(&bytes).map_err(|source| BenchError::Results { path, source })
}
