//! Latency: the bare floors, and one page at a time under Farpool.

use super::{Experiment, Lab, MIB};
use crate::BenchError;
use crate::program::Workload;
use crate::report::{Bar, Row, Unit};
use crate::stage::Place;
use crate::workload::{WorkloadName, WorkloadReport};

/// Memory of the fault rows; 1/16 of it is local, so that 15 of 16 touches are faults.
const FAULT_BYTES: u64 = 512 * MIB;
const LOCAL_SHARE: u64 = 16;

/// Measures the floors by themselves.
pub(super) fn floors(lab: &Lab, _: &Experiment) -> Result<Vec<Row>, BenchError> {
    let floors = &lab.floors;
    let fault = floors.fault()?;
    let ns = |name: &str, value: f64, note: &str| {
        Row::plain(format!("floor.{name}"), value, Unit::Nanoseconds).note(note)
    };
    let stream = floors.stream_bytes_s()?;
    Ok(vec![
        ns("fault.p50", fault.p50_ns, "userfaultfd fault + UFFDIO_COPY, handler on the same core"),
        ns("fault.mean", fault.mean_ns, "the same"),
        ns("fault.p99", fault.p99_ns, "the same"),
        ns("memcpy", floors.copy_page_ns()?, "4 KiB out of memory larger than the caches"),
        ns("copy", floors.uffd_copy_page_ns()?, "UFFDIO_COPY, 64 pages a call, per page"),
        ns("move", floors.move_page_ns()?, "UFFDIO_MOVE, 64 pages a call, + memcpy, per page"),
        ns("tcp", floors.ping_pong_ns()?, "TCP loopback, 40 bytes there, 32 + 4096 back, p50"),
        Row::plain("floor.tcp.stream", stream, Unit::BytesPerSecond)
            .note("TCP loopback, 32 KiB blocks one way, out of 256 MiB"),
    ])
}

/// Measures demand faults served by a blade on this machine.
pub(super) fn shm(lab: &Lab, _: &Experiment) -> Result<Vec<Row>, BenchError> {
    let floor_ns = lab.floors.fault()?.p50_ns + lab.floors.copy_page_ns()?;
    let report = measure(lab, Place::Shm)?;
    let mut rows = latency_rows("fault.shm", &report, floor_ns);
    rows[0].note = "floor: bare fault + one 4 KiB memcpy".to_owned();
    Ok(rows)
}

/// Measures demand faults served by a blade over TCP loopback.
pub(super) fn tcp(lab: &Lab, _: &Experiment) -> Result<Vec<Row>, BenchError> {
    let floors = &lab.floors;
    let floor_ns = floors.fault()?.p50_ns + floors.copy_page_ns()? + floors.ping_pong_ns()?;
    let report = measure(lab, Place::Tcp)?;
    let mut rows = latency_rows("fault.tcp", &report, floor_ns);
    rows[0].note = "floor: bare fault + memcpy + TCP ping-pong".to_owned();
    // Only local faults have a bar for their tail: this one is reported, not judged.
    (rows[1].bar, rows[1].met) = (None, None);
    Ok(rows)
}

fn measure(lab: &Lab, place: fn(u64) -> Place) -> Result<WorkloadReport, BenchError> {
    let bytes = lab.bytes(FAULT_BYTES);
    let faults = Workload { name: WorkloadName::Faults, bytes, args: &[] };
    let (report, _) = faults.run(&lab.stage, place(bytes / LOCAL_SHARE), bytes * 2)?;
    let touched = report.bytes / 4096;
    if report.faults.unwrap_or(0) < touched / 2 {
        let faults = report.faults.unwrap_or(0);
        let reason = format!("only {faults} of {touched} touches were faults: nothing was far");
        return Err(BenchError::Lacking(reason));
    }
    Ok(report)
}

fn latency_rows(name: &str, report: &WorkloadReport, floor_ns: f64) -> Vec<Row> {
    let p50_ns = report.p50_ns.unwrap_or(f64::NAN);
    let p99_ns = report.p99_ns.unwrap_or(f64::NAN);
    let (unit, p50) = (Unit::Nanoseconds, format!("{name}.p50"));
    vec![
        Row::beside(p50, p50_ns, floor_ns, unit, Bar::AtMost(1.3)),
        Row::beside(format!("{name}.p99"), p99_ns, p50_ns, unit, Bar::AtMost(3.0))
            .note("floor: its own p50"),
    ]
}
