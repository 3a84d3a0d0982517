//! `farpool sim`: its flags.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use farpool_policy::{CacheKind, PrefetchKind, VictimKind};
use farpool_sim::misses::MissPolicy;
use farpool_sim::{LocalSize, Preset};

use crate::values::{Size, Span};

#[derive(Debug, Args)]
pub struct SimArgs {
    #[command(subcommand)]
    pub action: SimAction,
}

#[derive(Debug, Subcommand)]
pub enum SimAction {
    /// Simulate a trace with designs, local sizes and policies, or run an experiment file
    Run(SimRunArgs),
    /// Show the miss ratio of a trace at each size of local memory
    Mrc(SimMrcArgs),
    /// Measure the costs of far memory on this machine
    Calibrate(CalibrateArgs),
    /// Predict a program's run time under farpool run, from its trace and measured costs
    Predict(PredictArgs),
    /// Compare the papers' tables and claims with this simulator's results
    Reproduce(ReproduceArgs),
    /// List the named designs, or print one as TOML to change it
    Designs(DesignsArgs),
}

/// How an answer is printed; the same for all simulations.
#[derive(Debug, Clone, Args)]
pub struct AnswerArgs {
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
    /// Write the answer and its plots to this file, as one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// How a trace is loaded.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Page size [default: 4KiB]
    #[arg(long, value_name = "SIZE")]
    pub page: Option<Size>,
    /// Maximum memory of the simulation [default: what the machine has available]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Number of threads to simulate with [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool sim run sort.parquet\n  \
farpool sim run sort.parquet --design ps,fgra,disk --local 75%,50%,25% --policy clock,lru --report \
sort.html\n  \
farpool sim run experiment.toml\n\n\
A local size is a share of the pages that the trace uses, or a size in bytes.")]
pub struct SimRunArgs {
    /// A trace, or an experiment if its name ends in .toml
    pub input: PathBuf,
    /// Designs to simulate; `farpool sim designs` lists them
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[arg(default_value = "ps,ps+cbf,fgra,fgra+migration,fgra-pcie,disk")]
    pub design: Vec<Preset>,
    /// Sizes of local memory: shares of the footprint (75%), or sizes in bytes (64MiB)
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "75%,50%,25%")]
    pub local: Vec<LocalSize>,
    /// Policies that choose which pages leave local memory
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "clock")]
    pub policy: Vec<CacheKind>,
    /// Number of such programs that share the far memory's device, each with its own link
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub clients: u32,
    /// Number of references that may wait at the same time; 1: each one blocks the program
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub overlap: u32,
    /// Length of a tick of the trace's clock, in picoseconds [default: what the trace says]
    #[arg(long, value_name = "PS", value_parser = clap::value_parser!(u64).range(1..))]
    pub tick_ps: Option<u64>,
    /// Random seed of policies that choose at random
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool sim mrc sort.parquet --report sort.html\n  \
farpool sim mrc sort.parquet --policy lru,clock,s3-fifo,belady --local 10%,25%,64MiB\n  \
farpool sim mrc big.parquet --sample 0.001\n\n\
Without --exact or --sample, curves are exact if that takes only seconds; each curve says how it \
was made.")]
pub struct SimMrcArgs {
    /// A trace
    pub trace: PathBuf,
    /// Policies to compare; belady is the optimum, which no policy can beat
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "lru,fifo,clock,sieve"
    )]
    pub policy: Vec<MissPolicy>,
    /// Sizes of local memory: shares of the footprint (75%), or sizes in bytes (64MiB)
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    #[arg(default_value = "1%,2%,5%,10%,15%,20%,25%,30%,40%,50%,60%,70%,75%,80%,90%,100%")]
    pub local: Vec<LocalSize>,
    /// Simulate every reference, however long it takes
    #[arg(long, conflicts_with = "sample")]
    pub exact: bool,
    /// Simulate only this share of the pages, above 0 and at most 1 (SHARDS, miniature simulation)
    #[arg(long, value_name = "SHARE")]
    pub sample: Option<f64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool sim calibrate --out here.toml\n  \
