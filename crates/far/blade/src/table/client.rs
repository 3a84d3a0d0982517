//! Clients, their connections and leases.

use super::{ClientRow, GrantId, GrantPass, Limits, Refused, Row, Scrub, Table, count_u32};
use farpool_policy::Bucket;
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::{ClientId, ErrorCode, Hello, Purpose, SegmentId, SharingGroup};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A client's number on this blade: in order of arrival, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClientNumber(pub u64);

/// Counters of a client's connections, and what they may ask for; shared with them, so that
/// counting takes no lock.
#[derive(Debug, Default)]
pub struct ClientCounters {
    /// Pages read by requests, and through shared memory as reported.
    pub pages_read: AtomicU64,
    /// Pages written, likewise.
    pub pages_written: AtomicU64,
    /// What it may ask for in control requests.
    pub control: Bucket,
    reported_read: AtomicU64,
    reported_written: AtomicU64,
}

impl ClientCounters {
    /// Takes the totals that a client reports as moved through shared memory. Returns the pages
    /// read and written that are new.
    pub fn report(&self, pages_read: u64, pages_written: u64) -> (u64, u64) {
        let news = |all: u64, reported: &AtomicU64, counter: &AtomicU64| {
            let new = all.saturating_sub(reported.fetch_max(all, Ordering::Relaxed));
            counter.fetch_add(new, Ordering::Relaxed);
            new
        };
        (
            news(pages_read, &self.reported_read, &self.pages_read),
            news(pages_written, &self.reported_written, &self.pages_written),
        )
    }
}

/// The user that may do everything on this host.
pub(super) const ROOT: u32 = 0;

/// Where a client's connection comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// A user of this host, over a unix socket.
    User(u32),
    /// This host, over TCP.
    Loopback,
    /// Another host.
    Network,
    /// Over TCP, with a certificate.
    Certified {
        /// Whose it is, as the certificate names it.
        identity: Arc<str>,
        /// The tenant that it speaks for; programs have one.
        tenant: Option<Arc<str>>,
        /// Whether it is on this host.
        is_here: bool,
    },
}

impl Origin {
    fn user(&self) -> Option<u32> {
        match self {
            Origin::User(user) => Some(*user),
            _ => None,
        }
    }

    fn identity(&self) -> Option<&Arc<str>> {
        match self {
            Origin::Certified { identity, .. } => Some(identity),
            _ => None,
        }
    }

    fn tenant(&self) -> Option<&Arc<str>> {
        match self {
            Origin::Certified { tenant, .. } => tenant.as_ref(),
            _ => None,
        }
    }

    /// True for another host.
    fn is_remote(&self) -> bool {
        matches!(self, Origin::Network | Origin::Certified { is_here: false, .. })
    }
}

/// Whose a sharing group is: groups of the same name are others for each of them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SharingOwner {
    /// Those under a grant.
    Grant(GrantId),
    /// The programs of a tenant.
    Tenant(Arc<str>),
    /// A user of this host.
    User(u32),
    /// Whoever reaches the blade without a certificate.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Client {
    id: ClientId,
    name: String,
    pid: u32,
    /// The user of this host that uses it, once one came over a unix socket. A keeper does not
    /// count: it may be root's, and the program another user's.
    user: Option<u32>,
    /// Whose certificate began it. Only connections with that identity may use it.
    identity: Option<Arc<str>>,
    tenant: Option<Arc<str>>,
    /// Whose pages may be shared with its own, as its first program's connection said.
    sharing_group: Option<SharingGroup>,
    /// The grant that it is under, for all its life.
    pub(super) grant: Option<GrantId>,
    pub(super) quota_superpages: u32,
    pub(super) used_superpages: u32,
    pub(super) segments: BTreeSet<SegmentId>,
    connections: u32,
    /// When the client ends unless it reconnects; only while it has no connection.
    lease_end: Option<Duration>,
    counters: Arc<ClientCounters>,
}

/// A client, for display.
#[derive(Clone, Debug)]
pub struct ClientView {
    /// Its number.
    pub number: ClientNumber,
    /// The grant it is under.
    pub grant: Option<GrantId>,
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// The most it may use.
    pub quota_superpages: u32,
    /// How much it uses.
    pub used_superpages: u32,
    /// Segments it uses.
    pub segments: u32,
    /// Its connections.
    pub connections: u32,
    /// Time until its lease expires, while it has no connection.
    pub lease_left: Option<Duration>,
    /// Its counters.
    pub counters: Arc<ClientCounters>,
}

