//! The flags of `farpool kv`: its own, and those of memcached with the same meaning.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use farpool_kv_server::Compat;
use farpool_policy::CacheKind;

use super::{KvBenchArgs, KvTopArgs};
use crate::values::{BladeAddress, FlashPart, QuotaPart, Seal, Size, Span};

/// What `farpool kv` does besides serving.
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Measure a memcached server: requests per second, latency at a rate, or the highest rate that
    /// meets a latency target
    Bench(Box<KvBenchArgs>),
    /// Show live figures of a memcached server: rates, hits, tiers, prefixes
    Top(KvTopArgs),
}

#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:\n  \
farpool kv --memory 4GiB\n  \
farpool kv -l 0.0.0.0 -p 11211 -m 4096 -t 4 -c 10000\n  \
farpool kv --memory 4GiB --far 32GiB --blade tcp://10.0.0.7:7777 --allow-remote-tcp\n  \
farpool kv --memory 4GiB --far 32GiB --pool https://10.0.0.1:7080 --pki pki --allow-remote-tcp\n  \
farpool kv --memory 4GiB --flash /data/kv:200GiB --threads 4\n  \
farpool kv -s /run/farpool/kv.sock -a 770 --memory 1GiB\n\n\
Flags of one letter are memcached's and mean what they mean there. Without -l it listens on \
127.0.0.1 only."
)]
pub struct KvArgs {
    #[command(subcommand)]
    pub command: Option<KvCommand>,
    /// Memory for items and their index [default: 64MiB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_KV_MEMORY", hide_env_values = true)]
    pub memory: Option<Size>,
    /// The same in MiB, as in memcached
    #[arg(short = 'm', long = "memory-limit", value_name = "MIB", conflicts_with = "memory")]
    pub memory_mib: Option<u64>,
    /// Far memory for items that do not fit in memory; needs --blade or --pool
    #[arg(long, value_name = "SIZE", env = "FARPOOL_KV_FAR", hide_env_values = true)]
    pub far: Option<Size>,
    /// Take far memory from this blade: shm:///path.sock, unix:///path.sock or tcp://ip:port; may
    /// be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',', requires = "far")]
    pub blade: Vec<BladeAddress>,
    /// Take far memory, as it becomes available, from the rack of this controller or from
    /// a collaborating node: https://host:port, several separated by commas. It is returned
    /// when the rack or node reclaims it
    #[arg(long, value_name = "URL", env = "FARPOOL_KV_POOL", hide_env_values = true)]
    #[arg(conflicts_with = "blade", requires = "far")]
    pub pool: Option<String>,
    /// Folder with the cache's certificate (farpool pki issue), for https:// and for blades over
    /// TCP, which are then used with TLS only
    #[arg(long, value_name = "DIR", requires = "far")]
    #[arg(env = "FARPOOL_KV_PKI", hide_env_values = true)]
    pub pki: Option<PathBuf>,
    /// With --pool: ask an http:// controller beyond loopback; all is sent unencrypted
    #[arg(long, requires = "pool")]
    pub insecure: bool,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", requires = "pool")]
    #[arg(env = "FARPOOL_KV_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// With --pool: name of this machine's compute brick [default: the host's name]
    #[arg(long, value_name = "NAME", requires = "pool")]
    pub host: Option<String>,
    /// With --pool: bandwidth to ask for, per second in each direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub rate: Option<Size>,
    /// A blade that does not answer for this long is lost
    #[arg(long, value_name = "SPAN", default_value = "500ms")]
    pub far_deadline: Span,
    /// When to seal what is in far memory, so that a blade can neither read it nor return anything
    /// else. remote: if a blade is reached by TCP, or with --pool; always: also on this host
    #[arg(long, value_enum, default_value = "remote")]
    pub seal: Seal,
    /// Without --pki: allow blades over TCP beyond this host; all but what is sealed is sent
    /// unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Keep items on flash too: a file (created if missing) or block device, and how much of it to
    /// use. Items on flash survive a restart
    #[arg(long, value_name = "PATH:SIZE", env = "FARPOOL_KV_FLASH", hide_env_values = true)]
    pub flash: Option<FlashPart>,
    /// Discard the items on flash at the start
    #[arg(long, requires = "flash")]
    pub flash_reset: bool,
    /// Maximum average bytes per second to write to flash; items beyond that are dropped [default:
    /// no limit]
    #[arg(long, value_name = "SIZE", requires = "flash")]
    pub flash_write_rate: Option<Size>,
    /// Keep the book-keeping of flash in this directory on a tmpfs while the server runs; fail if
    /// that is not possible [default: the first of $RUNTIME_DIRECTORY, /run, $XDG_RUNTIME_DIR and
    /// /dev/shm that is a tmpfs with room, otherwise on the flash]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub flash_books: Option<PathBuf>,
    /// Number of threads; each owns an equal share of the keys [default: one per processor]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// TCP port; 0 = none
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 11211)]
    pub port: u16,
    /// Address to listen on, with or without a port; may be repeated
    #[arg(
        short = 'l',
        long,
        value_name = "ADDR",
        value_delimiter = ',',
        default_value = "127.0.0.1"
    )]
    pub listen: Vec<String>,
    /// Unix socket to listen on, instead of TCP
    #[arg(short = 's', long, alias = "unix-socket", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Also serve the KeyVault protocol here: tcp://IP:PORT, or unix:///PATH (shared memory, for
    /// clients on this host); may be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub keyvault: Vec<BladeAddress>,
    /// Let KeyVault clients on this host read values in place, without a copy. Anyone who may open
    /// its unix socket can then read every item
    #[arg(long, requires = "keyvault", conflicts_with = "lock_memory")]
    pub keyvault_leases: bool,
    /// Serve Prometheus metrics at http://IP:PORT/metrics
    #[arg(long, value_name = "IP:PORT", env = "FARPOOL_KV_METRICS", hide_env_values = true)]
    pub metrics: Option<SocketAddr>,
    /// Permissions of the unix sockets (-s, --keyvault unix://), in octal
    #[arg(short = 'a', long, alias = "unix-mask", value_name = "MODE", default_value = "700")]
    pub socket_mode: String,
    /// UDP port; must be 0, as UDP is not served
    #[arg(short = 'U', long = "udp-port", value_name = "PORT")]
    pub udp_port: Option<u16>,
    /// Maximum number of simultaneous clients
    #[arg(short = 'c', long, alias = "conn-limit", value_name = "N", default_value_t = 1024)]
    pub connections: u64,
    /// Refuse new items when memory is full, instead of evicting old ones
    #[arg(short = 'M', long, alias = "disable-evictions")]
    pub no_evict: bool,
    /// Eviction policy: s3-fifo, lru, fifo, clock, sieve, lfu, arc, slru, 2q, lirs, w-tinylfu or
    /// random
    #[arg(
        long,
        value_name = "NAME",
        default_value = "s3-fifo",
        env = "FARPOOL_KV_POLICY",
        hide_env_values = true
    )]
    pub policy: CacheKind,
    /// Size of the largest item: bytes, or with k, m or g
    #[arg(short = 'I', long, alias = "max-item-size", value_name = "SIZE", default_value = "1m")]
    pub item_max: String,
    /// Number of requests of one client to answer before the others get their turn, at least 256
    /// [default: 1024]
    #[arg(short = 'R', long, alias = "max-reqs-per-event", value_name = "N")]
    pub requests_per_turn: Option<usize>,
    /// Number of connections that may wait to be accepted
    #[arg(short = 'b', long, alias = "listen-backlog", value_name = "N", default_value_t = 1024)]
    pub backlog: i32,
    /// Protocols of memcached to serve: ascii, binary, or auto for both [default: auto]
    #[arg(short = 'B', long, value_name = "PROTOCOL")]
    pub protocol: Option<String>,
    /// Version of memcached to be compatible with, and to report: 1.6.45 or 1.6.18. The text
    /// protocol of 1.6.45 is stricter, and never takes a value for commands
    #[arg(long, value_name = "VERSION", default_value = "1.6.45", value_parser = compat)]
    pub compat: Compat,
    /// File of NAME:PASSWORD lines; each client must authenticate with one of them: by `set`, or in
    /// the binary protocol by SASL (PLAIN)
    #[arg(short = 'Y', long, alias = "auth-file", value_name = "FILE")]
    pub credentials: Option<PathBuf>,
    /// As in memcached: serve the binary protocol only, and authenticate by SASL; needs -Y
    #[arg(short = 'S', long = "enable-sasl")]
    pub sasl: bool,
    /// Speak TLS on TCP, except at addresses given as `-l notls:ADDR`; needs -o ssl_chain_cert=FILE
    #[arg(short = 'Z', long = "enable-ssl")]
    pub tls: bool,
    /// Let clients stop the server with `shutdown`
    #[arg(short = 'A', long, alias = "enable-shutdown")]
    pub allow_shutdown: bool,
    /// Refuse `flush_all`
    #[arg(short = 'F', long, alias = "disable-flush-all")]
    pub no_flush: bool,
    /// Limit the memory of all items whose key begins with PREFIX; may be repeated, the longest
    /// matching prefix counts
    #[arg(long, value_name = "PREFIX=SIZE")]
    pub quota: Vec<QuotaPart>,
    /// Refuse to list items: `lru_crawler metadump`, `stats cachedump`
    #[arg(short = 'X', long, alias = "disable-dumping")]
    pub no_dump: bool,
    /// Refuse `watch`
    #[arg(short = 'W', long, alias = "disable-watch")]
    pub no_watch: bool,
    /// Count commands by key prefix, the part before this character (shown by `stats detail dump`,
    /// /metrics, /keys)
    #[arg(short = 'D', long, value_name = "CHARACTER")]
    pub prefix_delimiter: Option<char>,
    /// On SIGTERM or SIGINT, serve the connected clients for this long, but accept no new ones; a
    /// second signal stops the server at once [default: stop at once]
    #[arg(long, value_name = "SPAN")]
    pub drain: Option<Span>,
    /// Run in the background
    #[arg(short = 'd', long, alias = "daemon")]
    pub daemonize: bool,
    /// Become this user once ports and sockets are open (root only)
    #[arg(short = 'u', long, value_name = "USER")]
    pub user: Option<String>,
    /// Write the process id to this file; the file is removed at exit
    #[arg(short = 'P', long, alias = "pidfile", value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Lock all memory, so that it is never swapped out
    #[arg(short = 'k', long)]
    pub lock_memory: bool,
    /// Allow core files as large as the system permits
    #[arg(short = 'r', long = "enable-coredumps")]
    pub core_files: bool,
    /// How long an idle thread polls for work before it sleeps, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub spin_us: u64,
    /// More options of memcached, separated by commas: idle_timeout=SECONDS; ext_path=PATH:SIZE (as
    /// --flash); for TLS ssl_chain_cert=FILE, ssl_key=FILE, ssl_ca_cert=FILE, ssl_verify_mode=0..3,
    /// ssl_min_version=2..3, ssl_session_cache; options about memcached's internals are accepted
    /// without effect
    #[arg(short = 'o', long, alias = "extended", value_name = "OPTIONS", value_delimiter = ',')]
    pub option: Vec<String>,
    /// Log more; may be repeated
    #[arg(short = 'v', long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Print the ready line as JSON
    #[arg(long)]
    pub json: bool,
    /// Print the licence, and the version of memcached that it is compatible with
    #[arg(short = 'i', long = "license")]
    pub shows_license: bool,
    /// Accepted as in memcached, without effect: items are stored without gaps, CAS numbers cost
    /// nothing
    #[command(flatten)]
    pub without_effect: KvWithoutEffect,
}

fn compat(version: &str) -> Result<Compat, String> {
    let known = || Compat::ALL.map(Compat::version).join(" and ");
    Compat::named(version).ok_or_else(|| format!("the versions of memcached are {}", known()))
}

/// Flags of memcached that have no effect here.
#[derive(Debug, Args)]
pub struct KvWithoutEffect {
    #[arg(short = 'f', long = "slab-growth-factor", value_name = "FACTOR", hide = true)]
    pub growth_factor: Option<f64>,
    #[arg(short = 'n', long = "slab-min-size", value_name = "BYTES", hide = true)]
    pub chunk_bytes: Option<u32>,
    #[arg(short = 'L', long = "enable-largepages", hide = true)]
    pub large_pages: bool,
    #[arg(short = 'C', long = "disable-cas", hide = true)]
    pub no_cas: bool,
    /// Items in memory do not survive a restart; those on flash do.
    #[arg(short = 'e', long = "memory-file", value_name = "FILE", hide = true)]
    pub memory_file: Option<PathBuf>,
    #[arg(short = 'N', long = "napi-ids", alias = "napi_ids", value_name = "N", hide = true)]
    pub napi_ids: Option<u32>,
}
