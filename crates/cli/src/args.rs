//! The command line: every subcommand and flag is defined here once; parsing, help, manual pages,
//! completions and the keys of the configuration file all come from these definitions.
//!
//! The `*Settings` structs are both a group of flags and a table of the configuration file, so a
//! flag `--when-full` of `run`, the variable `FARPOOL_RUN_WHEN_FULL` and the key `run.when-full`
//! can never drift apart. All their fields are optional: `config.rs` fills fields that a stronger
//! source left unset from a weaker one.

mod audit;
mod kv;
mod kv_bench;
mod kv_top;
mod pki;
mod plan;
mod rack;
mod sim;
mod trace;
mod vm;
mod vmm;

use std::ffi::OsString;
use std::path::PathBuf;

pub use audit::*;
pub use kv::*;
pub use kv_bench::*;
pub use kv_top::*;
pub use pki::*;
pub use plan::*;
pub use rack::*;
pub use sim::*;
pub use trace::*;
pub use vm::*;
pub use vmm::*;

use clap::{Args, Parser, Subcommand};
use serde::{Deserialize, Serialize};

use crate::values::{
    Backing, BladeAddress, ControlRate, Door, FlashPart, LocalLimit, PeakMemory, Persist, Prefetch,
    Redundancy, Seal, Size, Span, VerifyEvery, Victim, WhenFull, WhenOutside, process_number,
};

