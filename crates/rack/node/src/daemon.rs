//! The daemon as a whole: a blade that serves, a thread that watches memory, one that talks to the
//! controller. The caller handles signals and ends the daemon through a [`NodeHandle`].

use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use farpool_acms::Thresholds;
use farpool_api::{ApiError, Client, DEFAULT_NODE_RATE_BYTES_PER_S, NodeSpec};
use farpool_blade::{Blade, BladeConfig, ServeError, Server, Serving};
use farpool_kernel::fill_random;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::Address;

use crate::agent::Agent;
use crate::lender::Lender;
use crate::shared::{Shared, Wish};
use farpool_host::{MemoryFiles, link_bytes_per_s};

/// Bandwidth of a node that only its own machine can reach: about what one core copies.
const LOCAL_BYTES_PER_S: u64 = 10_000_000_000;
/// How long signing off may take after the time to drain is over; then the daemon ends without it.
const LEAVE_GRACE: Duration = Duration::from_secs(3);
/// How long a node that ends at once may take to undo the drain that it had requested: a few
/// reports and an answer.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// The settings of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The node's name in the rack.
    pub name: String,
    /// The controllers.
    pub client: Client,
    /// Where its blade listens; TCP port 0 selects a free one.
    pub listen: Vec<Address>,
    /// Where others connect; if empty, its listening addresses.
    pub advertise: Vec<Address>,
    /// Most memory it lends; below 16 MiB its blade does not serve, and the node only uses the
    /// rack's memory.
    pub donate_bytes: u64,
    /// How its blade is set up; the node sets size and grants itself.
    pub blade: BladeConfig,
    /// The compute brick of the topology that it is, if not the one of its own name.
    pub compute_brick: Option<String>,
    /// The memory brick of the topology that it is, if not the one of its own name.
    pub memory_brick: Option<String>,
    /// Bandwidth that it lends in each direction, in bytes per second; if left out, that of the
    /// link of its first address.
    pub bandwidth_bytes_per_s: Option<NonZeroU64>,
    /// How much its own programs may use before it lends less.
    pub thresholds: Thresholds,
    /// The files from which the machine's memory use is read.
    pub memory: MemoryFiles,
}

impl NodeOptions {
    /// How its blade is set up.
    #[must_use]
    pub fn blade_config(&self) -> BladeConfig {
        BladeConfig {
            memory_bytes: self.donate_bytes.max(SUPERPAGE_BYTES),
            require_grants: true,
            ..self.blade.clone()
        }
    }

    /// Checks what can be checked before the node has its addresses.
    ///
    /// # Errors
    /// Nobody could connect to it.
    pub fn check(&self) -> Result<(), NodeError> {
        advertised(&self.advertise, &self.listen).map(drop)
    }
}

/// How a node's life ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Nothing was granted any more.
    Empty,
    /// The time to drain was over; segments on it were lost.
    Overdue,
    /// By request, without waiting until it was empty.
    AtOnce,
}

/// Why a node does not run, or stopped running.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The blade cannot serve.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// No blade, threads or random numbers.
    #[error("the system does not give what the node needs")]
    System(#[from] std::io::Error),
    /// Nobody could connect there.
    #[error("nobody can connect to {0}: say with --advertise where others reach this node")]
    Unreachable(Address),
    /// A token is missing or wrong.
    #[error("the controller does not accept this node's token")]
    Unauthorized(#[source] ApiError),
    /// The registration was refused.
    #[error("the controller does not take node {name}")]
    Refused {
        /// The node's name.
        name: String,
        /// The reason.
        source: ApiError,
    },
    /// The agent's thread ended without reporting how.
    #[error("the node's agent has failed")]
    AgentFailed,
}

enum Event {
    Ended(Result<Ended, NodeError>),
    /// The wish has changed.
    Wished,
}

/// A node that runs. Dropping it ends it at once, without signing off.
#[derive(Debug)]
pub struct NodeDaemon {
    handle: NodeHandle,
    events: Receiver<Event>,
    spec: NodeSpec,
    blade: Arc<Blade>,
    serving: Option<Serving>,
}

/// Ends a node from anywhere.
#[derive(Clone)]
pub struct NodeHandle {
    shared: Arc<Shared>,
    events: Sender<Event>,
}

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeHandle").field("wish", &self.shared.wish()).finish_non_exhaustive()
    }
}

