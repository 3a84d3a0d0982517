//! The running node: sockets, threads, start and end.
//!
//! Threads: `fp-collab` handles datagrams, timers and samples of the memory; `fp-collab-back` takes
//! grants back; `fp-collab-join` resolves names; `fp-collab-keys` reads the rack keys; the REST
//! interface has a small runtime of its own, the blade its own threads.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_acms::{Config, DecodeError, Member, RackKeys, look_interval};
use farpool_blade::{Blade, BladeConfig, Server, Serving};
use farpool_kernel::{LogRate, lock};
use farpool_units::{SUPERPAGE_BYTES, at_most};
use farpool_wire::Address;

use crate::core::{Core, Revocation, random_bits};
use crate::ledger::HerePlace;
use crate::names::{cluster_id, next_incarnation, node_id};
use crate::rest::Rest;
use crate::{CollaborateError, CollaborateOptions, Observe, rack_key};

/// Time between two samples of the memory.
const LOOK_PERIOD: Duration = Duration::from_millis(250);
/// Longest wait for a datagram: work that REST requests have begun is due within a tick.
const RECEIVE_WAIT: Duration = Duration::from_millis(50);
/// Longest time that a full socket may delay everything else. The datagram is then lost, as
/// datagrams may be.
const SEND_WAIT: Duration = Duration::from_millis(5);
/// Most datagrams received before timers are checked again.
const DATAGRAMS_AHEAD: usize = 64;
/// Length of the receive buffer in bytes, above the largest datagram of the protocol: a longer one
/// is cut, and refused by its checksum.
const DATAGRAM_BYTES: usize = 2_048;
/// How long until names are resolved again: the first while no node is known, the second while some
/// are.
const RESOLVE_ALONE: Duration = Duration::from_secs(5);
const RESOLVE_PERIOD: Duration = Duration::from_secs(60);
/// Time between two looks at the file with the rack keys.
const KEYS_PERIOD: Duration = Duration::from_secs(1);
/// How often an ending node checks whether it may end.
const END_STEP: Duration = Duration::from_millis(20);
/// Attempts to find a port that is free for datagrams and connections alike.
const PORT_TRIES: usize = 16;

/// Tells a running node to end; kept by the thread that waits for signals.
#[derive(Clone, Debug, Default)]
pub struct Ending(Arc<(Mutex<u8>, Condvar)>);

impl Ending {
    /// Asks the node to end. Asked once, it ends when nothing is lent or used any more, or its time
    /// is over; asked twice, at once.
    pub fn ask(&self) {
        let (asked, changed) = &*self.0;
        let mut asked = lock(asked);
        *asked = asked.saturating_add(1);
        changed.notify_all();
    }

    fn times(&self) -> u8 {
        *lock(&self.0.0)
    }

    /// Waits until the node was asked more than `times` times, but no longer than `longest`.
    fn wait(&self, times: u8, longest: Duration) {
        let (asked, changed) = &*self.0;
        let guard = lock(asked);
        let waited = changed.wait_timeout_while(guard, longest, |asked| *asked <= times);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// How a node ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Farewell {
    /// Bytes that were still lent to others.
    pub lent_bytes: u64,
    /// Programs that still used this node's memory or what it borrowed.
    pub clients: usize,
}

impl Farewell {
    /// True if no program lost anything.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

/// A running node. Dropping it ends it without notice, as a crash would.
#[derive(Debug)]
pub struct Collaborator {
    core: Arc<Core>,
    /// Dropped first: no request may reach a node that is half gone.
    rest: Option<Rest>,
    stop: Ending,
    threads: Vec<JoinHandle<()>>,
    serving: Serving,
    drain_timeout: Duration,
}

impl Collaborator {
    /// Starts a node. `observe` samples the node's memory, for the first time before this returns.
    ///
    /// # Errors
    /// See [`CollaborateError`].
    pub fn start(
        options: CollaborateOptions,
        mut observe: impl Observe,
    ) -> Result<Self, CollaborateError> {
        options.check()?;
        let seen = observe().map_err(CollaborateError::Memory)?;
        let key_file = options.rack_key_file.clone();
        let keys = key_file.as_deref().map_or(Ok(RackKeys::none()), rack_key::read)?;
        let (socket, serving) = listen(&options, seen.total_bytes)?;
        let started = Instant::now();
        let mut config = config(&options, &socket, &serving)?;
        config.keys = keys;
        let member = Member::new(config, Duration::ZERO)?;
        let here = HerePlace {
            node: options.name.clone(),
            addresses: serving.addresses().iter().map(ToString::to_string).collect(),
        };
        let (revocations, orders) = channel();
        let blade = Arc::clone(serving.blade());
        let core = Arc::new(Core::new(member, socket, blade, revocations, started, here));
        core.observe(seen).map_err(CollaborateError::Memory)?;
        let rest = Rest::open(&options, &core)?;
        let (stop, drain_timeout) = (Ending::default(), options.drain_timeout);
        let mut node =
            Self { core, rest: Some(rest), stop, threads: Vec::new(), serving, drain_timeout };
        node.start_threads(options.join, key_file, observe, orders)?; // on an error, drop ends it
        Ok(node)
    }

