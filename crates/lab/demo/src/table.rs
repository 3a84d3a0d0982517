//! The table: one row per place, side by side with all-local.

use std::time::Duration;

use serde_json::{Value, json};

use crate::error::Stopped;
use crate::jobs::{Faults, Footprint, Results, Workspace};
use crate::place::Place;

/// How a row ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    Done(Box<Results>),
    /// This machine does not have what the row needs.
    Skipped(String),
    /// redis did not finish under the kernel's swap.
    Stopped(Stopped),
    Failed(String),
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    place: Place,
    outcome: Outcome,
}

impl Row {
    /// A row that ran.
    pub fn done(place: Place, results: Results) -> Row {
        Row::without(place, Outcome::Done(Box::new(results)))
    }

    /// A row with any outcome.
    pub fn without(place: Place, outcome: Outcome) -> Row {
        Row { place, outcome }
    }

    /// The row in a few words, shown while the others run.
    pub fn summary(&self) -> String {
        let how = match &self.outcome {
            Outcome::Skipped(reason) => format!("skipped: {reason}"),
            Outcome::Stopped(how) => format!("redis {}", in_words(*how)),
            Outcome::Failed(reason) => format!("FAILED: {reason}"),
            Outcome::Done(results) => {
                let python = match &results.python {
                    Ok(python) => format!("{:.1} s", python.took.as_secs_f64()),
                    Err(how) => in_words(*how),
                };
                format!("redis {:.0} requests/s, Python {python}", results.requests_per_s)
            }
        };
        format!("{}: {how}", self.place)
    }

    fn results(&self) -> Option<&Results> {
        match &self.outcome {
            Outcome::Done(results) => Some(results),
            _ => None,
        }
    }

    /// Everything that was measured, times in seconds or nanoseconds as their names say.
    pub fn to_json(&self) -> Value {
        let name = self.place.to_string();
        match &self.outcome {
            Outcome::Skipped(reason) => json!({ "name": name, "skipped": reason }),
            Outcome::Stopped(how) => json!({ "name": name, "redis_stopped": how.to_string() }),
            Outcome::Failed(reason) => json!({ "name": name, "failed": reason }),
            Outcome::Done(results) => {
                let mut gets = results.gets.clone();
                let python = results.python.as_ref().ok();
                json!({
                    "name": name,
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
                    "python_stopped": results.python.as_ref().err().map(ToString::to_string),
                    "zram_memory_bytes": results.zram_bytes,
                    "redis_digest": results.redis_digest,
                    "python_digest": python.map(|python| &python.digest),
                })
            }
        }
    }
}

/// True if no row failed, every job that the kernel does not swap finished, and all that finished
/// have the same digests.
pub fn all_alike(rows: &[Row]) -> bool {
    let is_stopped = |row: &Row| row.results().is_some_and(|results| results.python.is_err());
    let failed = rows.iter().any(|row| {
        matches!(row.outcome, Outcome::Failed(_)) || is_stopped(row) && !row.place.is_swap()
    });
    let base = rows.first().and_then(Row::results);
    let alike = |results| base.is_some_and(|base| is_alike(results, base));
    !failed && rows.iter().filter_map(Row::results).all(alike)
}

/// True if all results computed in this row equal those computed all-local.
fn is_alike(results: &Results, base: &Results) -> bool {
    let python = |results: &Results| results.python.clone().ok().map(|python| python.digest);
    let same_python = python(results).is_none_or(|digest| Some(digest) == python(base));
    results.redis_digest == base.redis_digest && same_python
}

fn in_words(how: Stopped) -> String {
    match how {
        Stopped::OutOfMemory => "killed for lack of memory, with free swap".to_owned(),
        Stopped::TooSlow(seconds) => format!("not done after {seconds} s"),
    }
}

/// What the rows worked on.
pub fn headline(work: &Workspace) -> String {
    format!(
        "redis and Python, unmodified, on {} records of this machine ({} of its packages, else \
         blocks of\n\
         files under /usr), {} in all. Each row is the same work; what is not local is where it \
         says.",
        work.records.known.len(),
        work.records.packages,
        mib(work.records.values_bytes),
    )
}

const COLUMNS: usize = 13;
/// Headings over the columns of redis and of Python.
const GROUPS: [(&str, std::ops::Range<usize>); 2] = [("redis", 1..10), ("Python", 10..12)];
const HEADER: [[&str; COLUMNS]; 2] = [
    [
        "",
        "load",
        "requests",
        "of local",
        "GET p50",
        "p99",
        "pager p50",
        "p99",
        "scan",
        "RAM",
        "time",
        "of local",
        "results",
    ],
    ["", "s", "/s", "", "us", "us", "us", "us", "s", "MiB", "s", "", ""],
];

