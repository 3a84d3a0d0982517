//! One pager thread's way to the blades.
//!
//! A lane connects to a blade when it first has a page for it. Writes to a page that is being moved
//! at this moment wait inside the lane and count as in flight.

mod copies;
mod flights;
mod parity;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_fabric::{Link, LinkPage, PageDone, PageFault, ShmLink, StreamLink};
use farpool_units::exactly;
use farpool_wire::{Address, ErrorCode};
use rustix::event::{PollFd, PollFlags};

use crate::hedging::{AnswerTimes, Choice};
use crate::sealing::{
    Asked, COPY_BITS, CopySet, FlightCopy, FlightNumber, NO_COPY, Outcome, Sealer,
};
use crate::seals::Seals;
use crate::shared::{Found, LaneClock, Shared};
use crate::types::Access;
use crate::{
    BladeIndex, COPIES_LIMIT, Completion, MAX_BLADES, PageError, PageRead, PageWrite, PoolError,
    Redundancy, SegmentHandle, SegmentPage,
};
use flights::ParityFlights;

/// Longest that `wait` sleeps before it checks the deadlines again.
const WAIT_STEP: Duration = Duration::from_millis(20);
/// Longest that `wait` sleeps while a write waits for the mover, which takes about as long for a
/// page.
const MOVER_STEP: Duration = Duration::from_micros(100);
/// Completions that a lane holds without allocating.
const DONE_CAPACITY: usize = 1024;

/// One pager thread's way to the blades: its own connections, no locks.
#[derive(Debug)]
pub struct Lane {
    shared: Arc<Shared>,
    clock: Arc<LaneClock>,
    /// Number of this lane's connection on every blade.
    slot: u32,
    /// One per blade slot.
    ways: [Way; MAX_BLADES],
    /// Pages given to links and not yet completed.
    with_links: usize,
    /// Blades of the current call in the order of their first page.
    order: Vec<usize>,
    /// Completions that no longer need a link.
    ready: Vec<Completion>,
    /// Writes to pages that the mover is copying.
    waiting: Vec<PageWrite>,
    /// Reads whose copy was of no use, what was tried, and why it failed.
    again: Vec<(PageRead, CopySet, PageError)>,
    scratch: Vec<PageDone>,
    /// None if pages are moved as they are stored.
    sealer: Option<Sealer>,
    choice: Choice,
    /// Pages whose parity matters.
    parity: ParityFlights,
    /// Nobody waits for its pages.
    is_background: bool,
    /// The phase being waited for, once seen; see [`Shared::phase`].
    phase: u64,
}

/// Who seals the pages that pass a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sealing {
    /// The lane does.
    ByLane,
    /// Nobody: they are sealed already, or never.
    AsStored,
}

/// The way to one blade.
#[derive(Debug, Default)]
struct Way {
    /// Generation of the blade's slot when the link was made.
    generation: u32,
    link: Option<Box<dyn Link>>,
    /// Pages of the current call.
    batch: Vec<LinkPage>,
    /// The link's mark when the phase began.
    mark: u64,
    times: AnswerTimes,
    /// Reads of pages with several copies that may not be answered, the oldest first.
    owed: VecDeque<Asked>,
    /// Those of which another copy may have to be asked, likewise.
    may_be_late: VecDeque<Asked>,
}

impl Lane {
    pub(crate) fn new(
        shared: Arc<Shared>,
        clock: Arc<LaneClock>,
        slot: u32,
        sealing: Sealing,
    ) -> Lane {
        Lane {
            shared,
            clock,
            slot,
            ways: std::array::from_fn(|_| Way::default()),
            with_links: 0,
            order: Vec::with_capacity(MAX_BLADES),
            ready: Vec::with_capacity(DONE_CAPACITY),
            waiting: Vec::with_capacity(DONE_CAPACITY),
            again: Vec::new(),
            scratch: Vec::with_capacity(DONE_CAPACITY),
            sealer: (sealing == Sealing::ByLane).then(Sealer::default),
            choice: Choice::default(),
            parity: ParityFlights::default(),
            is_background: false,
            phase: 0,
        }
    }

