//! A client: it stores and fetches pages on several lanes, takes and gives back superpages, forks,
//! and moves away from blades; every byte that it reads is judged by the [`Model`].
//!
//! Pages to be stored are in the program's own memory until a blade has taken them, as a pager's
//! are, and are sent as the pager's evictor sends them: [`Refusals`] says to which blade.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_acms::Rng;
use farpool_pool::{
    Alone, Ask, BladeIndex, ClientId, FrozenToken, Mover, PageError, Pool, PoolConfig, PoolError,
    Redundancy, Refusals, SUPERPAGE_PAGES, Seals, SegmentHandle, SegmentPage, Step,
    VERIFY_LIMIT_PAGES, VerifyPoint,
};
use farpool_wire::ErrorCode;

use crate::lent::{Ended, LentLane};
use crate::model::{Model, content};
use crate::{clock, world};

/// Pages at the beginning of each superpage that are used: few, so that they are used often.
const USED_PAGES: u32 = 12;
/// Pages of one request at most.
const BATCH_PAGES: u64 = 6;
/// Pages in flight on one lane at most.
const IN_FLIGHT_MAX: usize = 24;
/// Steps of one verification at most: more than all that can be written needs.
const VERIFY_STEPS_MAX: u64 = 12;
/// Longest pause while pages are waited for.
const STEP: Duration = Duration::from_millis(20);

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// What happened to pages and superpages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pages read, and right.
    pub read: u64,
    /// Pages stored.
    pub stored: u64,
    /// Pages that ended with an error.
    pub failed: u64,
    /// Pages that a full blade did not take.
    pub put_back: u64,
    /// Operations of the pool (allocate, fork ...) that succeeded, and that failed.
    pub done: u64,
    /// See [`Tally::done`].
    pub refused: u64,
    /// Superpages moved.
    pub moved: u64,
    /// Pages verified, of each copy.
    pub verified: u64,
    /// Superpages of which something else was found than what was stored.
    pub damaged: u64,
    /// The longest time that a page took.
    pub slowest_ns: u64,
}

/// A client with its lanes.
#[derive(Debug)]
pub struct Program {
    pool: Rc<Pool>,
    config: PoolConfig,
    inner: Rc<RefCell<Inner>>,
    hosts: usize,
    superpages: u32,
    moves: bool,
}

/// What also goes on while the mover waits.
#[derive(Debug)]
struct Inner {
    lanes: Vec<LentLane>,
    segment: SegmentHandle,
    /// Superpages with memory.
    allocated: Vec<u32>,
    model: Model,
    /// Pages in flight: whether they are written, since when, and the version.
    busy: BTreeMap<SegmentPage, Flying>,
    /// Pages that are to be stored.
    local: BTreeSet<u32>,
    refusals: Refusals,
    /// Blades that refused pages while the pool was at work, which has a lock meanwhile.
    refusing: Vec<BladeIndex>,
    /// During a fork nothing is stored.
    is_forking: bool,
    pool: Rc<Pool>,
    next_token: u64,
    next_version: u64,
    tally: Tally,
    /// For people.
    first_error: Option<String>,
    violation: Option<Violation>,
}

#[derive(Clone, Copy, Debug)]
struct Flying {
    written: Option<u64>,
    begun_ns: u64,
}

/// What a program does besides reading and writing.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// It moves its memory, 16 MiB at a time.
    pub moves: bool,
    pub seals_pages: bool,
    /// What is stored beside each superpage.
    pub redundancy: Redundancy,
    /// Superpages of its segment.
    pub superpages: u32,
}

