//! `farpool node`: starts the node daemon and prints the ready line; the first signal drains the
//! node, the second stops it.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use farpool_acms::Thresholds;
use farpool_api::Client;
use farpool_blade::BladeConfig;
use farpool_host::MemoryFiles;
use farpool_node::{Ended, NodeDaemon, NodeHandle, NodeOptions};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{NodeArgs, NodeSettings};
use crate::commands::lending::{busy_rate, drain_timeout, listen, own_name};
use crate::commands::service::{access, open_audit, say_ready, tell_systemd};
use crate::commands::{collaborate, donor_protection};
use crate::config::UsageError;
use crate::logging;
use crate::values::{BladeAddress, Size};

/// Runs the daemon, with a controller or without one.
pub fn main(args: NodeArgs) -> anyhow::Result<u8> {
    match args.collaborate.collaborate {
        true => collaborate::daemon(&args),
        false => daemon(args.settings, args.json),
    }
}

/// Lends until SIGINT or SIGTERM, then until the node is empty or the time is over.
fn daemon(settings: NodeSettings, json: bool) -> anyhow::Result<u8> {
    let (patience, busy_rate) = (drain_timeout(&settings), busy_rate(&settings));
    let options = options(settings)?;
    logging::start()?;
    // Caught before anything is set up, so that no signal can leave a socket file behind.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let name = options.name.clone();
    let daemon = NodeDaemon::start(options)?;
    donor_protection::keep(Arc::clone(daemon.blade()), busy_rate)?;
    say(&name, &daemon, json)?;
    let (closer, handle) = (signals.handle(), daemon.handle());
    let watcher = std::thread::spawn(move || obey(&mut signals, &handle, patience));
    let ended = daemon.wait();
    closer.close();
    // A panic has been reported by the thread itself.
    let _ = watcher.join();
    match ended? {
        Ended::Empty => tracing::info!("ended, with nothing granted"),
        Ended::Overdue => tracing::warn!("ended; what was still granted is lost"),
        Ended::AtOnce => tracing::warn!("ended at once"),
    }
    Ok(0)
}

fn obey(signals: &mut Signals, node: &NodeHandle, patience: Duration) {
    for (before, signal) in signals.forever().enumerate() {
        if before == 0 {
            tracing::info!(signal, "draining; a second signal ends the node at once");
            tell_systemd("STOPPING=1");
            node.drain(patience);
        } else {
            node.stop();
        }
    }
}

fn options(settings: NodeSettings) -> anyhow::Result<NodeOptions> {
    let missing = || UsageError("no controller; give --control https://host:port".into());
    let (pki, token_file) = (settings.pki.as_deref(), settings.token_file.as_deref());
    let control = settings.control.as_deref().ok_or_else(missing)?;
    let access = access(control, pki, token_file, settings.insecure == Some(true))?;
    let client = Client::with(control, &access)?;
    let listen = listen(&settings)?;
    let zero = || UsageError("--bandwidth 0 lends nothing; give what the link carries".into());
    let bandwidth = settings.bandwidth.map(|Size(rate)| NonZeroU64::new(rate).ok_or_else(zero));
    let bandwidth = bandwidth.transpose()?;
    let advertise = settings.advertise.into_iter().map(|BladeAddress(address)| address);
    let blade = BladeConfig {
        allow_remote_tcp: settings.allow_remote_tcp == Some(true),
        credentials: access.credentials.clone(),
        audit: open_audit(settings.audit.as_deref())?,
        ..BladeConfig::default()
    };
    Ok(NodeOptions {
        name: settings.name.unwrap_or_else(|| own_name(access.credentials.as_deref())),
        client,
        listen,
        advertise: advertise.collect(),
        donate_bytes: settings.donate.map_or(0, |Size(bytes)| bytes),
        blade,
        compute_brick: settings.compute_brick,
        memory_brick: settings.memory_brick,
        bandwidth_bytes_per_s: bandwidth,
        thresholds: Thresholds::default(),
        memory: MemoryFiles::default(),
    })
}

fn say(name: &str, node: &NodeDaemon, json: bool) -> anyhow::Result<()> {
    let listen: Vec<String> = node.addresses().iter().map(ToString::to_string).collect();
    let spec = node.spec();
    say_ready(&match json {
        true => json!({
            "event": "ready",
            "pid": std::process::id(),
            "name": name,
            "donate_bytes": spec.donate_bytes,
            "blade_id": spec.blade_id,
            "incarnation": spec.incarnation,
            "listen": listen,
            "advertise": spec.addresses,
        })
        .to_string(),
        false => {
            format!("ready: {name} lends up to {} on {}", Size(spec.donate_bytes), listen.join(" "))
        }
    })
}
