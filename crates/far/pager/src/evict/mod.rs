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

pub(crate) mod density;
pub(crate) mod effort;
pub mod exits;
pub(crate) mod gauges;
mod locked;
mod moving;
mod own;
pub(crate) mod refusals;
pub mod resident_map;
mod room;
mod shared;
mod still;
mod stubborn;
pub(crate) mod thrash;
mod writing;

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_policy::reserve::{LEAST_WORKING_PAGES, Work};
use farpool_policy::{Choice, ChunkSweep, CleanEstimator, SweepPolicy, VictimKind};
use farpool_pool::{BladeIndex, Completion, Lane, PageWrite};
use farpool_units::at_most;

use crate::abort::panic_if_asked;
use crate::core::{Core, EXPIRY_STEP};
use crate::evict::density::Density;
use crate::evict::effort::Effort;
use crate::evict::exits::Tails;
use crate::evict::gauges::Gauges;
use crate::evict::refusals::Refusals;
use crate::evict::resident_map::ResidentMap;
use crate::evict::thrash::Stall;
use crate::shared::turn::{Turn, Turns};
use crate::space::Superpage;
use crate::space::frames::{TRAYS, TakenTray, Zone};
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES, CHUNKS, NO_TRAY};
use crate::space::way::Way;
use crate::sys;
use moving::claim;
use own::{Own, Tried, Wanted};
use room::has_memory;
use shared::InPlace;
use still::{Aside, Moved, next_way};
use stubborn::Stubborn;

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
/// In Solo the evictor works on the faulting thread's CPU, so much at a time (half a millisecond,
/// or two if its pages are scattered), and pauses for so long unless it is called. All that is
/// wanted at once: of random faults one in 130 met a round of 256 pages, which is more than one in
/// a hundred with what else they meet.
const BURST_PAGES: i64 = 512;
/// Frames that are given back at a time: four dense trays, for which other processors are interrupted once.
const STEP_PAGES: i64 = 256;
const BREATH: Duration = Duration::from_micros(100);
/// A rest after rounds that found little ends when so much memory has come (2 MiB), which is looked at this often.
const GROWN_PAGES: i64 = 512;
const REST_STEP: Duration = Duration::from_millis(1);
/// Chunks looked at in vain before the evictor gives up for now: one lap at most.
const MAX_BARREN_CHUNKS: usize = 1 << 16;
/// The longest that a change of the address space is waited for at a time; the steward wakes who waits.
const STEWARD_WAIT: Duration = Duration::from_millis(1);
/// A full pool is asked again after this time.
const FULL_RETRY: Duration = Duration::from_millis(500);

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
    /// Pages of the chunk in hand that the kernel would not move, one bit each.
    busy: u64,
    own: Option<Own>,
    /// What can be moved out only while the program stands still.
    aside: Aside,
    stubborn: Stubborn,
    /// When this round began: a look at the clock is a system call in a sidecar.
    round_began: Instant,
    /// The end of a mapping that is to be looked at before anything of it is moved out.
    unseen_tail: Option<Range<usize>>,
    /// Frames with poison in them, see [`locked`].
    poisoned: Vec<usize>,
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
            busy: 0,
            own: None,
            aside: Aside::new(),
            stubborn: Stubborn::default(),
            round_began: Instant::now(),
            unseen_tail: None,
            poisoned: Vec::new(),
        })
    }

    /// Evicts until the process ends.
    pub fn run(mut self) -> ! {
        self.core.crew.be_evictor();
        loop {
            self.check_deadlines();
            self.end_walks();
            self.evict_retired();
            let look = self.core.budget.look(self.core.slot);
            self.gauges.publish();
            let free = self.core.frames.free();
            let turn = self.look_for_turn();
            let work = self.core.budget.refresh(look, self.core.board, self.core.slot, free, turn);
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
        let processes = at_most::<u32, _>(self.core.board.processes().count());
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
        let (mut evicted, released) =
            self.make_room(work.evict_pages.min(most), work.release_pages.min(most));
        let is_barren = evicted == 0 && released == 0;
        evicted += self.move_aside(work.evict_pages - evicted, is_barren);
        self.core.least.store(false, Relaxed);
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
        let moved = (evicted + released).unsigned_abs();
        let worked = sys::processor_time().saturating_sub(began);
        if let Some(rest) = self.effort.note(worked, moved) {
            self.ease_off(rest);
        }
    }

    /// Moves pages out and gives frames back to the kernel, so many of each, in turn: who waits for room has it after
    /// the first step. Returns how many it was.
    fn make_room(&mut self, evict_pages: i64, release_pages: i64) -> (i64, i64) {
        let (mut evicted, mut released) = (0, 0);
        while evicted < evict_pages {
            let step = STEP_PAGES.min(evict_pages - evicted);
            let moved = self.evict(step);
            evicted += moved;
            if moved < step {
                break;
            }
            released += self.give_back((release_pages - released).min(STEP_PAGES));
        }
        self.collect();
        if self.trays_in_flight > 0 {
            self.wait_for_blade(MAX_TRAYS_IN_FLIGHT / 2);
        }
        released += self.give_back(release_pages - released);
        (evicted, released)
    }

    /// Gives about so many frames back to the kernel, and says so to who waits for room.
    fn give_back(&mut self, pages: i64) -> i64 {
        let released = self.release(pages);
        if released > 0 {
            self.core.budget.refund(released);
            self.core.frames.announce();
        }
        released
    }

    /// Rests after a round that found little, unless memory grows meanwhile. Nobody waits for room.
    fn ease_off(&mut self, rest: Duration) {
        // Others may wait for what is on its way.
        self.drain();
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
        self.round_began = Instant::now();
        let mut evicted = 0;
        let barren_limit = (self.core.space.count() * CHUNKS).min(MAX_BARREN_CHUNKS);
        let mut barren = 0;
        while evicted < pages && barren <= barren_limit {
            let Some(chunk) = self.sweep.next_chunk() else {
                break;
            };
            // Busy: the steward is at work; what is under way must not wait for it.
            let Some(moved) = self.evict_chunk(chunk, Wanted::Chosen) else {
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
                    if self.core.leaving.load(SeqCst) {
                        return;
                    }
                    if self.evict_chunk(number, Wanted::All).is_none() {
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
        self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut self.taken);
        self.core.frames.retire_all();
    }

    /// Moves the wanted pages of a chunk out; returns how many there were. None: not now.
    fn evict_chunk(&mut self, number: usize, wanted: Wanted) -> Option<i64> {
        let before = self.move_own()?;
        let moved = match self.try_chunk(number, wanted)? {
            Tried::Moved(pages) => pages,
            Tried::Shared(own) => {
                self.make_own(own.number, own.shared);
                self.own = Some(own);
                self.move_own()?
            }
        };
        Some(before + moved)
    }

    /// As [`Evictor::evict_chunk`], but pages that other processes map too may stay.
    fn try_chunk(&mut self, number: usize, wanted: Wanted) -> Option<Tried> {
        loop {
            let tried = self.try_known_chunk(number, wanted)?;
            let Some(tail) = self.unseen_tail.take() else { return Some(tried) };
            let Some(is_descriptor) = exits::look(self.core, &tail) else {
                // The map of resident pages is out of date.
                self.map.forget(number % CHUNKS);
                return Some(tried);
            };
            let mut registry = self.core.registry.try_lock().ok()?;
            registry.see_tail(tail.end, is_descriptor, Instant::now());
        }
    }

    /// As [`Evictor::try_chunk`], if it is known what lies at the ends of the chunk's mappings.
    fn try_known_chunk(&mut self, number: usize, wanted: Wanted) -> Option<Tried> {
        const NOTHING: Option<Tried> = Some(Tried::Moved(0));
        let core = self.core;
        let superpage = core.space.by_id(number / CHUNKS)?;
        let chunk = number % CHUNKS;
        if wanted == Wanted::Chosen && self.stubborn.is_passed_over(number, self.round_began) {
            return NOTHING;
        }
        if superpage.trays[chunk].load(SeqCst) != NO_TRAY || !self.may_write(superpage) {
            return NOTHING;
        }
        if core.layout.is_behind() {
            // The steward wants the lock, and would hardly get it from who takes it again and again.
            core.layout.wait_for_steward(STEWARD_WAIT);
            return None;
        }
        let registry = core.registry.try_lock().ok()?;
        // Whoever leaves the program looks under this lock that nothing is away.
        if core.gate.is_shut() || core.leaving.load(SeqCst) {
            return None;
        }
        // A fork since `may_write` has begun a new layer. From here on none can begin before the tray
        // is written: it waits for the lock, and then for the tray.
        let layer = core.layers.current();
        if !has_memory(superpage, layer) {
            return NOTHING;
        }
        let resident = self.map.resident(core, &registry, superpage, chunk);
        if resident == 0 {
            if wanted == Wanted::Chosen {
                // Of a sparse address space hardly anything else would be looked at.
                self.passed_over = self.map.empty_after(chunk);
                self.sweep.pass_over(self.passed_over);
            }
            return NOTHING;
        }
        let (mut resident, start) = (resident, superpage.base() + chunk * CHUNK_BYTES);
        if core.layout.follows() {
            match exits::tails(&registry, start, resident, Instant::now()) {
                Tails::Known(held) => resident &= !held,
                Tails::Unknown(tail) => {
                    self.unseen_tail = Some(tail);
                    return NOTHING;
                }
            }
        }
        let (way, resident) =
            next_way(&registry, start, resident, |protection| core.way(protection));
        let zone = match way {
            Way::Move(zone) if wanted != Wanted::Still => zone,
            Way::Standstill if wanted == Wanted::Still => Zone::ReadWrite,
            Way::Standstill => {
                let pages = self.choose(number, superpage, resident, wanted);
                self.aside.put(number, u64::from(pages.count_ones()));
                return NOTHING;
            }
            _ => return NOTHING,
        };
        let tray = core.frames.take_empty(zone)?;
        self.clear_poison(tray);
        let take = self.choose(number, superpage, resident, wanted);
        let may_share = wanted.may_be_shared() && core.shares.load(SeqCst) && core.layout.follows();
        let shared = if may_share { self.shared_pages(number, take) } else { 0 };
        if take == 0 || shared != 0 {
            core.frames.return_empty(tray);
            return Some(Tried::of(Own { number, take, shared }));
        }
        let loans = (wanted == Wanted::Still).then(|| self.lend(&registry, start, take));
        if loans.is_some() {
            self.make_own_at_standstill(number, start, take);
        }
        let mut claim = claim(superpage, chunk, take, resident);
        let written = self.write_shared(superpage, chunk, layer, &mut claim);
        core.filling.store(tray, SeqCst);
        let refused = self.move_out(superpage, chunk, tray, &claim);
        let moved = self.settle(superpage, chunk, tray, layer, &claim);
        core.filling.store(NO_TRAY, SeqCst);
        if let Some(loans) = loans {
            self.give_rights_back(loans);
        }
        drop(registry);
        let busy = self.take_busy(number);
        if moved == 0 && busy != 0 && wanted.may_be_shared() {
            core.frames.return_empty(tray);
            return Some(Tried::Shared(Own { number, take: busy, shared: busy }));
        }
        self.map.forget(chunk);
        if moved == 0 {
            core.frames.return_empty(tray);
            // Pages that are busy can be made the process's own.
            if busy == 0 && refused == claim.taken() {
                self.stubborn.note(number, self.round_began);
            }
            self.make_own(number, busy);
            return Some(Tried::Moved(written));
        }
        self.stubborn.forget(number);
        core.count(Counter::Evictions, u64::from(moved.count_ones()));
        core.count(Counter::EvictedChunks, 1);
        self.density.add(moved);
        let count = i64::from(moved.count_ones());
        if wanted == Wanted::Still {
            self.aside.keep(Moved { superpage, tray, layer });
            return Some(Tried::Moved(count));
        }
        self.write(superpage, tray, layer);
        self.make_own(number, busy);
        Some(Tried::Moved(written + count))
    }

    /// The pages of a chunk to move out.
    fn choose(
        &mut self,
        number: usize,
        superpage: &Superpage,
        resident: u64,
        wanted: Wanted,
    ) -> u64 {
        let hot = &superpage.hot[number % CHUNKS];
        let choice = match wanted {
            Wanted::Chosen => self.sweep.choose(number, resident, hot.load(Relaxed)),
            Wanted::All | Wanted::Still => Choice { take: resident, clear_hot: resident },
            Wanted::These(pages) => Choice { take: pages & resident, clear_hot: 0 },
        };
        hot.fetch_and(!choice.clear_hot, Relaxed);
        choice.take
    }

    /// Gives the oldest free frames back to the kernel, about `pages` of them; returns how many it was.
    fn release(&mut self, pages: i64) -> i64 {
        let Some(least) = usize::try_from(pages).ok().filter(|least| *least > 0) else {
            return 0;
        };
        self.core.frames.take_trays(least, &mut self.taken);
        let released = self.taken.iter().map(TakenTray::pages).sum();
        self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut self.taken);
        released
    }
}
