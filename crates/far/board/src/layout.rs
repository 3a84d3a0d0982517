//! The layout of the board.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use farpool_policy::redundancy::Redundancy;
use farpool_wire::SharingGroup;

use crate::blades::{self, BladeOffer, BladeTable};
use crate::histogram::Histogram;
use crate::redundancy::{number_of, of_number};
use crate::words::{BLADE_ENTRIES, load_text, store_text};

/// Most processes of one run at a time; a further one is ended with a message.
pub const MAX_SLOTS: usize = 1024;
/// Kinds of memory that cannot be moved; the keeper defines them.
pub const UNMOVABLE_KINDS: usize = 7;
/// Bytes of a name; longer ones are cut.
const NAME_BYTES: usize = 64;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"farpool\x01");
/// Raised whenever the layout changes; programs and keeper come from one build, `stat` may not.
pub const VERSION: u32 = 17;

/// What happens to a program that needs more far memory than the blades give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// Allocations fail with ENOMEM.
    Fail,
    /// The program goes on with the far memory it has, slower and slower.
    Slow,
}

/// Whether pages are sealed before they leave a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Sealing {
    /// All are, wherever they go.
    Sealed = 1,
    /// None is, and none may pass a network.
    PlainOnThisHost = 2,
    /// None is, wherever it goes.
    Plain = 3,
}

impl Sealing {
    fn from_number(number: u32) -> Option<Sealing> {
        let all = [Sealing::Sealed, Sealing::PlainOnThisHost, Sealing::Plain];
        all.into_iter().find(|it| *it as u32 == number)
    }
}

/// The settings of one run, in plain values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Local memory of the whole process tree; with `local_percent` the least it may be.
    pub limit_bytes: u64,
    /// If not 0, local memory is this share of all memory that the tree holds, local and far.
    pub local_percent: u32,
    /// Far memory each process may take from the blades.
    pub quota_bytes: u64,
    /// Whose pages blades that pack may share with the run's.
    pub sharing_group: Option<SharingGroup>,
    /// The blades at the start.
    pub blades: Vec<BladeOffer>,
    pub allow_remote_tcp: bool,
    /// TCP is used only with the certificates of the run.
    pub secures_tcp: bool,
    pub sealing: Sealing,
    /// What is stored beside each superpage; anything of sealed pages only.
    pub redundancy: Redundancy,
    pub when_full: WhenFull,
    pub victim_policy: String,
    pub prefetch_policy: String,
    /// Fault-serving threads of each process; 0 = one for each core.
    pub pager_threads: u32,
    /// Anonymous mappings from this size up are far.
    pub threshold_bytes: u64,
    /// A request unanswered for this long means that its blade is lost.
    pub deadline_ms: u64,
    /// In this time all far memory is read once and compared with its seals; 0: never.
    pub verify_every_ms: u64,
    /// The run's name in `farpool stat`.
    pub program: String,
}

