//! Controllers for tests: in a thread of this process, or as a process that can be killed. Both end
//! when they are dropped; the process also ends when this process dies, because it reads our pipe.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod pki;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_api::{
    Client, ClientId, ClientReport, ClientSegmentUse, ClientSpec, NodeAnswer, NodeGrantUse,
    NodeReport, NodeSpec, SegmentSpec,
};
use farpool_control::{ControlError, ControlOptions, StoreChoice, serve};

/// Longest wait for anything here; reached only if something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a superpage.
pub(crate) const SUPERPAGE: u64 = 16 << 20;

/// Waits until `done` returns something.
pub(crate) fn wait_for<T>(what: &str, done: impl FnMut() -> Option<T>) -> T {
    farpool_testkit::wait_for(what, PATIENCE, done)
}

/// A controller in a thread.
pub(crate) struct Server {
    pub url: String,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ControlError>>>,
    folder: Option<tempfile::TempDir>,
}

impl Server {
    pub(crate) fn start(options: ControlOptions) -> Self {
        let scheme = if options.protection.credentials.is_some() { "https" } else { "http" };
        let (ready, address) = channel();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let on_ready = move |addresses: &[SocketAddr]| {
                let _ = ready.send(addresses[0]);
            };
            let served = serve(options, on_ready, async move { drop(ended.await) });
            tokio::runtime::Runtime::new().unwrap().block_on(served)
        });
        let Ok(address) = address.recv() else {
            panic!("the controller did not start: {:?}", thread.join().unwrap());
        };
        let url = format!("{scheme}://{address}");
        Self { url, end: Some(end), thread: Some(thread), folder: None }
    }

    /// Starts a controller on a store of its own, with changes to the usual options.
    pub(crate) fn fresh(change: impl FnOnce(&mut ControlOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = StoreChoice::Redb(folder.path().join("store"));
        let mut options = ControlOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)), store);
        change(&mut options);
        let mut server = Self::start(options);
        server.folder = Some(folder);
        server
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.url, None).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

/// Returns the program that runs a controller as a process.
pub(crate) fn serve_program() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let program: PathBuf =
        program.parent().unwrap().parent().unwrap().join("examples").join("serve");
    assert!(program.exists(), "build the example first: cargo build -p farpool-control --examples");
    program
}

/// A controller as a process.
pub(crate) struct Process {
    pub url: String,
    pub child: Child,
}

impl Process {
    pub(crate) fn start(store: &str) -> Self {
        let mut child = Command::new(serve_program())
            .arg(store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
        Self { url: url.trim().to_owned(), child }
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.url, None).unwrap()
    }

    pub(crate) fn kill(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A node's agent, driven step by step.
pub(crate) struct Agent {
    pub name: String,
    pub spec: NodeSpec,
    pub sequence: u64,
    /// The last answer: the grants of its blade.
    pub answer: NodeAnswer,
    pub lendable_bytes: u64,
}

impl Agent {
    pub(crate) fn join(api: &Client, name: &str, donate_bytes: u64) -> Self {
        let spec = NodeSpec::new(vec![format!("tcp://{name}:7070")], donate_bytes, 11, 12);
        api.put_node(name, &spec).unwrap();
        let answer = NodeAnswer { version: 0, draining: false, grants: Vec::new() };
        let lendable_bytes = donate_bytes;
        Self { name: name.to_owned(), spec, sequence: 0, answer, lendable_bytes }
    }

    /// Returns its next report.
    pub(crate) fn report(&mut self) -> NodeReport {
        self.sequence += 1;
        let grant = |grant: &farpool_api::NodeGrant| NodeGrantUse {
            segment: grant.segment,
            epoch: grant.epoch,
            bytes: Some(grant.bytes),
            used_bytes: 0,
            connections: 1,
        };
        NodeReport {
            incarnation: self.spec.incarnation,
            sequence: self.sequence,
            blade_id: self.spec.blade_id,
            capacity_bytes: self.spec.donate_bytes,
            lendable_bytes: self.lendable_bytes,
            grants: self.answer.grants.iter().map(grant).collect(),
            known_version: self.answer.version,
            ..NodeReport::default()
        }
    }

    /// Reports, and carries out the answer.
    pub(crate) fn step(&mut self, api: &Client) {
        let report = self.report();
        self.answer = api.report_node(&self.name, &report).unwrap();
    }

    /// Reports twice: then it has the grants that it should have, and the controller knows.
    pub(crate) fn settle(&mut self, api: &Client) {
        self.step(api);
        self.step(api);
    }
}

/// Registers a client.
pub(crate) fn join_client(api: &Client, bits: u128, host: &str) -> ClientId {
    let id = ClientId::from_u128(bits);
    let spec = ClientSpec {
        host: host.into(),
        name: "prog".into(),
        pid: 1,
        lease_ms: 3_600_000,
        tenant: None,
    };
    api.put_client(id, &spec).unwrap();
    id
}

/// Returns the spec of a small segment of a client.
pub(crate) fn small(client: ClientId) -> SegmentSpec {
    SegmentSpec {
        read_bytes_per_s: 1000,
        write_bytes_per_s: 1000,
        ..SegmentSpec::of_client(client, SUPERPAGE)
    }
}

/// Returns a report that all data of a segment is at the place with `epoch`.
pub(crate) fn evacuated(sequence: u64, id: farpool_api::SegmentId, epoch: u64) -> ClientReport {
    let segments = vec![ClientSegmentUse { id, used_bytes: 0, epoch, evacuated: true }];
    ClientReport { sequence, segments, ..ClientReport::default() }
}
