//! The blade itself: the table joined with the memory. No sockets, no threads.
//!
//! Locks: `table` is taken for reading on the data path (a few lookups, never across I/O) and for
//! writing by control requests. Memory is committed and zeroed without it. `scrubs.running` is held
//! while memory is zeroed, and takes `table` for a moment inside; never the other way round.
//!
//! Memory of which a process still holds a descriptor is never zeroed when its segment is gone (by
//! detach, goodbye, or a lease that expired on a living client): a holder that reads it finds what
//! was there. It counts as used, but by no client, until the last descriptor is closed; the blade
//! asks the kernel five times a second, and when memory is short. A superpage that its client frees
//! is zeroed under that client's descriptor, as requested.

mod grants;
mod kept;
mod stat;

pub use grants::{CapacityError, Lent, Revoked};
pub use kept::Past;
pub(crate) use kept::check_successor;

use crate::audit::Audit;
use crate::config::{BackingKind, BladeConfig, FlashConfig, PackConfig};
use crate::donor_protection::DonorProtection;
use crate::gate::Gates;
use crate::journal::Journal;
use crate::memory::{
    Caller, Domain, Engine, FlashStat, PackStat, Reserve, SegmentMemory, Store, is_full,
};
use crate::sources::Sources;
use crate::table::{
    Access, ClientNumber, Connected, GrantId, GrantPass, Limits, Origin, Permit, Refused, Run,
    Scrub, ScrubPart, SegmentView, Table, superpages_of,
};
use farpool_kernel::{LogRate, fill_random, lock, read_lock, write_lock};
use farpool_units::{SUPERPAGE_BYTES, at_most, exactly};
use farpool_wire::{
    BladeTotals, ClientUsage, ErrorCode, Extent, Grant, Hello, PAGES_PER_FRAME_LIMIT, SegmentId,
    SegmentToken, SuperpageNumber, SuperpagePair,
};
use rustix::io::Errno;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

type Memory = Arc<SegmentMemory>;

/// A blade: memory, and which client has which part of it.
#[derive(Debug)]
pub struct Blade {
    id: u64,
    config: BladeConfig,
    /// What it lends now; the table has the same number.
    capacity_superpages: AtomicU32,
    started: Instant,
    store: Store,
    /// What moves pages to flash or packs them, until it is taken to be run.
    engine: Mutex<Option<Engine>>,
    table: RwLock<Table<Memory>>,
    /// Keeps the table for the next process; see [`kept`].
    journal: Option<Journal>,
    journal_log: LogRate,
    room_log: LogRate,
    past: Past,
    scrubs: Scrubs,
    /// Held while a grant is set or revoked; taken before all other locks.
    orders: Mutex<()>,
    gates: Gates,
    pub(crate) counters: Counters,
    pub(crate) donor_protection: DonorProtection,
    /// Gives sharing groups their numbers, by a secret: nobody can make two of the same.
    groups: RandomState,
    pub(crate) sources: Arc<Sources>,
    pub(crate) audit: Audit,
}

/// What a blade counts, without a lock.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) pages_read: AtomicU64,
    pub(crate) pages_written: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) requests_refused: AtomicU64,
    pub(crate) bad_frames: AtomicU64,
    /// Time that control requests were held back for their rate, summed over connections.
    pub(crate) control_throttled_ns: AtomicU64,
    superpages_scrubbed: AtomicU64,
    grants_revoked: AtomicU64,
}

/// Memory waiting to be zeroed.
#[derive(Debug, Default)]
struct Scrubs {
    waiting: Mutex<Vec<Scrub<Memory>>>,
    arrived: Condvar,
    /// Held while zeroing: once it is taken, all earlier scrubs are done. It holds memory whose
    /// segment is gone, but of which a process still holds a descriptor.
    running: Mutex<Vec<Scrub<Memory>>>,
    /// Superpages of that memory.
    held_superpages: AtomicU32,
}

/// Which clients a connection may see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Visible {
    All,
    /// Those under this grant.
    Of(GrantId),
    None,
}

/// All of a blade's counters at one moment.
#[derive(Clone, Debug)]
pub struct BladeStat {
    /// The whole blade.
    pub totals: BladeTotals,
    /// Its clients, in order of arrival.
    pub clients: Vec<ClientUsage>,
}