/// First page of the file.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub keeper_pid: AtomicU32,
    /// Can be changed while the program runs; see [`Settings::limit_bytes`].
    pub limit_bytes: AtomicU64,
    pub local_percent: AtomicU32,
    pub(crate) allow_remote_tcp: AtomicU32,
    pub(crate) secures_tcp: AtomicU32,
    pub(crate) sealing: AtomicU32,
    pub(crate) redundancy: AtomicU32,
    pub(crate) when_full: AtomicU32,
    pub(crate) pager_threads: AtomicU32,
    pub(crate) quota_bytes: AtomicU64,
    pub(crate) sharing_group: AtomicU64,
    pub(crate) threshold_bytes: AtomicU64,
    pub(crate) deadline_ms: AtomicU64,
    pub(crate) verify_every_ms: AtomicU64,
    /// Resident pages of the tree that no process publishes; written by the keeper.
    pub unpublished_pages: AtomicU64,
    /// Pages, and number, of processes of the tree that have no pager and can have none; written by
    /// the keeper.
    pub outside_pages: AtomicU64,
    pub outside_processes: AtomicU32,
    /// The period in which uses of pages are counted: each pager starts anew when the number
    /// changes; written by the keeper.
    pub use_epoch: AtomicU32,
    /// Local memory that would hold what the tree works on, while that does not fit; 0 while it
    /// does, or is not known.
    pub working_set_pages: AtomicU64,
    /// Nonzero if not all of it has been seen yet.
    pub working_set_is_guess: AtomicU32,
    /// What was resident and could not be moved at the keeper's last check, by kind.
    pub unmovable_pages: [AtomicU64; UNMOVABLE_KINDS],
    /// Which process is served first while the tree thrashes, and until when; the pager's own
    /// format.
    pub turn: AtomicU64,
    /// Slots from this number on were never claimed, which keeps scans of all processes short.
    pub(crate) slots_used: AtomicU32,
    /// Slots from this number on have no blocks on the file system yet and must not be touched.
    pub(crate) slots_backed: AtomicU32,
    /// Processes that found no slot because the file system had no room for another; the keeper
    /// reports it.
    pub processes_without_room: AtomicU32,
    /// Set once a message about a full pool was printed, so that a tree prints it once.
    pub full_reported: AtomicU32,
    /// One bit for each entry of the table of blades: it was reported as unusable or as taking no
    /// pages.
    pub blades_reported: AtomicU32,
    /// By how many bytes local memory was over its limit when that was last reported; 0 if it was
    /// not.
    pub overrun_reported_bytes: AtomicU64,
    pub(crate) program: [AtomicU8; NAME_BYTES],
    pub(crate) victim_policy: [AtomicU8; NAME_BYTES],
    pub(crate) prefetch_policy: [AtomicU8; NAME_BYTES],
    /// The blades; the keeper changes them while the program runs.
    pub blades: BladeTable,
}

const _: () = assert!(size_of::<Header>() == 4096);

/// How a process is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ProcessState {
    /// Everything is local and left to the kernel.
    Native = 1,
    /// The pager serves its faults.
    Active = 2,
    /// As [`ProcessState::Native`], for good: its pager found that it may open too few files.
    Outside = 3,
}

/// What is counted for each process. All but the gauges only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Faults the pager took.
    Faults,
    /// Of these: first touches, answered with zero pages.
    ZeroFills,
    /// Of these: pages taken back from the victim buffer.
    VictimHits,
    /// Pages brought from a blade because they were touched.
    DemandFetches,
    /// Pages brought from a blade ahead of their touch.
    Prefetches,
    /// Pages moved out of the program.
    Evictions,
    /// Pages written to a blade.
    PagesWritten,
    /// Pages moved out without being written, because the blade has them unchanged.
    CleanDrops,
    /// Pages that could not be moved out (pinned by the kernel, changed protection, ...).
    Refused,
    /// Pages lost with their blade: touching one is a SIGBUS.
    Lost,
    /// Times that local memory went over the limit because nothing could be evicted in time.
    Overruns,
    /// Calls by which the program gave up registered memory (madvise), as reported to a sidecar.
    GiveUps,
    /// Times that a piece of memory was left unregistered for a while, because it was given up
    /// again and again.
    Rests,
    /// Times that the program was stopped for its pager: to move out memory that may not be written
    /// to, or to be certain of what it did to its memory.
    Standstills,
    /// Gauge: pages resident in this process (its anonymous resident set).
    ResidentPages,
    /// Gauge: pages of this process that are on a blade.
    FarPages,
    /// Gauge: resident pages the pager may evict.
    EvictablePages,
    /// Gauge: pages in the victim buffer and in reserve.
    BufferPages,
    /// Gauge: resident pages of files and shared memory.
    SharedPages,
    /// Gauge: resident pages of the pager itself (tables, stacks of requests, its allocator),
    /// without the victim buffer.
    PagerPages,
    /// Gauge: threads of a native process that grew at the last check; 0 if it did not.
    GrowingThreads,
    /// Gauge: pages fetched in the last tenth of a second by a process that did little else; 0 if
    /// it did more.
    StalledFetches,
    /// Pages that first touches were answered with, including those after the touched one.
    PagesZeroed,
    /// Chunks that pages were moved out of: how often the kernel was called.
    EvictedChunks,
    /// Pages fetched, or prefetched, for the first time since uses are counted
    /// ([`Header::use_epoch`]).
    FirstReturns,
    /// Gauge: pages that came back since then, and are out again.
    UsedAwayPages,
    /// Gauge: neighbouring mappings of equal protection that the kernel keeps apart, so that mremap
    /// of more than one fails.
    SplitMappings,
    /// Gauge: resident anonymous pages that could not be moved at the keeper's last check; written
    /// by the keeper.
    PinnedPages,
    /// Gauge: 1 while no blade gives this process more memory or takes pages of it.
    WithoutRoom,
    /// Gauge: resident anonymous pages that are counted for other processes, which share them since
    /// a fork.
    ElsewherePages,
    /// Gauge: superpages with fewer copies on blades that live than they are to have.
    DegradedSuperpages,
    /// Far pages that were read to verify them, of each copy, and were what was stored.
    VerifiedPages,
    /// Those that were not.
    DamagedPages,
    /// Copies of superpages that were damaged, given up and made anew.
    ReplacedCopies,
    /// Reads that were asked of a second copy, since the first one was late.
    HedgedReads,
}

