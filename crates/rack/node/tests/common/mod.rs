//! Controllers and nodes in this process; each ends when it is dropped.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_acms::Thresholds;
use farpool_api::Client;
use farpool_blade::BladeConfig;
use farpool_control::{ControlError, ControlOptions, StoreChoice, serve};
use farpool_e2e::PATIENCE;
use farpool_e2e::ports::free_address;
use farpool_host::MemoryFiles;
use farpool_node::{Ended, NodeDaemon, NodeError, NodeOptions};

pub(crate) const SUPERPAGE: u64 = 16 << 20;

/// A controller in a thread.
pub(crate) struct Controller {
    pub address: SocketAddr,
    end: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ControlError>>>,
}

impl Controller {
    /// Starts a controller. One that has just ended may still hold its store, so this is tried
    /// again.
    pub(crate) fn start(listen: SocketAddr, folder: &Path, token: Option<&str>) -> Self {
        let until = Instant::now() + PATIENCE;
        loop {
            match Self::try_start(listen, folder, token) {
                Ok(started) => return started,
                Err(ControlError::Store(_)) if Instant::now() < until => {}
                Err(error) => panic!("the controller did not start: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn try_start(
        listen: SocketAddr,
        folder: &Path,
        token: Option<&str>,
    ) -> Result<Self, ControlError> {
        let mut options = ControlOptions::new(listen, StoreChoice::Redb(folder.join("store")));
        options.protection.token = token.map(str::to_owned);
        let (ready, address) = channel();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let on_ready = move |addresses: &[SocketAddr]| ready.send(addresses[0]).unwrap();
            let served = serve(options, on_ready, async move { drop(ended.await) });
            tokio::runtime::Runtime::new().unwrap().block_on(served)
        });
        let Ok(address) = address.recv() else {
            return Err(thread.join().unwrap().unwrap_err());
        };
        Ok(Self { address, end: Some(end), thread: Some(thread) })
    }

    /// At an address that stays free when it has ended, for the one that comes after it.
    pub(crate) fn fresh(folder: &Path) -> Self {
        Self::start(free_address(), folder, None)
    }

    pub(crate) fn client(&self) -> Client {
        client_at(self.address, None)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

pub(crate) fn client_at(address: SocketAddr, token: Option<&str>) -> Client {
    Client::new(&format!("http://{address}"), token).unwrap()
}

/// A machine whose memory the test sets.
pub(crate) struct Machine(tempfile::TempDir);

impl Machine {
    pub(crate) fn new() -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        machine.set_available(8 << 30);
        machine
    }

    pub(crate) fn set_available(&self, bytes: u64) {
        self.set(16 << 30, bytes);
    }

    pub(crate) fn set(&self, total_bytes: u64, available_bytes: u64) {
        let (total, available) = (total_bytes >> 10, available_bytes >> 10);
        let text = format!("MemTotal: {total} kB\nMemAvailable: {available} kB\n");
        // Written elsewhere and renamed, so that it is never read half-written.
        let path = self.0.path().join("meminfo");
        std::fs::write(path.with_extension("new"), text).unwrap();
        std::fs::rename(path.with_extension("new"), path).unwrap();
    }
}

pub(crate) fn start_node(
    name: &str,
    client: Client,
    machine: &Machine,
    donate_bytes: u64,
) -> Result<NodeDaemon, NodeError> {
    let blade = BladeConfig { threads: 1, ..BladeConfig::default() };
    start_node_with(name, client, machine, donate_bytes, blade)
}

pub(crate) fn start_node_with(
    name: &str,
    client: Client,
    machine: &Machine,
    donate_bytes: u64,
    blade: BladeConfig,
) -> Result<NodeDaemon, NodeError> {
    NodeDaemon::start(NodeOptions {
        name: name.to_owned(),
        client,
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        advertise: Vec::new(),
        donate_bytes,
        blade,
        compute_brick: None,
        memory_brick: None,
        bandwidth_bytes_per_s: None,
        thresholds: Thresholds::default(),
        memory: MemoryFiles::at(machine.0.path(), machine.0.path()),
    })
}

/// Waits until a node has ended, and returns how.
pub(crate) fn end_of(node: NodeDaemon) -> Result<Ended, NodeError> {
    let handle = node.handle();
    let (ended, end) = channel();
    std::thread::spawn(move || ended.send(node.wait()));
    end.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        handle.stop();
        panic!("the node goes on")
    })
}
