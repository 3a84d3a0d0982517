//! `farpool node --collaborate`: the daemon of a node without a controller.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use farpool_acms::Thresholds;
use farpool_host::MemoryFiles;
use farpool_http::Protection;
use farpool_peer::{CollaborateOptions, Collaborator, Ending, Observation};
use farpool_wire::Address;
use rustix::process::geteuid;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::NodeArgs;
use crate::commands::donor_protection;
use crate::commands::lending::{
    busy_rate, control_requests_per_s, drain_timeout, listen, own_name,
};
use crate::commands::service::{open_audit, read_pki, read_token, say_ready, tell_systemd};
use crate::config::UsageError;
use crate::logging;

/// Lends and borrows until SIGINT or SIGTERM; a second signal ends it without waiting. Returns 1 if
/// memory of this node was still in use at the end.
pub fn daemon(args: &NodeArgs) -> anyhow::Result<u8> {
    let (options, busy_rate) = (options(args)?, busy_rate(&args.settings));
    options.check().map_err(|wrong| UsageError(wrong.to_string()))?;
    logging::start()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let node = Collaborator::start(options, observe)?;
    donor_protection::keep(Arc::clone(node.blade()), busy_rate)?;
    say(&node, args.settings.pki.is_some(), args.json)?;
    let ending = Ending::default();
    let asked = ending.clone();
    std::thread::Builder::new().name("farpool-signals".into()).spawn(move || {
        for signal in signals.forever() {
            tracing::info!(signal, "ending; once more ends at once");
            tell_systemd("STOPPING=1");
            asked.ask();
        }
    })?;
    Ok(u8::from(!node.run(&ending).is_clean()))
}

/// Reads the memory use of this machine, or of the control group that runs out first.
fn observe() -> std::io::Result<Observation> {
    let seen = MemoryFiles::default().look()?;
    let level = seen.tightest().ok_or_else(|| std::io::Error::other("no memory is seen"))?;
    Ok(Observation {
        total_bytes: level.total_bytes,
        available_bytes: level.available_bytes,
        pressure_permille: seen.pressure_permille,
    })
}

fn options(args: &NodeArgs) -> anyhow::Result<CollaborateOptions> {
    let NodeArgs { settings, collaborate: how, .. } = args;
    let credentials = read_pki(settings.pki.as_deref())?;
    let own_name = || own_name(credentials.as_deref());
    let name = settings.name.clone().unwrap_or_else(own_name);
    let listen = listen(settings)?;
    let advertise: Vec<Address> = settings.advertise.iter().map(|at| at.0.clone()).collect();
    let missing = || UsageError("no address for other nodes; give --listen tcp://IP:PORT".into());
    let socket = listen.iter().find_map(|at| at.socket_path().map(Path::to_owned));
    Ok(CollaborateOptions {
        cluster: how.cluster.clone(),
        listen: tcp(&listen).ok_or_else(missing)?,
        blade_listen: None,
        advertise: tcp(&advertise).map(|at| at.ip()),
        socket: socket.map_or_else(|| default_socket(&name), Ok)?,
        join: how.join.clone(),
        zone: how.zone,
        thresholds: Thresholds::new(how.min, how.max).map_err(|e| UsageError(e.to_string()))?,
        arbitration: how.arbitration,
        lease: how.lease.0,
        reclaim_deadline: how.reclaim_deadline.0,
        rest: how.rest,
        protection: Protection {
            credentials,
            token: read_token(settings.token_file.as_deref())?,
            insecure: how.allow_remote_rest,
            audit: open_audit(settings.audit.as_deref())?,
        },
        allow_remote_tcp: settings.allow_remote_tcp == Some(true),
        control_requests_per_s: control_requests_per_s(settings),
        rack_key_file: how.rack_key_file.clone(),
        insecure: settings.insecure == Some(true),
        borrower_percent: how.borrower_share,
        unused: how.unused_after.0,
        state_file: how.state_file.clone(),
        drain_timeout: drain_timeout(settings),
        name,
    })
}

fn tcp(addresses: &[Address]) -> Option<SocketAddr> {
    addresses.iter().find_map(|at| match at {
        Address::Tcp(at) => Some(*at),
        _ => None,
    })
}

/// The blade's socket for this node's programs: in root's case the service's, else one in the
/// user's own folder.
fn default_socket(name: &str) -> anyhow::Result<PathBuf> {
    if !geteuid().is_root() && std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        return Err(UsageError("no XDG_RUNTIME_DIR; give --listen unix:///PATH, too".into()).into());
    }
    let folder = farpool_run::make_base()?;
    Ok(folder.join(format!("{}.sock", name.replace('/', "-"))))
}

fn say(node: &Collaborator, speaks_tls: bool, json: bool) -> anyhow::Result<()> {
    let scheme = if speaks_tls { "https" } else { "http" };
    let mut listen =
        vec![format!("{scheme}://{}", node.rest()), format!("udp://{}", node.address())];
    listen.extend(node.blade_addresses().iter().map(ToString::to_string));
    say_ready(&match json {
        true => {
            json!({ "event": "ready", "pid": std::process::id(), "listen": listen }).to_string()
        }
        false => format!("ready: {}", listen.join(" ")),
    })
}