/// The result of connecting a client.
#[derive(Clone, Debug)]
pub struct Connected {
    /// The client's number.
    pub number: ClientNumber,
    /// Its quota.
    pub quota_bytes: u64,
    /// Its counters.
    pub counters: Arc<ClientCounters>,
    /// The grant it is under.
    pub grant: Option<GrantPass>,
}

impl Client {
    fn new(hello: &Hello<'_>, origin: &Origin, grant: Option<GrantId>, limits: &Limits) -> Self {
        let is_stranger = origin.is_remote() && grant.is_none();
        Client {
            id: hello.client,
            name: hello.name.to_owned(),
            pid: hello.pid,
            user: None,
            identity: origin.identity().cloned(),
            tenant: origin.tenant().cloned(),
            sharing_group: None,
            grant,
            quota_superpages: limits.quota_superpages(hello.quota_wanted_bytes, is_stranger),
            used_superpages: 0,
            segments: BTreeSet::new(),
            connections: 0,
            lease_end: None,
            counters: Arc::default(),
        }
    }

    pub(super) fn row(&self, number: ClientNumber) -> ClientRow {
        ClientRow {
            number: number.0,
            id: self.id.0,
            name: self.name.clone(),
            pid: self.pid,
            user: self.user,
            identity: self.identity.as_deref().map(str::to_owned),
            quota_superpages: self.quota_superpages,
            grant: self.grant.map(|id| id.0),
        }
    }

    /// A client as it was, without connections and segments.
    pub(super) fn restore(row: &ClientRow, lease_end: Duration) -> Self {
        Client {
            id: ClientId(row.id),
            name: row.name.clone(),
            pid: row.pid,
            user: row.user,
            identity: row.identity.as_deref().map(Arc::from),
            tenant: None,
            sharing_group: None,
            grant: row.grant.map(GrantId),
            quota_superpages: row.quota_superpages,
            used_superpages: 0,
            segments: BTreeSet::new(),
            connections: 0,
            lease_end: Some(lease_end),
            counters: Arc::default(),
        }
    }

    fn may_be_used_by(&self, origin: &Origin) -> bool {
        let user = origin.user();
        let fits_user = self.user.is_none() || user == self.user;
        user == Some(ROOT) || (fits_user && self.identity.as_ref() == origin.identity())
    }
}

impl<M: Clone> Table<M> {
    /// Adds a connection of the client; a new client is created. Once a user of this host uses a
    /// client, only that user and root may, whoever else has learned its id; and a client that
    /// began with a certificate is used only with certificates of that identity.
    ///
    /// # Errors
    /// The blade has as many clients as allowed, or the client needs a grant, shows one that is
    /// unknown or stale, or is under another one, or is another user's or identity's.
    pub fn connect(&mut self, hello: &Hello<'_>, origin: Origin) -> Result<Connected, Refused> {
        let grant = self.grants.admit(hello.grant, self.limits.require_grants)?;
        let grant_id = grant.as_ref().map(|pass| pass.id);
        let (number, mut has_changed) = match self.numbers.get(&hello.client) {
            Some(number) => (*number, false),
            None => (self.add_client(hello, &origin, grant_id)?, true),
        };
        let client =
            self.clients.get_mut(&number).ok_or(Refused::new(ErrorCode::NotPermitted, 0))?;
        if client.grant != grant_id {
            return Err(Refused::new(ErrorCode::NotGranted, 0));
        }
        if !client.may_be_used_by(&origin) {
            return Err(Refused::new(ErrorCode::NotPermitted, 0));
        }
        if client.user.is_none() && hello.purpose != Purpose::Keeper {
            client.user = origin.user();
            has_changed |= client.user.is_some();
        }
        if client.sharing_group.is_none() && hello.purpose != Purpose::Keeper {
            client.sharing_group = hello.sharing_group;
        }
        client.connections += 1;
        client.lease_end = None;
        let granted_superpages = grant_id.map_or(u32::MAX, |id| self.grants.quota_superpages(id));
        let quota_superpages = client.quota_superpages.min(granted_superpages);
        let connected = Connected {
            number,
            quota_bytes: u64::from(quota_superpages) * SUPERPAGE_BYTES,
            counters: Arc::clone(&client.counters),
            grant,
        };
        if has_changed {
            self.note_client(number);
        }
        Ok(connected)
    }

