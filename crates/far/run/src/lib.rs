//! `farpool run`: starts a program with the pager inside it, and stays as its keeper.
//!
//! The keeper (`keeper`) owns what all processes of the program's tree share: the board with the
//! one limit, the private blade if no other was named, the statistics, signals and the exit code.
//! It is only a parent: no page of the program passes through it.
//!
//! When the keeper dies, the program is killed with it (its limit and its blade would be gone).

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod attach;
mod authority;
mod births;
mod blades;
mod brakes;
mod dialing;
mod directory;
mod door;
mod ending;
mod families;
mod faults;
mod holder;
mod inherits;
mod keeper;
mod kin;
mod needs;
mod nursery;
mod outside;
mod priority;
mod proc;
mod program;
mod rack;
mod redundancy;
mod renewal;
mod rights;
mod rooms;
mod say;
mod sharing;
mod sidecar_error;
mod sidecars;
mod stats;
mod stillness;
mod strain;
mod talk;
mod uffd_guardian;
mod unmovable;
mod waits;
mod warden;
mod wards;
mod working_set;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use farpool_board::WhenFull;
pub use farpool_board::{BladeOffer, GUEST_SOCKET, GUEST_VARIABLE};
use farpool_identity::{Credentials, Refusal};
pub use farpool_seal::SealPolicy;
use farpool_units::SUPERPAGE_BYTES;

pub use attach::{AttachEnd, Entered, Reach, attach, detach, is_attached_to};
pub use blades::{BladeChangeError, BladeUse, RunBlades, open_board};
pub use directory::{make_base, run_of_keeper, runs};
pub use door::{Door, DoorLack, sidecar_lack};
pub use farpool_board::Redundancy;
pub use faults::FaultTrace;
pub use keeper::{capture_faults, run, set_limit};
pub use needs::{PAGER_ADDRESS_BYTES, UserfaultfdLack, userfaultfd_features};
pub use outside::{EXIT_OUTSIDE, WhenOutside};
pub use program::ProgramError;
pub use rack::{RackError, RackOptions};
pub use rights::confine as confine_rights;
pub use sidecar_error::SidecarError;
pub use stats::{Peak, ProcessStatistics, RunStatistics, read_statistics};
pub use unmovable::{Kind as UnmovableKind, Unmovable};
pub use working_set::WorkingSet;

/// Local memory of the program's whole process tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalLimit {
    Bytes(u64),
    /// Share of all memory the tree holds, local and far, but at least [`PERCENT_FLOOR_BYTES`].
    Percent(u32),
}

/// With a percentage, local memory never falls below this: a runtime alone needs it.
pub const PERCENT_FLOOR_BYTES: u64 = 16 << 20;
/// The least local memory that can be asked for; with less, the pager itself would not fit.
pub const LIMIT_MIN_BYTES: u64 = 4 << 20;

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct RunOptions {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Variables of its environment, besides those of this process.
    pub environment: Vec<(String, OsString)>,
    pub local: LocalLimit,
    /// Blade addresses (numeric); empty: a private blade inside the keeper, or the rack's.
    pub blades: Vec<String>,
    /// The rack to take far memory from.
    pub rack: Option<RackOptions>,
    /// Far memory for each process, and the size of a private blade; None: the machine's memory.
    pub quota_bytes: Option<u64>,
    /// A name; on blades that pack, equal pages of runs with the same one are kept once.
    pub share_with: Option<String>,
    pub victim_policy: String,
    pub prefetch_policy: String,
    pub when_full: WhenFull,
    /// 0: one for each CPU.
    pub pager_threads: u32,
    pub threshold_bytes: u64,
    pub deadline: Duration,
    pub allow_remote_tcp: bool,
    /// The certificate that blades are shown; TCP is used only with it then, and TLS.
    pub credentials: Option<Arc<Credentials>>,
    /// When pages are sealed; they are with copies.
    pub seal: SealPolicy,
    /// What is stored beside what is far; None: what the tenant has with the rack, or nothing.
    pub redundancy: Option<Redundancy>,
    /// In this time all that is far and sealed is read once and compared with its seals; None:
    /// never.
    pub verify_every: Option<Duration>,
    /// Where to write the final statistics as JSON.
    pub stats_file: Option<PathBuf>,
    /// Starts the program even if something is missing that it will need when it grows.
    pub no_check: bool,
    /// Prints nothing unless something fails.
    pub quiet: bool,
    pub door: Door,
    pub when_outside: WhenOutside,
    /// The preload library, if it is not beside the executable.
    pub preload: Option<PathBuf>,
}