/// The table as text: all-local first, then a group of rows for each share of local memory.
pub fn render(rows: &[Row], footprint: &Footprint) -> String {
    let base = rows.first().and_then(Row::results);
    let cells: Vec<[String; COLUMNS]> = rows.iter().map(|row| cells(row, base)).collect();
    let header = HEADER.map(|line| line.map(String::from));
    let width = |at: usize| {
        header.iter().chain(&cells).map(|row| row[at].chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let mut text = groups(&widths) + "\n";
    header.iter().for_each(|line| text += &aligned(line, &widths));
    let mut group = None;
    for (row, cells) in rows.iter().zip(&cells) {
        let percent = row.place.percent();
        if let Some(percent) = percent.filter(|_| percent != group) {
            let share = |bytes: u64| mib(bytes / 100 * u64::from(percent));
            let (redis, python) = (share(footprint.redis_bytes), share(footprint.python_bytes));
            text += &format!("\n{percent} % local: {redis} for redis, {python} for Python\n");
        }
        group = percent;
        text += &aligned(cells, &widths);
    }
    text
}

/// The first column to the left, the others to the right.
fn aligned(cells: &[String; COLUMNS], widths: &[usize]) -> String {
    let padded = cells.iter().zip(widths).enumerate().map(|(at, (cell, width))| match at {
        0 => format!("{cell:<width$}"),
        _ => format!("  {cell:>width$}"),
    });
    padded.collect::<String>().trim_end().to_owned() + "\n"
}

/// A line over the columns of each program.
fn groups(widths: &[usize]) -> String {
    let mut text = " ".repeat(widths[0]);
    for (name, columns) in GROUPS {
        let width: usize = widths[columns].iter().map(|width| width + 2).sum();
        text += &format!("  {:-<1$}", format!("{name} "), width - 2);
    }
    text
}

fn cells(row: &Row, base: Option<&Results>) -> [String; COLUMNS] {
    let mut cells = [const { String::new() }; COLUMNS];
    cells[1..].fill("-".to_owned());
    row.place.kind().clone_into(&mut cells[0]);
    cells[COLUMNS - 1] = match &row.outcome {
        Outcome::Done(_) => String::new(),
        Outcome::Skipped(_) => "skipped".to_owned(),
        Outcome::Stopped(how) => how.to_string(),
        Outcome::Failed(_) => "FAILED".to_owned(),
    };
    if let (Outcome::Done(results), Some(base)) = (&row.outcome, base) {
        fill(&mut cells, results, base);
    }
    cells
}

fn fill(cells: &mut [String; COLUMNS], results: &Results, base: &Results) {
    let mut gets = results.gets.clone();
    let us = |ns: u64| format!("{:.1}", Duration::from_nanos(ns).as_secs_f64() * 1e6);
    let seconds = |took: Duration| format!("{:.1}", took.as_secs_f64());
    cells[1] = seconds(results.load);
    cells[2] = format!("{:.0}", results.requests_per_s);
    cells[3] = format!("{:.0} %", 100.0 * results.requests_per_s / base.requests_per_s);
    cells[4] = us(gets.permille_ns(500).into());
    cells[5] = us(gets.permille_ns(990).into());
    if let Some(Faults { p50_ns, p99_ns, .. }) = results.faults {
        (cells[6], cells[7]) = (us(p50_ns), us(p99_ns));
    }
    cells[8] = seconds(results.scan);
    cells[9] = (results.redis_peak_bytes >> 20).to_string();
    match (&results.python, &base.python) {
        (Err(how), _) => cells[10] = how.to_string(),
        (Ok(python), base) => {
            cells[10] = seconds(python.took);
            let times = |base: Duration| python.took.as_secs_f64() / base.as_secs_f64();
            let base = base.as_ref().ok().map(|base| format!("x {:.1}", times(base.took)));
            cells[11] = base.unwrap_or_default();
        }
    }
    cells[12] = match (is_alike(results, base), &results.python) {
        (false, _) => "DIFFERENT",
        (true, Ok(_)) => "identical",
        (true, Err(_)) => "redis only",
    }
    .to_owned();
}

/// What the table cannot say: why rows did not run, and what zram costs.
pub fn notes(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let place = row.place;
        match &row.outcome {
            Outcome::Skipped(reason) => text += &format!("{place}: SKIPPED: {reason}\n"),
            Outcome::Failed(reason) => text += &format!("{place}: FAILED: {reason}\n"),
            Outcome::Stopped(how) => text += &format!("{place}: redis {}\n", in_words(*how)),
            Outcome::Done(results) => {
                if let Some(bytes) = results.zram_bytes {
                    text += &format!(
                        "{place}: what redis had swapped took another {} of local memory\n",
                        mib(bytes)
                    );
                }
                if let Err(how) = &results.python {
                    text += &format!("{place}: Python {}\n", in_words(*how));
                }
            }
        }
    }
    text + "requests: Zipf 0.99, 5 % writes, one in flight on each of 4 connections. RAM: most \
         anonymous memory\n\
         held. pager: from the kernel's message that a far page is touched to the wake, by \
         farpool's own\n\
         count; what the kernel and the wake take comes on top. GET shows all of it, in every row. \
         The kernel\n\
         swaps in a memory control group of the same limit, swap not counted.\n"
}

/// Returns the last line of the output.
pub fn verdict(rows: &[Row]) -> &'static str {
    let all_ran = |row: &Row| row.results().is_some_and(|results| results.python.is_ok());
    match (all_alike(rows), rows.iter().all(all_ran)) {
        (true, true) => "All results are identical; done",
        (true, false) => "All results that there are are identical; done",
        (false, _) => "NOT all rows ran with identical results; ended",
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}
