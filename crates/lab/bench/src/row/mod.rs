//! The list of rows, what each needs, and the measurement of those that are selected.
//!
//! An experiment is measured as a whole and gives one or a few rows. An experiment that cannot be
//! made on this machine gives one row that is skipped, with the reason. Wrong data ends everything.

mod attach;
mod bars;
mod fault;
mod limit;
mod native;
mod predict;
mod programs;
mod throughput;

use crate::floor::Floors;
use crate::machine::{Machine, meminfo_bytes};
use crate::report::{Bar, Report, Row, Unit};
use crate::stage::{self, Door, Stage, progress, watch_signals};
use crate::{BenchArgs, BenchError};
use farpool_sim::pager::MeasuredCosts;
use farpool_units::MIB;
use std::cell::OnceCell;
use std::path::Path;
use std::time::Duration;

/// Longest time that a program may take: swapping to a slow disk is slow.
const PATIENCE: Duration = Duration::from_secs(600);
const PATIENCE_QUICK: Duration = Duration::from_secs(180);

/// State that experiments share.
pub(crate) struct Lab {
    stage: Stage,
    floors: Floors,
    quick: bool,
    swap: bool,
    /// Costs of far memory on this machine, once they are measured.
    costs: OnceCell<MeasuredCosts>,
}

type Run = fn(&Lab, &Experiment) -> Result<Vec<Row>, BenchError>;

/// A named measurement. Its rows' names are the experiment's, or start with it.
pub(crate) struct Experiment {
    name: String,
    unit: Unit,
    run: Run,
}

impl Lab {
    fn new(args: &BenchArgs) -> Result<Self, BenchError> {
        let this = || std::env::current_exe().map_err(BenchError::os("find the farpool binary"));
        let farpool = args.farpool.clone().map_or_else(this, Ok)?;
        let door = args.door.unwrap_or_else(|| Door::usual(&farpool));
        let folder = args.dir.join(stage::own_name());
        std::fs::create_dir_all(&folder)
            .map_err(BenchError::os(format!("make the folder {}", folder.display())))?;
        let patience = if args.quick { PATIENCE_QUICK } else { PATIENCE };
        Ok(Self {
            stage: Stage { farpool, folder, patience, door },
            floors: Floors::new(args.quick),
            quick: args.quick,
            swap: !args.no_swap,
            costs: OnceCell::new(),
        })
    }

    /// Returns the bytes to work on: `full`, or a quarter of it in a quick run, but never more than
    /// a quarter of the free memory of this machine, since the blade holds what is not local.
    fn bytes(&self, full: u64) -> u64 {
        let wanted = if self.quick { full / 4 } else { full };
        let free = meminfo_bytes("MemAvailable").unwrap_or(wanted * 4);
        wanted.min(free / 4) & !(MIB - 1)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The folder holds only the programs' own files; those that cannot be removed are harmless.
        let _ = std::fs::remove_dir_all(&self.stage.folder);
    }
}

/// Returns all experiments, in the order of the table.
fn experiments() -> Vec<Experiment> {
    let mut all = vec![
        experiment("floor", Unit::Nanoseconds, fault::floors),
        experiment("fault.shm", Unit::Nanoseconds, fault::shm),
        experiment("fault.tcp", Unit::Nanoseconds, fault::tcp),
        experiment("scan.shm", Unit::BytesPerSecond, throughput::scan),
        experiment("evict.shm", Unit::Nanoseconds, throughput::evict),
        experiment("attach.time", Unit::Seconds, attach::time),
        experiment("blade.tcp", Unit::BytesPerSecond, throughput::blade_tcp),
        experiment("calls.give-up", Unit::Nanoseconds, throughput::give_up),
        experiment("pager.memory", Unit::Bytes, limit::pager_memory),
    ];
    all.extend(native::NAMES.map(|name| experiment(name, Unit::Seconds, native::run)));
    all.extend(limit::NAMES.map(|name| experiment(name, Unit::Bytes, limit::run)));
    all.extend(predict::NAMES.map(|name| experiment(name, Unit::Percent, predict::run)));
    all.extend(programs::NAMES.map(|name| experiment(name, Unit::OpsPerSecond, programs::run)));
    all
}

fn experiment(name: &str, unit: Unit, run: Run) -> Experiment {
    Experiment { name: name.to_owned(), unit, run }
}

/// Whether `asked` is empty or names the experiment, its group or one of its rows.
fn is_asked(asked: &[String], name: &str) -> bool {
    let matches = |asked: &String| name.starts_with(asked.as_str()) || asked.starts_with(name);
    asked.is_empty() || asked.iter().any(matches)
}

