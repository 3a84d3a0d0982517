//! The pager of one process: its parts, which the program's threads, the steward and the threads of
//! a sidecar share.

use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use std::sync::{Mutex, MutexGuard};

use farpool_board::{Board, Settings, Slot};
use farpool_kernel::lock;

use crate::core::Core;
use crate::error::StartError;
use crate::life::growth::GrowthDoor;
use crate::life::guest::Guest;
use crate::life::identity::claim_slot;
use crate::life::inheritance::Inheritance;
use crate::life::requests::Requests;
use crate::space::Space;
use crate::space::registry::Registry;
use crate::sys::rights::Rights;

/// A process whose far-eligible memory stays below this, and below a quarter of the limit, gets no
/// pager at all: it costs nothing, and the keeper counts it.
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
    /// When the process is active, only the pager's threads lock it, and a thread that forks: that
    /// one waits for this lock with the gate shut, so no holder may have its own pages far.
    pub(crate) registry: Mutex<Registry>,
    pub(crate) requests: Requests,
    pub(crate) inheritance: Inheritance,
    pub(crate) rights: Rights,
    pub(crate) growth: GrowthDoor,
    pub(crate) guest: Guest,
    pub(crate) active: AtomicBool,
    pub(crate) steward_started: AtomicBool,
    /// 1 once a forked child's pager serves faults.
    pub(crate) ready: AtomicU32,
    pub(crate) core: AtomicPtr<Core>,
    pub(crate) start_bytes: u64,
    pub(crate) board_path: &'static Path,
}

impl Pager {
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
            guest: Guest::default(),
            active: AtomicBool::new(false),
            steward_started: AtomicBool::new(false),
            ready: AtomicU32::new(0),
            core: AtomicPtr::new(std::ptr::null_mut()),
            start_bytes,
            board_path,
        })))
    }

    /// Whether far memory is being served (once true, for good).
    pub fn is_active(&self) -> bool {
        self.active.load(SeqCst)
    }

    pub(crate) fn lock_doors(&self) -> MutexGuard<'_, ()> {
        lock(&self.doors)
    }

    pub(crate) fn lock_registry(&self) -> MutexGuard<'_, Registry> {
        // A panic aborts the process, so the lock is never poisoned.
        lock(&self.registry)
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

    /// False in a child of vfork, which runs on its parent's memory: the threads are not its own,
    /// and it soon becomes another program.
    pub(crate) fn is_of_this_process(&self) -> bool {
        let pid = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        self.slot().pid.load(Relaxed) == pid
    }
}
