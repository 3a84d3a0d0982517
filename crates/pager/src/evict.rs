//! The evictor: one thread that keeps a reserve of free frames.
//!
//! It walks the program's chunks in the order of the victim policy. For each chunk it takes:
//! 1. `claim`: the pages to move out go into phase Evicting; far and never-touched pages between them
//!    are claimed too, so that one UFFDIO_MOVE can take the whole stretch, holes and all;
//! 2. `move_out`: the kernel takes the pages out of the program, atomically, so no write can be lost;
//! 3. `settle`: what arrived in the tray (the page map says) is in phase Victim;
//! 4. `write`: the victims go to the blade; when all are acknowledged the tray's frames are free.
//!
//! The registry's lock is held during 1 to 3, so nothing is unmapped or discarded meanwhile. It is
//! not held while a blade is waited for.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_policy::reserve::{LEAST_WORKING_PAGES, Work};
use farpool_policy::{Choice, ChunkSweep, CleanEstimator, SweepPolicy, VictimKind};
use farpool_pool::{BladeIndex, Completion, Lane, PageError, PageWrite, PoolError, SegmentHandle};
use farpool_uffd::{Outcome, PAGE_BYTES};

use crate::copies::{Leaving, leaving};
use crate::core::{Core, EXPIRY_STEP, Mover, until_settled};
use crate::density::Density;
use crate::effort::Effort;
use crate::evict_shared::InPlace;
use crate::frames::{FrameSlot, TRAYS, TakenTray, bits, runs};
use crate::gauges::Gauges;
use crate::moves;
use crate::page::{MAX_LAYERS, PageState, Phase};
use crate::panics::panic_if_asked;
use crate::refusals::Refusals;
use crate::resident_map::ResidentMap;
use crate::serve::fail_closed;
use crate::space::{CHUNK_PAGES, CHUNKS, NO_TRAY, Page, Superpage};
use crate::sys;
use crate::thrash::Stall;
use crate::turn::{Turn, Turns};

/// Trays on their way to the blades at a time: enough to keep a network busy.
const MAX_TRAYS_IN_FLIGHT: usize = 16;
/// Without anything to do the budget is looked at this often.
const IDLE_STEP: Duration = Duration::from_millis(20);
/// After a fork memory grows by copy-on-write, unseen: looked at often while it does (2 ms are 8 MB at 1 us a
/// page), and more often than otherwise while it does not.
const GROWING_STEP: Duration = Duration::from_millis(2);
const SHARING_STEP: Duration = Duration::from_millis(10);
const MOST_STEPS: u32 = 16;
/// When nothing could be evicted (all pinned, pool full), wait this long before the next try.
const BACK_OFF: Duration = Duration::from_millis(5);
/// The same when much of the memory cannot be moved at all, or no blade takes any: a lap costs up to a millisecond, so this is 2 % of a CPU.
const UNMOVABLE_BACK_OFF: Duration = Duration::from_millis(50);
/// Frames of retired pages are released when there are so many: few calls, and the limit is not strained.
const RETIRED_FRAMES: i64 = 512;
/// In Solo the evictor works on the faulting thread's CPU, so much at a time (about half a millisecond), and
/// pauses for so long unless it is called.
const BURST_PAGES: i64 = 256;
const BREATH: Duration = Duration::from_micros(100);
/// A rest after rounds that found little ends when so much memory has come (2 MiB), which is looked at this often.
const GROWN_PAGES: i64 = 512;
const REST_STEP: Duration = Duration::from_millis(1);
/// Chunks looked at in vain before the evictor gives up for now: one lap at most.
const MAX_BARREN_CHUNKS: usize = 1 << 16;
/// Pages of a chunk that are made the process's own at a time, if they are not.
const MAX_BUSY: usize = CHUNK_PAGES;
/// The longest that a change of the address space is waited for at a time; the steward wakes who waits.
const STEWARD_WAIT: Duration = Duration::from_millis(1);
/// A full pool is asked again after this time.
const FULL_RETRY: Duration = Duration::from_millis(500);
pub(crate) const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;