/// The counters that hold a present value.
const GAUGES: [Counter; 14] = [
    Counter::ResidentPages,
    Counter::FarPages,
    Counter::EvictablePages,
    Counter::BufferPages,
    Counter::SharedPages,
    Counter::PagerPages,
    Counter::GrowingThreads,
    Counter::StalledFetches,
    Counter::UsedAwayPages,
    Counter::SplitMappings,
    Counter::PinnedPages,
    Counter::WithoutRoom,
    Counter::ElsewherePages,
    Counter::DegradedSuperpages,
];

impl Counter {
    /// True if it holds a present value, and does not only grow.
    pub fn is_gauge(self) -> bool {
        GAUGES.contains(&self)
    }
}

/// Number of counters.
pub(crate) const COUNTER_COUNT: usize = Counter::HedgedReads as usize + 1;

/// One process on the board.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    /// 0 if free. Claimed by compare-and-swap.
    pub pid: AtomicU32,
    pub(crate) state: AtomicU32,
    /// Start time of the process in clock ticks (field 22 of /proc/pid/stat): distinguishes a
    /// reused pid.
    pub start_ticks: AtomicU64,
    pub(crate) name: [AtomicU8; NAME_BYTES],
    counters: [AtomicU64; COUNTER_COUNT],
    /// Latency of a fault that needed a fetch, from the message to the wake.
    pub fetch_latency: Histogram,
    /// Latency of every other fault.
    pub other_latency: Histogram,
    /// Pages that this process may still take before it checks the budget again.
    pub allowance_pages: AtomicI64,
    /// Version of the table of blades that this process follows; 0 while it has no pool,
    /// [`CONNECTING`](crate::CONNECTING) while it is about to have one.
    pub blades_version: AtomicU32,
    /// Entries of the table on which this process has nothing, as bits; of the version above.
    pub blades_left: AtomicU32,
    /// Entries that this process cannot leave, because no other blade has room, as bits; and
    /// [`GROUPS_CROWDED`](crate::GROUPS_CROWDED).
    pub blades_stuck: AtomicU32,
}

impl Slot {
    pub fn add(&self, counter: Counter, amount: u64) {
        self.counters[counter as usize].fetch_add(amount, Relaxed);
    }

    pub fn set(&self, counter: Counter, value: u64) {
        self.counters[counter as usize].store(value, Relaxed);
    }

    pub fn get(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Relaxed)
    }

    pub fn set_state(&self, state: ProcessState) {
        self.state.store(state as u32, Relaxed);
    }

    pub fn state(&self) -> ProcessState {
        let state = self.state.load(Relaxed);
        let known = [ProcessState::Active, ProcessState::Outside];
        known.into_iter().find(|known| *known as u32 == state).unwrap_or(ProcessState::Native)
    }

    pub fn set_name(&self, name: &[u8]) {
        store_text(&self.name, name);
    }

    pub fn name(&self) -> String {
        load_text(&self.name)
    }

    /// The process goes on without a pager: gauges are reset, what was counted stays.
    pub fn lose_pager(&self) {
        GAUGES.iter().for_each(|gauge| self.set(*gauge, 0));
        self.blades_version.store(0, Relaxed);
        self.blades_left.store(0, Relaxed);
        self.blades_stuck.store(0, Relaxed);
        self.set_state(ProcessState::Native);
    }

    pub(crate) fn clear(&self) {
        self.counters.iter().for_each(|counter| counter.store(0, Relaxed));
        self.state.store(ProcessState::Native as u32, Relaxed);
        self.allowance_pages.store(0, Relaxed);
        self.blades_version.store(0, Relaxed);
        self.blades_left.store(0, Relaxed);
        self.blades_stuck.store(0, Relaxed);
        self.fetch_latency.clear();
        self.other_latency.clear();
        store_text(&self.name, b"");
    }
}

