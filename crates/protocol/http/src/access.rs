//! Who may ask what: how a server is protected, what each role of a certificate may ask, and what
//! is recorded.
//!
//! Invariants:
//! - What the table does not name is refused. A path is compared as it came, so that what is
//!   escaped in it names nobody.
//! - A program may ask only about what is its tenant's: whether it is, the server's own state
//!   tells. [`Asker::tenant`] is there for that.
//! - Where TLS is spoken, a request without an identity is refused.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use farpool_api::ProblemKind;
use farpool_audit::AuditLog;
use farpool_identity::{Credentials, Identity, Refusal as PeerRefusal, Role};

use crate::Refusal;
use crate::audit;
use crate::bearer::{self, is_token};
use crate::origin::{self, Proof};
use crate::tls::Tls;

/// How a server's REST interface is protected.
#[derive(Clone, Default)]
pub struct Protection {
    /// Serve over TLS only, with these credentials; whoever asks has to show a certificate.
    pub credentials: Option<Arc<Credentials>>,
    /// Token that requests have to present; only without credentials.
    pub token: Option<String>,
    /// Serve in the clear beyond loopback, too, with a token.
    pub insecure: bool,
    /// Where it is recorded who asks for changes, and who is refused.
    pub audit: Option<Arc<AuditLog>>,
}

impl std::fmt::Debug for Protection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Protection")
            .field("credentials", &self.credentials)
            .field("has_token", &self.token.is_some())
            .field("insecure", &self.insecure)
            .field("is_audited", &self.audit.is_some())
            .finish()
    }
}

/// Why a server is not protected as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Unprotected {
    /// The token is empty, which protects nothing, or has characters that do not fit a header.
    #[error("the token must be 1 or more visible ASCII characters")]
    BadToken,
    /// Two proofs are asked for.
    #[error(
        "with certificates (--pki) a token proves nothing more; leave --token-file out, and give \
         whoever has the token a certificate (farpool pki issue)"
    )]
    TokenBesideCertificates,
    /// An address is beyond loopback, and nothing there would be encrypted.
    #[error(
        "{0} is reachable from other machines, and whoever is on the way could read and change \
         what is asked; give --pki DIR with a certificate of this host (farpool pki issue), or \
         --insecure and --token-file if that is what you want"
    )]
    Clear(SocketAddr),
    /// An address is beyond loopback without any proof: everybody could ask.
    #[error(
        "{0} is reachable from other machines; without certificates it needs a token (--token-file)"
    )]
    NoToken(SocketAddr),
    /// The certificate is not one of a server.
    #[error("the certificate in --pki cannot be served with: {0}")]
    NoServer(#[from] PeerRefusal),
}

impl Protection {
    /// Returns what TLS needs, or None to serve in the clear.
    ///
    /// # Errors
    /// What is served at these addresses would not be protected as it should be.
    pub fn check(&self, listen: &[SocketAddr]) -> Result<Option<Arc<Tls>>, Unprotected> {
        if self.token.as_deref().is_some_and(|token| !is_token(token)) {
            return Err(Unprotected::BadToken);
        }
        if let Some(credentials) = &self.credentials {
            if self.token.is_some() {
                return Err(Unprotected::TokenBesideCertificates);
            }
            return Ok(Some(Tls::new(Arc::clone(credentials))?));
        }
        match listen.iter().find(|address| !address.ip().is_loopback()) {
            Some(address) if !self.insecure => Err(Unprotected::Clear(*address)),
            Some(address) if self.token.is_none() => Err(Unprotected::NoToken(*address)),
            _ => Ok(None),
        }
    }

