//! `farpool control`: wires to the controller; starts, says it is ready, waits for a signal.

use std::io::{Write, stdout};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use farpool_control::{ControlOptions, StoreChoice, TopologySource, serve};
use farpool_switch::EmulatedSwitchDriver;
use rustix::process::geteuid;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::UsageError;
use crate::logging;
use crate::notify::notify;
use crate::rack_args::ControlArgs;

use super::rack::read_token;

/// Serves until SIGINT or SIGTERM.
pub fn main(args: &ControlArgs) -> anyhow::Result<u8> {
    logging::start()?;
    let options = options(args)?;
    let json = args.json;
    let runtime = tokio::runtime::Runtime::new().context("no threads for the controller")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("signals")?;
        let ended = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping");
        };
        serve(options, |addresses| say_ready(addresses, json), ended).await?;
        Ok(0)
    })
}

fn options(args: &ControlArgs) -> anyhow::Result<ControlOptions> {
    let first = args.listen.first().ok_or_else(|| UsageError("--listen is missing".into()))?;
    let mut options = ControlOptions::new(*first, store(args.store.as_deref())?);
    options.listen.clone_from(&args.listen);
    options.advertise.clone_from(&args.advertise);
    options.topology = args.topology.clone().map(TopologySource::Path);
    options.token = args.token_file.as_deref().map(read_token).transpose()?;
    options.allow_remote = args.allow_remote;
    for switch in &args.switch {
        let (name, socket) = switch
            .split_once('=')
            .ok_or_else(|| UsageError(format!("--switch {switch}: give NAME=SOCKET")))?;
        let driver = EmulatedSwitchDriver::connect_to(socket)?;
        options.switches.push((name.to_owned(), Box::new(driver)));
    }
    Ok(options)
}

fn store(text: Option<&str>) -> anyhow::Result<StoreChoice> {
    let Some(text) = text else { return Ok(StoreChoice::Redb(default_file()?)) };
    if let Some(path) = text.strip_prefix("redb:") {
        return Ok(StoreChoice::Redb(path.into()));
    }
    let urls = text.split(',').map(|url| url.replacen("etcd://", "http://", 1));
    let urls: Vec<String> = urls.collect();
    if text.is_empty() || !urls.iter().all(|url| url.starts_with("http://")) {
        let wrong = format!("--store {text}: give redb:FILE or etcd://HOST:PORT");
        return Err(UsageError(wrong).into());
    }
    Ok(StoreChoice::Etcd(urls))
}

/// Root's is a service's; others have theirs below their state folder.
fn default_file() -> anyhow::Result<PathBuf> {
    let folder = if geteuid().is_root() {
        PathBuf::from("/var/lib/farpool")
    } else {
        let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state"));
        let none = || UsageError("no HOME for the store; give --store redb:FILE".into());
        state.or_else(home).ok_or_else(none)?.join("farpool")
    };
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("the folder {} cannot be made", folder.display()))?;
    Ok(folder.join("control.redb"))
}

fn say_ready(addresses: &[SocketAddr], json: bool) {
    let listen: Vec<String> = addresses.iter().map(|at| format!("http://{at}")).collect();
    let line = if json {
        json!({ "event": "ready", "pid": std::process::id(), "listen": listen }).to_string()
    } else {
        format!("ready: {}", listen.join(" "))
    };
    // Who started it and closed its output does not wait for the line.
    let _ = writeln!(stdout(), "{line}");
    if let Err(error) = notify("READY=1") {
        tracing::warn!(%error, "systemd does not take the message");
    }
}
