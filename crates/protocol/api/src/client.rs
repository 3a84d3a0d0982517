//! A blocking client of the controller, one method per operation.
//!
//! Several addresses may be given. Every operation goes to the one that answered last; if that one
//! cannot be reached, is ending or answers that another controller leads, the next one is tried,
//! each once. All operations may be retried: creates carry their id, reports a sequence, and a
//! second move of a segment is refused while the first is in progress.

use std::io::{BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{Connector, TcpConnector};

use crate::access::Access;
use crate::answers::{ApiError, EventStream};
use crate::transport::{Kept, TlsConnector, explained, explained_io};
use crate::{
    CircuitList, ClientAnswer, ClientId, ClientReport, ClientSpec, ClientView, Health, MoveRequest,
    Node, NodeAnswer, NodeList, NodeReport, NodeSpec, Problem, ProblemKind, Segment, SegmentId,
    SegmentList, SegmentSpec, SegmentState, Task, TaskId, TaskList, Tenant, TenantList, TenantSpec,
    Topology,
};

/// Timeout of a connection attempt; then the next address is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of an answer, beyond the time that the request asked it to wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// The header of a change without a body: a web page of another site cannot send it unasked.
pub const REQUEST_HEADER: &str = "farpool-request";
/// Largest answer read; a larger one is an error. A node's intent of 100,000 grants is 20 MB.
const ANSWER_LIMIT_BYTES: u64 = 256 << 20;

/// A controller, or several of which one leads. Clones share their connections.
#[derive(Clone)]
pub struct Client {
    agent: ureq::Agent,
    urls: Arc<[String]>,
    authorization: Option<Arc<str>>,
    /// What it shows to controllers at https://.
    kept: Option<Arc<Kept>>,
    /// Index of the address that answered last.
    current: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("urls", &self.urls).finish_non_exhaustive()
    }
}

/// The filter of a list of segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SegmentFilter {
    /// The most segments in the page; the controller has its own limit.
    pub limit: Option<u32>,
    /// `next_page_token` of the previous page.
    pub page_token: Option<String>,
}

struct Call<'a> {
    method: &'static str,
    path: &'a str,
    body: Option<Vec<u8>>,
    wait_ms: u64,
    if_match: Option<String>,
    /// Only what is not there is created.
    is_new: bool,
    accept: &'static str,
}

impl<'a> Call<'a> {
    fn new(method: &'static str, path: &'a str) -> Self {
        let accept = "application/json";
        Self { method, path, body: None, wait_ms: 0, if_match: None, is_new: false, accept }
    }

    fn body(mut self, body: &impl Serialize) -> Self {
        // Types of this crate are plain data with string keys, which always serialise.
        self.body = serde_json::to_vec(body).ok();
        self
    }
}

type Response = ureq::http::Response<ureq::Body>;

impl Client {
    /// Creates a client of the controllers at `base_url`, with at most a token: see
    /// [`Self::with`].
    ///
    /// # Errors
    /// See [`Self::with`].
    pub fn new(base_url: &str, token: Option<&str>) -> Result<Self, ApiError> {
        Self::with(base_url, &Access { token: token.map(str::to_owned), ..Access::default() })
    }

    /// Creates a client of the controllers at `base_url`: one address such as
    /// `https://10.0.0.1:7080`, or several separated by commas.
    ///
    /// # Errors
    /// See [`Access::addresses`]; or the certificate cannot be used.
    pub fn with(base_url: &str, access: &Access) -> Result<Self, ApiError> {
        let urls = access.addresses(base_url)?;
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .max_redirects(0)
            .proxy(None)
            .build();
        let kept = access.credentials.clone().map(Kept::new).transpose();
        let kept = kept.map_err(|why| ApiError::Credentials(why.to_string()))?;
        let connector = ().chain(TcpConnector::default()).chain(TlsConnector(kept.clone()));
        let authorization = access.token.as_ref().map(|token| format!("Bearer {token}").into());
        Ok(Self {
            agent: ureq::Agent::with_parts(config, connector, DefaultResolver::default()),
            urls: urls.into(),
            authorization,
            kept,
            current: Arc::new(AtomicUsize::new(0)),
        })
    }

    /// Returns the addresses it was given.
    #[must_use]
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    /// Registers a node, or changes its registration.
    ///
    /// # Errors
    /// See [`ApiError`], as for all operations.
    pub fn put_node(&self, name: &str, spec: &NodeSpec) -> Result<Node, ApiError> {
        self.json(Call::new("PUT", &format!("/v1/nodes/{}", escape(name))).body(spec))
    }