/// What a blade that packs may lend at most, in parts of its memory. The tables alone, 8 bytes for
/// each page, would fill the memory at 512 times.
const PACKED_LIMIT: u64 = 16;

/// The table's limits.
fn limits_of(config: &BladeConfig) -> Limits {
    Limits {
        capacity_superpages: superpages_of(config.lent_bytes()),
        quota_default_superpages: superpages_of(config.quota_default_bytes),
        quota_limit_superpages: superpages_of(config.quota_limit_bytes),
        quota_stranger_superpages: superpages_of(config.quota_stranger_bytes()),
        lease: config.lease,
        clients: config.clients_limit,
        segments: config.segments_limit,
        require_grants: config.require_grants,
    }
}

/// Refuses what flash cannot be combined with.
fn check_flash(config: &BladeConfig, flash: &FlashConfig) -> io::Result<()> {
    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if config.require_grants {
        return refuse("a node lends memory, and flash is for a blade");
    }
    if config.backing != BackingKind::Automatic && config.backing != BackingKind::Anonymous {
        return refuse("above flash memory is anonymous; give no other kind of backing");
    }
    if flash.bytes <= config.memory_bytes {
        return refuse("flash that is no larger than memory is of no use; lend the memory alone");
    }
    Ok(())
}

/// Refuses what packing cannot be combined with.
fn check_pack(config: &BladeConfig, pack: &PackConfig) -> io::Result<()> {
    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if config.require_grants {
        return refuse("a node lends memory as it is, and packing is for a blade");
    }
    if config.flash.is_some() {
        return refuse("a blade packs what is cold or writes it to flash; give one of both");
    }
    if config.backing != BackingKind::Automatic && config.backing != BackingKind::Anonymous {
        return refuse("what is packed is in anonymous memory; give no other kind of backing");
    }
    if pack.lent_bytes / PACKED_LIMIT > config.memory_bytes {
        let why =
            format!("a blade lends at most {PACKED_LIMIT} times its memory packed; lend less");
        return refuse(&why);
    }
    Ok(())
}

impl Blade {
    /// A blade without clients.
    ///
    /// # Errors
    /// The backing store cannot be opened, or the system gives no random numbers.
    pub fn new(mut config: BladeConfig) -> io::Result<Blade> {
        config.pages_per_request = config.pages_per_request.clamp(1, PAGES_PER_FRAME_LIMIT);
        config.credits = config.credits.max(1);
        let limits = limits_of(&config);
        let capacity_superpages = limits.capacity_superpages;
        if capacity_superpages == 0 {
            let text = "a blade needs at least 16 MiB of memory to lend";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let capacity_bytes = u64::from(capacity_superpages) * SUPERPAGE_BYTES;
        let sources = Arc::new(Sources::new(config.connections_limit));
        // Under grants it is a donor's memory, and what it does not lend is its own programs'.
        let reserve = if config.require_grants { Reserve::Each } else { Reserve::All };
        let memory_bytes = config.memory_bytes;
        let (store, engine) = match (&config.pack, &config.flash) {
            (None, None) => (Store::open(&config.backing, capacity_bytes, reserve)?, None),
            (Some(pack), _) => {
                check_pack(&config, pack)?;
                let (store, engine) = Store::open_packed(pack, capacity_superpages, memory_bytes)?;
                (store, Some(engine))
            }
            (None, Some(flash)) => {
                check_flash(&config, flash)?;
                let (store, engine) = Store::open_flash(flash, capacity_superpages, memory_bytes)?;
                (store, Some(engine))
            }
        };
        let kept = kept::open(&config, &store, limits)?;
        store.trim()?;
        Ok(Blade {
            id: kept.id,
            store,
            engine: Mutex::new(engine),
            started: config.time.now(),
            audit: Audit::new(config.audit.clone()),
            config,
            capacity_superpages: AtomicU32::new(capacity_superpages),
            table: RwLock::new(kept.table),
            journal: kept.journal,
            journal_log: LogRate::default(),
            room_log: LogRate::default(),
            past: kept.past,
            scrubs: Scrubs::default(),
            orders: Mutex::default(),
            gates: Gates::default(),
            counters: Counters::default(),
            donor_protection: DonorProtection::default(),
            groups: RandomState::new(),
            sources,
        })
    }

    /// The random number of this blade.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its configuration.
    pub fn config(&self) -> &BladeConfig {
        &self.config
    }

    /// Time since it was made: the `now` of its other functions.
    pub fn now(&self) -> Duration {
        self.config.time.now().saturating_duration_since(self.started)
    }

    /// What is to run on a thread of its own while the blade serves, if anything is.
    pub(crate) fn take_engine(&self) -> Option<Engine> {
        lock(&self.engine).take()
    }

    /// Names the descriptors that wake the blade's threads, by their numbers.
    pub(crate) fn wakes(&self, threads: Vec<OwnedFd>) {
        self.store.wakes(threads);
    }

    /// What the thread of this number asks for pages with.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn caller(&self, thread: usize) -> io::Result<Caller> {
        self.store.caller(thread)
    }

