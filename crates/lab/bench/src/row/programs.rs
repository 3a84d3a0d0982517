//! Programs with part of their memory far, compared with all-local and with the kernel's own
//! swapping.
//!
//! A program is run all-local first; 50 % and 25 % are shares of the most memory that its processes
//! held then. Each share has a row compared with swapping to disk, which has to be slower, and one
//! compared with zram, which is reported only, since zram takes local memory for the pages it
//! holds. (Pipelined redis is compared with all-local only.) Swapping may take too long to wait
//! for: it is given five times Farpool's time, less if that is minutes. If it is not done by then,
//! its figure is the most that it can have reached.

use super::{Experiment, Lab, MIB, failed_row};
use crate::BenchError;
use crate::program::{Measured, Program, Redis, Sqlite, Workload};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, Stage, progress};
use crate::workload::WorkloadName;
use std::time::Duration;

/// Names of the rows, one for each program.
pub(super) const NAMES: [&str; 9] = [
    "program.mstress",
    "program.scan",
    "program.random",
    "program.sort",
    "program.pagerank",
    "program.sqlite",
    "program.redis",
    "program.redis16",
    "program.redis-pipelined",
];
/// Local memory in percent of all, and the share of its all-local speed that redis has to keep.
const SHARES: [(u64, f64); 2] = [(50, 0.8), (25, 0.6)];

/// Swapping is given this many times the time that Farpool took, within the two limits below. If
/// Farpool itself came near the upper limit, swapping is given 1.5 times its time instead, which is
/// enough to judge.
const SWAP_PATIENCE_FACTOR: u32 = 5;
const SWAP_PATIENCE_MIN: Duration = Duration::from_secs(15);
const SWAP_PATIENCE_MOST: Duration = Duration::from_secs(120);

const WORK_BYTES: u64 = 512 * MIB;
const REDIS_KEYS: usize = 400_000;
const SQLITE_ROWS: u64 = 1_200_000;

fn program(lab: &Lab, name: &str) -> Program {
    let bytes = lab.bytes(WORK_BYTES);
    let workload = |name, args| Program::Workload(Workload { name, bytes, args });
    match name {
        "program.mstress" => workload(WorkloadName::Mstress, &[]),
        "program.scan" => workload(WorkloadName::Scan, &["--passes", "4"]),
        "program.random" => workload(WorkloadName::Faults, &["--write-percent", "25"]),
        "program.sort" => workload(WorkloadName::Sort, &[]),
        // A graph takes long to build: half as much memory, fewer rounds.
        "program.pagerank" => Program::Workload(Workload {
            name: WorkloadName::Pagerank,
            bytes: bytes / 2,
            args: &["--passes", "2"],
        }),
        "program.sqlite" => Program::Sqlite(sqlite(lab)),
        "program.redis16" => Program::Redis(redis(lab, 16, 1)),
        "program.redis-pipelined" => Program::Redis(redis(lab, 5, 16)),
        _ => Program::Redis(redis(lab, 50, 1)),
    }
}

/// Returns redis with `pipeline` requests in flight on each connection. The defaults of
/// redis-benchmark are 50 connections and one request in flight on each.
pub(super) fn redis(lab: &Lab, connections: usize, pipeline: usize) -> Redis {
    let seconds = if lab.quick { 2 } else { 6 };
    Redis {
        keys: if lab.quick { REDIS_KEYS / 4 } else { REDIS_KEYS },
        connections,
        pipeline,
        warm_up: Duration::from_secs(seconds / 2),
        measure: Duration::from_secs(seconds),
    }
}

pub(super) fn sqlite(lab: &Lab) -> Sqlite {
    let rows = if lab.quick { SQLITE_ROWS / 4 } else { SQLITE_ROWS };
    Sqlite { rows, queries: rows / 60 }
}

/// Measures the rows of one program, at each share.
pub(super) fn run(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let program = program(lab, &experiment.name);
    let whole = program.run(&lab.stage, Place::Local, program.guess_bytes())?;
    let mut rows = Vec::new();
    for (percent, redis_bar) in SHARES {
        let name = format!("{}.{percent}", experiment.name);
        progress(&name);
        let limit_bytes = whole.peak_bytes * percent / 100;
        let far = match checked(&lab.stage, &program, Place::Shm(limit_bytes), &whole) {
            Ok(far) => far,
            Err(error) => {
                rows.push(failed_or_fatal(&name, error)?);
                continue;
            }
        };
        let against = Against { lab, program: &program, limit_bytes, whole: &whole, far: &far };
        match experiment.name.as_str() {
            "program.redis" | "program.redis16" => {
                rows.push(against.all_local(&name, Bar::AtLeast(redis_bar)));
                rows.extend(against.swap(&name)?);
            }
            // redis is judged with one request in flight on each connection, the default of
            // redis-benchmark; pipelined it is reported only.
            "program.redis-pipelined" => {
                rows.push(against.all_local(&name, Bar::AtLeast(redis_bar)).unjudged());
            }
            _ => rows.extend(against.swap(&name)?),
        }
    }
    Ok(rows)
}

