//! Compares what `farpool sim predict` predicts with what is measured.
//!
//! A program is captured once (its pages, and how long it takes by itself); costs are measured by
//! probes that have nothing to do with it; then it is run under `farpool run` at the same limits.
//! Two rows each: how far the predicted time is from the measured one, and by what factor the
//! fetched pages are. Programs have one working thread: the costs are those of one thread.
//!
//! A machine is not equally fast all the time: one of the probes is run again between the runs, and
//! what far memory adds is compared at the speed of then.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use farpool_sim::pager::{Events, MeasuredCosts, Prediction, Question, predict};
use farpool_sim::{LoadOptions, LocalSize, References, load};
use farpool_trace::{Columns, TraceReader};
use farpool_units::PAGE_BYTES_U64;

use super::{Experiment, Lab, MIB};
use crate::BenchError;
use crate::costs::{CostsOptions, Reference, measure_costs, read_events};
use crate::program::{Sqlite, python_program};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, Running, lacking, progress};

/// Names of the rows, one for each program.
pub(super) const NAMES: [&str; 10] = [
    "predict.sort",
    "predict.sqlite",
    "predict.objects",
    "predict.gather",
    "predict.mstress",
    "predict.pagerank",
    "predict.perl",
    "predict.awk",
    "predict.ruby",
    "predict.xz",
];
/// Local memory in percent of all.
const SHARES: [u32; 2] = [50, 25];
/// The predicted time with far memory may differ from the measured one by this many percent.
const BAR: Bar = Bar::AtMost(25.0);
/// The fetched pages may be off by this factor, in either direction.
const FETCHES_BAR: Bar = Bar::AtMost(1.5);
/// Below this many fetched pages, predicted and measured, a factor says nothing: they take a few
/// milliseconds.
const FETCHES_LEAST: u64 = 1_000;
/// The median of this many runs counts, for the costs, too.
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
/// A hash of strings, read three times in another order than it was filled.
const PERL: &str = r#"
my (%h, $total);
my $count = 120000;
$h{"key $_"} = $_ for 1..$count;
for (1..3) { for my $i (1..$count) { $total += $h{"key " . ($i * 7919 % $count + 1)} } }
print "$total\n";
"#;
/// Counts the beginnings of lines, and their ends for each.
const AWK: &str = r"
{ count[substr($0, 15, 6)]++; last[substr($0, 15, 6)] = $0 }
END { for (key in count) if (count[key] > 1) sum += count[key] * length(last[key]); print sum }
";
/// Small objects that reference each other, some of them thrown away: its collector walks them.
const RUBY: &str = "
Node = Struct.new(:key, :name, :other)
nodes = []
200_000.times { |i| nodes << Node.new(i, \"node #{i}\", nodes[i * 7919 % (i + 1)]) }
total = 0
3.times { nodes.each { |it| total += it.key + it.name.size + (it.other ? it.other.key : 0) } }
puts total
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
    let options = costs_options(lab);
    let mut rows = Vec::new();
    for local in &question.local {
        let prediction = predict(&question, &trace, costs, *local);
        progress(&format!("{name}: {local} local"));
        let mut reference = Reference::new(&options, costs);
        let (took, events) = measured(lab, &program, prediction.local_bytes, &mut reference)?;
        let drift = reference.drift().unwrap_or(1.0);
        rows.push(time_row(name, native_ps, &prediction, drift, took));
        rows.push(fetches_row(name, &prediction, &events));
    }
    Ok(rows)
}

fn time_row(
    name: &str,
    native_ps: u64,
    prediction: &Prediction,
    drift: f64,
    measured: Duration,
) -> Row {
    let seconds = |ps: u64| ps as f64 / 1e12;
    let band = prediction.time_band_ps.map_or_else(String::new, |(low, high)| {
        format!(" ({:.2} to {:.2})", seconds(low), seconds(high))
    });
    let predicted_s = seconds(native_ps + prediction.added_ps);
    let now_s = seconds(native_ps) + seconds(prediction.added_ps) * drift;
    let off_percent = (now_s / measured.as_secs_f64() - 1.0) * 100.0;
    Row::judged(row_name(name, prediction), off_percent.abs(), Unit::Percent, BAR).note(format!(
        "predicted {predicted_s:.2} s{band}, {now_s:.2} s with far memory {drift:.2} times as dear \
         as then; measured {:.2} s, by itself {:.2} s",
        measured.as_secs_f64(),
        seconds(native_ps),
    ))
}

fn fetches_row(name: &str, prediction: &Prediction, measured: &Events) -> Row {
    let fetched = |events: &Events| events.demand_fetches + events.prefetches;
    let (predicted, counted) = (fetched(&prediction.events), fetched(measured));
    let (less, more) = (predicted.min(counted), predicted.max(counted));
    let factor = more as f64 / less.max(1) as f64;
    let row =
        Row::judged(row_name(name, prediction) + ".fetches", factor, Unit::Factor, FETCHES_BAR)
            .note(format!("predicted {predicted} pages, counted {counted}"));
    if more < FETCHES_LEAST { row.unjudged() } else { row }
}

fn row_name(name: &str, prediction: &Prediction) -> String {
    format!("{name}.{}", prediction.local.to_string().trim_end_matches('%'))
}

fn costs(lab: &Lab) -> Result<&MeasuredCosts, BenchError> {
    if let Some(costs) = lab.costs.get() {
        return Ok(costs);
    }
    let costs = measure_costs(&costs_options(lab))?;
    Ok(lab.costs.get_or_init(|| costs))
}

fn costs_options(lab: &Lab) -> CostsOptions {
    CostsOptions {
        farpool: lab.stage.farpool.clone(),
        blades: Vec::new(),
        door: lab.stage.door,
        bytes: lab.bytes(PROBE_BYTES),
        rounds: RUNS,
    }
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
        "predict.perl" => words(&["perl", "-e", PERL]),
        "predict.awk" => {
            let lines = lab.stage.folder.join("lines.txt");
            write(&lines, digits(part(250_000)).as_bytes())?;
            let mut program = words(&["mawk", AWK]);
            program.push(lines.into());
            program
        }
        "predict.ruby" => words(&["ruby", "--disable-all", "-e", RUBY]),
        "predict.xz" => {
            let lines = lab.stage.folder.join("lines.txt");
            write(&lines, digits(part(100_000)).as_bytes())?;
            let mut program = words(&["xz", "-6", "--threads=1", "--keep", "--stdout"]);
            program.push(lines.into());
            program
        }
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

/// Returns the median of several runs at this limit, its time and its events; `reference` is run
/// between them.
fn measured(
    lab: &Lab,
    program: &[OsString],
    limit_bytes: u64,
    reference: &mut Reference,
) -> Result<(Duration, Events), BenchError> {
    let need_bytes = limit_bytes * 100 / u64::from(SHARES[SHARES.len() - 1]);
    let stats = lab.stage.stats_file();
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        reference.measure(&stats)?;
        let finished = lab.stage.run_undisturbed(Place::Shm(limit_bytes), program, need_bytes)?;
        runs.push((finished.took, read_events(&stats)?));
    }
    runs.sort_unstable_by_key(|(took, _)| *took);
    Ok(runs.swap_remove((runs.len() - 1) / 2))
}
