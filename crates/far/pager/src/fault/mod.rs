//! A fault thread: takes page faults, answers them.
//!
//! The life of a fault, in order (each stage is one function below):
//! 1. `lead`, `follow`: the message is read from userfaultfd, on the CPU where the fault happened if it
//!    can be had (see [`crate::shared::crew`]);
//! 2. `serve`: the page's phase decides: zero pages, the victim buffer, or a fetch;
//! 3. `fetch`: the page and the prefetcher's candidates are claimed, given frames, and requested at once;
//! 4. `land` (in `landing`): frames that have arrived are moved into the program, which wakes the thread;
//! 5. `take`, at its end: a kick for the evictor when the reserve is low.
//!
//! Invariants: nothing here allocates after start, takes the registry's lock, or waits without bound on
//! the evictor: when no frame becomes free in time, memory goes over the limit by a page and that is
//! counted, for a program that waits for ever is worse.

pub(crate) mod fetch;
mod first_touch;
mod landing;

use std::time::{Duration, Instant};

use farpool_board::{Counter, Fault};
use farpool_policy::PrefetchWindow;
use farpool_policy::reserve::{LEAST_MOVED_PAGES, MAX_ZERO_RUN};
use farpool_pool::{Completion, Lane, PageRead};
use farpool_uffd::{Event, Message};
use farpool_units::{PAGE_BYTES, at_most, exactly};

use crate::abort::{fail_closed, panic_if_asked};
use crate::core::forget::give_up;
use crate::core::{Core, EXPIRY_STEP, Mover, until_settled};
use crate::shared::crew::{Follow, MEMBER_STEP, Watch};
use crate::space::Page;
use crate::space::frames::{FrameRun, FrameSlot};
use crate::space::page::Phase;
use crate::sys::{self, Stamp};

/// Messages taken with one read.
const MESSAGES: usize = 8;
/// Pages one thread can have requested at a time; at the limit it finishes those first.
const MAX_FLIGHTS: usize = 512;
/// Pages of a thread's own for fetches while there is no free frame; beyond, faults wait.
const STAGE_PAGES: usize = 64;
/// Their memory is given back when there was no fault for so long.
const STAGE_REST: Duration = Duration::from_millis(100);
/// In Solo the lead looks for an answer of a blade so long before it sleeps: about a round trip on a rack.
const ANSWER_SPIN: Duration = Duration::from_micros(50);
/// A fault waits at most this long, in total, for the evictor to free a frame.
const FRAME_WAIT: Duration = Duration::from_millis(50);
/// A fault waits at most this long for the allowance to be filled before it takes from the victim buffer.
const ROOM_WAIT: Duration = Duration::from_millis(5);
/// With a full pool, or with all memory pinned, hardly anything can be freed: the program is slowed, and goes
/// over the limit.
const FRAME_WAIT_VAIN: Duration = Duration::from_millis(1);
/// One look at the frames at least this often while waiting.
const FRAME_WAIT_STEP: Duration = Duration::from_millis(1);
/// The same while it is another process's turn, which lasts longer: the processor is that one's.
const TURN_WAIT_STEP: Duration = Duration::from_millis(10);

/// Between two looks whether the steward has applied a change; it wakes this thread when it has.
const STEWARD_WAIT: Duration = Duration::from_millis(1);

/// Where an arriving page is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// A frame of the buffer; it is moved into the program.
    Slot(FrameSlot),
    /// A page of this thread's own; it is copied into a new frame.
    Stage(usize),
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    page: Page,
    frame: Frame,
    demand: bool,
    started: Stamp,
}

/// See the module's description.
#[derive(Debug)]
pub struct FaultThread {
    core: &'static Core,
    lane: Lane,
    window: PrefetchWindow,
    /// Room for [`MAX_FLIGHTS`] is reserved and takes memory when it is used.
    flights: Vec<Option<Flight>>,
    free_flights: Vec<usize>,
    claimed: Vec<Page>,
    reads: Vec<PageRead>,
    done: Vec<Completion>,
    landed: Vec<Flight>,
    stage: usize,
    free_stage: Vec<usize>,
    /// Pages of the stage, from its beginning, that may take memory.
    stage_used: usize,
    zeros: usize,
    /// Which pages of the run of first touches that is being filled were in phase Dropped.
    dropped: u64,
    /// Times this thread has entered the gate and not left it.
    passes: u32,
    /// When deadlines were last looked at.
    expired: Instant,
}

