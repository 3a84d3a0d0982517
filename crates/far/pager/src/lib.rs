//! Page swapping inside a program: keeps the program's far memory within its part of the local limit,
//! moves cold pages to blades and brings them back when they are touched.
//!
//! The pager is threads of the program itself, because UFFDIO_MOVE works only within one address space:
//! * a *steward* ([`steward`]) changes which memory is far;
//! * *fault threads* ([`serve`]), one for each CPU, answer page faults;
//! * an *evictor* ([`evict`]) keeps a reserve of free frames.
//!
//! They have a descriptor table of their own, so nothing the program closes is theirs, block all
//! signals, and use local memory only. The program's own threads call the methods of [`Pager`], which
//! hold no lock that a fault thread could need.
//!
//! A process starts *native*: all is left to the kernel, and the registry only notes which ranges could be
//! far. When the limit of the tree comes near it becomes *active*, once and for good.

mod activation;
pub mod apart;
pub mod attached;
mod blades;
pub mod budget;
pub mod children;
pub mod copies;
mod core;
pub mod crew;
mod density;
mod drain;
mod effort;
pub mod evict;
mod exits;
mod fetch;
mod forget;
pub mod fork;
pub mod frames;
mod gauges;
mod late_pool;
pub mod layout;
pub mod maps;
pub mod moves;
mod order;
pub mod page;
pub mod panics;
pub mod protection;
mod refusals;
pub mod registry;
pub mod requests;
mod resident_map;
mod rest;
pub mod rights;
pub mod serve;
pub mod space;
pub mod standstill;
pub mod steward;
pub mod streams;
pub mod sys;
mod thrash;
mod turn;
mod watch;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use std::sync::{Mutex, MutexGuard};

use farpool_board::{Board, BoardError, ProcessState, Settings, Slot, WhenFull};
use farpool_pool::{ClientId, PoolError};
use farpool_uffd::{OpenError, Pagemap, Uffd, features, register_mode};
use farpool_units::exactly;

use crate::core::{Core, Parts};
use crate::fork::Inheritance;
use crate::registry::Registry;
use crate::requests::{Answer, Kind, Request, Requests};
use crate::rights::Rights;
use crate::space::Space;
use crate::steward::Steward;
use crate::watch::{GrowthDoor, Watch};

pub use crate::sys::is_internal_allocation;

/// A process whose far-eligible memory stays below this, and below a quarter of the limit, gets no
/// pager at all: it costs nothing, and is counted by the keeper.
const START_BYTES: u64 = 96 << 20;
const START_PART: u64 = 4;
/// Why the pager cannot work in this process.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Board(#[from] BoardError),
    #[error(transparent)]
    Userfaultfd(#[from] OpenError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("{0}")]
    Address(String),
    #[error(
        "/proc/self/{file} cannot be opened ({error}): the process has changed its user, or has forbidden looking \
         into it (PR_SET_DUMPABLE), and forked after that; run farpool as the user that the process changes to"
    )]
    Hidden { file: &'static str, error: std::io::Error },
    #[error(
        "there is no /proc/self/{file} in the root directory of the process (chroot), and the pager \
         needs it; mount /proc there (mount -t proc proc ROOT/proc)"
    )]
    NoProc { file: &'static str },
    #[error("the kernel refused local memory or a thread to the pager: {0}")]
    Kernel(#[from] std::io::Error),
    #[error("more processes than a run can have ({} at a time)", farpool_board::MAX_SLOTS)]
    TooManyProcesses,
    #[error(
        "the file system of the run's board (/run/farpool, $XDG_RUNTIME_DIR/farpool or /tmp) has no room for another \
         process; free some space on it (df)"
    )]
    NoRoom,
}

impl StartError {
    fn is_lack_of_descriptors(&self) -> bool {
        let error = match self {
            StartError::Kernel(error)
            | StartError::Userfaultfd(OpenError::Denied { device: error, .. }) => error,
            _ => return false,
        };
        error.raw_os_error() == Some(libc::EMFILE)
    }