    fn start_threads(
        &mut self,
        join: Vec<String>,
        key_file: Option<PathBuf>,
        observe: impl Observe,
        orders: Receiver<Revocation>,
    ) -> Result<(), CollaborateError> {
        let (core, stop) = (Arc::clone(&self.core), self.stop.clone());
        self.spawn("fp-collab", move || speak(&core, observe, &stop))?;
        let (core, stop) = (Arc::clone(&self.core), self.stop.clone());
        self.spawn("fp-collab-back", move || take_back(&core, &orders, &stop))?;
        if !join.is_empty() {
            let (core, stop) = (Arc::clone(&self.core), self.stop.clone());
            self.spawn("fp-collab-join", move || keep_contacts(&core, &join, &stop))?;
        }
        if let Some(file) = key_file {
            let (core, stop) = (Arc::clone(&self.core), self.stop.clone());
            self.spawn("fp-collab-keys", move || keep_keys(&core, &file, &stop))?;
        }
        Ok(())
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        self.threads.push(std::thread::Builder::new().name(name.to_owned()).spawn(body)?);
        Ok(())
    }

    /// Where programs and people connect.
    #[must_use]
    pub fn rest(&self) -> SocketAddr {
        self.rest.as_ref().map_or_else(|| SocketAddr::from(([0; 4], 0)), Rest::address)
    }

    /// Where other nodes send datagrams for this one.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.core.read(|state, _| state.member.config().addr)
    }

    /// Where the blade listens.
    #[must_use]
    pub fn blade_addresses(&self) -> &[Address] {
        self.serving.addresses()
    }

    /// The node's blade.
    #[must_use]
    pub fn blade(&self) -> &Arc<Blade> {
        self.serving.blade()
    }

    /// Runs until the node is told to end. Then lets others move out, and announces that it leaves.
    /// Returns what was still in use.
    pub fn run(self, ending: &Ending) -> Farewell {
        while ending.times() == 0 {
            ending.wait(0, Duration::from_secs(3600));
        }
        self.core.with(|state, now| {
            state.is_ending = true;
            state.member.lend_no_more(now);
            state.tell("node-ending", "this node", "it lends no more".to_owned());
        });
        let until = Instant::now() + self.drain_timeout;
        while ending.times() < 2 && Instant::now() < until && !self.left().is_clean() {
            ending.wait(1, END_STEP);
        }
        let left = self.left();
        if !left.is_clean() {
            let Farewell { lent_bytes, clients } = left;
            tracing::warn!(lent_bytes, clients, "ending while memory is still in use");
        }
        self.core.with(|state, now| {
            state.ledger.end_all();
            state.member.leave(now);
        });
        left
    }

