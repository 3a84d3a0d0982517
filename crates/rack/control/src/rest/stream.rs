//! Events as a stream (server-sent events).

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use farpool_http::{Asked, Refusal, events};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{Problems, Shared};

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Begin after the event with this id; the header `Last-Event-ID` means the same.
    after: Option<u64>,
}

/// Events, as an endless stream of server-sent events. Begins with the remembered events.
#[utoipa::path(get, path = "/v1/events", tag = "rack", params(EventsQuery,
        ("last-event-id" = Option<String>, Header, description = "Begin after this event")),
    responses((status = 200, description = "Events; each one's data is an Event", body = String,
        content_type = "text/event-stream"), Problems))]
pub(super) async fn events(
    State(app): Shared,
    Asked(query): Asked<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let core = app.core()?;
    let after = events::begin(&headers, query.after);
    let changes = core.changes();
    let read = move |after| {
        let core = Arc::clone(&core);
        // A controller that no longer leads sends no events.
        async move { core.events_after(after).await.ok() }
    };
    Ok(events::stream(changes, after, read))
}
