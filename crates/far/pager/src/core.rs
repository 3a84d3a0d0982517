//! What all threads of an active pager share.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use farpool_board::{Board, Counter, Settings, Slot};
use farpool_pool::{BladeIndex, Pool, PoolError, SegmentHandle, SegmentPage};
use farpool_uffd::{Outcome, Pagemap, Uffd, features};
use farpool_units::{PAGE_BYTES, exactly};

use crate::abort::fail_closed;
use crate::evict::budget::{Budget, Tree, limit_pages};
use crate::fault::crew::Crew;
use crate::fault::streams::Streams;
use crate::life::late_pool::LatePool;
use crate::space::copies::Copies;
use crate::space::forget::give_up;
use crate::space::frames::Frames;
use crate::space::layout::Layout;
use crate::space::page::MAX_LAYERS;
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_PAGES, NO_TRAY};
use crate::space::way::Way;
use crate::space::{Page, Space, moves};
use crate::sys::standstill::Standstill;
use crate::sys::{self, Latch, Protection};

/// Threads look at the deadlines of what they have in flight this often.
pub const EXPIRY_STEP: Duration = Duration::from_millis(100);

/// Ranges that wait to be moved out because the program advised it; what it advises beyond is not heeded.
const MAX_RETIRED: usize = 4096;

/// Of what the program gives up between two looks of the steward.
const MAX_GIVEN_UP: usize = 1024;

/// Everything the fault, eviction and steward threads of one process share. Lives for ever.
#[derive(Debug)]
pub struct Core {
    pub uffd: Uffd,
    pub pagemap: Pagemap,
    /// The program's memory as a file, see [`sys::read_program`].
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
    /// Nothing could be evicted at the last try, and no frame is free: waiting for one would be in vain.
    pub barren: AtomicBool,
    /// The process has no more than it may keep in any case: it gets what it needs without waiting.
    pub least: AtomicBool,
    /// It is another process's turn: room comes when that is over, see [`crate::evict::turn`].
    pub out_of_turn: AtomicBool,
    /// Held while the message is written, so that no other thread's SIGBUS ends the process before.
    loss_reported: Mutex<bool>,
    /// Pages were shared with a parent or a child: writing to them takes memory without a fault that the
    /// pager sees.
    pub shares: AtomicBool,
    /// Ranges the program gave up for now, for the evictor.
    retired: Mutex<Vec<(usize, usize)>>,
    /// Memory is registered.
    pub registered: Latch,
    /// Much of the program's memory cannot be moved out (locked, or of other rights): what is over the limit then is over
    /// it for good, and nobody waits for room.
    pub is_unmovable: AtomicBool,
    /// Moments in which the program stands still.
    pub standstill: Standstill,
    /// No blade takes pages, and that will last: who needs memory gets it without waiting, over the limit.
    pub refused: AtomicBool,
    /// Everything is being brought in: nothing is moved out any more.
    pub leaving: AtomicBool,
    /// A range that the registry has and that was found not to be registered, at least in part; (0, 0) = none.
    mistrusted: Mutex<(usize, usize)>,
    /// What the program gave up and was applied at once, for the steward to see; what is beyond its room is left out.
    given_up: Mutex<Vec<Range<usize>>>,
    /// The tray that the evictor is moving pages into; [`NO_TRAY`] = none.
    pub filling: AtomicU16,
}

