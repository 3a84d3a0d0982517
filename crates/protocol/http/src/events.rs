//! Events as an endless stream of server-sent events, read from a server that remembers some.
//!
//! Invariant: a reader gets the events in their order and each once, however slowly it reads. A
//! reader so slow that events are dropped meanwhile misses those.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use farpool_api::Event;
use tokio::sync::mpsc::{Sender, channel};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;

/// Messages buffered for a slow reader; then its stream waits, and later continues from the
/// remembered events.
const MESSAGES_AHEAD: usize = 64;
/// A comment is sent after this long without events, so that dead connections are detected.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Returns the id of the event to begin after: that of the header `Last-Event-ID`, which a browser
/// sends when it reconnects, else that of the query, else 0.
#[must_use]
pub fn begin(headers: &HeaderMap, asked: Option<u64>) -> u64 {
    let told = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    told.and_then(|text| text.parse().ok()).or(asked).unwrap_or(0)
}

/// Answers with the events after `after`. `read` returns the remembered events after an id, or None
/// to end the stream; it is called at the beginning and after each change.
pub fn stream<Read, Reading>(changes: watch::Receiver<u64>, after: u64, read: Read) -> Response
where
    Read: FnMut(u64) -> Reading + Send + 'static,
    Reading: Future<Output = Option<Vec<Event>>> + Send + 'static,
{
    let (sender, receiver) = channel(MESSAGES_AHEAD);
    tokio::spawn(feed(changes, after, read, sender));
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Sse::new(ReceiverStream::new(receiver)).keep_alive(keep_alive).into_response()
}

/// Sends events until the reader is gone or the server ends.
async fn feed<Read, Reading>(
    mut changes: watch::Receiver<u64>,
    mut after: u64,
    mut read: Read,
    to: Sender<Result<Message, Infallible>>,
) where
    Read: FnMut(u64) -> Reading,
    Reading: Future<Output = Option<Vec<Event>>>,
{
    loop {
        // Before reading, so that a change during the read wakes the task again.
        changes.mark_unchanged();
        let Some(events) = read(after).await else { return };
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

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::header;

    fn event(id: u64) -> Event {
        let (kind, subject, detail) = ("node-lost".into(), "n0".into(), "late\nby 3 s".into());
        Event { id, kind, subject, detail, uptime_ms: 5, time_unix_ms: 6 }
    }

    fn text_of(id: u64) -> String {
        format!(
            "id: {id}\nevent: node-lost\ndata: {{\"id\":{id},\"kind\":\"node-lost\",\
             \"subject\":\"n0\",\"detail\":\"late\\nby 3 s\",\"uptime_ms\":5,\
             \"time_unix_ms\":6}}\n\n"
        )
    }

    async fn text(response: Response) -> String {
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn events_are_told_as_they_come_and_once() {
        let (changed, changes) = watch::channel(0);
        let mut reads = 0;
        let read = move |after| {
            reads += 1;
            // One more event at each read, until the server ends.
            let events = (reads < 4).then(|| (after + 1..=reads).map(event).collect());
            changed.send_replace(reads);
            std::future::ready(events)
        };
        let response = stream(changes, 0, read);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        assert_eq!(text(response).await, [1, 2, 3].map(text_of).concat());
    }

    #[tokio::test]
    async fn a_stream_begins_where_it_is_asked_to_and_ends_with_its_server() {
        let (changed, changes) = watch::channel(0);
        // More than are buffered for a slow reader.
        let last = 3 * MESSAGES_AHEAD as u64;
        let read = move |after| std::future::ready(Some((after + 1..=last).map(event).collect()));
        let response = stream(changes, 7, read);
        drop(changed);
        assert_eq!(text(response).await, (8..=last).map(text_of).collect::<String>());
    }

    #[test]
    fn the_header_goes_before_the_query() {
        let mut headers = HeaderMap::new();
        assert_eq!(begin(&headers, None), 0);
        assert_eq!(begin(&headers, Some(3)), 3);
        headers.insert("last-event-id", "5".parse().unwrap());
        assert_eq!((begin(&headers, None), begin(&headers, Some(3))), (5, 5));
        for no_id in ["", "x", "-1", "5 6"] {
            headers.insert("last-event-id", no_id.parse().unwrap());
            assert_eq!(begin(&headers, Some(3)), 3, "{no_id}");
        }
    }
}