    /// Has blades serve others first; to be called before it connects.
    pub(crate) fn set_background(&mut self) {
        self.is_background = true;
    }

    /// Connects to the blade now, and waits for it.
    pub(crate) fn connect(&mut self, blade: BladeIndex) -> Result<(), PoolError> {
        let number = usize::from(blade.0);
        let slot = &self.shared.blades[number];
        let (generation, known) = (slot.generation.load(Ordering::Acquire), slot.get());
        let Some(known) = known else { return Ok(()) };
        let link: Box<dyn Link> = match known.session.address {
            Address::Shm(_) => Box::new(ShmLink::default()),
            _ => Box::new(StreamLink::connect(Arc::clone(&known.session), self.slot)?),
        };
        self.replace(number, generation, Some(link));
        Ok(())
    }

    /// Sends the reads; their order is the priority (demand page first). Consecutive pages of one
    /// segment are sent as one extent, all pages of one segment on one blade as one request. Every
    /// read ends in one completion. A page must not be read and written at once: requests in flight
    /// may overtake each other.
    ///
    /// # Safety
    /// Each [`PageRead::into`] points to 4096 bytes that stay mapped and writable, and that nothing
    /// else reads or writes, until the page's completion has been handed out (or the lane is
    /// dropped).
    ///
    /// # Errors
    /// None at present; an unreadable page is reported by its completion.
    pub unsafe fn read(&mut self, reads: &[PageRead]) -> Result<(), PoolError> {
        self.look_at_phase();
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        let now = self.now_if_hedging();
        reads.iter().for_each(|read| self.begin_read(read, CopySet::default(), None, now));
        // SAFETY: the caller lends each page's memory for writing until its completion; files found
        // during this visit stay open until it ends.
        unsafe { self.submit(Access::Read) };
        drop(visit);
        self.advance_parity();
        Ok(())
    }

    /// Stores the pages, likewise.
    ///
    /// # Safety
    /// Each [`PageWrite::from`] points to 4096 bytes that stay mapped and readable, and that
    /// nothing writes, until the page's completion has been handed out (or the lane is dropped).
    ///
    /// # Errors
    /// None at present; a page that cannot be stored is reported by its completion.
    pub unsafe fn write(&mut self, writes: &[PageWrite]) -> Result<(), PoolError> {
        self.look_at_phase();
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        let mut known = None;
        for write in writes {
            // SAFETY: the caller lends the page's memory for reading.
            unsafe { self.begin_write(write, &mut known) };
        }
        // SAFETY: the caller lends each page's memory for reading until its completion; files as
        // for `read`.
        unsafe { self.submit(Access::Write) };
        drop(visit);
        self.advance_parity();
        Ok(())
    }

    /// Moves pages whose places the caller knows (the mover).
    ///
    /// # Safety
    /// As for `read` or `write`, by `access`; the pages were found during a visit that has not
    /// ended, or nothing they name can be closed meanwhile.
    pub(crate) unsafe fn submit_to(
        &mut self,
        blade: BladeIndex,
        pages: impl IntoIterator<Item = LinkPage>,
        access: Access,
    ) {
        self.look_at_phase();
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        pages.into_iter().for_each(|page| self.sort_in(blade, page));
        // SAFETY: as promised by the caller.
        unsafe { self.submit(access) };
        drop(visit);
    }

