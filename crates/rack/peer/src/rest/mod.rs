//! The REST interface: HTTP, on loopback unless more is permitted; the part of the controller's
//! interface that a program needs.
//!
//! `farpool run --pool` registers itself, wishes for memory, reports and waits for changes, and
//! ends; people read the state. Requests that only a controller can serve are refused with a
//! problem document that says so.

mod metrics;
mod programs;
mod views;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post, put};
use farpool_api::ProblemKind;
use farpool_http::serve::{Connections, Limits};
use farpool_http::{Protection, Refusal};
use tokio::runtime::Runtime;

use crate::core::Core;
use crate::{CollaborateError, CollaborateOptions};

/// Largest body of a registration or a wish, in bytes; a larger one is refused with 413. A usual
/// one has a few hundred bytes.
pub const BODY_LIMIT_BYTES: usize = 64 << 10;
/// Largest body of a report, in bytes: a program has few grants, each of which takes a few hundred
/// bytes.
pub const REPORT_LIMIT_BYTES: usize = 1 << 20;
/// Threads that answer: most requests wait for changes, which takes no thread.
const THREADS: usize = 2;

/// What all handlers share.
#[derive(Debug)]
struct App {
    core: Arc<Core>,
}

type Shared = State<Arc<App>>;

/// The REST interface while it is served; closed when dropped.
#[derive(Debug)]
pub(crate) struct Rest {
    address: SocketAddr,
    /// None once it is closed.
    runtime: Option<Runtime>,
}

impl Rest {
    /// Opens the interface, which answers from then on.
    pub(crate) fn open(
        options: &CollaborateOptions,
        core: &Arc<Core>,
    ) -> Result<Rest, CollaborateError> {
        let address = options.rest;
        let failed = |source| CollaborateError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("fp-collab-rest")
            .enable_all()
            .build()?;
        let app = Arc::new(App { core: Arc::clone(core) });
        let (tls, service) = (options.rest_tls()?, service(app, &options.protection));
        {
            let _inside = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let connections = Connections::new(Limits::raised());
            if let Some(tls) = &tls {
                runtime.spawn(Arc::clone(tls).watch());
            }
            runtime.spawn(farpool_http::serve::serve(listener, service, connections, tls));
        }
        Ok(Rest { address, runtime: Some(runtime) })
    }

    /// Returns its address, with the port that was actually taken.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        // Clients that wait for changes see their connections closed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

/// Returns the routes, protected. With a token they answer only requests that present it, and
/// `/healthz`; with certificates, what the role of each may ask.
fn service(app: Arc<App>, protection: &Protection) -> Router {
    let reports = Router::new()
        .route("/upcall/v1/clients/{id}/report", post(programs::report))
        .layer(DefaultBodyLimit::max(REPORT_LIMIT_BYTES));
    let router = Router::new()
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
        .method_not_allowed_fallback(|| async { no_controller(ProblemKind::MethodNotAllowed) });
    protection.guard(router, "node", &[]).with_state(app)
}

fn no_controller(kind: ProblemKind) -> Refusal {
    let detail = "this node has no controller: it lends and borrows by itself, and answers only \
                  its own programs, /v1/nodes, /v1/status, /v1/events, /metrics and /healthz";
    Refusal::new(kind, detail)
}
