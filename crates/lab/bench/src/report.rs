//! Rows of results, and their output as a table, as JSON, and as a comparison of two runs.

use crate::stage::Door;
use crate::{BenchError, machine::Machine};
use std::fmt::Write;
use std::path::Path;

use farpool_units::{about_bytes, three_digits};

/// What a ratio, or a value without a floor, has to reach.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Bar {
    /// Less is better.
    AtMost(f64),
    /// More is better.
    AtLeast(f64),
}

impl Bar {
    fn is_met_by(self, number: f64) -> bool {
        match self {
            Self::AtMost(bar) => number <= bar,
            Self::AtLeast(bar) => number >= bar,
        }
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtMost(bar) => f.pad(&format!("<= {bar}")),
            Self::AtLeast(bar) => f.pad(&format!(">= {bar}")),
        }
    }
}

impl From<Bar> for String {
    fn from(bar: Bar) -> Self {
        bar.to_string()
    }
}

impl TryFrom<String> for Bar {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is no bar");
        let (sign, number) = text.split_once(' ').ok_or_else(wrong)?;
        let number = number.parse().map_err(|_| wrong())?;
        match sign {
            "<=" => Ok(Self::AtMost(number)),
            ">=" => Ok(Self::AtLeast(number)),
            _ => Err(wrong()),
        }
    }
}

/// Units of values. More is better for rates, less for all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Unit {
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Bytes.
    #[serde(rename = "bytes")]
    Bytes,
    /// Bytes per second.
    #[serde(rename = "bytes/s")]
    BytesPerSecond,
    /// Operations per second.
    #[serde(rename = "ops/s")]
    OpsPerSecond,
    /// Percent by which something is off.
    #[serde(rename = "%")]
    Percent,
    /// Factor by which something is off, at least 1.
    #[serde(rename = "x")]
    Factor,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Nanoseconds if value >= 1e6 => format!("{} ms", three_digits(value / 1e6)),
            Self::Nanoseconds if value >= 1e3 => format!("{} us", three_digits(value / 1e3)),
            Self::Nanoseconds => format!("{} ns", three_digits(value)),
            Self::Seconds => format!("{} s", three_digits(value)),
            Self::Bytes => about_bytes(value),
            Self::Percent => format!("{} %", three_digits(value)),
            Self::Factor => format!("{} x", three_digits(value)),
            Self::BytesPerSecond => format!("{}/s", about_bytes(value)),
            Self::OpsPerSecond if value >= 1e6 => format!("{} M/s", three_digits(value / 1e6)),
            Self::OpsPerSecond if value >= 1e3 => format!("{} k/s", three_digits(value / 1e3)),
            Self::OpsPerSecond => format!("{}/s", three_digits(value)),
        }
    }

    fn less_is_better(self) -> bool {
        !matches!(self, Self::BytesPerSecond | Self::OpsPerSecond)
    }
}

/// One line of the result. A row that was skipped or failed has no `value`, and `note` says why; a
/// failed row has not met its bar.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    /// Dotted name, from the general to the special; rows are selected by it.
    pub name: String,
    /// The measured value, in `unit`.
    pub value: Option<f64>,
    /// Unit of value and floor.
    pub unit: Unit,
    /// The best that this machine can do, or what the value is compared with.
    pub floor: Option<f64>,
    /// `value / floor`.
    pub ratio: Option<f64>,
    /// What the ratio has to reach, or the value if there is no floor.
    pub bar: Option<Bar>,
    /// Whether the bar is met.
    pub met: Option<bool>,
    /// What the floor is, or why a row was skipped or failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl Row {
    /// Returns a row of a value without floor and bar.
    pub(crate) fn plain(name: impl Into<String>, value: f64, unit: Unit) -> Self {
        let (floor, ratio, bar, met, note) = (None, None, None, None, String::new());
        Self { name: name.into(), value: Some(value), unit, floor, ratio, bar, met, note }
    }

    /// Returns a row of a value that is judged without a floor.
    pub(crate) fn judged(name: impl Into<String>, value: f64, unit: Unit, bar: Bar) -> Self {
        Self { bar: Some(bar), met: Some(bar.is_met_by(value)), ..Self::plain(name, value, unit) }
    }

    /// Returns a row of a value compared with its floor.
    pub(crate) fn beside(
        name: impl Into<String>,
        value: f64,
        floor: f64,
        unit: Unit,
        bar: Bar,
    ) -> Self {
        let ratio = value / floor;
        Self {
            floor: Some(floor),
            ratio: Some(ratio),
            bar: Some(bar),
            met: Some(bar.is_met_by(ratio)),
            ..Self::plain(name, value, unit)
        }
    }

    /// Returns a row whose program did not do its work under Farpool: the bar is missed, and
    /// `reason` says why.
    pub(crate) fn failed(
        name: impl Into<String>,
        unit: Unit,
        bar: Option<Bar>,
        reason: impl Into<String>,
    ) -> Self {
        Self { bar, met: Some(false), ..Self::skipped(name, unit, reason) }
    }

    /// Returns the row without its bar: it is reported, not judged.
    pub(crate) fn unjudged(self) -> Self {
        Self { bar: None, met: None, ..self }
    }

    /// Returns a row that could not be measured here.
    pub(crate) fn skipped(name: impl Into<String>, unit: Unit, reason: impl Into<String>) -> Self {
        Self { value: None, note: reason.into(), ..Self::plain(name, 0.0, unit) }
    }

    /// Returns the row with an explanation.
    pub(crate) fn note(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }
}

