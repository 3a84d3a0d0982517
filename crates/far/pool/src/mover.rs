//! Moves memory from blade to blade under a running program, superpage by superpage.
//!
//! The life of a move: memory is allocated on another blade; a [`Record`] is published, from which
//! on lanes write to the new place; what was in flight before ends; the pages that were not written
//! are copied; the new place alone is published; reads of the old one that are still in flight end;
//! its memory is freed. While the program uses far memory the copy is slow on purpose: small pieces
//! with pauses between them, so that the program's own pages come first.
//!
//! Frozen segments, which others share, cannot be taken from their blade. One of the users makes a
//! copy elsewhere, the others attach that ([`CopyDesk`]), and each gives up its share in the
//! original. Until the copy is complete, children get the original.

mod completing;
mod job;
mod rebuilding;
mod verifying;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES, exactly};
use farpool_wire::PageNumber;

use crate::account::{Account, PartKey, PartRole, parts};
use crate::copies::is_apart;
use crate::damage::Suspect;
use crate::lane::Sealing;
use crate::map::Place;
use crate::moving::MAX_RECORDS;
use crate::parity::Strip;
use crate::pool::Ledger;
use crate::shared::{LaneClock, SegmentState};
use crate::types::Access;
use crate::{
    BladeIndex, Completion, CopyDesk, Errand, FrozenToken, Lane, PageError, Pool, PoolError,
    Redundancy, SUPERPAGE_PAGES, SegmentHandle,
};

use job::{Job, Source};
pub use verifying::{Damage, DamageOutcome, VERIFY_LIMIT_PAGES, Verified, VerifyPoint};

/// Pages copied at once while the program leaves its far memory alone: 1 MiB, one request each way.
const BATCH_PAGES: usize = 256;
/// Batches under way at once in that case: one being read, one being written, one between.
const BATCHES: usize = 3;
/// Pages copied at once while the program is busy: a fetch waits behind at most 64 KiB.
const BUSY_PAGES: usize = 16;
/// While the program is busy, the mover pauses this many times as long as the last piece took.
const REST_FACTOR: u32 = 4;
/// But no longer than this, so that a piece that was slow for other reasons does not stop the move.
const REST_LIMIT: Duration = Duration::from_millis(10);
/// Pause between two checks of lanes that have something in flight.
const SETTLE_STEP: Duration = Duration::from_micros(50);

/// The result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A superpage was moved.
    Moved,
    /// All that this process moves is moved, but a share in a frozen segment cannot be given up
    /// yet: another process copies it, or a child may still attach it.
    Waiting,
    /// Nothing of ours is left there; [`Pool::remove_blade`] will succeed.
    Empty,
}

/// Moves superpages away from blades, with a lane of its own. One is enough for a pool; two take
/// turns.
#[derive(Debug)]
pub struct Mover<'a> {
    pool: &'a Pool,
    lane: Lane,
    clock: Arc<LaneClock>,
    batches: Vec<Batch>,
    done: Vec<Completion>,
    /// Pages that all other lanes together had moved at the last check.
    moved_by_others: u64,
    /// Damaged copies that were told and could not be given up; see [`Mover::verify`].
    kept: BTreeSet<Suspect>,
    /// The last step of [`Mover::complete_copies`] took freed memory out of the parity.
    took_out_freed: bool,
}

/// Pages being moved.
#[derive(Debug)]
struct Batch {
    memory: Vec<PageMemory>,
    pages: Vec<u32>,
    is_written: bool,
    in_flight: usize,
    failed: Option<PageError>,
    started: Instant,
}

#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct PageMemory([u8; PAGE_BYTES]);

const _: () = assert!(size_of::<PageMemory>() == PAGE_BYTES);

/// Which blade failed, and how.
#[derive(Clone, Copy, Debug)]
struct CopyError {
    of_new: bool,
    error: PageError,
}

