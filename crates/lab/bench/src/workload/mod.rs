//! Programs that use memory in known ways.
//!
//! Each one fills its memory, does its accesses, checks its own result and reports a checksum that
//! depends on the arguments alone: it must be the same all-local, far and swapped. They are plain
//! programs on plain memory (mmap and malloc) and know nothing of Farpool.

mod alloc;
mod checker;
mod evict;
mod faults;
mod give_up;
mod graph;
mod hold;
mod mstress;
mod scan;
mod sort;
mod touch;

use crate::latency::Latencies;
use crate::parse_bytes;

use crate::{BenchError, sys};
use std::time::{Duration, Instant};

use farpool_units::exactly;

/// An access that takes at least this long is counted as a page fault: cache and TLB misses stay
/// well below, the cheapest fault (a zero page) well above.
const FAULT_MIN: Duration = Duration::from_nanos(1000);

/// The workloads by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum WorkloadName {
    /// Hot/cold accesses: 90 % to 10 % of the pages (HPL-2011-31).
    Mstress,
    /// Each page once, in random order, each access timed.
    Faults,
    /// All memory, from the first page to the last.
    Scan,
    /// An in-memory sort of random numbers.
    Sort,
    /// `PageRank` on a power-law graph.
    Pagerank,
    /// Breadth-first search on a power-law graph.
    Bfs,
    /// Many threads reading and writing, each word checked against a shadow.
    Checker,
    /// Allocations of mixed sizes, touched, checked, freed.
    Alloc,
    /// Memory pushed out on request (`MADV_PAGEOUT`), timed until it is gone.
    Evict,
    /// First touches in random order, then all pages are read.
    Touch,
    /// Memory that is kept until the input ends, for what is done to it from outside.
    Hold,
    /// Blocks of 64 KiB given up (`MADV_DONTNEED`), each call timed, and written again.
    GiveUp,
}

impl WorkloadName {
    /// The name as on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mstress => "mstress",
            Self::Faults => "faults",
            Self::Scan => "scan",
            Self::Sort => "sort",
            Self::Pagerank => "pagerank",
            Self::Bfs => "bfs",
            Self::Checker => "checker",
            Self::Alloc => "alloc",
            Self::Evict => "evict",
            Self::Touch => "touch",
            Self::Hold => "hold",
            Self::GiveUp => "give-up",
        }
    }
}

/// Arguments of `farpool workload`.
#[derive(Debug, Clone, clap::Args)]
pub struct WorkloadArgs {
    /// What to run.
    #[arg(value_enum)]
    pub name: WorkloadName,
    /// Memory it works on (about; small extras come on top).
    #[arg(long, default_value = "256MiB", value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes: u64,
    /// Seed of everything random in it.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Accesses, where that is not given by the memory's size.
    #[arg(long, value_name = "N")]
    pub ops: Option<u64>,
    /// Threads (checker: 64, the others use one).
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Times the work is done over (scan, faults, pagerank's iterations).
    #[arg(long, value_name = "N")]
    pub passes: Option<u32>,
    /// scan: bytes from one access to the next.
    #[arg(long, default_value_t = 64, value_name = "BYTES")]
    pub step_bytes: usize,
    /// mstress, faults, checker: share of accesses that write.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub write_percent: Option<u32>,
}

/// What a workload measured: the line of JSON it prints.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct WorkloadReport {
    /// Name of the workload.
    pub workload: String,
    /// Memory asked for, in bytes.
    pub bytes: u64,
    /// Operations done, in the workload's own unit.
    pub ops: u64,
    /// Time of the operations, without the filling.
    pub seconds: f64,
    /// Time of the filling: first touches.
    pub fill_seconds: f64,
    /// Depends on the arguments alone.
    pub checksum: String,
    /// Peak resident memory as the kernel counts it, in bytes.
    pub peak_resident_bytes: u64,
    /// Accesses that took 1 us or longer, in workloads that time each access (give-up: all its
    /// calls).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub faults: Option<u64>,
    /// Median latency of the accesses in `faults`, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub p50_ns: Option<f64>,
    /// 99th percentile of these latencies, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub p99_ns: Option<f64>,
    /// Mean of these latencies, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub mean_ns: Option<f64>,
}

/// The result of a workload's own code.
struct Outcome {
    ops: u64,
    fill: Duration,
    work: Duration,
    checksum: u64,
    latencies: Option<Latencies>,
}

