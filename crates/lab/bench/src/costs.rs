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

use farpool_host::processors::process_ticks;
use farpool_sim::pager::{Costs, Events, Fit, Load, MeasuredCosts, Probe};
use farpool_trace::capture;
use farpool_units::at_most;

use crate::machine::Machine;
use crate::stage::{self, Door, check_interrupted, progress, run_undisturbed, watch_signals};
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
    /// Runs of each probe in each place; the median counts. Twice as many more are made, twice at
    /// most, while the costs do not fit.
    pub rounds: u32,
}

/// Times that twice the rounds are added while the costs do not fit: a load may pass.
const EXTRA_TIMES: u32 = 2;

/// Longest time that a probe may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Least number of starts measured, which are short. Their local memory may have any size.
const START_ROUNDS: u32 = 10;
const START_LOCAL: &str = "64MiB";

/// Name, workload, its arguments, and local memory in percent.
type ProbeWords = (&'static str, WorkloadName, &'static [&'static str], u64);

const PROBES: [ProbeWords; 14] = [
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
    let before = Busy::now();
    let measured = measure_start_ps(options)
        .and_then(|start_ps| Ok((measure_probes(options, start_ps, &stats)?, start_ps)));
    let load = before.and_then(|before| Some(before.others_until(&Busy::now()?)));
    let file_bytes = file_bytes(options);
    // The folder holds only the statistics of a run.
    let _ = std::fs::remove_dir_all(&folder);
    progress("");
    let (runs, start_ps) = measured?;
    let probes: Vec<Probe> = runs.iter().map(Runs::median).collect();
    let mut fixed_bytes: Vec<u64> = runs.iter().map(|run| run.fixed_bytes).collect();
    fixed_bytes.sort_unstable();
    let usual_bytes = fixed_bytes.get(fixed_bytes.len() / 2).copied().unwrap_or(0);
    let costs = Costs::fit(&probes, start_ps);
    Ok(MeasuredCosts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::here().to_string(),
        blades: options.blades.clone(),
        own_bytes: usual_bytes.saturating_sub(file_bytes?),
        rounds: runs.first().map_or(0, |run| at_most(run.local_ns.len())),
        load,
        fit: Fit::of(&costs, &probes),
        costs,
        probes,
    })
}

/// The probe that tells how dear far memory is at another time than that of the calibration.
const REFERENCE: ProbeWords = PROBES[11];

/// Runs [`REFERENCE`] again, as often as asked for, between runs of something else.
pub(crate) struct Reference<'a> {
    options: &'a CostsOptions,
    runs: Runs,
    then: Option<&'a Probe>,
}

impl<'a> Reference<'a> {
    pub(crate) fn new(options: &'a CostsOptions, calibrated: &'a MeasuredCosts) -> Self {
        let runs = Runs::of(REFERENCE, options);
        let then = calibrated.probes.iter().find(|probe| probe.name == runs.name);
        Self { options, runs, then }
    }

    /// Runs it once more in both places.
    ///
    /// # Errors
    /// As [`measure_costs`].
    pub(crate) fn measure(&mut self, stats: &Path) -> Result<(), BenchError> {
        measure_probe(self.options, &mut self.runs, stats)
    }

    /// Returns what far memory adds to the probe now, as a multiple of what it added when the costs
    /// were measured. None if it was not among the probes then, or nothing was added.
    #[allow(clippy::cast_precision_loss)] // of nanoseconds, for a ratio
    pub(crate) fn drift(&self) -> Option<f64> {
        let added_ns = |probe: &Probe| probe.far_ns.checked_sub(probe.local_ns);
        let then_ns = added_ns(self.then?).filter(|added_ns| *added_ns > 0)?;
        Some(added_ns(&self.runs.median())? as f64 / then_ns as f64)
    }
}

/// All runs of one probe.
struct Runs {
    name: &'static str,
    words: Vec<OsString>,
    limit_bytes: u64,
    local_ns: Vec<u64>,
    far: Vec<(u64, Events)>,
    /// Of the last run far away.
    fixed_bytes: u64,
}

