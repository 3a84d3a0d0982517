//! Turns requests into types: like axum's own extractors, but every error is a problem document.

use std::str::FromStr;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use farpool_api::ProblemKind;
use serde::de::DeserializeOwned;

use crate::Refusal;

fn bad(reason: impl Into<String>) -> Refusal {
    Refusal::new(ProblemKind::BadRequest, reason)
}

/// A JSON body. Its limit is the router's `DefaultBodyLimit`.
#[derive(Clone, Copy, Debug)]
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        if !request.headers().get(header::CONTENT_TYPE).is_some_and(is_json) {
            let detail = "send JSON with Content-Type: application/json";
            return Err(Refusal::new(ProblemKind::UnsupportedMediaType, detail));
        }
        let bytes =
            Bytes::from_request(request, state).await.map_err(|rejection| match &rejection {
                BytesRejection::FailedToBufferBody(_)
                    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE =>
                {
                    Refusal::new(ProblemKind::TooLarge, "the body is above the limit")
                }
                _ => bad(rejection.body_text()),
            })?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| bad(format!("the body: {error}")))
    }
}

fn is_json(value: &HeaderValue) -> bool {
    let text = value.to_str().unwrap_or_default();
    let kind = text.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

/// The only parameter of a path.
#[derive(Clone, Copy, Debug)]
pub struct Name<T>(pub T);

impl<T: FromStr + Send, S: Send + Sync> FromRequestParts<S> for Name<T>
where
    T::Err: std::fmt::Display,
{
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let bad = |reason: String| bad(format!("path: {reason}"));
        let text = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = text.map_err(|rejection| bad(rejection.body_text()))?;
        text.parse().map(Self).map_err(|error: T::Err| bad(error.to_string()))
    }
}

/// The query.
#[derive(Clone, Copy, Debug)]
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        query.map(|Query(query)| Self(query)).map_err(|rejection| bad(rejection.body_text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body as Content;

    /// axum's limit where a router sets none.
    const LIMIT_BYTES: usize = 2 << 20;

    /// Returns the number in a body, or the kind and the detail of the refusal.
    async fn read(kind: Option<&str>, body: Vec<u8>) -> Result<u64, (String, String)> {
        let mut request = Request::new(Content::from(body));
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, kind.parse().unwrap());
        }
        let read = Body::<u64>::from_request(request, &()).await;
        read.map(|Body(number)| number).map_err(|Refusal(problem)| (problem.kind, problem.detail))
    }

    fn refused(kind: ProblemKind, detail: &str) -> Result<u64, (String, String)> {
        Err((kind.urn(), detail.to_owned()))
    }

    #[tokio::test]
    async fn bodies_must_be_called_json() {
        for kind in ["application/json", "Application/JSON ; charset=utf-8", " application/json"] {
            assert_eq!(read(Some(kind), b"7".to_vec()).await, Ok(7), "{kind}");
        }
        let detail = "send JSON with Content-Type: application/json";
        let refused = refused(ProblemKind::UnsupportedMediaType, detail);
        for kind in ["", "text/plain", "text/json", "application/jsonl", "x;application/json"] {
            assert_eq!(read(Some(kind), b"7".to_vec()).await, refused, "{kind}");
        }
        assert_eq!(read(None, b"7".to_vec()).await, refused);
    }

    #[tokio::test]
    async fn bodies_must_be_json() {
        let json = Some("application/json");
        let cases: [(&[u8], &str); 4] = [
            (b"", "the body: EOF while parsing a value at line 1 column 0"),
            (b"{", "the body: invalid type: map, expected u64 at line 1 column 0"),
            (b"7 8", "the body: trailing characters at line 1 column 3"),
            (b"\xff", "the body: expected value at line 1 column 1"),
        ];
        for (body, detail) in cases {
            let read = read(json, body.to_vec()).await;
            assert_eq!(read, refused(ProblemKind::BadRequest, detail), "{body:?}");
        }
    }

    #[tokio::test]
    async fn bodies_have_a_limit() {
        let padded = |bytes: usize| {
            let mut body = vec![b' '; bytes];
            body[0] = b'7';
            read(Some("application/json"), body)
        };
        assert_eq!(padded(LIMIT_BYTES).await, Ok(7));
        let refused = refused(ProblemKind::TooLarge, "the body is above the limit");
        assert_eq!(padded(LIMIT_BYTES + 1).await, refused);
    }
}
