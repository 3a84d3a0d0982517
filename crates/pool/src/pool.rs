//! The pool: one client, its segments, its blades.
//!
//! Invariants:
//! - A superpage's place is published after the blade gave the memory and after everything a lane needs to
//!   reach it, and unpublished before the memory goes back; between unpublishing and giving back every lane
//!   has been outside the tables once.
//! - A segment is marked frozen before the blades are told, and writable after they were.
//! - A lost blade never stops operations that concern other blades only.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use farpool_fabric::{
    Address, CallError, Control, DescriptorSet, Link, Session, ShmLink, StreamLink,
};
use farpool_wire::{ErrorCode, Purpose, SUPERPAGE_BYTES};

use crate::books::{Books, Thawed};
use crate::map::{Place, SEGMENT_LIMIT_SUPERPAGES};
use crate::shared::{Blade, LaneClock, Segment, SegmentState, Shared};
use crate::types::BladeToken;
use crate::{
    BladeIndex, BladeSpec, FrozenToken, Lane, LostBlade, MAX_BLADES, MAX_SEGMENTS, PoolConfig,
    PoolError, SegmentHandle,
};

/// The control connection's slot on each blade; lanes have the following ones.
const CONTROL_SLOT: u32 = 0;
/// What is said of a blade that forgot us.
const LAPSED: &str = "this client's lease ran out there and its memory was freed";
/// The same, where we still hold the memory.
const LAPSED_BUT_HELD: &str =
    "this client's lease ran out there; its pages stay, but it gets no more memory";

/// One client's memory on its blades. Shared by all threads of the pager.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    ledger: Mutex<Ledger>,
    next_slot: AtomicU32,
}

/// What control operations change, under the pool's lock.
#[derive(Debug)]
struct Ledger {
    /// One per blade, in the blades' order.
    books: Vec<Books>,
    /// Superpages of each segment that count against the quota: those we asked for.
    charged_superpages: [u64; MAX_SEGMENTS],
    /// Of all lanes there ever were: few, and they end with the process.
    clocks: Vec<Arc<LaneClock>>,
}

impl Pool {
    /// Connects to every blade.
    ///
    /// # Errors
    /// No blade or too many in the configuration, TCP to another host without permission, or a blade
    /// that does not answer.
    pub fn connect(config: PoolConfig) -> Result<Pool, PoolError> {
        let given = config.blades.len();
        if given == 0 || given > MAX_BLADES {
            return Err(PoolError::BladeCount { given, limit: MAX_BLADES });
        }
        let descriptors = Arc::new(DescriptorSet::default());
        let blades: Vec<Blade> =
            config.blades.iter().map(|at| Blade::new(&config, at, &descriptors)).collect();
        let mut books = Vec::with_capacity(given);
        for blade in &blades {
            let control = Control::connect(Arc::clone(&blade.session), CONTROL_SLOT)?;
            books.push(Books::new(control, blade.session.address.clone()));
        }
        let segments = std::array::from_fn(|_| Segment::new());
        let charged_superpages = [0; MAX_SEGMENTS];
        Ok(Pool {
            shared: Arc::new(Shared { config, descriptors, blades, segments }),
            ledger: Mutex::new(Ledger { books, charged_superpages, clocks: Vec::new() }),
            next_slot: AtomicU32::new(CONTROL_SLOT + 1),
        })
    }

    /// A way to the blades for one thread; to be made before the first fault is served.
    ///
    /// # Errors
    /// A blade cannot be reached.
    pub fn lane(&self) -> Result<Lane, PoolError> {
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let mut links: Vec<Box<dyn Link>> = Vec::with_capacity(self.shared.blades.len());
        for blade in &self.shared.blades {
            links.push(match blade.session.address {
                Address::Shm(_) => Box::new(ShmLink::default()),
                _ => Box::new(StreamLink::connect(Arc::clone(&blade.session), slot)?),
            });
        }
        let clock = Arc::new(LaneClock::default());
        let mut ledger = self.ledger();
        ledger.clocks.push(Arc::clone(&clock));
        Ok(Lane::new(Arc::clone(&self.shared), clock, links))
    }

