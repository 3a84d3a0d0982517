//! The rack's controller: who gets which far memory, over which path, at which rate.
//!
//! * `model`: the state and all its changes, pure; wraps `farpool_placement::Allocator`.
//! * `reconcile`: what is due next, from intent and observation; pure.
//! * [`store`]: where intent is kept: a redb file, or etcd for several controllers.
//! * `core`: the state under its lock, durable before it is published.
//! * `clock`: the time by which nodes and clients become late; pure.
//! * `history`: the events that are remembered, also over a restart.
//! * `lead`: which controller leads, the reconciler's ticks, the switches.
//! * `rest`, `metrics`: the HTTP interface; `model::owners`: a program speaks for its tenant only.
//!
//! Nothing on the data path asks the controller: clients and blades continue while it is down.

mod clock;
mod core;
mod history;
mod lead;
mod metrics;
pub mod model;
mod reconcile;
mod rest;
pub mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use farpool_http::serve::{Connections, Limits};
use farpool_http::{Protection, Unprotected};
use farpool_placement::{Graph, SwitchKind};
use farpool_switch::SwitchDriver;
use tokio::net::TcpListener;

pub use reconcile::due;
pub use rest::{BODY_LIMIT_BYTES, REPORT_LIMIT_BYTES, openapi};

/// The source of the rack's graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TopologySource {
    /// A topology file.
    Path(PathBuf),
    /// The text of a topology file.
    Text(String),
}

/// Where intent is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreChoice {
    /// A redb file of this controller alone.
    Redb(PathBuf),
    /// An etcd cluster, by the URLs of its members, shared by several controllers.
    Etcd(Vec<String>),
}

/// A switch's name and its driver.
pub type NamedSwitch = (String, Box<dyn SwitchDriver>);

/// The options of a controller.
pub struct ControlOptions {
    /// Where it listens; port 0 takes a free one.
    pub listen: Vec<SocketAddr>,
    /// URL at which other machines reach it, which standbys give to clients; its first listening
    /// address if left out.
    pub advertise: Option<String>,
    /// The rack's topology; if left out, the rack is made of the nodes that register.
    pub topology: Option<TopologySource>,
    /// Where intent is kept.
    pub store: StoreChoice,
    /// Who may ask, and how they prove who they are.
    pub protection: Protection,
    /// Longest time a report or a wait for a state is held open; `farpool_api::WAIT_LIMIT_MS`
    /// unless changed, which clients expect to be an upper bound.
    pub wait_limit: Duration,
    /// Every circuit switch of the topology, by name.
    pub switches: Vec<NamedSwitch>,
    /// Most connections at a time; as many as the limit on open files allows if left out.
    pub connections: Option<usize>,
}

impl ControlOptions {
    /// Returns the options of a controller on one address, without topology, token and switches.
    #[must_use]
    pub fn new(listen: SocketAddr, store: StoreChoice) -> Self {
        Self {
            listen: vec![listen],
            advertise: None,
            topology: None,
            store,
            protection: Protection::default(),
            wait_limit: Duration::from_millis(farpool_api::WAIT_LIMIT_MS),
            switches: Vec::new(),
            connections: None,
        }
    }
}

impl std::fmt::Debug for ControlOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut all = f.debug_struct("ControlOptions");
        all.field("listen", &self.listen).field("store", &self.store).finish_non_exhaustive()
    }
}

