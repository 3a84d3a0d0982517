//! The flags of `farpool kv top`.

use clap::Args;
use farpool_load::client::asked::Server;

use super::kv_bench::server;
use crate::values::Span;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:\n  \
farpool kv top\n  \
farpool kv top --server unix:/run/farpool/kv.sock --interval 5s\n  \
farpool kv top --count 1 --json\n\n\
Works with any memcached server. Prefixes are shown if it counts them (`-D :`, or `stats detail \
on`).")]
pub struct KvTopArgs {
    /// The server: IP:PORT or unix:PATH
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:11211", value_parser = server)]
    pub server: Server,
    /// Time between two samples
    #[arg(long, value_name = "SPAN", default_value = "1s")]
    pub interval: Span,
    /// Stop after N samples [default: run until interrupted]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Number of prefixes to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub prefixes: usize,
    /// Print one JSON object per sample
    #[arg(long)]
    pub json: bool,
}