    /// Refuses requests without a proof, those that their sender may not ask, and those that a
    /// stranger's web page may have caused; records changes and refusals. `owner` is whose token it
    /// is, `names` are hosts, or URLs with one, by which this server is known besides its
    /// addresses. Routes added afterwards are not guarded.
    pub fn guard<S>(&self, router: Router<S>, owner: &'static str, names: &[String]) -> Router<S>
    where
        S: Clone + Send + Sync + 'static,
    {
        let needs_identity = self.credentials.is_some();
        let router = audit::announce(router, self.audit.as_ref());
        let router = router.layer(from_fn_with_state(needs_identity, check));
        let router = bearer::guard(router, self.token.as_deref(), owner);
        let proof = match (&self.credentials, &self.token) {
            (Some(_), _) => Proof::Certificate,
            (None, Some(_)) => Proof::Token,
            (None, None) => Proof::Nothing,
        };
        let router = origin::guard(router, proof, names);
        audit::record(router, self.audit.as_ref(), self.token.is_some())
    }
}

async fn check(State(needs_identity): State<bool>, request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<Identity>();
    if !needs_identity && identity.is_none() {
        return next.run(request).await;
    }
    let (method, path) = (request.method(), request.uri().path());
    let refused = match identity {
        None => "who asks is not known".to_owned(),
        Some(Identity { role, .. }) => match may_ask(role, method, path) {
            Ok(()) => return next.run(request).await,
            Err(why) => {
                tracing::warn!(who = %role, %method, path, "refused: {why}");
                format!("{role} may not ask {method} {path}: {why}")
            }
        },
    };
    Refusal::new(ProblemKind::Forbidden, refused).into_response()
}

/// Decides whether a role may ask this, as far as the path tells: a program's requests are about
/// what is its tenant's or not, which the server's state tells.
///
/// # Errors
/// Why not, in words.
pub fn may_ask(role: &Role, method: &Method, path: &str) -> Result<(), &'static str> {
    let parts: Vec<&str> = path.strip_prefix('/').unwrap_or_default().split('/').collect();
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    if let ("GET", ["healthz"] | ["v1", "openapi.json"]) = (method, &parts[..]) {
        return Ok(());
    }
    match role {
        Role::Operator(_) => Ok(()),
        Role::Viewer(_) | Role::Controller(_) => match (method, &parts[..]) {
            ("GET", ["v1", "backup"]) => Err("a backup holds the keys of grants"),
            ("GET", _) => Ok(()),
            _ => Err("it only reads"),
        },
        Role::Node(name) => match (method, &parts[..]) {
            ("GET" | "PUT" | "DELETE", ["v1", "nodes", own])
            | ("POST" | "DELETE", ["v1", "nodes", own, "drain"])
            | ("POST", ["upcall", "v1", "nodes", own, "report"]) => {
                let is_own = *own == name.as_str();
                is_own.then_some(()).ok_or("a node speaks only for itself")
            }
            _ => Err("a node asks only about itself"),
        },
        Role::Program { tenant, .. } => match (method, &parts[..]) {
            ("GET" | "PUT" | "DELETE", ["v1", "clients" | "segments", _])
            | ("POST", ["upcall", "v1", "clients", _, "report"]) => Ok(()),
            ("GET", ["v1", "tenants", own]) => {
                let is_own = *own == tenant.as_str();
                is_own.then_some(()).ok_or("a program speaks only for its tenant")
            }
            _ => Err("a program asks only about its own memory"),
        },
    }
}

/// Whether a request is recorded whatever comes of it: it changes something, or copies the keys of
/// grants. What nodes and programs report of themselves every few seconds is not.
pub(crate) fn is_change(method: &Method, path: &str) -> bool {
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => path == "/v1/backup",
        _ => !path.starts_with("/upcall/"),
    }
}

/// Who sends a request: the identity of its certificate, or nobody in particular in the clear.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asker(Option<Identity>);

impl Asker {
    /// The tenant for which alone it may speak. None if it is not a program; then the table has
    /// let it through for the whole rack.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        self.0.as_ref()?.role.tenant()
    }

    /// The refusal of something that is not its own, such as `client 7`.
    #[must_use]
    pub fn refusal(&self, what: &str) -> Refusal {
        let who = self.0.as_ref().map_or_else(|| "nobody".to_owned(), |it| it.role.to_string());
        tracing::warn!(who, what, "refused: it is not its own");
        let detail = format!("{who} may not ask about {what}: it is not its tenant's");
        Refusal::new(ProblemKind::Forbidden, detail)
    }
}

impl From<Identity> for Asker {
    fn from(identity: Identity) -> Self {
        Self(Some(identity))
    }
}

impl<S: Sync> FromRequestParts<S> for Asker {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get::<Identity>().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(path: &str) -> Role {
        let identity: Identity = format!("spiffe://rack/{path}").parse().unwrap();
        identity.role
    }

    #[test]
    fn changes_and_copies_of_keys_are_recorded_and_reports_are_not() {
        for (method, path, expected) in [
            (Method::PUT, "/v1/nodes/a", true),
            (Method::DELETE, "/v1/segments/7", true),
            (Method::POST, "/v1/nodes/a/drain", true),
            (Method::GET, "/v1/backup", true),
            (Method::GET, "/v1/nodes", false),
            (Method::HEAD, "/metrics", false),
            (Method::POST, "/upcall/v1/nodes/a/report", false),
        ] {
            assert_eq!(is_change(&method, path), expected, "{method} {path}");
        }
    }

    /// The roles in the order of the columns below.
    const ROLES: [&str; 6] =
        ["operator/o", "viewer/v", "controller/c", "node/a", "program/t", "program/t/web"];

