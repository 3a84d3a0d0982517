//! One thread: an epoll loop over its connections, and its shard of the keys.
//!
//! Every round: wait, read input, answer it in batches, send answers to other threads and asks to
//! their shards in one message each. Nothing in here is shared but the mailboxes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_keyvault::message::Keys;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::below::{Below, Gathered, Parked};
use crate::clients::Clients;
use crate::clients::connection::CloseReason;
use crate::duties::{Duties, LOWER_LOOK, TICK};
use crate::keyvault::ring_clients::RingClients;
use crate::keyvault::state::KeyVaultState;
use crate::mail::Mail;
use crate::mail::mailbox::{Message, Origin};
use crate::me::{Me, TOKEN_BELL, TOKEN_LOWER, TOKEN_WAKE};
use crate::settings::Shared;
use crate::watch::journal;
use crate::watch::report::{ShardReport, TierReport};
use farpool_kv_protocol::keyvault::AnswerHead;
use farpool_kv_protocol::{CommandCounts, Shard};
use farpool_kv_store::clock::Clock;
use farpool_kv_store::index::Tier;
use farpool_kv_store::key::{HashSeed, HashedKey};
use farpool_kv_store::observe::{Observed, Observer};
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_kv_tier::far::{Far, FarMemory};
use farpool_kv_tier::flash::layout::Promises;
use farpool_kv_tier::flash::{Flash, Recovered};

/// The most events taken in one round.
const EVENTS_MAX: usize = 256;
/// How long a thread with rings polls them before it sleeps.
const RING_SPIN: Duration = Duration::from_micros(50);
/// Rounds over the rings between two checks of everything else: sockets wait no longer than this
/// many batches, and a check costs a system call.
const LOOKS: u32 = 64;
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// One serving thread.
#[derive(Debug)]
pub struct Worker {
    pub(crate) me: Me,
    pub(crate) shard: Shard,
    pub(crate) clients: Clients,
    pub(crate) mail: Mail,
    pub(crate) ring_clients: RingClients,
    /// The tiers below memory.
    pub(crate) below: Option<Below>,
    duties: Duties,
}

/// The empty shard of a thread.
fn shard_of_its_own(shared: &Shared, seed: HashSeed) -> Result<Shard, StoreError> {
    let settings = &shared.settings;
    let shards = shared.shards();
    let store_settings = StoreSettings {
        limit_bytes: settings.memory_bytes / shards,
        item_bytes_max: settings.item_bytes_max,
        evicts: settings.evicts,
    };
    let make = if settings.keyvault_leases { Store::leasing } else { Store::new };
    let mut store = make(store_settings)?;
    store.set_hash_seed(seed);
    store.set_policy(settings.policy)?;
    let share = |(prefix, bytes): &(Vec<u8>, u64)| (prefix.clone(), bytes / shards as u64);
    store.set_quotas(settings.quotas.iter().map(share));
    let clock = Clock::start(shared.start_unix_s);
    store.set_now(clock.now_s());
    let observer = settings.metrics_address.map(|_| Box::new(Observer::sampling()));
    Ok(Shard { store, clock, counts: CommandCounts::default(), observer })
}

impl Worker {
    /// A thread with an empty shard. `seed` is that of the hashes of keys in all threads.
    pub fn new(shared: Arc<Shared>, number: usize, seed: HashSeed) -> Result<Self, WorkerError> {
        let shard = shard_of_its_own(&shared, seed)?;
        let mail = Mail::new(shared.shards());
        let mut worker = Self {
            me: Me::new(shared, number)?,
            shard,
            clients: Clients::new(),
            mail,
            ring_clients: RingClients::default(),
            below: None,
            duties: Duties::new(Instant::now()),
        };
        if worker.me.shared.settings.counts_prefixes {
            worker.count_prefixes(true);
        }
        Ok(worker)
    }

    fn below_mut(&mut self) -> &mut Below {
        self.shard.store.keep_victims();
        self.below.get_or_insert_default()
    }

