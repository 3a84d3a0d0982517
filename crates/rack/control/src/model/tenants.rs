//! Tenants: promises, quotas, and who gives memory up when the rack is full.
//!
//! Lim 2010, 3.2.3: management decides which other clients must give up capacity, and tells them
//! how much; which ones is left open there. Here it is who has most beyond its promise.
//!
//! Invariants:
//! - Nobody is asked to give up what it was promised.
//! - What is given up is kept for the tenant it was taken for, for [`CLAIM_MS`].
//! - Giving up loses no data: a client that does not leave keeps its memory, and who asked waits.
//!
//! A tenant is a name that a client gives; nothing proves it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use farpool_api::{
    ClientId, DEFAULT_TENANT, Problem, ProblemKind, SegmentId, Tenant, TenantList, TenantSpec,
};
use farpool_units::format_bytes;

use super::nodes::check_name;
use super::record::{Record, SegmentRecord, TenantRecord};
use super::{Age, Changes, Outcome, RECLAIM_DEADLINE_MS, State, refuse};

/// Most tenants with a promise; a further one is refused.
const TENANTS_LIMIT: usize = 10_000;
/// How long memory that others give up is kept for the tenant it is for: as long as they have to
/// leave it.
const CLAIM_MS: u64 = RECLAIM_DEADLINE_MS;

/// Memory that others were asked to give up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// The node on which it will be free.
    pub node: String,
    /// How much was asked for.
    pub bytes: u64,
    /// When it ends, in ms.
    pub until_ms: u64,
}

/// What a tenant has.
#[derive(Clone, Copy, Default)]
struct Use {
    granted_bytes: u64,
    segments: u64,
    yielding_bytes: u64,
}

impl State {
    /// Returns the name of the tenant of a client, or of segments without one.
    pub(super) fn tenant_of(&self, client: Option<ClientId>) -> &str {
        let client = client.and_then(|id| self.clients.get(&id));
        client.and_then(|it| it.record.spec.tenant.as_deref()).unwrap_or(DEFAULT_TENANT)
    }

    fn spec_of(&self, tenant: &str) -> TenantSpec {
        self.tenants.get(tenant).map(|tenant| tenant.spec.clone()).unwrap_or_default()
    }

    /// What a tenant gets back from others; never more than it may have.
    fn promise_of(&self, tenant: &str) -> u64 {
        let TenantSpec { promised_bytes, quota_bytes, .. } = self.spec_of(tenant);
        promised_bytes.min(quota_bytes.unwrap_or(u64::MAX))
    }

    fn uses(&self) -> BTreeMap<&str, Use> {
        let mut uses: BTreeMap<&str, Use> = BTreeMap::new();
        for segment in self.segments.values().filter(|segment| !segment.releasing && !segment.lost)
        {
            let tenant = uses.entry(self.tenant_of(segment.spec.client)).or_default();
            tenant.granted_bytes += segment.size_bytes();
            tenant.segments += 1;
            if self.runtime.get(&segment.id).is_some_and(|runtime| runtime.yielding) {
                tenant.yielding_bytes += segment.size_bytes();
            }
        }
        uses
    }

    fn granted_to(&self, tenant: &str) -> u64 {
        self.uses().get(tenant).map_or(0, |tenant| tenant.granted_bytes)
    }

    /// Refuses more memory than a tenant may have.
    pub(super) fn check_quota(&self, client: Option<ClientId>, more: u64) -> Result<(), Problem> {
        let tenant = self.tenant_of(client);
        let Some(quota) = self.tenants.get(tenant).and_then(|it| it.spec.quota_bytes) else {
            return Ok(());
        };
        let has = self.granted_to(tenant);
        if has.saturating_add(more) <= quota {
            return Ok(());
        }
        let detail = format!(
            "tenant {tenant} has {} of its quota of {}, and {} more were asked for",
            format_bytes(has),
            format_bytes(quota),
            format_bytes(more)
        );
        Err(Problem { limit: Some(quota), ..Problem::new(ProblemKind::NoRoom, detail) })
    }

