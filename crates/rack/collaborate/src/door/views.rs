//! What people look at.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use farpool_api::{Event, Health, ProblemKind};
use serde::Deserialize;
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::ReceiverStream;

use super::http::{Refusal, json};
use super::{App, Shared};

/// Messages ready for a slow reader; then its stream waits, and reads on from what is remembered.
const MESSAGES_AHEAD: usize = 64;
/// A comment is sent after this long without events, so that the dead are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(super) async fn nodes(State(app): Shared) -> Response {
    json(StatusCode::OK, &crate::status::nodes(&app.core))
}

pub(super) async fn status(State(app): Shared) -> Response {
    json(StatusCode::OK, &crate::status::status(&app.core))
}

pub(super) async fn health() -> Response {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    // Each node leads itself.
    json(StatusCode::OK, &Health { leader: true, leader_address: None, version })
}

pub(super) async fn metrics(State(app): Shared) -> Response {
    let text = super::metrics::text(&app.core);
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

#[derive(Deserialize)]
pub(super) struct EventsQuery {
    after: Option<u64>,
}

pub(super) async fn events(
    State(app): Shared,
    query: Result<Query<EventsQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let bad = |error: axum::extract::rejection::QueryRejection| {
        Refusal::new(ProblemKind::BadRequest, error.body_text())
    };
    let Query(query) = query.map_err(bad)?;
    let told = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let after = told.and_then(|text| text.parse().ok()).or(query.after).unwrap_or(0);
    let (sender, receiver) = channel(MESSAGES_AHEAD);
    tokio::spawn(feed(app, after, sender));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(ReceiverStream::new(receiver)).keep_alive(keep_alive).into_response())
}

/// Sends events until the reader is gone or the node ends.
async fn feed(app: Arc<App>, mut after: u64, to: Sender<Result<Message, Infallible>>) {
    let mut changes = app.core.changes();
    loop {
        changes.mark_unchanged();
        for event in app.core.read(|node, _| node.events_after(after)) {
            after = event.id;
            if to.send(Ok(message(&event))).await.is_err() {
                return;
            }
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = to.closed() => return,
        }
    }
}

fn message(event: &Event) -> Message {
    let data = serde_json::to_string(event).unwrap_or_default();
    Message::default().id(event.id.to_string()).event(&event.kind).data(data)
}
