//! Who may ask: requests that a stranger's web page makes a browser send are refused.
//!
//! A server on loopback may have no token, and a browser on the same machine reaches it.
//! Invariants:
//! - A request whose `Origin` is not the host that it asks is refused: no page of another site.
//! - Without a proof, a `Host` that is neither an address, `localhost` nor a name of this server is
//!   refused: a stranger's name can be made to mean 127.0.0.1 (DNS rebinding).
//!   With a certificate that name would not be in it, and the browser would refuse the server.
//! - Without a token, a change must bear what a page cannot send unasked: a JSON body, or the
//!   header [`REQUEST_HEADER`]. With one, the token is that; a certificate is not, since a browser
//!   that has one shows it unasked.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use farpool_api::{ProblemKind, REQUEST_HEADER};

use crate::Refusal;
use crate::extract::is_json;

/// What shows that a request is meant, besides what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Nothing: the server is on loopback.
    Nothing,
    /// The token.
    Token,
    /// A certificate, on both sides.
    Certificate,
}

/// What a server knows of itself.
#[derive(Clone)]
struct Guard {
    proof: Proof,
    /// Further names under which it is asked, without ports.
    names: Arc<[String]>,
}

/// Refuses what a stranger's web page may have caused. `names` are hosts, or URLs with one, by
/// which this server is known besides its addresses. Routes added afterwards are not guarded.
pub fn guard<S>(router: Router<S>, proof: Proof, names: &[String]) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let names = names.iter().map(|name| {
        let name = name.split_once("://").map_or(name.as_str(), |(_, rest)| rest);
        host_of(name.split('/').next().unwrap_or_default()).to_owned()
    });
    router.layer(from_fn_with_state(Guard { proof, names: names.collect() }, check))
}

async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match refusal(&guard, request.method(), request.headers()) {
        None => next.run(request).await,
        Some(refusal) => refusal.into_response(),
    }
}

fn refusal(guard: &Guard, method: &Method, headers: &HeaderMap) -> Option<Refusal> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(header::HOST);
    if let Some(origin) = text(header::ORIGIN) {
        let asked = origin.split_once("://").map(|(_, asked)| asked);
        if asked.is_none() || asked != host {
            let detail = "a page of another site may not ask this server";
            return Some(Refusal::new(ProblemKind::Forbidden, detail));
        }
    }
    if guard.proof == Proof::Token {
        return None;
    }
    let is_strange = |host: &&str| guard.proof == Proof::Nothing && !is_own(guard, host);
    if let Some(host) = host.map(host_of).filter(is_strange) {
        let detail = format!(
            "this server is not known as {host:?}; ask an address or localhost, or let it \
             advertise that name"
        );
        return Some(Refusal::new(ProblemKind::Misdirected, detail));
    }
    let is_change = !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let is_meant = headers.contains_key(REQUEST_HEADER)
        || headers.get(header::CONTENT_TYPE).is_some_and(is_json);
    (is_change && !is_meant).then(|| {
        let detail = format!(
            "send a change with Content-Type: application/json, or with the header \
             {REQUEST_HEADER}: 1 if it has no body"
        );
        Refusal::new(ProblemKind::Forbidden, detail)
    })
}

/// Returns an authority without its port.
fn host_of(authority: &str) -> &str {
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    }
}

fn is_own(guard: &Guard, host: &str) -> bool {
    host.parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || guard.names.iter().any(|name| name.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(proof: Proof, method: Method, pairs: &[(&'static str, &str)]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, value.parse().unwrap());
        }
        let names = ["rack".to_owned()].into();
        refusal(&Guard { proof, names }, &method, &headers).map_or(200, |no| no.0.status)
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let own = "127.0.0.1:7080";
        for proof in [Proof::Nothing, Proof::Token, Proof::Certificate] {
            let asks = |origin| status(proof, Method::GET, &[("host", own), ("origin", origin)]);
            assert_eq!(asks("http://127.0.0.1:7080"), 200);
            for other in ["http://evil.example", "null", "http://127.0.0.1:8080", "\u{e9}", ""] {
                assert_eq!(asks(other), 403, "{other}");
            }
        }
    }

    #[test]
    fn a_strangers_name_is_not_this_server() {
        let asks = |proof, host| status(proof, Method::GET, &[("host", host)]);
        for own in ["127.0.0.1", "127.0.0.1:1", "[::1]:7080", "LocalHost:7080", "rack:7080"] {
            assert_eq!(asks(Proof::Nothing, own), 200, "{own}");
        }
        for other in ["evil.example", "evil.example:7080", "", "127.0.0.1.evil.example", "[x]"] {
            assert_eq!(asks(Proof::Nothing, other), 421, "{other}");
            assert_eq!(asks(Proof::Token, other), 200, "a page has no token");
            assert_eq!(asks(Proof::Certificate, other), 200, "no page under that name");
        }
    }

    #[test]
    fn a_change_bears_what_a_page_cannot_send_unasked() {
        for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
            for proof in [Proof::Nothing, Proof::Certificate] {
                let asks = |pairs: &[(&'static str, &str)]| status(proof, method.clone(), pairs);
                assert_eq!(asks(&[]), 403);
                assert_eq!(asks(&[("content-type", "text/plain")]), 403);
                assert_eq!(asks(&[("content-type", "application/json")]), 200);
                assert_eq!(asks(&[(REQUEST_HEADER, "1")]), 200);
            }
            assert_eq!(status(Proof::Token, method.clone(), &[]), 200);
        }
        assert_eq!(status(Proof::Nothing, Method::GET, &[]), 200);
    }
}