/// Who moves pages, see [`crate::space::layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// Reads messages, and so the changes that its calls have to wait for.
    FaultThread,
    Evictor,
    /// Applies changes: only those that come after the one in hand concern it, and of these only
    /// what they do to the page at this address.
    Steward(usize),
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

    /// How memory of such rights is moved out.
    pub fn way(&self, protection: Protection) -> Way {
        protection.way(self.frames.can_execute())
    }

    /// Whether memory of such rights can be far, and is worth to be: what the program may not touch
    /// at all is address space mostly.
    pub fn is_movable(&self, protection: Protection) -> bool {
        protection.is_some() && self.way(protection) != Way::Nowhere
    }

    /// The registry is wrong about part of a range: the steward is to look at the mappings again.
    pub fn mistrust(&self, start: usize, end: usize) {
        *self.mistrusted.lock().unwrap_or_else(PoisonError::into_inner) = (start, end);
        self.layout.ring();
    }

    /// The range that the registry is wrong about, which is forgotten here.
    pub fn take_mistrusted(&self) -> Option<(usize, usize)> {
        let mut range = self.mistrusted.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, end) = std::mem::take(&mut *range);
        (start < end).then_some((start, end))
    }

    /// For whoever must not wait for a lock.
    pub fn note_given_up(&self, range: Range<usize>) {
        if let Ok(mut given_up) = self.given_up.try_lock()
            && given_up.len() < MAX_GIVEN_UP
        {
            given_up.push(range);
        }
    }

    /// What was given up and applied at once since this was last asked.
    pub fn take_given_up(&self, into: &mut Vec<Range<usize>>) {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        into.append(&mut given_up);
    }

    /// Takes in the change that the kernel is waiting to tell of.
    pub fn take_in(&self) {
        self.layout.take_in(&self.uffd, |range| give_up(self, range));
    }

    /// One call of the kernel that moves or fills pages of the program.
    pub fn step(&self, mover: Mover, operation: impl FnOnce() -> Outcome) -> Outcome {
        match mover {
            Mover::FaultThread | Mover::Evictor => self.layout.step(operation),
            Mover::Steward(address) => self.layout.step_of_steward(address, operation),
        }
    }

    /// Before a call is made again that the kernel refused with EAGAIN.
    pub fn try_again(&self, mover: Mover) {
        if mover == Mover::FaultThread {
            self.take_in();
        }
        rustix::thread::sched_yield();
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

    /// A fork shares the process's pages from now on.
    pub fn note_fork(&self) {
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

    /// Has the evictor move all of a range out soon.
    pub fn retire(&self, start: usize, end: usize) {
        if let Ok(mut retired) = self.retired.lock()
            && retired.len() < MAX_RETIRED
            && !retired.contains(&(start, end))
        {
            retired.push((start, end));
        }
        self.budget.kick();
    }

    /// The ranges to move out, which are forgotten here.
    pub fn take_retired(&self) -> Vec<(usize, usize)> {
        self.retired.lock().map(|mut retired| std::mem::take(&mut *retired)).unwrap_or_default()
    }

    /// Where a page's copy is, if its layer exists.
    pub fn place(&self, page: Page, layer: usize) -> Option<SegmentPage> {
        Some(SegmentPage { segment: self.layers.segment(layer)?, page: page.segment_page() })
    }

    /// Whether a copy of the page in a layer can be counted on: its blade is not known to be lost.
    pub fn has_place(&self, page: Page, layer: usize) -> bool {
        let segment = self.layers.segment(layer);
        segment.is_some_and(|segment| self.pool.can_store(segment, page.superpage.id()))
    }

    /// Makes later touches of a lost page a SIGBUS, and says so once.
    pub fn poison(&self, page: Page, reason: &dyn std::fmt::Display) {
        self.count(Counter::Lost, 1);
        // First the message: the woken thread's SIGBUS may end the process at once.
        let mut reported = self.loss_reported.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *reported, true) {
            let lost: Vec<String> = self
                .pool
                .lost()
                .iter()
                .map(|blade| format!("{} ({})", blade.address, blade.reason))
                .collect();
            let all = || self.settings.blades.iter().map(|blade| blade.address.clone()).collect();
            let blades: Vec<String> = if lost.is_empty() { all() } else { lost };
            let blades = blades.join(", ");
            sys::say(&format!(
                "far memory is lost: {reason}; page {} of segment {}, blade {blades}. Touching a lost page \
                 stops the program with SIGBUS; nothing is ever made up. Restart the blade, then the program.",
                page.segment_page(),
                self.layers.current(),
            ));
        }
        drop(reported);
        let _ = self.uffd.poison(page.address(), PAGE_BYTES);
        let _ = self.uffd.wake(page.address(), PAGE_BYTES);
    }

    /// Says, once for the whole tree, why a blade cannot be used or takes no pages.
    pub fn report_blade(&self, blade: BladeIndex, reason: &dyn std::fmt::Display) {
        if first_report(&self.board.header().blades_reported, blade) {
            sys::say(&format!(
                "{reason}. What it would have taken goes to other blades or stays in local memory, also over the \
                 limit; it is tried again now and then. `farpool blades` gives the run another one."
            ));
        }
    }

    /// Says by how much local memory is over its limit because nothing can be moved out: at first, and whenever it is
    /// twice as much.
    pub fn report_overrun(&self) {
        let tree = Tree::read(self.board);
        let limit = limit_pages(self.board, &tree);
        let bytes = |pages: i64| pages.max(0).unsigned_abs() * PAGE_BYTES as u64;
        let (limit_bytes, over_bytes) = (bytes(limit), bytes(tree.counted_pages(limit) - limit));
        let said = &self.board.header().overrun_reported_bytes;
        let known_bytes = said.load(Relaxed);
        if is_news(limit_bytes, over_bytes, known_bytes)
            && said.compare_exchange(known_bytes, over_bytes, SeqCst, Relaxed).is_ok()
        {
            sys::say(&format!(
                "local memory is {over_bytes} bytes over its limit of {limit_bytes} bytes, for no blade takes pages. \
                 Give the run another blade (farpool blades), or a larger limit (farpool limit)."
            ));
        }
    }

    /// Says once for the whole tree that the pool is full.
    pub fn report_full(&self, error: &PoolError) {
        self.full.store(true, Relaxed);
        if self.board.header().full_reported.swap(1, SeqCst) == 0 {
            sys::say(&format!(
                "{error}. The program goes on with the far memory it has; give it more with --quota, more \
                 blades, or a larger --local."
            ));
        }
    }
}