/// Run unmodified Linux programs with part of their memory on other machines.
#[derive(Debug, Parser)]
#[command(name = "farpool", version, long_version = crate::version::long())]
#[command(propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "\
Flags override FARPOOL_* variables, and these override the configuration files\n\
($XDG_CONFIG_HOME/farpool/config.toml, then /etc/farpool.toml).\n\
Exit codes: 0 done, 1 failed, 2 wrong usage; of commands that ask a controller also\n\
3 not found, 4 conflict, 5 unreachable; `farpool run` exits with the program's code.")]
pub struct Cli {
    /// Read only this configuration file, not /etc/farpool.toml and the user's own
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
    /// Run a program with limited local memory; the rest of its memory is on blades
    Run(RunArgs),
    /// Offer this machine's memory to clients
    Blade(BladeArgs),
    /// Run the rack's controller, which grants far memory to clients
    Control(ControlArgs),
    /// Lend this server's memory to the rack, or list, show and drain nodes
    Node(Box<NodeArgs>),
    /// Show, create, move and delete the rack's segments
    Segment(SegmentArgs),
    /// Show the circuits that are set up
    Circuit(CircuitArgs),
    /// Set and show what tenants of the rack are promised
    Tenant(TenantArgs),
    /// Draw the rack, or generate a topology file
    Rack(RackArgs),
    /// Issue, renew and revoke the certificates of the rack's nodes, programs and people
    Pki(PkiArgs),
    /// Verify the log of what a controller was asked to change
    Audit(AuditArgs),
    /// Print the rack's events
    Events(EventsArgs),
    /// Show the controller's tasks
    Task(TaskArgs),
    /// Show what running programs and blades are doing
    Stat(StatArgs),
    /// Run virtual machines with far memory; list, show and limit them
    Vm(VmArgs),
    /// Restore guests of Firecracker and Cloud Hypervisor from far memory, page by page
    Vmm(VmmArgs),
    /// Limit the local memory of a running process; the rest moves to blades (needs root or setcap
    /// cap_sys_ptrace=p)
    Attach(AttachArgs),
    /// Move a process's far memory back to local memory and remove its sidecar
    Detach(DetachArgs),
    /// Write a core file of a process, including its far memory
    Core(CoreArgs),
    /// Change the local memory of a program that runs under `farpool run`
    Limit(LimitArgs),
    /// Show and change the blades of a program that runs under `farpool run`
    Blades(BladesArgs),
    /// Check what this machine supports, with a remedy for each thing that is missing
    Doctor(DoctorArgs),
    /// Run real jobs on real records: all local, on far memory, and on the kernel's swap
    Demo(DemoArgs),
    /// Measure Farpool; each row is compared with the floor of this machine
    Bench(farpool_bench::BenchArgs),
    /// Run one workload of `bench`
    #[command(hide = true)]
    Workload(farpool_bench::WorkloadArgs),
    /// Serve a cache over memcached's protocol, from memory, far memory and flash
    Kv(Box<KvArgs>),
    /// Capture a program's memory references, or convert and describe traces
    Trace(Box<TraceArgs>),
    /// Simulate far-memory designs on a trace
    Sim(SimArgs),
    /// Plan purchases: pools, servers, local memory, costs
    Plan(PlanArgs),
    /// Print a shell's completion script
    Completions(CompletionsArgs),
    /// Print the manual page, or write one page for each subcommand
    Man(ManArgs),
    /// Check or show the configuration
    Config(ConfigArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool run --local 256MiB -- redis-server --port 7777\n  \
farpool run --local 25% --blade unix:///run/farpool/blade.sock -- python3 job.py\n\n\
Without --blade or --pool, far memory is a private blade inside farpool, on this machine.")]
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
    /// Local memory for the whole process tree: a size, or a share (25%) of the memory it has in
    /// use
    /// so far, local and far, at least 16 MiB; the same as in farpool sim predict
    #[arg(long, value_name = "SIZE|PCT", env = "FARPOOL_RUN_LOCAL", hide_env_values = true)]
    pub local: Option<LocalLimit>,
    /// Take the share in --local of this largest memory, not of the memory so far: a size, a trace
    /// of the program, or the --stats of an earlier run
    #[arg(long, value_name = "SIZE|FILE", env = "FARPOOL_RUN_PEAK", hide_env_values = true)]
    pub peak: Option<PeakMemory>,
    /// Use this blade: shm:///path.sock, unix:///path.sock or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_RUN_BLADE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blade: Vec<BladeAddress>,
    /// Take far memory from the rack of this controller: https://host:port, several separated by
    /// commas
    #[arg(long, value_name = "URL", env = "FARPOOL_RUN_POOL", hide_env_values = true)]
    #[arg(conflicts_with = "blade")]
    pub pool: Option<String>,
    /// Folder with the program's certificate (farpool pki issue), for https:// and for blades over
    /// TCP, which are then used with TLS only
    #[arg(long, value_name = "DIR", env = "FARPOOL_RUN_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", env = "FARPOOL_RUN_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// With --pool: ask an http:// controller beyond loopback; all is sent unencrypted
    #[arg(long, value_name = "BOOL", env = "FARPOOL_RUN_INSECURE", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub insecure: Option<bool>,
    /// With --pool: name of this machine's compute brick [default: the host's name]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_HOST", hide_env_values = true)]
    pub host: Option<String>,
    /// With --pool: tenant whose promise and quota the program counts towards [default: that of the
    /// certificate, or default]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_TENANT", hide_env_values = true)]
    pub tenant: Option<String>,
    /// With --pool: bandwidth to ask for, per second in each direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_RATE", hide_env_values = true)]
    pub rate: Option<Size>,
    /// With --pool: folder for memory that must leave a blade when no other has room [default:
    /// /var/tmp]
    #[arg(long, value_name = "DIR", env = "FARPOOL_RUN_SPILL", hide_env_values = true)]
    pub spill: Option<PathBuf>,
    /// Maximum far memory of the process tree [default: what the blades grant]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_QUOTA", hide_env_values = true)]
    pub quota: Option<Size>,
    /// Share equal pages with programs of the same NAME, and of the same tenant or user, on blades
    /// that pack (farpool blade --pack); one can tell then by a write's time what another holds
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_SHARE_WITH", hide_env_values = true)]
    pub share_with: Option<String>,
    /// Policy that chooses which pages to evict: clock, fifo, lru, random or sieve [default: clock]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_POLICY", hide_env_values = true)]
    pub policy: Option<Victim>,
    /// Prefetch policy: none, sequential or trend [default: sequential]
    #[arg(long, value_name = "NAME", env = "FARPOOL_RUN_PREFETCH", hide_env_values = true)]
    pub prefetch: Option<Prefetch>,
    /// What to do when far memory is full: fail the program's allocations, or continue slowly in
    /// local memory [default: slow]
    #[arg(long, value_enum, env = "FARPOOL_RUN_WHEN_FULL", hide_env_values = true)]
    pub when_full: Option<WhenFull>,
    /// How long to wait for a blade's answer before what is there is lost; other connections are
    /// tried long before [default: 10s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_RUN_DEADLINE", hide_env_values = true)]
    pub deadline: Option<Span>,
    /// Number of threads that serve faults in each process [default: one per core]
    #[arg(long, value_name = "N", env = "FARPOOL_RUN_PAGER_THREADS", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub pager_threads: Option<u16>,
    /// Smallest mapping that may move to far memory [default: 64KiB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_RUN_THRESHOLD", hide_env_values = true)]
    pub threshold: Option<Size>,
    /// Write the run's statistics to this file as JSON when the program ends
    #[arg(long, value_name = "FILE", env = "FARPOOL_RUN_STATS", hide_env_values = true)]
    pub stats: Option<PathBuf>,
    /// When to seal pages, so that a blade can neither read them nor return others. remote: if a
    /// blade is reached by TCP, or with --pool; always: also on blades of this host [default:
    /// remote]
    #[arg(long, value_enum, env = "FARPOOL_RUN_SEAL", hide_env_values = true)]
    pub seal: Option<Seal>,
    /// What is stored beside what is far, on other failure domains (hosts): none; 2 or 3 copies in
    /// all; parity, a quarter more, on five. A blade that dies costs a pause of at most a second
    /// then, and pages are always sealed [default: with --pool what the tenant has, else none]
    #[arg(long, value_name = "KIND", env = "FARPOOL_RUN_REDUNDANCY", hide_env_values = true)]
    pub redundancy: Option<Redundancy>,
    /// In which time to read all sealed far memory once, so that damage is found before the program
    /// needs it; a damaged copy is made anew from another one. never: do not [default: 24h]
    #[arg(long, value_name = "TIME", env = "FARPOOL_RUN_VERIFY_EVERY", hide_env_values = true)]
    pub verify_every: Option<VerifyEvery>,
    /// Without --pki: allow blades beyond this machine's loopback; all but sealed pages is sent
    /// unencrypted
    #[arg(long, value_name = "BOOL", env = "FARPOOL_RUN_ALLOW_REMOTE_TCP", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub allow_remote_tcp: Option<bool>,
    /// How the pager enters processes. sidecar: a process beside each one with enough memory,
    /// static ones too (needs root or setcap cap_sys_ptrace=p); preload: a preloaded library; auto:
    /// sidecar where it works, else preload [default: auto]
    #[arg(long, value_enum, env = "FARPOOL_RUN_DOOR", hide_env_values = true)]
    pub door: Option<Door>,
    /// What to do about a process that cannot be held to the limit (static under preload, traced,
    /// strict seccomp, another architecture). warn: name it once; fail: end the whole tree with
    /// code 120; allow: say nothing [default: warn]
    #[arg(long, value_enum, env = "FARPOOL_RUN_WHEN_OUTSIDE", hide_env_values = true)]
    pub when_outside: Option<WhenOutside>,
    /// Start the program even if a blade does not answer, userfaultfd is refused, or limits
    /// (ulimit) are too small
    #[arg(long, value_name = "BOOL", env = "FARPOOL_RUN_NO_CHECK", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub no_check: Option<bool>,
    /// Print errors only
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
    /// With --persist: end the process that serves this memory now, once all here is known to be in
    /// order, and go on with what it lends; programs wait for that
    #[arg(long)]
    pub takeover: bool,
    /// Print the ready line as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The flags of `blade` and the table `[blade]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct BladeSettings {
    /// Memory to lend, in superpages of 16 MiB; with --flash, memory for what of it is hot, and
    /// with --pack, for all of it
    #[arg(long, value_name = "SIZE", env = "FARPOOL_BLADE_MEMORY", hide_env_values = true)]
    pub memory: Option<Size>,
    /// Lend this much instead, with what is cold on flash: a file on a disk (created if missing) or
    /// block device, and how much of it to use. It is encrypted, and of no use after a restart
    #[arg(long, value_name = "FILE:SIZE", env = "FARPOOL_BLADE_FLASH", hide_env_values = true)]
    pub flash: Option<FlashPart>,
    /// Maximum bytes per second to write to flash; what comes faster waits [default: unlimited]
    #[arg(
        long,
        value_name = "SIZE",
        env = "FARPOOL_BLADE_FLASH_WRITE_RATE",
        hide_env_values = true
    )]
    pub flash_write_rate: Option<Size>,
    /// Pack what is cold: keep nothing of zero pages, equal pages of programs with one --share-with
    /// once, the rest compressed. Sealed pages stay as they are: nothing about them can be seen
    #[arg(long, value_name = "BOOL", env = "FARPOOL_BLADE_PACK", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub pack: Option<bool>,
    /// With --pack: lend this much, which may be more than --memory; pages are refused when it is
    /// full [default: 15/16 of --memory, which has room for whatever is written]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_BLADE_LEND", hide_env_values = true)]
    pub lend: Option<Size>,
    /// With --pack: how long a page is not used before it is packed, unless memory is short
    /// [default: 10s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_BLADE_PACK_AFTER", hide_env_values = true)]
    pub pack_after: Option<Span>,
    /// Where to listen: unix:///path.sock (serves shm:// too) or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_BLADE_LISTEN", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<BladeAddress>,
    /// Kind of memory: memfd (programs on this host share it), anonymous (huge pages), hugetlb or
    /// file:PATH [default: auto: memfd with a unix socket, else anonymous]
    #[arg(long, value_name = "KIND", env = "FARPOOL_BLADE_BACKING", hide_env_values = true)]
    pub backing: Option<Backing>,
    /// With --backing file:PATH: what is lent outlives the blade's process (restart), or an orderly
    /// reboot of the machine, too (reboot); its table is kept in PATH.table
    #[arg(
        long,
        value_name = "restart|reboot",
        env = "FARPOOL_BLADE_PERSIST",
        hide_env_values = true
    )]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "restart")]
    pub persist: Option<Persist>,
    /// Maximum memory of one client [default: all of --memory; an eighth for one of another host]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_BLADE_QUOTA", hide_env_values = true)]
    pub quota: Option<Size>,
    /// How long the memory of a lost client is kept [default: 10s]
    #[arg(long, value_name = "TIME", env = "FARPOOL_BLADE_LEASE", hide_env_values = true)]
    pub lease: Option<Span>,
    /// Number of threads that serve clients [default: one per core]
    #[arg(long, value_name = "N", env = "FARPOOL_BLADE_THREADS", hide_env_values = true)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Limit on control requests (all but reads and writes) in a second of all programs under one
    /// grant, or without a grant of one host or user, or `unlimited` [default: 20000]
    #[arg(long, value_name = "N", env = "FARPOOL_BLADE_CONTROL_RATE", hide_env_values = true)]
    pub control_rate: Option<ControlRate>,
    /// Serve TCP over TLS only, to certificates of the rack, with the node's certificate in this
    /// folder (farpool pki issue --role node)
    #[arg(long, value_name = "DIR", env = "FARPOOL_BLADE_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// Note who came, who was refused, and what the node ordered in this file, in lines that each
    /// have the hash of the one before (farpool audit verify) [default: none]
    #[arg(long, value_name = "FILE", env = "FARPOOL_BLADE_AUDIT", hide_env_values = true)]
    pub audit: Option<PathBuf>,
    /// Without --pki: allow listening beyond loopback; all but sealed pages is sent unencrypted,
    /// and anyone may connect
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
farpool attach 4711 --local 512MiB\n  \
farpool attach 4711 --local 512MiB --trace faults.parquet    # for farpool sim mrc\n\n\
The process continues unchanged, whatever its allocator and language, static or not; its \
threads stop for a moment. farpool runs until the process ends. Told to end (Ctrl-C, SIGTERM, \
farpool detach), it first moves all far memory back to local memory. The memory of children forked \
from now on stays local; with --tree they are held to the limit, too.\n\n\
Without --blade or --pool, far memory is a private blade inside farpool, on this machine.")]
pub struct AttachArgs {
    /// Process id
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// Local memory of the process: a size, or a share of the memory it has (25%)
    #[arg(long, value_name = "SIZE|PCT")]
    pub local: LocalLimit,
    /// Apply one limit to the process and all its descendants together, later ones too
    #[arg(long)]
    pub tree: bool,
    /// Use this blade: shm:///path.sock, unix:///path.sock or tcp://ip:port; may be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub blade: Vec<BladeAddress>,
    /// Take far memory from the rack of this controller: https://host:port, several separated by
    /// commas
    #[arg(long, value_name = "URL", conflicts_with = "blade")]
    pub pool: Option<String>,
    /// Folder with the program's certificate (farpool pki issue), for https:// and for blades over
    /// TCP, which are then used with TLS only
    #[arg(long, value_name = "DIR")]
    pub pki: Option<PathBuf>,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", requires = "pool")]
    pub token_file: Option<PathBuf>,
    /// With --pool: ask an http:// controller beyond loopback; all is sent unencrypted
    #[arg(long, requires = "pool")]
    pub insecure: bool,
    /// With --pool: name of this machine's compute brick [default: the host's name]
    #[arg(long, value_name = "NAME", requires = "pool")]
    pub host: Option<String>,
    /// With --pool: bandwidth to ask for, per second in each direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub rate: Option<Size>,
    /// With --pool: folder for memory that must leave a blade when no other has room [default:
    /// /var/tmp]
    #[arg(long, value_name = "DIR", requires = "pool")]
    pub spill: Option<PathBuf>,
    /// Maximum far memory of the process [default: what the blades grant]
    #[arg(long, value_name = "SIZE")]
    pub quota: Option<Size>,
    /// Share equal pages with programs of the same NAME, and of the same tenant or user, on blades
    /// that pack (farpool blade --pack); one can tell then by a write's time what another holds
    #[arg(long, value_name = "NAME")]
    pub share_with: Option<String>,
    /// Policy that chooses which pages to evict: clock, fifo, lru, random or sieve [default: clock]
    #[arg(long, value_name = "NAME")]
    pub policy: Option<Victim>,
    /// Prefetch policy: none, sequential or trend [default: sequential]
    #[arg(long, value_name = "NAME")]
    pub prefetch: Option<Prefetch>,
    /// How long to wait for a blade's answer before what is there is lost [default: 10s]
    #[arg(long, value_name = "TIME")]
    pub deadline: Option<Span>,
    /// Write the statistics to this file as JSON at the end
    #[arg(long, value_name = "FILE")]
    pub stats: Option<PathBuf>,
    /// Record the page faults from now on in this file, as farpool trace --via fault does
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// When to seal pages, so that a blade can neither read them nor return others. remote: if a
    /// blade is reached by TCP, or with --pool; always: also on blades of this host
    #[arg(long, value_enum, default_value = "remote")]
    pub seal: Seal,
    /// What is stored beside what is far, on other failure domains (hosts): none; 2 or 3 copies in
    /// all; parity, a quarter more, on five. A blade that dies costs a pause of at most a second
    /// then, and pages are always sealed [default: with --pool what the tenant has, else none]
    #[arg(long, value_name = "KIND")]
    pub redundancy: Option<Redundancy>,
    /// In which time to read all sealed far memory once, so that damage is found before the program
    /// needs it; a damaged copy is made anew from another one. never: do not
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub verify_every: VerifyEvery,
    /// Without --pki: allow blades beyond this machine's loopback; all but sealed pages is sent
    /// unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  farpool detach 4711\n\n\
A tree that was attached with --tree is detached as a whole. A process of `farpool run` that has a \
sidecar is detached by itself: it is no longer held to the limit, and its memory counts against \
the limit of the others.")]
pub struct DetachArgs {
    /// Process id: the attached process, one of its tree, the farpool that attached, or a process
    /// of `farpool run` with a sidecar
    #[arg(value_parser = process_number)]
    pub pid: u32,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool core 4711 /var/tmp/core.4711 && gdb /usr/bin/program /var/tmp/core.4711\n\n\
The process is stopped meanwhile and continues afterwards. Far memory is fetched page by page and \
evicted again, so the process keeps within its limit if it did before. As in the kernel's core \
dumps, memory that can be read from files is left out, and the process's coredump_filter says what \
else (man 5 core).")]
pub struct CoreArgs {
    /// Process id
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// The core file to write; must not exist. Pages of zeros take no space in it
    pub file: PathBuf,
    /// Include memory that can be read from files; the core is then complete, and may be very large
    #[arg(long)]
    pub whole: bool,
    /// Do not stop the process meanwhile; the core is then not a consistent snapshot
    #[arg(long)]
    pub running: bool,
    /// Print JSON: one object
    #[arg(long)]
    pub json: bool,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  farpool limit 4711 512MiB")]
pub struct LimitArgs {
    /// Process id of `farpool run` or of any process of its tree
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// New local memory of the whole process tree: a size, or a share of the memory it asks for
    /// (25%)
    #[arg(value_name = "SIZE|PCT")]
    pub local: LocalLimit,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:\n  \
farpool blades 4711 --add tcp://127.0.0.1:7071 --leave tcp://127.0.0.1:7070 --wait\n\n\
Memory on the blades of --leave moves to the others while the program runs.")]
pub struct BladesArgs {
    /// Process id of `farpool run` or of any process of its tree
    #[arg(value_parser = process_number)]
    pub pid: u32,
    /// Use this blade too; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub add: Vec<BladeAddress>,
    /// Move all memory away from this blade and stop using it; may be repeated
    #[arg(long, value_name = "ADDR")]
    pub leave: Vec<BladeAddress>,
    /// Return once the blades of --leave hold no memory of the program
    #[arg(long)]
    pub wait: bool,
    /// Allow new blades beyond this machine's loopback, in a run without --pki; all but sealed
    /// pages is sent unencrypted
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
    /// Print again every SECONDS seconds until interrupted
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub watch: Option<u64>,
}

/// The flags of `stat` and the table `[stat]`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StatSettings {
    /// Also show this blade; may be repeated
    #[arg(long, value_name = "ADDR", env = "FARPOOL_STAT_BLADE", hide_env_values = true)]
    #[arg(value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blade: Vec<BladeAddress>,
    /// Folder with a certificate (farpool pki issue), for blades over TCP, which are then asked
    /// with TLS only
    #[arg(long, value_name = "DIR", env = "FARPOOL_STAT_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Also check the certificate, key and authorities in this folder, such as /etc/farpool/pki
    #[arg(long, value_name = "DIR")]
    pub pki: Option<PathBuf>,
    /// Print JSON: one object with every check
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[command(subcommand)]
    pub command: Option<DemoCommand>,
    /// Also print the rows as JSON, one object per row
    #[arg(long)]
    pub json: bool,
    /// Size of the records to load
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    pub records: Size,
    /// Number of requests of the query mix in each run
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    pub requests: u64,
    /// Folder for the records and the swap file; must be on a disk, not in memory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// Run only the rows whose name contains TEXT; the all-local row always runs
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum DemoCommand {
    /// Run five hosts that lend each other memory, then make parts of it fail; needs root
    Rack(RackDemoArgs),
    /// The program that runs on these hosts
    #[command(hide = true)]
    Tenant(farpool_bench::TenantArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "\
The hosts are network namespaces, each with an address and 1 GiB of memory. A lends to B's\n\
program; a big program starts on A, B's demand shrinks, A reclaims its memory and becomes a\n\
client of C (Figure 6 of the ACMS paper). Then a blade is drained, the controller killed, and a\n\
node cut off from the network. Exit code 1 if a check fails.")]
pub struct RackDemoArgs {
    /// Print JSON lines (samples, events, checks) on standard output, the rest on standard error
    #[arg(long)]
    pub json: bool,
    /// Wait less between the steps
    #[arg(long)]
    pub quick: bool,
    /// Run only the part with a controller, or only the part without [default: both]
    #[arg(long, value_enum, value_name = "RACK")]
    pub only: Option<RackVariant>,
    /// Folder for the daemons' files
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub dir: PathBuf,
    /// Change a bit of a program's memory, to check that the change is detected
    #[arg(long, hide = true)]
    pub spoil: bool,
}

/// Which of the rack's variants runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RackVariant {
    /// A controller grants the memory
    Controller,
    /// The nodes agree among themselves
    Collaboration,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to print the script for
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Write farpool.1 and one page for each subcommand into this folder
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
    /// Read the configuration files and report errors
    Check,
    /// Print the combined settings of files and variables, as TOML
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
