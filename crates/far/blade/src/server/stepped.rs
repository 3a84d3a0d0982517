//! A blade without threads and addresses: its caller brings the connections and says when it works.
//! A simulator runs the blade's own code with it, in a time of its own
//! ([`BladeConfig::time`]).

use super::shared::{Arrival, Shared};
use super::worker::Worker;
use super::{ServeError, Server};
use crate::config::BladeConfig;
use crate::sources::Source;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A blade that works when it is told to. Dropping it ends it, with all its connections.
#[derive(Debug)]
pub struct SteppedServer {
    shared: Arc<Shared>,
    worker: Worker,
}

impl SteppedServer {
    /// Takes the memory.
    ///
    /// # Errors
    /// The memory or descriptors are not available.
    pub fn new(mut config: BladeConfig) -> Result<SteppedServer, ServeError> {
        config.backing = config.backing.resolve(&[], config.require_grants);
        let server = Server::of(Vec::new(), config)?;
        let shared = Arc::new(Shared::new(server.blade, None, 1).map_err(ServeError::Threads)?);
        let worker =
            Worker::new(Arc::clone(&shared), 0, Vec::new()).map_err(ServeError::Threads)?;
        Ok(SteppedServer { shared, worker })
    }

    /// Takes a connected stream socket as one that came over TCP from this host, or closes it if
    /// there are too many.
    pub fn arrive(&self, socket: OwnedFd) {
        let from = Source::host(Ipv4Addr::LOCALHOST.into());
        if let Ok(presence) = self.shared.blade.sources.arrive(from) {
            self.shared.mailbox(0).deliver(Arrival { socket, presence });
        }
    }

    /// Does all that can be done without waiting: answers, closes what is broken, ends leases,
    /// makes freed memory clean.
    ///
    /// # Errors
    /// The kernel's, of its list of events.
    pub fn step(&mut self) -> io::Result<()> {
        self.worker.step()?;
        self.shared.blade.run_scrubs();
        Ok(())
    }
}

impl Drop for SteppedServer {
    fn drop(&mut self) {
        self.worker.close_all();
    }
}