impl NodeHandle {
    /// Drains the node; it ends when it is empty, or after `at_most`.
    pub fn drain(&self, at_most: Duration) {
        self.wish(Wish::Drain { until: Instant::now() + at_most });
    }

    /// Ends the node without draining it; a drain that was requested is undone.
    pub fn stop(&self) {
        self.wish(Wish::Stop);
    }

    fn wish(&self, wish: Wish) {
        self.shared.set_wish(wish);
        // If this fails, nobody waits any more.
        let _ = self.events.send(Event::Wished);
    }
}

impl NodeDaemon {
    /// Starts a node, which lends memory from now on. When this returns, registration has been
    /// attempted once; the controller need not have answered.
    ///
    /// # Errors
    /// The blade cannot serve, or the controller refuses this node.
    pub fn start(options: NodeOptions) -> Result<Self, NodeError> {
        let NodeOptions { name, client, donate_bytes, memory, .. } = &options;
        let (name, client, donate_bytes) = (name.clone(), client.clone(), *donate_bytes);
        let (blade, serving) = start_blade(&options)?;
        let listening = serving.as_ref().map_or(&[][..], Serving::addresses);
        let addresses = advertised(&options.advertise, listening)?;
        let found = || bandwidth_of(listening, &options.advertise, link_bytes_per_s);
        let rate = options.bandwidth_bytes_per_s.map_or_else(found, NonZeroU64::get);
        tracing::info!(bytes_per_s = rate, "bandwidth that is lent in each direction");
        let spec = NodeSpec {
            read_bytes_per_s: rate,
            write_bytes_per_s: rate,
            compute_brick: options.compute_brick.clone(),
            memory_brick: options.memory_brick.clone(),
            ..NodeSpec::new(
                addresses,
                if serving.is_some() { donate_bytes } else { 0 },
                random()?,
                blade.id(),
            )
        };
        let shared = Arc::new(Shared::new());
        let lender = Lender::new(
            Arc::clone(&blade),
            Arc::clone(&shared),
            memory.clone(),
            options.thresholds,
            spec.donate_bytes,
        );
        let (sender, events) = channel();
        let handle = NodeHandle { shared: Arc::clone(&shared), events: sender.clone() };
        // From here on an early return ends the threads.
        let daemon = Self { handle, events, spec: spec.clone(), blade, serving };
        let mut agent = Agent::new(name, spec, client, Arc::clone(&daemon.blade), shared);
        agent.begin()?;
        thread::Builder::new().name("fp-node-lend".to_owned()).spawn(move || lender.run())?;
        thread::Builder::new()
            .name("fp-node-agent".to_owned())
            .spawn(move || drop(sender.send(Event::Ended(agent.run()))))?;
        Ok(daemon)
    }

    /// The addresses on which its blade listens, with the actual TCP ports.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        self.serving.as_ref().map_or(&[][..], Serving::addresses)
    }

    /// What it registered.
    #[must_use]
    pub fn spec(&self) -> &NodeSpec {
        &self.spec
    }

    /// Its blade.
    #[must_use]
    pub fn blade(&self) -> &Arc<Blade> {
        &self.blade
    }

    /// Returns a handle that ends the node from elsewhere.
    #[must_use]
    pub fn handle(&self) -> NodeHandle {
        self.handle.clone()
    }

    /// Waits until the node has ended; then its blade no longer serves.
    ///
    /// # Errors
    /// The controller does not accept the token, and nothing is granted.
    pub fn wait(self) -> Result<Ended, NodeError> {
        loop {
            let event = match self.handle.shared.wish() {
                Wish::Stop => self.events.recv_timeout(STOP_GRACE),
                Wish::Run => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Wish::Drain { until } => {
                    // The agent ends in time, unless it waits for an answer that never arrives.
                    let left = until.saturating_duration_since(Instant::now());
                    self.events.recv_timeout(left + LEAVE_GRACE)
                }
            };
            match event {
                Ok(Event::Ended(ended)) => return ended,
                Ok(Event::Wished) => {}
                Err(RecvTimeoutError::Timeout) if self.handle.shared.wish() == Wish::Stop => {
                    return Ok(Ended::AtOnce);
                }
                Err(RecvTimeoutError::Timeout) => return Ok(Ended::Overdue),
                Err(RecvTimeoutError::Disconnected) => return Err(NodeError::AgentFailed),
            }
        }
    }
}

impl Drop for NodeDaemon {
    fn drop(&mut self) {
        self.handle.shared.set_wish(Wish::Stop);
    }
}