/// The results of one run.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// The machine it ran on.
    pub machine: Machine,
    /// Whether it was a shortened run.
    pub quick: bool,
    /// How farpool got into the programs.
    #[serde(default)]
    pub door: Door,
    /// The measured rows.
    pub rows: Vec<Row>,
}

impl Report {
    /// Reads a file that `--out` wrote.
    ///
    /// # Errors
    /// The file cannot be read or holds something else.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(BenchError::os(format!("read {name}")))?;
        serde_json::from_str(&text).map_err(|source| BenchError::Results { path: name, source })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), BenchError> {
        let name = path.display().to_string();
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| BenchError::Results { path: name.clone(), source })?;
        std::fs::write(path, text + "\n").map_err(BenchError::os(format!("write {name}")))
    }

    /// Returns one JSON object for each row, each on a line.
    #[must_use]
    pub fn json_lines(&self) -> String {
        let lines = self.rows.iter().filter_map(|row| serde_json::to_string(row).ok());
        lines.map(|line| line + "\n").collect()
    }

    /// Returns the table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = vec![["what", "value", "floor", "ratio", "bar", "", ""].map(str::to_owned)];
        table.extend(self.rows.iter().map(cells));
        let mut text = format!("{}; door: {}\n\n", self.machine, self.door.as_str());
        text.push_str(&aligned(&table));
        let judged = self.rows.iter().filter_map(|row| row.met);
        let (met, all) = judged.fold((0, 0), |(met, all), is| (met + u32::from(is), all + 1));
        let _ = write!(text, "\n{met} of {all} bars met");
        let failed = self.rows.iter().filter(|row| row.value.is_none() && row.met.is_some());
        let failed = failed.count();
        if failed > 0 {
            let _ = write!(text, ", {failed} rows failed");
        }
        let skipped = self.rows.iter().filter(|row| row.value.is_none() && row.met.is_none());
        let skipped = skipped.count();
        if skipped > 0 {
            let _ = write!(text, ", {skipped} rows skipped");
        }
        text.push('\n');
        text
    }

    /// Returns a table of two runs side by side, with the rows that both have.
    #[must_use]
    pub fn compared_with(&self, later: &Self) -> String {
        let mut table = vec![["what", "first", "second", "change", ""].map(str::to_owned)];
        for row in &self.rows {
            let other = later.rows.iter().find(|other| other.name == row.name);
            let Some((before, after)) = row.value.zip(other.and_then(|other| other.value)) else {
                continue;
            };
            let change = (after / before - 1.0) * 100.0;
            table.push([
                row.name.clone(),
                row.unit.show(before),
                row.unit.show(after),
                format!("{change:+.1} %"),
                verdict(row.unit, change).to_owned(),
            ]);
        }
        let mut text = aligned(&table);
        if self.machine != later.machine {
            text.push_str("\nThe two runs were made on different machines or kernels.\n");
        }
        text
    }
}

/// Changes below this are noise on a shared machine.
const NOISE_PERCENT: f64 = 5.0;

fn verdict(unit: Unit, change_percent: f64) -> &'static str {
    if change_percent.abs() < NOISE_PERCENT {
        ""
    } else if (change_percent < 0.0) == unit.less_is_better() {
        "better"
    } else {
        "worse"
    }
}