    /// A new, empty, writable segment. Blades hear of it when it first needs memory on them.
    ///
    /// # Errors
    /// All [`MAX_SEGMENTS`] handles are in use.
    pub fn create_segment(&self) -> Result<SegmentHandle, PoolError> {
        let _ledger = self.ledger();
        let handle = self.free_handle()?;
        self.segment(handle).set_state(SegmentState::Writable);
        Ok(handle)
    }

    /// Gives the superpage memory on a blade; nothing happens if it has some already. Its pages
    /// read as zeros.
    ///
    /// # Errors
    /// The quota is used up, every blade is full or lost, or the segment is frozen.
    pub fn allocate_superpage(&self, s: SegmentHandle, sma: u32) -> Result<(), PoolError> {
        let segment = self.segment(s);
        if segment.state() == SegmentState::Writable && segment.map().get(sma).is_some() {
            return Ok(());
        }
        let mut ledger = self.ledger();
        match segment.state() {
            SegmentState::Free => return Err(PoolError::NoSuchSegment(s)),
            SegmentState::Frozen => return Err(PoolError::Frozen(s)),
            SegmentState::Writable if segment.map().get(sma).is_some() => return Ok(()),
            SegmentState::Writable => {}
        }
        if sma >= SEGMENT_LIMIT_SUPERPAGES {
            return Err(PoolError::BeyondSegment { superpage: sma });
        }
        ledger.check_quota(self.shared.config.quota_bytes)?;
        let place = self.allocate_somewhere(&mut ledger, s.index(), sma)?;
        if let Some((id, file)) = ledger.books[usize::from(place.blade.0)].part(s.index()) {
            segment.set_part(place.blade, id, file);
        }
        ledger.charged_superpages[s.index()] += 1;
        segment.map().set(sma, Some(place));
        Ok(())
    }

    /// Asks the blades in turn: the emptiest of ours first, those known full only when all else failed.
    fn allocate_somewhere(
        &self,
        ledger: &mut Ledger,
        segment: usize,
        sma: u32,
    ) -> Result<Place, PoolError> {
        let mut refusals: [Option<CallError>; MAX_BLADES] = [const { None }; MAX_BLADES];
        while let Some(blade) = ledger.best_blade(&refusals) {
            let books = &mut ledger.books[blade];
            match books.allocate(segment, sma) {
                Ok(rmma) => {
                    return Ok(Place { blade: blade_index(blade), rmma });
                }
                Err(error) => {
                    books.is_full = true;
                    self.note_loss(blade, books);
                    refusals[blade] = Some(error);
                }
            }
        }
        Err(self.explain_refusals(&refusals))
    }