    /// Ends the engine.
    pub(crate) fn end_engine(&self) {
        self.store.end();
    }

    /// What flash below the memory did, if there is any.
    pub fn flash_stat(&self) -> Option<FlashStat> {
        self.store.flash_stat()
    }

    /// What is packed, if anything may be.
    pub fn pack_stat(&self) -> Option<PackStat> {
        self.store.pack_stat()
    }

    /// The refusal for an error of the backing store.
    pub(crate) fn refusal(&self, error: &io::Error) -> Refused {
        if is_full(error) {
            Refused::new(ErrorCode::BladeFull, self.capacity_bytes())
        } else {
            backing(error)
        }
    }

    /// Memory that it lends; see [`Blade::set_capacity`].
    pub fn capacity_bytes(&self) -> u64 {
        u64::from(self.capacity_superpages.load(Ordering::Relaxed)) * SUPERPAGE_BYTES
    }

    fn read(&self) -> RwLockReadGuard<'_, Table<Memory>> {
        read_lock(&self.table)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table<Memory>> {
        write_lock(&self.table)
    }

    pub(crate) fn connect(&self, hello: &Hello<'_>, origin: Origin) -> Result<Connected, Refused> {
        self.audit.is_ready().map_err(|error| backing(&error))?;
        let connected = self.change(|table| table.connect(hello, origin))?;
        self.keep_changes().inspect_err(|_| self.disconnect(connected.number, self.now()))?;
        Ok(connected)
    }

    pub(crate) fn admit_monitor(&self, grant: Option<Grant>) -> Result<Option<GrantPass>, Refused> {
        self.read().admit_monitor(grant)
    }

    pub(crate) fn disconnect(&self, client: ClientNumber, now: Duration) {
        self.write().disconnect(client, now);
    }

    pub(crate) fn goodbye(&self, client: ClientNumber) -> Result<(), Refused> {
        let scrubs = self.change(|table| table.end_client(client));
        self.queue_scrubs(scrubs);
        self.keep_changes()
    }

    /// Ends the clients whose lease has expired. `now` is the time since the blade started.
    pub fn tick(&self, now: Duration) {
        let scrubs = self.change(|table| table.expire(now));
        self.queue_scrubs(scrubs);
    }

    pub(crate) fn create_segment(
        &self,
        client: ClientNumber,
        span_superpages: u32,
    ) -> Result<(SegmentId, SegmentToken), Refused> {
        let token = SegmentToken(u128::from_le_bytes(random().map_err(|e| backing(&e))?));
        let domain = self.domain_of(client);
        let make = |superpages| Arc::new(self.store.segment(superpages, domain));
        let id = self.change(|table| table.create_segment(client, span_superpages, token, make))?;
        self.keep_changes()?;
        Ok((id, token))
    }

    /// Whose pages the client's may share frames with.
    fn domain_of(&self, client: ClientNumber) -> Domain {
        match self.read().sharing_of(client) {
            Some(group) => Domain::of_group(self.groups.hash_one(group)),
            None => Domain::of_client(client.0),
        }
    }

    pub(crate) fn allocate(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        first: SuperpageNumber,
        count: u32,
        pairs: &mut Vec<SuperpagePair>,
    ) -> Result<(), Refused> {
        let allocate = |pairs: &mut Vec<_>| {
            self.change(|table| table.allocate(client, segment, first, count, pairs))
        };
        let memory = match allocate(pairs) {
            Err(Refused { code: ErrorCode::BladeFull, .. }) => {
                self.run_scrubs(); // what was freed just before may suffice
                allocate(pairs)?
            }
            other => other?,
        };
        self.commit(segment, &memory, pairs).map_err(|error| {
            self.undo_allocate(client, segment, first, count);
            if is_full(&error) {
                self.tell_no_room(&error);
            }
            self.refusal(&error)
        })?;
        self.keep_changes()
    }

