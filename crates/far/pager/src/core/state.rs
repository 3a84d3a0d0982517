//! The core: everything that the fault, eviction and steward threads of one process share.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU16};
use std::time::Duration;

use farpool_board::{Board, Counter, Settings, Slot};
use farpool_kernel::lock;
use farpool_pool::SegmentPage;
use farpool_uffd::{Pagemap, Uffd, features};
use farpool_units::PAGE_BYTES;

use crate::core::gate::Gate;
use crate::core::layers::Layers;
use crate::shared::budget::Budget;
use crate::shared::crew::Crew;
use crate::shared::late_pool::LatePool;
use crate::shared::streams::Streams;
use crate::space::copies::Copies;
use crate::space::frames::Frames;
use crate::space::layout::Layout;
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_PAGES, NO_TRAY};
use crate::space::way::Way;
use crate::space::{Page, Space, moves};
use crate::sys::standstill::Standstill;
use crate::sys::{Latch, Protection};

/// How often threads check the deadlines of their requests in flight.
pub const EXPIRY_STEP: Duration = Duration::from_millis(100);

/// Ranges that may wait to be moved out because the program advised it; further advice is ignored.
const MAX_RETIRED: usize = 4096;

/// Given-up ranges that are noted for the steward's next check; more are left out.
const MAX_GIVEN_UP: usize = 1024;

/// Everything the fault, eviction and steward threads of one process share. Lives for ever.
#[derive(Debug)]
pub struct Core {
    pub uffd: Uffd,
    pub pagemap: Pagemap,
    /// The program's memory as a file, see [`crate::sys::read_program`].
    pub memory: OwnedFd,
    pub pool: LatePool,
    pub frames: Frames,
    pub copies: Copies,
    pub layers: Layers,
    pub layout: Layout,
    pub budget: Budget,
    pub gate: Gate,
    pub streams: Streams,
    pub crew: Crew,
    pub settings: Settings,
    pub board: &'static Board,
    pub slot: &'static Slot,
    pub space: &'static Space,
    pub registry: &'static Mutex<Registry>,
    /// A blade refused memory; allocations may have to fail.
    pub full: AtomicBool,
    /// Nothing could be evicted at the last try, and no frame is free: waiting for one would be in
    /// vain.
    pub barren: AtomicBool,
    /// The process has no more than it may keep in any case: it gets the memory it needs without
    /// waiting.
    pub least: AtomicBool,
    /// It is another process's turn; memory is free for this one when that turn is over, see
    /// [`crate::shared::turn`].
    pub out_of_turn: AtomicBool,
    /// Held while the message is written, so that no other thread's SIGBUS ends the process first.
    pub(super) loss_reported: Mutex<bool>,
    /// Pages were shared with a parent or a child, or merged by KSM: writing to them takes memory
    /// without a fault that the pager sees.
    pub shares: AtomicBool,
    /// Ranges that the program does not need soon, for the evictor.
    retired: Mutex<Vec<(usize, usize)>>,
    /// Memory is registered.
    pub registered: Latch,
    /// Much of the program's memory cannot be moved out (locked, or of other rights): an overrun of
    /// the limit then lasts, and no thread waits for free memory.
    pub is_unmovable: AtomicBool,
    /// Moments in which the program stands still.
    pub standstill: Standstill,
    /// No blade takes pages, and that will last: threads that need memory get it without waiting,
    /// over the limit.
    pub refused: AtomicBool,
    /// Everything is being brought in; nothing is moved out any more.
    pub leaving: AtomicBool,
    /// A range of the registry that was found not to be registered, at least in part; (0, 0) =
    /// none.
    mistrusted: Mutex<(usize, usize)>,
    /// Ranges that the program gave up and that were applied at once, for the steward to see;
    /// ranges that do not fit are left out.
    given_up: Mutex<Vec<Range<usize>>>,
    /// The tray that the evictor is moving pages into; [`NO_TRAY`] = none.
    pub filling: AtomicU16,
}

/// What a core is made of.
#[derive(Debug)]
pub struct Parts {
    pub uffd: Uffd,
    pub pagemap: Pagemap,
    pub memory: OwnedFd,
    pub settings: Settings,
    pub board: &'static Board,
    pub slot: &'static Slot,
    pub space: &'static Space,
    pub registry: &'static Mutex<Registry>,
    /// This process may have executable memory.
    pub executes: bool,
}