impl Runs {
    fn of((name, workload, arguments, percent): ProbeWords, options: &CostsOptions) -> Self {
        let mut words: Vec<OsString> = vec![options.farpool.clone().into()];
        words.extend(["workload", workload.as_str(), "--bytes"].map(OsString::from));
        words.push(options.bytes.to_string().into());
        words.extend(arguments.iter().map(OsString::from));
        Self {
            name,
            words,
            limit_bytes: options.bytes * percent / 100,
            local_ns: Vec::new(),
            far: Vec::new(),
            fixed_bytes: 0,
        }
    }

    /// The median time in each place, with the events of that run: a load that comes and goes moves
    /// it less than any single run, and neither place is favoured.
    fn median(&self) -> Probe {
        let mut local: Vec<u64> = self.local_ns.clone();
        local.sort_unstable();
        let mut far = self.far.clone();
        far.sort_unstable_by_key(|(far_ns, _)| *far_ns);
        let middle = |length: usize| length.saturating_sub(1) / 2;
        let (far_ns, events) = far.get(middle(far.len())).copied().unwrap_or_default();
        Probe {
            name: self.name.to_owned(),
            local_ns: local.get(middle(local.len())).copied().unwrap_or(0),
            far_ns,
            events,
        }
    }
}

/// Processor time of the machine, and the part that this process and its children used.
struct Busy {
    ticks: u64,
    idle_ticks: u64,
    stolen_ticks: u64,
    own_ticks: u64,
}

impl Busy {
    /// Reads `/proc/stat` and `/proc/self/stat`. None where they cannot be read.
    fn now() -> Option<Busy> {
        let machine = std::fs::read_to_string("/proc/stat").ok()?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        Busy::parse(&machine, &own)
    }

    fn parse(machine: &str, own: &str) -> Option<Busy> {
        let line = machine.lines().find_map(|line| line.strip_prefix("cpu "))?;
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
        let ticks: Vec<u64> =
            line.split_ascii_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
        let [.., idle, iowait, _, _, stolen] = ticks.as_slice() else { return None };
        Some(Busy {
            ticks: ticks.iter().sum(),
            idle_ticks: idle + iowait,
            stolen_ticks: *stolen,
            own_ticks: process_ticks(own)?,
        })
    }

    /// Returns what others used between two readings.
    fn others_until(&self, later: &Busy) -> Load {
        let all = later.ticks.saturating_sub(self.ticks).max(1);
        let stolen = later.stolen_ticks.saturating_sub(self.stolen_ticks);
        let idle = later.idle_ticks.saturating_sub(self.idle_ticks);
        let own = later.own_ticks.saturating_sub(self.own_ticks);
        let others = all.saturating_sub(idle + stolen + own);
        Load {
            others_permille: at_most(others * 1000 / all),
            stolen_permille: at_most(stolen * 1000 / all),
        }
    }
}