fn start_blade(options: &NodeOptions) -> Result<(Arc<Blade>, Option<Serving>), NodeError> {
    let lends = options.donate_bytes >= SUPERPAGE_BYTES;
    let config = options.blade_config();
    if !lends {
        return Ok((Arc::new(Blade::new(config)?), None));
    }
    let serving = Server::bind(&options.listen, config)?.serve()?;
    Ok((Arc::clone(serving.blade()), Some(serving)))
}

/// Returns the bandwidth that a node with these addresses has: of the slowest link that others use,
/// as `speed_of` says; the usual one if that is not known; and that of memory if nobody beyond this
/// machine can connect.
fn bandwidth_of(
    listening: &[Address],
    advertised: &[Address],
    speed_of: impl Fn(IpAddr) -> Option<u64>,
) -> u64 {
    let ips = listening.iter().chain(advertised).filter_map(|address| match address {
        Address::Tcp(at) if !at.ip().is_loopback() => Some(at.ip()),
        _ => None,
    });
    let mut speeds = Vec::new();
    let mut is_remote = false;
    for ip in ips {
        is_remote = true;
        speeds.extend(speed_of(ip));
    }
    match speeds.into_iter().min() {
        Some(speed) => speed,
        None if is_remote => DEFAULT_NODE_RATE_BYTES_PER_S,
        None => LOCAL_BYTES_PER_S,
    }
}

/// Returns the addresses for the controller: those given, or else the listening ones.
///
/// Errors if others cannot connect to one of them.
fn advertised(given: &[Address], listening: &[Address]) -> Result<Vec<String>, NodeError> {
    let addresses = if given.is_empty() { listening } else { given };
    let is_nowhere = |address: &&Address| match address {
        Address::Tcp(at) => at.ip().is_unspecified() || at.port() == 0,
        Address::Unix(_) | Address::Shm(_) => false,
    };
    if let Some(nowhere) = addresses.iter().find(is_nowhere) {
        return Err(NodeError::Unreachable(nowhere.clone()));
    }
    // A unix socket serves shared memory, too; the client decides.
    let text = |address: &Address| match address {
        Address::Shm(path) => Address::Unix(path.clone()).to_string(),
        other => other.to_string(),
    };
    let mut texts: Vec<String> = Vec::new();
    for address in addresses.iter().map(text) {
        if !texts.contains(&address) {
            texts.push(address);
        }
    }
    Ok(texts)
}

fn random() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    fill_random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<Address> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_advertised_can_be_connected_to() {
        let listening = addresses(&["shm:///a.sock", "unix:///a.sock", "tcp://127.0.0.1:7"]);
        let told = advertised(&[], &listening).unwrap();
        assert_eq!(told, ["unix:///a.sock", "tcp://127.0.0.1:7"]);
        let given = addresses(&["tcp://192.0.2.1:7"]);
        assert_eq!(advertised(&given, &listening).unwrap(), ["tcp://192.0.2.1:7"]);
        for nowhere in ["tcp://0.0.0.0:7", "tcp://[::]:7", "tcp://127.0.0.1:0"] {
            let error = advertised(&[], &addresses(&[nowhere])).unwrap_err();
            assert!(error.to_string().contains("--advertise"), "{error}");
        }
    }

    #[test]
    fn a_nodes_bandwidth_is_its_slowest_links() {
        let at = |text: &str| text.parse::<Address>().unwrap();
        let speed_of = |ip: IpAddr| match ip.to_string().as_str() {
            "10.0.0.1" => Some(3_125_000_000),
            "10.0.0.2" => Some(125_000_000),
            _ => None,
        };
        let of = |all: &[&str]| {
            let all: Vec<Address> = all.iter().map(|text| at(text)).collect();
            bandwidth_of(&all, &[], speed_of)
        };
        assert_eq!(of(&["tcp://10.0.0.1:1"]), 3_125_000_000);
        assert_eq!(of(&["tcp://10.0.0.1:1", "tcp://10.0.0.2:1", "unix:///a"]), 125_000_000);
        assert_eq!(of(&["tcp://10.0.0.3:1"]), DEFAULT_NODE_RATE_BYTES_PER_S);
        assert_eq!(of(&["tcp://127.0.0.1:1", "unix:///a"]), LOCAL_BYTES_PER_S);
        assert_eq!(of(&[]), LOCAL_BYTES_PER_S);
    }
}