    fn left(&self) -> Farewell {
        self.core.read(|state, _| Farewell {
            lent_bytes: state.member.bound_bytes(),
            clients: state.ledger.client_count(),
        })
    }
}

impl Drop for Collaborator {
    fn drop(&mut self) {
        drop(self.rest.take());
        self.stop.ask();
        for thread in self.threads.drain(..) {
            // A panic has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Opens the datagrams' socket, and the blade on the same port of TCP unless it has an address of
/// its own.
fn listen(
    options: &CollaborateOptions,
    total_bytes: u64,
) -> Result<(UdpSocket, Serving), CollaborateError> {
    let mut last = None;
    for _ in 0..PORT_TRIES {
        let address = options.listen;
        let socket = UdpSocket::bind(address)
            .map_err(|source| CollaborateError::Listen { address, source })?;
        let own = socket.local_addr()?;
        let blade = options.blade_listen.unwrap_or(own);
        match serve(options, blade, total_bytes) {
            Ok(serving) => {
                socket.set_write_timeout(Some(SEND_WAIT))?;
                return Ok((socket, serving));
            }
            // The port was free for datagrams only; another one is tried.
            Err(farpool_blade::ServeError::InUse { address })
                if options.listen.port() == 0 && options.blade_listen.is_none() =>
            {
                last = Some(farpool_blade::ServeError::InUse { address });
            }
            Err(error) => return Err(error.into()),
        }
    }
    let none = || CollaborateError::Io(std::io::Error::other("no port is free"));
    Err(last.map_or_else(none, CollaborateError::from))
}

fn serve(
    options: &CollaborateOptions,
    blade: SocketAddr,
    total_bytes: u64,
) -> Result<Serving, farpool_blade::ServeError> {
    // More than this is never lent or given to own programs; the blade takes no memory before that.
    let most = options.thresholds.max_low_bytes(total_bytes).max(SUPERPAGE_BYTES);
    let config = BladeConfig {
        memory_bytes: most,
        require_grants: true,
        allow_remote_tcp: options.allow_remote_tcp,
        credentials: options.protection.credentials.clone(),
        audit: options.protection.audit.clone(),
        control_requests_per_s: options.control_requests_per_s,
        ..BladeConfig::default()
    };
    let addresses = [Address::Unix(options.socket.clone()), Address::Tcp(blade)];
    Server::bind(&addresses, config)?.serve()
}

fn config(
    options: &CollaborateOptions,
    socket: &UdpSocket,
    serving: &Serving,
) -> Result<Config, CollaborateError> {
    let state_file = options.state_file.as_deref();
    let incarnation = next_incarnation(state_file).map_err(|source| {
        let path = state_file.unwrap_or_else(|| std::path::Path::new("")).to_owned();
        CollaborateError::StateFile { path, source }
    })?;
    let own = socket.local_addr()?;
    let advertised = |at: SocketAddr| SocketAddr::new(options.advertised_ip(at), at.port());
    let tcp = serving.addresses().iter().find_map(|address| match address {
        Address::Tcp(at) => Some(*at),
        _ => None,
    });
    let millis = |time: Duration| at_most::<u32, _>(time.as_millis());
    let (cluster, node) = (cluster_id(&options.cluster), node_id(&options.name));
    let mut config = Config::new(cluster, node, incarnation, advertised(own));
    config.blade = advertised(tcp.unwrap_or(own));
    config.zone = farpool_acms::Zone(options.zone);
    config.thresholds = options.thresholds;
    config.arbitration = options.arbitration;
    config.lease_ms = millis(options.lease);
    config.reclaim_deadline_ms = millis(options.reclaim_deadline);
    config.borrower_percent = options.borrower_percent;
    config.unused_ms = millis(options.unused);
    // A start in the same second, and so in the same life, goes on counting: a node sends fewer
    // datagrams than one in a microsecond.
    config.first_number = farpool_kernel::unix_ms().saturating_mul(1_000).max(1);
    for part in config.seed.chunks_mut(16) {
        part.copy_from_slice(&random_bits().to_le_bytes()[..part.len()]);
    }
    Ok(config)
}

/// Handles datagrams and timers, and samples the memory.
fn speak(core: &Core, mut observe: impl Observe, stop: &Ending) {
    let mut buffer = [0; DATAGRAM_BYTES];
    let mut look_at = core.now() + LOOK_PERIOD;
    let refused = LogRate::default();
    while stop.times() == 0 {
        if core.now() >= look_at {
            let begun = core.now();
            if let Err(error) = observe().and_then(|seen| core.observe(seen)) {
                core.observe_failed(&error);
            }
            look_at = begun + look_interval(LOOK_PERIOD, core.now().saturating_sub(begun));
        }
        core.with(|state, now| state.member.on_tick(now));
        let next = core.read(|state, _| state.member.next_wakeup()).min(look_at);
        let wait = next.saturating_sub(core.now()).clamp(Duration::from_millis(1), RECEIVE_WAIT);
        if core.socket().set_read_timeout(Some(wait)).is_err() {
            std::thread::sleep(wait);
            continue;
        }
        for _ in 0..DATAGRAMS_AHEAD {
            // An error means that the wait is over, or is the network's answer to an earlier
            // datagram.
            let Ok((length, from)) = core.socket().recv_from(&mut buffer) else { break };
            let datagram = &buffer[..length];
            let taken = core.with(|state, now| state.member.on_datagram(from, datagram, now));
            if let Err(error) = taken {
                tell_refused(from, error, &refused, core.now());
            }
        }
        if let Some((more, seconds)) = refused.more(core.now()) {
            tracing::warn!("{more} more datagrams were dropped in the last {seconds} s");
        }
    }
}

/// Logs why a datagram was dropped: loudly, but not often, if an operator has to look.
fn tell_refused(from: SocketAddr, error: DecodeError, rate: &LogRate, now: Duration) {
    let is_for_operators = matches!(
        error,
        DecodeError::Version(_)
            | DecodeError::Unsigned
            | DecodeError::Signed
            | DecodeError::UnknownKey(_)
            | DecodeError::Forged
            | DecodeError::Ahead(_)
    );
    if !is_for_operators {
        tracing::debug!(%from, %error, "a datagram that cannot be read");
    } else if rate.may_write(now) {
        tracing::warn!(%from, "a datagram is dropped: {error}");
    }
}

/// Uses the keys in the file as soon as they change. A file that cannot be used changes nothing.
fn keep_keys(core: &Core, file: &Path, stop: &Ending) {
    let mut said = None;
    while stop.times() == 0 {
        match rack_key::read(file) {
            Ok(keys) if core.read(|state, _| state.member.config().keys == keys) => said = None,
            Ok(keys) => {
                let numbers = rack_key::numbers(&keys).join(", ");
                tracing::info!("the rack keys are now {numbers}; the first one signs");
                core.with(|state, _| {
                    state.member.set_keys(keys);
                    state.tell("rack-keys", "this node", numbers);
                });
                said = None;
            }
            Err(error) => {
                let source = std::error::Error::source(&error);
                let why = source.map_or_else(|| error.to_string(), |it| format!("{error}: {it}"));
                if said.as_ref() != Some(&why) {
                    tracing::error!("the rack keys read before stay in use: {why}");
                    core.with(|state, _| state.tell("rack-keys-bad", "this node", why.clone()));
                    said = Some(why);
                }
            }
        }
        stop.wait(0, KEYS_PERIOD);
    }
}

/// Takes grants back, one after the other: the blade zeroes their memory.
fn take_back(core: &Core, orders: &Receiver<Revocation>, stop: &Ending) {
    while stop.times() == 0 {
        let Ok((id, epoch)) = orders.recv_timeout(RECEIVE_WAIT) else { continue };
        match core.blade().revoke_grant(id, epoch) {
            Ok(revoked) => tracing::info!(
                epoch = format_args!("{epoch:x}"),
                clients = revoked.clients,
                connections = revoked.connections,
                freed_bytes = revoked.freed_bytes,
                "memory is free"
            ),
            Err(error) => {
                tracing::error!(epoch = format_args!("{epoch:x}"), %error, "not taken back")
            }
        }
    }
}

/// Resolves the names of the nodes to greet, again and again, because addresses change.
fn keep_contacts(core: &Core, join: &[String], stop: &Ending) {
    let mut said = Vec::new();
    while stop.times() == 0 {
        let own = core.read(|state, _| state.member.config().addr);
        let mut contacts = Vec::new();
        let mut failed = Vec::new();
        for name in join {
            match name.to_socket_addrs() {
                Ok(found) => contacts.extend(found.filter(|address| *address != own)),
                Err(error) => failed.push(format!("{name}: {error}")),
            }
        }
        if failed != said {
            for failure in &failed {
                tracing::warn!("a node to join is not found: {failure}; tried again later");
            }
            said = failed;
        }
        contacts.dedup();
        let is_alone = core.with(|state, _| {
            // Old addresses are better than none.
            if !contacts.is_empty() {
                state.member.join(contacts);
            }
            state.member.peers().is_empty()
        });
        stop.wait(0, if is_alone { RESOLVE_ALONE } else { RESOLVE_PERIOD });
    }
}
