//! Compares what `farpool sim predict` predicts with what is measured.
//!
//! A program is captured once (its pages, and how long it takes by itself); costs are measured by
//! probes that have nothing to do with it; then it is run under `farpool run` at the same limits.
//! The value is how far the predicted time is from the measured one. Programs have one working
//! thread: the costs are those of one thread.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use farpool_sim::pager::{MeasuredCosts, Prediction, Question, predict};
use farpool_sim::{LoadOptions, LocalSize, References, load};
use farpool_trace::{Columns, TraceReader};
use farpool_units::PAGE_BYTES_U64;

use super::{Experiment, Lab, MIB};
use crate::BenchError;
use crate::costs::{CostsOptions, measure_costs};
use crate::program::{Sqlite, python_program};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, Running, lacking, progress};

/// Names of the rows, one for each program.
pub(super) const NAMES: [&str; 6] = [
    "predict.sort",
    "predict.sqlite",
    "predict.objects",
    "predict.gather",
    "predict.mstress",
    "predict.pagerank",
];
/// Local memory in percent of all.
const SHARES: [u32; 2] = [50, 25];
/// The predicted time with far memory may differ from the measured one by this many percent.
const BAR: Bar = Bar::AtMost(25.0);
/// The fastest of this many runs counts, for the costs and for the program's own time, too.
const RUNS: u32 = 3;
const PROBE_BYTES: u64 = 256 * MIB;
/// Memory limit for a page trace. Records take 16 bytes each; no program here comes near it.
const TRACE_MEMORY_BYTES: u64 = 4096 * MIB;

/// A list of small dictionaries, all read three times.
const OBJECTS: &str = "
items = [{'id': i, 'name': 'object %d' % i} for i in range(250000)]
total = 0
for _ in range(3):
    for item in items:
        total += item['id'] + len(item['name'])