impl<'a> Mover<'a> {
    /// A mover, which connects to blades and takes its memory (3 MiB to move superpages, less to
    /// verify them) when it needs to.
    pub fn new(pool: &'a Pool) -> Self {
        let (mut lane, clock) = pool.unconnected_lane(Sealing::AsStored);
        lane.set_background();
        Mover {
            pool,
            lane,
            clock,
            batches: (0..BATCHES).map(|_| Batch::new(pool.shared.config.time.now())).collect(),
            done: Vec::with_capacity(BATCHES * BATCH_PAGES),
            moved_by_others: 0,
            kept: BTreeSet::new(),
            took_out_freed: false,
        }
    }

    /// Moves one superpage away from a blade that was declared [leaving](Pool::set_leaving), or
    /// completes the move. `may_detach` says whether no child of this process will still attach
    /// what was frozen there; it is called while nothing can be frozen ([`Pool::hold_still`]).
    ///
    /// # Errors
    /// No other blade has room, or a blade failed; [`PoolError::NotMoved`] says which. Only what
    /// the lost blade alone had is lost.
    pub fn step(
        &mut self,
        from: BladeIndex,
        desk: &dyn CopyDesk,
        may_detach: impl FnOnce() -> bool,
    ) -> Result<Step, PoolError> {
        self.while_nothing_else_moves(|mover| mover.step_held(from, desk, may_detach))
    }

    fn while_nothing_else_moves<T>(&mut self, what: impl FnOnce(&mut Self) -> T) -> T {
        let pool = self.pool;
        while pool.waiting_for_mover.load(Ordering::Relaxed) > 0 {
            pool.shared.config.time.pause(SETTLE_STEP); // the lock is not fair, and a fork is in a hurry
        }
        let moving = lock(&pool.moving);
        pool.is_moving.store(true, Ordering::Relaxed);
        let done = what(self);
        pool.is_moving.store(false, Ordering::Relaxed);
        drop(moving);
        done
    }

    /// The step, while the pool's `moving` lock is held.
    fn step_held(
        &mut self,
        from: BladeIndex,
        desk: &dyn CopyDesk,
        may_detach: impl FnOnce() -> bool,
    ) -> Result<Step, PoolError> {
        let pool = self.pool;
        pool.ledger().free_rest();
        let mut somebody_copies = false;
        for handle in SegmentHandle::every() {
            let Some((superpage, old)) = next_on(pool, handle, from) else {
                self.complete(&mut pool.ledger(), desk, handle, from)?;
                continue;
            };
            if pool.segment(handle).state() == SegmentState::Frozen {
                match self.ask(desk, handle, old) {
                    Errand::Copy => {}
                    Errand::Wait => {
                        somebody_copies = true;
                        continue;
                    }
                    Errand::Attach(copy) => {
                        if self.attach_copy(desk, handle, old, &copy) {
                            return Ok(Step::Moved);
                        }
                    }
                }
            }
            self.move_superpage(handle, superpage, Some(old))?;
            return Ok(Step::Moved);
        }
        if somebody_copies { Ok(Step::Waiting) } else { self.leave(from, may_detach()) }
    }

    /// Decides who copies the frozen part that a superpage is in. A process that has begun goes on,
    /// whatever others do: with a part of its own copy and all of another's it would have
    /// superpages twice.
    fn ask(&self, desk: &dyn CopyDesk, handle: SegmentHandle, at: Place) -> Errand {
        let mut ledger = self.pool.ledger();
        if ledger.is_copying(handle) {
            return Errand::Copy;
        }
        let original = ledger.token_at(handle, at);
        drop(ledger);
        original.map_or(Errand::Copy, |original| desk.ask(at.blade, original))
    }

