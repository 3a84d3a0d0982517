//! What `farpool attach` does to a program that already holds four times its new limit: how fast
//! pages leave it, and how soon the limit holds.

use super::{Experiment, Lab, MIB, limit};
use crate::BenchError;
use crate::program::Workload;
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, Running, check_interrupted};
use crate::workload::{WorkloadName, WorkloadReport};
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

const HELD_BYTES: u64 = 512 * MIB;
/// The program holds this many times its new limit.
const HELD_PARTS: u64 = 4;
/// Seconds for each GiB that is moved out, from the start of `farpool attach`.
const SECONDS_PER_GIB: Bar = Bar::AtMost(5.0);
/// How often the program's memory is sampled.
const PERIOD: Duration = Duration::from_millis(1);
/// The rate is measured from when this part of the memory that has to leave is gone, until
/// [`RATE_TO`] is gone.
const RATE_FROM: f64 = 0.05;
const RATE_TO: f64 = 0.95;

/// Times in which pages left.
struct Left {
    /// From the start of `farpool attach` until the limit held, judged as in the limit rows.
    until_held: Duration,
    /// Bytes that had left by then.
    moved_bytes: u64,
    /// Nanoseconds a page, from [`RATE_FROM`] to [`RATE_TO`].
    page_ns: f64,
}

/// Measures the seconds for each GiB until the limit holds.
pub(super) fn time(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let left = attach(lab)?;
    let gib = left.moved_bytes as f64 / (1024 * MIB) as f64;
    let seconds = left.until_held.as_secs_f64() / gib;
    let row = Row::judged(&experiment.name, seconds, Unit::Seconds, SECONDS_PER_GIB);
    Ok(vec![row.note("per GiB moved out, from the start of farpool attach until the limit holds")])
}

/// Measures the nanoseconds a page, with `farpool attach`: a sidecar does not see `MADV_PAGEOUT`.
pub(super) fn evict(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let (floor_ns, left) = (lab.floors.move_page_ns()?, attach(lab)?);
    let bar = Bar::AtMost(super::bars::EVICT_RATIO);
    let row = Row::beside(&experiment.name, left.page_ns, floor_ns, Unit::Nanoseconds, bar);
    Ok(vec![row.note("per page, farpool attach; floor: UFFDIO_MOVE in batches of 64 + memcpy")])
}

fn attach(lab: &Lab) -> Result<Left, BenchError> {
    let bytes = lab.bytes(HELD_BYTES);
    let hold = Workload { name: WorkloadName::Hold, bytes, args: &[] };
    let mut launch = lab.stage.launch(Place::Local, &hold.command(&lab.stage.farpool), bytes)?;
    let command = launch.command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Running::start("farpool workload hold", command)?;
    let deadline = Instant::now() + lab.stage.patience;
    while anonymous_bytes(program.id())? < bytes {
        program.check_alive()?;
        pause_until(deadline)?;
    }
    let limit_bytes = bytes / HELD_PARTS;
    let mut command = Command::new(&lab.stage.farpool);
    command.args(["attach", "--quiet", "--local", &limit_bytes.to_string()]);
    command.arg(program.id().to_string()).stdin(Stdio::null());
    let mut keeper = Running::start("farpool attach", &mut command)?;
    let left = watch(&mut keeper, &mut program, limit_bytes, deadline)?;
    // The program checks its memory at the end of its input, and reports the result.
    drop(program.stdin());
    let mut output = String::new();
    if let Some(mut stdout) = program.stdout() {
        stdout.read_to_string(&mut output).map_err(BenchError::os("read the program's report"))?;
    }
    program.wait(lab.stage.patience)?;
    keeper.wait(lab.stage.patience)?;
    let report = serde_json::from_str::<WorkloadReport>(&output);
    let path = "the output of workload hold".to_owned();
    report.map_err(|source| BenchError::Results { path, source })?;
    Ok(left)
}

fn watch(
    keeper: &mut Running,
    program: &mut Running,
    limit_bytes: u64,
    deadline: Instant,
) -> Result<Left, BenchError> {
    let (began, before) = (Instant::now(), anonymous_bytes(program.id())?);
    let must_go = before.saturating_sub(limit_bytes) as f64;
    let (mut first, mut held) = (None, None);
    loop {
        let (now, at) = (anonymous_bytes(program.id())?, began.elapsed());
        let gone = before.saturating_sub(now);
        if now <= limit::allowed_bytes(limit_bytes) {
            held.get_or_insert((at, gone));
        }
        let part = gone as f64 / must_go;
        let (from, gone_before) = match first {
            Some(first) => first,
            None if part < RATE_FROM => (at, gone),
            None => *first.insert((at, gone)),
        };
        if let (true, Some((until_held, moved_bytes))) = (part >= RATE_TO, held) {
            let pages = (gone - gone_before) as f64 / PAGE_BYTES as f64;
            let page_ns = (at - from).as_secs_f64() * 1e9 / pages;
            return Ok(Left { until_held, moved_bytes, page_ns });
        }
        keeper.check_alive()?;
        program.check_alive()?;
        pause_until(deadline)?;
    }
}

/// Returns the memory that a process holds, in bytes, without files and shared memory.
fn anonymous_bytes(pid: u32) -> Result<u64, BenchError> {
    let path = format!("/proc/{pid}/statm");
    let statm = std::fs::read_to_string(&path).map_err(BenchError::os(format!("read {path}")))?;
    let fields: Vec<u64> =
        statm.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect();
    match fields[..] {
        [_, resident, shared, ..] if resident > 0 => {
            Ok(resident.saturating_sub(shared) * PAGE_BYTES as u64)
        }
        _ => Err(BenchError::Program {
            program: "farpool workload hold".to_owned(),
            detail: "it has ended too early".to_owned(),
        }),
    }
}

/// Sleeps for [`PERIOD`]. Errors if `deadline` has passed.
fn pause_until(deadline: Instant) -> Result<(), BenchError> {
    check_interrupted()?;
    if Instant::now() > deadline {
        let detail = "the limit was not reached in time".to_owned();
        return Err(BenchError::Program { program: "farpool attach".to_owned(), detail });
    }
    std::thread::sleep(PERIOD);
    Ok(())
}