    #[test]
    fn each_role_may_ask_what_the_table_says_and_nothing_else() {
        let table = [
            //                                          operator viewer controller node program t
            ("GET", "/healthz", "ovcnpp"),
            ("HEAD", "/healthz", "ovcnpp"),
            ("GET", "/v1/openapi.json", "ovcnpp"),
            ("GET", "/metrics", "ovc"),
            ("GET", "/v1/status", "ovc"),
            ("GET", "/v1/nodes", "ovc"),
            ("GET", "/v1/nodes/a", "ovcn"),
            ("GET", "/v1/nodes/b", "ovc"),
            ("PUT", "/v1/nodes/a", "on"),
            ("PUT", "/v1/nodes/b", "o"),
            ("PUT", "/v1/nodes/%61", "o"),
            ("PUT", "/v1/nodes/a/", "o"),
            ("PUT", "//v1/nodes/a", "o"),
            ("DELETE", "/v1/nodes/a", "on"),
            ("DELETE", "/v1/nodes/b", "o"),
            ("POST", "/v1/nodes/a/drain", "on"),
            ("POST", "/v1/nodes/b/drain", "o"),
            ("DELETE", "/v1/nodes/a/drain", "on"),
            ("DELETE", "/v1/nodes/b/drain", "o"),
            ("POST", "/upcall/v1/nodes/a/report", "on"),
            ("POST", "/upcall/v1/nodes/b/report", "o"),
            ("GET", "/v1/clients/7", "ovcpp"),
            ("PUT", "/v1/clients/7", "opp"),
            ("DELETE", "/v1/clients/7", "opp"),
            ("POST", "/upcall/v1/clients/7/report", "opp"),
            ("GET", "/v1/segments", "ovc"),
            ("GET", "/v1/segments/7", "ovcpp"),
            ("PUT", "/v1/segments/7", "opp"),
            ("DELETE", "/v1/segments/7", "opp"),
            ("POST", "/v1/segments/7/move", "o"),
            ("GET", "/v1/tenants", "ovc"),
            ("GET", "/v1/tenants/t", "ovcpp"),
            ("GET", "/v1/tenants/u", "ovc"),
            ("PUT", "/v1/tenants/t", "o"),
            ("DELETE", "/v1/tenants/t", "o"),
            ("GET", "/v1/events", "ovc"),
            ("GET", "/v1/tasks/7", "ovc"),
            ("GET", "/v1/topology", "ovc"),
            ("GET", "/v1/backup", "o"),
            ("HEAD", "/v1/backup", "o"),
            ("PATCH", "/v1/nodes/a", "o"),
            ("GET", "", "ovc"),
        ];
        for (method, path, expected) in table {
            let method: Method = method.parse().unwrap();
            let may: String = ROLES
                .iter()
                .filter(|name| may_ask(&role(name), &method, path).is_ok())
                .map(|name| &name[..1])
                .collect();
            assert_eq!(may, expected, "{method} {path}");
        }
    }

    #[test]
    fn only_a_program_is_bound_to_a_tenant() {
        let asker =
            |path: &str| Asker::from(format!("spiffe://rack/{path}").parse::<Identity>().unwrap());
        assert_eq!(asker("program/t/web").tenant(), Some("t"));
        for other in ["operator/t", "node/t", "viewer/t"] {
            assert_eq!(asker(other).tenant(), None);
        }
        assert_eq!(Asker::default().tenant(), None);
        let refusal = asker("program/t/web").refusal("client 7");
        assert_eq!(refusal.0.status, 403);
        assert!(refusal.0.detail.contains("program web of tenant t"), "{}", refusal.0.detail);
        assert!(refusal.0.detail.contains("client 7"), "{}", refusal.0.detail);
    }

    #[test]
    fn beyond_loopback_nothing_is_served_in_the_clear_unless_the_operator_insists() {
        let (near, far) = ("127.0.0.1:1".parse().unwrap(), "192.0.2.1:1".parse().unwrap());
        let checked = |token: Option<&str>, insecure, listen: &[SocketAddr]| {
            let token = token.map(str::to_owned);
            let checked = Protection { token, insecure, ..Protection::default() }.check(listen);
            checked.map(|tls| assert!(tls.is_none()))
        };
        assert!(checked(None, false, &[near]).is_ok());
        assert!(checked(Some("x"), true, &[near, far]).is_ok());
        for token in [None, Some("x")] {
            let error = checked(token, false, &[near, far]).unwrap_err();
            assert!(matches!(error, Unprotected::Clear(at) if at == far));
            assert!(error.to_string().contains("--pki"), "{error}");
            assert!(error.to_string().contains("--insecure"), "{error}");
        }
        assert!(matches!(checked(None, true, &[far]), Err(Unprotected::NoToken(_))));
        assert!(matches!(checked(Some("a b"), true, &[far]), Err(Unprotected::BadToken)));
    }
}
