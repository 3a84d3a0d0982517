//! The sqlite3 shell (unmodified) with a database in memory: rows, two indexes, then point queries,
//! range queries with aggregates, and joins.

use super::{Measured, checksum};
use crate::BenchError;
use crate::stage::{Place, Stage};
use std::ffi::OsString;
use std::fmt::Write;

/// Approximate bytes that sqlite needs for a row with its indexes.
const ROW_BYTES: u64 = 160;

/// The amount of work for sqlite.
#[derive(Debug, Clone)]
pub(crate) struct Sqlite {
    pub rows: u64,
    /// Number of queries of all kinds.
    pub queries: u64,
}

impl Sqlite {
    pub(crate) fn guess_bytes(&self) -> u64 {
        self.rows * ROW_BYTES
    }

    fn command() -> Vec<OsString> {
        ["sqlite3", "-batch", ":memory:"].map(OsString::from).to_vec()
    }

    pub(crate) fn run(
        &self,
        stage: &Stage,
        place: Place,
        need_bytes: u64,
    ) -> Result<Measured, BenchError> {
        let script = self.script();
        let finished = stage.run(place, &Self::command(), script.as_bytes(), need_bytes)?;
        let output = String::from_utf8_lossy(&finished.stdout);
        // Lines with the shell's own clock, before and after the queries, give their time; other
        // lines are results.
        let (clock, results): (Vec<&str>, Vec<&str>) =
            output.lines().partition(|line| line.starts_with(CLOCK));
        let seconds = seconds_between(&clock).unwrap_or(finished.took.as_secs_f64());
        Ok(Measured {
            ops_s: self.queries as f64 / seconds.max(1e-3),
            checksum: checksum(results.join("\n").as_bytes()),
            peak_bytes: finished.peak_bytes,
            took: finished.took,
            busy: None,
        })
    }

    /// Returns the script. The rows come from a generator in SQL, so the script is short and always
    /// the same.
    pub(crate) fn script(&self) -> String {
        let Self { rows, .. } = self;
        let mut sql = format!(
            "CREATE TABLE item(id INTEGER PRIMARY KEY, owner INT, price INT, name TEXT);\n\
             WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i+1 FROM n WHERE i<{rows})\n\
             INSERT INTO item SELECT i, (i*2654435761)%{owners}, (i*40503)%100003,\n\
             printf('item %d of the long list %064d', i, i*7919) FROM n;\n\
             CREATE INDEX by_owner ON item(owner);\n\
             CREATE INDEX by_price ON item(price);\n\
             {TELL_CLOCK}\n",
            owners = rows / 20 + 1,
        );
        for query in 0..self.queries {
            // Writing to a string cannot fail.
            let _ = writeln!(sql, "{}", self.query(query));
        }
        sql.push_str(TELL_CLOCK);
        sql.push('\n');
        sql
    }

    fn query(&self, number: u64) -> String {
        let random = crate::workload::mix(number);
        match number % 50 {
            0 => {
                let low = random % 100_000;
                format!(
                    "SELECT count(*), sum(length(name)) FROM item WHERE price BETWEEN {low} AND \
                     {};",
                    low + 200
                )
            }
            1 => format!(
                "SELECT a.id, max(b.price) FROM item a JOIN item b ON a.owner=b.owner \
                 WHERE a.id={};",
                random % self.rows + 1
            ),
            _ => format!("SELECT price, name FROM item WHERE id={};", random % self.rows + 1),
        }
    }
}

/// Prefix of a line with the time.
const CLOCK: &str = "clock ";
const TELL_CLOCK: &str = "SELECT 'clock ' || ((julianday('now')-2440587.5)*86400.0);";

fn seconds_between(clock: &[&str]) -> Option<f64> {
    let time = |line: &&str| line.trim_start_matches(CLOCK).parse::<f64>().ok();
    let (first, last) = (clock.first().and_then(time)?, clock.last().and_then(time)?);
    (last > first).then_some(last - first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Door;
    use std::time::Duration;

    #[test]
    fn sqlite_gives_the_same_result_twice_or_the_row_is_skipped() {
        let stage = Stage {
            farpool: "farpool".into(),
            folder: std::env::temp_dir(),
            patience: Duration::from_secs(20),
            door: Door::default(),
        };
        let run = |rows| Sqlite { rows, queries: 300 }.run(&stage, Place::Local, 0);
        match run(2000) {
            Ok(first) => {
                assert!(first.ops_s > 1.0 && first.peak_bytes > 0);
                assert_eq!(run(2000).expect("it ran before").checksum, first.checksum);
                assert_ne!(run(2001).expect("it ran before").checksum, first.checksum);
            }
            Err(BenchError::Lacking(reason)) => eprintln!("skipped: {reason}"),
            Err(error) => panic!("{error}"),
        }
    }
}
