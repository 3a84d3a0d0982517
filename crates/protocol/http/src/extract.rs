//! Turns requests into types: like axum's own extractors, but every error is a problem document.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use farpool_api::ProblemKind;
use serde::de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::Refusal;

/// Longest time that a body may take to arrive; then the request is refused with 408, so that a
/// half-sent one does not keep its connection.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

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
        let read = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        let Ok(read) = read else {
            let detail = format!("the body took more than {} s", BODY_TIMEOUT.as_secs());
            return Err(Refusal::new(ProblemKind::RequestTimeout, detail));
        };
        let bytes = read.map_err(|rejection| match &rejection {
            BytesRejection::FailedToBufferBody(_)
                if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE =>
            {
                Refusal::new(ProblemKind::TooLarge, "the body is above the limit")
            }
            _ => bad(rejection.body_text()),
        })?;
        parsed(&bytes).map(Self).map_err(|error| bad(format!("the body: {error}")))
    }
}

pub(crate) fn is_json(value: &HeaderValue) -> bool {
    let text = value.to_str().unwrap_or_default();
    let kind = text.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

/// Reads JSON. To JSON, and to a schema, 2.0 is the same number as 2: it is read as an integer
/// where one is expected.
fn parsed<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    match serde_json::from_slice(bytes) {
        Err(error) if error.to_string().contains(FLOAT) => {
            let Ok(Exact(value)) = serde_json::from_slice(bytes) else { return Err(error) };
            T::deserialize(value)
        }
        read => read,
    }
}

/// What serde says of a number with a fraction where an integer is expected.
const FLOAT: &str = "floating point";

/// A JSON value in which whole numbers are integers, however they are written. A key that is there
/// twice is an error, as it is for the types of the interface.
struct Exact(Value);

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ExactVisitor)
    }
}

struct ExactVisitor;

impl<'de> Visitor<'de> for ExactVisitor {
    type Value = Exact;

    fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Exact, E> {
        Ok(Exact(Value::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Exact, E> {
        Ok(Exact(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Exact, E> {
        Ok(Exact(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Exact, E> {
        Ok(Exact(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Exact, E> {
        // Printed without a fraction, a whole number is an integer; a larger one than fits is none.
        let whole = format!("{value:.0}").parse::<u64>().ok();
        Ok(Exact(whole.filter(|_| value.fract() == 0.0).map_or_else(|| value.into(), Into::into)))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Exact, E> {
        Ok(Exact(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Exact, A::Error> {
        let mut values = Vec::new();
        while let Some(Exact(value)) = all.next_element()? {
            values.push(value);
        }
        Ok(Exact(Value::Array(values)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Exact, A::Error> {
        let mut map = serde_json::Map::new();
        while let Some((key, Exact(value))) = all.next_entry::<String, Exact>()? {
            if map.insert(key.clone(), value).is_some() {
                return Err(Error::custom(format!("duplicate field `{key}`")));
            }
        }
        Ok(Exact(Value::Object(map)))
    }
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
        read.map(|Body(number)| number)
            .map_err(|Refusal(problem)| (problem.kind.into(), problem.detail))
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

    #[test]
    fn whole_numbers_are_integers_however_they_are_written() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Pair {
            a: u64,
            b: Option<String>,
        }
        let read = |text: &str| parsed::<Pair>(text.as_bytes()).ok();
        let of = |a| Some(Pair { a, b: None });
        assert_eq!(read(r#"{"a":2.0}"#), of(2));
        assert_eq!(read(r#"{"a":1e3}"#), of(1000));
        assert_eq!(read(r#"{"a":18446744073709551615}"#), of(u64::MAX));
        for wrong in [
            r#"{"a":2.5}"#,
            r#"{"a":-2.0}"#,
            r#"{"a":1e30}"#,
            r#"{"a":2.0,"a":3}"#,
            r#"{"a":2.0,"b":null,"b":"x"}"#,
            r#"{"a":"2.0"}"#,
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
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
