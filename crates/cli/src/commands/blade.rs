//! `farpool blade`: starts the blade's server, prints the ready line, waits for a signal.

use std::path::Path;

use anyhow::Context;
use farpool_blade::{BackingKind, BladeConfig, FlashConfig, PackConfig, Server, Serving};
use farpool_wire::Address;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{BladeArgs, BladeSettings};
use crate::commands::outliving::{add_past, take_over, tell_past};
use crate::commands::{refuse_remote, service};
use crate::config::UsageError;
use crate::logging;
use crate::values::{Backing, ControlRate, FlashPart, Persist, Size, Span};

/// Serves until SIGINT or SIGTERM, then removes its socket files.
pub fn main(args: &BladeArgs) -> anyhow::Result<u8> {
    let settings = &args.settings;
    let mut config = config(settings)?;
    if args.takeover && config.persist.is_none() {
        let how = "--takeover goes on with what outlives a process; give --persist, as the blade \
                   that serves now was started with";
        return Err(UsageError(how.into()).into());
    }
    let addresses: Vec<Address> = settings.listen.iter().map(|at| at.0.clone()).collect();
    if addresses.is_empty() {
        let how = "no address to listen on; give --listen unix:///path.sock or tcp://ip:port";
        return Err(UsageError(how.into()).into());
    }
    let is_allowed = config.allow_remote_tcp || config.credentials.is_some();
    refuse_remote(&settings.listen, Some(is_allowed))?;
    logging::start()?;
    // Caught before anything is set up, so that no signal can leave a socket file behind.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals cannot be watched")?;
    addresses.iter().filter_map(Address::socket_path).try_for_each(make_folder)?;
    if args.takeover {
        take_over(&config, &mut signals)?;
    }
    // Not before: the process that is taken over has the log until its end.
    config.audit = service::open_audit(settings.audit.as_deref())?;
    let serving = Server::bind(&addresses, config)?.serve()?;
    tell_past(serving.blade().past());
    say_ready(&serving, args.json)?;
    let signal = signals.forever().next();
    tracing::info!(signal, "stopping");
    service::tell_systemd("STOPPING=1");
    serving.shutdown();
    Ok(0)
}

/// Returns the blade's settings; unset ones keep the blade's defaults.
fn config(settings: &BladeSettings) -> Result<BladeConfig, UsageError> {
    let missing = || UsageError("the memory to lend is missing; give --memory SIZE".into());
    let Size(memory_bytes) = settings.memory.ok_or_else(missing)?;
    let mut config = BladeConfig { memory_bytes, ..BladeConfig::default() };
    config.allow_remote_tcp = settings.allow_remote_tcp == Some(true);
    config.credentials = service::read_pki(settings.pki.as_deref())?;
    if let Some(Backing(backing)) = &settings.backing {
        config.backing = backing.clone();
    }
    config.persist = settings.persist.map(|Persist(persist)| persist);
    if config.persist.is_some() && !matches!(config.backing, BackingKind::File(_)) {
        let how = "--persist needs memory that outlives the process; give --backing file:PATH (in \
                   /dev/shm or another tmpfs it stays DRAM)";
        return Err(UsageError(how.into()));
    }
    config.flash = flash(settings)?;
    if config.flash.is_some() && config.persist.is_some() {
        let how = "--flash does not outlive the process, as what is hot is in memory; give \
                   --persist or --flash";
        return Err(UsageError(how.into()));
    }
    config.pack = pack(settings, memory_bytes)?;
    if config.pack.is_some() && config.persist.is_some() {
        let how = "--pack does not outlive the process; give --persist or --pack";
        return Err(UsageError(how.into()));
    }
    if let Some(Size(bytes)) = settings.quota {
        config.quota_limit_bytes = bytes;
        config.quota_stranger_bytes = Some(bytes);
    }
    if let Some(Span(lease)) = settings.lease {
        config.lease = lease;
    }
    if let Some(threads) = settings.threads {
        config.threads = threads.into();
    }
    if let Some(ControlRate(rate)) = settings.control_rate {
        config.control_requests_per_s = rate;
    }
    Ok(config)
}

/// Returns what the blade's flash is to be.
fn flash(settings: &BladeSettings) -> Result<Option<FlashConfig>, UsageError> {
    let write_bytes_per_s = settings.flash_write_rate.map(|Size(bytes)| bytes);
    let Some(FlashPart { path, size: Size(bytes) }) = settings.flash.clone() else {
        if write_bytes_per_s.is_some() {
            let how = "--flash-write-rate limits writes to flash; give --flash FILE:SIZE";
            return Err(UsageError(how.into()));
        }
        return Ok(None);
    };
    if write_bytes_per_s == Some(0) {
        let how = "--flash-write-rate 0 would keep all memory that is written where it is; give \
                   at least 1MiB";
        return Err(UsageError(how.into()));
    }
    Ok(Some(FlashConfig { path, bytes, write_bytes_per_s }))
}

/// Returns how what is cold is to be packed.
fn pack(settings: &BladeSettings, memory_bytes: u64) -> Result<Option<PackConfig>, UsageError> {
    if settings.pack != Some(true) {
        if settings.lend.is_some() || settings.pack_after.is_some() {
            let how = "--lend and --pack-after say how a blade packs; give --pack";
            return Err(UsageError(how.into()));
        }
        return Ok(None);
    }
    let mut pack = PackConfig::of_memory(memory_bytes);
    if let Some(Size(bytes)) = settings.lend {
        pack.lent_bytes = bytes;
    }
    if let Some(Span(cold)) = settings.pack_after {
        pack.cold = cold;
    }
    Ok(Some(pack))
}

/// Creates the socket's folder if missing, as /run is empty after each boot.
fn make_folder(socket: &Path) -> anyhow::Result<()> {
    let Some(folder) = socket.parent() else {
        return Ok(());
    };
    match std::fs::create_dir(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("the folder {} cannot be made", folder.display()))
        }
        _ => Ok(()),
    }
}

fn say_ready(serving: &Serving, json: bool) -> anyhow::Result<()> {
    let config = serving.blade().config();
    let memory_bytes = config.memory_bytes;
    let lent_bytes = serving.blade().capacity_bytes();
    let listen: Vec<String> = serving.addresses().iter().map(ToString::to_string).collect();
    let past = serving.blade().past();
    let line = if json {
        let pid = std::process::id();
        let mut line =
            json!({ "event": "ready", "pid": pid, "memory_bytes": memory_bytes, "listen": listen });
        if config.flash.is_some() {
            line["flash_bytes"] = lent_bytes.into();
        }
        if config.pack.is_some() {
            line["lent_bytes"] = lent_bytes.into();
        }
        add_past(&mut line, past);
        line.to_string()
    } else {
        let (memory, lent) = (Size(memory_bytes), Size(lent_bytes));
        let lent = match (&config.flash, &config.pack) {
            (Some(_), _) => format!("{memory} above {lent} of flash"),
            (None, Some(_)) => format!("{lent} packed into {memory}"),
            (None, None) => memory.to_string(),
        };
        format!("ready: {lent} on {}", listen.join(" "))
    };
    service::say_ready(&line)
}
