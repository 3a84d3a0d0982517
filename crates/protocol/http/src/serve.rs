//! Serves a router over TCP, or over TLS above it, so that connections that send nothing cost
//! others nothing.
//!
//! Invariants:
//! - A connection is *waiting* unless a whole request of it is being answered. A head that does not
//!   arrive in time ends its connection.
//! - At most [`WAITING_LIMIT`] connections wait; with one more, the one that has waited longest is
//!   closed. It is closed, too, for a new connection when no further one may be open, or when the
//!   system has no descriptor. So half-sent requests, of whatever number, keep nobody out.
//! - At most as many connections are open as descriptors allow, over all listeners. If all of them
//!   are being answered, a further one is closed at once, before its token is looked at, and a line
//!   in the log says so.
//! - A handshake counts as waiting, and has the time of a head.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tower_service::Service;

use crate::audit::From;
use crate::bare::Worded;
use crate::connections::{Exchange, Seat};
use crate::tls::{Admitted, Tls};

pub use crate::connections::{Connections, HEAD_TIMEOUT, Limits, WAITING_LIMIT};

/// The body of a request, with the knowledge of when it is complete.
struct Received {
    body: Incoming,
    exchange: Arc<Exchange>,
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.exchange.answer();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body, with the knowledge that it is being sent.
struct Kept {
    body: Body,
    _exchange: Arc<Exchange>,
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

/// The pause after an error that is likely to come again at once.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Serves a router on a listener, without end. Listeners of one server share its connections. With
/// `tls` nothing is served in the clear, and [`Tls::watch`] has to run, too.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    connections: Arc<Connections>,
    tls: Option<Arc<Tls>>,
) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                match Errno::from_io_error(&error) {
                    Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                        connections.give_descriptor().await;
                    }
                    // The connection ended before it was taken.
                    Some(Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
                    _ => {
                        tracing::warn!(%error, "a connection cannot be taken");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
                continue;
            }
        };
        let Some(seat) = connections.seat().await else {
            connections.say_full();
            continue;
        };
        // Answers are small and clients wait for them. A socket that refuses this works, too.
        let _ = stream.set_nodelay(true);
        tokio::spawn(attend(stream, From(peer), router.clone(), seat, tls.clone()));
    }
}

/// Serves one connection until it ends or has to go.
async fn attend(
    stream: TcpStream,
    from: From,
    router: Router,
    seat: Arc<Seat>,
    tls: Option<Arc<Tls>>,
) {
    let Some(tls) = tls else {
        let told = move |request: &mut Request| {
            request.extensions_mut().insert(from);
            router.clone()
        };
        return answer(stream, &seat, told).await;
    };
    let admitted = tokio::select! {
        admitted = tls.admit(stream) => admitted,
        () = tokio::time::sleep(seat.connections().head_timeout()) => None,
        () = seat.closed() => None,
    };
    let Some(admitted) = admitted else { return };
    let identity = admitted.identity();
    let Admitted { stream, live } = admitted;
    let named = move |request: &mut Request| {
        request.extensions_mut().insert(identity.clone());
        request.extensions_mut().insert(from);
        router.clone()
    };
    tokio::select! {
        () = answer(stream, &seat, named) => {}
        () = tls.ended(&live) => {}
    }
}

/// Answers the requests of one connection until it ends or has to go. `router` gets each request
/// before the router that it returns does.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    seat: &Arc<Seat>,
    router: impl Fn(&mut Request) -> Router,
) {
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let exchange = seat.exchange();
        if request.body().is_end_stream() {
            exchange.answer();
        }
        let received = |body| Body::new(Received { body, exchange: Arc::clone(&exchange) });
        let mut request = request.map(received);
        let mut router = router(&mut request);
        async move {
            // A router is always ready.
            let Ok(response) = router.call(request).await;
            exchange.answer();
            let kept = |body| Body::new(Kept { body, _exchange: exchange });
            Ok::<Response, Infallible>(response.map(kept))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(seat.connections().head_timeout())
        .serve_connection(TokioIo::new(Worded::new(stream)), service);
    tokio::select! {
        // It has ended, for whatever reason; that is the client's to know.
        _ = connection => {}
        () = seat.closed() => {}
    }
}
