//! Connections that are open, so that a revocation ends them and not only keeps new ones out.
//!
//! A server admits each peer after its handshake, and asks every so often which of them may no
//! longer be there: every [`CHECK_EVERY`] it reloads its [`Credentials`] and calls
//! [`LiveConnections::check`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use farpool_kernel::lock;
use rustls::pki_types::UnixTime;

use crate::credentials::Credentials;
use crate::refusal::Refusal;
use crate::trust::Peer;

/// How often servers look for revocations, so that one is seen within a second.
pub const CHECK_EVERY: Duration = Duration::from_millis(250);

/// Names a connection as long as the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// A connection whose peer may no longer be served.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Which connection.
    pub id: ConnectionId,
    /// Who is at its other end.
    pub peer: Peer,
    /// Why it has to be closed.
    pub why: Refusal,
}

#[derive(Debug)]
struct Entry {
    peer: Peer,
    /// Why the connection has to be closed, once that is known.
    why: OnceLock<Refusal>,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    /// Each with the generation of [`Credentials::trust`] under which it was verified.
    open: BTreeMap<ConnectionId, (Arc<Entry>, u64)>,
}

/// The open connections of a server, or of a client.
#[derive(Debug)]
pub struct LiveConnections {
    credentials: Arc<Credentials>,
    table: Mutex<Table>,
}

/// One open connection. Dropping it says that the connection is closed.
#[derive(Debug)]
pub struct Live {
    all: Arc<LiveConnections>,
    entry: Arc<Entry>,
    id: ConnectionId,
}

impl LiveConnections {
    /// No connections yet, whose peers these credentials verify.
    #[must_use]
    pub fn new(credentials: Arc<Credentials>) -> Arc<Self> {
        Arc::new(Self { credentials, table: Mutex::default() })
    }

    /// Notes a connection whose handshake is complete.
    ///
    /// # Errors
    /// Its peer may not be served any more: something was revoked since the handshake.
    pub fn admit(self: &Arc<Self>, peer: Peer, now: UnixTime) -> Result<Live, Refusal> {
        // Before the verification: what changes during it is verified again by the next check.
        let generation = self.credentials.generation();
        self.credentials.verify_peer(&peer, now)?;
        let entry = Arc::new(Entry { peer, why: OnceLock::new() });
        let mut table = lock(&self.table);
        table.last += 1;
        let id = ConnectionId(table.last);
        table.open.insert(id, (Arc::clone(&entry), generation));
        Ok(Live { all: Arc::clone(self), entry, id })
    }

    /// Returns the connections whose peers may no longer be served, each until it is closed: their
    /// certificates were revoked, have ended, or are of an authority that is no longer trusted.
    /// Costs a comparison for each connection, and a verification after a change.
    pub fn check(&self, now: UnixTime) -> Vec<Ended> {
        let generation = self.credentials.generation();
        let mut ended = Vec::new();
        for (&id, (entry, verified_under)) in &mut lock(&self.table).open {
            if entry.why.get().is_none() {
                let found = if *verified_under == generation {
                    refuse_expired(&entry.peer, now)
                } else {
                    self.credentials.verify_peer(&entry.peer, now)
                };
                match found {
                    Ok(()) => *verified_under = generation,
                    // Only this function sets it, under the lock.
                    Err(why) => drop(entry.why.set(why)),
                }
            }
            if let Some(why) = entry.why.get() {
                ended.push(Ended { id, peer: entry.peer.clone(), why: why.clone() });
            }
        }
        ended
    }

    /// How many connections are open.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.table).open.len()
    }
}

fn refuse_expired(peer: &Peer, now: UnixTime) -> Result<(), Refusal> {
    let not_after_s = peer.certificate.not_after_s;
    if now.as_secs() > not_after_s { Err(Refusal::Expired { not_after_s }) } else { Ok(()) }
}

impl Live {
    /// Its name in [`Ended`].
    #[must_use]
    pub const fn id(&self) -> ConnectionId {
        self.id
    }

    /// Who is at its other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.entry.peer
    }

    /// Why the connection has to be closed, as the last check found. Costs one load: to be asked
    /// before each request.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.entry.why.get()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        lock(&self.all.table).open.remove(&self.id);
    }
}