/// Why the controller does not run, or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No address to listen on is given.
    #[error("no address to listen on was given")]
    NoListen,
    /// It would not be protected as it should be.
    #[error(transparent)]
    Unprotected(#[from] Unprotected),
    /// The address is in use, or not this machine's.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The topology cannot be read.
    #[error("the topology {path} cannot be read")]
    TopologyFile {
        /// The path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The topology is invalid.
    #[error("the topology: {0}")]
    Topology(#[from] farpool_placement::topology::TopologyError),
    /// A circuit switch has no driver, so its circuits could not be set up.
    #[error("nothing drives circuit switch {0}; without that no segment over it gets ready")]
    NoDriver(String),
    /// A driver is for a switch that the topology does not have.
    #[error("the topology has no circuit switch {0}")]
    NoSwitch(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::StoreError),
    /// The store's content is invalid.
    #[error(transparent)]
    Record(#[from] model::record::RecordError),
    /// The store's content does not fit the rack.
    #[error("the store does not fit the rack")]
    Adopt(#[from] model::AdoptError),
    /// The store failed while running; nothing that was not stored was acknowledged.
    #[error("the store failed: {0}")]
    StoreFailed(String),
    /// The system refused a socket, a thread or the like.
    #[error("the controller cannot run")]
    Io(#[from] std::io::Error),
}

fn read_topology(source: Option<&TopologySource>) -> Result<Option<Graph>, ControlError> {
    let text = match source {
        None => return Ok(None),
        Some(TopologySource::Text(text)) => text.clone(),
        Some(TopologySource::Path(path)) => std::fs::read_to_string(path)
            .map_err(|source| ControlError::TopologyFile { path: path.clone(), source })?,
    };
    let topology = farpool_placement::topology::read(&text)?;
    for warning in &topology.warnings {
        tracing::warn!("the topology: {warning}");
    }
    Ok(Some(topology.graph))
}

fn check_switches(graph: Option<&Graph>, drivers: &[NamedSwitch]) -> Result<(), ControlError> {
    let switches = graph.map_or(&[][..], Graph::switches).iter();
    let circuit: Vec<&str> = switches
        .filter(|switch| switch.kind == SwitchKind::Circuit)
        .map(|switch| switch.name.as_str())
        .collect();
    if let Some((unknown, _)) = drivers.iter().find(|(name, _)| !circuit.contains(&name.as_str())) {
        return Err(ControlError::NoSwitch(unknown.clone()));
    }
    match circuit.iter().find(|name| drivers.iter().all(|(driven, _)| driven != *name)) {
        Some(name) => Err(ControlError::NoDriver((*name).to_owned())),
        None => Ok(()),
    }
}

/// Runs a controller until `shutdown` is ready. `on_ready` is called with the addresses once
/// requests are accepted; a standby accepts them, too, and names the leader.
///
/// # Errors
/// See [`ControlError`]. A store file that fails ends the controller, which then knows more than a
/// restart would find.
pub async fn serve(
    options: ControlOptions,
    on_ready: impl FnOnce(&[SocketAddr]),
    shutdown: impl Future<Output = ()>,
) -> Result<(), ControlError> {
    let Some(first) = options.listen.first() else { return Err(ControlError::NoListen) };
    let tls = options.protection.check(&options.listen)?;
    let graph = read_topology(options.topology.as_ref())?;
    check_switches(graph.as_ref(), &options.switches)?;
    let mut listeners = Vec::new();
    for &address in &options.listen {
        let listener = TcpListener::bind(address).await;
        listeners.push(listener.map_err(|source| ControlError::Listen { address, source })?);
    }
    let mut addresses = Vec::new();
    for listener in &listeners {
        addresses.push(listener.local_addr()?);
    }
    let own = addresses.first().unwrap_or(first);
    let names: Vec<String> = options.advertise.iter().cloned().collect();
    let scheme = if tls.is_some() { "https" } else { "http" };
    let advertise = options.advertise.unwrap_or_else(|| format!("{scheme}://{own}"));
    let app = Arc::new(rest::App {
        role: RwLock::new(rest::Role::Standby { leader: None }),
        wait_limit: options.wait_limit,
        document: openapi().to_string(),
    });
    let mut lead = lead::start(&app, graph, options.store, advertise, options.switches)?;
    let service = rest::service(Arc::clone(&app), &options.protection, &names);
    let limits = options.connections.map_or_else(Limits::raised, Limits::of);
    let all = Connections::new(limits);
    let serve = |listener| {
        farpool_http::serve::serve(listener, service.clone(), Arc::clone(&all), tls.clone())
    };
    let mut servers: Vec<_> =
        listeners.into_iter().map(|listener| tokio::spawn(serve(listener))).collect();
    servers.extend(tls.as_ref().map(|tls| tokio::spawn(Arc::clone(tls).watch())));
    on_ready(&addresses);
    let failed = tokio::select! {
        () = shutdown => None,
        error = lead.failed() => Some(error),
    };
    // Waiting clients are answered that this controller ends; acknowledged changes are stored.
    lead.end().await;
    for server in servers {
        server.abort();
    }
    failed.map_or(Ok(()), Err)
}
