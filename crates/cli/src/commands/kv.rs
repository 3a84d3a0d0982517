//! `farpool kv`: starts the key-value server, prints the ready line, waits for a signal.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use farpool_kv_server::auth::Credentials;
use farpool_kv_server::{
    Bookkeeping, FarSettings, FarSource, FlashSettings, PoolOptions, Server, Settings,
};
use farpool_units::{MIB, at_most};
use farpool_wire::Address;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::args::{KvArgs, KvCommand};
use crate::commands::kv_access::{TlsOptions, dialect, warn_of_open_doors};
use crate::commands::kv_options::{self, Ignored};
use crate::commands::{kv_bench, kv_top, refuse_remote, service};
use crate::config::UsageError;
use crate::logging;
use crate::privileges;
use crate::values::{FlashPart, Size};

/// The smallest and largest `-I` of memcached.
const ITEM_BYTES_MIN: u64 = 1 << 10;
const ITEM_BYTES_MAX: u64 = 1 << 30;
/// Descriptors of the server itself: files, sockets and wake-up descriptors.
const DESCRIPTORS_BESIDE_CLIENTS: u64 = 256;
/// Fewer requests per turn only make a thread slower.
const REQUESTS_PER_TURN_MIN: usize = 256;

/// Serves until a signal or a client stops the server.
pub fn main(args: &KvArgs) -> anyhow::Result<u8> {
    match &args.command {
        Some(KvCommand::Bench(args)) => return kv_bench::main(args),
        Some(KvCommand::Top(args)) => return kv_top::main(args),
        None => {}
    }
    if args.shows_license {
        let memcached = args.compat.version();
        println!("farpool kv, compatible with memcached {memcached}");
        println!("licence: {}", env!("CARGO_PKG_LICENSE"));
        return Ok(0);
    }
    let (settings, ignored) = settings(args)?;
    if args.daemonize {
        privileges::become_daemon().context("cannot run in the background")?;
    }
    logging::start()?;
    farpool_kv_server::heap::keep_large_buffers_apart();
    // Caught before anything is set up, so that no signal can leave a socket file behind.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGUSR1]).context("signals cannot be watched")?;
    let unix_s =
        SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs();
    let socket_paths: Vec<_> =
        [&settings.socket_path, &settings.keyvault_path].into_iter().flatten().cloned().collect();
    let (memory_bytes, threads) = (settings.memory_bytes as u64, settings.threads);
    raise_limits(args, settings.connections_max)?;
    ignored.tell();
    warn_of_open_doors(&settings);
    let tcp_count = settings.addresses.len() + settings.plain_addresses.len();
    let server = Server::bind(settings, at_most(unix_s))?;
    if tcp_count > 0 {
        kv_options::write_ports(&server.addresses()[..tcp_count]);
    }
    let mut listen: Vec<String> = server.addresses().iter().map(ToString::to_string).collect();
    listen.extend(socket_paths.iter().map(|path| path.display().to_string()));
    let pid_file = args.pid_file.as_deref().map(PidFile::write).transpose()?;
    if let Some(user) = args.user.as_deref().filter(|_| rustix::process::geteuid().is_root()) {
        give_sockets_to(user, &socket_paths)?;
        privileges::become_user(user).with_context(|| format!("cannot become {user}"))?;
    }
    let shared = server.shared();
    let handle = signals.handle();
    let watcher = std::thread::spawn(move || {
        let mut signals = signals.forever();
        if let Some(signal) = signals.next() {
            tracing::info!(signal, "stopping");
            service::tell_systemd("STOPPING=1");
            if shared.settings.drain.is_zero() {
                shared.ask_to_stop();
            } else {
                shared.ask_to_drain();
            }
        }
        if signals.next().is_some() {
            shared.ask_to_stop();
        }
    });
    say_ready(memory_bytes, threads, &listen, args.json)?;
    let ended = server.run();
    handle.close();
    let _ = watcher.join();
    drop(pid_file);
    ended?;
    Ok(0)
}

/// The file with the process id; removed when dropped.
struct PidFile(PathBuf);

