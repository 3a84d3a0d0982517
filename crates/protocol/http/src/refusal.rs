//! Refusals and JSON as answers.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use farpool_api::{Problem, ProblemKind};
use serde::Serialize;

/// The content type of a problem document.
pub const PROBLEM_TYPE: &str = "application/problem+json";

/// A problem as an answer.
#[derive(Clone, Debug)]
pub struct Refusal(pub Problem);

impl Refusal {
    /// Creates a refusal of a kind.
    #[must_use]
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
        let mut response = encoded(status, PROBLEM_TYPE, &self.0);
        if let Some(after_ms) = self.0.retry_after_ms {
            let seconds = HeaderValue::from(after_ms.get().div_ceil(1000));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        response
    }
}

/// Builds a JSON answer.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    encoded(status, "application/json", body)
}

fn encoded(status: StatusCode, kind: &'static str, body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, kind)], body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn parts(response: Response) -> (StatusCode, String, String) {
        let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
        let status = response.status();
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn a_refusal_is_a_problem_document() {
        let refusal = Refusal::new(ProblemKind::NoRoom, "full");
        let body = "{\"type\":\"urn:farpool:problem:no-room\",\"title\":\"The rack has no room for \
                    it\",\"status\":409,\"detail\":\"full\"}";
        let expected = (StatusCode::CONFLICT, PROBLEM_TYPE.to_owned(), body.to_owned());
        assert_eq!(parts(refusal.into_response()).await, expected);
    }

    #[tokio::test]
    async fn a_status_that_does_not_exist_becomes_500() {
        let problem = Problem { status: 7, ..Problem::new(ProblemKind::Conflict, "") };
        let response = Refusal::from(problem).into_response();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }

    #[tokio::test]
    async fn json_says_that_it_is_json() {
        let expected = (StatusCode::CREATED, "application/json".to_owned(), "[1,2]".to_owned());
        assert_eq!(parts(json(StatusCode::CREATED, &[1, 2])).await, expected);
    }
}
