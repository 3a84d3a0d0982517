//! Records in the audit log who asked for changes, and who was refused.
//!
//! Invariants:
//! - A change begins once a line is on the disk that announces it, and is answered once its outcome
//!   is there. While the log cannot be written, changes are refused, and what only reads goes on.
//! - Nothing is announced of who may not ask for it: a stranger must not make the log grow.
//! - A change is recorded also if its sender has gone before the answer.
//! - Refusals are recorded a few at a time, and then as a number: a stranger can cause as many as
//!   it likes.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use farpool_api::ProblemKind;
use farpool_audit::{AuditLog, Entry, Stage};
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

/// What may have been announced of a change, among its request's extensions.
#[derive(Clone)]
struct Announced {
    log: Arc<AuditLog>,
    entry: Entry,
    /// The line's number; `None` if it could not be written, and nothing was done.
    line: Arc<OnceLock<Option<u64>>>,
}

/// Announces the changes that the router is asked for. To be added before all that refuses
/// requests: who comes as far as this may ask.
pub(crate) fn announce<S>(router: Router<S>, log: Option<&Arc<AuditLog>>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    if log.is_none() { router } else { router.layer(from_fn(begin)) }
}

async fn begin(request: Request, next: Next) -> Response {
    let Some(Announced { log, entry, line }) = request.extensions().get::<Announced>().cloned()
    else {
        return next.run(request).await;
    };
    let intended = on_disk(move || log.intend(entry)).await;
    // Once: a request passes here once.
    let _ = line.set(intended.as_ref().ok().copied());
    match intended {
        Ok(_) => next.run(request).await,
        Err(error) => {
            let detail = format!("the audit log cannot be written ({error}): nothing was changed");
            Refusal::new(ProblemKind::StoreFailed, detail).into_response()
        }
    }
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

async fn pass(State(recorder): State<Recorder>, mut request: Request, next: Next) -> Response {
    let is_change = is_change(request.method(), request.uri().path());
    let entry = recorder.entry(&request);
    if !is_change {
        let response = next.run(request).await;
        recorder.refused(entry, response.status()).await;
        return response;
    }
    let (log, line) = (Arc::clone(&recorder.log), Arc::default());
    let announced = Announced { log, entry: entry.clone(), line };
    let line = Arc::clone(&announced.line);
    request.extensions_mut().insert(announced);
    // Not dropped with the connection.
    let answered = tokio::spawn(async move {
        let response = next.run(request).await;
        let status = response.status();
        let told = Entry { outcome: status.as_u16(), ..entry.clone() };
        match line.get() {
            Some(Some(number)) => recorder.write(told, Stage::OutcomeOf(*number)).await,
            Some(None) => {}
            None if is_refusal(status) => recorder.refused(entry, status).await,
            None => recorder.write(told, Stage::Done).await,
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
            self.write(Entry { unix_ms, who, from, what, outcome: 0 }, Stage::Done).await;
        }
        if self.refusals.may_write(now) {
            self.write(Entry { who, outcome: status.as_u16(), ..entry }, Stage::Done).await;
        }
    }

    async fn write(&self, entry: Entry, stage: Stage) {
        let log = Arc::clone(&self.log);
        if let Err(error) = on_disk(move || log.record_all([(entry, stage)])).await {
            tracing::error!(%error, "the audit log cannot be written: changes are refused until it \
                can");
        }
    }
}

async fn on_disk<T: Send + 'static>(
    what: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(what)
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)))
}