impl FaultThread {
    pub fn new(core: &'static Core, lane: Lane) -> Result<Self, std::io::Error> {
        let bytes = (STAGE_PAGES + MAX_ZERO_RUN) * PAGE_BYTES;
        let stage = sys::map_local_without_children(bytes)?;
        Ok(FaultThread {
            core,
            lane,
            window: PrefetchWindow::EMPTY,
            flights: Vec::with_capacity(MAX_FLIGHTS),
            free_flights: Vec::with_capacity(MAX_FLIGHTS),
            claimed: Vec::with_capacity(MAX_FLIGHTS),
            reads: Vec::with_capacity(MAX_FLIGHTS),
            done: Vec::with_capacity(MAX_FLIGHTS),
            landed: Vec::with_capacity(MAX_FLIGHTS),
            stage,
            free_stage: (0..STAGE_PAGES).rev().collect(),
            stage_used: 0,
            zeros: stage + STAGE_PAGES * PAGE_BYTES,
            dropped: 0,
            passes: 0,
            expired: Instant::now(),
        })
    }

    /// Serves faults until the process ends, alone or with the crowd.
    pub fn lead(mut self, cpu: usize) -> ! {
        self.core.crew.be_lead();
        let mut messages = [Message::default(); MESSAGES];
        let mut follow = Follow::new();
        let mut waited = false;
        let mut crowded = false;
        loop {
            let crowd = !self.core.crew.is_solo();
            if crowd && !crowded {
                sys::pin_to(cpu);
            }
            crowded = crowd;
            match self.read_messages(&mut messages) {
                0 => {
                    self.core.crew.begin_round(self.lane.in_flight() > 0);
                    self.wait_for_anything(None);
                    waited = true;
                }
                count => {
                    self.core.crew.begin_round(true);
                    let thread = messages[0].event().thread;
                    self.serve_all(&messages[..count]);
                    self.core.crew.advance(&mut follow, count, thread, waited);
                    waited = false;
                }
            }
        }
    }

    /// Serves faults on one CPU whenever the crowd is wanted. `watches`: until then it looks after the lead.
    pub fn follow(mut self, cpu: usize, watches: bool) -> ! {
        sys::pin_to(cpu);
        let mut messages = [Message::default(); MESSAGES];
        let mut watch = Watch::new();
        loop {
            if self.lane.in_flight() == 0 {
                if self.core.crew.is_solo() {
                    self.release_stage();
                }
                if watches {
                    self.core.crew.watch(&mut watch, &self.core.uffd);
                    sys::pin_to(cpu);
                }
                self.core.crew.wait_for_crowd();
            }
            match self.read_messages(&mut messages) {
                0 => self.wait_for_anything(Some(MEMBER_STEP)),
                count => self.serve_all(&messages[..count]),
            }
        }
    }

    fn serve_all(&mut self, messages: &[Message]) {
        panic_if_asked();
        for message in messages {
            self.await_changes();
            self.take(message.event());
        }
        self.check_deadlines();
        self.land();
        self.leave_when_idle();
    }

    /// Waits until the steward has applied what the program changed: a fault after a change is served by what is
    /// true after it. Pages that arrive meanwhile are far again, see [`crate::space::layout`].
    fn await_changes(&mut self) {
        while self.core.layout.is_behind() {
            if self.lane.in_flight() > 0 {
                self.lane.wait(&mut self.done);
                self.land();
            } else {
                self.core.layout.wait_for_steward(STEWARD_WAIT);
                // It may wait for a change that nobody has read yet.
                self.core.take_in();
            }
        }
    }

