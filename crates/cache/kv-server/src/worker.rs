//! One thread: an epoll loop over its connections, and its shard of the keys.
//!
//! Every round: wait, read what came, answer it in batches, send what other threads asked and what
//! they are asked in one message each. Nothing in here is shared but the mailboxes.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use farpool_keyvault::arbiter::LeastRecentlyGranted;
use farpool_units::at_most;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::connection::{Client, SpareBuffers};
use super::light::Light;
use super::lower::Lower;
use super::mailbox::{Answer, Ask, Batch, Message};
use super::report::{ShardReport, ThreadCounts, TierReport};
use super::settings::Shared;
use super::sockets::{Connection, OUT_BYTES_MAX, READ_BYTES};
use super::watch::CloseReason;
use farpool_kv_protocol::request::ParseLimits;
use farpool_kv_protocol::{CommandCounts, Shard};
use farpool_kv_store::clock::Clock;
use farpool_kv_store::index::Tier;
use farpool_kv_store::observe::{Observed, Observer};
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_kv_tier::far::{Far, FarMemory};
use farpool_kv_tier::flash::layout::Promises;
use farpool_kv_tier::flash::{Flash, Recovered};

/// Events taken in one round.
const EVENTS_MAX: usize = 256;
/// The clock, expiry and idle clients are looked at so often.
const TICK: Duration = Duration::from_secs(1);
/// How long promised replies may take once the server is to end.
const DRAIN: Duration = Duration::from_secs(5);
/// How long a thread with rings looks at them before it sleeps.
const RING_SPIN: Duration = Duration::from_micros(50);
/// Rounds over the rings between two looks at everything else: sockets wait no longer than this many
/// batches, and a look costs a system call.
const LOOKS: u32 = 64;
/// While a lower tier owes answers, its deadlines are looked at so often.
const LOWER_LOOK: Duration = Duration::from_millis(5);
/// Batches that are kept for their memory: one for each thread would be a lot with many.
const SPARE_BATCHES: usize = 4;
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
const TOKEN_WAKE: u64 = u64::MAX;
/// A blade has answered.
pub(super) const TOKEN_LOWER: u64 = u64::MAX - 1;
/// Marks the token of a ring's bell.
pub(super) const TOKEN_BELL: u64 = 1 << 62;

/// One serving thread.
#[derive(Debug)]
pub struct Worker {
    pub(super) number: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) shard: Shard,
    pub(super) limits: ParseLimits,
    pub(super) counts: ThreadCounts,
    /// What other shards are asked at the end of the round.
    pub(super) asks: Vec<Batch<Ask>>,
    /// What other threads are answered at the end of the round.
    pub(super) answers: Vec<Batch<Answer>>,
    /// Batches that were answered or delivered, for their memory.
    spare_asks: Vec<Batch<Ask>>,
    spare_answers: Vec<Batch<Answer>>,
    pub(super) spare_buffers: SpareBuffers,
    /// Messages that are taken out of the mailbox.
    messages: Vec<Message>,
    /// Replies to the connection that is served now.
    pub(super) out: Vec<u8>,
    pub(super) connections: Vec<Option<Connection>>,
    /// Connections in shared memory, in the order of their turns.
    pub(super) turns: LeastRecentlyGranted,
    /// Of them, those that are over.
    pub(super) ended_ports: Vec<usize>,
    /// Frames of the ring that is served now.
    pub(super) frames: Vec<u8>,
    pub(super) epoll: OwnedFd,
    /// The tiers below memory.
    pub(super) lower: Option<Lower>,
    pub(super) free: Vec<u32>,
    pub(super) next_generation: u32,
    pub(super) read_buffer: Vec<u8>,
    started: Instant,
    last_tick: Instant,
    last_work: Instant,
    last_lower_look: Instant,
    stop_at: Option<Instant>,
    /// Whether rings had requests since the last look at the time.
    ports_busy: bool,
    /// It is among the shared `quiet_threads`.
    is_counted_quiet: bool,
}