    fn of_process(file: &'static str, error: std::io::Error) -> StartError {
        match error.kind() {
            std::io::ErrorKind::PermissionDenied => StartError::Hidden { file, error },
            std::io::ErrorKind::NotFound => StartError::NoProc { file },
            _ => StartError::Kernel(error),
        }
    }
}

/// The pager of one process.
#[derive(Debug)]
pub struct Pager {
    board: &'static Board,
    slot: AtomicPtr<Slot>,
    settings: Settings,
    space: Space,
    /// While the process is native, threads of the program hold this while they use the registry.
    doors: Mutex<()>,
    /// When the process is active, only the pager's threads lock it, and a thread that forks: it waits for this
    /// lock with the gate shut, so nobody who holds it may have a page of his own far.
    registry: Mutex<Registry>,
    requests: Requests,
    inheritance: Inheritance,
    rights: Rights,
    growth: GrowthDoor,
    active: AtomicBool,
    steward_started: AtomicBool,
    /// 1 once a forked child's pager serves faults.
    ready: AtomicU32,
    core: AtomicPtr<Core>,
    start_bytes: u64,
    board_path: &'static Path,
}

impl Pager {
    /// Prepares the pager of this process; starts no thread yet. The value lives for ever.
    pub fn prepare(board_path: &Path) -> Result<&'static Pager, StartError> {
        panics::end_loudly();
        let board: &'static Board = Box::leak(Box::new(Board::open(board_path, true)?));
        Pager::with_board(board, Box::leak(board_path.to_owned().into_boxed_path()))
    }

    fn with_board(
        board: &'static Board,
        board_path: &'static Path,
    ) -> Result<&'static Pager, StartError> {
        let settings = board.header().settings();
        let slot = claim_slot(board)?;
        let start_bytes = START_BYTES.min(settings.limit_bytes / START_PART);
        Ok(Box::leak(Box::new(Pager {
            board,
            slot: AtomicPtr::new(std::ptr::from_ref(slot).cast_mut()),
            settings,
            space: Space::new()?,
            doors: Mutex::default(),
            registry: Mutex::default(),
            requests: Requests::new(),
            inheritance: Inheritance::default(),
            rights: Rights::default(),
            growth: GrowthDoor::default(),
            active: AtomicBool::new(false),
            steward_started: AtomicBool::new(false),
            ready: AtomicU32::new(0),
            core: AtomicPtr::new(std::ptr::null_mut()),
            start_bytes,
            board_path,
        })))
    }

    /// The settings of the run.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether far memory is being served (true for good once it is).
    pub fn is_active(&self) -> bool {
        self.active.load(SeqCst)
    }

    /// Whether an allocation must fail because no blade has memory left and the user chose that.
    pub fn must_refuse(&self) -> bool {
        self.settings.when_full == WhenFull::Fail
            && self.core().is_some_and(|core| core.full.load(Relaxed) || core.refused.load(Relaxed))
    }

    /// `[start, end)` is anonymous private memory that may be far from now on.
    pub fn add(&'static self, start: usize, end: usize) {
        let bytes = self.natively(|registry| {
            registry.add(start, end);
            registry.bytes()
        });
        match bytes {
            Some(bytes) if bytes as u64 >= self.start_bytes => {
                self.start_steward();
                self.before_growth();
            }
            Some(_) => {}
            None => {
                self.ask(Kind::Add, start, end, 0);
            }
        }
    }

    /// As [`Pager::add`], for what a mapping that ended at `start` has grown by.
    pub fn add_to(&self, start: usize, end: usize) {
        let added = self.natively(|registry| {
            let unshared = registry.is_unshared(start - 1, start);
            registry.add(start, end);
            registry.set_unshared(start, end, unshared);
        });
        if added.is_none() {
            self.ask(Kind::Add, start, end, start);
        }
    }

    /// A child of fork gets nothing of `[start, end)`, or all of it again.
    pub fn set_unshared(&self, start: usize, end: usize, unshared: bool) {
        let noted = self.natively(|registry| registry.set_unshared(start, end, unshared));
        if noted.is_none() {
            self.ask(Kind::Unshare, start, end, usize::from(unshared));
        }
    }

    /// `[start, end)` is about to be unmapped or mapped over.
    pub fn remove(&self, start: usize, end: usize) {
        if self.natively(|registry| registry.remove(start, end)).is_none() {
            self.ask(Kind::Remove, start, end, 0);
        }
    }

    /// Discards the contents of `[start, end)` as `madvise` with this advice does. None: the caller
    /// makes the system call itself, for nothing of the process is far.
    pub fn discard(&self, start: usize, end: usize, advice: i32) -> Option<Result<(), i32>> {
        if !self.is_active() {
            return None;
        }
        // Only advice that the caller knows comes here, and that is not negative.
        let extra = exactly(advice);
        let request = Request { kind: Kind::Discard, start, end, extra, more: 0 };
        Some(self.requests.call(request).map(|_| ()))
    }

    /// Keeps `[start, end)` local (mlock), or lets it go again.
    pub fn pin(&self, start: usize, end: usize, pinned: bool) {
        if self.natively(|registry| registry.pin(start, end, pinned)).is_none() {
            self.ask(if pinned { Kind::Pin } else { Kind::Unpin }, start, end, 0);
        }
    }

    /// `[start, end)` is cold.
    pub fn retire(&self, start: usize, end: usize) {
        if self.is_active() {
            self.ask(Kind::Retire, start, end, 0);
        }
    }

    /// Whether any of `[start, end)` may be far.
    pub fn touches_far(&self, start: usize, end: usize) -> bool {
        self.first_far(start, end).is_some()
    }

    /// The first part of `[start, end)` that may be far, as start and end.
    pub fn first_far(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        if let Some(found) = self.natively(|registry| registry.first_in(start, end)) {
            return found;
        }
        let found = self.ask(Kind::FindFar, start, end, 0);
        (found.0 < found.1).then_some(found)
    }

    /// Moves a mapping with everything in it, near and far, to the range of `bytes` at `to` (mremap);
    /// whatever is mapped there is replaced. `keeps`: the old range stays mapped, empty.
    pub fn carry(
        &self,
        start: usize,
        end: usize,
        to: usize,
        bytes: usize,
        keeps: bool,
    ) -> Result<(), i32> {
        let more = bytes | usize::from(keeps);
        self.requests.call(Request { kind: Kind::Carry, start, end, extra: to, more }).map(|_| ())
    }

    /// Lets the kernel move or resize a mapping, while nothing of the process can become far; the new
    /// range takes the old one's place. None: something is far, see [`Pager::carry`].
    pub fn remap_natively(
        &self,
        old: (usize, usize),
        keeps: bool,
        remap: impl FnOnce() -> Option<(usize, usize)>,
    ) -> Option<bool> {
        self.natively(|registry| {
            let Some((start, end)) = remap() else {
                return false;
            };
            let unshared = registry.is_unshared(old.0, old.1);
            if !keeps {
                registry.remove(old.0, old.1);
            }
            registry.add(start, end);
            registry.set_unshared(start, end, unshared);
            true
        })
    }

    fn ask(&self, kind: Kind, start: usize, end: usize, extra: usize) -> Answer {
        self.requests.call(Request { kind, start, end, extra, more: 0 }).unwrap_or_else(|errno| {
            let error = std::io::Error::from_raw_os_error(errno);
            serve::fail_closed(&format!("{kind:?} of far memory failed: {error}"))
        })
    }

    /// Changes the registry directly while the process is native; None when it is active.
    fn natively<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> Option<T> {
        if self.is_active() {
            return None;
        }
        let _signals = sys::SignalGuard::block_all();
        let _doors = self.lock_doors();
        // It may have become active while we waited. As long as we hold the lock it cannot: nothing is far then, our
        // stack neither, and the registry's lock is safe to hold.
        (!self.is_active()).then(|| change(&mut self.lock_registry()))
    }

    fn lock_doors(&self) -> MutexGuard<'_, ()> {
        self.doors.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn lock_registry(&self) -> MutexGuard<'_, Registry> {
        // A panic aborts the process, so the lock is never poisoned.
        self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn slot(&self) -> &'static Slot {
        // SAFETY: always points to a slot of the board, which lives for ever.
        unsafe { &*self.slot.load(Acquire) }
    }

    fn core(&self) -> Option<&'static Core> {
        // SAFETY: null or a leaked Core.
        unsafe { self.core.load(Acquire).as_ref() }
    }

    fn set_active(&self) {
        self.active.store(true, SeqCst);
        self.growth.open();
    }

    fn start_steward(&'static self) {
        if self.steward_started.swap(true, SeqCst) {
            return;
        }
        self.spawn_steward(false);
    }

    fn spawn_steward(&'static self, inherits: bool) {
        let body = Box::new(move || {
            if let Err(error) = self.be_steward(inherits) {
                if !inherits && !self.is_active() && error.is_lack_of_descriptors() {
                    return self.stay_native();
                }
                serve::fail_closed(&format!("far memory cannot be used in this process: {error}"));
            }
        });
        if let Err(error) = sys::spawn(c"farpool-steward", true, body) {
            serve::fail_closed(&format!("the pager's thread cannot be started: {error}"));
        }
    }

    /// Nothing was moved out, and the program can go on; the keeper names it, or ends it.
    fn stay_native(&self) {
        self.slot().set_state(ProcessState::Outside);
        self.growth.open();
    }

    fn be_steward(&'static self, inherits: bool) -> Result<(), StartError> {
        sys::leave_descriptor_table()?;
        let mut watch = Watch::new()?;
        // Opened at once: the program may drop the rights for it later.
        let files = match Files::open() {
            Err(StartError::Hidden { .. }) if !inherits => None,
            files => Some(files?),
        };
        self.rights.set_opened();
        sys::be_prompt(true);
        if !inherits {
            watch.while_small(self);
        }
        let files = match files {
            Some(files) => files,
            None => self.open_at_last(&mut watch)?,
        };
        let core = self.make_core(files, false)?;
        activation::start_threads(self, core)?;
        if inherits {
            core.pool.set(blades::connect(core)?);
            self.inheritance.attach(core)?;
            core.note_fork();
            steward::settle_inherited(self, core);
            activation::activate(self, core);
            self.ready.store(1, SeqCst);
            sys::wake(&self.ready);
        } else {
            watch.until_near(self);
            // What is found out before memory is registered harms nobody.
            sys::find_room_for_files(LATE_FILES)?;
            activation::activate(self, core);
            core.pool.set(blades::connect(core)?);
        }
        sys::be_prompt(false);
        give_duplicate(self.board_path, &core.uffd, self.slot().pid.load(Relaxed))?;
        Steward::new(self, core)?.serve()
    }

    /// A process whose files in /proc are root's may still become another program before it needs them: as most
    /// of those do that changed their user and forked.
    fn open_at_last(&self, watch: &mut Watch) -> Result<Files, StartError> {
        watch.until_near(self);
        Files::open()
    }

    /// `may_execute`: no seccomp filter keeps this process from having executable memory.
    pub(crate) fn make_core(
        &'static self,
        files: Files,
        may_execute: bool,
    ) -> Result<&'static Core, StartError> {
        let Files { uffd, pagemap, memory } = files;
        let parts = Parts {
            uffd,
            pagemap,
            memory,
            settings: self.board.header().settings(),
            board: self.board,
            slot: self.slot(),
            space: &self.space,
            registry: &self.registry,
            executes: may_execute && !sys::denies_execution(),
        };
        let core: &'static Core = Box::leak(Box::new(Core::new(parts)?));
        let (start, bytes) = core.frames.range();
        core.uffd.register(start, bytes, register_mode::MISSING)?;
        self.core.store(std::ptr::from_ref(core).cast_mut(), SeqCst);
        Ok(core)
    }
}

