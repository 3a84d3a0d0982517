//! The command line: every subcommand and flag is defined here once; parsing, help, manual pages,
//! completions and the keys of the configuration file all come from these definitions.
//!
//! The `*Settings` structs are both a group of flags and a table of the configuration file, so a
//! flag `--when-full` of `run`, the variable `FARPOOL_RUN_WHEN_FULL` and the key
//! `run.when-full` can never drift apart. All their fields are optional: `config.rs` fills what a
//! stronger source left open from a weaker one.

mod kv;
mod kv_bench;
mod kv_top;
mod plan;
mod rack;
mod sim;
mod trace;

use std::ffi::OsString;
use std::path::PathBuf;

pub use kv::*;
pub use kv_bench::*;
pub use kv_top::*;
pub use plan::*;
pub use rack::*;
pub use sim::*;
pub use trace::*;

use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::values::{
    Backing, BladeAddress, Door, LocalLimit, Prefetch, Size, Span, Victim, WhenFull, WhenOutside,
    process_number,
};

/// Run unmodified Linux programs with part of their memory on other machines.
#[derive(Debug, Parser)]
#[command(name = "farpool", version, long_version = crate::version::long())]
#[command(propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "\
Flags are stronger than FARPOOL_* variables, variables than the configuration file\n\
(/etc/farpool.toml, then $XDG_CONFIG_HOME/farpool/config.toml).\n\
Exit codes: 0 done, 1 failed, 2 wrong usage; of questions to a controller 3 not found,\n\
4 conflict, 5 unreachable; `farpool run` passes on the program's own.")]
pub struct Cli {
    /// Read this configuration file instead of the usual ones
    #[arg(
        long,
        value_name = "FILE",
        global = true,
        env = "FARPOOL_CONFIG",
        hide_env_values = true
    )]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program with a limit on its local memory and the rest on blades
    Run(RunArgs),
    /// Offer this machine's memory to clients
    Blade(BladeArgs),
    /// Run the rack's controller: it decides who gets which far memory
    Control(ControlArgs),
    /// Lend this server's memory to the rack, or ask the controller about its nodes
    Node(Box<NodeArgs>),
    /// Show, create, move and delete the rack's segments
    Segment(SegmentArgs),
    /// Show the circuits that are set up
    Circuit(CircuitArgs),
    /// Draw the rack, or make one by rule
    Rack(RackArgs),
    /// Print what happens in the rack
    Events(EventsArgs),
    /// Show what the controller has under way
    Task(TaskArgs),
    /// Show what running programs and blades are doing
    Stat(StatArgs),
    /// Give a running process less local memory: the rest of it goes to blades (root, or
    /// setcap cap_sys_ptrace=p)
    Attach(AttachArgs),
    /// Bring a process's memory in, and leave it as it was before a sidecar came
    Detach(DetachArgs),
    /// Write a core file of a process, with the memory that is far
    Core(CoreArgs),
    /// Change the local memory of a program that runs under `farpool run`
    Limit(LimitArgs),
    /// Show and change the blades of a program that runs under `farpool run`
    Blades(BladesArgs),
    /// Say what this machine can do, and the remedy for what it cannot
    Doctor(DoctorArgs),
    /// Run real jobs on real records: all-local, on far memory, on the kernel's swap
    Demo(DemoArgs),
    /// Measure, each row beside the floor of this machine
    Bench(farpool_bench::BenchArgs),
    /// Run one of the workloads that `bench` measures
    #[command(hide = true)]
    Workload(farpool_bench::WorkloadArgs),
    /// Serve a cache: memcached's protocol, on this machine's memory
    Kv(Box<KvArgs>),
    /// Capture a program's references to memory, or read and write other traces
    Trace(Box<TraceArgs>),
    /// Simulate designs of far memory on a trace
    Sim(SimArgs),
    /// Say what to buy: pools, servers, designs
    Plan(PlanArgs),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
    /// Print the manual page, or write one page per subcommand
    Man(ManArgs),
    /// Check or show the configuration
    Config(ConfigArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool run --local 256MiB -- redis-server --port 7777\n  \
farpool run --local 25% --blade unix:///run/farpool/blade.sock -- python3 job.py\n\n\
Without --blade the far memory is a private blade inside the keeper, in this machine's memory.")]
pub struct RunArgs {
    #[command(flatten)]
    pub settings: RunSettings,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// The flags of `run` and the table `[run]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RunSettings {
    /// Local memory for the whole process tree: a size, or a share of what it asks for (25%)
    #[arg(long, value_name = "SIZE|PCT", env = "FARPOOL_RUN_LOCAL", hide_env_values = true)]
    pub local: Option<LocalLimit>,
    /// A blade to use: shm:///path.sock, unix:///path.sock or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_RUN_BLADE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blade: Vec<BladeAddress>,
    /// Take far memory from the rack of this controller (http://host:port, several with commas)
    #[arg(long, value_name = "URL", env = "FARPOOL_RUN_POOL", hide_env_values = true)]
    #[arg(conflicts_with = "blade")]
    pub pool: Option<String>,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", env = "FARPOOL_RUN_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// With --pool: the compute brick this is [default: the host's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_HOST", hide_env_values = true)]
    pub host: Option<String>,
    /// With --pool: bandwidth to ask for, a second and direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_RATE", hide_env_values = true)]
    pub rate: Option<Size>,
    /// With --pool: folder for memory that must move and finds no room [default: /var/tmp]
    #[arg(long, value_name = "DIR", env = "FARPOOL_RUN_SPILL", hide_env_values = true)]
    pub spill: Option<PathBuf>,
    /// Most far memory the process tree may use [default: what the blades grant]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_QUOTA", hide_env_values = true)]
    pub quota: Option<Size>,
    /// How victims are chosen: clock, fifo, lru, random or sieve [default: clock]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_POLICY", hide_env_values = true)]
    pub policy: Option<Victim>,
    /// What is fetched ahead: none, sequential or trend [default: sequential]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_PREFETCH", hide_env_values = true)]
    pub prefetch: Option<Prefetch>,
    /// When the pool is full: let allocations fail, or go on slowly in local memory [default: slow]
    #[arg(long, value_enum, env = "FARPOOL_RUN_WHEN_FULL", hide_env_values = true)]
    pub when_full: Option<WhenFull>,
    /// Threads that serve faults in each process [default: one per core]
    #[arg(long, value_name = "N", env = "FARPOOL_RUN_PAGER_THREADS", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub pager_threads: Option<u16>,
    /// Smallest mapping that becomes far memory [default: 64KiB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_THRESHOLD", hide_env_values = true)]
    pub threshold: Option<Size>,
    /// Write the run's statistics to this file as JSON when the program ends
    #[arg(long, value_name = "FILE", env = "FARPOOL_RUN_STATS", hide_env_values = true)]
    pub stats: Option<PathBuf>,
    /// Allow blades beyond this machine's loopback: pages then travel unencrypted
    #[arg(long, value_name = "BOOL", env = "FARPOOL_RUN_ALLOW_REMOTE_TCP", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote_tcp: Option<bool>,
    /// How the pager gets into processes: a sidecar in any process whose memory begins to count
    /// (static ones, too; needs root or setcap cap_sys_ptrace=p), a preloaded library, or the first
    /// where it can work [default: auto]
    #[arg(long, value_enum, env = "FARPOOL_RUN_DOOR", hide_env_values = true)]
    pub door: Option<Door>,
    /// A process of the tree cannot be held to the limit (static under the preloaded library,
    /// traced, strict seccomp, another architecture): name it once, end the whole tree with code
    /// 120, or say nothing [default: warn]
    #[arg(long, value_enum, env = "FARPOOL_RUN_WHEN_OUTSIDE", hide_env_values = true)]
    pub when_outside: Option<WhenOutside>,
    /// Start the program although a blade does not answer, userfaultfd is refused, or limits
    /// (ulimit) are too small
    #[arg(long, value_name = "BOOL", env = "FARPOOL_RUN_NO_CHECK", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub no_check: Option<bool>,
    /// Print nothing but errors
    #[arg(long, short, value_name = "BOOL", env = "FARPOOL_RUN_QUIET", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub quiet: Option<bool>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool blade --memory 8GiB --listen unix:///run/farpool/blade.sock --listen tcp://127.0.0.1:7070")]
pub struct BladeArgs {
    #[command(flatten)]
    pub settings: BladeSettings,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `blade` and the table `[blade]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct BladeSettings {
    /// Memory to offer; given out in superpages of 16 MiB
    #[arg(long, value_name = "SIZE", env = "FARPOOL_BLADE_MEMORY", hide_env_values = true)]
    pub memory: Option<Size>,
    /// Where to listen: unix:///path.sock (serves shm:// too) or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_BLADE_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<BladeAddress>,
    /// What the memory is made of: memfd (same-host programs share it), anonymous (huge pages),
    /// hugetlb or file:PATH [default: auto, memfd with a unix socket, else anonymous]
    #[arg(long, value_name = "KIND", env = "FARPOOL_BLADE_BACKING", hide_env_values = true)]
    pub backing: Option<Backing>,
    /// Most memory one client may use [default: all that is offered]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_BLADE_QUOTA", hide_env_values = true)]
    pub quota: Option<Size>,
    /// How long a client that was lost keeps its memory [default: 10s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_BLADE_LEASE", hide_env_values = true)]
    pub lease: Option<Span>,
    /// Threads that serve clients [default: one per core]
    #[arg(long, value_name = "N", env = "FARPOOL_BLADE_THREADS", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Allow listening beyond loopback: pages then travel unencrypted and anyone may connect
    #[arg(
        long,
        value_name = "BOOL",
        env = "FARPOOL_BLADE_ALLOW_REMOTE_TCP",
        hide_env_values = true
    )]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote_tcp: Option<bool>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool attach 4711 --local 512MiB\n\n\
The process goes on as it is, with any allocator, in any language, statically linked or not; its \
threads are stopped for a moment. farpool stays until the process ends. When it is told to end \
(Ctrl-C, SIGTERM, farpool detach) it brings everything in first. What the process forks from now \
on has its memory in local memory; with --tree it is held to the limit, too.\n\n\
Without --blade or --pool the far memory is a private blade inside farpool, in this machine's \
memory.")]
pub struct AttachArgs {
    /// The process
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// Its local memory from now on: a size, or a share of what it has (25%)
    #[arg(long, value_name = "SIZE|PCT")]
    pub local: LocalLimit,
    /// Hold the process, all below it, and those that are born later to this limit together
    #[arg(long)]
    pub tree: bool,
    /// A blade to use: shm:///path.sock, unix:///path.sock or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub blade: Vec<BladeAddress>,
    /// Take far memory from the rack of this controller (http://host:port, several with commas)
    #[arg(long, value_name = "URL", conflicts_with = "blade")]
    pub pool: Option<String>,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", requires = "pool")]
    pub token_file: Option<PathBuf>,
    /// With --pool: the compute brick this is [default: the host's name]
    #[arg(long, value_name = "NAME", requires = "pool")]
    pub host: Option<String>,
    /// With --pool: bandwidth to ask for, a second and direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub rate: Option<Size>,
    /// With --pool: folder for memory that must move and finds no room [default: /var/tmp]
    #[arg(long, value_name = "DIR", requires = "pool")]
    pub spill: Option<PathBuf>,
    /// Most far memory the process may use [default: what the blades grant]
    #[arg(long, value_name = "SIZE")]
    pub quota: Option<Size>,
    /// How victims are chosen: clock, fifo, lru, random or sieve [default: clock]
    #[arg(long, value_name = "NAME")]
    pub policy: Option<Victim>,
    /// What is fetched ahead: none, sequential or trend [default: sequential]
    #[arg(long, value_name = "NAME")]
    pub prefetch: Option<Prefetch>,
    /// Write the statistics to this file as JSON at the end
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Allow blades beyond this machine's loopback: pages then travel unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  farpool detach 4711\n\n\
Of what was attached to with --tree, all processes are left. A process of `farpool run` that \
has a sidecar is left alone: from then on it is not held to the limit, and what it has is \
counted against the others'.")]
pub struct DetachArgs {
    /// The attached process, one of its tree, the attaching farpool, or a process of `farpool run`
    /// with a sidecar
    #[arg(value_parser = process_number)]
    pub pid: u32,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool core 4711 /var/tmp/core.4711 && gdb /usr/bin/program /var/tmp/core.4711\n\n\
The process stands still meanwhile, and goes on afterwards. What is far comes in page by page and \
leaves again: its limit holds, if it holds without. As in the kernel's core dumps, what can be \
read in a file is left out, and the process's coredump_filter says what else (man 5 core).")]
pub struct CoreArgs {
    /// The process
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// The core; must not be there yet. Pages of zeros take no room in it
    pub file: PathBuf,
    /// Take what lies in files too: the core needs no others, and may be very large
    #[arg(long)]
    pub whole: bool,
    /// Let the process go on while its memory is read: the core is then not that of one moment
    #[arg(long)]
    pub running: bool,
    /// Print JSON: one object
    #[arg(long)]
    pub json: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  farpool limit 4711 512MiB")]
pub struct LimitArgs {
    /// The keeper (`farpool run`) or any process of its tree
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// Local memory for the whole process tree from now on: a size, or a share (25%)
    #[arg(value_name = "SIZE|PCT")]
    pub local: LocalLimit,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool blades 4711 --add tcp://127.0.0.1:7071 --leave tcp://127.0.0.1:7070 --wait\n\n\
What lies on a blade that is left moves to the others while the program runs.")]
pub struct BladesArgs {
    /// The keeper (`farpool run`) or any process of its tree
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// Take memory from this blade too; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub add: Vec<BladeAddress>,
    /// Move everything away from this blade; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub leave: Vec<BladeAddress>,
    /// Return when the blades to be left have been
    #[arg(long)]
    pub wait: bool,
    /// Allow new blades beyond this machine's loopback: pages then travel unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Print JSON: a list of the blades
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct StatArgs {
    #[command(flatten)]
    pub settings: StatSettings,
    /// Print JSON: one object with the programs and the blades
    #[arg(long)]
    pub json: bool,
    /// Print again every so many seconds until interrupted
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub watch: Option<u64>,
}

/// The flags of `stat` and the table `[stat]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StatSettings {
    /// A blade to ask besides this machine's programs; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_STAT_BLADE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blade: Vec<BladeAddress>,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON: one object with every check
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[command(subcommand)]
    pub command: Option<DemoCommand>,
    /// Print the rows as JSON as well, one object per row
    #[arg(long)]
    pub json: bool,
    /// How much of the machine's records to load
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub records: Size,
    /// Requests of the query mix per run
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    pub requests: u64,
    /// Folder for the records and the swap file; must be on a disk, not in memory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// Only the rows whose name contains this; the all-local row always runs
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum DemoCommand {
    /// Run five hosts that lend each other memory, then let some of it fail; needs root
    Rack(RackDemoArgs),
    /// The program that runs on these hosts
    #[command(hide = true)]
    Tenant(farpool_bench::TenantArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Five network namespaces are hosts, each with an address and 1 GiB of memory. A serves B's\n\
program; a big program starts on A, B's demand shrinks, A takes its memory back and becomes a\n\
client of C (Figure 6 of the ACMS paper). Then a blade is drained, the controller killed, a node\n\
cut off. Exit code 1 if a check fails.")]
pub struct RackDemoArgs {
    /// Print JSON lines (samples, events, checks) on standard output, the rest on standard error
    #[arg(long)]
    pub json: bool,
    /// Wait less between what happens
    #[arg(long)]
    pub quick: bool,
    /// Only with a controller, or only without
    #[arg(long, value_enum, value_name = "RACK")]
    pub only: Option<RackVariant>,
    /// Folder for what the daemons keep
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// Change a bit of a program's memory, to see that it is noticed
    #[arg(long, hide = true)]
    pub spoil: bool,
}

/// Who organises the rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RackVariant {
    /// A controller decides who gets which memory
    Controller,
    /// The nodes agree among themselves
    Collaboration,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write farpool.1 and one page per subcommand into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub action: ConfigAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
pub enum ConfigAction {
    /// Read the configuration files and say whether they are right
    Check,
    /// Print the settings that files and variables give together, as TOML
    Dump,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_setting_has_a_variable_named_after_its_table_and_flag() {
        for name in ["run", "blade", "stat", "control", "node"] {
            let command = Cli::command();
            let sub = command.find_subcommand(name).expect(name);
            for arg in sub.get_arguments().filter(|arg| arg.get_env().is_some()) {
                let flag = arg.get_long().expect("settings are flags");
                let expected = format!("FARPOOL_{name}_{flag}").to_uppercase().replace('-', "_");
                assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(expected.as_str()));
            }
        }
    }
}
