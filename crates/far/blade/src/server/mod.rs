//! A blade on sockets: as many threads as processors, each with its own connections.

mod arriving;
mod certified;
mod connection;
mod descriptors;
mod follow;
mod input;
mod listener;
mod output;
mod pace;
mod requests;
mod shared;
mod stepped;
mod toll;
mod turns;
mod way;
mod worker;

use crate::audit::Asker;
use crate::blade::{Blade, BladeStat};
use crate::config::{BladeConfig, FlashConfig};
use crate::memory::THREADS_LIMIT;
use certified::Certified;
use farpool_identity::Refusal;
use farpool_wire::{Address, ErrorCode};
use listener::Listener;
use shared::Shared;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
pub use stepped::SteppedServer;
use thiserror::Error;
use worker::Worker;

/// Longest sleep of the scrubbing thread: in case a wake-up came just before, and to ask again
/// which memory is held by descriptor (some microseconds for each segment held).
const SCRUB_PAUSE: Duration = Duration::from_millis(200);

/// Why a blade could not begin to serve.
#[derive(Debug, Error)]
pub enum ServeError {
    /// Nothing to listen on.
    #[error(
        "the blade has no address to listen on; give one, as in unix:///run/farpool/blade.sock"
    )]
    NoAddress,
    /// TCP beyond this machine, without explicit permission.
    #[error(
        "{address} can be reached from other machines, and the blade has no certificate to know \
         who connects; give one (--pki), or allow remote TCP explicitly if the network is trusted"
    )]
    RemoteTcp {
        /// The address.
        address: Address,
    },
    /// The certificate is of no use to a blade.
    #[error("the blade's certificate is of no use: {0}")]
    Certificate(Refusal),
    /// Another process listens there, or the path is not a socket.
    #[error("{address} is in use; stop what listens there or choose another address")]
    InUse {
        /// The address.
        address: Address,
    },
    /// The system refuses to listen there.
    #[error("the blade cannot listen on {address}")]
    Listen {
        /// The address.
        address: Address,
        /// The system's reason.
        source: io::Error,
    },
    /// The memory is not available.
    #[error("the blade's memory ({bytes} bytes, {backing:?}) cannot be set up")]
    Memory {
        /// The bytes.
        bytes: u64,
        /// The backing store.
        backing: crate::BackingKind,
        /// The system's reason.
        source: io::Error,
    },
    /// The flash is of no use, or not with this memory.
    #[error("the blade's flash {} ({bytes} bytes) cannot be used", .path.display())]
    Flash {
        /// The file or device.
        path: PathBuf,
        /// How much of it was to be used.
        bytes: u64,
        /// The reason.
        source: io::Error,
    },
    /// Threads or descriptors are not available.
    #[error("the blade's threads cannot be set up")]
    Threads(#[source] io::Error),
}

/// A blade that listens and does not serve yet.
#[derive(Debug)]
pub struct Server {
    blade: Arc<Blade>,
    certified: Option<Arc<Certified>>,
    listeners: Vec<Listener>,
}

/// A blade that serves. Dropping it stops it.
#[derive(Debug)]
pub struct Serving {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    threads: Vec<JoinHandle<()>>,
}

/// Stops a serving blade from anywhere.
#[derive(Clone, Debug)]
pub struct ShutdownHandle(Arc<Shared>);

/// Checks that the certificate, if there is one, is of use to a blade.
pub(crate) fn check_certificate(config: &BladeConfig) -> Result<(), Refusal> {
    config.credentials.clone().map_or(Ok(()), |credentials| Certified::new(credentials).map(drop))
}

