//! Nodes of one process on 127.0.0.x, each with memory that the test sets; datagrams are actually
//! sent.

#![allow(dead_code, reason = "each test file uses a part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use farpool_acms::{Arbitration, Thresholds};
use farpool_api::{
    Client, ClientAnswer, ClientId, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec,
    SegmentId, SegmentSpec, SegmentState,
};
use farpool_http::Protection;
use farpool_peer::{CollaborateOptions, Collaborator, Observation, Status};

/// Longest wait for anything here; reached only if something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Each node's memory in bytes.
pub(crate) const TOTAL_BYTES: u64 = 4 << 30;
pub(crate) const MIB: u64 = 1 << 20;

/// Waits until `done` returns something.
pub(crate) fn wait_for<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    farpool_testkit::wait_for(what, PATIENCE, done)
}

/// A running node, and the share of its memory that its programs use.
pub(crate) struct Node {
    pub collaborator: Option<Collaborator>,
    pub url: String,
    pub address: SocketAddr,
    use_percent: Arc<AtomicU64>,
    _folder: tempfile::TempDir,
}

/// Options of a node with short times.
pub(crate) fn options(name: &str, folder: &std::path::Path) -> CollaborateOptions {
    CollaborateOptions {
        cluster: "test".into(),
        name: name.into(),
        listen: "127.0.0.1:0".parse().unwrap(),
        blade_listen: None,
        advertise: None,
        socket: folder.join("blade.sock"),
        join: Vec::new(),
        zone: 0,
        thresholds: Thresholds::default(),
        arbitration: Arbitration::default(),
        lease: Duration::from_secs(8),
        reclaim_deadline: Duration::from_secs(20),
        rest: "127.0.0.1:0".parse().unwrap(),
        protection: Protection::default(),
        allow_remote_tcp: false,
        control_requests_per_s: 20_000,
        rack_key_file: None,
        insecure: false,
        borrower_percent: farpool_acms::BORROWER_PERCENT,
        unused: Duration::from_secs(300),
        state_file: None,
        drain_timeout: Duration::from_secs(30),
    }
}

impl Node {
    /// Starts a node on its own loopback address that greets `join`.
    pub(crate) fn start(
        name: &str,
        ip: u8,
        use_percent: u64,
        join: &[&Node],
        change: impl FnOnce(&mut CollaborateOptions),
    ) -> Node {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(name, folder.path());
        options.listen = SocketAddr::from(([127, 0, 0, ip], 0));
        options.join = join.iter().map(|node| node.address.to_string()).collect();
        change(&mut options);
        let share = Arc::new(AtomicU64::new(use_percent));
        let seen = Arc::clone(&share);
        let observe = move || {
            let used = TOTAL_BYTES / 100 * seen.load(SeqCst);
            Ok(Observation {
                total_bytes: TOTAL_BYTES,
                available_bytes: TOTAL_BYTES - used,
                pressure_permille: None,
            })
        };
        let collaborator = Collaborator::start(options, observe).unwrap();
        let url = format!("http://{}", collaborator.rest());
        let address = collaborator.address();
        let collaborator = Some(collaborator);
        Node { collaborator, url, address, use_percent: share, _folder: folder }
    }

    pub(crate) fn set_use(&self, percent: u64) {
        self.use_percent.store(percent, SeqCst);
    }

    pub(crate) fn status(&self) -> Status {
        let mut answer = ureq::get(format!("{}/v1/status", self.url)).call().unwrap();
        serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap()
    }

    /// kill -9, as other nodes see it.
    pub(crate) fn die(&mut self) {
        drop(self.collaborator.take());
    }

    pub(crate) fn wait_for_peers(&self, count: usize) {
        wait_for("peers", || (self.status().peers.len() == count).then_some(()));
    }

    pub(crate) fn wait_for_class(&self, class: &str) {
        wait_for(class, || (self.status().class == class).then_some(()));
    }
}

/// A program as the REST interface sees one: it reports, and leaves grants when it is told to.
pub(crate) struct Program {
    pub client: Client,
    pub id: ClientId,
    sequence: u64,
    version: u64,
    pub segments: Vec<ClientSegment>,
    /// Share of its grants that it reports as used, in percent.
    pub use_percent: u64,
    /// Whether it leaves the grants that it is told to leave.
    pub obeys: bool,
}

impl Program {
    pub(crate) fn start(node: &Node, id: u128, lease_ms: u64) -> Program {
        let client = Client::new(&node.url, None).unwrap();
        let id = ClientId::from_u128(id);
        let spec =
            ClientSpec { host: "b".into(), name: "program".into(), pid: 1, lease_ms, tenant: None };
        client.put_client(id, &spec).unwrap();
        let segments = Vec::new();
        Program { client, id, sequence: 0, version: 0, segments, use_percent: 0, obeys: true }
    }

    pub(crate) fn wish(&self, id: u128, bytes: u64) {
        let spec = SegmentSpec::of_client(self.id, bytes);
        let segment = self.client.put_segment(SegmentId::from_u128(id), &spec).unwrap();
        assert_eq!((segment.state, segment.place.bytes), (SegmentState::Pending, bytes));
    }

    /// Sends one report. Returns the answer.
    pub(crate) fn report(&mut self, wait_ms: u64) -> ClientAnswer {
        self.sequence += 1;
        let obeys = self.obeys;
        let of = |segment: &ClientSegment| ClientSegmentUse {
            id: segment.id,
            used_bytes: segment.place.bytes / 100 * self.use_percent,
            epoch: segment.epoch,
            evacuated: obeys && segment.leave,
        };
        let report = ClientReport {
            sequence: self.sequence,
            segments: self.segments.iter().map(of).collect(),
            known_version: self.version,
            wait_ms,
        };
        let answer = self.client.report_client(self.id, &report).unwrap();
        self.version = answer.version;
        self.segments = answer.segments.clone();
        answer
    }

    /// Reports until `done` returns something about its segments.
    pub(crate) fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&[ClientSegment]) -> Option<T>,
    ) -> T {
        wait_for(what, || {
            self.report(50);
            done(&self.segments)
        })
    }

    pub(crate) fn ready_bytes(segments: &[ClientSegment]) -> u64 {
        let ready = segments.iter().filter(|it| it.state == SegmentState::Ready);
        ready.map(|it| it.place.bytes).sum()
    }
}