/// See the module's description.
#[derive(Debug)]
pub struct Evictor {
    pub(crate) core: &'static Core,
    pub(crate) lane: Lane,
    sweep: ChunkSweep,
    map: ResidentMap,
    pub(crate) writes: Vec<PageWrite>,
    pub(crate) done: Vec<Completion>,
    /// Pages of each tray that the blade has not acknowledged yet.
    unacknowledged: Box<[u8]>,
    taken: Vec<TakenTray>,
    trays_in_flight: usize,
    full_until: Option<Instant>,
    refusals: Refusals,
    /// The blade that each tray on its way was sent to.
    sent_to: Box<[BladeIndex]>,
    /// Chunks that were passed over with the last one, for they are as empty.
    passed_over: usize,
    /// A superpage is not given memory on another blade before this time.
    rehouse_after: Option<Instant>,
    /// When deadlines were last looked at.
    expired: Instant,
    density: Density,
    clean: CleanEstimator,
    pub(crate) in_place: InPlace,
    /// A chunk of local memory for copies of pages that a fork shares.
    pub(crate) copies: usize,
    gauges: Gauges,
    turns: Turns,
    stall: Stall,
    effort: Effort,
    resident_before: u64,
    /// Addresses of pages that the kernel would not move.
    busy: Vec<usize>,
}

impl Evictor {
    pub fn new(
        core: &'static Core,
        lane: Lane,
        victims: VictimKind,
    ) -> Result<Evictor, std::io::Error> {
        let seed = u64::from(core.slot.pid.load(Relaxed));
        let copies = sys::map_local_without_children(CHUNK_BYTES)?;
        Ok(Evictor {
            core,
            lane,
            sweep: ChunkSweep::new(victims, 0, seed),
            map: ResidentMap::new(),
            writes: Vec::with_capacity(CHUNK_PAGES),
            done: Vec::with_capacity(MAX_TRAYS_IN_FLIGHT * CHUNK_PAGES),
            unacknowledged: vec![0; TRAYS].into_boxed_slice(),
            taken: Vec::with_capacity(TRAYS),
            trays_in_flight: 0,
            full_until: None,
            refusals: Refusals::default(),
            sent_to: vec![BladeIndex::default(); TRAYS].into_boxed_slice(),
            passed_over: 0,
            rehouse_after: None,
            expired: Instant::now(),
            density: Density::default(),
            clean: CleanEstimator::default(),
            in_place: InPlace::default(),
            copies,
            gauges: Gauges::new(core),
            turns: Turns::default(),
            stall: Stall::default(),
            effort: Effort::default(),
            resident_before: 0,
            busy: Vec::with_capacity(MAX_BUSY),
        })
    }

    /// Evicts until the process ends.
    pub fn run(mut self) -> ! {
        self.core.crew.be_evictor();
        loop {
            self.gauges.publish();
            self.check_deadlines();
            self.evict_retired();
            let free = self.core.frames.free();
            let turn = self.look_for_turn();
            let work = self.core.budget.refresh(self.core.board, self.core.slot, free, turn);
            if work == Work::default() || self.core.leaving.load(SeqCst) {
                self.rest();
            } else {
                self.work(work);
            }
        }
    }

    fn look_for_turn(&mut self) -> Turn {
        let (slot, word) = (self.core.slot, &self.core.board.header().turn);
        let (now_ms, overruns) = (sys::shared_clock_ms(), slot.get(Counter::Overruns));
        let wants = self.stall.wants_turn(self.core, now_ms);
        let turn = self.turns.look(word, slot.pid.load(Relaxed), now_ms, overruns, wants);
        self.core.out_of_turn.store(matches!(turn, Turn::Anothers(_)), Relaxed);
        turn
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        if self.trays_in_flight > 0 && now >= self.expired + EXPIRY_STEP {
            self.expired = now;
            self.lane.expire(now, &mut self.done);
            self.settle_done();
        }
    }

    fn rest(&mut self) {
        self.drain();
        self.release_copies();
        // There is nothing to do although memory is short: there is nothing to move out.
        let is_short = self.core.budget.allowance() <= 0 && self.core.frames.free() == 0;
        self.core.barren.store(is_short, Relaxed);
        let there = self.core.slot.get(Counter::EvictablePages);
        self.core.least.store(is_short && there <= LEAST_WORKING_PAGES.unsigned_abs(), Relaxed);
        let shares = self.core.shares.load(Relaxed);
        let resident = self.core.slot.get(Counter::ResidentPages);
        let grows = std::mem::replace(&mut self.resident_before, resident) != resident;
        // In a large tree every process looks less often: together they would look all the time.
        let processes = u32::try_from(self.core.board.processes().count()).unwrap_or(1);
        let growing = GROWING_STEP * processes.clamp(1, MOST_STEPS);
        let most = match (shares, grows) {
            (true, true) => growing.min(IDLE_STEP),
            (true, false) => growing.max(SHARING_STEP),
            (false, _) => IDLE_STEP,
        };
        self.core.budget.wait_for_kick(most);
    }