impl Core {
    pub fn new(parts: Parts) -> Result<Core, std::io::Error> {
        let follows = parts.uffd.features() & features::EVENT_REMOVE != 0;
        let frames = Frames::new(!follows, follows && parts.executes)?;
        Ok(Core {
            layout: Layout::new(follows, frames.range()),
            uffd: parts.uffd,
            pagemap: parts.pagemap,
            memory: parts.memory,
            pool: LatePool::default(),
            frames,
            copies: Copies::new(
                !parts.settings.blades.iter().all(|blade| blade.address.starts_with("shm://")),
            )?,
            layers: Layers::default(),
            budget: Budget::new()?,
            gate: Gate::default(),
            streams: Streams::new(&parts.settings),
            crew: Crew::new(),
            settings: parts.settings,
            board: parts.board,
            slot: parts.slot,
            space: parts.space,
            registry: parts.registry,
            full: AtomicBool::new(false),
            barren: AtomicBool::new(false),
            least: AtomicBool::new(false),
            out_of_turn: AtomicBool::new(false),
            loss_reported: Mutex::new(false),
            shares: AtomicBool::new(false),
            retired: Mutex::default(),
            registered: Latch::default(),
            is_unmovable: AtomicBool::new(false),
            standstill: Standstill::default(),
            refused: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            filling: AtomicU16::new(NO_TRAY),
            mistrusted: Mutex::default(),
            given_up: Mutex::new(Vec::with_capacity(MAX_GIVEN_UP)),
        })
    }

    /// How memory with these rights is moved out.
    pub fn way(&self, protection: Protection) -> Way {
        protection.way(self.frames.can_execute())
    }

    /// Whether memory with these rights can be far, and is worth it: memory that the program may
    /// not touch at all is mostly address space.
    pub fn is_movable(&self, protection: Protection) -> bool {
        protection.is_some() && self.way(protection) != Way::Nowhere
    }

    /// Notes that the registry is wrong about part of a range, so that the steward reads the
    /// mappings again.
    pub fn mistrust(&self, start: usize, end: usize) {
        *lock(&self.mistrusted) = (start, end);
        self.layout.ring();
    }

    /// Takes the range that the registry is wrong about.
    pub fn take_mistrusted(&self) -> Option<(usize, usize)> {
        let mut range = lock(&self.mistrusted);
        let (start, end) = std::mem::take(&mut *range);
        (start < end).then_some((start, end))
    }

    /// Notes a range that was given up and applied at once. Never waits for the lock.
    pub fn note_given_up(&self, range: Range<usize>) {
        if let Ok(mut given_up) = self.given_up.try_lock()
            && given_up.len() < MAX_GIVEN_UP
        {
            given_up.push(range);
        }
    }

    /// Takes the ranges that were given up and applied at once since the last call.
    pub fn take_given_up(&self, into: &mut Vec<Range<usize>>) {
        let mut given_up = lock(&self.given_up);
        into.append(&mut given_up);
    }

    /// Whether the evictor is moving a chunk out and has this page of it.
    pub fn is_moved_out(&self, page: Page) -> bool {
        let tray = self.filling.load(SeqCst);
        if tray == NO_TRAY {
            return false;
        }
        let frame = self.frames.tray_address(tray) + page.index % CHUNK_PAGES * PAGE_BYTES;
        moves::occupied(&self.pagemap, frame, 1) != 0
    }

    /// Notes that a fork, or KSM, shares the process's pages from now on.
    pub fn note_sharing(&self) {
        self.shares.store(true, Relaxed);
        self.crew.note_shared_memory();
    }

    /// Whether waiting for the evictor would be in vain.
    pub fn is_vain(&self) -> bool {
        self.full.load(Relaxed) || self.barren.load(Relaxed) || self.refused.load(Relaxed)
    }

    pub fn count(&self, counter: Counter, amount: u64) {
        self.slot.add(counter, amount);
    }

    /// Asks the evictor to move all of a range out soon.
    pub fn retire(&self, start: usize, end: usize) {
        if let Ok(mut retired) = self.retired.lock()
            && retired.len() < MAX_RETIRED
            && !retired.contains(&(start, end))
        {
            retired.push((start, end));
        }
        self.budget.kick();
    }

    /// Takes the ranges to move out.
    pub fn take_retired(&self) -> Vec<(usize, usize)> {
        self.retired.lock().map(|mut retired| std::mem::take(&mut *retired)).unwrap_or_default()
    }

    /// Where a page's copy is, if its layer exists.
    pub fn place(&self, page: Page, layer: usize) -> Option<SegmentPage> {
        Some(SegmentPage { segment: self.layers.segment(layer)?, page: page.segment_page() })
    }

    /// Whether a copy of the page in a layer can be relied on: its blade is not known to be lost.
    pub fn has_place(&self, page: Page, layer: usize) -> bool {
        let segment = self.layers.segment(layer);
        segment.is_some_and(|segment| self.pool.can_store(segment, page.superpage.id()))
    }
}