impl Program {
    /// Connects to all hosts' blades.
    ///
    /// # Errors
    /// It cannot, while nothing is wrong yet.
    pub fn start(
        hosts: usize,
        lanes: usize,
        deadline: Duration,
        habits: Habits,
        refusals: Refusals,
    ) -> Result<Program, PoolError> {
        let config = PoolConfig {
            blades: (0..hosts).map(|host| world::address_of(host).into()).collect(),
            client: ClientId(1),
            client_name: "vopr".into(),
            quota_bytes: 1 << 40,
            sharing_group: None,
            deadline,
            allow_remote_tcp: true,
            redundancy: habits.redundancy,
            seals_pages: habits.seals_pages,
            secures_tcp: false,
            asks: Some(Arc::new(world::ask as Ask)),
            time: world::time(),
        };
        let pool = Rc::new(Pool::connect(config.clone())?);
        let lanes = (0..lanes).map(|_| pool.lane().map(LentLane::new)).collect::<Result<_, _>>()?;
        let inner = Inner {
            lanes,
            segment: pool.create_segment()?,
            allocated: Vec::new(),
            model: Model::default(),
            busy: BTreeMap::new(),
            local: BTreeSet::new(),
            refusals,
            refusing: Vec::new(),
            is_forking: false,
            pool: Rc::clone(&pool),
            next_token: 1,
            next_version: 1,
            tally: Tally::default(),
            first_error: None,
            violation: None,
        };
        Ok(Program {
            pool,
            config,
            inner: Rc::new(RefCell::new(inner)),
            hosts,
            superpages: habits.superpages,
            moves: habits.moves,
        })
    }

