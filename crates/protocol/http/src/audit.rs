//! Records in the audit log who asked for changes, and who was refused.
//!
//! Invariants:
//! - A change is answered once its entry is on the disk. While the log cannot be written, changes
//!   are refused, and what only reads goes on.
//! - A change is recorded also if its sender has gone before the answer.
//! - Refusals are recorded a few at a time, and then as a number: a stranger can cause as many as
//!   it likes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use farpool_api::ProblemKind;
use farpool_audit::{AuditLog, Entry};
use farpool_identity::Identity;
use farpool_kernel::{LogRate, unix_ms};

use crate::Refusal;
use crate::access::is_change;

/// The address that a request came from, among its extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct From(pub(crate) SocketAddr);

/// What the middleware has.
#[derive(Clone)]
struct Recorder {
    log: Arc<AuditLog>,
    has_token: bool,
    refusals: Arc<LogRate>,
    began: Instant,
}

/// Records what the router is asked. Routes added afterwards are not recorded.
pub(crate) fn record<S>(
    router: Router<S>,
    log: Option<&Arc<AuditLog>>,
    has_token: bool,
) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let Some(log) = log else { return router };
    let recorder = Recorder {
        log: Arc::clone(log),
        has_token,
        refusals: Arc::default(),
        began: Instant::now(),
    };
    router.layer(from_fn_with_state(recorder, pass))
}

async fn pass(State(recorder): State<Recorder>, request: Request, next: Next) -> Response {
    let is_change = is_change(request.method(), request.uri().path());
    let entry = recorder.entry(&request);
    if !is_change {
        let response = next.run(request).await;
        recorder.refused(entry, response.status()).await;
        return response;
    }
    let log = Arc::clone(&recorder.log);
    if let Err(error) = on_disk(move || log.is_ready()).await {
        let detail = format!("the audit log cannot be written ({error}): nothing was changed");
        return Refusal::new(ProblemKind::StoreFailed, detail).into_response();
    }
    // Not dropped with the connection.
    let answered = tokio::spawn(async move {
        let response = next.run(request).await;
        let status = response.status();
        match is_refusal(status) {
            true => recorder.refused(entry, status).await,
            false => recorder.write(Entry { outcome: status.as_u16(), ..entry }).await,
        }
        response
    });
    answered.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// The sender is not known, may not ask this, or asks in another's name.
fn is_refusal(status: StatusCode) -> bool {
    let kinds = [ProblemKind::Unauthorized, ProblemKind::Forbidden, ProblemKind::Misdirected];
    kinds.iter().any(|kind| kind.status() == status.as_u16())
}

impl Recorder {
    fn entry(&self, request: &Request) -> Entry {
        let identity = request.extensions().get::<Identity>();
        let bearer = if self.has_token { "bearer of the token" } else { "anybody" };
        let from = request.extensions().get::<From>();
        Entry {
            unix_ms: unix_ms(),
            who: identity.map_or_else(|| bearer.to_owned(), Identity::to_string),
            from: from.map(|From(address)| address.to_string()),
            what: format!("{} {}", request.method(), request.uri().path()),
            outcome: 0,
        }
    }

    /// Records a refusal, if it is one.
    async fn refused(&self, entry: Entry, status: StatusCode) {
        if !is_refusal(status) {
            return;
        }
        let (now, unix_ms) = (self.began.elapsed(), entry.unix_ms);
        // Who is refused has not shown the token, or was refused before it was looked at.
        let who = if self.has_token { "nobody known".to_owned() } else { entry.who };
        if let Some((more, seconds)) = self.refusals.more(now) {
            let what = format!("{more} more requests were refused in the last {seconds} s");
            let (who, from) = ("farpool".to_owned(), None);
            self.write(Entry { unix_ms, who, from, what, outcome: 0 }).await;
        }
        if self.refusals.may_write(now) {
            self.write(Entry { who, outcome: status.as_u16(), ..entry }).await;
        }
    }

    async fn write(&self, entry: Entry) {
        let log = Arc::clone(&self.log);
        if let Err(error) = on_disk(move || log.record(entry)).await {
            tracing::error!(%error, "the audit log cannot be written: changes are refused until it \
                can");
        }
    }
}

async fn on_disk(
    what: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> std::io::Result<()> {
    tokio::task::spawn_blocking(what)
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
}
