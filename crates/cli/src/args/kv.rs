//! The flags of `farpool kv`: its own, and memcached's with memcached's meaning.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use farpool_policy::CacheKind;

use super::{KvBenchArgs, KvTopArgs};
use crate::values::{BladeAddress, FlashPart, QuotaPart, Size, Span};

/// What `farpool kv` does beside serving.
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Measure a memcached: requests per second, latency at a rate, the highest rate that keeps a
    /// promise
    Bench(Box<KvBenchArgs>),
    /// Show what a memcached does, second after second: rates, hits, tiers, prefixes
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
farpool kv --memory 4GiB --far 32GiB --pool http://10.0.0.1:7080 --allow-remote-tcp\n  \
farpool kv --memory 4GiB --flash /data/kv:200GiB --threads 4\n  \
farpool kv -s /run/farpool/kv.sock -a 770 --memory 1GiB\n\n\
Flags of one letter are memcached's and mean what they mean there. Without -l it listens on \
127.0.0.1 only."
)]
pub struct KvArgs {
    #[command(subcommand)]
    pub command: Option<KvCommand>,
    /// Memory for items, index included [default: 64MiB]
    #[arg(long, value_name = "SIZE", env = "FARPOOL_KV_MEMORY", hide_env_values = true)]
    pub memory: Option<Size>,
    /// Memory in MiB, as memcached's
    #[arg(short = 'm', value_name = "MIB", conflicts_with = "memory")]
    pub memory_mib: Option<u64>,
    /// Far memory below it, for what memory has no room for; needs --blade or --pool
    #[arg(long, value_name = "SIZE", env = "FARPOOL_KV_FAR", hide_env_values = true)]
    pub far: Option<Size>,
    /// A blade that gives the far memory: shm:///path.sock, unix:///path.sock or tcp://ip:port; may
    /// be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',', requires = "far")]
    pub blade: Vec<BladeAddress>,
    /// Take far memory from the rack of this controller, or through the door of a node that
    /// collaborates (http://host:port, several with commas), as it comes, and give it back when it
    /// is asked for
    #[arg(long, value_name = "URL", env = "FARPOOL_KV_POOL", hide_env_values = true)]
    #[arg(conflicts_with = "blade", requires = "far")]
    pub pool: Option<String>,
    /// With --pool: read the controller's token from this file
    #[arg(long, value_name = "FILE", requires = "pool")]
    #[arg(env = "FARPOOL_KV_TOKEN_FILE", hide_env_values = true)]
    pub token_file: Option<PathBuf>,
    /// With --pool: the compute brick this is [default: the host's name]
    #[arg(long, value_name = "NAME", requires = "pool")]
    pub host: Option<String>,
    /// With --pool: bandwidth to ask for, a second and direction [default: 125 MB]
    #[arg(long, value_name = "SIZE", requires = "pool")]
    pub rate: Option<Size>,
    /// A blade that does not answer for so long is lost
    #[arg(long, value_name = "SPAN", default_value = "500ms")]
    pub far_deadline: Span,
    /// Permit blades over TCP beyond this host: items travel unencrypted
    #[arg(long)]
    pub allow_remote_tcp: bool,
    /// Flash below that: a file (made when it is not there) or a block device, and how much of it.
    /// What lies on it is served again after the next start
    #[arg(long, value_name = "PATH:SIZE", env = "FARPOOL_KV_FLASH", hide_env_values = true)]
    pub flash: Option<FlashPart>,
    /// Begin with empty flash, whatever the file or device holds
    #[arg(long, requires = "flash")]
    pub flash_reset: bool,
    /// Write no more than so much to flash in a second, in the long run; items beyond are dropped
    #[arg(long, value_name = "SIZE", requires = "flash")]
    pub flash_write_rate: Option<Size>,
    /// Keep flash's book-keeping in this directory while the server runs, on a tmpfs, or do not
    /// start [default: the first of $RUNTIME_DIRECTORY, /run, $XDG_RUNTIME_DIR and /dev/shm that is
    /// one and has room, otherwise in the flash]
    #[arg(long, value_name = "DIR", requires = "flash")]
    pub flash_books: Option<PathBuf>,
    /// Threads; each owns an equal share of the keys [default: one for each processor]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// TCP port; 0 = none
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 11211)]
    pub port: u16,
    /// Addresses to listen on, with or without a port; may be repeated
    #[arg(
        short = 'l',
        long,
        value_name = "ADDR",
        value_delimiter = ',',
        default_value = "127.0.0.1"
    )]
    pub listen: Vec<String>,
    /// Unix socket to listen on, instead of TCP
    #[arg(short = 's', long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Serve KeyVault, the light protocol, here, too: tcp://IP:PORT or unix:///PATH (shared memory
    /// for clients on this host); may be repeated
    #[arg(long, value_name = "ADDR", value_delimiter = ',')]
    pub keyvault: Vec<BladeAddress>,
    /// Let KeyVault's clients on this host read values where they lie, without a copy: whoever may
    /// open its unix socket can then read every item
    #[arg(long, requires = "keyvault", conflicts_with = "lock_memory")]
    pub keyvault_leases: bool,
    /// Serve figures for Prometheus at http://IP:PORT/metrics
    #[arg(long, value_name = "IP:PORT", env = "FARPOOL_KV_METRICS", hide_env_values = true)]
    pub metrics: Option<SocketAddr>,
    /// Permissions of the sockets, in octal
    #[arg(short = 'a', long, value_name = "MODE", default_value = "700")]
    pub socket_mode: String,
    /// UDP port: only 0 is taken, UDP is not served
    #[arg(short = 'U', value_name = "PORT")]
    pub udp_port: Option<u16>,
    /// Most clients at a time
    #[arg(short = 'c', long, value_name = "N", default_value_t = 1024)]
    pub connections: u64,
    /// Refuse new items when memory is full, instead of evicting old ones
    #[arg(short = 'M', long)]
    pub no_evict: bool,
    /// Which items go: s3-fifo, lru, fifo, clock, sieve, lfu, arc, slru, 2q, lirs, w-tinylfu or
    /// random
    #[arg(
        long,
        value_name = "NAME",
        default_value = "s3-fifo",
        env = "FARPOOL_KV_POLICY",
        hide_env_values = true
    )]
    pub policy: CacheKind,
    /// The largest item: bytes, or with k or m
    #[arg(short = 'I', long, value_name = "SIZE", default_value = "1m")]
    pub item_max: String,
    /// Requests of one client that are answered before others have their turn (at least 256)
    #[arg(short = 'R', long, value_name = "N")]
    pub requests_per_turn: Option<usize>,
    /// Clients that may wait to be accepted
    #[arg(short = 'b', long, value_name = "N", default_value_t = 1024)]
    pub backlog: i32,
    /// Protocol: ascii or auto; there is no other
    #[arg(short = 'B', value_name = "PROTOCOL")]
    pub protocol: Option<String>,
    /// File of NAME:PASSWORD lines; clients must begin with one
    #[arg(short = 'Y', long, value_name = "FILE")]
    pub credentials: Option<PathBuf>,
    /// Let clients end the server with `shutdown`
    #[arg(short = 'A', long)]
    pub allow_shutdown: bool,
    /// Refuse `flush_all`
    #[arg(short = 'F', long)]
    pub no_flush: bool,
    /// Items whose key begins with PREFIX take at most SIZE of memory together; may be repeated,
    /// the longest prefix holds
    #[arg(long, value_name = "PREFIX=SIZE")]
    pub quota: Vec<QuotaPart>,
    /// Refuse to list items: `lru_crawler metadump`, `stats cachedump`
    #[arg(short = 'X', long)]
    pub no_dump: bool,
    /// Refuse `watch`
    #[arg(short = 'W', long)]
    pub no_watch: bool,
    /// Count commands by the prefix of the key, which ends before this character (`stats detail
    /// dump`, /metrics, /keys)
    #[arg(short = 'D', long, value_name = "CHARACTER")]
    pub prefix_delimiter: Option<char>,
    /// At SIGTERM and SIGINT, serve the clients that are there for so long, but nobody new; a
    /// second signal ends at once
    #[arg(long, value_name = "SPAN")]
    pub drain: Option<Span>,
    /// Go on in the background
    #[arg(short = 'd', long)]
    pub daemonize: bool,
    /// Become this user once ports and sockets are open (root only)
    #[arg(short = 'u', long, value_name = "USER")]
    pub user: Option<String>,
    /// Write the process id here, and remove the file at the end
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// Keep all memory from being swapped out
    #[arg(short = 'k', long)]
    pub lock_memory: bool,
    /// Allow core files as large as the system permits
    #[arg(short = 'r')]
    pub core_files: bool,
    /// How long a thread looks for more work before it sleeps, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub spin_us: u64,
    /// Further options of memcached, with commas: idle_timeout=SECONDS, ext_path=PATH:SIZE (as
    /// --flash); others about its inner parts are taken and do nothing
    #[arg(short = 'o', long, value_name = "OPTIONS", value_delimiter = ',')]
    pub option: Vec<String>,
    /// Print more; may be repeated
    #[arg(short = 'v', action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Print the ready line as JSON
    #[arg(long)]
    pub json: bool,
    /// Taken as memcached takes them, without effect: items lie without gaps, CAS numbers cost
    /// nothing
    #[command(flatten)]
    pub without_effect: KvWithoutEffect,
}

/// Flags of memcached that have nothing to act on.
#[derive(Debug, Args)]
pub struct KvWithoutEffect {
    #[arg(short = 'f', value_name = "FACTOR", hide = true)]
    pub growth_factor: Option<f64>,
    #[arg(short = 'n', value_name = "BYTES", hide = true)]
    pub chunk_bytes: Option<u32>,
    #[arg(short = 'L', hide = true)]
    pub large_pages: bool,
    #[arg(short = 'C', hide = true)]
    pub no_cas: bool,
}
