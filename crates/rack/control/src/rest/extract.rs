//! Requests into types, and refusals into answers: like axum's own, but every error is a problem
//! document.

use std::str::FromStr;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use farpool_api::{Problem, ProblemKind};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) const PROBLEM_TYPE: &str = "application/problem+json";

/// A problem as an answer.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub Problem);

impl Refusal {
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self(Problem::new(kind, detail))
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, PROBLEM_TYPE)], body).into_response()
    }
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// A JSON body.
pub(crate) struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let is_json = |value: &HeaderValue| {
            let text = value.to_str().unwrap_or_default();
            let kind = text.split(';').next().unwrap_or_default().trim();
            kind.eq_ignore_ascii_case("application/json")
        };
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
                _ => Refusal::new(ProblemKind::BadRequest, rejection.body_text()),
            })?;
        let bad = |error: serde_json::Error| {
            Refusal::new(ProblemKind::BadRequest, format!("the body: {error}"))
        };
        serde_json::from_slice(&bytes).map(Self).map_err(bad)
    }
}

/// The one parameter of a path.
pub(crate) struct Name<T>(pub T);

impl<T: FromStr + Send, S: Send + Sync> FromRequestParts<S> for Name<T>
where
    T::Err: std::fmt::Display,
{
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let bad = |reason: String| Refusal::new(ProblemKind::BadRequest, format!("path: {reason}"));
        let text = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = text.map_err(|rejection| bad(rejection.body_text()))?;
        text.parse().map(Self).map_err(|error: T::Err| bad(error.to_string()))
    }
}

/// The query.
pub(crate) struct Asked<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let query = Query::<T>::from_request_parts(parts, state).await;
        let bad = |reason: String| Refusal::new(ProblemKind::BadRequest, reason);
        query.map(|Query(query)| Self(query)).map_err(|rejection| bad(rejection.body_text()))
    }
}

/// The revision in `If-Match`; `*` and no header mean any.
pub(crate) fn if_match(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let number = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    match number.and_then(|number| number.parse().ok()) {
        Some(revision) => Ok(Some(revision)),
        None => {
            // A tag that was never given matches nothing.
            let detail = format!("{text:?} is no tag of a segment");
            Err(Refusal::new(ProblemKind::PreconditionFailed, detail))
        }
    }
}
