//! Grants: which clients are admitted, how much memory all clients of a grant may use together, and
//! how fast.
//!
//! Invariants:
//! - The epoch of a grant's id never goes back, not even across [`Table::end_grant`]: orders of a
//!   late or superseded grantor are refused. (The last [`ENDED_LIMIT`] ended ids are remembered.)
//! - A key opens one grant. The key before the current one is remembered, to be refused as stale
//!   rather than as unknown.
//! - A client is under one grant, or under none, for all its life, and a segment is used by clients
//!   of one grant only. So a grant's use is the sum of its clients', and ending the grant frees
//!   exactly that.
//! - A grant bounds, it does not reserve: several may promise more than the blade has.
//!
//! Keys are looked up in a hash map with a random key of its own (SipHash); bytes are compared only
//! with a key of the same hash, so the time of a refusal reveals nothing about the existing keys.

use super::{
    ClientNumber, GrantRow, ImageError, Refused, Row, Scrub, Table, count_u32, superpages_of,
};
use farpool_policy::{Bucket, Meter, RateLimit};
use farpool_units::{SUPERPAGE_BYTES, at_most};
use farpool_wire::{ErrorCode, Grant, GrantKey};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use thiserror::Error;

/// Most grants at once (some hundred bytes each); further ones are refused.
pub const GRANTS_LIMIT: usize = 65_536;
/// Ended grants whose epoch is remembered (some 50 bytes each); beyond that, the oldest is
/// forgotten, and an old order could set it again.
pub const ENDED_LIMIT: usize = 65_536;

/// A grant's name between the blade and the grantor: the segment's id at the controller. Clients
/// never see it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GrantId(pub u128);

/// The specification of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantSpec {
    /// Which grant.
    pub id: GrantId,
    /// How often it was granted; grows with each new owner or key.
    pub epoch: u64,
    /// What its clients show in hello; not 0, and the same for one epoch.
    pub key: GrantKey,
    /// Memory for all its clients together; rounded up to superpages.
    pub bytes: u64,
    /// How fast they may read together; `u64::MAX` for no limit, 0 for not at all. See
    /// [`RateLimit::paced`] for the burst.
    pub read_bytes_per_s: u64,
    /// How fast they may write together, likewise.
    pub write_bytes_per_s: u64,
}

/// Why a grant was not set or ended. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum GrantError {
    /// The blade knows a later epoch, or the grant of this epoch was ended.
    #[error("the grant is known with epoch {epoch} already, so this order is out of date")]
    Stale {
        /// The blade's epoch.
        epoch: u64,
    },
    /// Key 0.
    #[error("a grant needs a key other than 0")]
    NoKey,
    /// The key differs from that of the same epoch.
    #[error("a grant's key changes only with a higher epoch")]
    KeyChanged,
    /// The key belongs to another grant.
    #[error("the key belongs to another grant; make a random one for each")]
    KeyTaken,
    /// The blade has as many grants as allowed.
    #[error("the blade has {limit} grants, which is as many as it can have")]
    TooMany {
        /// The limit.
        limit: usize,
    },
}

/// Rates and counters of all connections under a grant; shared with them, so that counting and
/// pacing take no lock.
#[derive(Debug, Default)]
pub struct GrantTraffic {
    /// How fast they may read.
    pub read: Meter,
    /// How fast they may write.
    pub write: Meter,
    /// What they may ask for in control requests.
    pub control: Bucket,
    /// Changes with the rates of pages, so that a connection waiting by the old ones checks again.
    pub rates_version: AtomicU64,
    /// Pages read.
    pub pages_read: AtomicU64,
    /// Pages written.
    pub pages_written: AtomicU64,
    /// Time that reads were held back for the rate, summed over connections.
    pub read_throttled_ns: AtomicU64,
    /// Time that writes were held back, likewise.
    pub write_throttled_ns: AtomicU64,
    /// Time that control requests were held back, likewise.
    pub control_throttled_ns: AtomicU64,
}

/// What a connection got when it was admitted under a grant.
#[derive(Clone, Debug)]
pub struct GrantPass {
    /// The grant.
    pub id: GrantId,
    /// Its epoch at that time.
    pub epoch: u64,
    /// Rates and counters shared with the other connections.
    pub traffic: Arc<GrantTraffic>,
}