    /// One error out of every blade's refusal.
    fn explain_refusals(&self, refusals: &[Option<CallError>]) -> PoolError {
        let code = |error: &CallError| match error {
            CallError::Refused { code, .. } => Some(*code),
            CallError::Connect(_) => None,
        };
        let mut all = refusals.iter().flatten();
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

    /// Whether the superpage has memory on a blade that is not known to be lost. Lock-free.
    pub fn can_store(&self, s: SegmentHandle, sma: u32) -> bool {
        let place = self.segment(s).map().get(sma);
        let blade = place.and_then(|place| self.shared.blades.get(usize::from(place.blade.0)));
        blade.is_some_and(|blade| blade.data_loss.get().is_none())
    }

    /// Gives the superpage's memory back; nothing happens if it has none. No page of it may be in
    /// flight.
    ///
    /// # Errors
    /// The segment is frozen, or the blade refuses, which it does while any page of the segment is being
    /// written: the superpage then stays as it is. Or the blade is lost, and the superpage with it.
    pub fn free_superpage(&self, s: SegmentHandle, sma: u32) -> Result<(), PoolError> {
        let mut ledger = self.ledger();
        self.expect_state(s, SegmentState::Writable)?;
        let Some(place) = self.segment(s).map().get(sma) else {
            return Ok(());
        };
        self.segment(s).map().set(sma, None);
        ledger.wait_for_lanes();
        let blade = usize::from(place.blade.0);
        let freed = ledger.books[blade].free(s.index(), sma);
        self.note_loss(blade, &ledger.books[blade]);
        if matches!(freed, Err(CallError::Refused { .. })) {
            // Forgotten here, it would be given memory a second time, perhaps on another blade.
            self.segment(s).map().set(sma, Some(place));
        } else {
            let charged = &mut ledger.charged_superpages[s.index()];
            *charged = charged.saturating_sub(1);
        }
        Ok(freed?)
    }

    /// Makes the segment immutable, so that a child may share it. No write to it may be in flight.
    /// Freezing a frozen segment gives a further token.
    ///
    /// # Errors
    /// A blade refuses or is lost; the segment is then as it was.
    pub fn freeze(&self, s: SegmentHandle) -> Result<FrozenToken, PoolError> {
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Frozen {
            return Ok(ledger.token(s));
        }
        self.expect_state(s, SegmentState::Writable)?;
        self.segment(s).set_state(SegmentState::Frozen);
        ledger.wait_for_lanes();
        for blade in 0..ledger.books.len() {
            if let Err(error) = ledger.books[blade].freeze(s.index()) {
                self.note_loss(blade, &ledger.books[blade]);
                for books in &mut ledger.books[..blade] {
                    // What cannot be undone shows as refused writes, never as wrong data.
                    let _ = books.thaw(s.index());
                }
                self.segment(s).set_state(SegmentState::Writable);
                return Err(error.into());
            }
        }
        Ok(ledger.token(s))
    }

    /// Makes a frozen segment writable again if nobody else uses it; says whether it is writable.
    ///
    /// # Errors
    /// A blade refuses or is lost; the segment stays frozen.
    pub fn thaw(&self, s: SegmentHandle) -> Result<bool, PoolError> {
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Writable {
            return Ok(true);
        }
        self.expect_state(s, SegmentState::Frozen)?;
        for blade in 0..ledger.books.len() {
            let thawed = ledger.books[blade].thaw(s.index());
            self.note_loss(blade, &ledger.books[blade]);
            if !matches!(thawed, Ok(Thawed::Writable)) {
                for books in &mut ledger.books[..blade] {
                    books.freeze(s.index())?;
                }
                return Ok(thawed? == Thawed::Writable);
            }
        }
        self.publish_parts(&ledger, s);
        ledger.wait_for_lanes();
        ledger.books.iter_mut().for_each(Books::close_retired);
        ledger.charged_superpages[s.index()] = self.segment(s).map().iter().count() as u64;
        self.segment(s).set_state(SegmentState::Writable);
        Ok(true)
    }

    /// Shares another client's frozen segment, read only.
    ///
    /// # Errors
    /// The segment is gone, a blade is lost or another one than it was, or too many segments are live.
    pub fn attach(&self, token: &FrozenToken) -> Result<SegmentHandle, PoolError> {
        let mut ledger = self.ledger();
        let handle = self.free_handle()?;
        if let Err(error) = self.attach_parts(&mut ledger, handle, token) {
            self.give_up(&mut ledger, handle);
            return Err(error);
        }
        self.publish_parts(&ledger, handle);
        self.segment(handle).set_state(SegmentState::Frozen);
        Ok(handle)
    }

    fn attach_parts(
        &self,
        ledger: &mut Ledger,
        handle: SegmentHandle,
        token: &FrozenToken,
    ) -> Result<(), PoolError> {
        let map = self.segment(handle).map();
        for (number, token) in token.blades.iter().enumerate() {
            let Some(token) = *token else { continue };
            let limit = self.shared.blades.len();
            let books = ledger
                .books
                .get_mut(number)
                .ok_or(PoolError::BladeCount { given: limit, limit })?;
            let blade = blade_index(number);
            let mut twice = None;
            books.attach(handle.index(), token, |sma, rmma| {
                twice = twice.or(map.get(sma).map(|_| sma));
                map.set(sma, Some(Place { blade, rmma }));
            })?;
            if let Some(superpage) = twice {
                let address = self.describe(blade).to_owned();
                return Err(PoolError::OnTwoBlades { superpage, address });
            }
        }
        Ok(())
    }

    /// Gives the segment up: its memory goes back, or the share in it. No page of it may be in flight.
    ///
    /// # Errors
    /// A blade refused; the segment is gone here all the same. A lost blade is no error.
    pub fn detach(&self, s: SegmentHandle) -> Result<(), PoolError> {
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Free {
            return Err(PoolError::NoSuchSegment(s));
        }
        match self.give_up(&mut ledger, s) {
            Some(error @ CallError::Refused { .. }) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Unpublishes the segment and gives its parts up; returns the last error.
    fn give_up(&self, ledger: &mut Ledger, s: SegmentHandle) -> Option<CallError> {
        let segment = self.segment(s);
        segment.set_state(SegmentState::Free);
        ledger.wait_for_lanes();
        let mut last = None;
        for (number, books) in ledger.books.iter_mut().enumerate() {
            let blade = blade_index(number);
            let ours = segment.map().iter().filter(|(_, place)| place.blade == blade).count();
            last = books.detach(s.index(), ours as u64).err().or(last);
            self.note_loss(number, books);
        }
        segment.map().clear();
        ledger.charged_superpages[s.index()] = 0;
        last
    }

    /// The blade's address, for messages.
    pub fn describe(&self, blade: BladeIndex) -> &str {
        self.shared.blades.get(usize::from(blade.0)).map_or("unknown", |it| &it.description)
    }

    /// The blades that are lost, with the reason. A blade on this host that takes no requests any more
    /// is listed too, though pages stored there can still be read and written.
    pub fn lost(&self) -> Vec<LostBlade> {
        let numbered = self.shared.blades.iter().enumerate();
        let lost = numbered.filter_map(|(number, blade)| {
            let reason = blade.data_loss.get().or_else(|| blade.control_loss.get())?.clone();
            let address = blade.description.clone();
            Some(LostBlade { blade: blade_index(number), address, reason })
        });
        lost.collect()
    }

    /// The shortest lease of any blade: how long it keeps our memory when no connection of ours is left.
    pub fn lease(&self) -> Duration {
        let ledger = self.ledger();
        ledger.books.iter().map(Books::lease).min().unwrap_or(Duration::MAX)
    }

    /// Makes sure that every blade still has a connection of ours; to be called about every third of
    /// [`Pool::lease`] by a thread that may wait. Nothing else notices when the only connection to a
    /// blade on this host breaks. A blade that let the lease run out and forgot us counts as lost from
    /// then on. Over sockets that ends its pages. Over shared memory they stay as they are, because the
    /// blade leaves memory alone whose descriptor we hold: the pager says what [`Pool::lost`] reports
    /// and goes on, only without new memory for its segments from there.
    pub fn keep_alive(&self) {
        let mut ledger = self.ledger();
        for blade in 0..ledger.books.len() {
            let moved = ledger.moved(blade);
            let books = &mut ledger.books[blade];
            if let Ok(false) = books.keep_alive(moved) {
                let known = &self.shared.blades[blade];
                let (loss, reason) = match known.session.address {
                    Address::Shm(_) => (&known.control_loss, LAPSED_BUT_HELD),
                    _ => (&known.data_loss, LAPSED),
                };
                loss.get_or_init(|| reason.to_owned());
            }
            self.note_loss(blade, books);
        }
    }

    /// True if the descriptor belongs to this pool, which must survive the program's closing of
    /// descriptors it does not know. Lock-free.
    pub fn owns_descriptor(&self, fd: std::os::fd::RawFd) -> bool {
        self.shared.descriptors.holds(fd)
    }

    /// Tells the blades that this client ends; they free its memory at once, memory that is shared by
    /// descriptor as soon as the pool is dropped or the process ends.
    pub fn goodbye(&self) {
        let mut ledger = self.ledger();
        for blade in 0..ledger.books.len() {
            let moved = ledger.moved(blade);
            ledger.books[blade].goodbye(moved);
        }
    }

    /// For the child after fork: closes the inherited descriptors and forgets everything else,
    /// without a word to the blades, a lock, or a look at memory other threads were changing.
    /// The child's copies of lanes must be dropped by `std::mem::forget`.
    pub fn forget_after_fork(self) {
        self.shared.descriptors.close_all();
        std::mem::forget(self);
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing below the lock panics; should it happen, the tables are still consistent.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn segment(&self, s: SegmentHandle) -> &Segment {
        &self.shared.segments[s.index() % MAX_SEGMENTS]
    }

    fn expect_state(&self, s: SegmentHandle, wanted: SegmentState) -> Result<(), PoolError> {
        match self.segment(s).state() {
            state if state == wanted => Ok(()),
            SegmentState::Frozen => Err(PoolError::Frozen(s)),
            _ => Err(PoolError::NoSuchSegment(s)),
        }
    }

    fn free_handle(&self) -> Result<SegmentHandle, PoolError> {
        (0..MAX_SEGMENTS)
            .filter_map(SegmentHandle::from_index)
            .find(|&handle| self.segment(handle).state() == SegmentState::Free)
            .ok_or(PoolError::TooManySegments { limit: MAX_SEGMENTS })
    }

    fn publish_parts(&self, ledger: &Ledger, s: SegmentHandle) {
        for (number, books) in ledger.books.iter().enumerate() {
            if let Some((id, file)) = books.part(s.index()) {
                self.segment(s).set_part(blade_index(number), id, file);
            }
        }
    }

    fn note_loss(&self, blade: usize, books: &Books) {
        if let Some(reason) = books.loss() {
            self.shared.blades[blade].control_loss.get_or_init(|| reason);
        }
    }
}

impl Ledger {
    /// Pages that all lanes together read from and wrote to the blade.
    fn moved(&self, blade: usize) -> (u64, u64) {
        let moved = self.clocks.iter().map(|clock| clock.moved(blade));
        moved.fold((0, 0), |all, lane| (all.0 + lane.0, all.1 + lane.1))
    }

    fn check_quota(&self, quota_bytes: u64) -> Result<(), PoolError> {
        let superpages: u64 = self.charged_superpages.iter().sum();
        if (superpages + 1).saturating_mul(SUPERPAGE_BYTES) > quota_bytes {
            return Err(PoolError::Quota { quota_bytes });
        }
        Ok(())
    }

    /// The blade to ask next: not asked yet; not known to be full if there is one; fewest of our
    /// superpages for its size.
    fn best_blade(&self, asked: &[Option<CallError>]) -> Option<usize> {
        let candidates = (0..self.books.len()).filter(|&blade| asked[blade].is_none());
        candidates.min_by_key(|&blade| {
            let books = &self.books[blade];
            let used_bytes = u128::from(books.allocated_superpages + 1) << 64;
            (books.is_full, used_bytes / u128::from(books.capacity_bytes().max(1)), blade)
        })
    }

    fn token(&self, s: SegmentHandle) -> FrozenToken {
        let mut blades: [Option<BladeToken>; MAX_BLADES] = [None; MAX_BLADES];
        for (token, books) in blades.iter_mut().zip(&self.books) {
            *token = books.token(s.index());
        }
        FrozenToken { blades }
    }

    fn wait_for_lanes(&self) {
        self.clocks.iter().for_each(|clock| clock.wait_until_outside());
    }
}

impl Blade {
    fn new(config: &PoolConfig, spec: &BladeSpec, descriptors: &Arc<DescriptorSet>) -> Self {
        let session = Session {
            address: spec.address.clone(),
            client: config.client,
            grant: spec.grant,
            limits: spec.limits.clone(),
            client_name: config.client_name.clone(),
            purpose: Purpose::Client,
            quota_bytes: config.quota_bytes,
            deadline: config.deadline,
            allow_remote_tcp: config.allow_remote_tcp,
            descriptors: Arc::clone(descriptors),
        };
        Blade {
            session: Arc::new(session),
            description: spec.address.to_string(),
            data_loss: OnceLock::new(),
            control_loss: OnceLock::new(),
        }
    }
}

/// Why a blade gives no superpage, with the remedy: its memory and its quota are different things to
/// raise.
fn explain_refusal(error: &CallError) -> String {
    match error {
        CallError::Refused { address, code: ErrorCode::BladeFull, detail, .. } => {
            let mib = detail >> 20;
            format!(
                "blade {address} is full, all of its {mib} MiB are in use (start it with more --memory)"
            )
        }
        CallError::Refused { address, code: ErrorCode::QuotaExceeded, detail, .. } => {
            let mib = detail >> 20;
            format!(
                "blade {address} gives this program no more than {mib} MiB (start it with a larger --quota)"
            )
        }
        other => other.to_string(),
    }
}

fn blade_index(number: usize) -> BladeIndex {
    BladeIndex(u8::try_from(number).unwrap_or(u8::MAX))
}