impl Header {
    pub(crate) fn store(&self, settings: &Settings) {
        self.limit_bytes.store(settings.limit_bytes, Relaxed);
        self.local_percent.store(settings.local_percent, Relaxed);
        self.quota_bytes.store(settings.quota_bytes, Relaxed);
        let group = settings.sharing_group.map_or(0, |group| group.0.get());
        self.sharing_group.store(group, Relaxed);
        self.allow_remote_tcp.store(u32::from(settings.allow_remote_tcp), Relaxed);
        self.secures_tcp.store(u32::from(settings.secures_tcp), Relaxed);
        self.sealing.store(settings.sealing as u32, Relaxed);
        self.redundancy.store(number_of(settings.redundancy), Relaxed);
        self.when_full.store(u32::from(settings.when_full == WhenFull::Fail), Relaxed);
        self.pager_threads.store(settings.pager_threads, Relaxed);
        self.threshold_bytes.store(settings.threshold_bytes, Relaxed);
        self.deadline_ms.store(settings.deadline_ms, Relaxed);
        self.verify_every_ms.store(settings.verify_every_ms, Relaxed);
        store_text(&self.program, settings.program.as_bytes());
        store_text(&self.victim_policy, settings.victim_policy.as_bytes());
        store_text(&self.prefetch_policy, settings.prefetch_policy.as_bytes());
        for blade in &settings.blades {
            self.blades.add(blade); // `check` has counted them
        }
    }

    /// The present settings.
    pub fn settings(&self) -> Settings {
        let fail = self.when_full.load(Relaxed) != 0;
        Settings {
            limit_bytes: self.limit_bytes.load(Relaxed),
            local_percent: self.local_percent.load(Relaxed),
            quota_bytes: self.quota_bytes.load(Relaxed),
            sharing_group: NonZeroU64::new(self.sharing_group.load(Relaxed)).map(SharingGroup),
            blades: self.blades.offers(),
            allow_remote_tcp: self.allow_remote_tcp.load(Relaxed) != 0,
            secures_tcp: self.secures_tcp.load(Relaxed) != 0,
            // What nobody wrote must not be taken for leave to send pages as they are.
            sealing: Sealing::from_number(self.sealing.load(Relaxed)).unwrap_or(Sealing::Sealed),
            redundancy: of_number(self.redundancy.load(Relaxed))
                .expect("the keeper has written what a run stores beside what is far"),
            when_full: if fail { WhenFull::Fail } else { WhenFull::Slow },
            victim_policy: load_text(&self.victim_policy),
            prefetch_policy: load_text(&self.prefetch_policy),
            pager_threads: self.pager_threads.load(Relaxed),
            threshold_bytes: self.threshold_bytes.load(Relaxed),
            deadline_ms: self.deadline_ms.load(Relaxed),
            verify_every_ms: self.verify_every_ms.load(Relaxed),
            program: load_text(&self.program),
        }
    }
}

/// Checks that the settings fit the board. The error names the field.
pub(crate) fn check(settings: &Settings) -> Result<(), &'static str> {
    let fits = |blade: &BladeOffer| blades::address_fits(&blade.address);
    if settings.blades.len() > BLADE_ENTRIES || !settings.blades.iter().all(fits) {
        return Err("the blade addresses");
    }
    for (text, field) in [
        (&settings.victim_policy, "the victim policy's name"),
        (&settings.prefetch_policy, "the prefetch policy's name"),
    ] {
        if text.len() >= NAME_BYTES {
            return Err(field);
        }
    }
    Ok(())
}
