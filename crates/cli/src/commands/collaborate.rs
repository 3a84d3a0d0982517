//! `farpool node --collaborate`: the daemon of a node that has no controller.

use std::io::{Write, stdout};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_acms::Thresholds;
use farpool_collaborate::{CollaborateOptions, Collaborator, Ending, Observation};
use farpool_node::memory::Reading;
use farpool_wire::Address;
use rustix::process::geteuid;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::config::UsageError;
use crate::logging;
use crate::notify::notify;
use crate::rack_args::NodeDaemonArgs;
use crate::values::BladeAddress;

use super::rack::read_token;
use super::refuse_remote;

/// Lends and borrows until SIGINT or SIGTERM; a second one ends it without waiting for anybody. The exit code is 1
/// if somebody still used memory of this node then.
pub fn daemon(args: &NodeDaemonArgs) -> anyhow::Result<u8> {
    refuse_remote(&args.listen, Some(args.allow_remote_tcp))?;
    logging::start()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let node = Collaborator::start(options(args)?, observe)?;
    say_ready(&node, args.access.json)?;
    let ending = Ending::default();
    let asked = ending.clone();
    std::thread::Builder::new().name("farpool-signals".into()).spawn(move || {
        for signal in signals.forever() {
            tracing::info!(signal, "ending; once more ends at once");
            asked.ask();
        }
    })?;
    Ok(u8::from(!node.run(&ending).is_clean()))
}

/// One look at this machine's memory, or at that of the control group the daemon runs in.
fn observe() -> std::io::Result<Observation> {
    let seen = Reading::now().own_use(0);
    let seen = seen.ok_or_else(|| std::io::Error::other("/proc/meminfo says nothing"))?;
    Ok(Observation {
        total_bytes: seen.total_bytes,
        available_bytes: seen.total_bytes.saturating_sub(seen.used_bytes),
        pressure_permille: seen.pressure_permille,
    })
}

fn options(args: &NodeDaemonArgs) -> anyhow::Result<CollaborateOptions> {
    let how = &args.collaborate;
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = args.name.clone().unwrap_or_else(host);
    let missing = || UsageError("no address for other nodes; give --listen tcp://IP:PORT".into());
    let socket = args.listen.iter().find_map(|at| at.0.socket_path().map(Path::to_owned));
    Ok(CollaborateOptions {
        cluster: how.cluster.clone(),
        listen: tcp(&args.listen).ok_or_else(missing)?,
        blade_listen: None,
        advertise: tcp(&args.advertise).map(|at| at.ip()),
        socket: socket.map_or_else(|| default_socket(&name), Ok)?,
        join: how.join.clone(),
        zone: how.zone,
        thresholds: Thresholds::new(how.min, how.max).map_err(|e| UsageError(e.to_string()))?,
        arbitration: how.arbitration,
        lease: how.lease.0,
        reclaim_deadline: how.reclaim_deadline.0,
        door: how.door,
        token: args.access.token_file.as_deref().map(read_token).transpose()?,
        allow_remote_door: how.allow_remote_door,
        allow_remote_tcp: args.allow_remote_tcp,
        state_file: how.state_file.clone(),
        drain_timeout: args.drain_timeout.0,
        name,
    })
}

fn tcp(addresses: &[BladeAddress]) -> Option<SocketAddr> {
    addresses.iter().find_map(|at| match at.0 {
        Address::Tcp(at) => Some(at),
        _ => None,
    })
}

/// The blade's socket for this node's programs: root's is a service's, others have theirs in a folder of
/// their own.
fn default_socket(name: &str) -> anyhow::Result<PathBuf> {
    let folder = if geteuid().is_root() {
        PathBuf::from("/run/farpool")
    } else {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let none = || UsageError("no XDG_RUNTIME_DIR; give --listen unix:///PATH, too".into());
        runtime.ok_or_else(none)?.join("farpool")
    };
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("the folder {} cannot be made", folder.display()))?;
    Ok(folder.join(format!("{}.sock", name.replace('/', "-"))))
}

fn say_ready(node: &Collaborator, json: bool) -> anyhow::Result<()> {
    let mut listen = vec![format!("http://{}", node.door()), format!("udp://{}", node.address())];
    listen.extend(node.blade_addresses().iter().map(ToString::to_string));
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
