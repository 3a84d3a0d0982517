//! `farpool vmm`: connects to the blades, and serves Firecracker or Cloud Hypervisor until a
//! signal.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use farpool_handshake::Dialer;
use farpool_pool::{Address, PoolConfig, Redundancy, Time, fresh_client};
use farpool_run::SealPolicy;
use farpool_units::{PAGE_BYTES_U64, SUPERPAGE_BYTES, plain};
use farpool_vmm::{Image, Listening, Stop, Store, StoreError, cloud_hypervisor, firecracker};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::{refuse_remote, service};
use crate::args::{VmmAction, VmmCloudHypervisorArgs, VmmFirecrackerArgs, VmmPoolArgs};
use crate::config::UsageError;
use crate::terminal;

/// Descriptors for as many guests as are served at once: each has a userfaultfd, a socket, a handle
/// on its process, and a connection to each of up to eight blades. Where the system gives fewer,
/// guests beyond that are not served.
const DESCRIPTORS: u64 = 16 * firecracker::GUESTS_MAX as u64;

pub fn main(action: &VmmAction) -> anyhow::Result<u8> {
    // Those that lack one later say so.
    let _ = farpool_kernel::raise_descriptors(DESCRIPTORS);
    match action {
        VmmAction::Firecracker(args) => serve_firecracker(args),
        VmmAction::CloudHypervisor(args) => serve_cloud_hypervisor(args),
    }
}

/// Says what a user should know of a guest; names of its process may be in it.
fn tell(news: &str) {
    eprintln!("farpool: {}", plain(news));
}

fn serve_firecracker(args: &VmmFirecrackerArgs) -> anyhow::Result<u8> {
    let (file, pages) = open_image(&args.image)?;
    let superpages = (u64::from(pages) * PAGE_BYTES_U64).div_ceil(SUPERPAGE_BYTES);
    let config = pool_config(&args.pool, superpages * SUPERPAGE_BYTES)?;
    // Caught before anything is set up, so that no signal can leave a socket file behind.
    let stop = stop_at_signals()?;
    let store = Store::connect(config)?;
    let listening = Listening::bind(&args.listen)?;
    let image = match load(&store, &file, pages, &stop) {
        Err(StoreError::Stopped) => return Ok(0),
        loaded => loaded.with_context(|| args.image.display().to_string())?,
    };
    drop(file);
    service::say_ready(&format!(
        "ready: {}, {pages} pages, {} of them not zeros",
        args.listen.display(),
        image.stored_pages()
    ))?;
    let options = firecracker::Options { beforehand: args.all };
    firecracker::serve(&listening, &image, options, &stop, &tell)?;
    service::tell_systemd("STOPPING=1");
    Ok(0)
}

/// Opens a snapshot's memory file, and counts its pages.
fn open_image(path: &Path) -> anyhow::Result<(File, u32)> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("{name} cannot be opened"))?;
    let status = file.metadata().with_context(|| format!("{name} cannot be read"))?;
    let bytes = status.len();
    if !status.is_file() || bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES_U64) {
        bail!(
            "{name} is no file of whole pages, and so no guest's memory; give the mem_file_path \
             of a Firecracker snapshot"
        );
    }
    let pages = u32::try_from(bytes / PAGE_BYTES_U64);
    Ok((file, pages.with_context(|| format!("{name} is larger than 16 TiB"))?))
}

fn load(
    store: &Arc<Store>,
    file: &File,
    pages: u32,
    stop: &Stop,
) -> Result<Arc<Image>, StoreError> {
    let bar = terminal::bytes_bar("stored");
    bar.set_length(u64::from(pages) * PAGE_BYTES_U64);
    let mut loader = store.begin(pages)?;
    loader.put_file(file, 0, 0, pages, |done_bytes| {
        bar.set_position(done_bytes);
        !stop.is_now()
    })?;
    let image = loader.finish()?;
    bar.finish_and_clear();
    Ok(image)
}

fn serve_cloud_hypervisor(args: &VmmCloudHypervisorArgs) -> anyhow::Result<u8> {
    if args.snapshot == args.restore {
        let how = "--snapshot and --restore are the same socket; at one farpool listens, at the \
                   other a Cloud Hypervisor";
        return Err(UsageError(how.into()).into());
    }
    let config = pool_config(&args.pool, u64::MAX)?;
    let stop = stop_at_signals()?;
    let store = Store::connect(config)?;
    let listening = Listening::bind(&args.snapshot)?;
    let (snapshot, restore) = (args.snapshot.display(), args.restore.display());
    service::say_ready(&format!("ready: snapshots at {snapshot}, restores at {restore}"))?;
    let options = cloud_hypervisor::Options { resume: args.resume, beforehand: args.all };
    let counter = terminal::counter("MiB of a snapshot stored");
    let watch = |done_bytes: u64| counter.set_position(done_bytes >> 20);
    let tell = |news: &str| counter.suspend(|| tell(news));
    cloud_hypervisor::serve(&listening, &args.restore, &store, options, &stop, &tell, &watch)?;
    counter.finish_and_clear();
    service::tell_systemd("STOPPING=1");
    Ok(0)
}

/// Ends servers at SIGINT and SIGTERM.
fn stop_at_signals() -> anyhow::Result<Stop> {
    let (reader, writer) = UnixStream::pair().context("signals cannot be watched")?;
    for signal in [SIGINT, SIGTERM] {
        let writer = writer.try_clone().context("signals cannot be watched")?;
        signal_hook::low_level::pipe::register(signal, writer)
            .context("signals cannot be watched")?;
    }
    Ok(Stop::when_readable(reader))
}

fn pool_config(args: &VmmPoolArgs, quota_bytes: u64) -> anyhow::Result<PoolConfig> {
    refuse_remote(&args.blade, Some(args.allow_remote_tcp || args.pki.is_some()))?;
    let dial = |credentials| Dialer::new(credentials, |news: &str| tell(news));
    let dialer = service::read_pki(args.pki.as_deref())?.map(dial).transpose()?;
    let is_remote = args.blade.iter().any(|it| matches!(it.0, Address::Tcp(_)));
    Ok(PoolConfig {
        blades: args.blade.iter().map(|it| it.0.clone().into()).collect(),
        client: fresh_client()?,
        client_name: format!("vmm:{}", std::process::id()),
        quota_bytes,
        sharing_group: None,
        deadline: args.deadline.0,
        allow_remote_tcp: args.allow_remote_tcp,
        secures_tcp: dialer.is_some(),
        redundancy: Redundancy::NONE,
        seals_pages: SealPolicy::from(args.seal).seals(is_remote),
        asks: dialer.map(|dialer| dialer as _),
        time: Time::KERNEL,
    })
}
