//! `farpool plan`: what to buy, from data.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_plan::utilisation::Named;
use farpool_policy::CacheKind;
use farpool_sim::Preset;

use super::{AnswerArgs, LoadArgs};
use crate::values::{Percent, Prices, Size, Slowdown, Span};

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(subcommand)]
    pub action: PlanAction,
}

#[derive(Debug, Subcommand)]
pub enum PlanAction {
    /// Calculate how much memory a shared pool saves, and how large it should be
    Pool(Box<PoolArgs>),
    /// Calculate how many servers the machines need, with and without far memory
    Pack(Box<PackArgs>),
    /// Calculate how much local memory a program needs to stay within a slowdown
    Local(LocalArgs),
    /// Calculate what servers cost over their life, and what far memory may cost
    Cost(CostArgs),
    /// Calculate the memory and request rate of a dense server with stacked memory
    Dense(DenseArgs),
    /// Show two answers of sim or plan beside each other: what was asked and came out differently
    Compare(CompareArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool plan pool vms.csv --json > today.json\n  \
farpool plan pool vms.csv --local 25% --report local.html\n  \
farpool plan compare today.json local.html")]
pub struct CompareArgs {
    /// An answer: what --json printed, or a page of --report
    #[arg(value_name = "FILE")]
    pub one: PathBuf,
    /// Another one
    #[arg(value_name = "FILE")]
    pub two: PathBuf,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool plan local sort.parquet --slowdown 3%\n  \
farpool plan local sort.parquet --slowdown 10% --design tcp,rdma,cxl --report local.html")]
pub struct LocalArgs {
    /// The program's trace (`farpool trace`)
    pub trace: PathBuf,
    /// Maximum slowdown against all memory local
    #[arg(long, value_name = "PCT", default_value = "3%")]
    pub slowdown: Slowdown,
    /// Designs to simulate; `farpool sim designs` lists them
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "ps,fgra,cxl,rdma,tcp"
    )]
    pub design: Vec<Preset>,
    /// Policy that chooses which pages leave local memory
    #[arg(long, value_name = "NAME", default_value = "clock")]
    pub policy: CacheKind,
    /// Number of references that may wait at the same time; 1: each one blocks the program
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub overlap: u32,
    /// Length of a tick of the trace's clock, in picoseconds [default: what the trace says]
    #[arg(long, value_name = "PS", value_parser = clap::value_parser!(u64).range(1..))]
    pub tick_ps: Option<u64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// Utilisation of machines over time.
#[derive(Clone, Debug, Args)]
pub struct SeriesArgs {
    /// Utilisation of machines over time: CSV (.csv, .tsv, also with .gz or .zst) or Parquet, one
    /// row per machine and time
    #[arg(value_name = "FILE")]
    pub series: PathBuf,
    /// The resources each machine was promised: CSV or Parquet, one row per machine
    #[arg(long, value_name = "FILE")]
    pub promised: Option<PathBuf>,
    /// The column that names the machine [default: vm, vm_id, id, machine, host, instance, ...]
    #[arg(long, value_name = "NAME")]
    pub vm_column: Option<Named>,
    /// The column of times; units: steps, s, ms, us, ns, auto (by the column's type, as ISO 8601 or
    /// since 1970) [default: t, time_s, timestamp, time, ...]
    #[arg(long, value_name = "NAME:UNIT")]
    pub time_column: Option<Named>,
    /// The column of processor use; units: cores, mhz, share, percent, hundredths [default: cpu,
    /// cpu_mhz,
    /// ...]
    #[arg(long, value_name = "NAME:UNIT")]
    pub cpu_column: Option<Named>,
    /// The column of memory use; units: bytes, kib, mib, gib, share, percent, hundredths [default:
    /// memory_bytes, ...]
    #[arg(long, value_name = "NAME:UNIT")]
    pub memory_column: Option<Named>,
    /// Plan with time steps of this length; each has the largest of its samples [default: the
    /// median distance of the file's samples]
    #[arg(long, value_name = "TIME")]
    pub step: Option<Span>,
    /// What to do with shares of a machine above 100 %
    #[arg(long, value_enum, default_value_t = AboveArg::Clip)]
    pub above_100: AboveArg,
}

/// What to do with shares of a machine above 100 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AboveArg {
    /// Count them, and lower them to 100 %
    Clip,
    /// Count them, and keep them
    Keep,
    /// Refuse the file
    Refuse,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool plan pool vms.parquet --group 16 --report pool.html\n  \
farpool plan pool vms.csv --group 16 --local 25% --blades 8 --member-cost 200..400\n  \
farpool plan pool vms.csv.gz --growth 20% --years 5 --memory-price 5..9\n  \
farpool plan local web.parquet --json > web.json && farpool plan pool vms.csv --local-from web.json")]
pub struct PoolArgs {
    #[command(flatten)]
    pub series: SeriesArgs,
    /// Number of machines in the pool that is described in detail [default: 16, or all if there
    /// are fewer]
    #[arg(long, value_name = "N")]
    pub group: Option<usize>,
    /// Number of random groupings for each pool size
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub groupings: u32,
    /// Random seed; the same seed gives the same groupings
    #[arg(long, value_name = "NUMBER", default_value_t = 42)]
    pub seed: u64,
    /// Share of a machine's peak memory that stays local [default: 0%]
    #[arg(long, value_name = "PCT", conflicts_with = "local_from")]
    pub local: Option<Percent>,
    /// Take that share from answers of `farpool plan local --json` or its reports: the largest that
    /// the design of --local-design needs
    #[arg(long, value_name = "FILE")]
    pub local_from: Vec<PathBuf>,
    /// With --local-from: the design [default: the first of each answer]
    #[arg(long, value_name = "NAME", requires = "local_from")]
    pub local_design: Option<String>,
    /// Growth of memory use a year
    #[arg(long, value_name = "PCT", default_value = "0%")]
    pub growth: Percent,
    /// Years of growth to plan [default: 3 with --growth]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=30))]
    pub years: Option<u32>,
    /// Number of blades in a pool, one of which is a spare [default: no spare]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub blades: Option<u32>,
    /// Also plan pools smaller than their peak, which suffice for these percentages of the time
    #[arg(long, value_name = "PERCENTILE", value_delimiter = ',', default_value = "99.9,99,95")]
    pub percentile: Vec<f64>,
    /// Price of a GiB of memory in a server, in dollars, or a span such as 5..9 [default: the
    /// latest
    /// of `farpool plan cost present`]
    #[arg(long, value_name = "DOLLARS")]
    pub memory_price: Option<Prices>,
    /// Price of a GiB of memory in a blade, in dollars, or a span [default: as in a server]
    #[arg(long, value_name = "DOLLARS")]
    pub far_price: Option<Prices>,
    /// Cost of connecting one machine, in dollars, or a span: its port, and its part of switch and
    /// blade [default: none]
    #[arg(long, value_name = "DOLLARS")]
    pub member_cost: Option<Prices>,
    /// Memory of a machine, for files that have only shares
    #[arg(long, value_name = "SIZE")]
    pub machine_memory: Option<Size>,
    /// Smallest share of the memory that must be saved for a pool to be worth it
    #[arg(long, value_name = "PCT", default_value = "10%")]
    pub worth: Percent,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool plan pack vms.parquet --server server.toml --local 75%,50% --report pack.html\n\n\
A server file has name, cpu_ghz or cpu_cores, memory_gib, and to compare prices\n\
price_dollars and far_price_dollars_per_gib; for series of shares, cpu_machines and\n\
memory_machines. Without --server, the server is the machine that the shares refer to.")]
pub struct PackArgs {
    #[command(flatten)]
    pub series: SeriesArgs,
    /// TOML file that describes the server [default: the machine that the shares refer to]
    #[arg(long, value_name = "FILE")]
    pub server: Option<PathBuf>,
    /// Share of a machine's memory that must be local; several separated by commas, the first
    /// decides
    #[arg(long, value_name = "PCT", value_delimiter = ',', default_value = "75%,50%,25%")]
    pub local: Vec<Percent>,
    /// How much memory a machine needs
    #[arg(long, value_enum, default_value_t = DemandArg::Used)]
    pub demand: DemandArg,
    /// Number of moves of the local search for better packings
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    pub moves: usize,
    /// Random seed; the same seed gives the same packings
    #[arg(long, value_name = "NUMBER", default_value_t = 42)]
    pub seed: u64,
    /// Smallest share of the servers that must be freed to be worth it, without prices
    #[arg(long, value_name = "PCT", default_value = "10%")]
    pub worth: Percent,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// How much memory a machine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DemandArg {
    /// What it used at each step
    Used,
    /// What it was promised, at all times (--promised)
    Promised,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Built-in catalogs: lim-2010, present.\n\n\
Examples:\n  \
farpool plan cost lim-2010\n  \
farpool plan cost catalog.toml --report cost.html")]
pub struct CostArgs {
    /// A catalog: a TOML file, or the name of a built-in one
    #[arg(value_name = "FILE|NAME")]
    pub catalog: PathBuf,
    /// Print the catalog itself, as a start for your own
    #[arg(long, conflicts_with_all = ["json", "report"])]
    pub toml: bool,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Built-in catalog: gutierrez-2015, with the designs mercury-a7, mercury-a15-1ghz,\n\
mercury-a15-1.5ghz, iridium-a7, iridium-a15-1ghz, iridium-a15-1.5ghz and keyvault. Each of\n\
these names by itself means that design.\n\n\
Examples:\n  \
farpool plan dense mercury-a7\n  \
farpool plan dense kv-server.toml --report dense.html")]
pub struct DenseArgs {
    /// A catalog: a TOML file, or the name of a built-in catalog or design
    #[arg(value_name = "FILE|NAME")]
    pub catalog: PathBuf,
    /// Answer for this design of the catalog only
    #[arg(long, value_name = "NAME")]
    pub design: Option<String>,
    /// Print the catalog itself, as a start for your own
    #[arg(long, conflicts_with_all = ["json", "report"])]
    pub toml: bool,
    #[command(flatten)]
    pub answer: AnswerArgs,
}
