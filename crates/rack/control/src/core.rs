//! The leading controller: the state under one lock, the queue to the store, and waiting requests.
//!
//! The order is: change the state, queue its operations for the store, release the lock, wait until
//! they are durable, answer. Readers wait in the same way for what they have read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use farpool_api::{Event, Problem, ProblemKind};
use farpool_http::Asker;
use farpool_kernel::{fill_random, lock, unix_ms};
use farpool_units::at_most;
use tokio::sync::watch;

use crate::clock::{ListeningClock, STALL_MS};
use crate::history::History;
use crate::model::{Applied, Command, Records, State};
use crate::reconcile;
use crate::store::backup::to_text;
use crate::store::{CommitState, Committer, version};

/// Random bits from the kernel, fetched for many keys at once.
#[derive(Debug, Default)]
struct Random {
    bytes: Vec<u8>,
}

impl Random {
    fn next(&mut self) -> u128 {
        if self.bytes.len() < 16 {
            let mut fresh = [0; 4096];
            // Without the flags that make it fail, the kernel always gives some.
            while fill_random(&mut fresh).is_err() {}
            self.bytes.extend_from_slice(&fresh);
        }
        let from = self.bytes.len() - 16;
        let mut bits = [0; 16];
        bits.copy_from_slice(&self.bytes[from..]);
        self.bytes.truncate(from);
        u128::from_le_bytes(bits)
    }
}

/// What the lock guards.
#[derive(Debug)]
struct Guarded {
    state: State,
    random: Random,
    /// Batches queued for the store so far.
    queued: u64,
    history: History,
    clock: ListeningClock,
    /// A stall of the store has been logged, and not yet its end.
    is_stall_logged: bool,
}

/// A leading controller.
#[derive(Debug)]
pub(crate) struct Core {
    guarded: Mutex<Guarded>,
    committer: Committer,
    /// Counts changes, for requests that wait for one.
    changed: watch::Sender<u64>,
    started: Instant,
    /// Time until which no other controller can lead, in ms after `started`.
    valid_until_ms: AtomicU64,
    ended: AtomicBool,
}

impl Core {
    pub(crate) fn new(
        state: State,
        history: History,
        committer: Committer,
        started: Instant,
    ) -> Arc<Self> {
        let clock = ListeningClock::new(at_most(started.elapsed().as_millis()));
        let random = Random::default();
        let guarded = Guarded { state, random, queued: 0, history, clock, is_stall_logged: false };
        Arc::new(Self {
            guarded: Mutex::new(guarded),
            committer,
            changed: watch::channel(0).0,
            started,
            valid_until_ms: AtomicU64::new(u64::MAX),
            ended: AtomicBool::new(false),
        })
    }

    /// Uptime in ms; monotonic, so the wall clock may jump.
    fn uptime_ms(&self) -> u64 {
        at_most(self.started.elapsed().as_millis())
    }

    /// The time by which nodes and clients become late.
    fn now_ms(&self, guarded: &mut Guarded) -> u64 {
        let durable = self.committer.durable();
        guarded.clock.look(self.uptime_ms(), durable, guarded.queued)
    }

    /// Permits answers until `until`.
    pub(crate) fn lead_until(&self, until: Instant) {
        let ms = until.saturating_duration_since(self.started).as_millis();
        self.valid_until_ms.store(at_most(ms), Ordering::Release);
    }

    /// Ends this leadership: no answer is given any more.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Whether no other controller can lead at this moment.
    pub(crate) fn leads(&self) -> bool {
        let over = self.uptime_ms() >= self.valid_until_ms.load(Ordering::Acquire);
        !over && !self.ended.load(Ordering::Acquire)
    }

