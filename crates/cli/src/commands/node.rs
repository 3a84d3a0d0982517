//! `farpool node`: starts the node daemon and prints the ready line; the first signal drains the
//! node, the second stops it.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use farpool_acms::Thresholds;
use farpool_api::Client;
use farpool_blade::{BackingKind, BladeConfig, Persist};
use farpool_host::MemoryFiles;
use farpool_node::{Ended, NodeDaemon, NodeHandle, NodeOptions};
use farpool_wire::Address;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{NodeArgs, NodeSettings};
use crate::commands::lending::{
    busy_rate, control_requests_per_s, drain_timeout, listen, own_name,
};
use crate::commands::outliving::{add_past, take_over, tell_past};
use crate::commands::service::{access, open_audit, say_ready, tell_systemd};
use crate::commands::{collaborate, donor_protection};
use crate::config::UsageError;
use crate::logging;
use crate::values::{BladeAddress, Size};

/// Runs the daemon, with a controller or without one.
pub fn main(args: NodeArgs) -> anyhow::Result<u8> {
    match args.collaborate.collaborate {
        true => collaborate::daemon(&args),
        false => daemon(args.settings, args.takeover, args.json),
    }
}

/// Lends until SIGINT or SIGTERM, then until the node is empty or the time is over; or ends at once
/// and leaves what it lends to the next process.
fn daemon(settings: NodeSettings, takeover: bool, json: bool) -> anyhow::Result<u8> {
    let is_kept = settings.persist.is_some();
    if takeover && !is_kept {
        let how = "--takeover goes on with what outlives a process; give --persist FILE, as the \
                   node that runs now was started with";
        return Err(UsageError(how.into()).into());
    }
    let drains = !is_kept || settings.drain_timeout.is_some();
    let patience = drains.then(|| drain_timeout(&settings));
    let busy_rate = busy_rate(&settings);
    let audit = settings.audit.clone();
    let mut options = options(settings)?;
    logging::start()?;
    // Caught before anything is set up, so that no signal can leave a socket file behind.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let name = options.name.clone();
    if takeover {
        options.check()?;
        take_over(&options.blade_config(), &mut signals)?;
    }
    // Not before: the process that is taken over has the log until its end.
    options.blade.audit = open_audit(audit.as_deref())?;
    let daemon = NodeDaemon::start(options)?;
    tell_past(daemon.blade().past());
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
        Ended::Overdue | Ended::AtOnce if is_kept => tracing::info!("ended; what is lent is kept"),
        Ended::Overdue => tracing::warn!("ended; what was still granted is lost"),
        Ended::AtOnce => tracing::warn!("ended at once"),
    }
    Ok(0)
}

/// Drains the node for that long at the first signal, if at all.
fn obey(signals: &mut Signals, node: &NodeHandle, patience: Option<Duration>) {
    for (before, signal) in signals.forever().enumerate() {
        match patience {
            Some(patience) if before == 0 => {
                tracing::info!(signal, "draining; a second signal ends the node at once");
                tell_systemd("STOPPING=1");
                node.drain(patience);
            }
            _ => {
                tracing::info!(signal, "stopping");
                tell_systemd("STOPPING=1");
                node.stop();
            }
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
    let control_requests_per_s = control_requests_per_s(&settings);
    let zero = || UsageError("--bandwidth 0 lends nothing; give what the link carries".into());
    let bandwidth = settings.bandwidth.map(|Size(rate)| NonZeroU64::new(rate).ok_or_else(zero));
    let bandwidth = bandwidth.transpose()?;
    let persist = settings.persist.is_some().then_some(Persist::Restart);
    if persist.is_some() && listen.iter().any(is_any_port) {
        let how = "--persist needs an address that the next process has, too; give --listen a port";
        return Err(UsageError(how.into()).into());
    }
    let advertise = settings.advertise.into_iter().map(|BladeAddress(address)| address);
    let blade = BladeConfig {
        allow_remote_tcp: settings.allow_remote_tcp == Some(true),
        credentials: access.credentials.clone(),
        control_requests_per_s,
        backing: settings.persist.map_or(BackingKind::Automatic, BackingKind::File),
        persist,
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

/// Whether the system selects the port, each time another one.
fn is_any_port(address: &Address) -> bool {
    matches!(address, Address::Tcp(at) if at.port() == 0)
}

fn say(name: &str, node: &NodeDaemon, json: bool) -> anyhow::Result<()> {
    let listen: Vec<String> = node.addresses().iter().map(ToString::to_string).collect();
    let spec = node.spec();
    if !json {
        let (memory, listen) = (Size(spec.donate_bytes), listen.join(" "));
        return say_ready(&format!("ready: {name} lends up to {memory} on {listen}"));
    }
    let mut line = json!({
        "event": "ready",
        "pid": std::process::id(),
        "name": name,
        "donate_bytes": spec.donate_bytes,
        "blade_id": spec.blade_id,
        "incarnation": spec.incarnation,
        "listen": listen,
        "advertise": spec.addresses,
    });
    add_past(&mut line, node.blade().past());
    say_ready(&line.to_string())
}