    /// One burst. On the CPU of the faulting thread it is a short one: faults wait for its end.
    fn work(&mut self, work: Work) {
        panic_if_asked();
        let began = sys::processor_time();
        let near = self.core.crew.evictor_is_near();
        let most = if near { BURST_PAGES } else { i64::MAX };
        let evicted = self.evict(work.evict_pages.min(most));
        self.gauges.moved_out(evicted);
        self.collect();
        if self.trays_in_flight > 0 {
            self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
        }
        self.core.least.store(false, Relaxed);
        let released = self.release(work.release_pages.min(most));
        self.core.budget.refund(released);
        self.density.judge(&self.core.crew);
        self.core.frames.announce();
        if evicted == 0 && released == 0 {
            self.drain();
            self.core.barren.store(self.core.frames.free() == 0, Relaxed);
            let is_refused = self.are_refused();
            if is_refused {
                self.core.report_overrun();
            }
            if is_refused || self.core.is_unmovable.load(Relaxed) {
                // Whoever kicks does not wait, and the next lap would find as little.
                std::thread::sleep(UNMOVABLE_BACK_OFF);
            } else {
                self.core.budget.wait_for_kick(BACK_OFF);
            }
        } else {
            self.core.barren.store(false, Relaxed);
            if near && self.core.budget.allowance() > 0 {
                self.core.budget.wait_for_kick(BREATH);
            }
        }
        let moved = u64::try_from(evicted + released).unwrap_or(0);
        let worked = sys::processor_time().saturating_sub(began);
        if let Some(rest) = self.effort.note(worked, moved) {
            self.ease_off(rest);
        }
    }

    /// Rests after a round that found little, unless memory grows meanwhile. Nobody waits for room.
    fn ease_off(&self, rest: Duration) {
        self.core.barren.store(self.core.frames.free() == 0, Relaxed);
        let (until, before) = (Instant::now() + rest, self.core.budget.allowance());
        while Instant::now() < until && before - self.core.budget.allowance() < GROWN_PAGES {
            std::thread::sleep(REST_STEP);
        }
    }

    /// Moves out about `pages`; returns how many it was.
    fn evict(&mut self, pages: i64) -> i64 {
        if self.are_refused() {
            return 0;
        }
        self.sweep.grow(self.core.space.count() * CHUNKS);
        let mut evicted = 0;
        let barren_limit = (self.core.space.count() * CHUNKS).min(MAX_BARREN_CHUNKS);
        let mut barren = 0;
        while evicted < pages && barren <= barren_limit {
            let Some(chunk) = self.sweep.next_chunk() else {
                break;
            };
            // Busy: the steward is at work; what is under way must not wait for it.
            let Some(moved) = self.evict_chunk(chunk, false) else {
                break;
            };
            evicted += moved;
            self.core.crew.has_progressed(1);
            let passed_over = std::mem::take(&mut self.passed_over);
            barren = if moved > 0 { 0 } else { barren + 1 + passed_over };
            self.collect();
            if !self.refusals.is_empty() {
                // A blade that refused is on trial with what was sent last.
                self.drain();
            } else if self.trays_in_flight >= MAX_TRAYS_IN_FLIGHT {
                self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
            }
            if moved > 0 && self.core.budget.allowance() < 0 {
                break;
            }
        }
        evicted
    }

    /// Moves out what the program said it does not need soon, all of it. What it says meanwhile waits for the next
    /// time: the limit comes first.
    fn evict_retired(&mut self) {
        for (start, end) in self.core.take_retired() {
            let mut at = start & !(CHUNK_BYTES - 1);
            while at < end {
                if let Some(page) = self.core.space.page(at) {
                    let number = page.superpage.id() as usize * CHUNKS + page.chunk();
                    self.empty_tray(page.superpage, page.chunk());
                    if self.evict_chunk(number, true).is_none() {
                        // The steward is at work, which may wait for our writes.
                        self.drain();
                        sys::pause();
                        continue;
                    }
                    self.collect();
                    if self.trays_in_flight >= MAX_TRAYS_IN_FLIGHT {
                        self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
                    }
                    self.release(self.core.frames.free() - RETIRED_FRAMES);
                    self.density.judge(&self.core.crew);
                }
                at += CHUNK_BYTES;
            }
        }
    }