/// Whether this is the first report of the blade on the board.
fn first_report(reported: &AtomicU32, blade: BladeIndex) -> bool {
    let bit = 1 << (u32::from(blade.0) % u32::BITS);
    reported.fetch_or(bit, SeqCst) & bit == 0
}

/// An overrun is worth a message from this part of the limit on: a fault may take a page more than there is.
const OVERRUN_PART: u64 = 8;

/// Whether an overrun is to be said, after one of `known_bytes` was.
fn is_news(limit_bytes: u64, over_bytes: u64, known_bytes: u64) -> bool {
    over_bytes > (limit_bytes / OVERRUN_PART).max(known_bytes.saturating_mul(2))
}

/// The number of no layer.
#[allow(clippy::cast_possible_truncation)] // MAX_LAYERS is 8.
const NO_LAYER: u8 = MAX_LAYERS as u8;

/// Frozen layers and the current one, by their number in page states.
#[derive(Debug)]
pub struct Layers {
    /// Segment handle + 1; 0 = none.
    handles: [AtomicU8; MAX_LAYERS],
    /// Layer that takes evictions; `MAX_LAYERS` = none yet.
    current: AtomicU8,
    /// Held while a layer begins, gets memory, or is frozen. Who holds it must look at the gate.
    pub changing: Mutex<()>,
}

impl Default for Layers {
    fn default() -> Layers {
        let current = AtomicU8::new(NO_LAYER);
        Layers { handles: Default::default(), current, changing: Mutex::new(()) }
    }
}

impl Layers {
    pub fn segment(&self, layer: usize) -> Option<SegmentHandle> {
        let handle = self.handles.get(layer)?.load(SeqCst);
        SegmentHandle::from_index(usize::from(handle.checked_sub(1)?))
    }