    /// Begins to write a page to all its copies whose blades live. `known` is the segment of the
    /// last page of the same call with its seals.
    ///
    /// # Safety
    /// As for `write`.
    unsafe fn begin_write(
        &mut self,
        write: &PageWrite,
        known: &mut Option<(SegmentHandle, Arc<Seals>)>,
    ) {
        if self.shared.config.redundancy == Redundancy::Parity && self.sealer.is_some() {
            // SAFETY: as promised by the caller.
            if unsafe { !self.begin_parity_write(write) } {
                self.waiting.push(*write);
            }
            return;
        }
        let (mut places, mut count) = ([const { None }; COPIES_LIMIT], 0);
        let mut failed = None;
        for copy in self.shared.copies(write.at.segment) {
            let at = SegmentPage { segment: copy, ..write.at };
            match self.shared.find(at, Access::Write, write.from.cast_mut(), write.token) {
                Found::At(blade, page) => {
                    places[count] = Some((copy.nth(), blade, page));
                    count += 1;
                }
                Found::Not(error) => failed = graver(failed, error),
                Found::Soon => return self.waiting.push(*write),
            }
        }
        let places = places.into_iter().flatten();
        if count == 0 {
            return self.fail(write.token, failed.unwrap_or(PageError::NotAllocated));
        }
        if self.sealer.is_none() {
            return places.for_each(|(_, blade, page)| self.sort_in(blade, page));
        }
        // SAFETY: as promised by the caller.
        match unsafe { self.seal(write, exactly(count), known) } {
            Ok((memory, flight)) => places.for_each(|(nth, blade, page)| {
                let token = flight.copy(nth).token();
                self.sort_in(blade, LinkPage { memory, token, ..page });
            }),
            Err(error) => self.fail(write.token, error),
        }
    }

    /// Seals a page that is written to so many copies.
    ///
    /// # Safety
    /// As for `write`.
    unsafe fn seal(
        &mut self,
        write: &PageWrite,
        copies: u8,
        known: &mut Option<(SegmentHandle, Arc<Seals>)>,
    ) -> Result<(*mut u8, FlightNumber), PageError> {
        let segment = write.at.segment;
        let known = match known {
            Some(known) if known.0 == segment => known,
            _ => known.insert((segment, seals_of(&self.shared, write.at)?)),
        };
        let sealer = self.sealer.as_mut().expect("a lane that seals");
        // SAFETY: as promised by the caller.
        unsafe { sealer.seal(write, &known.1, copies) }
    }

    /// A link has ended with a page that it knows by this token.
    fn complete(
        &mut self,
        blade: usize,
        token: u64,
        result: Result<(), PageError>,
        now: Option<Instant>,
    ) {
        if self.sealer.is_some() && token & NO_COPY == NO_COPY {
            return self.parity_completed(token >> COPY_BITS, blade, result);
        }
        let copy = FlightCopy::of_token(token);
        if result.is_ok() {
            self.note_answer(blade, copy, now);
        }
        let Some(sealer) = &mut self.sealer else {
            return self.ready.push(Completion { token, result });
        };
        let is_lost = self.shared.blades[blade].is_lost();
        let redundancy = self.shared.config.redundancy;
        let survives = redundancy.survives_a_blade();
        // SAFETY: a page is lent to the lane until its completion is handed out.
        let ended = unsafe { sealer.end(copy, result, is_lost) };
        if let Some(damaged) = ended.damaged.filter(|_| survives) {
            self.note_damage(damaged, copy.nth);
        }
        if let Some(at) = ended.unwritten
            && let Ok(seals) = seals_of(&self.shared, at)
        {
            seals.forget(at.page);
        }
        match ended.outcome {
            Outcome::Done(completion) => self.ready.push(completion),
            Outcome::NotYet => {}
            // Its place may be another one by now; if there is none, it is looked for in its row.
            Outcome::Again(read, _, error @ PageError::BladeLost(_))
                if redundancy == Redundancy::Parity =>
            {
                self.again.push((read, CopySet::default(), error));
            }
            Outcome::Again(read, tried, error) if redundancy == Redundancy::Parity => {
                self.again.push((read, tried, error));
            }
            Outcome::Again(read, tried, error) => {
                let mut copies = self.shared.copies(read.at.segment);
                match copies.all(|copy| tried.has(copy.nth())) {
                    true => self.fail(read.token, error),
                    false => self.again.push((read, tried, error)),
                }
            }
        }
    }