    /// Takes another process's copy in place of the original part that `at` is in, and of whatever
    /// else on the same blade it covers. If the copy is gone, the desk is told, and the next step
    /// asks again. False if it covers what we have elsewhere: with both we would have superpages
    /// twice, so we copy for ourselves.
    fn attach_copy(
        &self,
        desk: &dyn CopyDesk,
        handle: SegmentHandle,
        at: Place,
        copy: &FrozenToken,
    ) -> bool {
        let segment = self.pool.segment(handle);
        let mut ledger = self.pool.ledger();
        let (attached, places) = self.attach_parts_of(&mut ledger, handle, copy);
        let ours: BTreeMap<u32, Place> =
            segment.map().iter().filter(|(_, place)| place.blade == at.blade).collect();
        let mut of_part = ours.iter().filter(|(_, place)| place.part == at.part);
        let is_whole = of_part.all(|(sma, _)| places.contains_key(sma));
        let is_all_ours = places.keys().all(|sma| ours.contains_key(sma));
        if is_whole && is_all_ours {
            places.iter().for_each(|(sma, place)| _ = segment.map().set(*sma, Some(*place)));
            let is_there = |key: PartKey| {
                let is_of =
                    |it: &Place| it.blade == at.blade && PartKey::of(handle, it.part) == key;
                segment.map().iter().any(|(_, place)| is_of(&place))
            };
            if let Some(account) = ledger.account_of(at.blade) {
                let left = PartKey::all(handle).filter(|key| !is_there(*key));
                left.for_each(|key| account.set_role(key, PartRole::Superseded));
            }
            return true;
        }
        ledger.detach_parts(attached);
        if let Some(original) = ledger.token_at(handle, at).filter(|_| !is_whole) {
            desk.forget(original);
        }
        !is_whole
    }

    /// Attaches all parts of a copy that can be attached. Returns the new parts, and the place of
    /// each superpage of the copy.
    fn attach_parts_of(
        &self,
        ledger: &mut Ledger,
        handle: SegmentHandle,
        copy: &FrozenToken,
    ) -> (Vec<(BladeIndex, PartKey)>, BTreeMap<u32, Place>) {
        let (mut attached, mut places) = (Vec::new(), BTreeMap::new());
        for (part, token) in copy.iter() {
            let blade = part.blade;
            let Some(account) = ledger.account_of(blade) else { continue };
            let free = parts().find(|which| !account.has_part(PartKey::of(handle, *which)));
            let Some(which) = free else { continue };
            let key = PartKey::of(handle, which);
            let put = |sma, rmma| {
                places.insert(sma, Place::at(blade, which, rmma));
            };
            // What could not be attached is missing from the result.
            let _ = account.attach(key, token, put);
            if let Some((id, file)) = account.part(key) {
                self.pool.segment(handle).set_part(blade, which, id, file);
                attached.push((blade, key));
            }
        }
        (attached, places)
    }

    /// Moves a superpage, or makes a copy that has no place.
    fn move_superpage(
        &mut self,
        handle: SegmentHandle,
        superpage: u32,
        old: Option<Place>,
    ) -> Result<(), PoolError> {
        let pool = self.pool;
        let segment = pool.segment(handle);
        let strip = Strip { strand: handle, superpage };
        let Some(source) = Source::of(pool, strip, old) else {
            return Ok(()); // the other copy was lost meanwhile
        };
        let is_uncharged = old.is_none_or(Place::is_nowhere);
        let records = pool.shared.records();
        let free = (0u8..).zip(records).find(|(_, record)| record.is_free());
        let (number, record) = free.ok_or(PoolError::TooManyHalfMoved { limit: MAX_RECORDS })?;
        let is_frozen = segment.state() == SegmentState::Frozen;
        let new = {
            let mut ledger = pool.ledger();
            if is_uncharged && !is_frozen {
                ledger.check_quota(pool.shared.config.quota_bytes, 1)?;
            }
            let domains = pool.domains_of_peers(strip);
            let new = pool.allocate_somewhere(&mut ledger, handle, superpage, |account| {
                let is_apart = is_apart(account, &domains);
                let part = if is_frozen { account.filling_part(handle) } else { Some(0) };
                part.filter(|_| is_apart)
            })?;
            if let Some(account) = ledger.account_of(new.blade).filter(|_| is_frozen) {
                account.set_role(PartKey::of(handle, new.part), PartRole::Filling);
            }
            if is_uncharged && !is_frozen {
                ledger.charge(handle);
            }
            new
        };
        record.begin(new, old.is_none() || matches!(source, Source::Group(_)));
        let at = Place { record: Some(number), ..old.unwrap_or(new) };
        let is_within = segment.map().set(superpage, Some(at));
        assert!(is_within, "superpage {superpage} lies in its segment");
        self.settle();
        // Of what is frozen others may know pages that this process does not.
        let seals = pool.segment(handle.first()).seals().filter(|_| !is_frozen);
        let job = Job { handle, segment, superpage, old, source, new, record, seals };
        let copied = match job.source {
            Source::Place(..) => self.copy(&job),
            Source::Group(group) => self.rebuild(&job, group),
        };
        match copied {
            Ok(()) => self.finish(&job, is_frozen),
            Err(failed) => self.give_up(&job, failed, is_frozen)?,
        }
        Ok(())
    }