    /// Returns all nodes.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn nodes(&self) -> Result<NodeList, ApiError> {
        self.json(Call::new("GET", "/v1/nodes"))
    }

    /// Returns one node.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn node(&self, name: &str) -> Result<Node, ApiError> {
        self.json(Call::new("GET", &format!("/v1/nodes/{}", escape(name))))
    }

    /// Removes a node that has no segments.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn delete_node(&self, name: &str) -> Result<(), ApiError> {
        self.nothing(Call::new("DELETE", &format!("/v1/nodes/{}", escape(name))))
    }

    /// Drains a node; done when the task is.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn drain_node(&self, name: &str) -> Result<Task, ApiError> {
        self.json(Call::new("POST", &format!("/v1/nodes/{}/drain", escape(name))))
    }

    /// Makes a drained node usable again.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn undrain_node(&self, name: &str) -> Result<Node, ApiError> {
        self.json(Call::new("DELETE", &format!("/v1/nodes/{}/drain", escape(name))))
    }

    /// Sends a node's report; waits for news for at most the report's `wait_ms`.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn report_node(&self, name: &str, report: &NodeReport) -> Result<NodeAnswer, ApiError> {
        let path = format!("/upcall/v1/nodes/{}/report", escape(name));
        let call = Call { wait_ms: report.wait_ms, ..Call::new("POST", &path) };
        self.json(call.body(report))
    }

    /// Registers a client, or changes its registration.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn put_client(&self, id: ClientId, spec: &ClientSpec) -> Result<ClientView, ApiError> {
        self.json(Call::new("PUT", &format!("/v1/clients/{id}")).body(spec))
    }

    /// Returns one client.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn client(&self, id: ClientId) -> Result<ClientView, ApiError> {
        self.json(Call::new("GET", &format!("/v1/clients/{id}")))
    }

    /// Removes a client; all its segments are released.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn delete_client(&self, id: ClientId) -> Result<(), ApiError> {
        self.nothing(Call::new("DELETE", &format!("/v1/clients/{id}")))
    }

    /// Sends a client's report; waits for news for at most the report's `wait_ms`.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn report_client(
        &self,
        id: ClientId,
        report: &ClientReport,
    ) -> Result<ClientAnswer, ApiError> {
        let path = format!("/upcall/v1/clients/{id}/report");
        let call = Call { wait_ms: report.wait_ms, ..Call::new("POST", &path) };
        self.json(call.body(report))
    }

    /// Creates a segment, or returns the one already created by the same request. One that is there
    /// keeps its size, also if this request comes late or twice.
    ///
    /// # Errors
    /// See [`ApiError`]. [`ProblemKind::Conflict`] if another request has created it.
    pub fn put_segment(&self, id: SegmentId, spec: &SegmentSpec) -> Result<Segment, ApiError> {
        let path = format!("/v1/segments/{id}");
        match self.json(Call { is_new: true, ..Call::new("PUT", &path) }.body(spec)) {
            Err(error) if error.is(ProblemKind::PreconditionFailed) => {
                let known = self.segment(id)?;
                let is_same = known.spec.as_ref() == Some(spec);
                if is_same && known.state != SegmentState::Releasing {
                    return Ok(known);
                }
                let detail = format!("segment {id} is there, as another request made it");
                Err(ApiError::Problem(Box::new(Problem::new(ProblemKind::Conflict, detail))))
            }
            created => created,
        }
    }

    /// Returns one segment.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn segment(&self, id: SegmentId) -> Result<Segment, ApiError> {
        self.json(Call::new("GET", &format!("/v1/segments/{id}")))
    }

    /// Returns one segment as soon as it is in this state, or after `wait_ms` in any state.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn wait_segment(
        &self,
        id: SegmentId,
        state: SegmentState,
        wait_ms: u64,
    ) -> Result<Segment, ApiError> {
        let state = serde_json::to_string(&state).unwrap_or_default();
        let state = state.trim_matches('"');
        let path = format!("/v1/segments/{id}?wait_state={state}&wait_ms={wait_ms}");
        self.json(Call { wait_ms, ..Call::new("GET", &path) })
    }

    /// Returns a page of segments.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn segments(&self, filter: &SegmentFilter) -> Result<SegmentList, ApiError> {
        let limit = filter.limit.map(|limit| format!("limit={limit}"));
        let token = filter.page_token.as_ref().map(|token| format!("page_token={}", escape(token)));
        let query: Vec<String> = limit.into_iter().chain(token).collect();
        self.json(Call::new("GET", &format!("/v1/segments?{}", query.join("&"))))
    }

    /// Releases a segment, only at this revision if one is given.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn delete_segment(&self, id: SegmentId, revision: Option<u64>) -> Result<(), ApiError> {
        let path = format!("/v1/segments/{id}");
        let if_match = revision.map(|revision| format!("\"{revision}\""));
        self.nothing(Call { if_match, ..Call::new("DELETE", &path) })
    }

    /// Moves a segment to another brick; done when the task is.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn move_segment(&self, id: SegmentId, wish: &MoveRequest) -> Result<Task, ApiError> {
        self.json(Call::new("POST", &format!("/v1/segments/{id}/move")).body(wish))
    }

    /// Changes the size of a segment, only at this revision if one is given.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn resize_segment(
        &self,
        id: SegmentId,
        spec: &SegmentSpec,
        revision: Option<u64>,
    ) -> Result<Segment, ApiError> {
        let path = format!("/v1/segments/{id}");
        // It must be there: a size is nothing without a segment.
        let tag = revision.map_or("*".to_owned(), |revision| format!("\"{revision}\""));
        self.json(Call { if_match: Some(tag), ..Call::new("PUT", &path) }.body(spec))
    }

    /// Sets what a tenant is promised and allowed.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn put_tenant(&self, name: &str, spec: &TenantSpec) -> Result<Tenant, ApiError> {
        self.json(Call::new("PUT", &format!("/v1/tenants/{}", escape(name))).body(spec))
    }

    /// Returns one tenant.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn tenant(&self, name: &str) -> Result<Tenant, ApiError> {
        self.json(Call::new("GET", &format!("/v1/tenants/{}", escape(name))))
    }

    /// Returns all tenants.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn tenants(&self) -> Result<TenantList, ApiError> {
        self.json(Call::new("GET", "/v1/tenants"))
    }

    /// Forgets what a tenant is promised and allowed; its segments stay.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn delete_tenant(&self, name: &str) -> Result<(), ApiError> {
        self.nothing(Call::new("DELETE", &format!("/v1/tenants/{}", escape(name))))
    }

    /// Returns all circuits.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn circuits(&self) -> Result<CircuitList, ApiError> {
        self.json(Call::new("GET", "/v1/circuits"))
    }

    /// Returns the rack's graph.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn topology(&self) -> Result<Topology, ApiError> {
        self.json(Call::new("GET", "/v1/topology"))
    }

    /// Returns the rack as a drawing.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn topology_drawing(&self) -> Result<String, ApiError> {
        self.text(Call { accept: "text/plain", ..Call::new("GET", "/v1/topology") })
    }

    /// Returns the rack's graph as a topology file.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn topology_toml(&self) -> Result<String, ApiError> {
        self.text(Call { accept: "application/toml", ..Call::new("GET", "/v1/topology") })
    }

    /// Returns all remembered tasks.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn tasks(&self) -> Result<TaskList, ApiError> {
        self.json(Call::new("GET", "/v1/tasks"))
    }

    /// Returns one task.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn task(&self, id: TaskId) -> Result<Task, ApiError> {
        self.json(Call::new("GET", &format!("/v1/tasks/{id}")))
    }

    /// Returns a backup of everything that the controller stores, keys of grants included.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn backup(&self) -> Result<String, ApiError> {
        self.text(Call { accept: "application/jsonl", ..Call::new("GET", "/v1/backup") })
    }

    /// Returns the controller's health.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn health(&self) -> Result<Health, ApiError> {
        self.json(Call::new("GET", "/healthz"))
    }

    /// Returns the events after the one with this id (0: all remembered ones), without end.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub fn events(&self, after: u64) -> Result<EventStream, ApiError> {
        let path = format!("/v1/events?after={after}");
        // The stream sends at least a comment every 15 s, but as a whole has no end.
        let call = Call { accept: "text/event-stream", ..Call::new("GET", &path) };
        let (url, response) = self.send(&call, None)?;
        let lines = BufReader::new(response.into_body().into_reader());
        Ok(EventStream::new(Box::new(lines), url))
    }

    fn nothing(&self, call: Call<'_>) -> Result<(), ApiError> {
        self.text(call).map(drop)
    }

    fn json<T: DeserializeOwned>(&self, call: Call<'_>) -> Result<T, ApiError> {
        let (url, bytes) = self.bytes(&call)?;
        let bad = |error: serde_json::Error| ApiError::BadAnswer { url, reason: error.to_string() };
        serde_json::from_slice(&bytes).map_err(bad)
    }

    fn text(&self, call: Call<'_>) -> Result<String, ApiError> {
        let (url, bytes) = self.bytes(&call)?;
        let bad = |_| ApiError::BadAnswer { url, reason: "it is not UTF-8".to_owned() };
        String::from_utf8(bytes).map_err(bad)
    }

    fn bytes(&self, call: &Call<'_>) -> Result<(String, Vec<u8>), ApiError> {
        let timeout = ANSWER_TIMEOUT + Duration::from_millis(call.wait_ms);
        let (url, response) = self.send(call, Some(timeout))?;
        let bytes =
            read(response).map_err(|reason| ApiError::Unreachable { url: url.clone(), reason })?;
        Ok((url, bytes))
    }

    /// Tries each address once, beginning with the one that answered last.
    fn send(
        &self,
        call: &Call<'_>,
        timeout: Option<Duration>,
    ) -> Result<(String, Response), ApiError> {
        let first = self.current.load(Ordering::Relaxed);
        let mut last = None;
        for step in 0..self.urls.len() {
            let index = (first + step) % self.urls.len();
            let url = &self.urls[index];
            let error = match self.ask(url, call, timeout) {
                Ok(response) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok((url.clone(), response));
                }
                Err(error) => error,
            };
            let elsewhere = matches!(error, ApiError::Unreachable { .. })
                || error.is(ProblemKind::NotLeader)
                || error.is(ProblemKind::Ending);
            if !elsewhere {
                self.current.store(index, Ordering::Relaxed);
                return Err(error);
            }
            last = Some(error);
        }
        Err(last.unwrap_or_else(|| ApiError::BadUrl(String::new())))
    }

    fn ask(
        &self,
        url: &str,
        call: &Call<'_>,
        timeout: Option<Duration>,
    ) -> Result<Response, ApiError> {
        let mut request = ureq::http::Request::builder()
            .method(call.method)
            .uri(format!("{url}{}", call.path))
            .header("accept", call.accept);
        if let Some(authorization) = &self.authorization {
            request = request.header("authorization", authorization.as_ref());
        }
        if call.is_new {
            request = request.header("if-none-match", "*");
        }
        if let Some(tag) = &call.if_match {
            request = request.header("if-match", tag);
        }
        if call.body.is_some() {
            request = request.header("content-type", "application/json");
        } else if call.method != "GET" {
            request = request.header(REQUEST_HEADER, "1");
        }
        let unreachable = |reason: String| ApiError::Unreachable { url: url.to_owned(), reason };
        let body = call.body.as_deref().unwrap_or_default();
        let request = request.body(body).map_err(|error| ApiError::BadAnswer {
            url: url.to_owned(),
            reason: error.to_string(),
        })?;
        let request = self.agent.configure_request(request).timeout_global(timeout).build();
        let why = |error| match &self.kept {
            Some(kept) => kept.explained(&error),
            None => explained(&error),
        };
        let response = self.agent.run(request).map_err(|error| unreachable(why(error)))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let bytes = read(response).map_err(unreachable)?;
        match serde_json::from_slice::<Problem>(&bytes) {
            Ok(problem) => Err(ApiError::Problem(Box::new(problem))),
            Err(_) => Err(ApiError::BadAnswer {
                url: url.to_owned(),
                reason: format!("status {status} without a problem document"),
            }),
        }
    }
}