    fn check_leads(&self) -> Result<(), Problem> {
        if !self.leads() {
            return Err(Problem::new(
                ProblemKind::NotLeader,
                "this controller has stopped leading",
            ));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        // A panic ends the process (panic = "abort"), so a poisoned lock is seen in tests only.
        lock(&self.guarded)
    }

    /// Carries out a command and reads the state right after it. Returns once all of that is
    /// durable.
    pub(crate) async fn apply<T>(
        &self,
        command: Command,
        look: impl FnOnce(&State, &Applied, u64) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        self.apply_of(&Asker::default(), command, look).await
    }

    /// Carries out a command like [`Self::apply`], unless `asker` speaks for others with it.
    pub(crate) async fn apply_of<T>(
        &self,
        asker: &Asker,
        command: Command,
        look: impl FnOnce(&State, &Applied, u64) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        self.check_leads()?;
        let (seen, queued) = {
            let mut guarded = self.lock();
            if let Some(tenant) = asker.tenant() {
                guarded.state.check_owns(tenant, &command).inspect_err(say_refused)?;
            }
            let now_ms = self.now_ms(&mut guarded);
            let applied = guarded.apply(command, now_ms, self)?;
            (look(&guarded.state, &applied, now_ms), guarded.queued)
        };
        self.durable(queued).await?;
        seen
    }

    /// Reads the state. Returns once what was read is durable.
    pub(crate) async fn read<T>(&self, look: impl FnOnce(&State, u64) -> T) -> Result<T, Problem> {
        self.check_leads()?;
        let (seen, queued) = {
            let mut guarded = self.lock();
            let now_ms = self.now_ms(&mut guarded);
            (look(&guarded.state, now_ms), guarded.queued)
        };
        self.durable(queued).await?;
        Ok(seen)
    }

    /// Reads the state without waiting for the store: for metrics and switches only.
    pub(crate) fn peek<T>(&self, look: impl FnOnce(&State, u64) -> T) -> T {
        let mut guarded = self.lock();
        let now_ms = self.now_ms(&mut guarded);
        look(&guarded.state, now_ms)
    }

    /// Checks `arrived` now and at each change. Returns when it holds or the time is over.
    pub(crate) async fn wait(
        &self,
        wait: Duration,
        mut arrived: impl FnMut(&State) -> bool,
    ) -> Result<(), Problem> {
        let mut changed = self.changed.subscribe();
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            self.check_leads()?;
            changed.mark_unchanged();
            if arrived(&self.lock().state) {
                return Ok(());
            }
            match tokio::time::timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                _ => return Ok(()),
            }
        }
    }

    async fn durable(&self, number: u64) -> Result<(), Problem> {
        let mut state = self.committer.state();
        let reached = |state: &CommitState| state.durable >= number || state.failed.is_some();
        let reached = state.wait_for(reached).await;
        let failed = |reason: &str| Err(Problem::new(ProblemKind::StoreFailed, reason));
        match reached {
            Ok(state) if state.durable >= number => {}
            Ok(state) => return failed(state.failed.as_deref().unwrap_or_default()),
            Err(_) => return failed("its thread has ended"),
        }
        // It may have taken so long that another controller leads.
        self.check_leads()
    }

    /// Does everything that is due.
    pub(crate) fn tick(&self) {
        if self.check_leads().is_err() {
            return;
        }
        let mut guarded = self.lock();
        let now_ms = self.now_ms(&mut guarded);
        guarded.log_stall();
        for command in reconcile::due(&guarded.state, now_ms) {
            // A command may no longer be due after the one before it; the next tick checks again.
            let _ = guarded.apply(command, now_ms, self);
        }
    }

    /// Carries out a command for which no client waits.
    pub(crate) fn command(&self, command: Command) {
        if self.check_leads().is_ok() {
            let mut guarded = self.lock();
            let now_ms = self.now_ms(&mut guarded);
            // No client asked, so none needs the refusal; the next check sees the result.
            let _ = guarded.apply(command, now_ms, self);
        }
    }

    /// Returns the events after the one with id `after`.
    pub(crate) async fn events_after(&self, after: u64) -> Result<Vec<Event>, Problem> {
        self.check_leads()?;
        let (events, queued) = {
            let guarded = self.lock();
            (guarded.history.after(after), guarded.queued)
        };
        self.durable(queued).await?;
        Ok(events)
    }

    /// Returns a backup of everything that is stored.
    pub(crate) async fn backup(&self) -> Result<String, Problem> {
        self.check_leads()?;
        let (records, queued) = {
            let guarded = self.lock();
            let records = guarded.state.records();
            (Records { events: guarded.history.records(), ..records }, guarded.queued)
        };
        self.durable(queued).await?;
        let mut pairs = records.pairs();
        pairs.push(version::present());
        to_text(&pairs, unix_ms())
            .map_err(|error| Problem::new(ProblemKind::StoreFailed, error.to_string()))
    }

    /// Returns a receiver that wakes at every change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Returns the numbers of batches durable and queued so far.
    pub(crate) fn commits(&self) -> (u64, u64) {
        let queued = self.lock().queued;
        (self.committer.durable(), queued)
    }
}

/// Logs that somebody spoke for others.
pub(crate) fn say_refused(problem: &Problem) {
    tracing::warn!("refused: {}", problem.detail);
}

impl Guarded {
    /// Logs when the store begins to stall, and when it goes on.
    fn log_stall(&mut self) {
        let is_stalled = self.clock.is_stalled();
        if std::mem::replace(&mut self.is_stall_logged, is_stalled) == is_stalled {
            return;
        }
        if is_stalled {
            tracing::warn!(
                "the store has finished nothing for {} s; no request is answered until it does, \
                 and meanwhile no node or client counts as late",
                STALL_MS / 1000
            );
        } else {
            tracing::info!("the store goes on");
        }
    }

    fn apply(&mut self, command: Command, now_ms: u64, core: &Core) -> Result<Applied, Problem> {
        let Self { state, random, queued, history, .. } = self;
        let version = state.last_version;
        let mut applied = state.apply(command, now_ms, &mut || random.next())?;
        let time_unix_ms = unix_ms();
        applied.events.iter_mut().for_each(|event| event.time_unix_ms = time_unix_ms);
        let mut ops = std::mem::take(&mut applied.ops);
        ops.extend(history.add(&applied.events));
        if !ops.is_empty() {
            *queued += 1;
            core.committer.send(*queued, ops);
        }
        for event in &applied.events {
            tracing::info!(kind = event.kind, subject = event.subject, "{}", event.detail);
        }
        // Every answer that a client waits for has a version or is an event.
        if state.last_version != version || !applied.events.is_empty() {
            core.changed.send_modify(|count| *count += 1);
        }
        Ok(applied)
    }
}