/// A grant's present state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantStat {
    /// Its id.
    pub id: GrantId,
    /// Its epoch.
    pub epoch: u64,
    /// The most its clients may use together, in whole superpages.
    pub granted_bytes: u64,
    /// How much they use; above what is granted only after that was lowered.
    pub used_bytes: u64,
    /// Clients under it.
    pub clients: u32,
    /// Their connections.
    pub connections: u32,
    /// Pages read by its clients.
    pub pages_read: u64,
    /// Pages written by them.
    pub pages_written: u64,
    /// Time that reads were held back for the rate, summed over connections.
    pub read_throttled_ns: u64,
    /// Time that writes were held back, likewise.
    pub write_throttled_ns: u64,
    /// Time that control requests were held back, likewise.
    pub control_throttled_ns: u64,
}

#[derive(Debug)]
struct Given {
    epoch: u64,
    key: GrantKey,
    key_before: Option<GrantKey>,
    quota_superpages: u32,
    used_superpages: u32,
    clients: BTreeSet<ClientNumber>,
    read_bytes_per_s: u64,
    write_bytes_per_s: u64,
    traffic: Arc<GrantTraffic>,
}

/// All grants of a table.
#[derive(Debug, Default)]
pub(super) struct Grants {
    given: BTreeMap<GrantId, Given>,
    /// Each grant's current and previous key.
    keys: HashMap<GrantKey, GrantId>,
    ended: EndedGrants,
}

/// Epochs of the last [`ENDED_LIMIT`] ended grants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct EndedGrants {
    epochs: HashMap<GrantId, u64>,
    /// In the order of their ends.
    order: VecDeque<GrantId>,
}

impl EndedGrants {
    fn get(&self, id: GrantId) -> Option<u64> {
        self.epochs.get(&id).copied()
    }

    pub(super) fn insert(&mut self, id: GrantId, epoch: u64) {
        if self.epochs.insert(id, epoch).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > ENDED_LIMIT
            && let Some(oldest) = self.order.pop_front()
        {
            self.epochs.remove(&oldest);
        }
    }

    /// In the order of their ends.
    pub(super) fn iter(&self) -> impl Iterator<Item = (GrantId, u64)> + '_ {
        self.order.iter().map(|id| (*id, self.epochs[id]))
    }
}

impl Given {
    fn row(&self, id: GrantId) -> GrantRow {
        GrantRow {
            id: id.0,
            epoch: self.epoch,
            key: self.key.0,
            key_before: self.key_before.map(|key| key.0),
            quota_superpages: self.quota_superpages,
            read_bytes_per_s: self.read_bytes_per_s,
            write_bytes_per_s: self.write_bytes_per_s,
        }
    }

    /// A grant as it was, without clients.
    fn restore(row: &GrantRow) -> Self {
        let given = Given {
            epoch: row.epoch,
            key: GrantKey(row.key),
            key_before: row.key_before.map(GrantKey),
            quota_superpages: row.quota_superpages,
            used_superpages: 0,
            clients: BTreeSet::new(),
            read_bytes_per_s: row.read_bytes_per_s,
            write_bytes_per_s: row.write_bytes_per_s,
            traffic: Arc::default(),
        };
        given.set_rates(Duration::ZERO);
        given
    }

    fn set_rates(&self, now: Duration) {
        let now_ns = at_most(now.as_nanos());
        self.traffic.read.set_limit(now_ns, RateLimit::paced(self.read_bytes_per_s));
        self.traffic.write.set_limit(now_ns, RateLimit::paced(self.write_bytes_per_s));
        self.traffic.rates_version.fetch_add(1, Ordering::Release);
    }
}