    /// Lets go of the chunk's pages in the victim buffer, for as long as it has some it is passed over.
    fn empty_tray(&mut self, superpage: &'static Superpage, chunk: usize) {
        if superpage.trays[chunk].load(SeqCst) == NO_TRAY {
            return;
        }
        self.drain();
        self.core.frames.take_tray_of(superpage, chunk, &mut self.taken);
        self.core.frames.release(&mut self.taken);
        self.core.frames.retire_all();
    }

    /// Moves a chunk's victims out, or all its pages; returns how many there were. None: not now.
    fn evict_chunk(&mut self, number: usize, all: bool) -> Option<i64> {
        let core = self.core;
        let superpage = core.space.by_id(number / CHUNKS)?;
        let chunk = number % CHUNKS;
        if superpage.trays[chunk].load(SeqCst) != NO_TRAY || !self.may_write(superpage) {
            return Some(0);
        }
        if core.layout.is_behind() {
            // The steward wants the lock, and would hardly get it from who takes it again and again.
            core.layout.wait_for_steward(STEWARD_WAIT);
            return None;
        }
        let registry = core.registry.try_lock().ok()?;
        if core.gate.is_shut() {
            return None;
        }
        // A fork since `may_write` has begun a new layer. From here on none can begin before the tray
        // is written: it waits for the lock, and then for the tray.
        let layer = core.layers.current();
        if !has_memory(superpage, layer) {
            return Some(0);
        }
        let resident = self.map.resident(core, &registry, superpage, chunk);
        if resident == 0 {
            if !all {
                // Of a sparse address space hardly anything else would be looked at.
                self.passed_over = self.map.empty_after(chunk);
                self.sweep.pass_over(self.passed_over);
            }
            return Some(0);
        }
        let tray = core.frames.take_empty()?;
        let hot = superpage.hot[chunk].load(Relaxed);
        let choice = if all {
            Choice { take: resident, clear_hot: resident }
        } else {
            self.sweep.choose(number, resident, hot)
        };
        superpage.hot[chunk].fetch_and(!choice.clear_hot, Relaxed);
        if choice.take == 0 {
            core.frames.return_empty(tray);
            return Some(0);
        }
        let mut claim = claim(superpage, chunk, choice.take, resident);
        let written = self.write_shared(superpage, chunk, layer, &mut claim);
        core.filling.store(tray, SeqCst);
        self.move_out(superpage, chunk, tray, &claim);
        let moved = self.settle(superpage, chunk, tray, layer, &claim);
        core.filling.store(NO_TRAY, SeqCst);
        self.map.forget(chunk);
        drop(registry);
        if moved == 0 {
            core.frames.return_empty(tray);
            self.unshare();
            return Some(written);
        }
        core.count(Counter::Evictions, u64::from(moved.count_ones()));
        core.count(Counter::EvictedChunks, 1);
        self.density.add(moved);
        self.write(superpage, tray, layer);
        self.unshare();
        Some(written + i64::from(moved.count_ones()))
    }

    /// Whether no blade takes pages now. If that will last, nobody waits for room any more.
    fn are_refused(&self) -> bool {
        let (pool, refusals, now) = (&self.core.pool, &self.refusals, Instant::now());
        let are_refused = !pool.usable_blades().any(|blade| refusals.may_send(blade, now));
        let is_lasting = pool.usable_blades().all(|blade| refusals.is_lasting(blade));
        self.core.refused.store(is_lasting, Relaxed);
        are_refused
    }

    /// Whether the superpage has memory to be moved out to, or gets some now. Pages of a blade that is lost or takes
    /// none stay local: to send them there would only bring them back, over and over.
    fn may_write(&mut self, superpage: &Superpage) -> bool {
        let layer = self.core.layers.current();
        if has_memory(superpage, layer) {
            let Some(segment) = self.core.layers.segment(layer) else { return false };
            return self.takes_pages(segment, superpage)
                || self.rehouse(segment, superpage) && self.takes_pages(segment, superpage);
        }
        if self.full_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        match self.allocate(superpage) {
            Ok(()) => true,
            Err(error) => {
                self.full_until = Some(Instant::now() + FULL_RETRY);
                self.core.report_full(&error);
                false
            }
        }
    }

    fn takes_pages(&self, segment: SegmentHandle, superpage: &Superpage) -> bool {
        let pool = &self.core.pool;
        let blade = pool.blade_of(segment, superpage.id()).filter(|blade| !pool.is_lost(*blade));
        blade.is_some_and(|blade| {
            self.refusals.is_empty() || self.refusals.may_send(blade, Instant::now())
        })
    }