    fn finish(&mut self, job: &Job<'_>, is_frozen: bool) {
        job.segment.map().set_moved(job.superpage, job.new);
        self.settle();
        job.record.end();
        if let Some(old) = job.old.filter(|old| !is_frozen && !old.is_nowhere()) {
            self.pool.ledger().free_soon(job.handle, job.superpage, old);
        }
    }

    /// Restores as consistent a state as possible after a blade failed.
    fn give_up(
        &mut self,
        job: &Job<'_>,
        failed: CopyError,
        is_frozen: bool,
    ) -> Result<(), PoolError> {
        if self.pool.shared.config.redundancy == Redundancy::Parity {
            self.give_up_strip(job, is_frozen);
            return Err(self.not_moved(job, failed));
        }
        // If the source is lost, the record stays: pages written meanwhile are on the new blade.
        let is_copy = job.source.is_other_than(job.old);
        if is_copy && job.source.is_alive(self.pool, job.strip()) {
            // The source has everything.
            job.segment.map().set(job.superpage, job.old);
            self.settle();
            job.record.end();
            self.forget_new(job, is_frozen);
        } else if failed.of_new {
            job.record.turn_back();
            self.settle();
            if job.record.restore() {
                job.segment.map().set(job.superpage, job.old);
                self.settle();
                job.record.end();
                self.forget_new(job, is_frozen);
            }
        }
        Err(self.not_moved(job, failed))
    }

    fn not_moved(&self, job: &Job<'_>, failed: CopyError) -> PoolError {
        PoolError::NotMoved {
            superpage: job.superpage,
            segment: job.handle.first().index(),
            from: job.source.describe(self.pool),
            to: self.pool.describe(job.new.blade),
            reason: failed.error,
        }
    }

    /// The same where a superpage can be had from the rest of its group: what was written meanwhile
    /// is in the parity, too.
    fn give_up_strip(&self, job: &Job<'_>, is_frozen: bool) {
        let (pool, strip) = (self.pool, job.strip());
        job.record.turn_back();
        self.settle();
        let is_old_whole = job.old.is_some_and(|old| !pool.is_lost(old.blade))
            && !job.record.is_making()
            && job.record.restore();
        let is_had = strip.is_parity() || pool.shared.is_recoverable(strip);
        if !is_old_whole && !is_had {
            return; // half here and half there
        }
        let ended = match job.old {
            old if is_old_whole => old,
            _ if strip.is_parity() => None,
            old => Some(Place { is_freed: old.is_some_and(|it| it.is_freed), ..Place::nowhere() }),
        };
        job.segment.map().set(job.superpage, ended);
        self.settle();
        job.record.end();
        self.forget_new(job, is_frozen);
        if let Some(old) = job.old.filter(|old| !is_old_whole && !old.is_nowhere()) {
            let mut ledger = pool.ledger();
            pool.free_strip(&mut ledger, strip, Place { record: None, ..old });
        }
    }

    /// Nothing is published at the new place any more.
    fn forget_new(&self, job: &Job<'_>, is_frozen: bool) {
        let mut ledger = self.pool.ledger();
        if job.old.is_none_or(Place::is_nowhere) && !is_frozen {
            ledger.uncharge(job.handle);
        }
        if !is_frozen {
            ledger.free_soon(job.handle, job.superpage, job.new);
        }
    }