/// The usual time in which all that is far is verified: memory that nobody reads for a day is found
/// damaged before its other copy is likely to be, too.
pub const VERIFY_EVERY: Duration = Duration::from_secs(24 * 3600);

impl RunOptions {
    /// The usual settings for a program.
    pub fn new(program: impl Into<OsString>, local: LocalLimit) -> RunOptions {
        RunOptions {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            local,
            blades: Vec::new(),
            rack: None,
            quota_bytes: None,
            share_with: None,
            victim_policy: "clock".into(),
            prefetch_policy: "sequential".into(),
            when_full: WhenFull::Slow,
            pager_threads: 0,
            threshold_bytes: 64 << 10,
            deadline: Duration::from_secs(10),
            allow_remote_tcp: false,
            credentials: None,
            seal: SealPolicy::default(),
            redundancy: None,
            verify_every: Some(VERIFY_EVERY),
            stats_file: None,
            no_check: false,
            quiet: false,
            door: Door::default(),
            when_outside: WhenOutside::default(),
            preload: None,
        }
    }
}

/// Why a program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Equal pages can be shared only where a blade sees them.
    #[error(
        "--share-with would share nothing: pages are sealed (by TCP, with --pool or --redundancy), and no \
         two of them are equal then; give --seal never, on machines and networks that are all yours"
    )]
    SharingSealed,
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Board(#[from] farpool_board::BoardError),
    #[error("--door sidecar cannot work here: {0}; {remedy}", remedy = .0.remedy())]
    Door(DoorLack),
    #[error("the private blade cannot be started")]
    Blade(#[from] farpool_blade::ServeError),
    #[error("the certificate is of no use: {0}")]
    Certificate(Refusal),
    #[error("the blade address {address} is not usable: {reason}")]
    Address { address: String, reason: String },
    #[error(
        "--quota {asked} is too small: far memory is lent in pieces of 16 MiB; give at least \
         {SUPERPAGE_BYTES} bytes (16MiB)"
    )]
    QuotaTooSmall { asked: u64 },
    #[error(
        "--redundancy {redundancy} needs blades on {} hosts, and the given ones are of {domains} \
         failure domain{s}: give a further --blade",
        .redundancy.domains(), s = if *.domains == 1 { "" } else { "s" }
    )]
    TooFewDomains { redundancy: Redundancy, domains: usize },
    #[error("--seal never and --redundancy cannot both be: seals tell what is right")]
    UnsealedCopies,
    #[error("{0}. (--no-check starts the program all the same)")]
    BladeCheck(farpool_fabric::ConnectError),
    #[error(transparent)]
    NoBlade(farpool_fabric::ConnectError),
    #[error("the program could use no far memory: {0}; {remedy}. (--no-check starts it all the \
        same)", remedy = .0.remedy())]
    Userfaultfd(UserfaultfdLack),
    #[error(
        "{whose} may have {has} open files, but needs {needs}: raise the limit with ulimit -n \
         {needs} or more (LimitNOFILE= of a service). (--no-check starts the program all the same)"
    )]
    Descriptors { whose: &'static str, has: u64, needs: u64 },
    #[error(
        "this process may write to files of {has} bytes (RLIMIT_FSIZE), and the board of a run \
         has {needs}: lift the \
         limit (ulimit -f unlimited)"
    )]
    SmallFiles { has: u64, needs: u64 },
    #[error(
        "a private blade keeps far memory in files of up to {needs} bytes, and this process may \
         write to files of \
         {has} (RLIMIT_FSIZE): lift the limit (ulimit -f unlimited), give a --quota of no more \
         than that, or a \
         --blade that runs elsewhere"
    )]
    SmallBladeFiles { has: u64, needs: u64 },
    #[error(
        "the program may have {} MiB of address space, of which the pager in it needs {} MiB: \
         raise the limit with ulimit -v, at least by those, or lift it (ulimit -v unlimited). \
         (--no-check starts the program all the same)",
        has >> 20, needs::PAGER_ADDRESS_BYTES >> 20
    )]
    AddressSpace { has: u64 },
    #[error(
        "the statistics cannot be written to {path}: {error}; give --stats a file in a folder that \
         is there and that you may write to"
    )]
    Statistics { path: PathBuf, error: std::io::Error },
    #[error("--local {asked} is too small; give at least {LIMIT_MIN_BYTES} bytes (4MiB)")]
    LimitTooSmall { asked: u64 },
    #[error(
        "no directory for this run: {path}: {error}; set XDG_RUNTIME_DIR to one you may write to"
    )]
    Directory { path: PathBuf, error: std::io::Error },
    #[error(
        "{path} is a link or no folder, and is not followed: remove it, or set XDG_RUNTIME_DIR to \
         a folder of your own"
    )]
    NoFolder { path: PathBuf },
    #[error(
        "{path} belongs to user {owner} and has mode {mode:o}, but must be user {user}'s with mode \
         {wanted:o}: whoever can change that folder can read this program's memory. Remove it, or \
         as its owner chmod {wanted:o} {path}{elsewhere}"
    )]
    SharedFolder {
        path: PathBuf,
        owner: u32,
        mode: u32,
        user: u32,
        wanted: u32,
        elsewhere: &'static str,
    },
    #[error(
        "the preload library is missing: {path}; build it (make build) or install it beside the \
         binary"
    )]
    NoPreload { path: PathBuf },
    #[error(transparent)]
    Rack(#[from] RackError),
    #[error(transparent)]
    Trace(#[from] farpool_trace::TraceError),
    #[error(transparent)]
    BladeChange(#[from] BladeChangeError),
    #[error("there is no process {pid}; it may have ended")]
    NoProcess { pid: u32 },
    #[error(transparent)]
    Sidecar(#[from] SidecarError),
    #[error("process {pid} goes on in local memory: {reason}")]
    NotPaged { pid: u32, reason: String },
    #[error(
        "process {pid} is a thread of the kernel ({name}), which has no memory to be moved; give \
         a program's process"
    )]
    KernelThread { pid: u32, name: String },
    #[error("process {pid} is farpool itself; give the process that is to have less local memory")]
    Oneself { pid: u32 },
    #[error(
        "process 1 is the first of this machine or container, and all others would end with it if \
         anything went wrong; attach to a container's from outside, by its number there"
    )]
    FirstProcess,
    #[error(
        "process {pid} has a pager already: it was attached to, or belongs to a farpool run; \
         farpool limit changes its local memory, and farpool detach ends an attachment"
    )]
    AlreadyPaged { pid: u32 },
    #[error("{pages} pages of process {pid} could not be brought in, and it was ended")]
    Stuck { pid: u32, pages: String },
    #[error(
        "the sidecar of process {pid} has ended, and the process with it, because its far pages \
         could not be fetched any more; please report it, with its last words: {words}"
    )]
    SidecarDied { pid: u32, words: String },
    #[error(
        "process {pid} was started by farpool run with the preloaded library, which cannot leave \
         it; farpool limit gives it more local memory, and farpool core writes a core with what is \
         far"
    )]
    Preloaded { pid: u32 },
    #[error("process {pid} has no sidecar, and all its memory: there is nothing to bring in")]
    NotEntered { pid: u32 },
    #[error(
        "no process of the tree of process {pid} could be entered; the reasons are above. Nothing \
         was changed"
    )]
    NobodyEntered { pid: u32 },
    #[error(
        "process {pid} belongs to no farpool run or attachment that could be left; farpool stat \
         shows what runs"
    )]
    NotAttached { pid: u32 },
    #[error("process {pid} was not left within {seconds} s; its memory is still being brought in")]
    StillThere { pid: u32, seconds: u64 },
    #[error("{what}: {error}")]
    Kernel { what: &'static str, error: std::io::Error },
}