    /// What happened so far.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.inner.borrow().tally
    }

    /// The first error, in words.
    #[must_use]
    pub fn first_error(&self) -> Option<String> {
        self.inner.borrow().first_error.clone()
    }

    /// Does one random thing.
    ///
    /// # Errors
    /// Something that must not be.
    pub fn act(&self, random: &mut Rng) -> Result<(), Violation> {
        let refusing = std::mem::take(&mut self.inner.borrow_mut().refusing);
        refusing.into_iter().for_each(|blade| self.pool.set_refusing(blade));
        let meanwhile = self.lanes_go_on();
        match random.below(100) {
            0..80 => self.inner.borrow_mut().exchange(random),
            80..88 => self.allocate(exactly_u32(random.below(self.superpages.into()))),
            88..91 => self.free(random)?,
            91..95 => {
                self.inner.borrow_mut().is_forking = true;
                let forked = self.fork();
                self.inner.borrow_mut().is_forking = false;
                forked?;
            }
            95..97 => self.pool.keep_alive(),
            97 if self.config.seals_pages => self.verify(random)?,
            _ if self.moves => self.move_away(random)?,
            _ => self.inner.borrow_mut().exchange(random),
        }
        drop(meanwhile);
        self.inner.borrow_mut().collect();
        self.check()
    }

    /// Lets time pass.
    pub fn rest(&self, time: Duration) {
        let _meanwhile = self.lanes_go_on();
        let until = clock::now() + time;
        while clock::now() < until {
            world::time().pause(STEP.min(until.saturating_duration_since(clock::now())));
        }
    }

    /// What is in flight is driven on in every wait: in a program, each lane has a thread.
    fn lanes_go_on(&self) -> world::Attended {
        let inner = Rc::clone(&self.inner);
        world::attend(Rc::new(move || {
            // A lane that waits drives itself.
            if let Ok(mut inner) = inner.try_borrow_mut() {
                inner.collect();
                inner.evict();
            }
        }))
    }

    /// Pages that no blade has taken yet.
    #[must_use]
    pub fn local_pages(&self) -> usize {
        self.inner.borrow().local.len()
    }

    fn check(&self) -> Result<(), Violation> {
        self.inner.borrow().violation.clone().map_or(Ok(()), Err)
    }

    fn count<T>(&self, result: Result<T, PoolError>) -> Option<T> {
        let mut inner = self.inner.borrow_mut();
        match &result {
            Ok(_) => inner.tally.done += 1,
            Err(error) => {
                inner.tally.refused += 1;
                inner.first_error.get_or_insert_with(|| error.to_string());
            }
        }
        result.ok()
    }

    fn allocate(&self, superpage: u32) {
        let segment = self.inner.borrow().segment;
        let result = self.pool.allocate_superpage(segment, superpage);
        clock::note(|| format!("allocate superpage {superpage}: {result:?}"));
        if self.count(result).is_some() {
            let mut inner = self.inner.borrow_mut();
            if !inner.allocated.contains(&superpage) {
                inner.allocated.push(superpage);
                inner.model.emptied(pages_of(superpage));
            }
        }
    }

    fn free(&self, random: &mut Rng) -> Result<(), Violation> {
        self.finish()?;
        let (segment, superpage) = {
            let inner = self.inner.borrow();
            let Some(&superpage) = inner.allocated.get(random.index(inner.allocated.len())) else {
                return Ok(());
            };
            (inner.segment, superpage)
        };
        let result = self.pool.free_superpage(segment, superpage);
        clock::note(|| format!("free superpage {superpage}: {result:?}"));
        // Where the blade refuses, the superpage stays; where it is lost, the superpage is, too.
        if self.count(result).is_some() || self.pool.blade_of(segment, superpage).is_none() {
            let mut inner = self.inner.borrow_mut();
            inner.allocated.retain(|it| *it != superpage);
            inner.local.retain(|page| !pages_of(superpage).contains(page));
        }
        Ok(())
    }

    /// Freezes, has a child read everything, and makes the segment writable again.
    fn fork(&self) -> Result<(), Violation> {
        self.finish()?;
        let segment = self.inner.borrow().segment;
        let frozen = self.pool.freeze(segment);
        clock::note(|| format!("freeze: {:?}", frozen.as_ref().err()));
        let Some(token) = self.count(frozen) else { return Ok(()) };
        self.child_reads(&token, self.seals_of_child(segment))?;
        match self.count(self.pool.thaw(segment)) {
            Some(true) => Ok(()),
            // The child's share ends with its lease, or never, if a blade is lost: begin anew.
            _ => {
                let fresh = self.count(self.pool.create_segment());
                let _given_up = self.count(self.pool.detach(segment));
                let mut inner = self.inner.borrow_mut();
                if let Some(fresh) = fresh {
                    inner.segment = fresh;
                    inner.allocated.clear();
                    inner.local.clear();
                    inner.model = Model::default();
                }
                Ok(())
            }
        }
    }

    /// As a child of fork has them, or any process that what is lacking is handed over to.
    fn seals_of_child(&self, segment: SegmentHandle) -> Option<Seals> {
        let inner = self.inner.borrow();
        if inner.next_version.is_multiple_of(2) {
            return self.pool.seals(segment).map(|it| it.inherit());
        }
        let lacking = inner.model.pages().filter(|page| !inner.local.contains(page));
        let exported = self.pool.export_seals(segment, lacking);
        exported.map(|it| Seals::import(&it).expect("what was exported"))
    }

    fn child_reads(&self, token: &FrozenToken, seals: Option<Seals>) -> Result<(), Violation> {
        let client = ClientId(1 + u128::from(clock::now_ns()) + (1 << 100));
        let config = PoolConfig { client, ..self.config.clone() };
        // A refusal is final for who has never met the blade.
        let Ok(child) = Pool::connect(config) else { return Ok(()) };
        let attached = child.attach(token, seals).and_then(|it| Ok((it, child.lane()?)));
        let Some((segment, lane)) = self.count(attached) else { return Ok(()) };
        let mut lane = LentLane::new(lane);
        let (model, allocated, local) = {
            let inner = self.inner.borrow();
            (inner.model.clone(), inner.allocated.clone(), inner.local.clone())
        };
        // What is local a child has from its parent.
        let pages = model.pages().filter(|page| !local.contains(page));
        let pages = pages.filter(|page| allocated.contains(&(page / SUPERPAGE_PAGES)));
        let reads: Vec<_> =
            pages.zip(1..).map(|(page, token)| (SegmentPage { segment, page }, token)).collect();
        lane.read(&reads);
        while lane.in_flight() > 0 {
            for ended in lane.wait() {
                let mut inner = self.inner.borrow_mut();
                match ended.result {
                    Err(_) => inner.tally.failed += 1,
                    Ok(()) => match model.objection(ended.at.page, &ended.bytes) {
                        Some(why) => return Err(Violation(format!("a child read: {why}"))),
                        None => inner.tally.read += 1,
                    },
                }
            }
        }
        drop(lane);
        let _given_up = child.detach(segment);
        child.goodbye();
        Ok(())
    }

    /// Empties a blade, while reading and writing goes on.
    fn move_away(&self, random: &mut Rng) -> Result<(), Violation> {
        if self.hosts < 2 {
            return Ok(());
        }
        let from = BladeIndex(farpool_units::exactly(random.index(self.hosts)));
        if self.pool.is_lost(from) {
            return Ok(());
        }
        self.pool.set_leaving(from, true);
        let meanwhile = self.exchange_meanwhile(random);
        let mut mover = Mover::new(&self.pool);
        // Every superpage, and one step that finds nothing.
        for _ in 0..=2 * self.superpages {
            let step = mover.step(from, &Alone, || true);
            clock::note(|| format!("move away from {}: {step:?}", from.0));
            let Some(step) = self.count(step) else { break };
            match step {
                Step::Moved => self.inner.borrow_mut().tally.moved += 1,
                Step::Waiting | Step::Empty => break,
            }
        }
        drop(meanwhile);
        self.pool.set_leaving(from, false);
        self.check()
    }

    /// Reads and writes in every wait.
    fn exchange_meanwhile(&self, random: &mut Rng) -> world::Attended {
        let inner = Rc::clone(&self.inner);
        let own = RefCell::new(Rng::new(random.bits()));
        world::attend(Rc::new(move || {
            // The lanes are in use where the wait is one of theirs.
            if let (Ok(mut inner), Ok(mut random)) = (inner.try_borrow_mut(), own.try_borrow_mut())
            {
                if random.below(8) == 0 {
                    inner.exchange(&mut random);
                }
                inner.collect();
                inner.evict();
            }
        }))
    }

    /// Verifies some of far memory, while reading and writing goes on.
    fn verify(&self, random: &mut Rng) -> Result<(), Violation> {
        let steps = 1 + random.below(VERIFY_STEPS_MAX);
        let limit = 1 + random.index(VERIFY_LIMIT_PAGES);
        let meanwhile = self.exchange_meanwhile(random);
        let (mut mover, mut from) = (Mover::new(&self.pool), VerifyPoint::default());
        for _ in 0..steps {
            let verified = mover.verify(from, limit);
            clock::note(|| format!("verify: {verified:?}"));
            {
                let tally = &mut self.inner.borrow_mut().tally;
                tally.verified += verified.pages;
                tally.damaged += verified.damages.len() as u64;
            }
            // Nothing here damages memory; blades may lie.
            if !verified.damages.is_empty() && world::with(|world| world.lies()) == 0 {
                return Err(Violation(format!("taken for damaged: {:?}", verified.damages)));
            }
            // As a pager does: until all copies are there again, no silent blade is given up early.
            // There may be no other blade at this time.
            self.make_copies(&mut mover, |_| {});
            let Some(next) = verified.next else { break };
            from = next;
        }
        drop(meanwhile);
        self.check()
    }

    fn make_copies(&self, mover: &mut Mover<'_>, last: impl FnOnce(Result<Step, PoolError>)) {
        loop {
            let step = mover.complete_copies(&Alone);
            clock::note(|| format!("complete copies: {step:?}"));
            match step {
                Ok(Step::Moved) => self.inner.borrow_mut().tally.moved += 1,
                step => return last(step),
            }
        }
    }

    /// Makes the copies that are missing, while reading and writing goes on.
    ///
    /// # Errors
    /// Something that must not be, or a copy is still missing.
    pub fn complete_copies(&self, random: &mut Rng) -> Result<(), Violation> {
        let meanwhile = self.exchange_meanwhile(random);
        self.pool.keep_alive(); // nobody reads parity while nothing is lost
        self.make_copies(&mut Mover::new(&self.pool), |step| _ = self.count(step));
        drop(meanwhile);
        self.check()?;
        match self.pool.degraded_superpages() {
            0 => Ok(()),
            missing => Err(Violation(format!("{missing} superpages still have too few copies"))),
        }
    }

    /// Waits for everything in flight, and for the answers that nobody waits for any more.
    ///
    /// # Errors
    /// Something that must not be.
    pub fn finish(&self) -> Result<(), Violation> {
        loop {
            {
                let mut inner = self.inner.borrow_mut();
                inner.collect();
                if inner.lanes.iter().all(LentLane::is_idle) {
                    assert!(inner.busy.is_empty(), "nothing is in flight");
                    break;
                }
            }
            self.wait_a_little();
        }
        self.check()
    }

    /// Lets time pass until the only busy lane has something, or for a step.
    pub fn wait_a_little(&self) {
        let mut inner = self.inner.borrow_mut();
        let mut busy = (0..inner.lanes.len()).filter(|at| inner.lanes[*at].in_flight() > 0);
        let only = busy.next().filter(|_| busy.next().is_none());
        match only {
            Some(lane) => {
                let ended = inner.lanes[lane].wait();
                inner.judge(ended);
            }
            None => {
                drop(inner);
                world::time().pause(STEP / 20);
            }
        }
    }

    /// Reads every page that was ever written and has memory. Returns how many failed.
    ///
    /// # Errors
    /// Something that must not be.
    pub fn read_all(&self) -> Result<u64, Violation> {
        self.finish()?;
        let before = self.tally().failed;
        {
            let mut inner = self.inner.borrow_mut();
            let pages: Vec<u32> = inner.model.pages().collect();
            let known = |page: &u32| inner.allocated.contains(&(page / SUPERPAGE_PAGES));
            let pages: Vec<u32> = pages.into_iter().filter(known).collect();
            inner.read(0, &pages);
        }
        self.finish()?;
        Ok(self.tally().failed - before)
    }
}