    /// Copies every page that is not written meanwhile.
    fn copy(&mut self, job: &Job<'_>) -> Result<(), CopyError> {
        let others = self.other_clocks();
        let (mut next, mut failed) = (0, None);
        loop {
            while failed.is_none() && next < SUPERPAGE_PAGES {
                let Some(idle) = self.batches.iter().position(|batch| batch.pages.is_empty())
                else {
                    break;
                };
                let is_busy = self.is_busy(&others);
                if is_busy && idle > 0 {
                    break; // one piece at a time
                }
                if is_busy {
                    self.rest();
                }
                let limit = if is_busy { BUSY_PAGES } else { BATCH_PAGES };
                next = self.start(idle, job, next, limit);
            }
            if self.batches.iter().all(|batch| batch.pages.is_empty()) {
                return failed.map_or(Ok(()), Err);
            }
            let mut done = std::mem::take(&mut self.done);
            self.lane.wait(&mut done);
            for completion in done.drain(..) {
                failed = self.completed(job, completion).or(failed);
            }
            self.done = done;
        }
    }

    /// True if the program used far memory since the last check, and no thread waits for the mover.
    fn is_busy(&mut self, others: &[Arc<LaneClock>]) -> bool {
        let moved = others.iter().fold(0, |all: u64, it| all.wrapping_add(it.moved_in_all()));
        let is_used = std::mem::replace(&mut self.moved_by_others, moved) != moved;
        is_used && self.pool.waiting_for_mover.load(Ordering::Relaxed) == 0
    }

    fn other_clocks(&self) -> Vec<Arc<LaneClock>> {
        let ledger: &Ledger = &self.pool.ledger();
        let others = ledger.clocks.iter().filter(|it| !Arc::ptr_eq(it, &self.clock));
        others.cloned().collect()
    }

    fn rest(&self) {
        let time = self.pool.shared.config.time;
        let last = time.now().saturating_duration_since(self.batches[0].started);
        time.pause((last * REST_FACTOR).min(REST_LIMIT));
    }

    /// Begins to read the next pages. Returns where to continue.
    fn start(&mut self, number: usize, job: &Job<'_>, from: u32, limit: usize) -> u32 {
        let batch = &mut self.batches[number];
        assert!(batch.pages.is_empty() && batch.in_flight == 0, "a batch is of one piece");
        let pool = self.pool;
        let is_written = |page| job.is_written(pool, page);
        let next = job.record.claim(from, limit, is_written, |page| batch.pages.push(page));
        batch.is_written = false;
        batch.failed = None;
        batch.reserve(limit);
        batch.started = self.pool.shared.config.time.now();
        self.submit(number, job, Access::Read);
        next
    }

    /// Sends the batch's pages: to be read, all of them; to be written, all but zero pages, since
    /// the new memory is zero.
    fn submit(&mut self, number: usize, job: &Job<'_>, access: Access) {
        let batch = &mut self.batches[number];
        let (segment, place) = match (access, job.source) {
            (Access::Read, Source::Place(segment, place)) => (segment, place),
            (Access::Read, Source::Group(_)) => unreachable!("a group is not read page by page"),
            (Access::Write, _) => (job.segment, job.new),
        };
        let mut links = Vec::with_capacity(batch.pages.len());
        for (index, (page, memory)) in batch.pages.iter().zip(&mut batch.memory).enumerate() {
            if access == Access::Write && memory.0 == [0; PAGE_BYTES] {
                continue;
            }
            let page = PageNumber(job.superpage * SUPERPAGE_PAGES + page);
            let token = (number as u64) << 32 | index as u64;
            links.push(segment.page_at(place, page, memory.0.as_mut_ptr(), token));
        }
        batch.in_flight = links.len();
        if !links.is_empty() {
            // SAFETY: the batch's memory is its own and stays where it is until its pages are done;
            // what the places name is not closed while the pool's `moving` lock is held.
            unsafe { self.lane.submit_to(place.blade, links, access) };
        }
    }

    /// Handles the completion of one page. Returns an error if its batch failed.
    fn completed(&mut self, job: &Job<'_>, completion: Completion) -> Option<CopyError> {
        let number: usize = exactly(completion.token >> 32);
        let batch = &mut self.batches[number];
        assert_ne!(batch.in_flight, 0, "a page arrives that was not asked for");
        batch.in_flight -= 1;
        batch.failed = batch.failed.or(completion.result.err());
        if batch.in_flight > 0 {
            return None;
        }
        let failed = batch.failed.map(|error| CopyError { of_new: batch.is_written, error });
        if failed.is_none() && !batch.is_written {
            batch.is_written = true;
            self.submit(number, job, Access::Write);
            if self.batches[number].in_flight > 0 {
                return None;
            }
        }
        for page in self.batches[number].pages.drain(..) {
            match failed {
                None => job.record.arrived(page),
                Some(_) => job.record.let_go(page),
            }
        }
        failed
    }

