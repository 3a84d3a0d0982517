//! `farpool control`: starts the controller, prints the ready line, waits for a signal.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_control::{
    ControlError, ControlOptions, NamedSwitch, StoreChoice, TopologySource, serve,
};
use farpool_http::Protection;
use farpool_switch::EmulatedSwitchDriver;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{ControlArgs, ControlSettings};
use crate::commands::service::{open_audit, read_pki, read_token, say_ready, tell_systemd};
use crate::config::UsageError;
use crate::logging;
use crate::values::{StoreAt, SwitchAt};

/// Default address to listen on: this machine only.
const LISTEN_DEFAULT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7080);
/// The store of a service.
const STORE_OF_ROOT: &str = "/var/lib/farpool/control.redb";
/// The store of a user, below `$XDG_STATE_HOME` or `~/.local/state`.
const STORE_OF_USER: &str = "farpool/control.redb";
/// The store holds the keys of grants.
const FOLDER_MODE: u32 = 0o700;

/// Serves until SIGINT or SIGTERM. Everything acknowledged is stored; blades and clients continue.
pub fn main(args: ControlArgs) -> anyhow::Result<u8> {
    let options = options(args.settings)?;
    let scheme = if options.protection.credentials.is_some() { "https" } else { "http" };
    logging::start()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    let handle = signals.handle();
    let (end, ended) = tokio::sync::oneshot::channel::<i32>();
    let watcher = std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            tracing::info!(signal, "stopping");
            tell_systemd("STOPPING=1");
            // Fails only if the thread has already ended.
            let _ = end.send(signal);
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut said = Ok(());
    let served = runtime.block_on(serve(
        options,
        |addresses| said = say(scheme, addresses, args.json),
        async move { drop(ended.await) },
    ));
    handle.close();
    // A panic has been reported by the thread itself.
    let _ = watcher.join();
    served.map_err(explained)?;
    said.map(|()| 0)
}

fn say(scheme: &str, addresses: &[SocketAddr], json: bool) -> anyhow::Result<()> {
    let listen: Vec<String> = addresses.iter().map(|at| format!("{scheme}://{at}")).collect();
    say_ready(&match json {
        true => {
            json!({ "event": "ready", "pid": std::process::id(), "listen": listen }).to_string()
        }
        false => format!("ready: {}", listen.join(" ")),
    })
}

/// Turns an error that a flag can fix into a usage error that names the flag.
fn explained(error: ControlError) -> anyhow::Error {
    let how = match &error {
        ControlError::Unprotected(_) => "",
        ControlError::NoDriver(_) => "; name its control socket with --switch NAME=SOCKET",
        ControlError::NoSwitch(_) => "; check --switch",
        _ => return error.into(),
    };
    UsageError(format!("{error}{how}")).into()
}

fn options(settings: ControlSettings) -> anyhow::Result<ControlOptions> {
    let store = match settings.store {
        Some(StoreAt(store)) => store,
        None => StoreChoice::Redb(usual_store()?),
    };
    if let StoreChoice::Redb(path) = &store {
        make_folder(path)?;
    }
    let listen = if settings.listen.is_empty() { vec![LISTEN_DEFAULT] } else { settings.listen };
    Ok(ControlOptions {
        listen,
        advertise: settings.advertise,
        topology: settings.topology.map(TopologySource::Path),
        protection: Protection {
            credentials: read_pki(settings.pki.as_deref())?,
            token: read_token(settings.token_file.as_deref())?,
            insecure: settings.insecure == Some(true),
            audit: open_audit(settings.audit.as_deref())?,
        },
        switches: settings.switch.iter().map(driver).collect(),
        ..ControlOptions::new(LISTEN_DEFAULT, store)
    })
}

/// A switch that does not answer yet must not stop the controller from serving the rest of the
/// rack.
fn driver(at: &SwitchAt) -> NamedSwitch {
    (at.name.clone(), Box::new(EmulatedSwitchDriver::at(&at.socket, &at.name)))
}

pub(super) fn usual_store() -> Result<PathBuf, UsageError> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(STORE_OF_ROOT));
    }
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    let nowhere = || UsageError("no home directory for the store; give --store redb:PATH".into());
    Ok(home.ok_or_else(nowhere)?.join(STORE_OF_USER))
}

pub(super) fn make_folder(store: &Path) -> anyhow::Result<()> {
    let Some(folder) = store.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(FOLDER_MODE)
        .create(folder)
        .with_context(|| format!("the folder {} cannot be made", folder.display()))
}