/// What only a process with rights can open.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) uffd: Uffd,
    pub(crate) pagemap: Pagemap,
    pub(crate) memory: OwnedFd,
}

impl Files {
    fn open() -> Result<Files, StartError> {
        let of_process = |file| move |error| StartError::of_process(file, error);
        Ok(Files {
            uffd: Uffd::open(features::PAGER, true)?,
            pagemap: Pagemap::open().map_err(of_process("pagemap"))?,
            memory: sys::open_memory().map_err(of_process("mem"))?,
        })
    }
}

/// Descriptors that are opened when memory is registered already: to the blades, the keeper, and the steward's own. With
/// one fewer a pager with a private blade was stopped; other blades take more.
const LATE_FILES: usize = 4;
/// Name of the keeper's socket, beside the board.
const CUSTODY_SOCKET: &str = "keeper.sock";

/// Leaves a duplicate of the userfaultfd with the keeper, so that it outlives this process if its memory
/// does (a child of vfork). Without a keeper to take it (the board is used on its own) nothing is done.
fn give_duplicate(board: &Path, uffd: &Uffd, pid: u32) -> Result<(), std::io::Error> {
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType,
    };
    let path = board.with_file_name(CUSTODY_SOCKET);
    if !path.exists() {
        return Ok(());
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?)?;
    // Who has the userfaultfd can put pages into this program.
    let keeper = farpool_pool::peer_user(socket.as_fd())?;
    if keeper != 0 && keeper != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other(format!(
            "{} is served by user {}, neither this user nor root, and does not get this program's userfaultfd",
            path.display(),
            keeper
        )));
    }
    let descriptors = [uffd.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let message = pid.to_le_bytes();
    let parts = [std::io::IoSlice::new(&message)];
    rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    // One byte comes back when the keeper has it.
    let mut answer = [0_u8; 1];
    if rustix::io::read(&socket, &mut answer)? != 1 {
        return Err(std::io::Error::other("the keeper did not take the userfaultfd"));
    }
    Ok(())
}

