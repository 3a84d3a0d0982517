//! The pager of one process, as the program's own threads call it.

use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use std::sync::{Mutex, MutexGuard};

use farpool_board::{Board, ProcessState, Settings, Slot, WhenFull};
use farpool_uffd::register_mode;
use farpool_units::exactly;

use crate::core::{Core, Parts};
use crate::error::StartError;
use crate::life::custody::give_duplicate;
use crate::life::files::{Files, LATE_FILES};
use crate::life::fork::Inheritance;
use crate::life::identity::claim_slot;
use crate::life::requests::{Answer, Kind, Request, Requests};
use crate::life::steward::{self, Steward};
use crate::life::watch::{GrowthDoor, Watch};
use crate::life::{activation, blades};
use crate::space::Space;
use crate::space::registry::Registry;
use crate::sys::rights::Rights;
use crate::{abort, sys};

/// A process whose far-eligible memory stays below this, and below a quarter of the limit, gets no
/// pager at all: it costs nothing, and is counted by the keeper.
const START_BYTES: u64 = 96 << 20;
const START_PART: u64 = 4;

/// The pager of one process.
#[derive(Debug)]
pub struct Pager {
    pub(crate) board: &'static Board,
    pub(crate) slot: AtomicPtr<Slot>,
    pub(crate) settings: Settings,
    pub(crate) space: Space,
    /// While the process is native, threads of the program hold this while they use the registry.
    pub(crate) doors: Mutex<()>,
    /// When the process is active, only the pager's threads lock it, and a thread that forks: it waits for this
    /// lock with the gate shut, so nobody who holds it may have a page of his own far.
    pub(crate) registry: Mutex<Registry>,
    pub(crate) requests: Requests,
    pub(crate) inheritance: Inheritance,
    pub(crate) rights: Rights,
    pub(crate) growth: GrowthDoor,
    pub(crate) active: AtomicBool,
    pub(crate) steward_started: AtomicBool,
    /// 1 once a forked child's pager serves faults.
    pub(crate) ready: AtomicU32,
    pub(crate) core: AtomicPtr<Core>,
    pub(crate) start_bytes: u64,
    pub(crate) board_path: &'static Path,
}

impl Pager {
    /// Prepares the pager of this process; starts no thread yet. The value lives for ever.
    pub fn prepare(board_path: &Path) -> Result<&'static Pager, StartError> {
        abort::end_loudly();
        let board: &'static Board = Box::leak(Box::new(Board::open(board_path, true)?));
        Pager::with_board(board, Box::leak(board_path.to_owned().into_boxed_path()))
    }

    pub(crate) fn with_board(
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

    pub(crate) fn ask(&self, kind: Kind, start: usize, end: usize, extra: usize) -> Answer {
        self.requests.call(Request { kind, start, end, extra, more: 0 }).unwrap_or_else(|errno| {
            let error = std::io::Error::from_raw_os_error(errno);
            abort::fail_closed(&format!("{kind:?} of far memory failed: {error}"))
        })
    }

    /// Changes the registry directly while the process is native; None when it is active.
    pub(crate) fn natively<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> Option<T> {
        if self.is_active() {
            return None;
        }
        let _signals = sys::SignalGuard::block_all();
        let _doors = self.lock_doors();
        // It may have become active while we waited. As long as we hold the lock it cannot: nothing is far then, our
        // stack neither, and the registry's lock is safe to hold.
        (!self.is_active()).then(|| change(&mut self.lock_registry()))
    }

    pub(crate) fn lock_doors(&self) -> MutexGuard<'_, ()> {
        self.doors.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn lock_registry(&self) -> MutexGuard<'_, Registry> {
        // A panic aborts the process, so the lock is never poisoned.
        self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn slot(&self) -> &'static Slot {
        // SAFETY: always points to a slot of the board, which lives for ever.
        unsafe { &*self.slot.load(Acquire) }
    }

    pub(crate) fn core(&self) -> Option<&'static Core> {
        // SAFETY: null or a leaked Core.
        unsafe { self.core.load(Acquire).as_ref() }
    }

    pub(crate) fn set_active(&self) {
        self.active.store(true, SeqCst);
        self.growth.open();
    }

    pub(crate) fn start_steward(&'static self) {
        if self.steward_started.swap(true, SeqCst) {
            return;
        }
        self.spawn_steward(false);
    }

    pub(crate) fn spawn_steward(&'static self, inherits: bool) {
        let body = Box::new(move || {
            if let Err(error) = self.be_steward(inherits) {
                if !inherits && !self.is_active() && error.is_lack_of_descriptors() {
                    return self.stay_native();
                }
                abort::fail_closed(&format!("far memory cannot be used in this process: {error}"));
            }
        });
        if let Err(error) = sys::spawn(c"farpool-steward", true, body) {
            abort::fail_closed(&format!("the pager's thread cannot be started: {error}"));
        }
    }

    /// Nothing was moved out, and the program can go on; the keeper names it, or ends it.
    fn stay_native(&self) {
        self.slot().set_state(ProcessState::Outside);
        self.growth.open();
    }

    pub(crate) fn be_steward(&'static self, inherits: bool) -> Result<(), StartError> {
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