/// Runs the program in a place. Errors if its result differs from all-local.
fn checked(
    stage: &Stage,
    program: &Program,
    place: Place,
    whole: &Measured,
) -> Result<Measured, BenchError> {
    let measured = program.run(stage, place, whole.peak_bytes)?;
    if measured.checksum != whole.checksum {
        let detail = format!("another result under {place:?} than all-local");
        return Err(BenchError::WrongData { workload: "program", detail });
    }
    Ok(measured)
}

/// One program at one limit, and what it is compared with.
struct Against<'a> {
    lab: &'a Lab,
    program: &'a Program,
    limit_bytes: u64,
    whole: &'a Measured,
    far: &'a Measured,
}

impl Against<'_> {
    fn all_local(&self, name: &str, bar: Bar) -> Row {
        let (far, whole) = (self.far.ops_s, self.whole.ops_s);
        let name = format!("{name}.of-local");
        let row = Row::beside(name, far, whole, Unit::OpsPerSecond, bar);
        let busy = self.whole.busy.map(|busy| format!(", its server {:.0} % busy", busy * 100.0));
        let busy = busy.unwrap_or_default();
        row.note(format!("GET, Zipf 0.99, 1 KiB values; floor: all-local{busy}"))
    }

    /// Compares with swapping to disk, which has to be slower, and to zram, which is reported only.
    fn swap(&self, name: &str) -> Result<Vec<Row>, BenchError> {
        let far = self.far.ops_s;
        let limit = farpool_units::about_bytes(self.limit_bytes as f64);
        let note = format!("{:.2} of all-local, {limit} local", far / self.whole.ops_s);
        if !self.lab.swap {
            return Ok(vec![Row::plain(name, far, Unit::OpsPerSecond).note(note)]);
        }
        let disk = self.beside_swap(name, "disk", Place::Disk(self.limit_bytes), &note)?;
        let zram_name = format!("{name}.zram");
        let zram = self.beside_swap(&zram_name, "zram", Place::Zram(self.limit_bytes), &note)?;
        Ok(vec![disk, zram.unjudged()])
    }

    fn beside_swap(
        &self,
        name: &str,
        what: &str,
        place: Place,
        note: &str,
    ) -> Result<Row, BenchError> {
        progress(&format!("{name}: swap to {what}"));
        let bar = Bar::AtLeast(1.0);
        let beside = |swap| Row::beside(name, self.far.ops_s, swap, Unit::OpsPerSecond, bar);
        let plain = || Row::plain(name, self.far.ops_s, Unit::OpsPerSecond);
        let (row, how) = match self.swapped(place)? {
            Swapped::Done(ops_s) => (beside(ops_s), format!("floor: swap to {what}")),
            Swapped::Unfinished(most) => {
                (beside(most), format!("floor: swap to {what}, not done in time: less than this"))
            }
            Swapped::Killed => {
                let row = Row { bar: Some(bar), met: Some(true), ..plain() };
                (row, format!("under swap to {what} the kernel killed it for lack of memory"))
            }
            Swapped::Lacking(why) => (plain(), format!("no swap to {what} ({why})")),
        };
        Ok(row.note(format!("{how}; {note}")))
    }

    fn swapped(&self, place: Place) -> Result<Swapped, BenchError> {
        let patience = swap_patience(self.far.took).min(self.lab.stage.patience);
        let stage = Stage { patience, ..self.lab.stage.clone() };
        match checked(&stage, self.program, place, self.whole) {
            Ok(measured) => Ok(Swapped::Done(measured.ops_s)),
            Err(BenchError::TooSlow { seconds, .. }) => {
                let most = self.far.ops_s * self.far.took.as_secs_f64() / seconds;
                Ok(Swapped::Unfinished(most))
            }
            Err(BenchError::OutOfMemory { .. }) => Ok(Swapped::Killed),
            Err(error @ (BenchError::WrongData { .. } | BenchError::Interrupted)) => Err(error),
            Err(error) => Ok(Swapped::Lacking(error.to_string())),
        }
    }
}

/// Returns how long swapping may take for the work that Farpool did in `took`.
fn swap_patience(took: Duration) -> Duration {
    let most = SWAP_PATIENCE_MOST.max(took * 3 / 2);
    (took * SWAP_PATIENCE_FACTOR).clamp(SWAP_PATIENCE_MIN, most)
}

/// The outcome of a program under the kernel's swapping.
enum Swapped {
    /// Operations a second.
    Done(f64),
    /// It took too long; the most operations a second that it can have reached.
    Unfinished(f64),
    /// The kernel found nothing more to reclaim and killed it.
    Killed,
    /// Swap is not available here; the reason.
    Lacking(String),
}

fn failed_or_fatal(name: &str, error: BenchError) -> Result<Row, BenchError> {
    match error {
        BenchError::WrongData { .. } | BenchError::Interrupted => Err(error),
        error => Ok(failed_row(name, Unit::OpsPerSecond, Some(Bar::AtLeast(1.0)), &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swapping_is_given_longer_than_farpool_took_but_not_for_ever() {
        let patience = |seconds| swap_patience(Duration::from_secs(seconds)).as_secs();
        assert_eq!([1, 10, 60, 200].map(patience), [15, 50, 120, 300]);
    }
}
