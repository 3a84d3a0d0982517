//! Refusals as RFC 9457 problem details.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

/// Kinds of refusals; the problem's `type` is `urn:farpool:problem:` and one of these.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProblemKind {
    /// The request is malformed.
    BadRequest,
    /// No token, or a wrong one.
    Unauthorized,
    /// The sender may not ask this.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// The path does not support this method.
    MethodNotAllowed,
    /// None of the formats requested is available.
    NotAcceptable,
    /// The request contradicts the present state.
    Conflict,
    /// Another daemon has this name, and reports.
    NameInUse,
    /// `If-Match` names another version.
    PreconditionFailed,
    /// The request did not arrive in time.
    RequestTimeout,
    /// The body is above the limit.
    TooLarge,
    /// The path is above the limit.
    UriTooLong,
    /// The header fields are above the limit.
    HeadTooLarge,
    /// The request is for a host that is not this server.
    Misdirected,
    /// The header says that the body is not JSON.
    UnsupportedMediaType,
    /// The request is well-formed, but its content is invalid.
    Invalid,
    /// The rack has no memory, port, circuit or bandwidth left for it: a conflict with the present
    /// state and no failure of the controller, so 409 and not 507.
    NoRoom,
    /// Another controller leads; `leader` is its address, if known.
    NotLeader,
    /// The store does not respond; nothing was acknowledged.
    StoreFailed,
    /// The controller is shutting down.
    Ending,
}

impl ProblemKind {
    /// Returns the status, the last part of the type, and the title.
    fn parts(self) -> (u16, &'static str, &'static str) {
        match self {
            Self::BadRequest => (400, "bad-request", "The request is malformed"),
            Self::Unauthorized => (401, "unauthorized", "A valid token is needed"),
            Self::Forbidden => (403, "forbidden", "The sender may not ask this"),
            Self::NotFound => (404, "not-found", "There is no such thing"),
            Self::MethodNotAllowed => (405, "method-not-allowed", "The path has no such method"),
            Self::NotAcceptable => (406, "not-acceptable", "There is no such format"),
            Self::Conflict => (409, "conflict", "It contradicts what stands"),
            Self::NameInUse => (409, "name-in-use", "Another daemon has this name"),
            Self::PreconditionFailed => (412, "precondition-failed", "It has changed meanwhile"),
            Self::RequestTimeout => (408, "request-timeout", "The request took too long"),
            Self::TooLarge => (413, "too-large", "The body is too large"),
            Self::UriTooLong => (414, "uri-too-long", "The path is too long"),
            Self::HeadTooLarge => (431, "head-too-large", "The header is too large"),
            Self::Misdirected => (421, "misdirected", "This is another server"),
            Self::UnsupportedMediaType => (415, "unsupported-media-type", "The body is not JSON"),
            Self::Invalid => (422, "invalid", "The request cannot be carried out"),
            Self::NoRoom => (409, "no-room", "The rack has no room for it"),
            Self::NotLeader => (503, "not-leader", "Another controller leads"),
            Self::StoreFailed => (503, "store-failed", "The store does not answer"),
            Self::Ending => (503, "ending", "The controller is ending"),
        }
    }

    /// Returns the HTTP status.
    #[must_use]
    pub fn status(self) -> u16 {
        self.parts().0
    }

    /// Returns the problem's type.
    #[must_use]
    pub fn urn(self) -> String {
        format!("urn:farpool:problem:{}", self.parts().1)
    }
}

/// A refusal. Nothing has changed on the controller. Fields seldom used are boxed, so that results
/// stay small.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Problem {
    /// A URN that names the kind of problem.
    #[serde(rename = "type")]
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub kind: Box<str>,
    /// The kind in words.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub title: Box<str>,
    /// The HTTP status.
    pub status: u16,
    /// This case in words.
    pub detail: String,
    /// With `not-leader`: the leading controller's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub leader: Option<Box<str>>,
    /// With `precondition-failed`: the current tag, which the request did not match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub etag: Option<Box<str>>,
    /// The limit that was exceeded, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// With `no-room`: memory is on its way back, so asking again after this time may succeed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<u32>))]
    pub retry_after_ms: Option<NonZeroU32>,
    /// With `no-room`: the bandwidth that the tenant may still be granted, in each direction, of
    /// which more was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<u64>))]
    pub rate_left_bytes_per_s: Option<Box<u64>>,
}

impl Problem {
    /// Creates a problem of a kind.
    #[must_use]
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self {
            kind: kind.urn().into(),
            title: kind.parts().2.into(),
            status: kind.status(),
            detail: detail.into(),
            leader: None,
            etag: None,
            limit: None,
            retry_after_ms: None,
            rate_left_bytes_per_s: None,
        }
    }

    /// True if it is of this kind.
    #[must_use]
    pub fn is(&self, kind: ProblemKind) -> bool {
        *self.kind == *kind.urn()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.title, self.status, self.detail)
    }
}

impl std::error::Error for Problem {}
