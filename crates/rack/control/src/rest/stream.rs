//! Events as a stream (server-sent events).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use farpool_api::Event;
use serde::Deserialize;
use tokio::sync::mpsc::{Sender, channel};
use tokio_stream::wrappers::ReceiverStream;
use utoipa::IntoParams;

use super::extract::Asked;
use super::{Problems, Refusal, Shared};
use crate::core::Core;

/// Messages ready for a slow reader; then its stream waits, and reads on from the ring.
const MESSAGES_AHEAD: usize = 64;
/// A comment is sent after this long without events, so that the dead are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct EventsQuery {
    /// Begin after the event with this id; the header `Last-Event-ID` says the same.
    after: Option<u64>,
}

/// What happens, as server-sent events without end. Begins with the events that are remembered.
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
    let header = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let header = header.and_then(|text| text.parse().ok());
    let after = header.or(query.after).unwrap_or(0);
    let (sender, receiver) = channel(MESSAGES_AHEAD);
    tokio::spawn(feed(core, after, sender));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(ReceiverStream::new(receiver)).keep_alive(keep_alive).into_response())
}

/// Sends events until the reader is gone or the controller ends.
async fn feed(core: Arc<Core>, mut after: u64, to: Sender<Result<Message, Infallible>>) {
    let mut changes = core.changes();
    loop {
        changes.mark_unchanged();
        let Ok(events) = core.events_after(after).await else { return };
        for event in events {
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
