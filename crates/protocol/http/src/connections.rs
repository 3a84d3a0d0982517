//! The connections of a server: how many there are, and which of them wait.
//!
//! Invariants:
//! - A connection *waits* unless a request of it is complete and not answered yet, or its answer
//!   has begun and is not complete.
//! - A waiting connection is in the list of those that wait, or was told to close.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_units::at_most;
use tokio::sync::Notify;

/// Longest time from the first wait for a request until its head is complete; then the connection
/// is closed. A client that keeps a connection for later opens another.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most connections that wait; with one more, the one that has waited longest is closed. Each takes
/// about 30 kB while its head is incomplete.
pub const WAITING_LIMIT: usize = 2_048;
/// Part of all connections that may wait, as a divisor, where descriptors are few.
const WAITING_PART: usize = 2;
/// Descriptors that connections leave to the rest of the process: store, switches, log.
const DESCRIPTORS_BESIDE: u64 = 64;
/// Most descriptors that are asked for: 100,000 clients and 10,000 nodes that all wait for news.
const DESCRIPTORS_WANTED: u64 = 1 << 17;
/// Fewest connections, however few descriptors there are.
const CONNECTIONS_LEAST: usize = 16;
/// Attempts to close a waiting connection for a new one. One may have been asked something just
/// then, and stays.
const SEAT_TRIES: u32 = 3;
/// Longest that a connection which was told to close is waited for; the next attempt follows.
const SEAT_WAIT: Duration = Duration::from_millis(100);
/// The log says at most this often that connections are refused.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// How many connections a server takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most connections at a time.
    pub connections: usize,
    /// Most of them that wait.
    pub waiting: usize,
    /// Longest time until a request's head is complete.
    pub head_timeout: Duration,
}

impl Limits {
    /// Raises the process's limit of descriptors as far as is allowed and useful, and returns what
    /// it permits.
    #[must_use]
    pub fn raised() -> Self {
        let descriptors = farpool_kernel::raise_descriptors(DESCRIPTORS_WANTED);
        let connections = descriptors.saturating_sub(DESCRIPTORS_BESIDE);
        Self::of(at_most(connections))
    }

    /// Returns the usual limits for this many connections.
    #[must_use]
    pub fn of(connections: usize) -> Self {
        let connections = connections.max(CONNECTIONS_LEAST);
        let waiting = WAITING_LIMIT.min(connections / WAITING_PART);
        Self { connections, waiting, head_timeout: HEAD_TIMEOUT }
    }
}

/// Connections that wait, by the order in which they began to, each with what closes it.
#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    all: BTreeMap<u64, Arc<Notify>>,
}

/// The connections of a server, over all its listeners.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    open: AtomicUsize,
    waiting: Mutex<Waiting>,
    /// Wakes who waits for a connection to end.
    freed: Notify,
    said: Mutex<Option<Instant>>,
}