impl Grants {
    /// The grants that a table had.
    pub(super) fn restore<'a>(
        rows: impl Iterator<Item = &'a GrantRow>,
        ended: EndedGrants,
    ) -> Result<Self, ImageError> {
        let mut grants = Grants { ended, ..Grants::default() };
        for row in rows {
            let (id, given) = (GrantId(row.id), Given::restore(row));
            for key in std::iter::once(given.key).chain(given.key_before) {
                if key.0 == 0 || grants.keys.insert(key, id).is_some() {
                    return Err(ImageError::Key { id: row.id });
                }
            }
            grants.given.insert(id, given);
        }
        Ok(grants)
    }

    pub(super) fn row(&self, id: GrantId) -> Option<GrantRow> {
        self.given.get(&id).map(|given| given.row(id))
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = GrantRow> + '_ {
        self.given.iter().map(|(id, given)| given.row(*id))
    }

    pub(super) fn ended(&self) -> &EndedGrants {
        &self.ended
    }

    fn check(&self, spec: &GrantSpec) -> Result<(), GrantError> {
        if spec.key.0 == 0 {
            return Err(GrantError::NoKey);
        }
        if let Some(epoch) = self.ended.get(spec.id).filter(|e| *e >= spec.epoch) {
            return Err(GrantError::Stale { epoch });
        }
        if self.keys.get(&spec.key).is_some_and(|owner| *owner != spec.id) {
            return Err(GrantError::KeyTaken);
        }
        match self.given.get(&spec.id) {
            Some(given) if given.epoch > spec.epoch => {
                Err(GrantError::Stale { epoch: given.epoch })
            }
            Some(given) if given.epoch == spec.epoch && given.key != spec.key => {
                Err(GrantError::KeyChanged)
            }
            None if self.given.len() >= GRANTS_LIMIT => {
                Err(GrantError::TooMany { limit: GRANTS_LIMIT })
            }
            _ => Ok(()),
        }
    }

    fn set(&mut self, spec: &GrantSpec, now: Duration) -> Result<(), GrantError> {
        self.check(spec)?;
        let given = self.given.entry(spec.id).or_insert_with(|| Given {
            epoch: spec.epoch,
            key: spec.key,
            key_before: None,
            quota_superpages: 0,
            used_superpages: 0,
            clients: BTreeSet::new(),
            read_bytes_per_s: 0,
            write_bytes_per_s: 0,
            traffic: Arc::default(),
        });
        assert!(given.epoch <= spec.epoch, "a grant's epoch never goes back");
        given.epoch = spec.epoch;
        given.quota_superpages = superpages_of(spec.bytes);
        if given.key != spec.key {
            if let Some(forgotten) = given.key_before.replace(given.key) {
                self.keys.remove(&forgotten);
            }
            given.key = spec.key;
        }
        let owner = self.keys.insert(spec.key, spec.id);
        assert!(owner.is_none_or(|owner| owner == spec.id), "a key opens one grant");
        given.read_bytes_per_s = spec.read_bytes_per_s;
        given.write_bytes_per_s = spec.write_bytes_per_s;
        given.set_rates(now);
        Ok(())
    }

    /// Admits a client that shows this grant, or returns why not.
    pub(super) fn admit(
        &self,
        grant: Option<Grant>,
        is_required: bool,
    ) -> Result<Option<GrantPass>, Refused> {
        let not_granted = Refused::new(ErrorCode::NotGranted, 0);
        let Some(shown) = grant else {
            return if is_required { Err(not_granted) } else { Ok(None) };
        };
        let id = *self.keys.get(&shown.key).ok_or(not_granted)?;
        let given = self.given.get(&id).ok_or(not_granted)?;
        let is_current_key = given.key == shown.key;
        if !is_current_key || shown.epoch < given.epoch {
            return Err(Refused::new(ErrorCode::StaleEpoch, given.epoch));
        }
        if shown.epoch > given.epoch {
            return Err(not_granted);
        }
        Ok(Some(GrantPass { id, epoch: given.epoch, traffic: Arc::clone(&given.traffic) }))
    }

    fn recheck(&self, pass: &GrantPass) -> Result<(), Refused> {
        match self.given.get(&pass.id) {
            None => Err(Refused::new(ErrorCode::NotGranted, 0)),
            Some(given) if given.epoch == pass.epoch => Ok(()),
            Some(given) => Err(Refused::new(ErrorCode::StaleEpoch, given.epoch)),
        }
    }

    pub(super) fn add_client(&mut self, id: GrantId, client: ClientNumber) {
        let given = self.given.get_mut(&id).expect("who was let in is under a grant");
        let is_new = given.clients.insert(client);
        assert!(is_new, "client {} comes under a grant once", client.0);
    }

    pub(super) fn remove_client(&mut self, id: GrantId, client: ClientNumber) {
        if let Some(given) = self.given.get_mut(&id) {
            given.clients.remove(&client);
        }
    }

    pub(super) fn check_quota(&self, id: GrantId, superpages: u32) -> Result<(), Refused> {
        let given = self.given.get(&id).ok_or(Refused::new(ErrorCode::NotGranted, 0))?;
        if given.used_superpages.saturating_add(superpages) > given.quota_superpages {
            let quota_bytes = u64::from(given.quota_superpages) * SUPERPAGE_BYTES;
            return Err(Refused::new(ErrorCode::QuotaExceeded, quota_bytes));
        }
        Ok(())
    }

    pub(super) fn quota_superpages(&self, id: GrantId) -> u32 {
        self.given.get(&id).map_or(0, |given| given.quota_superpages)
    }

    pub(super) fn charge(&mut self, id: GrantId, superpages: i64) {
        let given = self.given.get_mut(&id).expect("a grant ends after its clients");
        let used = i64::from(given.used_superpages) + superpages;
        let Ok(used) = u32::try_from(used) else {
            panic!("a grant's account is off: {used} superpages");
        };
        given.used_superpages = used;
    }

    fn end(&mut self, id: GrantId, epoch: u64) {
        if let Some(given) = self.given.remove(&id) {
            assert_eq!(given.used_superpages, 0, "a grant ends after its clients");
            assert!(given.clients.is_empty(), "a grant ends after its clients");
            self.keys.remove(&given.key);
            given.key_before.map(|key| self.keys.remove(&key));
        }
        self.ended.insert(id, epoch);
    }

    fn stat(&self, id: GrantId, given: &Given, connections: u32) -> GrantStat {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        GrantStat {
            id,
            epoch: given.epoch,
            granted_bytes: u64::from(given.quota_superpages) * SUPERPAGE_BYTES,
            used_bytes: u64::from(given.used_superpages) * SUPERPAGE_BYTES,
            clients: count_u32(given.clients.len()),
            connections,
            pages_read: count(&given.traffic.pages_read),
            pages_written: count(&given.traffic.pages_written),
            read_throttled_ns: count(&given.traffic.read_throttled_ns),
            write_throttled_ns: count(&given.traffic.write_throttled_ns),
            control_throttled_ns: count(&given.traffic.control_throttled_ns),
        }
    }
}