    /// The layer that takes evictions; `MAX_LAYERS` if there is none.
    pub fn current(&self) -> usize {
        usize::from(self.current.load(SeqCst))
    }

    /// Numbers of the live layers.
    pub fn live(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_LAYERS).filter(|layer| self.segment(*layer).is_some())
    }

    pub fn set(&self, layer: usize, segment: Option<SegmentHandle>) {
        let handle = segment.map_or(0, |segment| exactly(segment.index() + 1));
        self.handles[layer].store(handle, SeqCst);
    }

    /// `MAX_LAYERS`: there is none.
    pub fn set_current(&self, layer: usize) {
        assert!(layer <= MAX_LAYERS, "layer {layer} is none");
        self.current.store(exactly(layer), SeqCst);
    }

    /// The current layer, made if there is none.
    pub fn current_or_new(&self, pool: &Pool) -> Result<usize, PoolError> {
        let current = self.current();
        if current < MAX_LAYERS {
            return Ok(current);
        }
        let segment = pool.create_segment()?;
        // Fork keeps one layer free, so there always is a number left. With another's number its
        // pages would be those of this segment.
        let free = (0..MAX_LAYERS).find(|layer| self.segment(*layer).is_none());
        let free = free.expect("a layer is free");
        self.set(free, Some(segment));
        self.set_current(free);
        Ok(free)
    }
}

/// Lets a forking thread have the pager to itself.
///
/// While the gate is shut, only faults of the forking thread are served, and none at all until the steward has
/// brought everything to rest; others are passed over and woken afterwards, so that they are reported
/// again. The page table and the states that a child inherits are therefore of one moment.
///
/// Nothing is noted of faults that are passed over, so a fault thread may be stopped anywhere. If it saw the gate
/// shut, it had read its message before the gate opened; and the wake-up that follows the opening reaches
/// every thread whose fault the kernel has reported until then, read or not. If it saw it open, it serves.
#[derive(Debug, Default)]
pub struct Gate {
    /// Thread that may pass alone; 0 = open.
    holder: AtomicU32,
    /// Fault threads that have something under way.
    inside: AtomicU32,
}

/// As holder of the gate: no thread may pass (no thread has this number).
const NOBODY: u32 = u32::MAX;

impl Gate {
    /// Enters for a fault of `thread`; false while somebody else holds the gate: the fault is then reported
    /// again.
    pub fn enter(&self, thread: u32, _page_address: usize) -> bool {
        self.inside.fetch_add(1, SeqCst);
        let holder = self.holder.load(SeqCst);
        if holder == 0 || holder == thread {
            return true;
        }
        self.leave();
        false
    }

    pub fn leave(&self) {
        self.inside.fetch_sub(1, SeqCst);
    }

    pub fn is_shut(&self) -> bool {
        self.holder.load(SeqCst) != 0
    }

    /// Shuts the gate for all and waits until nobody is inside. The forking thread waits for the steward and
    /// has no fault; a message of it that was read earlier and is only now looked at is stale.
    pub fn shut(&self) {
        self.holder.store(NOBODY, SeqCst);
        while self.inside.load(SeqCst) != 0 {
            sys::pause();
        }
    }

    /// Everything is at rest: the forking thread may pass.
    pub fn admit(&self, thread: u32, uffd: &Uffd) {
        self.change_holder(thread, uffd);
    }

    /// Opens it and has all faults reported again.
    pub fn open(&self, uffd: &Uffd) {
        self.change_holder(0, uffd);
    }

    fn change_holder(&self, holder: u32, uffd: &Uffd) {
        self.holder.store(holder, SeqCst);
        if let Err(error) = uffd.wake_all() {
            fail_closed(&format!("threads that wait for pages cannot be woken: {error}"));
        }
    }
}