    /// A superpage whose blade is lost or takes no pages, and which has nothing there, gets memory on another one if
    /// there is one. False: it stays as it is.
    #[cold]
    fn rehouse(&mut self, segment: SegmentHandle, superpage: &Superpage) -> bool {
        let (core, now) = (self.core, Instant::now());
        let in_buffer = superpage.trays.iter().any(|tray| tray.load(SeqCst) != NO_TRAY);
        if in_buffer
            || !superpage.is_empty()
            || self.rehouse_after.is_some_and(|after| now < after)
            || !core.pool.usable_blades().any(|blade| self.refusals.may_send(blade, now))
        {
            return false;
        }
        {
            let _changing = core.layers.changing.lock();
            let layer = core.layers.current();
            if core.gate.is_shut() || core.layers.segment(layer) != Some(segment) {
                return false;
            }
            // A lost blade gives nothing back, and has nothing any more.
            let _ = core.pool.free_superpage(segment, superpage.id());
            if core.pool.blade_of(segment, superpage.id()).is_some() {
                self.rehouse_after = Some(now + FULL_RETRY);
                return false;
            }
            superpage.allocated.fetch_and(!(1 << layer), SeqCst);
        }
        match self.allocate(superpage) {
            Ok(()) => true,
            Err(error) => {
                self.rehouse_after = Some(now + FULL_RETRY);
                core.report_full(&error);
                false
            }
        }
    }

    /// A blade did not take a page.
    #[cold]
    fn note_refusal(&mut self, blade: BladeIndex, error: PageError) {
        let (core, now) = (self.core, Instant::now());
        if self.refusals.may_send(blade, now) {
            core.pool.set_refusing(blade);
            // A rack finds more memory for a run that has too little.
            core.board.header().full_reported.store(1, SeqCst);
        }
        self.refusals.refuse(blade, now);
        let lost = core.pool.lost().into_iter().find(|lost| lost.blade == blade);
        match (error, lost) {
            (PageError::BladeLost(_), Some(lost)) => core
                .report_blade(blade, &format!("blade {} is lost: {}", lost.address, lost.reason)),
            _ => {
                let address = core.pool.describe(blade);
                core.report_blade(blade, &format!("blade {address} takes no pages: {error}"));
            }
        }
    }

    fn allocate(&mut self, superpage: &Superpage) -> Result<(), PoolError> {
        let _changing = self.core.layers.changing.lock();
        if self.core.gate.is_shut() {
            // A child must not inherit the mark of memory that only its parent has.
            return Ok(());
        }
        let layer = self.core.layers.current_or_new(&self.core.pool)?;
        if let Some(segment) = self.core.layers.segment(layer) {
            self.core.pool.allocate_superpage(segment, superpage.id())?;
            superpage.allocated.fetch_or(1 << layer, SeqCst);
            self.core.full.store(false, Relaxed);
        }
        Ok(())
    }

    fn move_out(&mut self, superpage: &Superpage, chunk: usize, tray: u16, claim: &Claim) {
        for (first, count) in runs(claim.mask()) {
            self.move_run(superpage, chunk, tray, claim, first..first + count);
        }
    }

