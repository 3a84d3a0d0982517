//! The pool: one client, its segments, its blades.
//!
//! Invariants:
//! - A superpage's place is published after the blade has allocated the memory and after everything
//!   that a lane needs to reach it, and unpublished before the memory is freed; between
//!   unpublishing and freeing every lane has been outside the tables once.
//! - A segment is marked frozen before the blades are told, and writable after they were.
//! - A lost blade never stops operations that concern other blades only.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use farpool_fabric::{CallError, DescriptorSet};
use farpool_kernel::lock;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::ErrorCode;

use crate::account::{Account, PartKey, PartRole, parts};
use crate::copies::{ALL_SEGMENTS, COPIES_LIMIT};
use crate::lane::Sealing;
use crate::map::{Place, SEGMENT_LIMIT_SUPERPAGES};
use crate::seals::Seals;
use crate::shared::{BladeSlot, LaneClock, Segment, SegmentState, Shared};
use crate::types::Strands;
use crate::types::{CONTROL_SLOT, blade_index};
use crate::{
    BladeIndex, FrozenToken, Lane, MAX_BLADES, MAX_SEGMENTS, PoolConfig, PoolError, Redundancy,
    SegmentHandle,
};

/// One client's memory on its blades. Shared by all threads of the pager.
#[derive(Debug)]
pub struct Pool {
    pub(crate) shared: Arc<Shared>,
    /// Held while a superpage moves, and by threads that need superpages to stay in place. Taken
    /// before the ledger.
    pub(crate) moving: Mutex<()>,
    /// The mover is the holder of `moving`.
    pub(crate) is_moving: AtomicBool,
    /// Number of threads that wait for `moving`: the mover then hurries.
    pub(crate) waiting_for_mover: AtomicU32,
    ledger: Mutex<Ledger>,
    next_slot: AtomicU32,
}

/// It passes through the stacks of a pager's threads, which have 256 KiB: 68 KiB by value were too
/// much.
const _: () = assert!(size_of::<Pool>() <= 4096);

/// The state that control operations change, under the pool's lock.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// One per blade slot. On the heap: a pool is handed on by threads with small stacks.
    pub(crate) accounts: Box<[Option<Account>]>,
    /// Superpages of each segment, and of each copy, that count against the quota: those that we
    /// allocated.
    pub(crate) charged_superpages: [u64; ALL_SEGMENTS],
    /// Places that superpages have left and that their blade refused to free at once.
    pub(crate) unfreed: Vec<(SegmentHandle, u32, Place)>,
    /// Clocks of all lanes there ever were: few, and they end with the process.
    pub(crate) clocks: Vec<Arc<LaneClock>>,
}

/// While it lives nothing moves; see [`Pool::hold_still`].
#[derive(Debug)]
pub struct Still<'a>(#[expect(dead_code, reason = "held, not looked at")] MutexGuard<'a, ()>);

impl Pool {
    /// Connects to every blade.
    ///
    /// # Errors
    /// No blade or too many in the configuration, TCP to another host without permission, or a
    /// blade that does not answer.
    pub fn connect(config: PoolConfig) -> Result<Pool, PoolError> {
        let given = config.blades.len();
        if given == 0 || given > MAX_BLADES {
            return Err(PoolError::BladeCount { given, limit: MAX_BLADES });
        }
        let pool = Pool::new(config);
        let mut blades = (0_u8..).zip(&pool.shared.config.blades);
        blades.try_for_each(|(at, it)| pool.add_blade_at(BladeIndex(at), it))?;
        Ok(pool)
    }

    /// A pool without blades, whatever the configuration lists; they are added one by one.
    ///
    /// # Panics
    /// More than one copy of what is not sealed, or more than [`COPIES_LIMIT`].
    pub fn new(config: PoolConfig) -> Pool {
        let copies = config.redundancy.copies();
        assert!((1..=COPIES_LIMIT).contains(&copies), "{copies} copies of a superpage");
        let needs_seals = config.redundancy.survives_a_blade();
        assert!(config.seals_pages || !needs_seals, "seals tell what is right");
        let descriptors = Arc::new(DescriptorSet::default());
        let ledger = Ledger {
            accounts: (0..MAX_BLADES).map(|_| None).collect(),
            charged_superpages: [0; ALL_SEGMENTS],
            unfreed: Vec::new(),
            clocks: Vec::new(),
        };
        Pool {
            shared: Arc::new(Shared::new(config, descriptors)),
            moving: Mutex::new(()),
            is_moving: AtomicBool::new(false),
            waiting_for_mover: AtomicU32::new(0),
            ledger: Mutex::new(ledger),
            next_slot: AtomicU32::new(CONTROL_SLOT + 1),
        }
    }