impl PidFile {
    fn write(path: &Path) -> anyhow::Result<Self> {
        let text = format!("{}\n", std::process::id());
        std::fs::write(path, text)
            .with_context(|| format!("cannot write the pid file {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Already removed, or no longer removable: nothing else can be done.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Raises the limits: descriptors for all clients, and core files and locked memory if asked for.
fn raise_limits(args: &KvArgs, connections_max: u64) -> anyhow::Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let wanted = connections_max.saturating_add(DESCRIPTORS_BESIDE_CLIENTS);
    if farpool_kernel::raise_descriptors(wanted) < wanted {
        tracing::warn!(
            wanted,
            "fewer file descriptors than clients allowed: raise the limit on open files"
        );
    }
    if args.core_files {
        let core = getrlimit(Resource::Core);
        setrlimit(Resource::Core, Rlimit { current: core.maximum, ..core })
            .context("core files cannot be allowed")?;
    }
    if args.lock_memory {
        use rustix::mm::{MlockAllFlags, mlockall};
        mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE)
            .context("memory cannot be locked (-k)")?;
    }
    Ok(())
}

/// Gives the socket files to the new user, who must be able to remove them at exit.
fn give_sockets_to(user: &str, paths: &[PathBuf]) -> anyhow::Result<()> {
    for path in paths {
        privileges::give_file_to(user, path)
            .with_context(|| format!("cannot give {} to {user}", path.display()))?;
    }
    Ok(())
}

fn say_ready(
    memory_bytes: u64,
    threads: usize,
    listen: &[String],
    json: bool,
) -> anyhow::Result<()> {
    let line = if json {
        let pid = std::process::id();
        let fields = json!({
            "event": "ready", "pid": pid, "memory_bytes": memory_bytes, "threads": threads, "listen": listen,
        });
        fields.to_string()
    } else {
        format!("ready: {} in {threads} threads on {}", Size(memory_bytes), listen.join(" "))
    };
    service::say_ready(&line)
}

/// The settings, and what was asked for without effect.
fn settings(args: &KvArgs) -> Result<(Settings, Ignored), UsageError> {
    kv_options::refuse_dangerous(args)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut settings = Settings {
        dialect: dialect(args)?,
        compat: args.compat,
        threads: args.threads.map_or(processors, usize::from),
        evicts: !args.no_evict,
        policy: args.policy,
        connections_max: args.connections,
        backlog: args.backlog,
        verbosity: args.verbose.into(),
        allows_shutdown: args.allow_shutdown,
        allows_flush: !args.no_flush,
        allows_dump: !args.no_dump,
        allows_watch: !args.no_watch,
        metrics_address: args.metrics,
        drain: args.drain.map_or(Duration::ZERO, |span| span.0),
        spin_us: args.spin_us,
        item_bytes_max: item_bytes(&args.item_max)?,
        socket_mode: socket_mode(&args.socket_mode)?,
        quotas: args.quota.iter().map(|it| (it.prefix.clone().into(), it.size.0)).collect(),
        ..Settings::default()
    };
    if let Some(bytes) = memory_bytes(args)? {
        settings.memory_bytes = bytes;
    }
    if let Some(delimiter) = args.prefix_delimiter {
        settings.prefix_delimiter = u8::try_from(delimiter)
            .ok()
            .filter(u8::is_ascii_graphic)
            .ok_or_else(|| UsageError(format!("{delimiter:?} cannot end a prefix; write -D :")))?;
        settings.counts_prefixes = true;
    }
    if let Some(requests) = args.requests_per_turn {
        settings.requests_per_turn = requests.max(REQUESTS_PER_TURN_MIN);
    }
    if let Some(path) = &args.socket {
        settings.socket_path = Some(path.clone());
    } else if args.port != 0 {
        let (plain, rest): (Vec<_>, Vec<_>) =
            args.listen.iter().cloned().partition(|it| args.tls && it.starts_with(NO_TLS));
        settings.addresses = addresses(&rest, args.port)?;
        settings.plain_addresses = addresses(&plain, args.port)?;
    }
    if let Some(path) = &args.credentials {
        let credentials = Credentials::read(path).map_err(|error| UsageError(error.to_string()))?;
        settings.credentials = Some(Arc::new(credentials));
        settings.credentials_file = Some(path.clone());
    }
    take_keyvault(&mut settings, args)?;
    settings.far = far(args)?;
    if let Some(part) = &args.flash {
        settings.flash = Some(flash(part));
    }
    let mut tls = TlsOptions::default();
    let mut ignored = Ignored::flags(args);
    for option in &args.option {
        if !tls.take(option)? {
            kv_options::take(&mut settings, &mut ignored, option)?;
        }
    }
    settings.tls = tls.load(args.tls)?;
    if args.tls && settings.addresses.is_empty() {
        let how = "-Z is for TCP, and no address is left for it: give -l one without notls:";
        return Err(UsageError(how.into()));
    }
    complete_flash(&mut settings, args);
    Ok((settings, ignored))
}

/// What flags beside PATH:SIZE say about flash.
fn complete_flash(settings: &mut Settings, args: &KvArgs) {
    let Some(flash) = &mut settings.flash else { return };
    flash.reset = args.flash_reset;
    #[expect(clippy::cast_precision_loss, reason = "no device writes 2^53 bytes a second")]
    let rate = args.flash_write_rate.map(|Size(bytes)| bytes as f64);
    flash.write_bytes_per_s = rate;
    if let Some(directory) = &args.flash_books {
        flash.books = Bookkeeping::Only(directory.clone());
    }
}

fn socket_mode(text: &str) -> Result<u32, UsageError> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| UsageError(format!("{text:?} is not a mode in octal; write -a 700")))
}