    fn sort_in(&mut self, blade: BladeIndex, page: LinkPage) {
        let blade = usize::from(blade.0);
        if self.ways[blade].batch.is_empty() {
            self.order.push(blade);
        }
        self.ways[blade].batch.push(page);
    }

    fn fail(&mut self, token: u64, error: PageError) {
        self.ready.push(Completion { token, result: Err(error) });
    }

    /// Gives the sorted pages to the links.
    ///
    /// # Safety
    /// As for `read` or `write`, by `access`, during a visit.
    unsafe fn submit(&mut self, access: Access) {
        for at in 0..self.order.len() {
            let blade = self.order[at];
            if !self.is_of_now(blade) {
                let slot = &self.shared.blades[blade];
                self.connect_later(blade, slot.generation.load(Ordering::Acquire));
            }
            let Way { link, batch, .. } = &mut self.ways[blade];
            match link {
                Some(link) => {
                    self.with_links += batch.len();
                    match access {
                        // SAFETY: as promised by the caller.
                        Access::Read => unsafe { link.read(batch) },
                        // SAFETY: as promised by the caller.
                        Access::Write => unsafe { link.write(batch) },
                    }
                    self.clock.count(blade, access, batch.len());
                }
                None => {
                    let error = Err(PageError::BladeLost(index(blade)));
                    let batch = std::mem::take(batch);
                    for page in &batch {
                        self.complete(blade, page.token, error, None);
                    }
                    self.ways[blade].batch = batch;
                }
            }
            self.ways[blade].batch.clear();
        }
        self.order.clear();
        self.clock.set_in_flight(self.awaited());
    }

    /// Makes a link to a blade that was added after this lane, without waiting for it.
    fn connect_later(&mut self, blade: usize, generation: u32) {
        let link = self.shared.blades[blade].get().and_then(|known| -> Option<Box<dyn Link>> {
            match known.session.address {
                Address::Shm(_) => Some(Box::new(ShmLink::default())),
                _ => {
                    let mut link = StreamLink::later(Arc::clone(&known.session), self.slot).ok()?;
                    if self.is_background {
                        link.set_background();
                    }
                    Some(Box::new(link))
                }
            }
        });
        self.replace(blade, generation, link);
    }

    fn replace(&mut self, blade: usize, generation: u32, link: Option<Box<dyn Link>>) {
        let way = &mut self.ways[blade];
        way.generation = generation;
        // Nothing is known of this blade.
        (way.times, way.owed, way.may_be_late) = Default::default();
        way.batch.reserve(DONE_CAPACITY);
        if let Some(mut old) = std::mem::replace(&mut way.link, link) {
            // Nothing of it is under way any more, unless its blade was left because of copies;
            // this collects its last completions.
            if self.shared.config.redundancy.survives_a_blade() {
                old.give_up("its blade was left");
            }
            old.poll(&mut self.scratch);
            self.take_over(blade);
        }
    }