impl Inner {
    /// Begins to read or write some pages on some lane.
    fn exchange(&mut self, random: &mut Rng) {
        let lane = random.index(self.lanes.len());
        if self.allocated.is_empty() || self.lanes[lane].in_flight() >= IN_FLIGHT_MAX {
            return;
        }
        let is_write = random.below(2) == 0;
        let mut pages = Vec::new();
        for _ in 0..=random.below(BATCH_PAGES) {
            let superpage = self.allocated[random.index(self.allocated.len())];
            let page = superpage * SUPERPAGE_PAGES + exactly_u32(random.below(USED_PAGES.into()));
            let at = SegmentPage { segment: self.segment, page };
            if !pages.contains(&page) && !self.busy.contains_key(&at) {
                pages.push(page);
            }
        }
        if is_write {
            self.local.extend(pages);
            self.evict_on(lane);
        } else {
            // What is local needs no blade.
            pages.retain(|page| !self.local.contains(page));
            self.read(lane, &pages);
        }
    }

    fn read(&mut self, lane: usize, pages: &[u32]) {
        let reads: Vec<_> = pages.iter().map(|page| self.begin(*page, None)).collect();
        self.lanes[lane].read(&reads);
    }

    /// Sends what is to be stored, on the first lane, as a process has one evictor.
    fn evict(&mut self) {
        if !self.local.is_empty() && !self.is_forking {
            self.evict_on(0);
        }
    }