fn cells(row: &Row) -> [String; 7] {
    let show = |value: Option<f64>| value.map_or(String::new(), |value| row.unit.show(value));
    let verdict = match (row.value, row.met) {
        (None, Some(_)) => "FAILED",
        (None, None) => "skipped",
        (_, Some(true)) => "met",
        (_, Some(false)) => "MISSED",
        _ => "",
    };
    [
        row.name.clone(),
        show(row.value),
        show(row.floor),
        row.ratio.map_or(String::new(), three_digits),
        row.bar.map_or(String::new(), |bar| bar.to_string()),
        verdict.to_owned(),
        row.note.clone(),
    ]
}

/// Makes columns as wide as their widest cell. The first and last column are left-aligned, others
/// right-aligned.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cell = |(i, cell): (usize, &String)| match i {
            0 => format!("{cell:<0$}", widths[0]),
            i if i == N - 1 => format!("  {cell}"),
            i => format!("  {cell:>0$}", widths[i]),
        };
        let text: String = row.iter().enumerate().map(cell).collect();
        text.trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fault_ns: f64) -> Report {
        let rows = vec![
            Row::beside("fault.shm.p50", fault_ns, 4000.0, Unit::Nanoseconds, Bar::AtMost(1.3)),
            Row::beside("scan.shm", 2e9, 4e9, Unit::BytesPerSecond, Bar::AtLeast(0.6)),
            Row::skipped("redis.50", Unit::OpsPerSecond, "redis-server is not installed"),
            Row::failed("limit.x", Unit::Bytes, Some(Bar::AtMost(1.0)), "x was not done after 9 s"),
        ];
        Report { machine: Machine::default(), quick: true, door: Door::default(), rows }
    }

    #[test]
    fn a_bar_is_met_by_the_ratio_to_the_floor() {
        let rows = report(5000.0).rows;
        assert_eq!((rows[0].ratio, rows[0].met), (Some(1.25), Some(true)));
        assert_eq!((rows[1].ratio, rows[1].met), (Some(0.5), Some(false)));
        assert_eq!((rows[2].value, rows[2].met), (None, None));
    }

    #[test]
    fn the_table_tells_met_missed_and_skipped_apart() {
        let table = report(5000.0).table();
        let line =
            |name: &str| table.lines().find(|l| l.starts_with(name)).unwrap_or("").to_owned();
        assert!(line("fault.shm.p50").contains("5.00 us") && line("fault.shm.p50").contains("met"));
        assert!(line("scan.shm").contains("MISSED"));
        assert!(line("redis.50").ends_with("skipped  redis-server is not installed"));
        assert!(line("limit.x").ends_with("FAILED  x was not done after 9 s"), "{table}");
        assert!(table.contains("1 of 3 bars met, 1 rows failed, 1 rows skipped"), "{table}");
    }

    #[test]
    fn what_was_written_reads_back_and_something_else_is_refused() {
        let dir = tempfile::tempdir().expect("a directory for the file");
        let path = dir.path().join("results.json");
        report(5000.0).write(&path).expect("the file can be written");
        assert_eq!(Report::read(&path).expect("it was just written"), report(5000.0));
        std::fs::write(&path, "{}").expect("the file can be written");
        let refusal = Report::read(&path).expect_err("no report").to_string();
        assert!(refusal.contains("does not hold results of farpool bench"), "{refusal}");
    }

    #[test]
    fn json_has_one_object_a_row_with_the_promised_fields() {
        let lines = report(5000.0).json_lines();
        assert_eq!(lines.lines().count(), 4);
        let row: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap_or(""))
            .expect("each line is an object");
        assert_eq!(row["bar"], "<= 1.3");
        for key in ["name", "value", "unit", "floor", "ratio", "met"] {
            assert!(!row[key].is_null(), "{key}");
        }
    }

    #[test]
    fn comparing_knows_which_way_is_better() {
        let text = report(5000.0).compared_with(&report(4000.0));
        let line = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap_or("").to_owned();
        assert!(
            line("fault.shm.p50").contains("-20.0 %") && line("fault.shm.p50").ends_with("better")
        );
        assert!(line("scan.shm").ends_with("+0.0 %"));
        assert!(!text.contains("redis.50"), "a skipped row has nothing to compare");
        assert_eq!(verdict(Unit::OpsPerSecond, 10.0), "better");
        assert_eq!(verdict(Unit::Seconds, 10.0), "worse");
    }
}
