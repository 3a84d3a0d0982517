//! How a server is set up, and what all its threads share.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use farpool_api::Access;
use farpool_kernel::lock;
use farpool_kv_protocol::compat::Compat;
use farpool_policy::CacheKind;
use farpool_seal::SealPolicy;
use rustix::event::EventfdFlags;

use crate::clients::auth::Credentials;
use crate::mail::mailbox::Mailbox;
use crate::tls::Tls;
use crate::watch::report::ShardReport;
use crate::watch::watchers::Watchers;
use farpool_kv_store::observe::Observed;
use farpool_kv_store::quota::QuotaReport;
use farpool_kv_tier::flash::FlashSettings;

/// How a server reaches the pool that grants it far memory.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// The controllers, or the door of a node that collaborates, separated by commas.
    pub controllers: String,
    /// What is shown to them.
    pub access: Access,
    /// The compute brick that the server runs on; by default this machine's name.
    pub host: Option<String>,
    /// Bandwidth wanted for each segment, in each direction.
    pub rate_bytes_per_s: Option<u64>,
}

/// The source of far memory.
#[derive(Debug, Clone)]
pub enum FarSource {
    /// All of it at the start, from these blades.
    Blades(Vec<farpool_pool::Address>),
    /// As much as the pool grants, for as long as it does.
    Pool(PoolOptions),
}

impl FarSource {
    /// True if what is stored there may pass a network: the rack chooses among hosts.
    pub(crate) fn is_remote(&self) -> bool {
        let is_tcp = |it: &farpool_pool::Address| matches!(it, farpool_pool::Address::Tcp(_));
        match self {
            FarSource::Blades(blades) => blades.iter().any(is_tcp),
            FarSource::Pool(_) => true,
        }
    }
}

/// Which of memcached's two protocols clients speak, or one client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// The first byte that a client sends decides.
    #[default]
    Auto,
    Text,
    Binary,
}

/// Far memory below the server's own.
#[derive(Debug, Clone)]
pub struct FarSettings {
    pub source: FarSource,
    /// For all shards together.
    pub bytes: u64,
    /// A blade that does not answer for this long is lost, and its items are misses.
    pub deadline: Duration,
    /// When what lies there is sealed.
    pub seal: SealPolicy,
    /// Permits TCP to other hosts without certificates, where nothing but pages is encrypted.
    pub allow_remote_tcp: bool,
    /// The certificate that blades are shown; TCP is used only with it then, and TLS.
    pub credentials: Option<Arc<farpool_identity::Credentials>>,
}

/// How a server is set up.
#[derive(Debug, Clone)]
pub struct Settings {
    pub addresses: Vec<SocketAddr>,
    pub socket_path: Option<PathBuf>,
    /// What clients of these may speak.
    pub dialect: Dialect,
    /// The version of memcached whose text protocol that is, and which `version` reports.
    pub compat: Compat,
    /// Addresses that speak KeyVault.
    pub keyvault_addresses: Vec<SocketAddr>,
    pub keyvault_path: Option<PathBuf>,
    /// Whether KeyVault clients may read the memory of all items, so that values need no copies.
    pub keyvault_leases: bool,
    /// Where metrics for Prometheus are served.
    pub metrics_address: Option<SocketAddr>,
    /// Permissions of the unix sockets.
    pub socket_mode: u32,
    /// Memory of all shards together.
    pub memory_bytes: usize,
    pub far: Option<FarSettings>,
    pub flash: Option<FlashSettings>,
    pub threads: usize,
    pub item_bytes_max: usize,
    /// Whether old items are evicted to make room for new ones.
    pub evicts: bool,
    /// Which items are evicted.
    pub policy: CacheKind,
    pub connections_max: u64,
    /// Clients that are idle for this long are disconnected; 0 = never.
    pub idle_timeout_s: u32,
    pub backlog: i32,
    pub verbosity: u32,
    pub allows_shutdown: bool,
    pub allows_flush: bool,
    pub allows_watch: bool,
    /// Permits `lru_crawler metadump` and `stats cachedump`.
    pub allows_dump: bool,
    /// The byte that ends the prefix of a key.
    pub prefix_delimiter: u8,
    /// Quotas: how much memory items of a prefix may take, over all shards.
    pub quotas: Vec<(Vec<u8>, u64)>,
    /// Whether commands are counted by prefix from the start.
    pub counts_prefixes: bool,
    /// How long connected clients may stay once the server drains.
    pub drain: Duration,
    pub credentials: Option<Arc<Credentials>>,
    /// Clients of `addresses` speak TLS.
    pub tls: Option<Arc<Tls>>,
    /// Addresses whose clients do not, although `tls` is set.
    pub plain_addresses: Vec<SocketAddr>,
    pub credentials_file: Option<PathBuf>,
    /// How long a thread polls for work before it sleeps, in microseconds.
    pub spin_us: u64,
    /// Requests of one connection that are answered before others get their turn.
    pub requests_per_turn: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            socket_path: None,
            dialect: Dialect::Auto,
            compat: Compat::default(),
            keyvault_addresses: Vec::new(),
            keyvault_path: None,
            keyvault_leases: false,
            metrics_address: None,
            socket_mode: 0o700,
            memory_bytes: 64 << 20,
            far: None,
            flash: None,
            threads: 4,
            item_bytes_max: 1 << 20,
            evicts: true,
            policy: CacheKind::S3Fifo,
            connections_max: 1024,
            idle_timeout_s: 0,
            backlog: 1024,
            verbosity: 0,
            allows_shutdown: false,
            allows_flush: true,
            allows_watch: true,
            allows_dump: true,
            prefix_delimiter: b':',
            quotas: Vec::new(),
            counts_prefixes: false,
            drain: Duration::ZERO,
            credentials: None,
            tls: None,
            plain_addresses: Vec::new(),
            credentials_file: None,
            spin_us: 0,
            requests_per_turn: REQUESTS_PER_TURN,
        }
    }
}

