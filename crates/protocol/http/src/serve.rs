//! Serves a router over TCP, so that connections that send nothing cost others nothing.
//!
//! Invariants:
//! - A connection is *waiting* unless a request of it is being answered. A head that does not
//!   arrive in time ends its connection.
//! - At most [`WAITING_LIMIT`] connections wait; with one more, the one that has waited longest is
//!   closed. So half-sent requests, of whatever number, keep nobody out.
//! - At most as many connections are open as descriptors allow; a further one is closed at once,
//!   before its token is looked at, and a line in the log says so.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use farpool_kernel::lock;
use farpool_units::at_most;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tower_service::Service;

use crate::bare::Worded;

/// Longest time from the first wait for a request until its head is complete; then the connection
/// is closed. A client that keeps a connection for later opens another.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most connections on which no request is being answered; with one more, the one that has waited
/// longest is closed. Each takes about 30 kB while its head is incomplete.
pub const WAITING_LIMIT: usize = 2_048;
/// Part of all connections that may wait, as a divisor, where descriptors are few.
const WAITING_PART: usize = 2;
/// Descriptors that connections leave to the rest of the process: store, switches, log.
const DESCRIPTORS_BESIDE: u64 = 64;
/// Most descriptors that are asked for: 100,000 clients and 10,000 nodes that all wait for news.
const DESCRIPTORS_WANTED: u64 = 1 << 17;
/// Fewest connections, however few descriptors there are.
const CONNECTIONS_LEAST: usize = 16;
/// Pause after the system refused a connection, so that a lack of descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Attempts to find room for a connection while those that were told to go are going.
const SEAT_TRIES: u32 = 10;
/// Pause between two of them.
const SEAT_PAUSE: Duration = Duration::from_millis(1);
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

/// The connections of a server.
#[derive(Debug)]
struct Connections {
    limits: Limits,
    open: AtomicUsize,
    waiting: Mutex<Waiting>,
    said: Mutex<Option<Instant>>,
}

impl Connections {
    fn wait(&self, close: &Arc<Notify>) -> u64 {
        let mut waiting = lock(&self.waiting);
        let ticket = waiting.next;
        waiting.next += 1;
        waiting.all.insert(ticket, Arc::clone(close));
        if waiting.all.len() > self.limits.waiting
            && let Some((_, longest)) = waiting.all.pop_first()
        {
            longest.notify_one();
        }
        ticket
    }

    fn leave(&self, ticket: u64) {
        lock(&self.waiting).all.remove(&ticket);
    }

    /// Logs a refusal, unless one was logged a moment ago.
    fn say_full(&self) {
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
struct Seat {
    all: Arc<Connections>,
    close: Arc<Notify>,
    /// Requests whose answers are not complete.
    answering: AtomicUsize,
    /// Requests whose answers have not begun to be written; those without a request are worded.
    owed: Arc<AtomicUsize>,
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
        let (answering, owed) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        Some(Arc::new(Self { all: Arc::clone(all), close, answering, owed, ticket }))
    }

    fn begin(self: &Arc<Self>) -> Answering {
        self.owed.fetch_add(1, Ordering::AcqRel);
        if self.answering.fetch_add(1, Ordering::AcqRel) == 0 {
            self.all.leave(self.ticket.load(Ordering::Acquire));
        }
        Answering(Arc::clone(self))
    }

    fn is_waiting(&self) -> bool {
        self.answering.load(Ordering::Acquire) == 0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.all.leave(self.ticket.load(Ordering::Acquire));
        self.all.open.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A request that is being answered, until its answer has been sent or given up.
#[derive(Debug)]
struct Answering(Arc<Seat>);

impl Drop for Answering {
    fn drop(&mut self) {
        let seat = &self.0;
        if seat.answering.fetch_sub(1, Ordering::AcqRel) == 1 {
            seat.ticket.store(seat.all.wait(&seat.close), Ordering::Release);
        }
    }
}

/// An answer's body, with the knowledge that it is being sent.
struct Kept {
    body: Body,
    _answering: Answering,
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Serves a router on a listener, without end, within these limits. Several listeners may share
/// neither connections nor limits.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits) {
    let all = Arc::new(Connections {
        limits,
        open: AtomicUsize::new(0),
        waiting: Mutex::default(),
        said: Mutex::default(),
    });
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // A connection that ended before it was taken, or no descriptor is left.
            all.say_full();
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let mut seat = Seat::take(&all);
        for _ in 0..SEAT_TRIES {
            if seat.is_some() {
                break;
            }
            // Connections that were told to go may not have gone yet.
            tokio::time::sleep(SEAT_PAUSE).await;
            seat = Seat::take(&all);
        }
        let Some(seat) = seat else {
            all.say_full();
            continue;
        };
        // Answers are small and clients wait for them. A socket that refuses this works, too.
        let _ = stream.set_nodelay(true);
        tokio::spawn(attend(stream, router.clone(), seat));
    }
}

/// Answers the requests of one connection until it ends or has to go.
async fn attend(stream: TcpStream, router: Router, seat: Arc<Seat>) {
    let io = TokioIo::new(Worded::new(stream, Arc::clone(&seat.owed)));
    let asked = Arc::clone(&seat);
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let answering = asked.begin();
        let mut router = router.clone();
        async move {
            // A router is always ready.
            let Ok(response) = router.call(request.map(Body::new)).await;
            let kept = |body| Body::new(Kept { body, _answering: answering });
            Ok::<Response, Infallible>(response.map(kept))
        }
    });
    let mut connection = std::pin::pin!(
        hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(seat.all.limits.head_timeout)
            .serve_connection(io, service)
    );
    loop {
        tokio::select! {
            // It has ended, for whatever reason; that is the client's to know.
            _ = connection.as_mut() => return,
            () = seat.close.notified() => if seat.is_waiting() { return },
        }
    }
}