    /// Refuses memory beyond a tenant's promise while memory is on its way to another.
    pub(super) fn check_claims(
        &self,
        client: Option<ClientId>,
        more: u64,
        now_ms: u64,
    ) -> Result<(), Problem> {
        let tenant = self.tenant_of(client);
        let other = self
            .claims
            .iter()
            .find(|(name, claim)| name.as_str() != tenant && claim.until_ms > now_ms);
        let Some((other, _)) = other else { return Ok(()) };
        if self.granted_to(tenant).saturating_add(more) <= self.promise_of(tenant) {
            return Ok(());
        }
        let detail = format!("the rack is full, and tenant {other} gets what is free next");
        refuse(ProblemKind::NoRoom, detail)
    }

    /// Whether memory of a node is on its way to a tenant.
    pub(crate) fn is_claimed(&self, node: &str, now_ms: u64) -> bool {
        self.claims.values().any(|claim| claim.node == node && claim.until_ms > now_ms)
    }

    /// Ends a tenant's claim: it has got memory.
    pub(super) fn end_claim(&mut self, client: Option<ClientId>) {
        let tenant = self.tenant_of(client).to_owned();
        self.claims.remove(&tenant);
    }

    pub(super) fn put_tenant(
        &mut self,
        name: &str,
        spec: TenantSpec,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        check_name(name, "tenant")?;
        let is_new = !self.tenants.contains_key(name);
        if is_new && self.tenants.len() >= TENANTS_LIMIT {
            let detail = format!("there are {TENANTS_LIMIT} tenants already");
            return refuse(ProblemKind::NoRoom, detail);
        }
        let record = TenantRecord { name: name.to_owned(), spec };
        to.put(&record);
        let spec = &record.spec;
        let detail = format!("promised {} bytes, priority {}", spec.promised_bytes, spec.priority);
        to.event("tenant-set", name, detail);
        self.tenants.insert(name.to_owned(), record);
        Ok(if is_new { Outcome::Created } else { Outcome::Done })
    }

    pub(super) fn delete_tenant(
        &mut self,
        name: &str,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let Some(record) = self.tenants.remove(name) else {
            return refuse(ProblemKind::NotFound, format!("there is no tenant {name:?}"));
        };
        to.ops.push(record.delete());
        to.event("tenant-forgotten", name, "its segments stay");
        Ok(Outcome::Done)
    }

    /// One tenant.
    ///
    /// # Errors
    /// There is no such tenant.
    pub fn tenant(&self, name: &str) -> Result<Tenant, Problem> {
        let uses = self.uses();
        if !self.tenants.contains_key(name) && !uses.contains_key(name) {
            return refuse(ProblemKind::NotFound, format!("there is no tenant {name:?}"));
        }
        Ok(self.tenant_view(name, uses.get(name).copied().unwrap_or_default()))
    }

    /// All tenants with a promise or with segments, by name.
    #[must_use]
    pub fn tenant_list(&self) -> TenantList {
        let mut uses = self.uses();
        for name in self.tenants.keys() {
            uses.entry(name).or_default();
        }
        let tenants = uses.iter().map(|(name, used)| self.tenant_view(name, *used));
        TenantList { tenants: tenants.collect() }
    }

    fn tenant_view(&self, name: &str, used: Use) -> Tenant {
        let TenantSpec { promised_bytes, quota_bytes, priority } = self.spec_of(name);
        Tenant {
            name: name.to_owned(),
            promised_bytes,
            quota_bytes,
            priority,
            granted_bytes: used.granted_bytes,
            segments: used.segments,
            yielding_bytes: used.yielding_bytes,
        }
    }