    /// Moves a run in as few pieces as its mappings allow. A piece begins with a page that is known to be
    /// far, and the kernel moves pieces of one mapping only: gaps of other mappings are never touched.
    fn move_run(
        &mut self,
        superpage: &Superpage,
        chunk: usize,
        tray: u16,
        claim: &Claim,
        run: Range<usize>,
    ) {
        let program = superpage.base() + chunk * CHUNK_BYTES;
        let buffer = self.core.frames.tray_address(tray);
        let core = self.core;
        let refuse = |page: usize| {
            core.count(Counter::Refused, 1);
            superpage.hot[chunk].fetch_or(1 << page, Relaxed);
        };
        let (mut next, mut most, mut unshared) = (run.start, CHUNK_PAGES, false);
        while next < run.end {
            if !claim.is_resident(next) {
                next += 1;
                continue;
            }
            let (from, to) = (program + next * PAGE_BYTES, buffer + next * PAGE_BYTES);
            let count = most.min(run.end - next);
            let outcome = self.core.step(Mover::Evictor, || self.take_out(to, from, count));
            let moved = outcome.done_bytes / PAGE_BYTES;
            next += moved;
            if moved > 0 {
                (most, unshared) = ((most * 2).min(CHUNK_PAGES), false);
                continue;
            }
            // Moved and not counted, or discarded past us: nothing is done to a page that is not there.
            let left = moves::occupied(&self.core.pagemap, from, count).trailing_zeros() as usize;
            if left > 0 {
                next += left.min(count);
                continue;
            }
            match outcome.errno {
                // The program changes its address space: what was claimed may be out of date.
                Some(libc::ECANCELED) => return,
                Some(libc::ENOENT) if self.core.layout.follows() => {
                    self.core.mistrust(program, program + CHUNK_BYTES);
                    return;
                }
                Some(libc::EAGAIN) if self.core.layout.follows() => return,
                None | Some(libc::EAGAIN) => {}
                // A frame that nobody knows of would be taken for this page.
                Some(libc::EEXIST) => {
                    fail_closed(&format!("tray {tray}, page {next}: a frame is there already"))
                }
                // Shared since a fork: made this process's own, it can be moved. Pinned by the
                // kernel for I/O: it stays EBUSY and stays where it is.
                Some(libc::EBUSY) if self.core.layout.follows() => {
                    self.note_busy(from);
                    refuse(next);
                    next += 1;
                }
                Some(libc::EBUSY) if !unshared => {
                    unshared = true;
                    let _ = sys::unshare(from, PAGE_BYTES);
                }
                // More than one mapping: a smaller piece may be of one.
                Some(errno) if errno != libc::EBUSY && count > 1 => most = count / 2,
                // Pinned, read-only, or not the program's any more: it stays.
                _ => {
                    refuse(next);
                    (next, unshared) = (next + 1, false);
                }
            }
        }
    }

    /// One move out of the program. Where it maps memory unseen, what is there may not be registered: touched after the
    /// move, it would read as zeros. The kernel moves within one mapping only, so whether the first page's is registered
    /// is asked first (ENOENT: it is not; a page that is there cannot be filled). The lock of the layout is held, and no
    /// mapping that is registered goes before the event of it has been read.
    fn take_out(&self, to: usize, from: usize, count: usize) -> Outcome {
        if self.core.layout.follows() {
            // A page that the last call moved and did not count must not be filled.
            if moves::occupied(&self.core.pagemap, from, 1) == 0 {
                return Outcome { done_bytes: 0, errno: Some(libc::ENODATA) };
            }
            let asked = self.core.uffd.zero(from, PAGE_BYTES, false);
            if matches!(asked.errno, Some(libc::ENOENT | libc::EAGAIN)) {
                return asked;
            }
        }
        self.core.uffd.move_pages(to, from, count * PAGE_BYTES, false, true)
    }

    /// A page that cannot be moved is pinned by the kernel for I/O; or another process has it, too, or had it until it
    /// wrote to its own copy, since a fork or because KSM has merged it. The page map does not tell these apart: a page
    /// that only this process has left is still not its own until it is written to.
    fn note_busy(&mut self, address: usize) {
        if self.busy.len() < MAX_BUSY {
            self.busy.push(address);
        }
    }

    /// Makes pages that could not be moved this process's own, so that they can be moved the next time. It may have to
    /// wait for a fault of its own, if the program has dropped one meanwhile, and so holds no lock and no claim; and
    /// nothing is on its way to a blade, for the steward, which faults may have to wait for, may wait for that.
    fn unshare(&mut self) {
        if !self.busy.is_empty() {
            self.drain();
        }
        for address in self.busy.drain(..) {
            // It fails where the mapping is gone or may not be written to.
            let _ = sys::unshare(address, PAGE_BYTES);
        }
    }

    /// Sets the states by what really arrived; returns the bits of the victims.
    fn settle(
        &mut self,
        superpage: &'static Superpage,
        chunk: usize,
        tray: u16,
        layer: usize,
        claim: &Claim,
    ) -> u64 {
        let arrived = self.arrived(tray);
        if arrived & !claim.mask() != 0 {
            fail_closed(&format!(
                "tray {tray} of the victim buffer holds frames {arrived:#x} where only {:#x} can be",
                claim.mask()
            ));
        }
        if arrived != 0 {
            self.core.frames.fill(tray, superpage, chunk, arrived);
        }
        for index in bits(claim.mask()) {
            let cell = &superpage.pages[chunk * CHUNK_PAGES + index];
            let before = claim.before[index];
            let state = match (arrived & (1 << index) != 0, before.has_copy()) {
                (false, _) => before,
                (true, true) => before.with_phase(Phase::Victim),
                (true, false) => before.with_phase(Phase::Victim).with_layer(layer),
            };
            cell.store(state);
        }
        arrived
    }