/// Measures rows, lists them or compares two files, and prints the result to stdout.
///
/// # Errors
/// No row of that name, files that cannot be read or written, wrong data, an interruption. A missed
/// bar is not an error.
pub fn bench_main(args: &BenchArgs) -> Result<Report, BenchError> {
    if let [first, second] = args.compare.as_slice() {
        return compare(first, second);
    }
    let mut chosen = experiments();
    chosen.retain(|experiment| is_asked(&args.rows, &experiment.name));
    if chosen.is_empty() {
        let names: Vec<_> = experiments().into_iter().map(|e| e.name).collect();
        let message = format!("no row is called so; there are {}", names.join(", "));
        return Err(BenchError::Arguments(message));
    }
    let door = args.door.unwrap_or_default();
    let mut report = Report { machine: Machine::here(), quick: args.quick, door, rows: Vec::new() };
    if args.list {
        chosen.iter().for_each(|experiment| println!("{}", experiment.name));
        return Ok(report);
    }
    let ended = measure(args, &chosen, &mut report)?;
    if let Some(path) = &args.out {
        report.write(path)?;
    }
    print!("{}", if args.json { report.json_lines() } else { report.table() });
    ended.map(|()| report)
}

fn compare(first: &Path, second: &Path) -> Result<Report, BenchError> {
    let (first, second) = (Report::read(first)?, Report::read(second)?);
    print!("{}", first.compared_with(&second));
    Ok(second)
}

type Ended = Result<(), BenchError>;

/// Puts the rows and the door into the report. Returns the error that ended the measurements early,
/// if any.
fn measure(
    args: &BenchArgs,
    chosen: &[Experiment],
    report: &mut Report,
) -> Result<Ended, BenchError> {
    watch_signals()?;
    stage::remove_leftovers(&args.dir);
    let lab = Lab::new(args)?;
    let (mut rows, mut ended) = (Vec::new(), Ok(()));
    for (i, experiment) in chosen.iter().enumerate() {
        progress(&format!("[{}/{}] {}", i + 1, chosen.len(), experiment.name));
        match rows_of(&lab, experiment) {
            Ok(more) => rows.extend(more),
            Err(error) => {
                ended = Err(error);
                break;
            }
        }
    }
    progress("");
    if !args.rows.is_empty() {
        rows.retain(|row: &Row| is_asked(&args.rows, &row.name));
    }
    (report.rows, report.door) = (rows, lab.stage.door);
    Ok(ended)
}

/// Runs an experiment. Turns its failure into a row with the reason and no value. Errors if data
/// was wrong or the user interrupted the run.
fn rows_of(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    match (experiment.run)(lab, experiment) {
        Ok(rows) => Ok(rows),
        Err(error @ (BenchError::WrongData { .. } | BenchError::Interrupted)) => Err(error),
        Err(error) => Ok(vec![failed_row(&experiment.name, experiment.unit, None, &error)]),
    }
}

/// Returns a skipped row if this machine lacks a feature, which is not a failure of Farpool, and a
/// failed row for every other error.
fn failed_row(name: &str, unit: Unit, bar: Option<Bar>, error: &BenchError) -> Row {
    match error {
        BenchError::Lacking(reason) => Row::skipped(name, unit, reason),
        error => Row::failed(name, unit, bar, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn rows_are_chosen_by_group_by_name_and_by_their_parts() {
        assert!(is_asked(&[], "fault.shm"));
        assert!(is_asked(&asked(&["fault"]), "fault.shm"));
        assert!(is_asked(&asked(&["fault.shm.p99"]), "fault.shm"));
        assert!(!is_asked(&asked(&["fault.tcp", "program"]), "fault.shm"));
    }

    #[test]
    fn names_are_unique_and_unknown_ones_are_refused_with_the_list() {
        let mut names: Vec<_> = experiments().into_iter().map(|e| e.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        let args = BenchArgs { rows: asked(&["nonsense"]), ..BenchArgs::default() };
        let refusal = bench_main(&args).expect_err("there is no such row").to_string();
        assert!(refusal.contains("fault.shm") && refusal.contains("limit.redis"), "{refusal}");
    }

    #[test]
    fn failures_become_skipped_rows_but_wrong_data_ends_everything() {
        let dir = tempfile::tempdir().expect("a folder");
        let args = BenchArgs { dir: dir.path().to_owned(), ..BenchArgs::default() };
        let lab = Lab::new(&args).expect("a lab needs only a folder");
        let lacking = experiment("x", Unit::Seconds, |_, _| {
            Err(BenchError::Lacking("redis-server is not installed".to_owned()))
        });
        let rows = rows_of(&lab, &lacking).expect("a lack is no failure");
        assert_eq!((rows[0].value, rows[0].note.as_str()), (None, "redis-server is not installed"));
        assert_eq!(rows[0].met, None);
        let slow = experiment("x", Unit::Seconds, |_, _| {
            Err(BenchError::TooSlow { program: "x".to_owned(), seconds: 9.0 })
        });
        let rows = rows_of(&lab, &slow).expect("it is in its row");
        assert_eq!((rows[0].value, rows[0].met), (None, Some(false)));
        let wrong = experiment("x", Unit::Seconds, |_, _| {
            Err(BenchError::WrongData { workload: "sort", detail: String::new() })
        });
        assert!(rows_of(&lab, &wrong).is_err());
        drop(lab);
        assert_eq!(std::fs::read_dir(dir.path()).map_or(9, Iterator::count), 0);
    }
}