    /// Says now and then that the system has not the memory that the blade may lend.
    fn tell_no_room(&self, error: &io::Error) {
        // Without a number of the system's it is the blade that is full.
        if error.raw_os_error().is_some() && self.room_log.may_write(self.now()) {
            tracing::warn!(%error, "no memory for a superpage that may be lent; nothing is lent");
        }
    }

    /// Logs how many lines were suppressed, when that is due.
    pub(crate) fn tell_hidden_lines(&self, now: Duration) {
        if let Some((more, seconds)) = self.journal_log.more(now) {
            tracing::error!("the blade's table could not be kept {more} more times in {seconds} s");
        }
        if let Some((more, seconds)) = self.room_log.more(now) {
            tracing::warn!("no memory for {more} more superpages in the last {seconds} s");
        }
    }

    /// Makes the memory of superpages usable.
    fn commit(
        &self,
        segment: SegmentId,
        memory: &Memory,
        pairs: &[SuperpagePair],
    ) -> io::Result<()> {
        let mut places = Vec::new();
        for pair in pairs {
            let rmma = pair.rmma().0;
            places.extend(memory.commit(rmma)?.map(|place| (rmma, place)));
        }
        self.keep_places(segment, places);
        Ok(())
    }

    fn undo_allocate(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        first: SuperpageNumber,
        count: u32,
    ) {
        // It fails only if the client has meanwhile detached or died, and then all is freed.
        let freed = self.change(|table| table.undo_allocate(client, segment, first, count));
        self.queue_scrubs(freed.ok());
        self.run_scrubs();
    }

    pub(crate) fn free(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        first: SuperpageNumber,
        count: u32,
    ) -> Result<(), Refused> {
        let scrub = self.change(|table| table.free(client, segment, first, count))?;
        self.queue_scrubs([scrub]);
        self.keep_changes()
    }

    pub(crate) fn freeze(&self, client: ClientNumber, segment: SegmentId) -> Result<(), Refused> {
        self.change(|table| table.freeze(client, segment))?;
        self.keep_changes()
    }