    /// Asks tenants that are beyond their promises to give up memory, so that a client can have
    /// `bytes` on one node. [`Outcome::Created`] says that memory is on its way.
    pub(super) fn make_room(
        &mut self,
        client: Option<ClientId>,
        bytes: u64,
        to: &mut Changes<'_>,
    ) -> Outcome {
        let tenant = self.tenant_of(client).to_owned();
        let now_ms = to.now_ms;
        if self.claims.get(&tenant).is_some_and(|claim| claim.until_ms > now_ms) {
            return Outcome::Created;
        }
        let Some((node, yielding)) = self.choose_yielding(&tenant, bytes) else {
            return Outcome::Done;
        };
        for id in yielding {
            let client = self.segments.get(&id).and_then(|segment| segment.spec.client);
            let Some(runtime) = self.runtime.get_mut(&id) else { continue };
            runtime.yielding = true;
            runtime.leave = true;
            runtime.retry_ms = Some(now_ms);
            self.touch_client(client);
            let owner = self.tenant_of(client).to_owned();
            let detail = format!(
                "the rack is full: tenant {owner} has most beyond its promise, and {tenant} \
                 needs it"
            );
            to.event("segment-to-be-given-up", id, detail);
            self.announce(id, to);
        }
        self.claims.insert(tenant, Claim { node, bytes, until_ms: now_ms + CLAIM_MS });
        Outcome::Created
    }

    /// Returns the node on which `bytes` get free with the least harm, and the segments that have
    /// to leave it: of the tenants with the lowest priority first, of those from the one that has
    /// most beyond its promise, and of its segments from the one that holds least data.
    fn choose_yielding(&self, tenant: &str, bytes: u64) -> Option<(String, Vec<SegmentId>)> {
        let uses = self.uses();
        let own = self.spec_of(tenant);
        let has = uses.get(tenant).map_or(0, |used| used.granted_bytes);
        let is_within = has.saturating_add(bytes) <= self.promise_of(tenant);
        let mut beyond: BTreeMap<&str, u64> = uses
            .iter()
            .map(|(name, used)| {
                let kept = used.granted_bytes.saturating_sub(used.yielding_bytes);
                (*name, kept.saturating_sub(self.promise_of(name)))
            })
            .filter(|(name, _)| *name != tenant)
            .filter(|(name, _)| is_within || self.spec_of(name).priority < own.priority)
            .collect();
        let mut left: Vec<&SegmentRecord> =
            self.segments.values().filter(|segment| self.may_yield(segment)).collect();
        let used = |segment: &SegmentRecord| {
            self.runtime.get(&segment.id).and_then(|runtime| runtime.used_bytes)
        };
        // The largest last of equals, so that few programs are disturbed.
        left.sort_by_key(|segment| {
            (used(segment).unwrap_or(u64::MAX), Reverse(segment.size_bytes()), segment.id)
        });
        let mut chosen: BTreeMap<&str, (u64, Vec<SegmentId>)> = BTreeMap::new();
        loop {
            // Who is to give up next: whoever has most beyond its promise now.
            let next = left.iter().enumerate().filter_map(|(at, segment)| {
                let owner = self.tenant_of(segment.spec.client);
                let over = *beyond.get(owner)?;
                let priority = self.spec_of(owner).priority;
                (segment.size_bytes() <= over).then_some((priority, Reverse(over), at))
            });
            let (_, _, at) = next.min()?;
            let segment = left.remove(at);
            let owner = self.tenant_of(segment.spec.client);
            *beyond.get_mut(owner)? -= segment.size_bytes();
            let node = segment.current.node.as_str();
            let (sum, ids) = chosen.entry(node).or_insert_with(|| (self.free_on(node), Vec::new()));
            *sum += segment.size_bytes();
            ids.push(segment.id);
            if *sum >= bytes {
                return chosen.remove(node).map(|(_, ids)| (node.to_owned(), ids));
            }
        }
    }

    /// Whether a segment can be given up: it is at rest on a node that lends, and has a client that
    /// takes its data elsewhere.
    fn may_yield(&self, segment: &SegmentRecord) -> bool {
        let node = self.nodes.get(&segment.current.node);
        let runtime = self.runtime.get(&segment.id);
        segment.spec.client.is_some()
            && segment.target.is_none()
            && !(segment.releasing || segment.lost || segment.evacuated)
            && node.is_some_and(|node| node.age == Age::Fresh && !node.record.draining)
            && runtime.is_some_and(|run| !run.leave && run.deadline_ms.is_none())
    }

    fn free_on(&self, node: &str) -> u64 {
        let lends = self.nodes.get(node).map_or(0, super::Node::lendable_bytes);
        lends.saturating_sub(self.granted_bytes(node))
    }
}