/// A random name for this process on its blades.
fn client_id() -> Result<ClientId, std::io::Error> {
    let mut bytes = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes into a 16 byte buffer.
    let got = unsafe { libc::syscall(libc::SYS_getrandom, bytes.as_mut_ptr(), bytes.len(), 0) };
    if got != 16 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(ClientId(u128::from_le_bytes(bytes)))
}

fn claim_slot(board: &'static Board) -> Result<&'static Slot, StartError> {
    let (pid, ticks) = sys::program_to_keeper().unwrap_or_else(|| {
        let pid = sys::program_pid();
        (pid, start_ticks(pid))
    });
    let lack =
        || if board.lacks_room() { StartError::NoRoom } else { StartError::TooManyProcesses };
    let slot = board.claim(pid, ticks).ok_or_else(lack)?;
    slot.set_name(sys::thread_name().as_bytes());
    Ok(slot)
}

/// Start time of a process (field 22 of its stat), or 0 if it cannot be read.
fn start_ticks(pid: u32) -> u64 {
    use rustix::fs::{Mode, OFlags};
    let read = || -> Option<u64> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let path = format!("/proc/{pid}/stat");
        let file = rustix::fs::open(path.as_str(), flags, Mode::empty()).ok()?;
        let mut buffer = [0_u8; 1024];
        let length = rustix::io::read(&file, &mut buffer).ok()?;
        let text = String::from_utf8_lossy(buffer.get(..length)?).into_owned();
        // The name (field 2) may hold blanks; fields are counted after its closing parenthesis.
        text.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
    };
    read().unwrap_or(0)
}