    pub(crate) fn thaw(&self, client: ClientNumber, segment: SegmentId) -> Result<(), Refused> {
        let is_held_elsewhere = |memory: &Memory| {
            memory.is_held_beside(client.0).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot tell who holds a segment; it stays frozen");
                true
            })
        };
        self.change(|table| table.thaw(client, segment, is_held_elsewhere))?;
        self.keep_changes()
    }

    pub(crate) fn attach(
        &self,
        client: ClientNumber,
        token: SegmentToken,
    ) -> Result<SegmentView, Refused> {
        let view = self.change(|table| table.attach(client, token))?;
        self.keep_changes()?;
        Ok(view)
    }

    pub(crate) fn detach(&self, client: ClientNumber, segment: SegmentId) -> Result<(), Refused> {
        let scrub = self.change(|table| table.detach(client, segment))?;
        self.queue_scrubs(scrub);
        self.keep_changes()
    }

    pub(crate) fn list(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        skip: usize,
        limit: usize,
        pairs: &mut Vec<SuperpagePair>,
    ) -> Result<SegmentView, Refused> {
        let table = self.read();
        table.list(client, segment, skip, limit, pairs)?;
        table.view(client, segment)
    }

    pub(crate) fn access(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        extents: &[Extent],
        access: Access,
        runs: &mut Vec<Run>,
    ) -> Result<Permit<Memory>, Refused> {
        self.read().access(client, segment, extents, access, runs)
    }

    pub(crate) fn discard(
        &self,
        client: ClientNumber,
        segment: SegmentId,
        extents: &[Extent],
        runs: &mut Vec<Run>,
    ) -> Result<(), Refused> {
        // The permit's guard keeps the superpages in place until the last hole is punched.
        let permit = self.access(client, segment, extents, Access::Write, runs)?;
        runs.iter().try_for_each(|run| permit.memory.discard(*run)).map_err(|e| backing(&e))
    }

    /// Counts pages that a client moved without requests, through shared memory.
    pub(crate) fn count_reported(&self, (pages_read, pages_written): (u64, u64)) {
        let counters = &self.counters;
        counters.pages_read.fetch_add(pages_read, Ordering::Relaxed);
        counters.pages_written.fetch_add(pages_written, Ordering::Relaxed);
    }

    /// The segment's memory as a descriptor, its length, and whether it can be written.
    pub(crate) fn share(
        &self,
        client: ClientNumber,
        segment: SegmentId,
    ) -> Result<(OwnedFd, u64, bool), Refused> {
        // Under the lock: once a segment is gone from the table, no new descriptor of it is made.
        let table = self.read();
        let (memory, writable) = table.memory_of(client, segment)?;
        let (descriptor, bytes) = memory.share(client.0, writable).map_err(|e| backing(&e))?;
        Ok((descriptor, bytes, writable))
    }

    fn queue_scrubs(&self, scrubs: impl IntoIterator<Item = Scrub<Memory>>) {
        let mut waiting = lock(&self.scrubs.waiting);
        waiting.extend(scrubs);
        if !waiting.is_empty() {
            self.scrubs.arrived.notify_one();
        }
    }

    /// Zeroes all waiting memory of which no process holds a descriptor. Returns when that and all
    /// earlier zeroing is done.
    pub fn run_scrubs(&self) {
        let mut held = lock(&self.scrubs.running);
        held.append(&mut lock(&self.scrubs.waiting));
        // If not, the next process would take for somebody's what is zeroed here.
        if self.keep_changes().is_ok() {
            for scrub in std::mem::take(&mut *held) {
                held.extend(self.run_or_keep(scrub));
            }
        }
        let superpages = held.iter().map(|scrub| scrub.part.superpages()).sum();
        self.scrubs.held_superpages.store(superpages, Ordering::Relaxed);
    }

    /// Does the scrub. Returns it if a process still holds the memory.
    fn run_or_keep(&self, scrub: Scrub<Memory>) -> Option<Scrub<Memory>> {
        let is_whole = matches!(scrub.part, ScrubPart::Whole { .. });
        match scrub.memory.is_held() {
            Ok(true) if is_whole => return Some(scrub),
            Err(error) if is_whole => {
                tracing::error!(%error, "cannot tell who holds memory; it stays as it is");
                return Some(scrub);
            }
            _ => self.run_scrub(scrub),
        }
        None
    }

    /// Waits until memory is to be zeroed, at most for `at_most`.
    pub(crate) fn wait_for_scrubs(&self, at_most: Duration) {
        let waiting = lock(&self.scrubs.waiting);
        if waiting.is_empty() {
            let _unused = self.scrubs.arrived.wait_timeout(waiting, at_most);
        }
    }

    /// Wakes [`Self::wait_for_scrubs`] with nothing to do.
    pub(crate) fn wake_scrubber(&self) {
        self.scrubs.arrived.notify_all();
    }

    fn run_scrub(&self, scrub: Scrub<Memory>) {
        let Scrub { memory, part } = scrub;
        if let Err(error) = memory.scrub(&part) {
            // Not freed: memory that may hold old bytes must not be handed out again.
            tracing::error!(%error, ?part, "memory could not be zeroed and is lost to this blade");
            return;
        }
        drop(memory); // unmapped and closed before it counts as free
        let count = u64::from(part.superpages());
        self.counters.superpages_scrubbed.fetch_add(count, Ordering::Relaxed);
        self.write().scrubbed(part);
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    at_most(duration.as_millis())
}

/// The refusal for an error of the backing store.
pub(crate) fn backing(error: &io::Error) -> Refused {
    if error.kind() == io::ErrorKind::Unsupported {
        return Refused::new(ErrorCode::Unsupported, 0);
    }
    if is_out_of_descriptors(error) {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        tracing::error!(
            ?limit,
            "no descriptor left for a segment; start the blade with a higher hard limit \
             (ulimit -Hn, or LimitNOFILE= of its service)"
        );
        return Refused::new(ErrorCode::NoDescriptors, limit.unwrap_or(u64::MAX));
    }
    let number = error.raw_os_error().map_or(0, exactly);
    Refused::new(ErrorCode::Backing, number)
}

fn is_out_of_descriptors(error: &io::Error) -> bool {
    let full = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|n| full.contains(&n))
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}
