//! The toolkit over real HTTP: which requests pass the bearer check, and which are refused.

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, put};
use farpool_http::serve::{Connections, Limits, serve};
use farpool_http::{Asked, Body, Name, PROBLEM_TYPE, Refusal, bearer, json};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const LIMIT_BYTES: usize = 64;

#[derive(Deserialize)]
struct Sum {
    plus: Option<u64>,
}

async fn add(
    Name(id): Name<u64>,
    Asked(Sum { plus }): Asked<Sum>,
    Body(number): Body<u64>,
) -> Result<Response, Refusal> {
    Ok(json(StatusCode::OK, &(id + plus.unwrap_or(0) + number)))
}

/// A server on loopback; stops when dropped.
struct Server {
    url: String,
    _runtime: Runtime,
}

impl Server {
    fn start(token: Option<&str>) -> Self {
        let runtime = Runtime::new().unwrap();
        let router = Router::new()
            .route("/numbers/{id}", put(add))
            .route("/healthz", get(|| async { json(StatusCode::OK, &true) }))
            .layer(DefaultBodyLimit::max(LIMIT_BYTES));
        let router = bearer::guard(router, token, "summer");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(serve(listener, router, Connections::new(Limits::raised()), None));
        Self { url, _runtime: runtime }
    }

    fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let agent: ureq::Agent =
            ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let mut request = ureq::http::Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let uri = format!("{}{path}", self.url);
        let request = request.method(method).uri(uri).body(body.to_owned()).unwrap();
        let mut answer = agent.run(request).unwrap();
        let header = |name| answer.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
        let (kind, scheme) = (header("content-type"), header("www-authenticate"));
        let text = answer.body_mut().read_to_string().unwrap();
        Answer { status: answer.status().as_u16(), kind, scheme, text }
    }

    /// Adds `body` to the number of a path.
    fn add(&self, path: &str, body: &str) -> Answer {
        self.ask("PUT", path, &[("content-type", "application/json")], body)
    }
}

struct Answer {
    status: u16,
    kind: Option<String>,
    /// The scheme in `WWW-Authenticate`.
    scheme: Option<String>,
    text: String,
}

impl Answer {
    /// Returns the detail of a refusal, which must be a problem document.
    fn refusal(&self) -> (u16, String) {
        assert_eq!(self.kind.as_deref(), Some(PROBLEM_TYPE), "{}", self.text);
        let problem: farpool_api::Problem = serde_json::from_str(&self.text).unwrap();
        assert_eq!(problem.status, self.status);
        (self.status, problem.detail)
    }
}

#[test]
fn without_a_token_everybody_is_let_in() {
    let server = Server::start(None);
    let answer = server.add("/numbers/1?plus=2", "3");
    assert_eq!((answer.status, answer.text.as_str()), (200, "6"));
    assert_eq!(answer.kind.as_deref(), Some("application/json"));
}

#[test]
fn with_a_token_only_who_presents_it_is_let_in() {
    let server = Server::start(Some("secret"));
    let with = |method, path, authorization: Option<&str>| {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(authorization.map(|value| ("authorization", value)));
        server.ask(method, path, &headers, "3")
    };
    assert_eq!(with("PUT", "/numbers/1", Some("Bearer secret")).status, 200);
    let detail = "give the summer's token: Authorization: Bearer TOKEN";
    for wrong in [None, Some("Bearer secre"), Some("Bearer secrets"), Some("Basic secret")] {
        // A path that does not exist is not revealed either.
        for path in ["/numbers/1", "/nothing"] {
            let answer = with("PUT", path, wrong);
            assert_eq!(answer.refusal(), (401, detail.to_owned()), "{path} {wrong:?}");
            assert_eq!(answer.scheme.as_deref(), Some("Bearer"));
        }
        assert_eq!(with("GET", "/healthz", wrong).text, "true");
    }
}

#[test]
fn what_is_no_request_is_refused_with_a_reason() {
    let server = Server::start(None);
    let refused = |path, body: &str| server.add(path, body).refusal();
    let path = "path: invalid digit found in string".to_owned();
    assert_eq!(refused("/numbers/x", "3"), (400, path));
    let query = "Failed to deserialize query string: plus: invalid digit found in string";
    assert_eq!(refused("/numbers/1?plus=x", "3"), (400, query.to_owned()));
    let body = "the body: expected value at line 1 column 1".to_owned();
    assert_eq!(refused("/numbers/1", "x"), (400, body));
    let padded = |bytes: usize| format!("{}3", " ".repeat(bytes - 1));
    assert_eq!(server.add("/numbers/1", &padded(LIMIT_BYTES)).status, 200);
    let large = "the body is above the limit".to_owned();
    assert_eq!(refused("/numbers/1", &padded(LIMIT_BYTES + 1)), (413, large));
    let kind = server.ask("PUT", "/numbers/1", &[("content-type", "text/plain")], "3").refusal();
    assert_eq!(kind, (415, "send JSON with Content-Type: application/json".to_owned()));
}

/// A connection that has sent half a request.
fn half(address: std::net::SocketAddr) -> std::net::TcpStream {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"PUT /numbers/1 HTTP/1.1\r\nHost: a\r\n").unwrap();
    stream
}

/// Waits until the server has closed a connection.
fn wait_closed(mut stream: std::net::TcpStream) {
    use std::io::Read;
    let mut text = Vec::new();
    // A reset is an end, too.
    let _ = stream.read_to_end(&mut text);
    assert_eq!(String::from_utf8_lossy(&text), "");
}

/// Starts a server with these limits.
fn limited(limits: Limits) -> (std::net::SocketAddr, Server) {
    let runtime = Runtime::new().unwrap();
    let router = Router::new()
        .route("/numbers/{id}", put(add))
        .route("/healthz", get(|| async { json(StatusCode::OK, &true) }));
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(serve(listener, router, Connections::new(limits), None));
    (address, Server { url: format!("http://{address}"), _runtime: runtime })
}

#[test]
fn half_sent_requests_are_closed_in_time() {
    // The last request is in time also on a busy machine.
    let head_timeout = std::time::Duration::from_secs(5);
    let (address, server) = limited(Limits { connections: 100, waiting: 50, head_timeout });
    let halves: Vec<_> = (0..10).map(|_| half(address)).collect();
    halves.into_iter().for_each(wait_closed);
    assert_eq!(server.ask("GET", "/healthz", &[], "").text, "true");
}

#[test]
fn half_sent_requests_keep_nobody_out() {
    let head_timeout = std::time::Duration::from_secs(3600);
    let (address, server) = limited(Limits { connections: 1_000, waiting: 10, head_timeout });
    let halves: Vec<_> = (0..500).map(|_| half(address)).collect();
    for _ in 0..20 {
        assert_eq!(server.ask("GET", "/healthz", &[], "").text, "true");
    }
    // Those that have waited longest were closed.
    halves.into_iter().take(400).for_each(wait_closed);
}

#[test]
fn what_is_no_request_at_all_is_a_problem_document_too() {
    use std::io::{Read, Write};
    let (address, _server) = limited(Limits::raised());
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"no request\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 400 "), "{text}");
    assert!(text.contains(PROBLEM_TYPE), "{text}");
}