    /// A lane for one thread; to be made before the first fault is served. A blade that can no
    /// longer be reached counts as lost from now on: nothing is written to it, and other blades go
    /// on.
    ///
    /// # Errors
    /// A blade refuses, or this process has no descriptor left.
    pub fn lane(&self) -> Result<Lane, PoolError> {
        let sealing = match self.shared.config.seals_pages {
            true => Sealing::ByLane,
            false => Sealing::AsStored,
        };
        let (mut lane, _) = self.unconnected_lane(sealing);
        for blade in (0..MAX_BLADES).map(blade_index) {
            match lane.connect(blade) {
                Err(PoolError::BladeLost { reason, .. }) => {
                    self.shared.lose(blade.0.into(), &reason);
                }
                Err(PoolError::Barred(error)) => {
                    self.shared.lose(blade.0.into(), &error.to_string());
                }
                connected => connected?,
            }
        }
        Ok(lane)
    }

    /// A lane that connects to a blade when it first has pages for it, and its clock.
    pub(crate) fn unconnected_lane(&self, sealing: Sealing) -> (Lane, Arc<LaneClock>) {
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let clock = Arc::new(LaneClock::default());
        let lane = Lane::new(Arc::clone(&self.shared), Arc::clone(&clock), slot, sealing);
        self.ledger().clocks.push(Arc::clone(&clock));
        (lane, clock)
    }