farpool sim calibrate --blade tcp://10.0.0.7:7070 --out blade7.toml\n\n\
Programs that use memory in known ways are run all-local and far, round by round; the costs that\n\
explain the difference are written, with the measurements and how well they fit. Costs that are\n\
off by more than 15 % for any probe are not written. Nothing else should run meanwhile.")]
pub struct CalibrateArgs {
    /// The file of costs to write
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Measure with this blade; may be repeated [default: memory of this machine]
    #[arg(long, value_name = "ADDR")]
    pub blade: Vec<String>,
    /// Memory that each probe uses
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub bytes: Size,
    /// Number of runs of each probe in each place, alternated; the median counts. More are made
    /// while the costs do not fit
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Write the costs even if they do not fit
    #[arg(long)]
    pub accept: bool,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool sim calibrate --out here.toml\n  \
farpool trace --pages --time --out sort.parquet -- sort big.txt\n  \
farpool sim predict sort.parquet --costs here.toml --local 75%,50%,25%\n\n\
Capture the trace with --pages: caches hide which pages are in use. A local size means the same as\n\
in farpool run: a share of what the program has in use so far, at least 16 MiB, or with --peak a\n\
share of the largest amount; or a size in bytes.")]
pub struct PredictArgs {
    /// A trace
    pub trace: PathBuf,
    /// File of costs, from farpool sim calibrate
    #[arg(long, value_name = "FILE")]
    pub costs: PathBuf,
    /// Sizes of local memory, as --local of farpool run: shares of what the program has in use so
    /// far, or sizes in bytes
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "75%,50%,25%")]
    pub local: Vec<LocalSize>,
    /// Take shares of the largest memory that the program will use, as --peak of farpool run
    #[arg(long)]
    pub peak: bool,
    /// The program's run time with all its memory local [default: what the trace says]
    #[arg(long, value_name = "TIME")]
    pub native: Option<Span>,
    /// Memory that counts against the limit and cannot be far: code, files [default: what the trace
    /// says]
    #[arg(long, value_name = "SIZE")]
    pub fixed: Option<Size>,
    /// Policy that chooses which pages to evict, as --policy of farpool run
    #[arg(long, value_name = "NAME", default_value_t)]
    pub victims: VictimKind,
    /// Prefetch policy, as --prefetch of farpool run
    #[arg(long, value_name = "NAME", default_value_t)]
    pub prefetch: PrefetchKind,
    /// Random seed of the victim policy `random`
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

/// A paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Paper {
    /// Lim's thesis, 2010: memory blades, their cost, programs on them
    Lim,
    /// HPL-2011-31: page replacement in a hypervisor
    Hpl,
    /// Gutierrez's thesis, 2015: dense servers
    Gutierrez,
    /// ACMS, 2011: machines that lend each other memory
    Acms,
    /// dReDBox, 2017: bandwidth of memory behind a transceiver
    Dredbox,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool sim reproduce gutierrez\n  \
farpool sim reproduce lim sort.parquet sqlite.parquet --report lim.html\n\n\
Each result is a prediction that is exact, consistent with rounded inputs, right in shape or departs\n\
from the paper; or it is an input, or a constant was fitted to it: these test nothing. The first line\n\
counts them apart.")]
pub struct ReproduceArgs {
    /// Paper to compare with
    #[arg(value_enum)]
    pub paper: Paper,
    /// lim: traces to test its claims about programs on
    pub traces: Vec<PathBuf>,
    /// lim: utilisation of machines (docs/operators/planning.md) to test sections 4.4 and 4.5 on;
    /// may be repeated
    #[arg(long, value_name = "FILE")]
    pub utilisation: Vec<PathBuf>,
    /// The resources that those machines were promised, by which they are packed; as for farpool
    /// plan pack
    #[arg(long, value_name = "FILE", requires = "utilisation")]
    pub promised: Option<PathBuf>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
}

#[derive(Debug, Args)]
pub struct DesignsArgs {
    /// Print this design as TOML
    pub name: Option<Preset>,
}