    /// Sets the seed by which keys are found; the same in all threads. Only before the first item.
    pub fn set_hash_seed(&mut self, seed: HashSeed) {
        self.shard.store.set_hash_seed(seed);
    }

    /// Adds far memory below the shard's own, to be granted piece by piece.
    pub fn add_far(&mut self) {
        self.below_mut().far = Some(Far::growing(FarMemory::default()));
    }

    /// Takes an item that an earlier process left on flash. True if the index has room for it.
    pub fn take_recovered(&mut self, item: Recovered) -> bool {
        self.shard.store.insert_lower(item.hash, Tier::Flash, item.place, 0).is_ok()
    }

    /// Adds flash below the shard's memory, and resumes where an earlier process stopped: with its
    /// `promises` and its clock.
    pub fn add_flash(&mut self, flash: Flash, promises: Promises, clock: Clock) {
        let Promises { last_cas, flushed_cas, flush_at_s, .. } = promises;
        self.shard.clock = clock;
        let store = &mut self.shard.store;
        store.resume(last_cas, (flushed_cas, flush_at_s));
        store.set_now(clock.now_s());
        self.below_mut().flash = Some(flash);
        self.keep_promises();
    }

    /// Serves until told to stop and all outstanding replies are sent.
    pub fn run(mut self) -> Result<(), WorkerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut looks = 0u32;
        loop {
            if !self.ring_clients.is_empty() {
                self.look_at_rings();
                looks += 1;
                if looks < LOOKS {
                    continue;
                }
                looks = 0;
            }
            self.wait(&mut events)?;
            let now = Instant::now();
            self.do_duties(now, !events.is_empty());
            for event in &events {
                self.take_event(event);
            }
            // After the clients, so that answers to other threads and asks to them travel together.
            self.take_messages();
            if self.below_is_busy() {
                // Over shared memory, what was just requested is there already.
                self.poll_below(None);
            }
            self.mail.send(&self.me);
            journal::send(&mut self.shard.store, &mut self.me);
            if self.duties.is_overdue(now) || self.is_finished() {
                let is_unclean = !self.close_below();
                self.me.shared.is_flash_unclean.fetch_or(is_unclean, Ordering::Relaxed);
                return Ok(());
            }
        }
    }

    /// Serves every ring once.
    #[inline]
    fn look_at_rings(&mut self) {
        if self.serve_ports() {
            self.ring_clients.note_busy();
            self.mail.send(&self.me);
        }
        self.close_ended_ports();
    }

    /// Waits for events, unless there is other work to do.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> Result<(), Errno> {
        events.clear();
        let (mut wait, sleeps) = self.wait_limit();
        if wait != Some(AT_ONCE) && !self.me.mailbox().fall_asleep() {
            wait = Some(AT_ONCE);
        }
        let room = rustix::buffer::spare_capacity(events);
        let waited = epoll::wait(&self.me.epoll, room, wait.as_ref());
        self.me.mailbox().wake_up();
        if sleeps {
            self.ring_clients.wake_up(&mut self.clients);
        }
        match waited {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Does periodic work that is due, and takes the outcomes of lower tiers.
    fn do_duties(&mut self, now: Instant, has_events: bool) {
        if self.duties.take_tick(now) {
            self.tick(now);
        }
        if has_events || self.ring_clients.take_busy() {
            self.duties.note_work(now);
        }
        journal::keep(&mut self.shard.store, &self.me.shared.watchers);
        if self.below_is_busy() {
            let is_due = self.duties.take_lower_look(now);
            self.poll_below(is_due.then_some(now));
        }
    }

    #[inline]
    fn take_event(&mut self, event: &epoll::Event) {
        match event.data.u64() {
            // Mailbox and lower tiers are checked in every round.
            TOKEN_LOWER | TOKEN_WAKE => {}
            // A ring's bell: all rings are served in every round.
            token if token & TOKEN_BELL != 0 => {}
            token => {
                if let Ok(number) = usize::try_from(token) {
                    self.on_event(number, event.flags);
                }
            }
        }
    }

    /// How long to wait, and whether the rings have been told that the thread sleeps.
    fn wait_limit(&mut self) -> (Option<Timespec>, bool) {
        let mut spin = Duration::from_micros(self.me.shared.settings.spin_us);
        if !self.ring_clients.is_empty() {
            spin = spin.max(RING_SPIN);
        }
        if self.ring_clients.are_busy() || self.duties.has_just_worked(spin) {
            return (Some(AT_ONCE), false);
        }
        let Some(rings_limit) = self.ring_clients.fall_asleep(&mut self.clients) else {
            return (Some(AT_ONCE), true);
        };
        let limit = match &self.below {
            Some(below) if below.has_at_hand() => Duration::ZERO,
            Some(below) if below.is_busy() => LOWER_LOOK,
            _ if self.duties.is_stopping() => Duration::from_millis(10),
            _ => TICK,
        };
        (Timespec::try_from(limit.min(rings_limit)).ok(), true)
    }

    fn is_finished(&mut self) -> bool {
        self.duties.are_done(&self.me.shared, || self.clients.are_quiet())
    }

    fn tick(&mut self, now: Instant) {
        self.shard.clock.set_uptime(self.duties.uptime_s(now));
        let now_s = self.shard.clock.now_s();
        self.shard.store.set_now(now_s);
        self.shard.store.free_expired();
        self.shard.store.cut_strays();
        // Who has not read for a while may have to give up now.
        self.make_room_for_held();
        self.take_back_held();
        self.keep_promises();
        let report = self.report();
        let (shared, number) = (&self.me.shared, self.me.number);
        *lock(&shared.reports[number]) = report;
        self.leave_observed();
        let idle_timeout_s = self.me.shared.settings.idle_timeout_s;
        if idle_timeout_s > 0 {
            self.close_idle(now_s, idle_timeout_s);
        }
    }

    fn close_idle(&mut self, now_s: u32, idle_timeout_s: u32) {
        for number in 0..self.clients.numbers() {
            let is_idle = self.clients.get(number).is_some_and(|connection| {
                let is_reading =
                    connection.keyvault.as_ref().is_some_and(KeyVaultState::holds_leases);
                let idle_s = now_s.saturating_sub(connection.client.last_active_s);
                idle_s >= idle_timeout_s && !is_reading
            });
            if is_idle {
                self.me.counts.idle_kicks += 1;
                self.close(number, CloseReason::IdleTimeout);
            }
        }
    }

    /// Publishes the shard's observations among the shared figures.
    pub(crate) fn leave_observed(&mut self) {
        let memory_bytes = self.shard.store.settings().limit_bytes as u64;
        let quotas = self.shard.store.quotas();
        if self.shard.observer.is_none() && quotas.is_empty() {
            return;
        }
        let observed = self.shard.observer.as_mut().map(|observer| observer.tell(memory_bytes));
        let observed = Observed { quotas, ..observed.unwrap_or_default() };
        let (shared, number) = (&self.me.shared, self.me.number);
        *lock(&shared.observed[number]) = observed;
    }

    pub(crate) fn count_prefixes(&mut self, on: bool) {
        let delimiter = self.me.shared.settings.prefix_delimiter;
        match (&mut self.shard.observer, on) {
            (observer, true) => observer.get_or_insert_default().count_prefixes(delimiter),
            (Some(observer), false) => observer.rest_prefixes(),
            (None, false) => {}
        }
    }

    fn take_messages(&mut self) {
        let mut messages = self.mail.take_messages(&self.me);
        for message in messages.drain(..) {
            match message {
                Message::Client { socket, is_local, protocol, input } => {
                    self.add((socket, is_local), protocol, input)
                }
                Message::Asks { from, batch } => {
                    self.answer_asks(from, &batch);
                    self.mail.keep_asks(batch);
                }
                Message::Answers(batch) => {
                    self.deliver(&batch);
                    self.mail.keep_answers(batch);
                }
                Message::Told(told) => self.tell_watchers(&told),
                Message::Far(order) => {
                    if let Some(below) = &mut self.below {
                        below.obey(order);
                    }
                    // Shares with nothing in them end at once.
                    self.poll_below(None);
                }
                Message::Stop => self.duties.stop(),
            }
        }
        self.mail.return_messages(messages);
    }

    /// Whether a request on this key has to wait for a lower tier. A request that `replaces` the
    /// value whatever it is waits only behind others parked on the key.
    #[inline]
    pub(crate) fn is_below(&self, key: HashedKey<'_>, replaces: bool) -> bool {
        self.below.as_ref().is_some_and(|below| below.holds(&self.shard.store, key, replaces))
    }

    /// Parks a request. The caller has found that the key is in a lower tier.
    pub(crate) fn park(&mut self, key: HashedKey<'_>, origin: Origin, what: Parked, bytes: &[u8]) {
        if let Some(below) = &mut self.below {
            below.park(&self.shard.store, key, origin, what, bytes);
        }
    }

    /// Begins to read all keys of a MULTIGET that are in a lower tier, at the same time, if there
    /// are any.
    pub(crate) fn gather(
        &mut self,
        keys: Keys<'_>,
        head: AnswerHead<'_>,
        origin: Origin,
    ) -> Gathered {
        match &mut self.below {
            Some(below) => below.gather(&mut self.shard, keys, head, origin),
            None => Gathered::AllInMemory,
        }
    }

    /// Passes items that had to leave memory to the lower tiers. To be done before the next request
    /// is handled.
    #[inline]
    pub(crate) fn settle_victims(&mut self) {
        if self.shard.store.has_outbox()
            && let Some(below) = &mut self.below
        {
            below.demote(&mut self.shard.store);
        }
    }

    /// Whether the lower tiers have operations under way.
    fn below_is_busy(&self) -> bool {
        self.below.as_ref().is_some_and(Below::is_busy)
    }

    /// Notes on flash what a later process must know of the store.
    pub(crate) fn keep_promises(&mut self) {
        if let Some(below) = &mut self.below {
            below.keep_promises(&self.shard.store);
        }
    }

    /// Completes pending writes to flash. True if the device has answered all of them.
    fn close_below(&mut self) -> bool {
        self.below.as_mut().is_none_or(|below| below.close(&mut self.shard.store))
    }

    /// The figures of this thread and its shard.
    pub(crate) fn report(&self) -> ShardReport {
        let store = &self.shard.store;
        let below = self.below.as_ref();
        ShardReport {
            commands: self.shard.counts,
            store: *store.counts(),
            thread: self.me.counts,
            items: store.items() as u64,
            age_s: u64::from(store.age_s()),
            item_bytes: store.item_bytes(),
            index_bytes: store.index_bytes() as u64,
            overflow_entries: store.overflow_entries() as u64,
            policy_bytes: store.policy_bytes() as u64,
            used_bytes: store.used_bytes() as u64,
            held_bytes: self.clients.held_bytes() as u64,
            limit_bytes: store.settings().limit_bytes as u64,
            limit_was_set: true,
            leases_held: store.leases_held().leases as u64,
            leased_bytes: store.leases_held().bytes as u64,
            lower_items: store.lower_items() as u64,
            flash_items: store.flash_items() as u64,
            far: below.map_or_else(TierReport::default, |below| {
                TierReport::new(below.far.as_ref(), below.from_far)
            }),
            flash: below.map_or_else(TierReport::default, |below| {
                TierReport::new(below.flash.as_ref(), below.from_flash)
            }),
            late: below.map_or(0, |below| below.late),
            reclaim: below.map_or_else(Default::default, |it| it.reclaim.counts),
        }
    }
}

/// Why a thread cannot start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("the shard's memory: {0}")]
    Store(#[from] StoreError),
    #[error("waiting for clients: {0}")]
    Io(#[from] Errno),
}