    /// Reads waiting messages; 0 when there are none.
    fn read_messages(&mut self, messages: &mut [Message]) -> usize {
        let core = self.core;
        match core.layout.read(&core.uffd, messages, |range| give_up(core, range)) {
            Ok(count) => count,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => 0,
                _ => fail_closed(&format!("userfaultfd cannot be read: {error}")),
            },
        }
    }

    /// Sleeps until there is a fault, an answer of a blade, or a deadline to check, at most for `most`;
    /// then takes in what blades have answered.
    fn wait_for_anything(&mut self, most: Option<Duration>) {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let uffd = &self.core.uffd;
        let mut fds: [PollFd<'_>; 1 + farpool_pool::MAX_BLADES] =
            std::array::from_fn(|_| PollFd::new(uffd, PollFlags::IN));
        let busy = self.lane.in_flight() > 0;
        let mut count = 1;
        if busy {
            for (entry, fd) in fds[1..].iter_mut().zip(self.lane.descriptors()) {
                *entry = PollFd::from_borrowed_fd(fd, PollFlags::IN);
                count += 1;
            }
        }
        let most = if busy { Some(most.unwrap_or(EXPIRY_STEP).min(EXPIRY_STEP)) } else { most };
        let is_staged = !busy && self.stage_used > 0;
        let most = if is_staged { Some(most.unwrap_or(STAGE_REST).min(STAGE_REST)) } else { most };
        let timeout = most.and_then(|most| Timespec::try_from(most).ok());
        if !(busy && self.core.crew.is_solo() && is_soon_ready(&mut fds[..count])) {
            let ready = rustix::event::poll(&mut fds[..count], timeout.as_ref());
            if is_staged && ready == Ok(0) {
                self.release_stage();
            }
        }
        self.check_deadlines();
        if busy {
            self.land();
            self.leave_when_idle();
        }
    }

    /// Looks at the deadlines of what is in flight when it is time, however many faults there are.
    fn check_deadlines(&mut self) {
        // A look at the clock is a system call in a sidecar, and this is done at every fault.
        if self.lane.in_flight() == 0 {
            return;
        }
        let now = Instant::now();
        if now >= self.expired + EXPIRY_STEP {
            self.expired = now;
            self.lane.expire(now, &mut self.done);
        }
    }

    fn take(&mut self, event: Event) {
        let Some(address) = event.page_address else {
            return;
        };
        if self.core.frames.contains(address) {
            return self.note_touched_frame(address, event.thread);
        }
        if !self.core.gate.enter(event.thread, address) {
            return;
        }
        self.passes += 1;
        self.core.count(Counter::Faults, 1);
        if self.core.board.fault_log().is_on() {
            self.note(event, address);
        }
        self.serve(event, address);
        if self.core.gate.is_shut() {
            // The forking thread must find everything settled when it goes on.
            while self.lane.in_flight() > 0 {
                self.lane.wait(&mut self.done);
                self.land();
            }
        }
        self.leave_when_idle();
        self.core.budget.kick_if_low(self.core.frames.free());
    }

    /// A frame that is missing is touched by nobody, but by the kernel for a program that locks all
    /// its memory: the evictor sees to that.
    #[cold]
    fn note_touched_frame(&self, address: usize, thread: u32) {
        let frames = &self.core.frames;
        let is_locked = sys::locked_bytes().is_some_and(|bytes| bytes > 0);
        if frames.recycles() || !is_locked {
            fail_closed(&format!(
                "a frame of the victim buffer is missing at {address:#x}, touched by thread \
                 {thread}: {}",
                frames.describe(address)
            ));
        }
        if frames.note_touched(address) {
            self.core.budget.kick();
        }
    }

    /// For whoever captures the run's faults.
    #[cold]
    fn note(&self, event: Event, address: usize) {
        self.core.board.fault_log().write(Fault {
            page_number: (address / PAGE_BYTES) as u64,
            is_write: event.is_write,
            time_ns: sys::monotonic_ns(),
            pid: self.core.slot.pid.load(std::sync::atomic::Ordering::Relaxed),
            thread: event.thread,
        });
    }

    /// What is still in flight keeps this thread inside the gate.
    fn leave_when_idle(&mut self) {
        if self.lane.in_flight() == 0 && self.done.is_empty() {
            for _ in 0..std::mem::take(&mut self.passes) {
                self.core.gate.leave();
            }
        }
    }

    fn serve(&mut self, event: Event, address: usize) {
        let started = Stamp::now();
        let Some(page) = self.core.space.page_or_new(address) else {
            fail_closed(&format!("address {address:#x} is far but beyond the table of superpages"));
        };
        loop {
            let state = page.cell().load();
            let served = match state.phase() {
                Phase::Untouched | Phase::Resident | Phase::Dropped if event.is_protected => {
                    self.unprotect(page)
                }
                Phase::Untouched | Phase::Dropped => self.zero_fill(page, event),
                Phase::Resident => self.refill(page),
                Phase::Victim => self.take_back(page),
                Phase::Far => match page.cell().claim(Phase::Far, Phase::Fetching) {
                    Some(_) => {
                        self.fetch(page, event.thread, started);
                        return;
                    }
                    None => false,
                },
                // Whoever fetches it wakes all who wait for it.
                Phase::Fetching => return,
                Phase::Lost => {
                    let _ = self.core.uffd.poison(address, PAGE_BYTES);
                    self.wake(page);
                    true
                }
                Phase::Evicting if self.core.crew.is_evictor(event.thread) => {
                    self.answer_evictor(page);
                    true
                }
                Phase::Evicting => {
                    rustix::thread::sched_yield();
                    false
                }
            };
            if served {
                self.record(started, false);
                return;
            }
        }
    }

    /// The evictor touched a page that it is moving out, and found nothing there: the program discarded it past us,
    /// which leaves zeros. If it was the evictor that took the page away, zeros would be wrong data.
    #[cold]
    fn answer_evictor(&self, page: Page) {
        if self.core.is_moved_out(page) {
            fail_closed(&format!(
                "page {:#x} is touched by the evictor, which has it",
                page.address()
            ));
        }
        let _ = self.core.uffd.zero(page.address(), PAGE_BYTES, true);
    }

    /// The evictor protected the page and could not move it out after all.
    fn unprotect(&mut self, page: Page) -> bool {
        // It fails when the mapping is gone; the thread tries again in any case.
        let _ = self.core.uffd.write_protect(page.address(), PAGE_BYTES, false);
        self.wake(page);
        true
    }

    /// The page is still in the victim buffer: it goes back, and is spared the next time.
    fn take_back(&mut self, page: Page) -> bool {
        let Some(state) = page.cell().claim(Phase::Victim, Phase::Fetching) else {
            return false;
        };
        let Some((slot, stays)) = self.core.frames.locate(page) else {
            fail_closed(&format!("page {:#x} is a victim but not in the buffer", page.address()));
        };
        let outcome = if stays { None } else { Some(self.move_in(page, slot, 1)) };
        match outcome {
            Some(moved) if moved.has_gone(0) => self.core.frames.moved_away(slot),
            _ => {
                let address = self.core.frames.address(slot);
                let copied = until_settled(self.core, Mover::FaultThread, |_| {
                    self.core.uffd.copy(page.address(), address, PAGE_BYTES, false)
                });
                match copied.errno {
                    None | Some(libc::EEXIST) => {}
                    // A change comes first; the thread tries again after it.
                    // Or the mapping is gone, or just being moved; whoever does that sees to the state.
                    Some(libc::ECANCELED | libc::ENOENT | libc::ESRCH) => {
                        self.core.frames.put_back(page, state, slot);
                        self.wake(page);
                        return true;
                    }
                    // As a victim again it could pass for written, which it may not be.
                    Some(errno) => fail_closed(&format!(
                        "page {:#x} cannot be taken back: {}",
                        page.address(),
                        std::io::Error::from_raw_os_error(errno)
                    )),
                }
                self.core.budget.overdraw(1);
                self.core.frames.invalidate(slot);
            }
        }
        page.mark_used();
        page.superpage.hot[page.chunk()].fetch_or(page.bit(), std::sync::atomic::Ordering::Relaxed);
        page.cell().store(state.with_phase(Phase::Resident));
        self.core.count(Counter::VictimHits, 1);
        self.wake(page);
        true
    }

    /// Requests a page that the caller has claimed, and what the prefetcher expects after it.
    fn fetch(&mut self, page: Page, thread: u32, started: Stamp) {
        while self.places() < 1 + farpool_policy::MAX_PREFETCH_PAGES as usize {
            self.lane.wait(&mut self.done);
            self.land();
        }
        self.claimed.clear();
        self.claimed.push(page);
        if !self.core.gate.is_shut() {
            self.core.streams.expect(thread, page.address(), &mut self.window);
            self.claim_window();
        }
        self.assign_frames(started);
        self.core.count(Counter::DemandFetches, 1);
        self.core.count(Counter::Prefetches, (self.reads.len().max(1) - 1) as u64);
        if self.reads.is_empty() {
            return;
        }
        // SAFETY: each target is a frame that this thread has taken for the page and gives away only in
        // `land`, after the completion.
        if let Err(error) = unsafe { self.lane.read(&self.reads) } {
            self.fail_reads(&error);
        }
        self.reads.clear();
        self.land();
    }

    fn claim_window(&mut self) {
        for number in self.window.pages() {
            // A guess may be beyond all addresses.
            let Some(address) = at_most::<usize, _>(number).checked_mul(PAGE_BYTES) else {
                break;
            };
            let Some(page) = self.core.space.page(address) else {
                continue;
            };
            if page.cell().claim(Phase::Far, Phase::Fetching).is_some() {
                self.claimed.push(page);
            }
        }
    }

    /// Gives each claimed page a frame, in neighbouring ones where there are any; prefetches that get none
    /// are dropped. Fills `reads`.
    fn assign_frames(&mut self, started: Stamp) {
        let mut next = 0;
        let is_copied = self.claimed.len() < LEAST_MOVED_PAGES || !self.core.frames.recycles();
        let copied = if is_copied { self.claimed.len() } else { 0 };
        while next < copied && !self.free_stage.is_empty() && self.spend(1, next == 0) {
            let stage = self.stage_page();
            self.depart(next, Frame::Stage(stage), started);
            next += 1;
        }
        while next < self.claimed.len() {
            let wanted = self.claimed.len() - next;
            if let Some(run) = self.frame_run(wanted) {
                for offset in 0..run.count {
                    self.depart(next + offset, Frame::Slot(run.slot(offset)), started);
                }
                next += run.count;
                continue;
            }
            if next > 0 {
                break;
            }
            match self.frame(true) {
                Some(slot) => self.depart(0, Frame::Slot(slot), started),
                None => {
                    let stage = self.stage_page();
                    self.depart(0, Frame::Stage(stage), started);
                }
            }
            next = 1;
        }
        let dropped = &self.claimed[next.min(self.claimed.len())..];
        dropped.iter().for_each(|page| self.unfetch(*page));
        // Their threads may have been told to wait for the fetch.
        for run in dropped.chunk_by(|a, b| a.address() + PAGE_BYTES == b.address()) {
            let _ = self.core.uffd.wake(run[0].address(), run.len() * PAGE_BYTES);
        }
    }

    fn depart(&mut self, claimed: usize, frame: Frame, started: Stamp) {
        let page = self.claimed[claimed];
        let state = page.cell().load();
        let Some(at) = self.core.place(page, state.layer()) else {
            fail_closed(&format!(
                "page {:#x} is in layer {} which is gone",
                page.address(),
                state.layer()
            ));
        };
        let Some(flight) = self.place() else {
            fail_closed("more pages requested than there are places for");
        };
        let into = match frame {
            Frame::Slot(slot) => self.core.frames.address(slot),
            Frame::Stage(index) => self.stage + index * PAGE_BYTES,
        };
        assert!(self.flights[flight].is_none(), "a flight has its place alone");
        self.flights[flight] = Some(Flight { page, frame, demand: claimed == 0, started });
        self.reads.push(PageRead { at, into: into as *mut u8, token: flight as u64 });
    }

    /// Flights for which there is a place.
    fn places(&self) -> usize {
        self.free_flights.len() + MAX_FLIGHTS - self.flights.len()
    }

    /// A place for a flight; None if all are taken.
    fn place(&mut self) -> Option<usize> {
        let new = self.flights.len();
        self.free_flights.pop().or_else(|| {
            (new < MAX_FLIGHTS).then(|| {
                self.flights.push(None);
                new
            })
        })
    }

    fn stage_page(&mut self) -> usize {
        if self.free_stage.len() == STAGE_PAGES {
            // In order, so that a run is copied with one call.
            self.free_stage.sort_unstable_by_key(|index| std::cmp::Reverse(*index));
        }
        loop {
            if let Some(index) = self.free_stage.pop() {
                self.stage_used = self.stage_used.max(index + 1);
                return index;
            }
            self.lane.wait(&mut self.done);
            self.land();
        }
    }

    /// Gives the stage's memory back; nothing must be in flight. It counts against the limit, in each process.
    fn release_stage(&mut self) {
        assert_eq!(self.free_stage.len(), STAGE_PAGES, "a page of the stage is in flight");
        // Locked by the program it stays, and is written over.
        let _ = sys::release(self.stage, std::mem::take(&mut self.stage_used) * PAGE_BYTES);
    }

    /// Free frames without waiting, but not the last ones, which are for demand.
    fn frame_run(&self, wanted: usize) -> Option<FrameRun> {
        let (run, _) = self.core.frames.take(wanted)?;
        Some(run)
    }

    /// Takes new pages from the allowance. `waits`: the evictor, which in Solo works on this CPU when this
    /// thread does not, is given the time to make room.
    fn spend(&mut self, pages: usize, waits: bool) -> bool {
        let pages = exactly(pages);
        let core = self.core;
        if core.budget.try_spend(pages) {
            return true;
        }
        let is_vain = core.is_vain() || core.leaving.load(std::sync::atomic::Ordering::Relaxed);
        if !waits || !core.crew.is_solo() || core.gate.is_shut() || is_vain {
            return false;
        }
        let deadline = Instant::now() + ROOM_WAIT;
        loop {
            let version = core.frames.version();
            if core.budget.try_spend(pages) {
                return true;
            }
            if Instant::now() >= deadline || core.gate.is_shut() {
                return false;
            }
            core.budget.kick();
            core.frames.wait(version, FRAME_WAIT_STEP);
        }
    }

    /// How long to wait for a frame, and how long between two looks.
    fn patience(&self) -> (Duration, Duration) {
        use std::sync::atomic::Ordering::Relaxed;
        let core = self.core;
        if core.leaving.load(Relaxed) {
            // Nothing is moved out any more.
            (Duration::ZERO, FRAME_WAIT_STEP)
        } else if core.out_of_turn.load(Relaxed) {
            (FRAME_WAIT, TURN_WAIT_STEP)
        } else if core.least.load(Relaxed)
            || core.refused.load(Relaxed)
            || core.is_vain() && core.is_unmovable.load(Relaxed)
        {
            (Duration::ZERO, FRAME_WAIT_STEP)
        } else if core.is_vain() {
            (FRAME_WAIT_VAIN, FRAME_WAIT_STEP)
        } else {
            (FRAME_WAIT, FRAME_WAIT_STEP)
        }
    }

    /// A free frame; waits for the evictor if need be. None: take new memory (it is paid for, or cannot
    /// be helped).
    fn frame(&mut self, may_overrun: bool) -> Option<FrameSlot> {
        let (wait, step) = self.patience();
        let deadline = Instant::now() + wait;
        loop {
            let version = self.core.frames.version();
            if let Some((run, _)) = self.core.frames.take(1) {
                return Some(run.first);
            }
            if self.core.budget.try_spend(1) {
                return None;
            }
            if Instant::now() >= deadline || self.core.gate.is_shut() {
                if may_overrun {
                    self.core.count(Counter::Overruns, 1);
                    self.core.budget.overdraw(1);
                }
                return None;
            }
            self.core.budget.kick();
            self.core.frames.wait(version, step);
        }
    }

    fn wake(&self, page: Page) {
        let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
    }

    fn record(&self, started: Stamp, fetched: bool) {
        let Some(latency_ns) = started.elapsed_ns() else { return };
        let slot = self.core.slot;
        let histogram = if fetched { &slot.fetch_latency } else { &slot.other_latency };
        histogram.record(latency_ns);
    }
}

/// Looks for [`ANSWER_SPIN`] whether one of the descriptors is ready. Under SCHED_IDLE that takes the CPU from
/// nobody, and saves the wake-up of a CPU that has gone to sleep.
fn is_soon_ready(fds: &mut [rustix::event::PollFd<'_>]) -> bool {
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let until = Instant::now() + ANSWER_SPIN;
    while rustix::event::poll(fds, Some(&zero)).is_ok_and(|ready| ready == 0) {
        if Instant::now() >= until {
            return false;
        }
        std::hint::spin_loop();
    }
    true
}
