//! `farpool trace`: its flags.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_trace::Clock;

use crate::values::{CacheLevel, LocalLimit, Size, process_name};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "\
Examples:\n  \
farpool trace --out sort.parquet -- sort big.txt\n  \
farpool trace --via fault --local 25% --out redis.parquet -- redis-server\n  \
farpool trace --pages --time --out sort.parquet -- sort big.txt     # for farpool sim predict\n  \
farpool trace --process cc1 --out cc1.parquet -- make               # the compilers of a build\n  \
farpool trace import --format oracleGeneral cache.oracleGeneral.zst --out cache.parquet\n  \
farpool trace info sort.parquet\n\n\
The unmodified program runs under qemu-user, 14 to 20 times slower. All its threads are\n\
recorded. Children that it forks and programs that it starts are recorded with --children;\n\
otherwise the trace says how many there were.")]
pub struct TraceArgs {
    #[command(subcommand)]
    pub action: Option<TraceAction>,
    #[command(flatten)]
    pub capture: CaptureArgs,
}

/// [`farpool_trace::capture::PAGE_WINDOW_ACCESSES`] as text.
const DEFAULT_PAGE_WINDOW: &str = "4096";
const _: () = assert!(farpool_trace::capture::PAGE_WINDOW_ACCESSES == 4096);
/// Longer than any program runs under QEMU.
const MAX_PAGE_WINDOW: u64 = 1 << 48;

#[derive(Debug, Args)]
pub struct CaptureArgs {
    /// The trace to write
    #[arg(short, long, value_name = "FILE", required = true)]
    pub out: Option<PathBuf>,
    /// How to observe the program's references
    #[arg(long, value_enum, default_value_t = Via::Qemu)]
    pub via: Via,
    /// With --via fault: local memory, as for farpool run; the smaller, the more references are
    /// seen
    #[arg(long, value_name = "SIZE|PERCENT")]
    pub local: Option<LocalLimit>,
    /// Each thread's first-level cache as SIZE:WAYS, or none
    #[arg(long, value_name = "SIZE:WAYS", default_value = "64KiB:8")]
    pub l1: CacheLevel,
    /// The last-level cache, shared by all threads, as SIZE:WAYS, or none
    #[arg(long, value_name = "SIZE:WAYS", default_value = "2MiB:16")]
    pub llc: CacheLevel,
    /// Record every access: the same as --l1 none --llc none
    #[arg(long, conflicts_with_all = ["l1", "llc"])]
    pub unfiltered: bool,
    /// Record pages of 4 KiB as a pager sees them: each page once in WINDOW accesses of a thread,
    /// and its first write
    #[arg(long, value_name = "WINDOW", conflicts_with_all = ["l1", "llc", "unfiltered"])]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = DEFAULT_PAGE_WINDOW)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=MAX_PAGE_WINDOW))]
    pub pages: Option<u64>,
    /// First run the program N times by itself, its output discarded, and store the shortest time
    /// in the trace [default N: 3]
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    pub time: Option<u32>,
    /// Stop recording after N records; the program continues
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_records: Option<u64>,
    /// Leave out the first N records: the program's start, for example
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub skip: u64,
    /// Record the processes that it forks and the programs that they start, too
    #[arg(long)]
    pub children: bool,
    /// Of all processes record those of this program only, such as cc1; implies --children
    #[arg(long, value_name = "NAME", value_parser = process_name)]
    pub process: Option<String>,
    /// qemu-user to run the program with [default: qemu-x86_64 from PATH]
    #[arg(long, value_name = "FILE")]
    pub qemu: Option<PathBuf>,
    /// Print what was captured as JSON
    #[arg(long)]
    pub json: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Where references are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Via {
    /// Under qemu-user: loads and stores, filtered by caches
    Qemu,
    /// Under farpool run: the page faults that its pager serves, at nearly full speed
    Fault,
}

#[derive(Debug, Subcommand)]
pub enum TraceAction {
    /// Convert another tool's trace
    Import(ImportArgs),
    /// Write a trace for libCacheSim (oracleGeneral, with exact next requests)
    Export(ExportArgs),
    /// Describe a trace and how it was made
    Info(TraceInfoArgs),
}

/// A foreign format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// `valgrind --tool=lackey --trace-mem=yes`
    Lackey,
    /// libCacheSim's 24-byte records
    #[value(name = "oracleGeneral", alias = "oraclegeneral")]
    OracleGeneral,
    /// vscsiStats, version 1 or 2
    Vscsi,
    /// Text with a header line: block, address or object, size, time, write, thread
    Csv,
    /// A line each: 0x1234 R, LD 0x1234, or 0x1234
    Ramulator,
}

/// What a number in a time column is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TimeUnit {
    Ns,
    Us,
    S,
    /// Seconds with decimals, such as 12.5
    #[value(name = "decimal-s")]
    DecimalS,
}

impl From<TimeUnit> for Clock {
    fn from(unit: TimeUnit) -> Self {
        match unit {
            TimeUnit::Ns | TimeUnit::DecimalS => Self::Nanoseconds,
            TimeUnit::Us => Self::Microseconds,
            TimeUnit::S => Self::Seconds,
        }
    }
}

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Format of FROM
    #[arg(long, value_enum)]
    pub format: TraceFormat,
    /// The file to read; decompressed if it is text, or if its name ends in .zst or .gz
    pub from: PathBuf,
    /// The trace to write
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Block size, by which addresses are divided [default: lackey and ramulator
    /// 64, vscsi 512, others 4KiB]
    #[arg(long, value_name = "SIZE")]
    pub block: Option<Size>,
    /// csv: the column of block numbers [default: block]
    #[arg(long, value_name = "NAME")]
    pub block_column: Option<String>,
    /// csv: the column of addresses in bytes [default: address]
    #[arg(long, value_name = "NAME")]
    pub address_column: Option<String>,
    /// csv: the column of objects' names, which may be any text
    #[arg(long, value_name = "NAME")]
    pub object_column: Option<String>,
    /// csv: the column of sizes in bytes; an object is as many blocks as its size takes, an access
    /// at an address is in all blocks that it touches
    #[arg(long, value_name = "NAME")]
    pub size_column: Option<String>,
    /// csv: the first line is data; columns are named 1, 2, 3, ...
    #[arg(long)]
    pub no_header: bool,
    /// oracleGeneral: an object is as many blocks as its size takes, not one
    #[arg(long)]
    pub sizes: bool,
    /// csv: the column of times, which must not decrease [default: time]
    #[arg(long, value_name = "NAME")]
    pub time_column: Option<String>,
    /// csv: unit of the time column
    #[arg(long, value_enum, default_value = "ns")]
    pub time_unit: TimeUnit,
    /// csv: the column that marks writes [default: write]
    #[arg(long, value_name = "NAME")]
    pub write_column: Option<String>,
    /// csv: the column of threads [default: thread]
    #[arg(long, value_name = "NAME")]
    pub thread_column: Option<String>,
}

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The trace to read
    pub from: PathBuf,
    /// The file to write; compressed if its name ends in .zst
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Page size; each page is one object
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    pub page: Size,
}

#[derive(Debug, Args)]
pub struct TraceInfoArgs {
    /// The trace
    pub trace: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