/// Repeats a copy or a fill while the kernel says that the address space is just changing. Not for moves, whose
/// count is not the whole truth: see [`crate::space::moves`].
pub fn until_settled(
    core: &Core,
    mover: Mover,
    mut operation: impl FnMut(usize) -> Outcome,
) -> Outcome {
    let mut done_bytes = 0;
    loop {
        let outcome = core.step(mover, || operation(done_bytes));
        done_bytes += outcome.done_bytes;
        if outcome.errno != Some(libc::EAGAIN) {
            return Outcome { done_bytes, errno: outcome.errno };
        }
        core.try_again(mover);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_uffd::{Message, register_mode};
    use std::time::{Duration, Instant};

    const PAGES: usize = 2048;

    #[test]
    fn each_blade_is_reported_once_and_an_overrun_when_it_has_doubled() {
        let reported = AtomicU32::new(0);
        let first = [0, 1, 0, 1].map(|blade| first_report(&reported, BladeIndex(blade)));
        assert_eq!(first, [true, true, false, false]);
        assert!(!is_news(800, 100, 0) && is_news(800, 101, 0));
        assert!(!is_news(800, 202, 101) && is_news(800, 203, 101));
    }

    fn registered() -> Option<(&'static Uffd, usize)> {
        let uffd = match Uffd::open(farpool_uffd::features::THREAD_ID, true) {
            Ok(uffd) => Box::leak(Box::new(uffd)),
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                return None;
            }
        };
        let area = sys::map_local(PAGES * PAGE_BYTES).expect("map");
        uffd.register(area, PAGES * PAGE_BYTES, register_mode::MISSING).expect("register");
        Some((uffd, area))
    }

    fn touch(address: usize) {
        // SAFETY: a page of the test's own mapping, which is never unmapped.
        unsafe { std::ptr::read_volatile(address as *const u8) };
    }

    /// Touching threads, two fault threads, and a gate that is shut and opened all the time: every fault is
    /// served in the end.
    #[test]
    fn no_fault_is_forgotten_when_the_gate_opens() {
        let Some((uffd, area)) = registered() else { return };
        let gate: &'static Gate = Box::leak(Box::default());
        let over: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let serve = move || {
            let mut messages = [Message::default(); 2];
            while !over.load(SeqCst) {
                for message in uffd.read(&mut messages).unwrap_or_default() {
                    let event = message.event();
                    let address = event.page_address.expect("a page fault");
                    if gate.enter(event.thread, address) {
                        uffd.zero(address, PAGE_BYTES, false);
                        uffd.wake(address, PAGE_BYTES).expect("wake");
                        gate.leave();
                    }
                }
                std::thread::yield_now();
            }
        };
        let servers = [std::thread::spawn(serve), std::thread::spawn(serve)];
        let touchers: Vec<_> = (0..4)
            .map(|first| {
                std::thread::spawn(move || {
                    (first..PAGES).step_by(4).for_each(|page| touch(area + page * PAGE_BYTES));
                })
            })
            .collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        while touchers.iter().any(|toucher| !toucher.is_finished()) {
            gate.shut();
            gate.admit(sys::thread_id(), uffd);
            gate.open(uffd);
            assert!(Instant::now() < deadline, "a fault was forgotten");
            std::thread::yield_now();
        }
        over.store(true, SeqCst);
        for server in servers {
            server.join().expect("server");
        }
    }

    #[test]
    fn only_the_holder_passes_and_only_when_it_is_admitted() {
        let Some((uffd, area)) = registered() else { return };
        let gate = Gate::default();
        let tries = || [1, 2].map(|thread| gate.enter(thread, area));
        gate.shut();
        assert_eq!(tries(), [false, false]);
        gate.admit(2, uffd);
        assert_eq!(tries(), [false, true]);
        gate.leave();
        gate.open(uffd);
        assert_eq!(tries(), [true, true]);
        assert_eq!(gate.inside.load(SeqCst), 2);
    }
}
