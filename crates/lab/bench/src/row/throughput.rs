//! Throughput: sequential reading, evicting, the blade by itself, and a program that fits.

use super::bars::EVICT_RATIO;
use super::{Experiment, Lab, MIB, attach};
use crate::BenchError;
use crate::latency::median;
use crate::program::Workload;
use crate::report::{Bar, Row, Unit};
use crate::stage::{Blade, Door, Place, progress};
use crate::workload::WorkloadName;
use std::time::Duration;

use farpool_units::PAGE_BYTES;

const SCAN_BYTES: u64 = 512 * MIB;
const EVICT_BYTES: u64 = 512 * MIB;
const GIVE_UP_BYTES: u64 = 128 * MIB;
/// Runs in each place, in turn; medians are compared.
const GIVE_UP_RUNS: usize = 5;
const GIVE_UP_RATIO: f64 = 1.15;
const BLADE_BYTES: u64 = 256 * MIB;

/// Measures reads of one word of every page in order, with seven eighths of the pages far.
pub(super) fn scan(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let floor = PAGE_BYTES as f64 / (lab.floors.uffd_copy_page_ns()? * 1e-9);
    let bytes = lab.bytes(SCAN_BYTES);
    let args = &["--step-bytes", "4096", "--passes", "4"];
    let scan = Workload { name: WorkloadName::Scan, bytes, args };
    let (report, _) = scan.run(&lab.stage, Place::Shm(bytes / 8), bytes * 2)?;
    let bytes_s = report.ops as f64 * PAGE_BYTES as f64 / report.seconds;
    let row =
        Row::beside(&experiment.name, bytes_s, floor, Unit::BytesPerSecond, Bar::AtLeast(0.6));
    Ok(vec![row.note("floor: UFFDIO_COPY in batches of 64 pages")])
}

/// Measures pages evicted on request, each written before.
pub(super) fn evict(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    if lab.stage.door == Door::Sidecar {
        return attach::evict(lab, experiment);
    }
    let floor_ns = lab.floors.move_page_ns()?;
    let bytes = lab.bytes(EVICT_BYTES);
    let evict = Workload { name: WorkloadName::Evict, bytes, args: &[] };
    let (report, _) = evict.run(&lab.stage, Place::Shm(bytes / 2), bytes * 2)?;
    if report.ops == 0 {
        return Err(BenchError::Lacking("MADV_PAGEOUT moved no page out".to_owned()));
    }
    let page_ns = report.seconds * 1e9 / report.ops as f64;
    let row = Row::beside(
        &experiment.name,
        page_ns,
        floor_ns,
        Unit::Nanoseconds,
        Bar::AtMost(EVICT_RATIO),
    );
    Ok(vec![row.note("per page; floor: UFFDIO_MOVE in batches of 64 + memcpy")])
}

/// Measures the time of the calls that give memory up, which is then used again, as allocators do,
/// in a program with half of its memory far.
pub(super) fn give_up(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let bytes = lab.bytes(GIVE_UP_BYTES);
    let program = Workload { name: WorkloadName::GiveUp, bytes, args: &[] };
    let call_ns = |place| {
        let (report, _) = program.run(&lab.stage, place, bytes * 2)?;
        Ok::<f64, BenchError>(report.seconds * 1e9 / report.ops as f64)
    };
    let (mut far, mut local) = (Vec::new(), Vec::new());
    for run in 0..GIVE_UP_RUNS {
        progress(&format!("{}: {} of {GIVE_UP_RUNS}", experiment.name, run + 1));
        local.push(call_ns(Place::Local)?);
        far.push(call_ns(Place::Shm(bytes / 2))?);
    }
    let (far, local) = (median(&far), median(&local));
    let row =
        Row::beside(&experiment.name, far, local, Unit::Nanoseconds, Bar::AtMost(GIVE_UP_RATIO));
    Ok(vec![
        row.note("MADV_DONTNEED of 64 KiB, resident, half of the program far; floor: all-local"),
    ])
}

/// Measures reads of 32 KiB straight from a blade over TCP, with many in flight.
pub(super) fn blade_tcp(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let floor = lab.floors.stream_bytes_s()?;
    let bytes = lab.bytes(BLADE_BYTES);
    let blade = Blade::start(&lab.stage.farpool, bytes * 2)?;
    let bytes_s = crate::blade_read::bytes_s(&blade.address, bytes, read_time(lab))?;
    let row =
        Row::beside(&experiment.name, bytes_s, floor, Unit::BytesPerSecond, Bar::AtLeast(0.7));
    Ok(vec![row.note("floor: bare send/receive loop of 32 KiB blocks")])
}

fn read_time(lab: &Lab) -> Duration {
    Duration::from_secs(if lab.quick { 1 } else { 3 })
}