impl<M: Clone> Table<M> {
    /// Sets a grant, new or existing. With the blade's present epoch, memory and rates may change;
    /// with a higher one the key may too, and connections of the earlier epoch are to be closed.
    /// Memory below what is used only stops further allocation.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn set_grant(&mut self, spec: &GrantSpec, now: Duration) -> Result<(), GrantError> {
        self.grants.set(spec, now)?;
        self.note_grant(spec.id);
        Ok(())
    }

    /// Checks that an order with `epoch` may end the grant.
    ///
    /// # Errors
    /// The blade knows a later one.
    pub fn check_end_grant(&self, id: GrantId, epoch: u64) -> Result<(), GrantError> {
        let given = self.grants.given.get(&id).map(|given| given.epoch);
        match given.max(self.grants.ended.get(id)) {
            Some(known) if known > epoch => Err(GrantError::Stale { epoch: known }),
            _ => Ok(()),
        }
    }

    /// Admits no more connections under the grant. Its clients stay until [`Table::end_grant`].
    pub fn close_grant(&mut self, id: GrantId) {
        if let Some(given) = self.grants.given.get_mut(&id) {
            self.grants.keys.remove(&given.key);
            given.key_before.take().map(|key| self.grants.keys.remove(&key));
        }
    }

    /// Ends the grant and all its clients. Returns the number of clients, and what is to be zeroed.
    pub fn end_grant(&mut self, id: GrantId, epoch: u64) -> (u32, Vec<Scrub<M>>) {
        let clients = self.grants.given.get(&id).map(|given| given.clients.clone());
        let clients = clients.unwrap_or_default();
        let scrubs = clients.iter().flat_map(|client| self.end_client(*client)).collect();
        self.grants.end(id, epoch);
        self.note(|| Row::GrantEnded { id: id.0, epoch });
        (count_u32(clients.len()), scrubs)
    }

    /// Admits a connection that is no client's.
    ///
    /// # Errors
    /// It shows a grant that is unknown or stale.
    pub fn admit_monitor(&self, grant: Option<Grant>) -> Result<Option<GrantPass>, Refused> {
        self.grants.admit(grant, false)
    }

    /// Checks that the grant is still as it was when the connection was admitted.
    ///
    /// # Errors
    /// It was ended, or set anew.
    pub fn recheck_grant(&self, pass: &GrantPass) -> Result<(), Refused> {
        let is_open = |given: &Given| self.grants.keys.contains_key(&given.key);
        if !self.grants.given.get(&pass.id).is_some_and(is_open) {
            return Err(Refused::new(ErrorCode::NotGranted, 0));
        }
        self.grants.recheck(pass)
    }

    /// What the grants were set to, in the order of their ids.
    pub fn grant_specs(&self) -> Vec<GrantSpec> {
        let spec = |(id, given): (&GrantId, &Given)| GrantSpec {
            id: *id,
            epoch: given.epoch,
            key: given.key,
            bytes: u64::from(given.quota_superpages) * SUPERPAGE_BYTES,
            read_bytes_per_s: given.read_bytes_per_s,
            write_bytes_per_s: given.write_bytes_per_s,
        };
        self.grants.given.iter().map(spec).collect()
    }

    /// All grants, in the order of their ids.
    pub fn grants(&self) -> Vec<GrantStat> {
        let connections =
            |given: &Given| given.clients.iter().map(|c| self.connections_of(*c)).sum();
        let stat =
            |(id, given): (&GrantId, &Given)| self.grants.stat(*id, given, connections(given));
        self.grants.given.iter().map(stat).collect()
    }
}