fn read(response: Response) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let reader = response.into_body().into_reader();
    reader
        .take(ANSWER_LIMIT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| explained_io(&error))?;
    if bytes.len() as u64 > ANSWER_LIMIT_BYTES {
        return Err(format!("the answer is above {ANSWER_LIMIT_BYTES} bytes"));
    }
    Ok(bytes)
}

/// Escapes all but unreserved characters of a path segment or query value.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        for bad in ["", ",", "10.0.0.1:7080", "http://", "http://127.0.0.1,b"] {
            assert!(matches!(Client::new(bad, None), Err(ApiError::BadUrl(_))), "{bad}");
        }
        let near = "http://127.0.0.1:1/, http://localhost:2";
        let client = Client::new(near, Some("secret")).unwrap();
        assert_eq!(client.urls(), ["http://127.0.0.1:1", "http://localhost:2"]);
        assert!(!format!("{client:?}").contains("secret"));
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape("a/b c?"), "a%2Fb%20c%3F");
    }

    #[test]
    fn every_address_is_tried() {
        // The ports are free: both were bound a moment ago.
        let port = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (first, second) = (port(), port());
        let client = Client::new(&format!("http://{first},http://{second}"), None).unwrap();
        let error = client.nodes().unwrap_err();
        assert!(error.to_string().contains(&second.to_string()), "{error}");
    }
}
