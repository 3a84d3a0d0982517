//! The programs that are measured: the workloads of this crate, redis, sqlite and PostgreSQL.
//!
//! A program gives the same checksum in every place, or the measurement is an error.

mod postgres;
mod redis;
mod resp;
mod sqlite;
mod zipf;

use crate::stage::{Place, Stage};
use crate::workload::{WorkloadName, WorkloadReport};
use crate::{BenchError, workload};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

pub(crate) use postgres::postgres_held;
pub(crate) use redis::Redis;
pub use resp::Client as RedisClient;
pub(crate) use sqlite::Sqlite;
pub use zipf::Zipf;

/// What a program did in one place.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    /// Operations a second, in the program's own unit.
    pub ops_s: f64,
    /// Equal in every place.
    pub checksum: String,
    /// Most memory its process tree held, in bytes.
    pub peak_bytes: u64,
    /// From its start to its end.
    pub took: Duration,
    /// For a server: the share of one processor that it used while it was measured. Far below 1,
    /// the client was measured, not the server.
    pub busy: Option<f64>,
}

/// What a program held in one place, if nothing else is measured.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    /// Most memory its process tree held, in bytes.
    pub peak_bytes: u64,
    /// Equal in every place.
    pub checksum: String,
}

/// Returns the distribution's Python if there is one: version managers put shell scripts into PATH.
#[must_use]
pub fn python_program() -> OsString {
    let distribution = Path::new("/usr/bin/python3");
    if distribution.exists() { distribution.into() } else { "python3".into() }
}

/// A program that can be run in any place.
#[derive(Debug)]
pub(crate) enum Program {
    /// One of this crate's workloads with its arguments.
    Workload(Workload),
    Redis(Redis),
    Sqlite(Sqlite),
}

impl Program {
    /// Runs the program. `need_bytes` is what it holds when all is local, or a guess before that is
    /// known.
    pub(crate) fn run(
        &self,
        stage: &Stage,
        place: Place,
        need_bytes: u64,
    ) -> Result<Measured, BenchError> {
        match self {
            Self::Workload(workload) => workload.run(stage, place, need_bytes).map(|run| run.1),
            Self::Redis(redis) => redis.run(stage, place, need_bytes),
            Self::Sqlite(sqlite) => sqlite.run(stage, place, need_bytes),
        }
    }

    /// Returns about how many bytes it holds in memory.
    pub(crate) fn guess_bytes(&self) -> u64 {
        match self {
            Self::Workload(workload) => workload.bytes * 2,
            Self::Redis(redis) => redis.guess_bytes(),
            Self::Sqlite(sqlite) => sqlite.guess_bytes(),
        }
    }
}

/// A workload of this crate as a program of its own.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub name: WorkloadName,
    pub bytes: u64,
    /// Further arguments of `farpool workload`.
    pub args: &'static [&'static str],
}

impl Workload {
    /// Runs the workload. Returns its own report, too.
    pub(crate) fn run(
        &self,
        stage: &Stage,
        place: Place,
        need_bytes: u64,
    ) -> Result<(WorkloadReport, Measured), BenchError> {
        let program = self.command(&stage.farpool);
        let finished = stage.run(place, &program, b"", need_bytes)?;
        let report: WorkloadReport =
            serde_json::from_slice(&finished.stdout).map_err(|source| BenchError::Results {
                path: format!("the output of workload {}", self.name.as_str()),
                source,
            })?;
        let measured = Measured {
            ops_s: report.ops as f64 / report.seconds,
            checksum: report.checksum.clone(),
            peak_bytes: finished.peak_bytes,
            took: finished.took,
            busy: None,
        };
        Ok((report, measured))
    }

    /// Returns its command line.
    pub(crate) fn command(&self, farpool: &Path) -> Vec<OsString> {
        let mut words = vec![farpool.as_os_str().to_owned()];
        words.extend(["workload", self.name.as_str(), "--bytes"].map(OsString::from));
        words.push(self.bytes.to_string().into());
        words.extend(self.args.iter().map(OsString::from));
        words
    }
}

/// Returns a checksum of the bytes that a program wrote.
fn checksum(bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0xCBF2_9CE4_8422_2325u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3)
    });
    format!("{:016x}", workload::mix(sum))
}
