//! The door: HTTP on loopback, in the controller's words as far as a program needs them.
//!
//! `farpool run --pool` registers itself, wishes for memory, reports and waits for news, and ends; people look. What
//! only a controller can do is refused with a problem document that says so.

mod http;
mod metrics;
mod programs;
mod views;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::serve::ListenerExt;
use farpool_api::ProblemKind;
use tokio::runtime::Runtime;

use crate::core::Core;
use crate::{CollaborateError, CollaborateOptions};
use http::Refusal;

/// Largest body of a registration or a wish; a larger one is refused with 413. The largest there is has some
/// hundred bytes.
pub const BODY_LIMIT_BYTES: usize = 64 << 10;
/// Largest report: a program has few grants, each of which takes some hundred bytes.
pub const REPORT_LIMIT_BYTES: usize = 1 << 20;
/// Threads that answer: most requests wait for news, which takes none.
const THREADS: usize = 2;

/// What all handlers share.
#[derive(Debug)]
struct App {
    core: Arc<Core>,
    token: Option<String>,
}

type Shared = State<Arc<App>>;

/// The open door; closed when dropped.
#[derive(Debug)]
pub(crate) struct Door {
    address: SocketAddr,
    /// None once it is closed.
    runtime: Option<Runtime>,
}

impl Door {
    /// Answers from now on.
    pub(crate) fn open(
        options: &CollaborateOptions,
        core: &Arc<Core>,
    ) -> Result<Door, CollaborateError> {
        let address = options.door;
        let failed = |source| CollaborateError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("fp-collab-door")
            .enable_all()
            .build()?;
        let app = Arc::new(App { core: Arc::clone(core), token: options.token.clone() });
        {
            let _inside = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // Answers are small and waited for.
            let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
            runtime.spawn(axum::serve(listener, service(app)).into_future());
        }
        Ok(Door { address, runtime: Some(runtime) })
    }

    /// Where it is, with the port that was really taken.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Whoever waits for news sees its connection closed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

fn service(app: Arc<App>) -> Router {
    let reports = Router::new()
        .route("/upcall/v1/clients/{id}/report", post(programs::report))
        .layer(DefaultBodyLimit::max(REPORT_LIMIT_BYTES));
    Router::new()
        .route(
            "/v1/clients/{id}",
            get(programs::get_client).put(programs::put_client).delete(programs::delete_client),
        )
        .route("/v1/segments/{id}", put(programs::put_segment))
        .route("/v1/nodes", get(views::nodes))
        .route("/v1/events", get(views::events))
        .route("/v1/status", get(views::status))
        .route("/healthz", get(views::health))
        .route("/metrics", get(views::metrics))
        .layer(DefaultBodyLimit::max(BODY_LIMIT_BYTES))
        .merge(reports)
        .fallback(|| async { no_controller(ProblemKind::NotFound) })
        .method_not_allowed_fallback(|| async { no_controller(ProblemKind::MethodNotAllowed) })
        .layer(from_fn_with_state(Arc::clone(&app), authorize))
        .with_state(app)
}

fn no_controller(kind: ProblemKind) -> Refusal {
    let detail = "this node has no controller: it lends and borrows by itself, and answers only its own \
                  programs, /v1/nodes, /v1/status, /v1/events, /metrics and /healthz";
    Refusal::new(kind, detail)
}

/// Whether two texts are equal, in a time that depends on their lengths only.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differ) == 0
}

fn is_authorized(token: &str, headers: &HeaderMap) -> bool {
    let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let given = given.and_then(|value| value.split_at_checked(7));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(b"bearer ") && equal(given, token.as_bytes())
    })
}

async fn authorize(State(app): Shared, request: Request, next: Next) -> Response {
    let refused = app.token.as_ref().is_some_and(|token| !is_authorized(token, request.headers()));
    // Health says nothing that a stranger may not know.
    if refused && request.uri().path() != "/healthz" {
        let detail = "give the door's token: Authorization: Bearer TOKEN";
        let mut response = Refusal::new(ProblemKind::Unauthorized, detail).into_response();
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        return response;
    }
    next.run(request).await
}
