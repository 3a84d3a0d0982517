//! The server: listens, distributes clients over its threads, ends cleanly.

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod below;
mod binary;
mod clients;
mod duties;
pub mod heap;
mod keyvault;
mod mail;
mod me;
mod settings;
mod text;
pub mod tls;
mod watch;
mod worker;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_keyvault::frame::BROADCAST;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

pub use below::far::FarError;
pub use clients::auth;
pub use farpool_kv_protocol::compat::Compat;
pub use farpool_kv_tier::flash::least_bytes as least_flash_bytes;
use farpool_kv_tier::flash::random_seed;
pub use farpool_kv_tier::flash::{Bookkeeping, FlashError, FlashFile, FlashSettings};
pub use farpool_seal::SealPolicy;
pub use settings::{
    Dialect, FarSettings, FarSource, PoolOptions, REQUESTS_PER_TURN, Settings, Shared,
};
pub use worker::{Worker, WorkerError};

use below::far::Keeper;
use mail::mailbox::{Message, Protocol};
use watch::{conns, metrics};

/// The most threads: each has a shard, and KeyVault's frames have 12 bits for a shard's number, the
/// highest of which stands for any shard.
pub const THREADS_MAX: usize = BROADCAST as usize;

/// Why a server does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error("{path} exists and is not an unused socket; remove it or choose another path")]
    SocketInUse { path: String },
    #[error("no address to listen on: give a port or a socket")]
    NoAddress,
    #[error("a server thread cannot start: {0}")]
    Thread(#[from] std::io::Error),
    #[error("a server thread: {0}")]
    Worker(#[from] WorkerError),
    #[error("a server has 1 to {THREADS_MAX} threads, not {0}")]
    Threads(usize),
    #[error(transparent)]
    Far(#[from] FarError),
    #[error(transparent)]
    Flash(#[from] FlashError),
    #[error("random numbers are not to be had: {0}")]
    Random(#[source] Errno),
    #[error("a server thread panicked")]
    Panicked,
    #[error("waiting for clients: {0}")]
    Wait(#[from] Errno),
}

#[derive(Debug)]
struct Listener {
    socket: OwnedFd,
    is_local: bool,
    protocol: Protocol,
}

/// A server that listens but does not serve yet.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<Listener>,
    addresses: Vec<SocketAddr>,
    socket_paths: Vec<PathBuf>,
    workers: Vec<Worker>,
    far: Option<Keeper>,
    flash: Option<FlashFile>,
    metrics: Option<(TcpListener, SocketAddr)>,
}

impl Server {
    /// Allocates memory and binds addresses. `start_unix_s` is the present time.
    pub fn bind(settings: Settings, start_unix_s: i64) -> Result<Self, ServerError> {
        if !(1..=THREADS_MAX).contains(&settings.threads) {
            return Err(ServerError::Threads(settings.threads));
        }
        let mut listeners = Vec::new();
        let mut addresses = Vec::new();
        let protocol = if settings.tls.is_some() { Protocol::TextOverTls } else { Protocol::Text };
        let tcp = settings.addresses.iter().map(|it| (it, protocol));
        let tcp = tcp.chain(settings.plain_addresses.iter().map(|it| (it, Protocol::Text)));
        let tcp = tcp.chain(settings.keyvault_addresses.iter().map(|it| (it, Protocol::KeyVault)));
        for (&address, protocol) in tcp {
            let (socket, bound) = listen_tcp(address, settings.backlog)
                .map_err(|source| ServerError::Listen { address: address.to_string(), source })?;
            addresses.push(bound);
            listeners.push(Listener { socket, is_local: false, protocol });
        }
        let socket_path = settings.socket_path.clone();
        let keyvault_path = settings.keyvault_path.clone();
        if let Some(path) = &socket_path {
            let socket = listen_unix(path, &settings)?;
            listeners.push(Listener { socket, is_local: true, protocol: Protocol::Text });
        }
        if let Some(path) = &settings.keyvault_path {
            let socket = listen_unix(path, &settings)?;
            listeners.push(Listener { socket, is_local: true, protocol: Protocol::KeyVault });
        }
        let metrics = settings
            .metrics_address
            .map(|address| {
                let failed = |source| ServerError::Listen { address: address.to_string(), source };
                let listener = metrics::listen(address).map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                Ok::<_, ServerError>((listener, bound))
            })
            .transpose()?;
        if listeners.is_empty() {
            return Err(ServerError::NoAddress);
        }
        let shared = Arc::new(Shared::new(settings, start_unix_s)?);
        let told = listeners.iter().map(|it| conns::describe_listener(&it.socket)).collect();
        // Set here for the first and only time.
        let _ = shared.listeners.set(told);
        let seed = random_seed().map_err(ServerError::Random)?;
        let mut workers = (0..shared.shards())
            .map(|number| Worker::new(Arc::clone(&shared), number, seed))
            .collect::<Result<Vec<_>, _>>()?;
        let far = shared.settings.far.as_ref();
        let far = far.map(|settings| Keeper::start(&shared, settings)).transpose()?;
        if far.is_some() {
            workers.iter_mut().for_each(Worker::add_far);
        }
        let flash = shared.settings.flash.as_ref();
        let flash = flash
            .map(|settings| below::flash::attach(settings, &mut workers, start_unix_s))
            .transpose()?;
        let socket_paths = socket_path.into_iter().chain(keyvault_path).collect();
        Ok(Self { shared, listeners, addresses, socket_paths, workers, far, flash, metrics })
    }

    /// The addresses it listens on; port 0 has become a real one.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Where metrics for Prometheus are served.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|(_, address)| *address)
    }

    /// What other threads need to stop the server: see [`Shared::ask_to_stop`].
    #[must_use]
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Serves until asked to stop; outstanding replies are sent first.
    pub fn run(mut self) -> Result<(), ServerError> {
        let threads = std::mem::take(&mut self.workers)
            .into_iter()
            .map(|worker| {
                let shared = Arc::clone(&self.shared);
                let run = move || {
                    let result = worker.run();
                    // The server is of no use without one of its shards: it ends, so that a
                    // supervisor notices.
                    shared.ask_to_stop();
                    result
                };
                std::thread::Builder::new().name("kv".into()).spawn(run)
            })
            .collect::<Result<Vec<_>, _>>()?;
        if let Some((listener, _)) = self.metrics.take() {
            metrics::serve(listener, Arc::clone(&self.shared))?;
        }
        let far = self.far.take().map(Keeper::run).transpose()?;
        let accepted = self.accept_until_stopped().and_then(|()| self.drain());
        for mailbox in &self.shared.mailboxes {
            mailbox.put(Message::Stop);
        }
        let ended = threads.into_iter().map(join).collect::<Result<Vec<_>, _>>();
        self.close_flash(ended.is_ok());
        if let Some(far) = far {
            far.end();
        }
        self.stop_listening();
        accepted?;
        ended.map(|_| ())
    }

    /// Marks flash as closed cleanly, if it was.
    fn close_flash(&mut self, all_ended: bool) {
        let Some(file) = self.flash.take() else { return };
        let path = file.path().display().to_string();
        if !all_ended || self.shared.is_flash_unclean.load(Ordering::Relaxed) {
            tracing::error!(path, "the device does not answer: flash is not closed in order");
            return;
        }
        if let Err(error) = file.close() {
            tracing::error!(path, %error, "flash was not closed in order");
        }
    }

    fn accept_until_stopped(&self) -> Result<(), ServerError> {
        let mut next_thread = 0;
        while !self.is_asked_to_stop() && !self.shared.is_draining.load(Ordering::Relaxed) {
            let mut fds: Vec<PollFd<'_>> = std::iter::once(self.shared.stop.as_fd())
                .chain(self.listeners.iter().map(|listener| listener.socket.as_fd()))
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            for listener in &self.listeners {
                self.accept_all(listener, &mut next_thread);
            }
        }
        Ok(())
    }

    fn is_asked_to_stop(&self) -> bool {
        self.shared.is_asked_to_stop.load(Ordering::Relaxed)
    }

    /// Refuses new connections, and leaves the addresses to a successor.
    fn stop_listening(&mut self) {
        self.listeners.clear();
        for path in self.socket_paths.drain(..) {
            // It makes no difference if the path is gone already.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Lets connected clients stay for a while, unless the server is to end at once.
    fn drain(&mut self) -> Result<(), ServerError> {
        if self.is_asked_to_stop() {
            return Ok(());
        }
        self.stop_listening();
        let deadline = Instant::now() + self.shared.settings.drain;
        tracing::info!(
            clients = self.shared.connections.load(Ordering::Relaxed),
            "draining: new clients are refused"
        );
        // The event that ended the accept loop is consumed, so that only a further request ends the
        // wait early.
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.shared.stop, &mut counter);
        while !self.is_asked_to_stop() && self.shared.connections.load(Ordering::Relaxed) > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let mut fds = [PollFd::new(&self.shared.stop, PollFlags::IN)];
            let wait = Timespec::try_from(left.min(DRAIN_LOOK)).ok();
            match poll(&mut fds, wait.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn accept_all(&self, listener: &Listener, next_thread: &mut usize) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            let socket = match rustix::net::accept_with(&listener.socket, flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    // Descriptors ran out: waiting clients are accepted when others have left.
                    tracing::warn!(%errno, "a client cannot be accepted");
                    std::thread::sleep(ACCEPT_PAUSE);
                    return;
                }
            };
            self.shared.total_connections.fetch_add(1, Ordering::Relaxed);
            if self.shared.connections.fetch_add(1, Ordering::Relaxed)
                >= self.shared.settings.connections_max
            {
                self.shared.connections.fetch_sub(1, Ordering::Relaxed);
                self.shared.rejected_connections.fetch_add(1, Ordering::Relaxed);
                let text = b"ERROR Too many open connections\r\n";
                let _ = rustix::net::send(&socket, text, rustix::net::SendFlags::NOSIGNAL);
                continue;
            }
            let Listener { is_local, protocol, .. } = *listener;
            let message = Message::Client { socket, is_local, protocol, input: Vec::new() };
            self.shared.mailboxes[*next_thread].put(message);
            *next_thread = (*next_thread + 1) % self.shared.shards();
        }
    }
}

/// How often a draining server checks whether all clients have left.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
/// How long no client is accepted after descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

fn join(thread: JoinHandle<Result<(), WorkerError>>) -> Result<(), ServerError> {
    thread.join().map_err(|_| ServerError::Panicked)?.map_err(ServerError::Worker)
}

fn listen_tcp(address: SocketAddr, backlog: i32) -> std::io::Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, backlog)?;
    let listener = TcpListener::from(socket);
    let bound = listener.local_addr()?;
    Ok((listener.into(), bound))
}

/// Listens on a path; replaces a socket that a dead server left behind.
fn listen_unix(path: &Path, settings: &Settings) -> Result<OwnedFd, ServerError> {
    let shown = path.display().to_string();
    let failed = |source| ServerError::Listen { address: shown.clone(), source };
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() || UnixStream::connect(path).is_ok() {
            return Err(ServerError::SocketInUse { path: shown });
        }
        std::fs::remove_file(path).map_err(failed)?;
    }
    farpool_kernel::listen_unix(path, settings.socket_mode, settings.backlog)
        .map_err(|errno| failed(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_servers_place_the_same_keys_differently() {
        const KEYS: u32 = 1000;
        let servers = [(), ()].map(|()| {
            let addresses = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
            let settings = Settings { addresses, threads: 2, ..Settings::default() };
            Server::bind(settings, 1_700_000_000).expect("it starts")
        });
        let place = |server: &Server, worker: usize, key: u32| {
            server.workers[worker].shard.store.hash_of(&key.to_le_bytes()) >> 32
        };
        let [one, other] = &servers;
        let alike = (0..KEYS).filter(|&key| place(one, 0, key) == place(other, 0, key));
        assert!(alike.count() <= 1, "by chance one key in four thousand million is");
        let apart = (0..KEYS).find(|&key| place(one, 0, key) != place(one, 1, key));
        assert_eq!(apart, None, "the threads of a server agree");
    }
}