    /// The group that the client shares its pages with, and whose it is. None: it shares with
    /// nobody.
    pub fn sharing_of(&self, number: ClientNumber) -> Option<(SharingOwner, SharingGroup)> {
        let client = self.clients.get(&number)?;
        let owner = match (client.grant, &client.identity, client.user) {
            (Some(grant), ..) => SharingOwner::Grant(grant),
            (None, Some(identity), _) => {
                SharingOwner::Tenant(Arc::clone(client.tenant.as_ref().unwrap_or(identity)))
            }
            (None, None, Some(user)) => SharingOwner::User(user),
            (None, None, None) => SharingOwner::Unknown,
        };
        Some((owner, client.sharing_group?))
    }

    pub(super) fn connections_of(&self, number: ClientNumber) -> u32 {
        self.clients.get(&number).map_or(0, |client| client.connections)
    }

    fn add_client(
        &mut self,
        hello: &Hello<'_>,
        origin: &Origin,
        grant: Option<GrantId>,
    ) -> Result<ClientNumber, Refused> {
        if self.clients.len() >= self.limits.clients {
            return Err(Refused::new(ErrorCode::TooMany, self.limits.clients as u64));
        }
        let number = ClientNumber(self.next_client);
        self.next_client += 1;
        let before = self.clients.insert(number, Client::new(hello, origin, grant, &self.limits));
        assert!(before.is_none(), "client {} began twice", number.0);
        if let Some(grant) = grant {
            self.grants.add_client(grant, number);
        }
        self.numbers.insert(hello.client, number);
        Ok(number)
    }

    /// Removes a closed connection of the client; with the last one its lease begins.
    pub fn disconnect(&mut self, number: ClientNumber, now: Duration) {
        let Some(client) = self.clients.get_mut(&number) else {
            return; // it said goodbye
        };
        assert!(client.connections > 0, "a connection closed twice");
        client.connections -= 1;
        if client.connections == 0 {
            client.lease_end = Some(now + self.limits.lease);
        }
    }

    /// Ends the clients whose lease has expired by `now`.
    pub fn expire(&mut self, now: Duration) -> Vec<Scrub<M>> {
        let over = |client: &Client| client.lease_end.is_some_and(|end| end <= now);
        let ended: Vec<_> = self.clients.iter().filter(|(_, c)| over(c)).map(|(n, _)| *n).collect();
        let is_gone = |number| self.connections_of(number) == 0;
        assert!(ended.iter().all(|number| is_gone(*number)), "no lease runs while there is one");
        self.leases_expired += ended.len() as u64;
        ended.into_iter().flat_map(|number| self.end_client(number)).collect()
    }

    /// Ends a client: it no longer uses any segment, and its other connections can do nothing.
    pub fn end_client(&mut self, number: ClientNumber) -> Vec<Scrub<M>> {
        let Some(client) = self.clients.get_mut(&number) else {
            return Vec::new();
        };
        let segments = std::mem::take(&mut client.segments);
        let (id, grant) = (client.id, client.grant);
        let scrubs = segments.iter().filter_map(|s| self.drop_user(number, *s)).collect();
        let used = self.clients.remove(&number).map_or(0, |client| client.used_superpages);
        assert_eq!(used, 0, "who uses no segment is charged for none");
        self.numbers.remove(&id);
        if let Some(grant) = grant {
            self.grants.remove_client(grant, number);
        }
        self.note(|| Row::ClientEnded { number: number.0 });
        scrubs
    }

    /// All clients in order of arrival, leaving out the first `skip`.
    pub fn clients(&self, skip: usize, now: Duration) -> impl Iterator<Item = ClientView> + '_ {
        self.clients.iter().skip(skip).map(move |(number, client)| ClientView {
            number: *number,
            grant: client.grant,
            name: client.name.clone(),
            pid: client.pid,
            quota_superpages: client.quota_superpages,
            used_superpages: client.used_superpages,
            segments: count_u32(client.segments.len()),
            connections: client.connections,
            lease_left: client.lease_end.map(|end| end.saturating_sub(now)),
            counters: Arc::clone(&client.counters),
        })
    }
}
