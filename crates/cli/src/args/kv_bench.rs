//! The flags of `farpool kv bench`, and how its values are written.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use farpool_load::client::asked::Server;

use crate::values::Span;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool kv bench --closed --connections 8 --depth 32\n  \
farpool kv bench --workload microblog --rate 50000 --slo p95=10ms\n  \
farpool kv bench --workload friendfeed --sweep --slo p99=1ms\n  \
farpool kv bench --echo --server-cpu 0 --client-cpu 1 --closed --connections 8 --depth 32\n\n\
Workloads: uniform, zipf, zipf:ALPHA, friendfeed, microblog, twitter:cluster1 to \
twitter:cluster54 (docs/users/kv-bench.md).\n\
Exit code 1: a target of --slo was missed, or a reply was wrong.")]
pub struct KvBenchArgs {
    /// The server: IP:PORT or unix:/PATH
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:11211", value_parser = server)]
    pub server: Server,
    /// Measure the floor instead: a bare echo server in a thread of this program, without a cache
    #[arg(long, conflicts_with = "server")]
    pub echo: bool,
    /// Length of an echo reply, in bytes [default: that of a hit]
    #[arg(long, value_name = "BYTES", requires = "echo")]
    pub echo_bytes: Option<usize>,
    /// Run the echo server on this processor
    #[arg(long, value_name = "N", requires = "echo")]
    pub server_cpu: Option<usize>,
    /// Run the client's first thread on this processor, and further threads on the next ones
    #[arg(long, value_name = "N")]
    pub client_cpu: Option<usize>,
    /// Workload: which keys are requested, and how
    #[arg(long, value_name = "NAME", default_value = "uniform")]
    pub workload: String,
    /// Number of keys of the workload
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=1 << 34))]
    pub keys: u64,
    /// Length of keys, 8 to 250 bytes [default: the workload's]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(8..=250))]
    pub key_bytes: Option<u16>,
    /// Length of values, in bytes [default: the workload's]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=1_048_064))]
    pub value_bytes: Option<u32>,
    /// Operations: get, set, or mixed:SHARE with the share of gets from 0 to 1 [default: the
    /// workload's]
    #[arg(long, value_name = "WHAT")]
    pub operation: Option<Operations>,
    /// Number of keys in one get [default: the workload's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub multi_get: Option<u16>,
    /// Protocol to use
    #[arg(long, value_enum, default_value_t = BenchProtocol::Text)]
    pub protocol: BenchProtocol,
    /// With KeyVault: no checksums, like memcached's protocols
    #[arg(long)]
    pub no_checksums: bool,
    /// Measure the highest throughput: send a batch on each connection, and the next one when it is
    /// answered
    #[arg(long, conflicts_with_all = ["rate", "sweep"])]
    pub closed: bool,
    /// Number of requests in a batch
    #[arg(long, value_name = "N", default_value_t = 1, requires = "closed", value_parser = clap::value_parser!(u16).range(1..))]
    pub depth: u16,
    /// Send this many requests per second, however slowly the server answers
    #[arg(long, value_name = "PER_SECOND", value_parser = rate)]
    pub rate: Option<f64>,
    /// Find the highest rate that meets every --slo; --rate is the first rate tried
    #[arg(long, requires = "slo")]
    pub sweep: bool,
    /// Latency target pPERCENT=SPAN, as p95=10ms or p99=1ms; may be repeated
    #[arg(long, value_name = "TARGET", conflicts_with = "closed")]
    pub slo: Vec<Promise>,
    /// Try each rate of the sweep up to N times before it counts as missed, for machines with
    /// pauses of their own
    #[arg(long, value_name = "N", default_value_t = 1, requires = "sweep", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub tries: u16,
    /// Distribution of the gaps between requests
    #[arg(long, value_enum, default_value_t = BenchGaps::Exponential)]
    pub gaps: BenchGaps,
    /// Number of connections, over all threads
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub connections: u16,
    /// Number of client threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
    /// How long to measure; in a sweep, each rate
    #[arg(long, value_name = "SPAN", default_value = "5s")]
    pub duration: Span,
    /// How long the load runs before the measurement
    #[arg(long, value_name = "SPAN", default_value = "1s")]
    pub warm_up: Span,
    /// Do not store all keys before the measurement
    #[arg(long)]
    pub no_fill: bool,
    /// Do not store a key after a get missed it; named workloads do, as applications use a cache
    #[arg(long)]
    pub no_look_aside: bool,
    /// Random seed; the same seed gives the same requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write all latencies here, as lines of LATENCY_NS COUNT
    #[arg(long, value_name = "FILE")]
    pub histogram: Option<PathBuf>,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchProtocol {
    /// memcached's classic commands
    Text,
    /// memcached's meta commands
    Meta,
    /// memcached's binary protocol
    Binary,
    /// Redis's GET, MGET, SET, DEL
    Redis,
    /// The KeyVault protocol of docs/contributors/kv-protocol.md over a socket; --server is then an
    /// address of `farpool kv --keyvault`
    #[value(name = "keyvault")]
    KeyVault,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchGaps {
    Exponential,
    Constant,
}

/// The share of gets among the operations; the others are sets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Operations {
    pub get: f64,
}

impl FromStr for Operations {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let share = match text {
            "get" => Some(1.0),
            "set" => Some(0.0),
            _ => text.strip_prefix("mixed:").and_then(|share| share.parse().ok()),
        };
        let share = share.filter(|share| (0.0..=1.0).contains(share));
        let get = share.ok_or_else(|| {
            format!("{text:?} is not an operation; write get, set or mixed:0.9 for 90 % gets")
        })?;
        Ok(Self { get })
    }
}

/// A latency target: a share of the requests and the longest time that it may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promise {
    pub percent: f64,
    pub limit: Duration,
}

impl FromStr for Promise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a latency target; write p95=10ms or p99.9=2ms");
        let (percent, limit) =
            text.strip_prefix('p').and_then(|it| it.split_once('=')).ok_or_else(wrong)?;
        let percent: f64 = percent.parse().map_err(|_| wrong())?;
        let Span(limit) = limit.parse().map_err(|_| wrong())?;
        if !(percent > 0.0 && percent < 100.0) {
            return Err(wrong());
        }
        Ok(Self { percent, limit })
    }
}

pub(super) fn server(text: &str) -> Result<Server, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(Server::Unix(PathBuf::from(path)));
    }
    let found = std::net::ToSocketAddrs::to_socket_addrs(text).ok().and_then(|mut it| it.next());
    found
        .map(Server::Tcp)
        .ok_or_else(|| format!("{text:?} is no server; write 127.0.0.1:11211 or unix:/path.sock"))
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: Option<f64> = text.parse().ok().filter(|rate| *rate > 0.0 && *rate < 1e9);
    rate.ok_or_else(|| format!("{text:?} is not a rate; write requests per second, as 50000"))
}