print(total)
";
/// Numbers in an array, read in random order.
const GATHER: &str = "
import array, random
random.seed(1)
count = 4000000
numbers = array.array('q', range(count))
places = array.array('l', (random.getrandbits(22) % count for _ in range(count // 2)))
total = 0
for place in places:
    total += numbers[place]
print(total)
";

pub(super) fn run(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let name = experiment.name.as_str();
    let program = program(lab, name)?;
    let costs = costs(lab)?;
    progress(&format!("{name}: capture"));
    let trace = capture(lab, &program)?;
    let native_ps = trace.info.native_ps.unwrap_or(0);
    let question = Question {
        local: SHARES.iter().map(|share| LocalSize::Permille(share * 10)).collect(),
        // Runs get the size in bytes that the prediction names.
        of_peak: true,
        file_bytes: trace.info.native_file_bytes,
        fixed_bytes: trace.info.native_file_bytes.unwrap_or(0) + costs.own_bytes,
        victims: farpool_policy::VictimKind::default(),
        prefetch: farpool_policy::PrefetchKind::default(),
        remembers_runs: costs.is_remote(),
        seed: 1,
        native_ps,
    };
    let mut rows = Vec::new();
    for local in &question.local {
        let prediction = predict(&question, &trace, costs, *local);
        progress(&format!("{name}: {local} local"));
        let measured = measured(lab, &program, prediction.local_bytes)?;
        rows.push(row(name, native_ps, &prediction, measured));
    }
    Ok(rows)
}

fn row(name: &str, native_ps: u64, prediction: &Prediction, measured: Duration) -> Row {
    let seconds = |ps: u64| ps as f64 / 1e12;
    let predicted_s = seconds(native_ps + prediction.added_ps);
    let off_percent = (predicted_s / measured.as_secs_f64() - 1.0) * 100.0;
    let name = format!("{name}.{}", prediction.local.to_string().trim_end_matches('%'));
    Row::judged(name, off_percent.abs(), Unit::Percent, BAR).note(format!(
        "predicted {predicted_s:.2} s, measured {:.2} s, by itself {:.2} s",
        measured.as_secs_f64(),
        seconds(native_ps),
    ))
}

fn costs(lab: &Lab) -> Result<&MeasuredCosts, BenchError> {
    if let Some(costs) = lab.costs.get() {
        return Ok(costs);
    }
    let costs = measure_costs(&CostsOptions {
        farpool: lab.stage.farpool.clone(),
        blades: Vec::new(),
        door: lab.stage.door,
        bytes: lab.bytes(PROBE_BYTES),
        rounds: RUNS,
    })?;
    Ok(lab.costs.get_or_init(|| costs))
}

fn program(lab: &Lab, name: &str) -> Result<Vec<OsString>, BenchError> {
    let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
    let part = |full: u64| if lab.quick { full / 4 } else { full };
    let python = |script: &str| vec![python_program(), "-c".into(), script.into()];
    let workload = |name: &str, bytes: u64, more: &[&str]| {
        let mut program = vec![lab.stage.farpool.clone().into_os_string()];
        program.extend(words(&["workload", name, "--bytes", &bytes.to_string()]));
        program.extend(words(more));
        program
    };
    Ok(match name {
        "predict.sort" => {
            let lines = lab.stage.folder.join("lines.txt");
            write(&lines, digits(part(3_000_000)).as_bytes())?;
            let out = lab.stage.folder.join("sorted.txt");
            let mut program = words(&["sort", "--parallel=1", "-S", "2G", "-o"]);
            program.extend([out.into(), lines.into()]);
            program
        }
        "predict.sqlite" => {
            let script = lab.stage.folder.join("script.sql");
            let rows = part(300_000);
            write(&script, Sqlite { rows, queries: rows / 60 }.script().as_bytes())?;
            let mut program = words(&["sqlite3", "-batch", ":memory:"]);
            program.push(format!(".read {}", script.display()).into());
            program
        }
        "predict.objects" => python(OBJECTS),
        "predict.gather" => python(GATHER),
        "predict.mstress" => workload("mstress", lab.bytes(128 * MIB), &[]),
        _ => workload("pagerank", lab.bytes(128 * MIB), &["--passes", "2"]),
    })
}

/// Returns lines of 26 digits in random order.
fn digits(count: u64) -> String {
    let line = |number| format!("{:026}\n", crate::workload::mix(number));
    (0..count).map(line).collect()
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), BenchError> {
    std::fs::write(path, bytes).map_err(BenchError::os(format!("write {}", path.display())))
}

/// Captures the pages of a program in order, and the time that it takes by itself.
fn capture(lab: &Lab, program: &[OsString]) -> Result<References, BenchError> {
    if farpool_trace::capture::find_qemu().is_none() {
        return Err(lacking("qemu-user is not installed"));
    }
    let out = lab.stage.folder.join("pages.parquet");
    let mut command = Command::new(&lab.stage.farpool);
    command.args(["trace", "--pages"]).arg(format!("--time={RUNS}")).arg("--out").arg(&out);
    // A timed program needs the same input each time: none.
    command.arg("--").args(program).stdin(Stdio::null()).stdout(Stdio::null());
    Running::start("farpool trace", &mut command)?.wait(lab.stage.patience)?;
    let broken = |error: &dyn std::error::Error| BenchError::Program {
        program: "farpool trace".to_owned(),
        detail: error.to_string(),
    };
    let reader = TraceReader::open(&out, Columns::ALL).map_err(|error| broken(&error))?;
    let options =
        LoadOptions { page_bytes: PAGE_BYTES_U64, memory_limit_bytes: TRACE_MEMORY_BYTES };
    load(reader, options, &mut |_| {}).map_err(|error| broken(&error))
}

/// Returns the least time of several runs at this limit.
fn measured(lab: &Lab, program: &[OsString], limit_bytes: u64) -> Result<Duration, BenchError> {
    let need_bytes = limit_bytes * 100 / u64::from(SHARES[SHARES.len() - 1]);
    (0..RUNS).try_fold(Duration::MAX, |least, _| {
        let finished = lab.stage.run(Place::Shm(limit_bytes), program, b"", need_bytes)?;
        Ok(finished.took.min(least))
    })
}