    fn evict_on(&mut self, lane: usize) {
        let now = clock::now();
        let mut writes = Vec::new();
        for page in std::mem::take(&mut self.local) {
            let at = SegmentPage { segment: self.segment, page };
            let blade = self.pool.blade_of(self.segment, page / SUPERPAGE_PAGES);
            let is_sent = blade.is_some_and(|blade| self.refusals.may_send(blade, now))
                && !self.busy.contains_key(&at)
                && self.lanes[lane].in_flight() + writes.len() < IN_FLIGHT_MAX;
            if !is_sent {
                self.local.insert(page);
                continue;
            }
            let version = self.next_version;
            self.next_version += 1;
            let (at, token) = self.begin(page, Some(version));
            writes.push((at, token, content(page, version)));
        }
        self.lanes[lane].write(writes);
    }

    /// A blade has answered a write.
    fn answered(&mut self, at: SegmentPage, result: Result<(), PageError>) {
        let Some(blade) = self.pool.blade_of(at.segment, at.page / SUPERPAGE_PAGES) else { return };
        match result {
            Ok(()) => {
                self.refusals.accept(blade);
            }
            Err(_) => {
                if self.refusals.may_send(blade, clock::now()) {
                    self.refusing.push(blade);
                }
                self.refusals.refuse(blade, clock::now());
                self.local.insert(at.page);
            }
        }
    }

