//! `farpool plan`: what to buy, from data.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_plan::utilisation::Named;
use farpool_policy::CacheKind;
use farpool_sim::Preset;

use super::{AnswerArgs, LoadArgs};
use crate::values::{Dollars, Percent, Size, Slowdown, Span};

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(subcommand)]
    pub action: PlanAction,
}

#[derive(Debug, Subcommand)]
pub enum PlanAction {
    /// Say how much less memory a pool needs than its members apart, and how large it should be
    Pool(Box<PoolArgs>),
    /// Say how many servers hold the machines, with and without far memory
    Pack(Box<PackArgs>),
    /// Say how much local memory a program needs to stay within a slowdown
    Local(LocalArgs),
    /// Say what servers cost over their life, and what far memory may cost
    Cost(CostArgs),
    /// Say how much memory and how many requests a dense server of stacked memory holds
    Dense(DenseArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool plan local sort.parquet --slowdown 3%\n  \
farpool plan local sort.parquet --slowdown 10% --design tcp,rdma,cxl --report local.html")]
pub struct LocalArgs {
    /// The program's trace (`farpool trace`)
    pub trace: PathBuf,
    /// The most that it may be slower than with everything local
    #[arg(long, value_name = "PCT", default_value = "3%")]
    pub slowdown: Slowdown,
    /// The designs; `farpool sim designs` lists them
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "ps,fgra,cxl,rdma,tcp"
    )]
    pub design: Vec<Preset>,
    /// Which pages leave local memory
    #[arg(long, value_name = "NAME", default_value = "clock")]
    pub policy: CacheKind,
    /// References that wait at the same time; 1: each one blocks the program
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub overlap: u32,
    /// How long a tick of the trace's clock lasts, in ps [default: what the trace says]
    #[arg(long, value_name = "PS", value_parser = clap::value_parser!(u64).range(1..))]
    pub tick_ps: Option<u64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// What machines used over time.
#[derive(Clone, Debug, Args)]
pub struct SeriesArgs {
    /// What machines used over time: CSV (.csv) or Parquet, one row for each machine and time
    #[arg(value_name = "FILE")]
    pub series: PathBuf,
    /// What each machine was promised: one row for each, CSV or Parquet
    #[arg(long, value_name = "FILE")]
    pub promised: Option<PathBuf>,
    /// The column that names the machine [default: vm, vm_id or id]
    #[arg(long, value_name = "NAME")]
    pub vm_column: Option<Named>,
    /// The column of time; units: steps, s, ms [default: t, time_s, time_ms or timestamp]
    #[arg(long, value_name = "NAME:UNIT")]
    pub time_column: Option<Named>,
    /// The column of processors; units: cores, mhz, percent, hundredths [default: cpu, cpu_mhz,
    /// ...]
    #[arg(long, value_name = "NAME:UNIT")]
    pub cpu_column: Option<Named>,
    /// The column of memory; units: bytes, kib, mib, gib, percent, hundredths [default:
    /// memory_bytes, ...]
    #[arg(long, value_name = "NAME:UNIT")]
    pub memory_column: Option<Named>,
    /// Plan with steps of this length, each the largest of its samples [default: as in the file]
    #[arg(long, value_name = "TIME")]
    pub step: Option<Span>,
    /// What becomes of shares of a machine above 100 %
    #[arg(long, value_enum, default_value_t = AboveArg::Clip)]
    pub above_100: AboveArg,
}

/// What becomes of shares of a machine above 100 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AboveArg {
    /// They become 100 %, and are counted
    Clip,
    /// They stay, and are counted
    Keep,
    /// The file is refused
    Refuse,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool plan pool vms.parquet --group 16 --report pool.html\n  \
farpool plan pool vms.csv --group 16 --local 25% --blades 8 --member-cost 300")]
pub struct PoolArgs {
    #[command(flatten)]
    pub series: SeriesArgs,
    /// Machines of the pool that is looked at closely
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub group: usize,
    /// Random groupings for each size
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub groupings: u32,
    /// Groupings come out again from their seed
    #[arg(long, value_name = "NUMBER", default_value_t = 42)]
    pub seed: u64,
    /// Share of a machine's peak that stays local
    #[arg(long, value_name = "PCT", default_value = "0%")]
    pub local: Percent,
    /// Blades of a pool, one of which is spare [default: no spare]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub blades: Option<u32>,
    /// Pools with less than their peak: percents of the time that must be enough
    #[arg(long, value_name = "PERCENTILE", value_delimiter = ',', default_value = "99.9,99,95")]
    pub percentile: Vec<f64>,
    /// Dollars a GiB of memory costs in a server [default: the latest of `farpool plan cost
    /// present`]
    #[arg(long, value_name = "DOLLARS")]
    pub memory_price: Option<Dollars>,
    /// Dollars a GiB of memory costs in a blade [default: as in a server]
    #[arg(long, value_name = "DOLLARS")]
    pub far_price: Option<Dollars>,
    /// Dollars that joining costs a machine: port, and part of switch and blade
    #[arg(long, value_name = "DOLLARS")]
    pub member_cost: Option<Dollars>,
    /// The memory of a machine, for files that have shares only
    #[arg(long, value_name = "SIZE")]
    pub machine_memory: Option<Size>,
    /// The least part of the memory that must be saved for a pool to be worth it
    #[arg(long, value_name = "PCT", default_value = "10%")]
    pub worth: Percent,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool plan pack vms.parquet --server server.toml --local 75%,50% --report pack.html\n\n\
A server file has name, cpu_ghz or cpu_cores, memory_gib, and if prices are to decide\n\
price_dollars and far_price_dollars_per_gib; for series of shares cpu_machines and\n\
memory_machines. Without --server the server is the machine that the shares are of.")]
pub struct PackArgs {
    #[command(flatten)]
    pub series: SeriesArgs,
    /// The server, as a TOML file [default: the machine that shares are of]
    #[arg(long, value_name = "FILE")]
    pub server: Option<PathBuf>,
    /// Share of a machine's memory that must be local; several with commas, the first decides
    #[arg(long, value_name = "PCT", value_delimiter = ',', default_value = "75%,50%,25%")]
    pub local: Vec<Percent>,
    /// What of its memory a machine takes
    #[arg(long, value_enum, default_value_t = DemandArg::Used)]
    pub demand: DemandArg,
    /// How long better packings are looked for: moves of the local search
    #[arg(long, value_name = "N", default_value_t = 10_000_000)]
    pub moves: usize,
    /// Packings come out again from their seed
    #[arg(long, value_name = "NUMBER", default_value_t = 42)]
    pub seed: u64,
    /// The least part of the servers that must be freed, where prices do not decide
    #[arg(long, value_name = "PCT", default_value = "10%")]
    pub worth: Percent,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// What of its memory a machine takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DemandArg {
    /// What it uses at each step
    Used,
    /// What it was promised, all the time (--promised)
    Promised,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Catalogs that come along: lim-2010, present.\n\n\
Examples:\n  \
farpool plan cost lim-2010\n  \
farpool plan cost catalog.toml --report cost.html")]
pub struct CostArgs {
    /// A catalog: a TOML file, or the name of one that comes along
    #[arg(value_name = "FILE|NAME")]
    pub catalog: PathBuf,
    /// Print the catalog itself, to begin your own with
    #[arg(long, conflicts_with_all = ["json", "report"])]
    pub toml: bool,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A catalog that comes along: gutierrez-2015, with the designs mercury-a7, mercury-a15-1ghz,\n\
mercury-a15-1.5ghz, iridium-a7, iridium-a15-1ghz, iridium-a15-1.5ghz and keyvault; each of\n\
these names alone means that design.\n\n\
Examples:\n  \
farpool plan dense mercury-a7\n  \
farpool plan dense kv-server.toml --report dense.html")]
pub struct DenseArgs {
    /// A catalog: a TOML file, or the name of one or of a design that comes along
    #[arg(value_name = "FILE|NAME")]
    pub catalog: PathBuf,
    /// Only this design of the catalog
    #[arg(long, value_name = "NAME")]
    pub design: Option<String>,
    /// Print the catalog itself, to begin your own with
    #[arg(long, conflicts_with_all = ["json", "report"])]
    pub toml: bool,
    #[command(flatten)]
    pub answer: AnswerArgs,
}
