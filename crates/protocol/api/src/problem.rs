//! Refusals as RFC 9457 problem details.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What every refusal has in common: `type` is `urn:farpool:problem:` and one of these.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProblemKind {
    /// The request is not what the interface defines.
    BadRequest,
    /// No token, or a wrong one.
    Unauthorized,
    /// No such thing.
    NotFound,
    /// The path does not have this method.
    MethodNotAllowed,
    /// None of the formats asked for exists.
    NotAcceptable,
    /// It contradicts what stands.
    Conflict,
    /// `If-Match` names another version.
    PreconditionFailed,
    /// The body is above the limit.
    TooLarge,
    /// The body is not JSON by its header.
    UnsupportedMediaType,
    /// Understood, and wrong in content.
    Invalid,
    /// The rack has no memory, port, circuit or bandwidth left for it: a conflict with what stands,
    /// and no fault of the controller's, so 409 and not 507.
    NoRoom,
    /// Another controller leads; `leader` says which, if known.
    NotLeader,
    /// The store does not answer; nothing was acknowledged.
    StoreFailed,
    /// The controller is ending.
    Ending,
}

impl ProblemKind {
    /// Status, last part of the type, title.
    fn parts(self) -> (u16, &'static str, &'static str) {
        match self {
            Self::BadRequest => (400, "bad-request", "The request is malformed"),
            Self::Unauthorized => (401, "unauthorized", "A valid token is needed"),
            Self::NotFound => (404, "not-found", "There is no such thing"),
            Self::MethodNotAllowed => (405, "method-not-allowed", "The path has no such method"),
            Self::NotAcceptable => (406, "not-acceptable", "There is no such format"),
            Self::Conflict => (409, "conflict", "It contradicts what stands"),
            Self::PreconditionFailed => (412, "precondition-failed", "It has changed meanwhile"),
            Self::TooLarge => (413, "too-large", "The body is too large"),
            Self::UnsupportedMediaType => (415, "unsupported-media-type", "The body is not JSON"),
            Self::Invalid => (422, "invalid", "The request cannot be carried out"),
            Self::NoRoom => (409, "no-room", "The rack has no room for it"),
            Self::NotLeader => (503, "not-leader", "Another controller leads"),
            Self::StoreFailed => (503, "store-failed", "The store does not answer"),
            Self::Ending => (503, "ending", "The controller is ending"),
        }
    }

    /// The HTTP status.
    #[must_use]
    pub fn status(self) -> u16 {
        self.parts().0
    }

    /// The problem's type.
    #[must_use]
    pub fn urn(self) -> String {
        format!("urn:farpool:problem:{}", self.parts().1)
    }
}

/// A refusal. Nothing has changed on the controller then. Fields seldom used are boxed, so that
/// results stay small.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Problem {
    /// A URN that names the kind of problem.
    #[serde(rename = "type")]
    pub kind: String,
    /// The kind in words.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub title: Box<str>,
    /// The HTTP status.
    pub status: u16,
    /// This case in words.
    pub detail: String,
    /// Address of the leading controller, in `not-leader`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub leader: Option<Box<str>>,
    /// What the request did not match, in `precondition-failed`: the tag that stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub etag: Option<Box<str>>,
    /// The limit that was passed, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

impl Problem {
    /// A problem of a kind.
    #[must_use]
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self {
            kind: kind.urn(),
            title: kind.parts().2.into(),
            status: kind.status(),
            detail: detail.into(),
            leader: None,
            etag: None,
            limit: None,
        }
    }

    /// Whether it is of this kind.
    #[must_use]
    pub fn is(&self, kind: ProblemKind) -> bool {
        self.kind == kind.urn()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.title, self.status, self.detail)
    }
}

impl std::error::Error for Problem {}