    fn begin(&mut self, page: u32, written: Option<u64>) -> (SegmentPage, u64) {
        let at = SegmentPage { segment: self.segment, page };
        let flying = Flying { written, begun_ns: clock::now_ns() };
        assert!(self.busy.insert(at, flying).is_none(), "a page is read or written once at a time");
        self.next_token += 1;
        (at, self.next_token)
    }

    /// Takes what has come back on all lanes.
    fn collect(&mut self) {
        for lane in 0..self.lanes.len() {
            if !self.lanes[lane].is_idle() {
                let ended = self.lanes[lane].poll(clock::now());
                self.judge(ended);
            }
        }
    }

    fn judge(&mut self, ended: Vec<Ended>) {
        for Ended { at, result, bytes, .. } in ended {
            let flying = self.busy.remove(&at).expect("what comes back was in flight");
            let took_ns = clock::now_ns() - flying.begun_ns;
            self.tally.slowest_ns = self.tally.slowest_ns.max(took_ns);
            clock::note(|| {
                let Flying { written, .. } = flying;
                format!("page {} {written:?} took {} us: {result:?}", at.page, took_ns / 1000)
            });
            if flying.written.is_some() && at.segment == self.segment {
                self.answered(at, result);
            }
            match (flying.written, result) {
                (Some(version), Ok(())) => {
                    self.tally.stored += 1;
                    self.model.stored(at.page, version);
                }
                (Some(_), Err(error)) => {
                    match error {
                        PageError::Refused(code) if code == ErrorCode::BladeFull.number() => {
                            self.tally.put_back += 1;
                        }
                        _ => self.failed(error),
                    }
                    self.model.perhaps_stored(at.page);
                }
                (None, Ok(())) => match self.model.objection(at.page, &bytes) {
                    None => self.tally.read += 1,
                    Some(why) => self.violation = Some(Violation(why)),
                },
                // Without a seal there is nothing to recognize a page by.
                (None, Err(PageError::Forged))
                    if self.pool.seals(at.segment).is_some()
                        && !self.model.may_be_written(at.page) =>
                {
                    self.tally.read += 1;
                }
                (None, Err(error)) => self.failed(error),
            }
        }
    }

    fn failed(&mut self, error: PageError) {
        self.tally.failed += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }
}

fn pages_of(superpage: u32) -> std::ops::Range<u32> {
    superpage * SUPERPAGE_PAGES..(superpage + 1) * SUPERPAGE_PAGES
}

fn exactly_u32(number: u64) -> u32 {
    farpool_units::exactly(number)
}