impl Server {
    /// Takes the memory and begins to listen. `unix://` and `shm://` of one path share one socket.
    /// TCP port 0 takes a free port, see [`Server::addresses`]. Raises this process's limit on open
    /// descriptors as far as allowed: each segment and each connection needs one.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn bind(addresses: &[Address], mut config: BladeConfig) -> Result<Server, ServeError> {
        if addresses.is_empty() {
            return Err(ServeError::NoAddress);
        }
        if let Some(remote) = addresses.iter().find(|a| !a.is_local())
            && !config.allow_remote_tcp
            && config.credentials.is_none()
        {
            return Err(ServeError::RemoteTcp { address: remote.clone() });
        }
        let certified = config.credentials.clone().map(Certified::new).transpose();
        let certified = certified.map_err(ServeError::Certificate)?;
        descriptors::raise_limit();
        let mut listeners: Vec<Listener> = Vec::new();
        for address in addresses {
            let path = address.socket_path();
            let is_there = |l: &Listener| path.is_some() && l.address.socket_path() == path;
            if !listeners.iter().any(is_there) {
                listeners.push(Listener::bind(address, config.socket_mode)?);
            }
        }
        if !config.lends_beyond_memory() {
            config.backing = config.backing.resolve(addresses, config.require_grants);
        }
        Ok(Server { certified, ..Server::of(listeners, config)? })
    }

    fn of(listeners: Vec<Listener>, config: BladeConfig) -> Result<Server, ServeError> {
        let (bytes, backing) = (config.memory_bytes, config.backing.clone());
        let flash = config.flash.clone();
        let blade = Blade::new(config).map_err(|source| match flash {
            None => ServeError::Memory { bytes, backing, source },
            Some(FlashConfig { path, bytes, .. }) => ServeError::Flash { path, bytes, source },
        })?;
        Ok(Server { blade: Arc::new(blade), certified: None, listeners })
    }

    /// The addresses it listens on, with the actual TCP ports.
    pub fn addresses(&self) -> Vec<Address> {
        self.listeners.iter().map(|listener| listener.address.clone()).collect()
    }

    /// The blade behind it.
    pub fn blade(&self) -> &Arc<Blade> {
        &self.blade
    }

    /// Serves on threads of its own, until stopped. Signals are not touched: a caller that wants
    /// threads without signals blocks them before.
    ///
    /// # Errors
    /// Threads or descriptors are not available.
    pub fn serve(self) -> Result<Serving, ServeError> {
        let addresses = self.addresses();
        let count = match self.blade.config().threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let may_wait = self.blade.config().lends_beyond_memory();
        let count = if may_wait { count.min(THREADS_LIMIT) } else { count };
        let shared = Shared::new(self.blade, self.certified, count);
        let shared = Arc::new(shared.map_err(ServeError::Threads)?);
        let mut serving = Serving { shared, addresses, threads: Vec::new() };
        serving.start(self.listeners).map_err(ServeError::Threads)?; // on an error, drop stops it
        Ok(serving)
    }
}

impl Serving {
    fn start(&mut self, listeners: Vec<Listener>) -> io::Result<()> {
        let mut listeners = Some(listeners);
        for thread in 0..self.shared.threads() {
            let listeners = listeners.take().unwrap_or_default();
            let worker = Worker::new(Arc::clone(&self.shared), thread, listeners)?;
            self.spawn(&format!("fp-blade-{thread}"), move || worker.run())?;
        }
        if let Some(certified) = self.shared.certified.clone() {
            let shared = Arc::clone(&self.shared);
            self.spawn("fp-blade-certs", move || {
                certified.watch(|who, why| {
                    shared.blade.audit.note(Some(ErrorCode::CertificateNeeded), || {
                        let asker = Asker { who: who.to_owned(), from: None };
                        (asker, format!("its connection is closed: {why}"))
                    });
                });
            })?;
        }
        if self.shared.blade.audit.is_on() {
            let shared = Arc::clone(&self.shared);
            self.spawn("fp-blade-audit", move || shared.blade.audit.run())?;
        }
        if let Some(engine) = self.shared.blade.take_engine() {
            self.spawn(engine.name(), move || engine.run())?;
        }
        let shared = Arc::clone(&self.shared);
        self.spawn("fp-blade-scrub", move || {
            while !shared.is_stopping() {
                shared.blade.wait_for_scrubs(SCRUB_PAUSE);
                shared.blade.run_scrubs();
                shared.blade.compact();
            }
        })
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body)?;
        self.threads.push(thread);
        Ok(())
    }

    /// The addresses it listens on, with the actual TCP ports.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The blade behind it.
    pub fn blade(&self) -> &Arc<Blade> {
        &self.shared.blade
    }

    /// All counters as of now.
    pub fn stat(&self) -> BladeStat {
        self.shared.blade.stat(self.shared.now())
    }

    /// A handle to stop it from elsewhere.
    pub fn shutdown_handle(&self) -> ShutdownHandle {
        ShutdownHandle(Arc::clone(&self.shared))
    }

    /// Stops serving: closes all connections, removes the socket files, ends the threads. The
    /// memory is freed with the last [`Arc`] of the blade.
    pub fn shutdown(self) {
        drop(self);
    }

    /// Waits until it is stopped.
    pub fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A panic has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.shared.stop();
        self.join();
        if let Err(error) = self.shared.blade.finish() {
            tracing::error!(%error, "the memory is not in its file yet; it does not outlive a reboot");
        }
    }
}

impl ShutdownHandle {
    /// Stops the blade; returns at once.
    pub fn shutdown(&self) {
        self.0.stop();
    }
}