/// Requests of one connection answered in one turn: memcached's 20 costs a third of the speed when
/// clients send many at once.
pub const REQUESTS_PER_TURN: usize = 1024;

/// Far memory as it comes and goes.
#[derive(Debug, Default)]
pub struct FarFigures {
    pub wanted_bytes: AtomicU64,
    /// What is granted and has not been asked back.
    pub granted_bytes: AtomicU64,
    /// What has been asked back or lost and is not yet given back.
    pub leaving_bytes: AtomicU64,
    /// Pieces that have been asked back.
    pub reclaims: AtomicU64,
    /// Pieces that were lost without notice.
    pub lost_grants: AtomicU64,
}

/// What all threads of a server share.
#[derive(Debug)]
pub struct Shared {
    pub settings: Settings,
    pub mailboxes: Vec<Mailbox>,
    /// The figures of each thread, stored there once a second.
    pub(crate) reports: Vec<Mutex<ShardReport>>,
    /// The last observations of each thread's observer.
    pub(crate) observed: Vec<Mutex<Observed>>,
    pub start_unix_s: i64,
    /// The addresses the server listens on, as `stats conns` shows them.
    pub(crate) listeners: OnceLock<String>,
    pub verbosity: AtomicU32,
    /// Whether commands are now counted by prefix.
    pub counts_prefixes: AtomicBool,
    pub(crate) watchers: Watchers,
    pub connections: AtomicU64,
    pub total_connections: AtomicU64,
    pub rejected_connections: AtomicU64,
    pub memory_bytes: AtomicU64,
    pub far: FarFigures,
    /// Threads that owe their clients nothing more, counted once the server is to end.
    pub quiet_threads: AtomicUsize,
    /// A thread could not complete its writes to flash: the device does not answer.
    pub is_flash_unclean: AtomicBool,
    /// No new client is served; connected ones may stay for a while.
    pub is_draining: AtomicBool,
    /// A client asked the server to end.
    pub is_asked_to_stop: AtomicBool,
    /// Becomes readable when the server is to end.
    pub stop: std::os::fd::OwnedFd,
}

impl Shared {
    pub fn new(settings: Settings, start_unix_s: i64) -> rustix::io::Result<Self> {
        let mailboxes =
            (0..settings.threads).map(|_| Mailbox::new()).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            observed: mailboxes.iter().map(|_| Mutex::default()).collect(),
            reports: mailboxes.iter().map(|_| Mutex::default()).collect(),
            mailboxes,
            start_unix_s,
            listeners: OnceLock::new(),
            verbosity: AtomicU32::new(settings.verbosity),
            counts_prefixes: AtomicBool::new(settings.counts_prefixes),
            watchers: Watchers::default(),
            connections: AtomicU64::new(0),
            total_connections: AtomicU64::new(0),
            rejected_connections: AtomicU64::new(0),
            memory_bytes: AtomicU64::new(settings.memory_bytes as u64),
            far: FarFigures::default(),
            quiet_threads: AtomicUsize::new(0),
            is_flash_unclean: AtomicBool::new(false),
            is_draining: AtomicBool::new(false),
            is_asked_to_stop: AtomicBool::new(false),
            stop: rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            settings,
        })
    }

    #[must_use]
    pub fn shards(&self) -> usize {
        self.mailboxes.len()
    }

    /// The last observations of each thread's observer.
    pub(crate) fn observed_by_all(&self) -> Vec<Observed> {
        let read = |it: &Mutex<Observed>| lock(it).clone();
        self.observed.iter().map(read).collect()
    }

    /// Bytes written to far memory so far, as last reported by the shards.
    pub(crate) fn far_written_bytes(&self) -> u64 {
        let written = |it: &Mutex<ShardReport>| lock(it).far.counts.bytes_written;
        self.reports.iter().map(written).sum()
    }

    /// The quotas' use, summed over all shards, in the order in which quotas apply.
    pub(crate) fn quotas(&self) -> Vec<QuotaReport> {
        let mut shards = self.observed_by_all().into_iter().map(|it| it.quotas);
        let mut sums = shards.next().unwrap_or_default();
        for shard in shards {
            for (sum, it) in sums.iter_mut().zip(shard) {
                sum.limit_bytes += it.limit_bytes;
                sum.used_bytes += it.used_bytes;
                sum.items += it.items;
                sum.evictions += it.evictions;
            }
        }
        sums
    }

    /// Asks the server to end when its clients have left, or after [`Settings::drain`]. New clients
    /// are refused from now on.
    pub fn ask_to_drain(&self) {
        self.is_draining.store(true, std::sync::atomic::Ordering::Relaxed);
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    /// Asks the server to end; outstanding replies are sent first.
    pub fn ask_to_stop(&self) {
        self.is_asked_to_stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}
