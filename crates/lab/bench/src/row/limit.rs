//! The limit holds: programs of different kinds at 25 % local memory, their process trees watched
//! all the time.

use super::{Experiment, Lab, MIB, failed_row, programs};
use crate::BenchError;
use crate::program::{Held, Program, Workload, python_program};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, progress};
use crate::workload::WorkloadName;
use std::ffi::OsString;

/// Names of the rows, one for each program.
pub(super) const NAMES: [&str; 6] =
    ["limit.redis", "limit.python", "limit.java", "limit.sqlite", "limit.postgres", "limit.malloc"];
/// Local memory of these rows, in percent of what the program holds all-local.
const PERCENT: u64 = 25;
/// Bytes that a tree may hold above its limit, in addition to one tenth of the limit.
const SLACK_BYTES: u64 = 32 * MIB;
/// Peak, divided by what is allowed.
const BAR: Bar = Bar::AtMost(1.0);
const MALLOC_BYTES: u64 = 512 * MIB;

/// Millions of small objects that are linked, then read twice.
const PYTHON: &str = "
import sys
n = int(sys.argv[1])
items = [{'id': i, 'name': 'object number %d' % i, 'next': None} for i in range(n)]
for i in range(n - 1):
    items[i]['next'] = items[i + 1]
total = 0
for _ in range(2):
    for item in items:
        total += item['id'] + len(item['name'])
print(total)
";
/// A map of small objects in Java that is read twice, with garbage on the way.
const JAVA: &str = r#"
import java.util.*;
public class Objects {
    public static void main(String[] args) {
        int n = Integer.parseInt(args[0]);
        Map<Integer, String> map = new HashMap<>();
        for (int i = 0; i < n; i++) map.put(i, "object number " + i);
        long total = 0;
        for (int round = 0; round < 2; round++)
            for (Map.Entry<Integer, String> e : map.entrySet())
                total += e.getKey() + e.getValue().length();
        System.out.println(total);
    }
}
"#;

/// Runs one program all-local, then at a quarter of what it held, and compares the peak with what
/// is allowed. Errors if the results of the two runs differ.
pub(super) fn run(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let name = experiment.name.as_str();
    progress(&format!("{name}: all-local"));
    let whole = held(lab, name, Place::Local, 0)?;
    let limit_bytes = whole.peak_bytes * PERCENT / 100;
    progress(&format!("{name}: 25 % local"));
    let far = match held(lab, name, Place::Shm(limit_bytes), whole.peak_bytes) {
        Ok(far) => far,
        Err(error @ (BenchError::WrongData { .. } | BenchError::Interrupted)) => return Err(error),
        Err(error) => return Ok(vec![failed_row(name, Unit::Bytes, Some(BAR), &error)]),
    };
    if far.checksum != whole.checksum {
        let detail = format!("{name} has another result at 25 % local than all-local");
        return Err(BenchError::WrongData { workload: "program", detail });
    }
    let allowed = allowed_bytes(limit_bytes);
    let row = Row::beside(name, far.peak_bytes as f64, allowed as f64, Unit::Bytes, BAR);
    let note = format!(
        "peak of the process tree; floor: limit of {} + 10 % + 32 MiB",
        farpool_units::about_bytes(limit_bytes as f64)
    );
    Ok(vec![row.note(note)])
}

/// Returns the bytes that a tree may hold at this limit.
pub(super) fn allowed_bytes(limit_bytes: u64) -> u64 {
    limit_bytes + limit_bytes / 10 + SLACK_BYTES
}

fn held(lab: &Lab, name: &str, place: Place, need_bytes: u64) -> Result<Held, BenchError> {
    let need_bytes = need_bytes.max(MIB * 1024);
    let scale = if lab.quick { 4 } else { 1 };
    let objects = (2_000_000 / scale).to_string();
    let simple = |words: Vec<OsString>| {
        let finished = lab.stage.run(place, &words, b"", need_bytes)?;
        let checksum = String::from_utf8_lossy(&finished.stdout).into_owned();
        Ok(Held { peak_bytes: finished.peak_bytes, checksum })
    };
    let measured = |program: Program| -> Result<Held, BenchError> {
        let measured = program.run(&lab.stage, place, need_bytes)?;
        Ok(Held { peak_bytes: measured.peak_bytes, checksum: measured.checksum })
    };
    match name {
        "limit.redis" => measured(Program::Redis(programs::redis(lab, 50, 1))),
        "limit.python" => simple(python(&objects)),
        "limit.java" => simple(java(lab, &objects)?),
        "limit.sqlite" => measured(Program::Sqlite(programs::sqlite(lab))),
        "limit.postgres" => crate::program::postgres_held(&lab.stage, place, need_bytes, scale),
        _ => {
            let bytes = lab.bytes(MALLOC_BYTES);
            measured(Program::Workload(Workload { name: WorkloadName::Alloc, bytes, args: &[] }))
        }
    }
}

fn python(objects: &str) -> Vec<OsString> {
    let mut command = vec![python_program()];
    command.extend(words(&["-c", PYTHON, objects]));
    command
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// Writes a single source file, which a JDK runs directly, and returns the command.
pub(super) fn java(lab: &Lab, objects: &str) -> Result<Vec<OsString>, BenchError> {
    let source = lab.stage.folder.join("Objects.java");
    std::fs::write(&source, JAVA).map_err(BenchError::os("write the Java program"))?;
    let mut command = words(&["java", "-Xmx1g", "-XX:+UseSerialGC"]);
    command.extend([source.into(), objects.into()]);
    Ok(command)
}

/// Compares the memory that the pager needs for itself, from the statistics of a run, with what is
/// allowed.
pub(super) fn pager_memory(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let bytes = lab.bytes(MALLOC_BYTES);
    let scan = Workload { name: WorkloadName::Scan, bytes, args: &["--step-bytes", "4096"] };
    scan.run(&lab.stage, Place::Shm(bytes / 8), bytes * 2)?;
    let stats = std::fs::read_to_string(lab.stage.stats_file())
        .map_err(BenchError::os("read the statistics of a run"))?;
    let stats: serde_json::Value = serde_json::from_str(&stats)
        .map_err(|source| BenchError::Results { path: "stats.json".to_owned(), source })?;
    let number = |key: &str| stats[key].as_f64();
    let (Some(own), Some(far_pages)) = (number("pager_bytes"), number("far_pages_peak")) else {
        let reason = "the statistics of a run have no pager_bytes and far_pages_peak";
        return Err(BenchError::Lacking(reason.to_owned()));
    };
    let allowed = 2.0 * far_pages + (4 * MIB) as f64 + number("victim_buffer_bytes").unwrap_or(0.0);
    let row = Row::beside(&experiment.name, own, allowed, Unit::Bytes, Bar::AtMost(1.0));
    Ok(vec![row.note("floor: 2 bytes a far page + 4 MiB + victim buffer")])
}