    fn arrived(&self, tray: u16) -> u64 {
        moves::occupied(&self.core.pagemap, self.core.frames.tray_address(tray), CHUNK_PAGES)
    }

    fn write(&mut self, superpage: &'static Superpage, tray: u16, layer: usize) {
        let writing = self.core.frames.begin_write(tray);
        self.writes.clear();
        for index in bits(writing) {
            let slot = FrameSlot { tray, index: u8::try_from(index).unwrap_or(0) };
            let Some(page) = self.core.frames.victim(slot) else {
                self.core.frames.end_write(slot);
                continue;
            };
            debug_assert!(std::ptr::eq(page.superpage, superpage));
            if !self.must_write(page, slot, layer) {
                self.core.frames.end_write(slot);
                continue;
            }
            let Some(at) = self.core.place(page, layer) else {
                continue;
            };
            let from = self.core.frames.address(slot) as *const u8;
            let token = u64::from(tray) << 8 | index as u64;
            self.writes.push(PageWrite { at, from, token });
        }
        let count = self.writes.len();
        if count == 0 {
            self.core.frames.push_clean(tray);
            return;
        }
        let segment = self.core.layers.segment(layer);
        let blade = segment.and_then(|segment| self.core.pool.blade_of(segment, superpage.id()));
        self.sent_to[usize::from(tray)] = blade.unwrap_or_default();
        self.unacknowledged[usize::from(tray)] = u8::try_from(count).unwrap_or(u8::MAX);
        self.trays_in_flight += 1;
        // SAFETY: the frames of a tray in flight belong to the evictor until its pages are acknowledged.
        if let Err(error) = unsafe { self.lane.write(&self.writes) } {
            sys::say(&format!("an eviction could not be sent: {error}"));
            let failed = std::mem::take(&mut self.writes);
            for write in &failed {
                self.acknowledge(write.token, Err(PageError::Deadline));
            }
            self.writes = failed;
        }
    }

    /// Whether a victim, whose frame stays where it is meanwhile, has to be written: its copy, if there is one, is
    /// given up then, before anything can be written to the copy's place.
    fn must_write(&mut self, page: Page, slot: FrameSlot, layer: usize) -> bool {
        let (core, state) = (self.core, page.cell().load());
        match leaving(state) {
            Leaving::Write => return true,
            Leaving::Return => return false,
            Leaving::Compare => {}
        }
        // SAFETY: the frame is there, and nobody writes to it, as long as it is marked as being written.
        let bytes = unsafe { &*(core.frames.address(slot) as *const [u8; PAGE_BYTES]) };
        let unchanged = core.copies.matches(page, bytes);
        core.copies.set_wanted(self.clean.compared(unchanged));
        if unchanged && core.has_place(page, state.layer()) {
            core.count(Counter::CleanDrops, 1);
            return false;
        }
        // Taken back or discarded meanwhile, it is no victim any more, and still has its copy.
        let given_up = page.cell().change(state, state.with_layer(layer).with_phase(Phase::Victim));
        if given_up {
            page.superpage.give_up_copy(state);
        }
        given_up
    }

    fn collect(&mut self) {
        self.lane.poll(&mut self.done);
        self.settle_done();
    }

    pub(crate) fn settle_done(&mut self) {
        while let Some(completion) = self.done.pop() {
            self.acknowledge(completion.token, completion.result);
        }
    }

    fn acknowledge(&mut self, token: u64, result: Result<(), PageError>) {
        if let Some(blade) = self.in_place.take(token, result.is_ok()) {
            return self.note_answer(blade, result);
        }
        let Ok(tray) = u16::try_from(token >> 8) else {
            return;
        };
        let slot = FrameSlot { tray, index: (token & 0xff) as u8 };
        self.core.frames.end_write(slot);
        self.note_answer(self.sent_to[usize::from(tray)], result);
        if result.is_ok() {
            self.core.count(Counter::PagesWritten, 1);
        } else {
            self.put_back(slot);
        }
        let left = &mut self.unacknowledged[usize::from(tray)];
        *left -= 1;
        if *left == 0 {
            self.trays_in_flight -= 1;
            self.core.frames.push_clean(tray);
        }
    }

    fn note_answer(&mut self, blade: BladeIndex, result: Result<(), PageError>) {
        match result {
            Ok(()) if self.refusals.is_empty() => {}
            Ok(()) => {
                self.refusals.accept(blade);
            }
            Err(error) => self.note_refusal(blade, error),
        }
    }

