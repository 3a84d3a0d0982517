//! `farpool node`: the daemon of a server in a rack, and what people ask about nodes.

use std::io::{Write, stdout};

use anyhow::Context;
use farpool_acms::Thresholds;
use farpool_node::{Ending, Node, NodeOptions};
use farpool_wire::Address;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::config::UsageError;
use crate::logging;
use crate::notify::notify;
use crate::rack_args::{NodeArgs, NodeCommand, NodeDaemonArgs};
use crate::values::{Size, Span};

use super::rack::{self, read_token};
use super::refuse_remote;

/// Runs the daemon, or asks the controller about nodes.
pub fn main(args: &NodeArgs) -> anyhow::Result<u8> {
    match &args.command {
        None if args.daemon.collaborate.collaborate => super::collaborate::daemon(&args.daemon),
        None => daemon(&args.daemon),
        Some(NodeCommand::List(access)) => rack::list_nodes(access),
        Some(NodeCommand::Show(named)) => rack::show_node(named),
        Some(NodeCommand::Drain(drain)) => rack::drain_node(drain),
    }
}

/// Lends until SIGINT or SIGTERM; a second one ends it without waiting for its clients.
fn daemon(args: &NodeDaemonArgs) -> anyhow::Result<u8> {
    refuse_remote(&args.listen, Some(args.allow_remote_tcp))?;
    logging::start()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let node = Node::start(options(args)?)?;
    say_ready(node.addresses(), args.access.json)?;
    let ending = Ending::default();
    let asked = ending.clone();
    std::thread::Builder::new().name("farpool-signals".into()).spawn(move || {
        for signal in signals.forever() {
            tracing::info!(signal, "ending; once more ends at once");
            asked.ask();
        }
    })?;
    node.run(&ending)?;
    Ok(0)
}

fn options(args: &NodeDaemonArgs) -> anyhow::Result<NodeOptions> {
    let missing = || UsageError("the offer is missing; give --donate SIZE".into());
    let Size(donate_bytes) = args.donate.ok_or_else(missing)?;
    let Span(drain_timeout) = args.drain_timeout;
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(NodeOptions {
        controllers: args.access.control.clone(),
        token: args.access.token_file.as_deref().map(read_token).transpose()?,
        name: args.name.clone().unwrap_or_else(host),
        donate_bytes,
        listen: args.listen.iter().map(|at| at.0.clone()).collect(),
        advertise: args.advertise.iter().map(|at| at.0.clone()).collect(),
        compute_brick: args.compute_brick.clone(),
        memory_brick: args.memory_brick.clone(),
        allow_remote_tcp: args.allow_remote_tcp,
        thresholds: Thresholds::default(),
        drain_timeout,
    })
}

fn say_ready(addresses: &[Address], json: bool) -> anyhow::Result<()> {
    let listen: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let line = if json {
        json!({ "event": "ready", "pid": std::process::id(), "listen": listen }).to_string()
    } else {
        format!("ready: {}", listen.join(" "))
    };
    writeln!(stdout(), "{line}").context("standard output is closed")?;
    if let Err(error) = notify("READY=1") {
        tracing::warn!(%error, "systemd does not take the message");
    }
    Ok(())
}
