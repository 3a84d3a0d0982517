//! Requests from people.

use std::future::ready;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use farpool_api::Health;
use farpool_http::{Asked, Refusal, events, json};
use serde::Deserialize;

use super::Shared;

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
    farpool_http::metrics::answer(&super::metrics::registry(&app.core))
}

#[derive(Deserialize)]
pub(super) struct EventsQuery {
    after: Option<u64>,
}

pub(super) async fn events(
    State(app): Shared,
    Asked(query): Asked<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let after = events::begin(&headers, query.after);
    let changes = app.core.changes();
    let read = move |after| ready(Some(app.core.read(|node, _| node.events_after(after))));
    Ok(events::stream(changes, after, read))
}