    /// The blade did not take the page: it goes back into the program, where it is safe.
    fn put_back(&mut self, slot: FrameSlot) {
        let Some(page) = self.core.frames.victim(slot) else {
            return;
        };
        let Some(state) = page.cell().claim(Phase::Victim, Phase::Fetching) else {
            return;
        };
        let (to, from) = (page.address(), self.core.frames.address(slot));
        let moved = moves::move_pages(self.core, Mover::Evictor, to, from, 1, true);
        if moved.has_gone(0) {
            self.core.frames.moved_away(slot);
            page.cell().store(state.with_phase(Phase::Resident));
        } else {
            let copied = until_settled(self.core, Mover::Evictor, |_| {
                self.core.uffd.copy(to, from, PAGE_BYTES, true)
            });
            match copied.errno {
                None => {
                    self.core.frames.invalidate(slot);
                    page.cell().store(state.with_phase(Phase::Resident));
                }
                // A change comes first, or the mapping is gone, and whoever unmaps it clears the state.
                Some(libc::ECANCELED | libc::ENOENT | libc::ESRCH) => {
                    self.core.frames.keep(slot);
                    page.cell().store(state);
                }
                Some(errno) => fail_closed(&format!(
                    "page {to:#x}, which the blade did not take, cannot be put back: {}",
                    std::io::Error::from_raw_os_error(errno)
                )),
            }
        }
        let _ = self.core.uffd.wake(to, PAGE_BYTES);
    }

    fn wait_for_blade(&mut self, most_in_flight: usize) {
        while self.trays_in_flight > most_in_flight {
            self.lane.wait(&mut self.done);
            self.settle_done();
        }
    }

    fn drain(&mut self) {
        self.wait_for_blade(0);
    }

    /// Gives the oldest free frames back to the kernel, about `pages` of them; returns how many it was.
    fn release(&mut self, pages: i64) -> i64 {
        let Some(least) = usize::try_from(pages).ok().filter(|least| *least > 0) else {
            return 0;
        };
        self.core.frames.take_trays(least, &mut self.taken);
        let released = self.taken.iter().map(TakenTray::pages).sum();
        self.core.frames.release(&mut self.taken);
        released
    }
}

/// Whether a superpage has memory in a layer.
fn has_memory(superpage: &Superpage, layer: usize) -> bool {
    layer < MAX_LAYERS && superpage.allocated.load(SeqCst) & (1 << layer) != 0
}

/// Pages of a chunk that the evictor owns for a moment.
pub(crate) struct Claim {
    /// Pages to move out.
    taken: u64,
    /// Pages between them that are not there.
    gaps: u64,
    before: [PageState; CHUNK_PAGES],
}

impl Claim {
    fn mask(&self) -> u64 {
        self.taken | self.gaps
    }

    /// Pages to move out.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// The state a page had.
    pub(crate) fn before(&self, index: usize) -> PageState {
        self.before[index]
    }

    /// These pages give up their copies: something may be written to the copies' places.
    pub(crate) fn give_up_copies(&mut self, superpage: &Superpage, pages: u64) {
        for index in bits(pages) {
            superpage.give_up_copy(self.before[index]);
            self.before[index] = self.before[index].with_copy(false);
        }
    }

    /// These pages are not the claim's any more; somebody else has set their states.
    pub(crate) fn release(&mut self, pages: u64) {
        self.taken &= !pages;
        self.gaps &= !pages;
    }

    fn is_resident(&self, index: usize) -> bool {
        self.taken & (1 << index) != 0
    }
}

fn claim(superpage: &'static Superpage, chunk: usize, take: u64, resident: u64) -> Claim {
    let mut claim = Claim { taken: 0, gaps: 0, before: [PageState::UNTOUCHED; CHUNK_PAGES] };
    let (first, last) = (take.trailing_zeros() as usize, 63 - take.leading_zeros() as usize);
    for index in first..=last {
        let wanted = take & (1 << index) != 0;
        let absent = resident & (1 << index) == 0;
        let page = Page { superpage, index: chunk * CHUNK_PAGES + index };
        let state = page.cell().load();
        let claimable = match state.phase() {
            Phase::Untouched => wanted || absent,
            Phase::Resident => wanted,
            Phase::Far => absent,
            _ => false,
        };
        if claimable && page.cell().change(state, state.with_phase(Phase::Evicting)) {
            claim.before[index] = state;
            let set = if wanted { &mut claim.taken } else { &mut claim.gaps };
            *set |= 1 << index;
        }
    }
    claim
}