    /// Appends what is complete. Never blocks.
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        self.try_waiting();
        done.append(&mut self.ready);
        for blade in 0..MAX_BLADES {
            self.drive(blade, done, |link, scratch| link.poll(scratch));
        }
        self.ask_others();
        if !self.again.is_empty() || self.may_advance_parity() {
            self.try_waiting();
        }
        self.look_at_phase();
    }

    /// Appends what is complete, and blocks until there is something or nothing is in flight.
    pub fn wait(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.try_waiting();
        done.append(&mut self.ready);
        while done.len() == before && self.in_flight() > 0 {
            match self.only_busy_link() {
                Some(blade) => self.drive(blade, done, |link, scratch| link.wait(scratch)),
                None => {
                    self.poll(done);
                    if done.len() == before {
                        self.sleep();
                    }
                }
            }
            if done.len() == before {
                self.expire(self.shared.config.time.now(), done);
            }
        }
        self.look_at_phase();
    }

    fn drive(
        &mut self,
        blade: usize,
        done: &mut Vec<Completion>,
        how: impl FnOnce(&mut dyn Link, &mut Vec<PageDone>),
    ) {
        if let Some(link) = &mut self.ways[blade].link
            && link.in_flight() > 0
        {
            how(link.as_mut(), &mut self.scratch);
            self.take_over(blade);
            done.append(&mut self.ready);
        }
    }

    /// Looks up the pages again whose writes wait for the mover, or that another copy may have.
    fn try_waiting(&mut self) {
        if !self.again.is_empty() {
            let clock = Arc::clone(&self.clock);
            let visit = clock.visit();
            let mut again = std::mem::take(&mut self.again);
            let now = self.now_if_hedging();
            for (read, tried, error) in again.drain(..) {
                self.begin_read(&read, tried, Some(error), now);
            }
            self.again = again;
            // SAFETY: the caller of `read` lends the pages until their completions.
            unsafe { self.submit(Access::Read) };
            drop(visit);
        }
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            // SAFETY: the caller of `write` lends the pages until their completions.
            let _always_ok = unsafe { self.write(&waiting) };
        }
        self.advance_parity();
    }

    /// The one link with pages in flight, if there is nothing else to wait for.
    fn only_busy_link(&self) -> Option<usize> {
        let busy = |blade: &usize| self.busy_links().any(|it| it.0 == *blade);
        let mut all = (0..MAX_BLADES).filter(busy);
        let waits_for_more =
            !self.waiting.is_empty() || self.may_be_late() || self.may_advance_parity();
        all.next().filter(|_| all.next().is_none() && !waits_for_more)
    }

    fn busy_links(&self) -> impl Iterator<Item = (usize, &dyn Link)> {
        let links =
            self.ways.iter().enumerate().filter_map(|(n, way)| Some((n, way.link.as_deref()?)));
        links.filter(|(_, link)| link.in_flight() > 0)
    }

    /// Sleeps until a link can go on or it is time to check the deadlines.
    fn sleep(&self) {
        let waits = !self.waiting.is_empty() || self.may_advance_parity();
        let step = if waits { MOVER_STEP } else { WAIT_STEP };
        let time = self.shared.config.time;
        let late = self.may_be_late().then(|| self.until_late(time.now())).flatten();
        let step = late.map_or(step, |late| late.min(step));
        let links = self.ways.iter().filter_map(|way| way.link.as_deref());
        let mut all = links.filter_map(|link| {
            let out = if link.is_sending() { PollFlags::OUT } else { PollFlags::empty() };
            Some(PollFd::from_borrowed_fd(link.descriptor()?, PollFlags::IN | out))
        });
        let Some(first) = all.next() else {
            return time.pause(step);
        };
        let mut set: [PollFd<'_>; MAX_BLADES] = std::array::from_fn(|_| first.clone());
        let mut count = 1;
        for (place, descriptor) in set[1..].iter_mut().zip(all) {
            *place = descriptor;
            count += 1;
        }
        // An interrupted or failed sleep only means that the caller checks earlier.
        let _ = time.wait(&mut set[..count], step);
    }

    /// Turns requests older than the deadline into errors and retries broken links; cheap, to be
    /// called every few ms while something is in flight.
    pub fn expire(&mut self, now: Instant, done: &mut Vec<Completion>) {
        self.try_waiting();
        done.append(&mut self.ready);
        for blade in 0..MAX_BLADES {
            // Another lane may have found out, and the blade may be left already.
            let is_spared = self.shared.config.redundancy.survives_a_blade()
                && (self.shared.blades[blade].is_lost() || !self.is_of_now(blade));
            self.drive(blade, done, |link, scratch| {
                if is_spared {
                    link.give_up("another connection to it was given up");
                }
                link.expire(now, scratch);
            });
        }
        if !self.again.is_empty() || self.may_advance_parity() {
            self.try_waiting();
        }
        self.look_at_phase();
    }

    /// Pages submitted and not yet handed out as completions; those of several copies count for
    /// each.
    pub fn in_flight(&self) -> usize {
        let between = self.waiting.len() + self.again.len() + self.parity.between();
        self.ready.len() + between + self.awaited()
    }

    /// True if no blade owes this lane an answer, not even one that nobody waits for any more
    /// because another copy was read. Until then the lane is to be driven on: that is how a blade's
    /// loss is noticed.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.with_links == 0
    }

    /// Pages that links have not answered, without those that another copy has answered meanwhile:
    /// nobody waits for these, and their answers go nowhere.
    fn awaited(&self) -> usize {
        let stragglers = self.sealer.as_ref().map_or(0, Sealer::stragglers);
        self.with_links.checked_sub(stragglers).expect("who owes an answer was asked")
    }

    /// What to poll for readability together with userfaultfd; nothing for shm, nor for a blade
    /// that owes no answer. The set changes, so call it before every poll.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.ways.iter().filter_map(|way| way.link.as_ref()?.descriptor())
    }

    /// True if the way is to the blade that is in the slot now.
    fn is_of_now(&self, blade: usize) -> bool {
        let generation = self.shared.blades[blade].generation.load(Ordering::Acquire);
        self.ways[blade].generation == generation
    }

    /// Turns the scratch list into completions, and records a link's loss.
    fn take_over(&mut self, blade: usize) {
        if let Some(reason) = self.ways[blade].link.as_ref().and_then(|link| link.loss())
            && !self.shared.blades[blade].is_lost()
            && self.is_of_now(blade)
        {
            self.shared.lose(blade, reason);
        }
        if self.scratch.is_empty() {
            return;
        }
        let now = self.now_if_hedging();
        self.with_links = self.with_links.saturating_sub(self.scratch.len());
        let mut scratch = std::mem::take(&mut self.scratch);
        for page in scratch.drain(..) {
            let result = page.result.map_err(|fault| page_error(fault, index(blade)));
            self.complete(blade, page.token, result, now);
        }
        self.scratch = scratch;
        self.clock.set_in_flight(self.awaited());
    }

    /// Tells the pool when everything from before the current phase has ended.
    fn look_at_phase(&mut self) {
        let phase = self.shared.phase.load(Ordering::Acquire);
        if phase != self.phase {
            self.phase = phase;
            for way in &mut self.ways {
                way.mark = way.link.as_ref().map_or(0, |link| link.mark());
            }
        } else if phase == 0 || self.awaited() == 0 {
            return; // as nearly always: nothing was ever moved, or the pool sees it itself
        }
        let is_over =
            |way: &Way| way.link.as_ref().is_none_or(|link| link.is_finished_before(way.mark));
        if self.ways.iter().all(is_over) {
            self.clock.set_settled(phase);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Closing the connections ends what is in flight; it must not be waited for.
        self.ways.iter_mut().for_each(|way| way.link = None);
        self.doubt_unfinished();
        self.clock.set_in_flight(0);
    }
}

fn seals_of(shared: &Shared, at: SegmentPage) -> Result<Arc<Seals>, PageError> {
    // A segment that is not there is found out before; one without seals must not be used here.
    shared.segments[at.segment.index()].seals().ok_or(PageError::NotAllocated)
}

/// What to say of a page none of whose copies can be reached: that one has no memory says least.
fn graver(known: Option<PageError>, error: PageError) -> Option<PageError> {
    known.filter(|known| *known != PageError::NotAllocated).or(Some(error))
}

fn index(blade: usize) -> BladeIndex {
    BladeIndex(exactly(blade))
}

fn page_error(fault: PageFault, blade: BladeIndex) -> PageError {
    match fault {
        PageFault::Lost => PageError::BladeLost(blade),
        PageFault::Deadline => PageError::Deadline,
        PageFault::Corrupt => PageError::Corrupt,
        PageFault::Refused(ErrorCode::NotAllocated) => PageError::NotAllocated,
        PageFault::Refused(ErrorCode::Frozen) => PageError::Frozen,
        PageFault::Refused(code) => PageError::Refused(code.number()),
        PageFault::Failed(_) => PageError::Refused(ErrorCode::Backing.number()),
    }
}
