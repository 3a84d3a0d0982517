//! The table: one row per place, side by side with all-local.

use std::time::Duration;

use serde_json::{Value, json};

use crate::jobs::{Footprint, Results, Stopped, Workspace};
use crate::place::Place;

/// How a row ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    Done(Box<Results>),
    /// This machine does not have what the row needs.
    Skipped(String),
    Failed(String),
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    name: String,
    outcome: Outcome,
}

impl Row {
    /// A row that ran.
    pub fn done(place: &Place, results: Results) -> Row {
        Row::without(place, Outcome::Done(Box::new(results)))
    }

    /// A row with any outcome.
    pub fn without(place: &Place, outcome: Outcome) -> Row {
        Row { name: place.to_string(), outcome }
    }

    fn results(&self) -> Option<&Results> {
        match &self.outcome {
            Outcome::Done(results) => Some(results),
            _ => None,
        }
    }

    /// Everything that was measured, times in seconds or nanoseconds as their names say.
    pub fn to_json(&self) -> Value {
        match &self.outcome {
            Outcome::Skipped(reason) => json!({ "name": self.name, "skipped": reason }),
            Outcome::Failed(reason) => json!({ "name": self.name, "failed": reason }),
            Outcome::Done(results) => {
                let mut gets = results.gets.clone();
                let python = results.python.as_ref().ok();
                json!({
                    "name": self.name,
                    "load_s": results.load.as_secs_f64(),
                    "requests_per_s": results.requests_per_s,
                    "get_p50_ns": gets.permille_ns(500),
                    "get_p99_ns": gets.permille_ns(990),
                    "scan_s": results.scan.as_secs_f64(),
                    "redis_peak_bytes": results.redis_peak_bytes,
                    "faults": results.faults.map(|faults| faults.count),
                    "fault_p50_ns": results.faults.map(|faults| faults.p50_ns),
                    "fault_p99_ns": results.faults.map(|faults| faults.p99_ns),
                    "python_s": python.map(|python| python.took.as_secs_f64()),
                    "python_peak_bytes": python.map(|python| python.peak_bytes),
                    "python_stopped": results.python.as_ref().err().map(|how| stopped(*how)),
                    "zram_memory_bytes": results.zram_bytes,
                    "redis_digest": results.redis_digest,
                    "python_digest": python.map(|python| &python.digest),
                })
            }
        }
    }
}

/// True when no row failed and all that ran came to the same digests.
pub fn all_alike(rows: &[Row]) -> bool {
    let failed = rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)));
    let base = rows.first().and_then(Row::results);
    let alike = |results| base.is_some_and(|base| is_alike(results, base));
    !failed && rows.iter().filter_map(Row::results).all(alike)
}

/// True when all that was computed here is what was computed all-local.
fn is_alike(results: &Results, base: &Results) -> bool {
    let python = |results: &Results| results.python.clone().ok().map(|python| python.digest);
    let same_python = python(results).is_none_or(|digest| Some(digest) == python(base));
    results.redis_digest == base.redis_digest && same_python
}

/// How the table says that the kernel could not run a job.
fn stopped(how: Stopped) -> &'static str {
    match how {
        Stopped::OutOfMemory => "killed",
        Stopped::TooSlow => "> 30",
    }
}

/// What the rows worked on.
pub fn headline(work: &Workspace, footprint: &Footprint) -> String {
    format!(
        "{} records of this machine ({} packages, the rest blocks of files under /usr), {} of \
         values;\nall-local resident: redis {}, python {}; limits are shares of these.",
        work.records.known.len(),
        work.records.packages,
        mib(work.records.values_bytes),
        mib(footprint.redis_bytes),
        mib(footprint.python_bytes),
    )
}

const HEADER: [&str; 12] = [
    "",
    "load",
    "requests",
    "of local",
    "GET p50",
    "p99",
    "fault p50",
    "p99",
    "scan",
    "resident",
    "python",
    "results",
];
const UNITS: [&str; 12] = ["", "s", "/s", "%", "us", "us", "us", "us", "s", "MiB", "s", ""];

/// The table as text.
pub fn render(rows: &[Row]) -> String {
    let base = rows.first().and_then(Row::results);
    let cells: Vec<[String; 12]> = [HEADER.map(String::from), UNITS.map(String::from)]
        .into_iter()
        .chain(rows.iter().filter_map(|row| Some(cells(row, row.results()?, base?))))
        .collect();
    let width = |at: usize| cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEADER.len()).map(width).collect();
    let mut text = String::new();
    for row in &cells {
        let padded = row.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at {
            0 => format!("{cell:<width$}"),
            _ => format!("  {cell:>width$}"),
        });
        text.push_str(padded.collect::<String>().trim_end());
        text.push('\n');
    }
    text
}

fn cells(row: &Row, results: &Results, base: &Results) -> [String; 12] {
    let mut gets = results.gets.clone();
    let us = |ns: u64| format!("{}.{}", ns / 1000, ns % 1000 / 100);
    let fault = |ns: fn(&crate::jobs::Faults) -> u64| {
        results.faults.as_ref().map_or("-".into(), |faults| us(ns(faults)))
    };
    let seconds = |took: Duration| format!("{:.1}", took.as_secs_f64());
    let alike = match is_alike(results, base) {
        true => "identical",
        false => "DIFFERENT",
    };
    let python = results.python.as_ref();
    [
        row.name.clone(),
        seconds(results.load),
        format!("{:.0}", results.requests_per_s),
        format!("{:.0}", 100.0 * results.requests_per_s / base.requests_per_s),
        us(gets.permille_ns(500).into()),
        us(gets.permille_ns(990).into()),
        fault(|faults| faults.p50_ns),
        fault(|faults| faults.p99_ns),
        seconds(results.scan),
        (results.redis_peak_bytes >> 20).to_string(),
        python.map_or_else(|how| stopped(*how).into(), |python| seconds(python.took)),
        alike.into(),
    ]
}

/// What the table cannot say: rows that did not run, and what zram costs.
pub fn notes(rows: &[Row], percents: &[u8]) -> String {
    let mut text = String::new();
    for row in rows {
        let name = &row.name;
        match &row.outcome {
            Outcome::Skipped(reason) => text += &format!("{name}: SKIPPED: {reason}\n"),
            Outcome::Failed(reason) => text += &format!("{name}: FAILED: {reason}\n"),
            Outcome::Done(results) => {
                if let Some(bytes) = results.zram_bytes {
                    text += &format!(
                        "{name}: its store took another {} of local memory, beyond the limit\n",
                        mib(bytes)
                    );
                }
            }
        }
    }
    let percents: Vec<String> = percents.iter().map(|percent| format!("{percent}%")).collect();
    text += &format!(
        "\nGET: one request in flight on each of 4 connections, Zipf 0.99, 5% writes; limits {}.\n\
         The kernel does not measure its swap's faults; GET latency shows them for all rows.\n\
         killed: by the kernel's out-of-memory killer, under a limit with free swap; such a job has no result.\n",
        percents.join(" and ")
    );
    match all_alike(rows) {
        true => text + "All results are identical.\n",
        false => text + "NOT all rows ran with identical results.\n",
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}