    /// Keeps superpages in place, unless the mover is moving one.
    fn hold_unless_moving(&self) -> Option<Still<'_>> {
        loop {
            match self.moving.try_lock() {
                Ok(guard) => return Some(Still(guard)),
                Err(TryLockError::Poisoned(error)) => return Some(Still(error.into_inner())),
                Err(TryLockError::WouldBlock) if self.is_moving.load(Ordering::Relaxed) => {
                    return None;
                }
                // Another thread holds it, and waits for no lane.
                Err(TryLockError::WouldBlock) => rustix::thread::sched_yield(),
            }
        }
    }

    /// Waits until the mover has finished its superpage, and keeps it from the next as long as the
    /// value lives. What the caller has in flight on a lane must have ended.
    pub fn hold_still(&self) -> Still<'_> {
        self.waiting_for_mover.fetch_add(1, Ordering::Relaxed);
        let guard = lock(&self.moving);
        self.waiting_for_mover.fetch_sub(1, Ordering::Relaxed);
        Still(guard)
    }

    /// A new, empty, writable segment. Blades learn of it when it first needs memory on them.
    ///
    /// # Errors
    /// All [`MAX_SEGMENTS`] handles are in use, or the kernel gives no random numbers for a key.
    pub fn create_segment(&self) -> Result<SegmentHandle, PoolError> {
        let ledger = self.ledger();
        let handle = self.free_handle()?;
        for strand in self.strands(handle) {
            let charged = ledger.charged_superpages[strand.index()];
            assert_eq!(charged, 0, "a free handle has no memory");
        }
        let config = &self.shared.config;
        let seals = match config.redundancy {
            Redundancy::Parity => Some(Seals::fresh().and_then(Seals::with_parity)?),
            Redundancy::Copies(_) => config.seals_pages.then(Seals::fresh).transpose()?,
        };
        self.segment(handle).set_seals(seals.map(Arc::new));
        self.set_state(handle, SegmentState::Writable);
        Ok(handle)
    }

    /// Allocates memory for the superpage on a blade, unless it has some already. Its pages read as
    /// zeros.
    ///
    /// # Errors
    /// The quota is used up, every blade is full or lost, or the segment is frozen.
    pub fn allocate_superpage(&self, s: SegmentHandle, sma: u32) -> Result<(), PoolError> {
        let segment = self.segment(s);
        if segment.state() == SegmentState::Writable && self.has_place(s, sma) {
            return Ok(());
        }
        let mut ledger = self.ledger();
        match segment.state() {
            SegmentState::Free => return Err(PoolError::NoSuchSegment(s)),
            SegmentState::Frozen => return Err(PoolError::Frozen(s)),
            SegmentState::Writable if self.has_place(s, sma) => return Ok(()),
            SegmentState::Writable => {}
        }
        if sma >= SEGMENT_LIMIT_SUPERPAGES {
            return Err(PoolError::BeyondSegment { superpage: sma });
        }
        let copies = match self.shared.config.redundancy {
            Redundancy::Copies(copies) => copies,
            Redundancy::Parity => return self.allocate_member(&mut ledger, s, sma),
        };
        ledger.check_quota(self.shared.config.quota_bytes, copies.into())?;
        let places = self.allocate_copies(&mut ledger, s, sma)?;
        if let Some(seals) = segment.seals() {
            seals.begin(sma);
        }
        for (copy, place) in places {
            ledger.charge(copy);
            let is_within = self.segment(copy).map().set(sma, Some(place));
            assert!(is_within, "superpage {sma} lies in its segment");
        }
        Ok(())
    }

    /// Asks the blades in turn on which there is a part for it: first the one with the fewest of
    /// our superpages, those known full only when all others failed.
    pub(crate) fn allocate_somewhere(
        &self,
        ledger: &mut Ledger,
        s: SegmentHandle,
        sma: u32,
        part_on: impl Fn(&Account) -> Option<u8>,
    ) -> Result<Place, PoolError> {
        let mut refusals: [Option<CallError>; MAX_BLADES] = [const { None }; MAX_BLADES];
        while let Some((blade, part, account)) = ledger.best_blade(&refusals, &part_on) {
            let key = PartKey::of(s, part);
            match account.allocate(key, sma) {
                Ok(rmma) => {
                    if let Some((id, file)) = account.part(key) {
                        self.segment(s).set_part(blade_index(blade), part, id, file);
                    }
                    return Ok(Place::at(blade_index(blade), part, rmma));
                }
                Err(error) => {
                    account.is_full = true;
                    self.note_loss(blade, account);
                    refusals[blade] = Some(error);
                }
            }
        }
        Err(self.explain_refusals(&refusals))
    }

    /// Combines the blades' refusals into one error.
    fn explain_refusals(&self, refusals: &[Option<CallError>]) -> PoolError {
        let code = |error: &CallError| match error {
            CallError::Refused { code, .. } => Some(*code),
            CallError::Connect(_) => None,
        };
        let mut all = refusals.iter().flatten();
        if all.clone().next().is_none() {
            let is_there = |slot: &BladeSlot| slot.get().is_some();
            return match self.shared.blades.iter().any(is_there) {
                true => PoolError::Full { blades: "there is no other one".into() },
                false => PoolError::NoBlade,
            };
        }
        let unshareable = |error: &CallError| code(error) == Some(ErrorCode::Unsupported);
        if let Some(CallError::Refused { address, .. }) = all.clone().find(|e| unshareable(e)) {
            return PoolError::NotShareable { address: address.clone() };
        }
        if all.clone().all(|error| code(error).is_none())
            && let Some(lost) = all.next()
        {
            return lost.clone().into();
        }
        let blades: Vec<String> = refusals.iter().flatten().map(explain_refusal).collect();
        PoolError::Full { blades: blades.join("; ") }
    }

    /// True if the superpage has memory on a blade that is not known to be lost. Lock-free.
    pub fn can_store(&self, s: SegmentHandle, sma: u32) -> bool {
        self.blade_of(s, sma).is_some_and(|blade| !self.is_lost(blade))
    }

    /// A blade to which the superpage's pages are written: one that is not lost if there is one.
    /// None if it has no memory. Lock-free.
    pub fn blade_of(&self, s: SegmentHandle, sma: u32) -> Option<BladeIndex> {
        let places = self.places(s, sma).map(|(_, place)| place);
        let mut blades = places.chain(self.parity_of(s, sma)).map(|place| {
            let record = place.record.map(|it| &self.shared.records()[usize::from(it)]);
            record.and_then(|record| record.target()).unwrap_or(place).blade
        });
        let first = blades.next()?;
        if !self.is_lost(first) {
            return Some(first);
        }
        Some(blades.find(|blade| !self.is_lost(*blade)).unwrap_or(first))
    }

    /// True if the blade's pages can no longer be reached. Lock-free.
    pub fn is_lost(&self, blade: BladeIndex) -> bool {
        self.shared.is_lost(blade)
    }

    /// Frees the superpage's memory, if it has any. No page of it may be in flight.
    ///
    /// # Errors
    /// The segment is frozen, or the blade refuses, which it does while any page of the segment is
    /// being written, or a superpage is being moved: the superpage then stays as it is. Or the
    /// blade is lost, and the superpage with it.
    pub fn free_superpage(&self, s: SegmentHandle, sma: u32) -> Result<(), PoolError> {
        // Without waiting: the mover may itself wait for pages whose owner waits for this caller.
        let _still = self.hold_unless_moving().ok_or(PoolError::Moving)?;
        let mut ledger = self.ledger();
        self.expect_state(s, SegmentState::Writable)?;
        if self.shared.config.redundancy == Redundancy::Parity {
            return self.free_member(&mut ledger, s, sma);
        }
        let places: Vec<_> = self.places(s, sma).collect();
        for (copy, _) in &places {
            self.segment(*copy).map().set(sma, None);
        }
        ledger.wait_for_lanes();
        let (mut freed, mut refused) = (0, None);
        for (copy, place) in &places {
            match self.free_copy(&mut ledger, *copy, sma, *place) {
                Ok(()) => freed += 1,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        if let Some(seals) = self.segment(s).seals().filter(|_| !self.has_place(s, sma)) {
            seals.begin(sma);
        }
        match refused {
            // What a lost blade had is gone, and the other copies are freed.
            Some(CallError::Connect(_)) if freed > 0 => Ok(()),
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// Gives up the segment: its memory is freed, or the share in it. No page of it may be in
    /// flight.
    ///
    /// # Errors
    /// A blade refused; the segment is gone here anyway. A lost blade is no error.
    pub fn detach(&self, s: SegmentHandle) -> Result<(), PoolError> {
        let _still = self.hold_still();
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Free {
            return Err(PoolError::NoSuchSegment(s));
        }
        match self.give_up(&mut ledger, s) {
            Some(error @ CallError::Refused { .. }) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Unpublishes the segment and gives up its parts. Returns the last error.
    pub(crate) fn give_up(&self, ledger: &mut Ledger, s: SegmentHandle) -> Option<CallError> {
        self.set_state(s, SegmentState::Free);
        ledger.unfreed.retain(|(handle, ..)| handle.first() != s);
        ledger.wait_for_lanes();
        let last = self.strands(s).filter_map(|strand| self.give_up_strand(ledger, strand)).last();
        self.segment(s).set_seals(None);
        last
    }

    fn give_up_strand(&self, ledger: &mut Ledger, copy: SegmentHandle) -> Option<CallError> {
        let segment = self.segment(copy);
        let mut last = None;
        for (number, account) in ledger.accounts.iter_mut().enumerate() {
            let Some(account) = account else { continue };
            let blade = blade_index(number);
            let ours = segment.map().iter().filter(|(_, place)| place.blade == blade).count();
            for key in PartKey::all(copy) {
                last = account.detach(key).err().or(last);
            }
            account.give_back(ours as u64);
            self.note_loss(number, account);
        }
        for record in segment.map().iter().filter_map(|(_, place)| place.record) {
            self.shared.records()[usize::from(record)].end();
        }
        segment.map().clear();
        ledger.charged_superpages[copy.index()] = 0;
        last
    }

    /// True if the descriptor belongs to this pool, which must survive when the program closes
    /// descriptors it does not know. Lock-free.
    pub fn owns_descriptor(&self, fd: std::os::fd::RawFd) -> bool {
        self.shared.descriptors.holds(fd)
    }

    /// Tells the blades that this client ends. They free its memory at once, memory shared by
    /// descriptor as soon as the pool is dropped or the process ends.
    pub fn goodbye(&self) {
        let mut ledger = self.ledger();
        for blade in 0..MAX_BLADES {
            let moved = ledger.moved(blade);
            if let Some(account) = &mut ledger.accounts[blade] {
                account.goodbye(moved);
            }
        }
    }

    /// For the child after fork: closes the inherited descriptors and forgets everything else,
    /// without a message to the blades, a lock, or access to memory that other threads were
    /// changing. The child's copies of lanes must be dropped by `std::mem::forget`.
    pub fn forget_after_fork(self) {
        self.shared.descriptors.close_all();
        std::mem::forget(self);
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing below the lock panics; should it happen, the tables are still consistent.
        lock(&self.ledger)
    }

    pub(crate) fn segment(&self, s: SegmentHandle) -> &Segment {
        &self.shared.segments[s.index()]
    }

    /// Sets what may be done with a segment, all of its strands.
    pub(crate) fn set_state(&self, s: SegmentHandle, state: SegmentState) {
        self.strands(s).for_each(|strand| self.segment(strand).set_state(state));
    }

    pub(crate) fn expect_state(
        &self,
        s: SegmentHandle,
        wanted: SegmentState,
    ) -> Result<(), PoolError> {
        match self.segment(s).state() {
            state if state == wanted => Ok(()),
            SegmentState::Frozen => Err(PoolError::Frozen(s)),
            _ => Err(PoolError::NoSuchSegment(s)),
        }
    }

    pub(crate) fn free_handle(&self) -> Result<SegmentHandle, PoolError> {
        (0..MAX_SEGMENTS)
            .filter_map(SegmentHandle::from_index)
            .find(|&handle| self.segment(handle).state() == SegmentState::Free)
            .ok_or(PoolError::TooManySegments { limit: MAX_SEGMENTS })
    }

    pub(crate) fn publish_parts(&self, ledger: &Ledger, s: SegmentHandle) {
        for (number, account) in ledger.accounts.iter().enumerate() {
            let Some(account) = account else { continue };
            for (copy, which) in self.strands(s).flat_map(|copy| parts().map(move |it| (copy, it)))
            {
                if let Some((id, file)) = account.part(PartKey::of(copy, which)) {
                    self.segment(copy).set_part(blade_index(number), which, id, file);
                }
            }
        }
    }
}

impl Ledger {
    /// One more superpage counts against the quota.
    pub(crate) fn charge(&mut self, copy: SegmentHandle) {
        self.charged_superpages[copy.index()] += 1;
    }

    /// One superpage less counts.
    pub(crate) fn uncharge(&mut self, copy: SegmentHandle) {
        let charged = &mut self.charged_superpages[copy.index()];
        *charged = charged.checked_sub(1).expect("what is freed was charged");
    }

    /// Pages that all lanes together read from and wrote to the blade.
    pub(crate) fn moved(&self, blade: usize) -> (u64, u64) {
        let moved = self.clocks.iter().map(|clock| clock.moved(blade));
        moved.fold((0, 0), |all, lane| (all.0 + lane.0, all.1 + lane.1))
    }

    /// Checks that so many superpages more are within the quota.
    pub(crate) fn check_quota(&self, quota_bytes: u64, more: u64) -> Result<(), PoolError> {
        let superpages: u64 = self.charged_superpages.iter().sum();
        if (superpages + more).saturating_mul(SUPERPAGE_BYTES) > quota_bytes {
            return Err(PoolError::Quota { quota_bytes });
        }
        Ok(())
    }

    /// The blade to ask next, and the part for the superpage: one not asked yet; if possible not
    /// known to be full, nor the client's own; with the fewest of our superpages for its size.
    fn best_blade(
        &mut self,
        asked: &[Option<CallError>],
        part_on: impl Fn(&Account) -> Option<u8>,
    ) -> Option<(usize, u8, &mut Account)> {
        let all = self.accounts.iter_mut().enumerate();
        let all = all.filter_map(|(number, account)| Some((number, account.as_mut()?)));
        let candidates = all.filter_map(|(number, account)| {
            let part = part_on(account)?;
            let may_ask = asked[number].is_none() && !account.is_leaving;
            (may_ask && !account.is_given_up()).then_some((number, part, account))
        });
        candidates.min_by_key(|(number, _, account)| {
            let used_bytes = u128::from(account.allocated_superpages + 1) << 64;
            let used_share = used_bytes / u128::from(account.capacity_bytes().max(1));
            (account.is_full, account.is_of_client, used_share, *number)
        })
    }

    /// Frees, now or later, a place that a superpage has left and where it is no longer looked for.
    pub(crate) fn free_soon(&mut self, s: SegmentHandle, superpage: u32, place: Place) {
        self.unfreed.push((s, superpage, place));
        self.free_rest();
    }

    /// True if memory of this copy of a superpage is still to be freed somewhere.
    pub(crate) fn is_unfreed(&self, copy: SegmentHandle, superpage: u32) -> bool {
        self.unfreed.iter().any(|(handle, sma, _)| (*handle, *sma) == (copy, superpage))
    }

    /// Frees the remaining places on their blades. A blade refuses while any page of the segment is
    /// being written; then it is retried later, and at the latest freed with the whole part.
    pub(crate) fn free_rest(&mut self) {
        let mut unfreed = std::mem::take(&mut self.unfreed);
        unfreed.retain(|(handle, superpage, place)| {
            let Some(account) = self.account_of(place.blade) else { return false };
            let key = PartKey::of(*handle, place.part);
            let freed = account.free(key, *superpage);
            matches!(freed, Err(CallError::Refused { .. })) && account.has_part(key)
        });
        self.unfreed = unfreed;
    }

    /// Freezes the parts of a segment that a mover has filled, which are its own then. Returns what
    /// opens them.
    pub(crate) fn freeze_filled(&mut self, s: SegmentHandle) -> Result<FrozenToken, PoolError> {
        let mut filled = FrozenToken::NONE;
        for (blade, into) in (0_u8..).map(BladeIndex).zip(&mut filled.copies[0]) {
            let Some(account) = self.account_of(blade) else { continue };
            for (into, key) in into.iter_mut().zip(PartKey::all(s)) {
                if account.is_filling(key) {
                    account.freeze(key)?;
                    account.set_role(key, PartRole::Own);
                    *into = account.token(key);
                }
            }
        }
        Ok(filled)
    }

    /// The token that opens the part that a place of the segment is in.
    pub(crate) fn token_at(&mut self, s: SegmentHandle, at: Place) -> Option<u128> {
        let key = PartKey::of(s, at.part);
        self.account_of(at.blade)?.any_token(key).map(|token| token.token.0)
    }

    /// Gives up parts at which nothing points.
    pub(crate) fn detach_parts(&mut self, parts: Vec<(BladeIndex, PartKey)>) {
        for (blade, key) in parts {
            if let Some(account) = self.account_of(blade) {
                // An error means that there is nothing to give up.
                let _ = account.detach(key);
            }
        }
    }

    /// The tokens of a part on all blades.
    pub(crate) fn tokens_of(&self, key: PartKey) -> impl Iterator<Item = u128> + '_ {
        let accounts = self.accounts.iter().flatten();
        accounts.filter_map(move |account| account.any_token(key)).map(|token| token.token.0)
    }

    /// True if a blade is to be left.
    pub(crate) fn is_any_leaving(&self) -> bool {
        self.accounts.iter().flatten().any(|account| account.is_leaving)
    }

    /// True if the mover is copying the frozen segment from one blade to another.
    pub(crate) fn is_copying(&self, s: SegmentHandle) -> bool {
        let is_filling = |account: &Account| PartKey::all(s).any(|key| account.is_filling(key));
        self.accounts.iter().flatten().any(is_filling)
    }

    pub(crate) fn account_of(&mut self, blade: BladeIndex) -> Option<&mut Account> {
        self.accounts.get_mut(usize::from(blade.0))?.as_mut()
    }

    pub(crate) fn token(&self, s: SegmentHandle) -> FrozenToken {
        let mut token = FrozenToken::NONE;
        for (nth, of_copy) in token.copies.iter_mut().enumerate() {
            for (of_blade, account) in of_copy.iter_mut().zip(&self.accounts) {
                let Some(account) = account else { continue };
                for (token, key) in of_blade.iter_mut().zip(PartKey::all(s.copy(nth))) {
                    *token = account.token(key);
                }
            }
        }
        token
    }

    pub(crate) fn wait_for_lanes(&self) {
        self.clocks.iter().for_each(|clock| clock.wait_until_outside());
    }
}

/// Why a blade gives no superpage, with the remedy: raising its memory differs from raising the
/// quota.
fn explain_refusal(error: &CallError) -> String {
    match error {
        CallError::Refused { address, code: ErrorCode::BladeFull, detail, .. } => {
            let mib = detail >> 20;
            format!(
                "blade {address} is full, all of its {mib} MiB are in use (start it with more \
                 --memory)"
            )
        }
        CallError::Refused { address, code: ErrorCode::QuotaExceeded, detail, .. } => {
            let mib = detail >> 20;
            format!(
                "blade {address} gives this program no more than {mib} MiB (start it with a larger \
                 --quota)"
            )
        }
        other => other.to_string(),
    }
}
