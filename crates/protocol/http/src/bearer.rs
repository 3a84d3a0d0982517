//! The bearer check (RFC 6750): requests without the token get 401.
//!
//! Invariant: the time of the comparison depends on lengths only, so that a token cannot be guessed
//! byte by byte.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use farpool_api::ProblemKind;
use subtle::ConstantTimeEq;

use crate::Refusal;

/// The one path that needs no token: it reveals nothing secret, and load balancers have no token.
const OPEN_PATH: &str = "/healthz";
/// What precedes the token, in letters of either case.
const SCHEME: &[u8] = b"bearer ";

/// The token that requests must present.
#[derive(Clone)]
struct Guard {
    token: Arc<str>,
    owner: &'static str,
}

/// True if a text can be a token: an empty one protects nothing, and characters other than the
/// visible ones of ASCII do not fit a header.
#[must_use]
pub fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Refuses requests without the token of `owner`, except those for `/healthz`. If `token` is None,
/// all requests pass. Routes added afterwards are not guarded.
pub fn guard<S>(router: Router<S>, token: Option<&str>, owner: &'static str) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let Some(token) = token else { return router };
    router.layer(from_fn_with_state(Guard { token: token.into(), owner }, check))
}

async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    if request.uri().path() == OPEN_PATH || is_authorized(&guard.token, request.headers()) {
        return next.run(request).await;
    }
    let detail = format!("give the {}'s token: Authorization: Bearer TOKEN", guard.owner);
    let mut response = Refusal::new(ProblemKind::Unauthorized, detail).into_response();
    let scheme = HeaderValue::from_static("Bearer");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    response
}

fn is_authorized(token: &str, headers: &HeaderMap) -> bool {
    let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let given = given.and_then(|value| value.split_at_checked(SCHEME.len()));
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(SCHEME) && bool::from(given.ct_eq(token.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_itself_is_the_token() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            is_authorized("secret", &headers)
        };
        assert!(with("Bearer secret") && with("bearer secret") && with("BEARER secret"));
        let wrong = [
            "",
            "secret",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Bearer Secret",
            "Bearer  secret",
            "Bearer\tsecret",
            "Bearersecret",
            "Basic secret",
            "Basic  secret",
        ];
        for wrong in wrong {
            assert!(!with(wrong), "{wrong}");
        }
        assert!(!is_authorized("secret", &HeaderMap::new()));
    }

    #[test]
    fn a_header_need_not_be_text() {
        let mut headers = HeaderMap::new();
        let value = HeaderValue::from_bytes(b"Bearer secre\xff").unwrap();
        headers.insert(header::AUTHORIZATION, value);
        assert!(!is_authorized("secret", &headers));
    }

    #[test]
    fn a_token_is_one_word_of_visible_ascii() {
        assert!(is_token("x") && is_token("!~secret/+=._-"));
        for wrong in ["", " ", "a b", "secret\n", "geheimnis\u{e4}", "\u{7f}"] {
            assert!(!is_token(wrong), "{wrong:?}");
        }
    }
}
