//! What a blade with certificates knows: whom it accepts over TCP, and which connections end
//! because their certificate was revoked, has run out, or is of an authority no longer trusted.
//!
//! Invariants:
//! - A connection that was admitted is fenced ([`Gate`]) at the latest one [`CHECK_EVERY`] after
//!   the files say that its peer may not be served, whatever it is doing.
//! - No lock of this module is held while a connection is fenced.

use crate::gate::Gate;
use crate::table::Origin;
use farpool_handshake::Accept;
use farpool_identity::{
    CHECK_EVERY, ConnectionId, Credentials, Live, LiveConnections, Peer, Refusal, Reloaded, Role,
    Stale, UnixTime,
};
use farpool_kernel::lock;
use rustls::ServerConfig;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The certificates of a blade, for all its connections.
pub(super) struct Certified {
    credentials: Arc<Credentials>,
    config: Arc<ServerConfig>,
    live: Arc<LiveConnections>,
    gates: Mutex<HashMap<ConnectionId, Arc<Gate>>>,
    is_stopping: Mutex<bool>,
    stopped: Condvar,
}

impl fmt::Debug for Certified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certified").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

/// A connection whose peer is known, as long as it is there.
#[derive(Debug)]
pub(super) struct Admitted {
    all: Arc<Certified>,
    live: Live,
}

impl Certified {
    /// # Errors
    /// The certificate is not a node's.
    pub(super) fn new(credentials: Arc<Credentials>) -> Result<Arc<Self>, Refusal> {
        let role = credentials.identity().role;
        if !matches!(role, Role::Node(_)) {
            return Err(Refusal::NoBlade(role));
        }
        Ok(Arc::new(Certified {
            config: Accept::config(credentials.server()?),
            live: LiveConnections::new(Arc::clone(&credentials)),
            credentials,
            gates: Mutex::default(),
            is_stopping: Mutex::new(false),
            stopped: Condvar::new(),
        }))
    }

    pub(super) fn begin(&self) -> Result<Accept, Refusal> {
        Accept::new(&self.config)
    }

    /// Notes a connection whose handshake is complete.
    ///
    /// # Errors
    /// Its peer may not be served any more.
    pub(super) fn admit(
        self: &Arc<Self>,
        peer: Peer,
        gate: &Arc<Gate>,
    ) -> Result<Admitted, Refusal> {
        let live = self.live.admit(peer, UnixTime::now())?;
        lock(&self.gates).insert(live.id(), Arc::clone(gate));
        Ok(Admitted { all: Arc::clone(self), live })
    }

    /// Looks for changes until the blade stops. Calls `closed` with who has lost a connection, and
    /// why.
    pub(super) fn watch(&self, closed: impl Fn(&str, &str)) {
        let mut stale = Stale::default();
        let mut is_stopping = lock(&self.is_stopping);
        while !*is_stopping {
            drop(is_stopping);
            self.check(&mut stale, &closed);
            let waited = self.stopped.wait_timeout_while(
                lock(&self.is_stopping),
                CHECK_EVERY,
                |is_stopping| !*is_stopping,
            );
            is_stopping = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends [`Self::watch`].
    pub(super) fn stop(&self) {
        *lock(&self.is_stopping) = true;
        self.stopped.notify_all();
    }

    fn check(&self, stale: &mut Stale, closed: &impl Fn(&str, &str)) {
        let now = UnixTime::now();
        let found = self.credentials.reload(now);
        if matches!(found, Ok(Reloaded::Changed)) {
            tracing::info!("certificates, or the list of revoked ones, were read anew");
        }
        if let Some(error) = stale.note(&found) {
            tracing::warn!(error, "certificates cannot be read anew; those in force stay");
        }
        for ended in self.live.check(now) {
            // One that was fenced is found again until its worker has closed it.
            let Some(gate) = lock(&self.gates).remove(&ended.id) else { continue };
            gate.fence();
            let who = &ended.peer.certificate.identity;
            tracing::warn!(%who, "its connection is closed: {}", ended.why);
            closed(&who.to_string(), &ended.why.to_string());
        }
    }
}

impl Admitted {
    /// Whose it is, to the table.
    pub(super) fn origin(&self, is_here: bool) -> Origin {
        let identity = &self.live.peer().certificate.identity;
        let tenant = identity.role.tenant().map(Arc::from);
        Origin::Certified { identity: identity.to_string().into(), tenant, is_here }
    }

    /// True if it may borrow memory; others may only look.
    pub(super) fn may_borrow(&self) -> bool {
        matches!(self.live.peer().certificate.identity.role, Role::Program { .. })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        lock(&self.all.gates).remove(&self.live.id());
    }
}