/// Runs one workload in this process and prints its report as one line of JSON.
///
/// # Errors
/// Wrong data, arguments that do not fit, memory or threads that are refused.
pub fn workload_main(args: &WorkloadArgs) -> Result<WorkloadReport, BenchError> {
    let report = run(args)?;
    let line = serde_json::to_string(&report).map_err(|e| BenchError::Arguments(e.to_string()))?;
    println!("{line}");
    Ok(report)
}

fn run(args: &WorkloadArgs) -> Result<WorkloadReport, BenchError> {
    let outcome = match args.name {
        WorkloadName::Mstress => mstress::run(args),
        WorkloadName::Faults => faults::run(args),
        WorkloadName::Scan => scan::run(args),
        WorkloadName::Sort => sort::run(args),
        WorkloadName::Pagerank => graph::run_pagerank(args),
        WorkloadName::Bfs => graph::run_bfs(args),
        WorkloadName::Checker => checker::run(args),
        WorkloadName::Alloc => alloc::run(args),
        WorkloadName::Evict => evict::run(args),
        WorkloadName::Touch => touch::run(args),
        WorkloadName::Hold => hold::run(args),
        WorkloadName::GiveUp => give_up::run(args),
    }?;
    let timed = outcome.latencies.as_ref();
    Ok(WorkloadReport {
        workload: args.name.as_str().to_owned(),
        bytes: args.bytes,
        ops: outcome.ops,
        seconds: outcome.work.as_secs_f64(),
        fill_seconds: outcome.fill.as_secs_f64(),
        checksum: format!("{:016x}", outcome.checksum),
        peak_resident_bytes: sys::peak_resident_bytes(),
        faults: timed.map(Latencies::count),
        p50_ns: timed.map(|t| t.quantile_ns(0.5)),
        p99_ns: timed.map(|t| t.quantile_ns(0.99)),
        mean_ns: timed.map(Latencies::mean_ns),
    })
}

impl WorkloadArgs {
    fn bytes_here(&self) -> Result<usize, BenchError> {
        let too_much = || BenchError::Arguments(format!("{} bytes are too many here", self.bytes));
        usize::try_from(self.bytes).map_err(|_| too_much())
    }

    /// Returns the whole pages of the memory asked for, at least `least`.
    fn pages(&self, least: usize) -> Result<usize, BenchError> {
        Ok((self.bytes_here()? / farpool_units::PAGE_BYTES).max(least))
    }

    fn is_write(&self, random: u64, default_percent: u32) -> bool {
        random % 100 < u64::from(self.write_percent.unwrap_or(default_percent))
    }
}

/// Spreads the bits of a number over all 64 (the finaliser of `MurmurHash3`).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    x = (x ^ (x >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    x ^ (x >> 33)
}

/// Reads the first word of every page. Returns a checksum of these words. Errors if one differs
/// from what was written.
fn check_pages(workload: &'static str, words: &[u64], seed: u64) -> Result<u64, BenchError> {
    let mut first_words = words.iter().step_by(farpool_units::PAGE_BYTES / 8).enumerate();
    first_words.try_fold(0u64, |sum, (page, read)| {
        let expected = mix(page as u64 ^ seed);
        if *read == expected {
            return Ok(sum.rotate_left(7) ^ read);
        }
        let detail = format!("page {page} reads {read:#x}, not {expected:#x}");
        Err(BenchError::WrongData { workload, detail })
    })
}

/// Runs `work`. Returns how long it took, and its result.
fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed(), result)
}

/// A random order of `0..count` without a table: a bijection on the next power of two, repeated
/// until the result is below `count`. A table would be memory that faults too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shuffle {
    count: u64,
    bits: u32,
    key: u64,
}

impl Shuffle {
    pub(crate) fn new(count: usize, seed: u64) -> Self {
        let count = count.max(1) as u64;
        let bits = (64 - (count - 1).leading_zeros()).max(2);
        Self { count, bits, key: mix(seed ^ 0x5EED) }
    }

    /// Returns the `i`-th number in the order.
    pub(crate) fn at(&self, i: usize) -> usize {
        let mut x = i as u64;
        loop {
            x = self.step(x);
            if x < self.count {
                return exactly(x);
            }
        }
    }

    /// Applies the bijection: each line is invertible on numbers of `bits` bits, so the whole is.
    fn step(&self, mut x: u64) -> u64 {
        let mask = (1u64 << self.bits) - 1;
        let half = self.bits.div_ceil(2);
        for round in 0..4 {
            x = x.wrapping_add(self.key.rotate_left(round * 16)) & mask;
            x ^= x >> half;
            x = x.wrapping_mul(0x9E37_79B9_7F4A_7C15) & mask;
            x ^= x >> half;
        }
        x
    }
}

#[cfg(test)]
mod tests;
