//! A thread's periodic work: its tick, its checks of lower-tier deadlines, its end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use farpool_units::at_most;

use crate::settings::Shared;

/// How often the clock, expiry and idle clients are checked.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// How long outstanding replies may take once the server is to end.
const DRAIN: Duration = Duration::from_secs(5);
/// How often the deadlines of a lower tier that owes answers are checked.
pub(crate) const LOWER_LOOK: Duration = Duration::from_millis(5);

/// When a thread last did its periodic work.
#[derive(Debug)]
pub(crate) struct Duties {
    started: Instant,
    last_tick: Instant,
    last_work: Instant,
    last_lower_look: Instant,
    stop_at: Option<Instant>,
    /// Whether it is counted in the shared `quiet_threads`.
    is_counted_quiet: bool,
}

impl Duties {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            started: now,
            last_tick: now,
            last_work: now,
            last_lower_look: now,
            stop_at: None,
            is_counted_quiet: false,
        }
    }

    /// Whether a tick is due. If so, the next one is due [`TICK`] later.
    pub(crate) fn take_tick(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.last_tick) >= TICK;
        if is_due {
            self.last_tick = now;
        }
        is_due
    }

    /// Whether the deadlines of lower tiers are to be checked. If so, the next time is
    /// [`LOWER_LOOK`] later.
    pub(crate) fn take_lower_look(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.last_lower_look) >= LOWER_LOOK;
        if is_due {
            self.last_lower_look = now;
        }
        is_due
    }

    pub(crate) fn uptime_s(&self, now: Instant) -> u32 {
        at_most(now.duration_since(self.started).as_secs())
    }

    pub(crate) const fn note_work(&mut self, now: Instant) {
        self.last_work = now;
    }

    /// Whether the thread has worked within the last `spin`.
    pub(crate) fn has_just_worked(&self, spin: Duration) -> bool {
        !spin.is_zero() && self.last_work.elapsed() < spin
    }

    /// Begins to stop: the server is to end.
    pub(crate) fn stop(&mut self) {
        self.stop_at = Some(Instant::now() + DRAIN);
    }

    pub(crate) const fn is_stopping(&self) -> bool {
        self.stop_at.is_some()
    }

    /// Whether the time for outstanding replies is over.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.stop_at.is_some_and(|at| now >= at)
    }

    /// Whether the server is to end and no thread owes its clients anything: until then others may
    /// ask this thread's shard. `is_quiet` says whether this thread owes nothing.
    pub(crate) fn are_done(&mut self, shared: &Shared, is_quiet: impl FnOnce() -> bool) -> bool {
        if !self.is_stopping() {
            return false;
        }
        if !self.is_counted_quiet && is_quiet() {
            self.is_counted_quiet = true;
            shared.quiet_threads.fetch_add(1, Ordering::Relaxed);
        }
        shared.quiet_threads.load(Ordering::Relaxed) >= shared.shards()
    }
}