impl Worker {
    /// A thread with an empty shard.
    pub fn new(shared: Arc<Shared>, number: usize) -> Result<Self, WorkerError> {
        let settings = &shared.settings;
        let shards = shared.shards();
        let item_bytes_max = settings.item_bytes_max;
        let store_settings = StoreSettings {
            limit_bytes: settings.memory_bytes / shards,
            item_bytes_max,
            evicts: settings.evicts,
        };
        let make = if settings.keyvault_leases { Store::leasing } else { Store::new };
        let mut store = make(store_settings)?;
        store.set_policy(settings.policy)?;
        let share = |(prefix, bytes): &(Vec<u8>, u64)| (prefix.clone(), bytes / shards as u64);
        store.set_quotas(settings.quotas.iter().map(share));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = epoll::EventData::new_u64(TOKEN_WAKE);
        // Every write to it is an event, whatever was written before: nobody needs to read it.
        let written = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &shared.mailboxes[number].wake, wake, written)?;
        let now = Instant::now();
        let mut worker = Self {
            number,
            shard: Shard {
                store,
                clock: Clock::start(shared.start_unix_s),
                counts: CommandCounts::default(),
                observer: settings.metrics_address.map(|_| Box::new(Observer::sampling())),
            },
            limits: ParseLimits { item_bytes_max },
            counts: ThreadCounts::default(),
            asks: (0..shards).map(|_| Batch::default()).collect(),
            answers: (0..shards).map(|_| Batch::default()).collect(),
            spare_asks: Vec::new(),
            spare_answers: Vec::new(),
            spare_buffers: SpareBuffers::default(),
            messages: Vec::new(),
            out: Vec::with_capacity(OUT_BYTES_MAX),
            epoll,
            lower: None,
            turns: LeastRecentlyGranted::default(),
            ended_ports: Vec::new(),
            frames: Vec::new(),
            connections: Vec::new(),
            free: Vec::new(),
            next_generation: 0,
            read_buffer: vec![0; READ_BYTES],
            started: now,
            last_tick: now,
            last_work: now,
            last_lower_look: now,
            stop_at: None,
            ports_busy: false,
            is_counted_quiet: false,
            shared,
        };
        worker.shard.store.set_now(worker.shard.clock.now_s());
        if worker.shared.settings.counts_prefixes {
            worker.count_prefixes(true);
        }
        Ok(worker)
    }

    fn lower_mut(&mut self) -> &mut Lower {
        self.shard.store.keep_victims();
        self.lower.get_or_insert_default()
    }

    /// Lets the shard have far memory below its own, as it comes.
    pub fn add_far(&mut self) {
        self.lower_mut().far = Some(Far::growing(FarMemory::default()));
    }

    /// Takes an item that an earlier process left on flash; whether there is room to point at it.
    pub fn take_recovered(&mut self, item: Recovered) -> bool {
        self.shard.store.insert_lower(item.hash, Tier::Flash, item.place, 0).is_ok()
    }

    /// Gives the shard flash below its memory, and has it go on where an earlier process stopped: with
    /// its `promises` and its clock.
    pub fn add_flash(&mut self, flash: Flash, promises: Promises, clock: Clock) {
        let Promises { last_cas, flushed_cas, flush_at_s, .. } = promises;
        self.shard.clock = clock;
        let store = &mut self.shard.store;
        store.resume(last_cas, (flushed_cas, flush_at_s));
        store.set_now(clock.now_s());
        self.lower_mut().flash = Some(flash);
        self.keep_promises();
    }

    /// Serves until it is told to stop and has sent what it promised.
    pub fn run(mut self) -> Result<(), WorkerError> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut looks = 0u32;
        loop {
            if !self.turns.is_empty() {
                if self.serve_ports() {
                    self.ports_busy = true;
                    self.send_batches();
                }
                self.close_ended_ports();
                looks += 1;
                if looks < LOOKS {
                    continue;
                }
                looks = 0;
            }
            events.clear();
            let (mut wait, sleeps) = self.wait_limit();
            if wait != Some(AT_ONCE) && !self.shared.mailboxes[self.number].fall_asleep() {
                wait = Some(AT_ONCE);
            }
            let waited = epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                wait.as_ref(),
            );
            self.shared.mailboxes[self.number].wake_up();
            if sleeps {
                self.rings_wake_up();
            }
            match waited {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let now = Instant::now();
            if now.duration_since(self.last_tick) >= TICK {
                self.tick(now);
            }
            if !events.is_empty() || std::mem::take(&mut self.ports_busy) {
                self.last_work = now;
            }
            self.keep_journal();
            if self.lower_is_busy() {
                let is_due = now.duration_since(self.last_lower_look) >= LOWER_LOOK;
                if is_due {
                    self.last_lower_look = now;
                }
                self.poll_lower(is_due.then_some(now));
            }
            for event in &events {
                match event.data.u64() {
                    // What is there is looked at anyway.
                    TOKEN_LOWER | TOKEN_WAKE => {}
                    // A ring's bell: all rings are looked at anyway.
                    token if token & TOKEN_BELL != 0 => {}
                    token => {
                        if let Ok(number) = usize::try_from(token) {
                            self.on_event(number, event.flags);
                        }
                    }
                }
            }
            // After the clients, so that what others asked and what they are asked travels together.
            self.take_messages();
            if self.lower_is_busy() {
                // Over shared memory, what was just asked has come already.
                self.poll_lower(None);
            }
            self.send_batches();
            self.send_journal();
            if self.stop_at.is_some_and(|at| now >= at) || self.is_finished() {
                let is_unclean = !self.close_lower();
                self.shared.is_flash_unclean.fetch_or(is_unclean, Ordering::Relaxed);
                return Ok(());
            }
        }
    }

    /// How long to wait, and whether the rings were told that nobody looks meanwhile.
    fn wait_limit(&mut self) -> (Option<Timespec>, bool) {
        let mut spin = Duration::from_micros(self.shared.settings.spin_us);
        if !self.turns.is_empty() {
            spin = spin.max(RING_SPIN);
        }
        if self.ports_busy || !spin.is_zero() && self.last_work.elapsed() < spin {
            return (Some(AT_ONCE), false);
        }
        let Some(rings_limit) = self.rings_fall_asleep() else { return (Some(AT_ONCE), true) };
        let limit = match &self.lower {
            Some(lower) if lower.has_at_hand() => Duration::ZERO,
            Some(lower) if lower.is_busy() => LOWER_LOOK,
            _ if self.stop_at.is_some() => Duration::from_millis(10),
            _ => TICK,
        };
        (Timespec::try_from(limit.min(rings_limit)).ok(), true)
    }

    fn close_ended_ports(&mut self) {
        while let Some(number) = self.ended_ports.pop() {
            self.close(number, CloseReason::Normal);
        }
    }

    /// Whether the server is to end and no thread owes its clients anything: until then others may ask this
    /// one's shard.
    fn is_finished(&mut self) -> bool {
        if self.stop_at.is_none() {
            return false;
        }
        if !self.is_counted_quiet && self.is_quiet() {
            self.is_counted_quiet = true;
            self.shared.quiet_threads.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.quiet_threads.load(Ordering::Relaxed) >= self.shared.shards()
    }

    fn is_quiet(&self) -> bool {
        let owes_nothing = |client: &Client| client.is_quiet() && !client.has_turn_left;
        self.connections.iter().flatten().all(|connection| owes_nothing(&connection.client))
    }

    fn tick(&mut self, now: Instant) {
        self.last_tick = now;
        self.shard.clock.set_uptime(at_most(now.duration_since(self.started).as_secs()));
        let now_s = self.shard.clock.now_s();
        self.shard.store.set_now(now_s);
        self.shard.store.free_expired();
        self.shard.store.cut_strays();
        self.keep_promises();
        let report = self.report();
        *self.shared.reports[self.number].lock().unwrap_or_else(PoisonError::into_inner) = report;
        self.leave_observed();
        let idle_timeout_s = self.shared.settings.idle_timeout_s;
        if idle_timeout_s == 0 {
            return;
        }
        for number in 0..self.connections.len() {
            let is_idle = self.connections[number].as_ref().is_some_and(|connection| {
                let is_reading = connection.light.as_ref().is_some_and(Light::holds_leases);
                let idle_s = now_s.saturating_sub(connection.client.last_active_s);
                idle_s >= idle_timeout_s && !is_reading
            });
            if is_idle {
                self.counts.idle_kicks += 1;
                self.close(number, CloseReason::IdleTimeout);
            }
        }
    }

    /// Leaves what was observed of the shard where whoever asks finds it.
    pub(super) fn leave_observed(&mut self) {
        let memory_bytes = self.shard.store.settings().limit_bytes as u64;
        let quotas = self.shard.store.quotas();
        if self.shard.observer.is_none() && quotas.is_empty() {
            return;
        }
        let observed = self.shard.observer.as_mut().map(|observer| observer.tell(memory_bytes));
        let observed = Observed { quotas, ..observed.unwrap_or_default() };
        *self.shared.observed[self.number].lock().unwrap_or_else(PoisonError::into_inner) =
            observed;
    }

    pub(super) fn count_prefixes(&mut self, on: bool) {
        let delimiter = self.shared.settings.prefix_delimiter;
        match (&mut self.shard.observer, on) {
            (observer, true) => observer.get_or_insert_default().count_prefixes(delimiter),
            (Some(observer), false) => observer.rest_prefixes(),
            (None, false) => {}
        }
    }

    fn take_messages(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.shared.mailboxes[self.number].take_into(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Client { socket, is_local, protocol, input } => {
                    self.add((socket, is_local), protocol, input)
                }
                Message::Asks { from, mut batch } => {
                    self.answer_asks(from, &batch);
                    batch.clear();
                    self.spare_asks.push(batch);
                }
                Message::Answers(mut batch) => {
                    self.deliver(&batch);
                    batch.clear();
                    self.spare_answers.push(batch);
                }
                Message::Told(told) => self.tell_watchers(&told),
                Message::Far(order) => self.obey_far(order),
                Message::Stop => self.stop_at = Some(Instant::now() + DRAIN),
            }
        }
        self.messages = messages;
        self.spare_asks.truncate(SPARE_BATCHES);
        self.spare_answers.truncate(SPARE_BATCHES);
    }

    fn send_batches(&mut self) {
        for to in 0..self.asks.len() {
            if !self.asks[to].is_empty() {
                let spare = self.spare_asks.pop().unwrap_or_default();
                let batch = std::mem::replace(&mut self.asks[to], spare);
                self.shared.mailboxes[to].put(Message::Asks { from: self.number, batch });
            }
            if !self.answers[to].is_empty() {
                let spare = self.spare_answers.pop().unwrap_or_default();
                let batch = std::mem::replace(&mut self.answers[to], spare);
                self.shared.mailboxes[to].put(Message::Answers(batch));
            }
        }
    }

    /// What this thread and its shard did and have.
    pub(super) fn report(&self) -> ShardReport {
        let store = &self.shard.store;
        ShardReport {
            commands: self.shard.counts,
            store: *store.counts(),
            thread: self.counts,
            items: store.items() as u64,
            item_bytes: store.item_bytes(),
            index_bytes: store.index_bytes() as u64,
            policy_bytes: store.policy_bytes() as u64,
            used_bytes: store.used_bytes() as u64,
            limit_bytes: store.settings().limit_bytes as u64,
            limit_was_set: true,
            leases_held: store.leases_held().leases as u64,
            leased_bytes: store.leases_held().bytes as u64,
            lower_items: store.lower_items() as u64,
            flash_items: store.flash_items() as u64,
            far: self.lower.as_ref().map_or_else(TierReport::default, |lower| {
                TierReport::new(lower.far.as_ref(), lower.from_far)
            }),
            flash: self.lower.as_ref().map_or_else(TierReport::default, |lower| {
                TierReport::new(lower.flash.as_ref(), lower.from_flash)
            }),
            late: self.lower.as_ref().map_or(0, |lower| lower.late),
            reclaim: self.lower.as_ref().map_or_else(Default::default, |it| it.reclaim.counts),
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