/// Runs all probes in turn, round by round, so that a load meets all of them alike; more rounds
/// while
/// the costs do not fit.
fn measure_probes(
    options: &CostsOptions,
    start_ps: u64,
    stats: &Path,
) -> Result<Vec<Runs>, BenchError> {
    let mut runs: Vec<Runs> = PROBES.into_iter().map(|probe| Runs::of(probe, options)).collect();
    for extra in 0..=EXTRA_TIMES {
        let rounds = if extra == 0 { options.rounds } else { options.rounds * 2 };
        for round in 0..rounds {
            for (number, run) in runs.iter_mut().enumerate() {
                let (name, of) = (run.name, PROBES.len());
                progress(&format!("round {}/{rounds} [{}/{of}] {name}", round + 1, number + 1));
                measure_probe(options, run, stats)?;
            }
        }
        let probes: Vec<Probe> = runs.iter().map(Runs::median).collect();
        if Fit::of(&Costs::fit(&probes, start_ps), &probes).is_none_or(|fit| fit.is_good()) {
            break;
        }
    }
    Ok(runs)
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
/// the median times of several runs.
fn measure_start_ps(options: &CostsOptions) -> Result<u64, BenchError> {
    progress("start");
    let mut took: [Vec<Duration>; 2] = Default::default();
    for _ in 0..options.rounds.max(START_ROUNDS) {
        let mut far = Command::new(&options.farpool);
        far.args(["run", "--quiet", "--door", options.door.as_str(), "--local", START_LOCAL]);
        for blade in &options.blades {
            far.args(["--blade", blade]);
        }
        far.args(["--", "true"]);
        for (command, took) in [&mut Command::new("true"), &mut far].into_iter().zip(&mut took) {
            took.push(run_undisturbed("true", command, b"", PATIENCE)?.took);
        }
    }
    let [native, far] = took.map(|mut took| {
        took.sort_unstable();
        took[(took.len() - 1) / 2]
    });
    let added_ns = far.saturating_sub(native).as_nanos();
    Ok(at_most(added_ns * 1000))
}

/// Runs a probe in both places, one after the other.
fn measure_probe(options: &CostsOptions, run: &mut Runs, stats: &Path) -> Result<(), BenchError> {
    check_interrupted()?;
    let name = run.name;
    let mut local = Command::new(&run.words[0]);
    let (local_ns, local) = report(name, local.args(&run.words[1..]))?;
    let mut far = Command::new(&options.farpool);
    far.args(["run", "--quiet", "--door", options.door.as_str()]);
    far.args(["--local", &run.limit_bytes.to_string(), "--stats"]).arg(stats);
    for blade in &options.blades {
        far.args(["--blade", blade]);
    }
    let (far_ns, far) = report(name, far.arg("--").args(&run.words))?;
    if far.checksum != local.checksum {
        let detail = format!("{name}: {} far, {} local", far.checksum, local.checksum);
        return Err(BenchError::WrongData { workload: "probe", detail });
    }
    run.local_ns.push(local_ns);
    run.far.push((far_ns, read_events(stats)?));
    run.fixed_bytes = read_stats(stats)?["fixed_bytes"].as_u64().unwrap_or(0);
    Ok(())
}

/// Returns the whole time of a probe's process, in which its events were counted, and its report.
fn report(name: &str, command: &mut Command) -> Result<(u64, WorkloadReport), BenchError> {
    let finished = run_undisturbed(name, command.stderr(Stdio::null()), b"", PATIENCE)?;
    let report = serde_json::from_slice(&finished.stdout).map_err(|source| {
        BenchError::Results { path: format!("the output of probe {name}"), source }
    })?;
    Ok((at_most(finished.took.as_nanos()), report))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_run_counts_with_its_own_events() {
        let events = |faults| Events { faults, ..Events::default() };
        let runs = Runs {
            name: "a",
            words: Vec::new(),
            limit_bytes: 0,
            local_ns: vec![9, 1, 5],
            far: vec![(70, events(7)), (10, events(1)), (30, events(3))],
            fixed_bytes: 0,
        };
        let median = runs.median();
        assert_eq!((median.local_ns, median.far_ns, median.events.faults), (5, 30, 3));
    }

    #[test]
    fn what_others_used_is_all_that_was_busy_but_not_our_own() {
        let own = |ticks: u64| format!("1 (a) b) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0");
        let at = |machine: &str, ticks| Busy::parse(machine, &own(ticks)).unwrap();
        let before = at("cpu  100 0 0 900 0 0 0 0 0 0\ncpu0 1 2 3\n", 40);
        let after = at("cpu  160 0 20 1200 0 0 0 20 0 0\n", 90);
        // 400 ticks: 300 idle, 20 stolen, 50 our own, 30 of others.
        assert_eq!(before.others_until(&after), Load { others_permille: 75, stolen_permille: 50 });
    }
}