fn far(args: &KvArgs) -> Result<Option<FarSettings>, UsageError> {
    let Some(Size(bytes)) = args.far else { return Ok(None) };
    let source = match &args.pool {
        Some(controllers) => FarSource::Pool(PoolOptions {
            controllers: controllers.clone(),
            access: service::access(
                controllers,
                args.pki.as_deref(),
                args.token_file.as_deref(),
                args.insecure,
            )?,
            host: args.host.clone(),
            rate_bytes_per_s: args.rate.map(|Size(bytes)| bytes),
        }),
        None if args.blade.is_empty() => {
            let how = "--far needs a source: --blade ADDR or --pool URL";
            return Err(UsageError(how.into()));
        }
        None => {
            refuse_remote(&args.blade, Some(args.allow_remote_tcp || args.pki.is_some()))?;
            FarSource::Blades(args.blade.iter().map(|blade| blade.0.clone()).collect())
        }
    };
    let credentials = match &source {
        FarSource::Pool(pool) => pool.access.credentials.clone(),
        FarSource::Blades(_) => service::read_pki(args.pki.as_deref())?,
    };
    Ok(Some(FarSettings {
        source,
        bytes,
        deadline: args.far_deadline.0,
        seal: args.seal.into(),
        allow_remote_tcp: args.allow_remote_tcp,
        credentials,
    }))
}

pub(super) fn flash(part: &FlashPart) -> FlashSettings {
    let path = part.path.clone();
    let books = Bookkeeping::Preferably(books_directories());
    FlashSettings { path, bytes: part.size.0, reset: false, write_bytes_per_s: None, books }
}

/// Directories for the book-keeping of flash while it is in use, best first: the one systemd gave
/// the service, the one that lasts while the machine runs, the user's own (removed when the user
/// logs out), the one everybody may write to.
fn books_directories() -> Vec<PathBuf> {
    let given = std::env::var_os("RUNTIME_DIRECTORY").unwrap_or_default();
    let of_user = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let directories = std::env::split_paths(&given).chain(["/run".into()]).chain(of_user);
    directories.chain(["/dev/shm".into()]).filter(|it| it.is_absolute()).collect()
}

/// Returns `--memory` or `-m`, if one is given.
fn memory_bytes(args: &KvArgs) -> Result<Option<usize>, UsageError> {
    let too_much = || UsageError("no machine has that much memory; write --memory 4GiB".to_owned());
    let bytes = match (args.memory, args.memory_mib) {
        (Some(Size(bytes)), _) => bytes,
        (None, Some(mebibytes)) => mebibytes.checked_mul(MIB).ok_or_else(too_much)?,
        (None, None) => return Ok(None),
    };
    usize::try_from(bytes).map(Some).map_err(|_| too_much())
}

/// Parses `-I`: bytes, or with k, m or g.
fn item_bytes(text: &str) -> Result<usize, UsageError> {
    let wrong = || {
        UsageError(format!("{text:?} is not the size of an item; write -I 4m, from 1k to 1024m"))
    };
    let bytes = farpool_units::parse_bytes(text).ok_or_else(wrong)?;
    if !(ITEM_BYTES_MIN..=ITEM_BYTES_MAX).contains(&bytes) {
        return Err(wrong());
    }
    usize::try_from(bytes).map_err(|_| wrong())
}

/// In front of an address of `-l`: no TLS there.
const NO_TLS: &str = "notls:";

/// Parses `-l`: names or numbers, with or without a port and the prefix `notls:`.
fn addresses(listen: &[String], port: u16) -> Result<Vec<SocketAddr>, UsageError> {
    let mut addresses = Vec::new();
    for text in listen {
        let text = text.strip_prefix(NO_TLS).unwrap_or(text);
        let found = if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
            vec![SocketAddr::new(ip, port)]
        } else {
            let with_port =
                if text.contains(':') { text.to_owned() } else { format!("{text}:{port}") };
            let found = with_port.to_socket_addrs().map_err(|error| {
                UsageError(format!(
                    "{text:?} is no address to listen on ({error}); write -l 127.0.0.1 or -l ::1"
                ))
            })?;
            found.collect()
        };
        addresses.extend(found);
    }
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

fn take_keyvault(settings: &mut Settings, args: &KvArgs) -> Result<(), UsageError> {
    for address in &args.keyvault {
        match &address.0 {
            Address::Tcp(_) if args.credentials.is_some() => {
                let how = "KeyVault has no credentials: with -Y it is served on a unix socket \
                    only, whose mode says who may";
                return Err(UsageError(how.into()));
            }
            Address::Tcp(at) => settings.keyvault_addresses.push(*at),
            Address::Unix(path) | Address::Shm(path) if settings.keyvault_path.is_none() => {
                settings.keyvault_path = Some(path.clone());
            }
            Address::Unix(_) | Address::Shm(_) => {
                return Err(UsageError(
                    "KeyVault is served on one unix socket; give --keyvault unix:// once".into(),
                ));
            }
        }
    }
    if args.keyvault_leases && settings.keyvault_path.is_none() {
        let how = "leases are for clients on this host; give --keyvault unix:///PATH, too";
        return Err(UsageError(how.into()));
    }
    settings.keyvault_leases = args.keyvault_leases;
    Ok(())
}