impl Connections {
    /// None yet, and these limits for them.
    #[must_use]
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            open: AtomicUsize::new(0),
            waiting: Mutex::default(),
            freed: Notify::new(),
            said: Mutex::default(),
        })
    }

    pub(crate) fn head_timeout(&self) -> Duration {
        self.limits.head_timeout
    }

    fn wait(&self, close: &Arc<Notify>) -> u64 {
        let (ticket, is_over) = {
            let mut waiting = lock(&self.waiting);
            let ticket = waiting.next;
            waiting.next += 1;
            waiting.all.insert(ticket, Arc::clone(close));
            (ticket, waiting.all.len() > self.limits.waiting)
        };
        if is_over {
            self.close_longest();
        }
        ticket
    }

    fn leave(&self, ticket: u64) {
        lock(&self.waiting).all.remove(&ticket);
    }

    /// Tells the connection that has waited longest to close. Returns whether there is one.
    fn close_longest(&self) -> bool {
        let longest = lock(&self.waiting).all.pop_first();
        longest.is_some_and(|(_, close)| {
            close.notify_one();
            true
        })
    }

    /// Returns a seat for a new connection; at the cap that of the one that has waited longest.
    /// None if all are being answered.
    pub(crate) async fn seat(self: &Arc<Self>) -> Option<Arc<Seat>> {
        for _ in 0..SEAT_TRIES {
            if let Some(seat) = Seat::take(self) {
                return Some(seat);
            }
            if !self.close_longest() {
                return None;
            }
            let taken = async {
                loop {
                    self.freed.notified().await;
                    if let Some(seat) = Seat::take(self) {
                        return seat;
                    }
                }
            };
            if let Ok(seat) = tokio::time::timeout(SEAT_WAIT, taken).await {
                return Some(seat);
            }
        }
        None
    }

    /// Makes room after the system had no descriptor for a new connection.
    pub(crate) async fn give_descriptor(&self) {
        if !self.close_longest() {
            self.say_full();
        }
        // Whether one has ended or not: the system is asked again.
        let _ = tokio::time::timeout(SEAT_WAIT, self.freed.notified()).await;
    }

    /// Logs a refusal, unless one was logged a moment ago.
    pub(crate) fn say_full(&self) {
        let mut said = lock(&self.said);
        if said.is_none_or(|at| at.elapsed() >= SAY_EVERY) {
            *said = Some(Instant::now());
            tracing::warn!(
                connections = self.limits.connections,
                "no connection is left; further ones are closed: raise the limit on open files"
            );
        }
    }
}

/// One connection's part in the limits.
#[derive(Debug)]
pub(crate) struct Seat {
    all: Arc<Connections>,
    close: Arc<Notify>,
    /// Requests that are complete or whose answer has begun, and whose answer is not complete.
    answering: AtomicUsize,
    ticket: AtomicU64,
}

impl Seat {
    /// Takes a seat, if one is free.
    fn take(all: &Arc<Connections>) -> Option<Arc<Self>> {
        if all.open.fetch_add(1, Ordering::AcqRel) >= all.limits.connections {
            all.open.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        let close = Arc::new(Notify::new());
        let ticket = AtomicU64::new(all.wait(&close));
        let (all, answering) = (Arc::clone(all), AtomicUsize::new(0));
        Some(Arc::new(Self { all, close, answering, ticket }))
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.all
    }

    /// Returns when the connection has to close.
    pub(crate) async fn closed(&self) {
        loop {
            self.close.notified().await;
            // It may have been asked something just then.
            if self.answering.load(Ordering::Acquire) == 0 {
                return;
            }
        }
    }

    /// The head of a request is there. The connection waits anew if the rest of it is not.
    pub(crate) fn exchange(self: &Arc<Self>) -> Arc<Exchange> {
        if self.answering.load(Ordering::Acquire) == 0 {
            self.stop_waiting();
            self.start_waiting();
        }
        Arc::new(Exchange { seat: Arc::clone(self), is_answering: AtomicBool::new(false) })
    }

    fn start_waiting(&self) {
        self.ticket.store(self.all.wait(&self.close), Ordering::Release);
    }

    fn stop_waiting(&self) {
        self.all.leave(self.ticket.load(Ordering::Acquire));
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.stop_waiting();
        self.all.open.fetch_sub(1, Ordering::AcqRel);
        self.all.freed.notify_one();
    }
}

/// A request and its answer.
#[derive(Debug)]
pub(crate) struct Exchange {
    seat: Arc<Seat>,
    is_answering: AtomicBool,
}

impl Exchange {
    /// The request is complete, or its answer begins: the connection does not wait.
    pub(crate) fn answer(&self) {
        if self.is_answering.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.seat.answering.fetch_add(1, Ordering::AcqRel) == 0 {
            self.seat.stop_waiting();
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let was_answering = *self.is_answering.get_mut();
        if was_answering && self.seat.answering.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.seat.start_waiting();
        }
    }
}