    /// Waits until everything has ended that was in flight when a change was published.
    fn settle(&self) {
        let phase = self.pool.shared.phase.fetch_add(1, Ordering::SeqCst) + 1;
        for clock in self.other_clocks() {
            while !clock.is_settled(phase) {
                self.pool.shared.config.time.pause(SETTLE_STEP);
            }
        }
    }

    /// Gives up our parts of segments on a blade where none of their superpages is left.
    fn leave(&mut self, from: BladeIndex, may_detach: bool) -> Result<Step, PoolError> {
        let pool = self.pool;
        self.settle();
        let mut ledger = pool.ledger();
        let mut must_wait = false;
        for handle in SegmentHandle::every() {
            let has_part =
                |account: &Account| PartKey::all(handle).any(|key| account.has_part(key));
            let is_there = ledger.account_of(from).is_some_and(|account| has_part(account));
            let is_needed =
                || pool.segment(handle).map().iter().any(|(_, at)| pool.is_on(at, from));
            if !is_there || is_needed() {
                continue; // also where a part is: what is half moved stays
            }
            if pool.segment(handle).state() == SegmentState::Frozen && !may_detach {
                must_wait = true;
                continue;
            }
            if let Some(account) = ledger.account_of(from) {
                let mut detached = PartKey::all(handle).map(|key| account.detach(key));
                match pool.is_lost(from) {
                    true => detached.for_each(drop), // it has nothing to give up any more
                    false => detached.try_for_each(|it| it)?,
                }
            }
        }
        if must_wait {
            return Ok(Step::Waiting);
        }
        ledger.unfreed.retain(|(_, _, place)| place.blade != from);
        let superpages = pool.superpages_on(from);
        if superpages > 0 {
            return Err(PoolError::InUse { address: pool.describe(from), superpages });
        }
        Ok(Step::Empty)
    }

    /// Makes our copy of a frozen segment's parts on a blade attachable, and announces it.
    fn complete(
        &self,
        ledger: &mut Ledger,
        desk: &dyn CopyDesk,
        handle: SegmentHandle,
        from: BladeIndex,
    ) -> Result<(), PoolError> {
        let copy = ledger.freeze_filled(handle)?;
        let is_copied = copy.iter().next().is_some();
        if let Some(account) = ledger.account_of(from).filter(|_| is_copied) {
            for key in PartKey::all(handle) {
                if let Some(original) = account.token(key) {
                    account.set_role(key, PartRole::Superseded);
                    desk.announce(original.token.0, &copy);
                }
            }
        }
        Ok(())
    }
}

/// The segment's first superpage that lies entirely on the blade.
fn next_on(pool: &Pool, handle: SegmentHandle, from: BladeIndex) -> Option<(u32, Place)> {
    let segment = pool.segment(handle);
    // The table of a segment that never was is not made for this.
    if segment.state() == SegmentState::Free {
        return None;
    }
    let is_there = |place: &Place| place.blade == from && place.record.is_none();
    segment.map().iter().find(|(_, at)| is_there(at))
}

impl Batch {
    /// Makes memory for so many pages; none is on its way.
    fn reserve(&mut self, pages: usize) {
        assert_eq!(self.in_flight, 0, "memory that is lent stays where it is");
        if self.memory.len() < pages {
            self.memory.resize(pages, PageMemory([0; PAGE_BYTES]));
        }
    }

    fn new(now: Instant) -> Self {
        Batch {
            memory: Vec::new(),
            pages: Vec::with_capacity(BATCH_PAGES),
            is_written: false,
            in_flight: 0,
            failed: None,
            started: now,
        }
    }
}

const _: () = assert!(SUPERPAGE_PAGES as u64 * PAGE_BYTES as u64 == SUPERPAGE_BYTES);
