//! The limit holds: programs of different kinds at 25 % local memory, their process trees watched all
//! the time.

use super::{Experiment, Lab, MIB, programs};
use crate::BenchError;
use crate::program::{Program, Sqlite, Workload};
use crate::report::{Bar, Row, Unit};
use crate::stage::{Place, progress};
use crate::workload::WorkloadName;
use std::ffi::OsString;

/// The programs, as rows are named.
pub(super) const NAMES: [&str; 6] =
    ["limit.redis", "limit.python", "limit.java", "limit.sqlite", "limit.postgres", "limit.malloc"];
/// Local memory of these rows, in percent of what is held all-local.
const PERCENT: u64 = 25;
/// What a tree may hold above its limit: one tenth and this.
const SLACK_BYTES: u64 = 32 * MIB;
const MALLOC_BYTES: u64 = 512 * MIB;

/// Millions of small objects, linked, then looked at again.
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
/// The same in Java: a map of small objects, garbage on the way.
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

/// Runs one program all-local, then at a quarter of what it held, and compares the peak.
pub(super) fn run(lab: &Lab, experiment: &Experiment) -> Result<Vec<Row>, BenchError> {
    let name = experiment.name.as_str();
    progress(&format!("{name}: all-local"));
    let whole_bytes = peak_bytes(lab, name, Place::Local, 0)?;
    let limit_bytes = whole_bytes * PERCENT / 100;
    progress(&format!("{name}: 25 % local"));
    let held_bytes = peak_bytes(lab, name, Place::Shm(limit_bytes), whole_bytes)?;
    let allowed = limit_bytes + limit_bytes / 10 + SLACK_BYTES;
    let row = Row::beside(name, held_bytes as f64, allowed as f64, Unit::Bytes, Bar::AtMost(1.0));
    let note = format!(
        "peak of the process tree; floor: limit of {} + 10 % + 32 MiB",
        crate::format_bytes(limit_bytes as f64)
    );
    Ok(vec![row.note(note)])
}

fn peak_bytes(lab: &Lab, name: &str, place: Place, need_bytes: u64) -> Result<u64, BenchError> {
    let need_bytes = need_bytes.max(MIB * 1024);
    let scale = if lab.quick { 4 } else { 1 };
    let objects = (2_000_000 / scale).to_string();
    let simple = |words: Vec<OsString>, input: &str| {
        let finished = lab.stage.run(place, &words, input.as_bytes(), need_bytes)?;
        Ok(finished.peak_bytes)
    };
    match name {
        "limit.redis" => peak_of(lab, &Program::Redis(programs::redis(lab, 1)), place, need_bytes),
        "limit.python" => simple(words(&["python3", "-c", PYTHON, &objects]), ""),
        "limit.java" => simple(java(lab, &objects)?, ""),
        "limit.sqlite" => simple(Sqlite::command(), &programs::sqlite(lab).script()),
        "limit.postgres" => {
            crate::program::postgres_peak_bytes(&lab.stage, place, need_bytes, scale)
        }
        _ => {
            let bytes = lab.bytes(MALLOC_BYTES);
            let alloc = Workload { name: WorkloadName::Alloc, bytes, args: &[] };
            peak_of(lab, &Program::Workload(alloc), place, need_bytes)
        }
    }
}

fn peak_of(lab: &Lab, program: &Program, place: Place, need_bytes: u64) -> Result<u64, BenchError> {
    program.run(&lab.stage, place, need_bytes).map(|measured| measured.peak_bytes)
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// A single source file, which a JDK runs as it is.
fn java(lab: &Lab, objects: &str) -> Result<Vec<OsString>, BenchError> {
    let source = lab.stage.folder.join("Objects.java");
    std::fs::write(&source, JAVA).map_err(BenchError::os("write the Java program"))?;
    let mut command = words(&["java", "-Xmx1g", "-XX:+UseSerialGC"]);
    command.extend([source.into(), objects.into()]);
    Ok(command)
}

/// What the pager needs for itself, from the statistics of a run.
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
