//! Tenants: promises, quotas and rates. Who gives memory up for whom is in `yielding`.
//!
//! There is one measure of what a tenant has: the superpages that are reserved for its segments
//! ([`SegmentRecord::superpages`]), those that it gives back included until they are free for
//! others. Quotas are rounded down to whole superpages, promises up.
//!
//! A tenant is a name that a client gives. With certificates it is that of the client's own
//! (`owners`); else nothing proves it.

use std::collections::BTreeMap;

use farpool_api::{
    ClientId, DEFAULT_TENANT, Problem, ProblemKind, SegmentSpec, Tenant, TenantList, TenantSpec,
};
use farpool_units::{SUPERPAGE_BYTES, format_bytes};

use super::nodes::check_name;
use super::record::{Record, SegmentRecord, TenantRecord};
use super::{Changes, Outcome, State, refuse};

/// Most tenants with a promise; a further one is refused.
const TENANTS_LIMIT: usize = 10_000;

/// What a tenant has.
#[derive(Clone, Copy, Default)]
pub(super) struct Use {
    /// Superpages that are reserved for it.
    pub superpages: u64,
    /// Those of them that it was asked to give up.
    pub yielding: u64,
    segments: u64,
    /// Bandwidth that is granted to it.
    rates: Rates,
}

/// Bandwidth in each direction, in bytes per second.
#[derive(Clone, Copy, Default)]
struct Rates {
    read: u64,
    write: u64,
}

impl Rates {
    fn of(spec: &SegmentSpec) -> Self {
        Rates { read: spec.read_bytes_per_s, write: spec.write_bytes_per_s }
    }

    fn plus(self, other: Rates) -> Self {
        Rates {
            read: self.read.saturating_add(other.read),
            write: self.write.saturating_add(other.write),
        }
    }
}

/// Returns the whole superpages that hold `bytes`.
pub(super) fn superpages_for(bytes: u64) -> u64 {
    bytes.div_ceil(SUPERPAGE_BYTES)
}

impl SegmentRecord {
    /// The superpages that are reserved where it lies; more than its size while it shrinks.
    pub(super) fn superpages(&self) -> u64 {
        self.current.bytes() / SUPERPAGE_BYTES
    }
}

impl State {
    /// Returns the name of the tenant of a client, or of segments without one.
    pub(super) fn tenant_of(&self, client: Option<ClientId>) -> &str {
        let client = client.and_then(|id| self.clients.get(&id));
        client.and_then(|it| it.record.spec.tenant.as_deref()).unwrap_or(DEFAULT_TENANT)
    }

    pub(super) fn spec_of(&self, tenant: &str) -> TenantSpec {
        self.tenants.get(tenant).map(|tenant| tenant.spec.clone()).unwrap_or_default()
    }

    /// The most superpages that a tenant may have; None without a quota.
    fn quota_of(&self, tenant: &str) -> Option<u64> {
        let quota_bytes = self.tenants.get(tenant)?.spec.quota_bytes?;
        Some(quota_bytes / SUPERPAGE_BYTES)
    }

    /// The superpages that a tenant gets back from others; never more than it may have.
    pub(super) fn promise_of(&self, tenant: &str) -> u64 {
        let promise = superpages_for(self.spec_of(tenant).promised_bytes);
        self.quota_of(tenant).map_or(promise, |quota| promise.min(quota))
    }

    /// The segments that count towards tenants.
    fn counted(&self) -> impl Iterator<Item = &SegmentRecord> {
        self.segments.values().filter(|segment| !segment.releasing && !segment.lost)
    }

    pub(super) fn uses(&self) -> BTreeMap<&str, Use> {
        let mut uses: BTreeMap<&str, Use> = BTreeMap::new();
        for segment in self.counted() {
            let tenant = uses.entry(self.tenant_of(segment.spec.client)).or_default();
            tenant.superpages += segment.superpages();
            tenant.segments += 1;
            tenant.rates = tenant.rates.plus(Rates::of(&segment.spec));
            if self.runtime.get(&segment.id).is_some_and(|runtime| runtime.yielding) {
                tenant.yielding += segment.superpages();
            }
        }
        uses
    }

    /// Those of one tenant.
    fn counted_of(&self, tenant: &str) -> impl Iterator<Item = &SegmentRecord> {
        self.counted().filter(move |segment| self.tenant_of(segment.spec.client) == tenant)
    }

    /// The superpages that a tenant has.
    fn superpages_of(&self, tenant: &str) -> u64 {
        self.counted_of(tenant).map(SegmentRecord::superpages).sum()
    }

    /// Whether a tenant is within its promise with so many more superpages.
    pub(super) fn is_within_promise(&self, tenant: &str, more: u64) -> bool {
        self.superpages_of(tenant).saturating_add(more) <= self.promise_of(tenant)
    }

    /// Refuses more than a tenant may have: of memory, or of bandwidth.
    pub(super) fn check_allowed(&self, spec: &SegmentSpec, more: u64) -> Result<(), Problem> {
        self.check_quota(spec.client, more)?;
        self.check_rate(spec)
    }

    /// Refuses more bandwidth than a tenant's segments may have together.
    fn check_rate(&self, spec: &SegmentSpec) -> Result<(), Problem> {
        let tenant = self.tenant_of(spec.client);
        let limit = self.tenants.get(tenant).and_then(|tenant| tenant.spec.rate_bytes_per_s);
        let Some(limit) = limit else { return Ok(()) };
        let own = self.counted_of(tenant);
        let has = own.fold(Rates::default(), |all, it| all.plus(Rates::of(&it.spec)));
        let with = has.plus(Rates::of(spec));
        let most = with.read.max(with.write);
        if most <= limit {
            return Ok(());
        }
        let left = limit.saturating_sub(has.read.max(has.write));
        let per_s = |bytes: u64| format!("{}/s", format_bytes(bytes));
        let detail = format!(
            "tenant {tenant} is granted {} of its {}, and {} more were asked for",
            per_s(has.read.max(has.write)),
            per_s(limit),
            per_s(spec.read_bytes_per_s.max(spec.write_bytes_per_s)),
        );
        let problem = Problem::new(ProblemKind::NoRoom, detail);
        Err(Problem { limit: Some(limit), rate_left_bytes_per_s: Some(left.into()), ..problem })
    }

    /// Refuses more superpages than a tenant may have.
    pub(super) fn check_quota(&self, client: Option<ClientId>, more: u64) -> Result<(), Problem> {
        let tenant = self.tenant_of(client);
        let Some(quota) = self.quota_of(tenant) else { return Ok(()) };
        let has = self.superpages_of(tenant);
        if has.saturating_add(more) <= quota {
            return Ok(());
        }
        let bytes = |superpages: u64| superpages.saturating_mul(SUPERPAGE_BYTES);
        let detail = format!(
            "tenant {tenant} has {} of its quota of {}, and {} more were asked for",
            format_bytes(bytes(has)),
            format_bytes(bytes(quota)),
            format_bytes(bytes(more))
        );
        let limit = Some(bytes(quota));
        Err(Problem { limit, ..Problem::new(ProblemKind::NoRoom, detail) })
    }

    pub(super) fn put_tenant(
        &mut self,
        name: &str,
        spec: TenantSpec,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        check_name(name, "tenant")?;
        if spec.rate_bytes_per_s == Some(0) {
            let detail = "a rate of 0 lets a tenant have no segment; a quota of 0 says so";
            return refuse(ProblemKind::Invalid, detail);
        }
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
        let TenantSpec { promised_bytes, quota_bytes, priority, rate_bytes_per_s, redundancy } =
            self.spec_of(name);
        Tenant {
            name: name.to_owned(),
            promised_bytes,
            quota_bytes,
            priority,
            rate_bytes_per_s,
            redundancy,
            granted_bytes: used.superpages * SUPERPAGE_BYTES,
            segments: used.segments,
            granted_read_bytes_per_s: used.rates.read,
            granted_write_bytes_per_s: used.rates.write,
            yielding_bytes: used.yielding * SUPERPAGE_BYTES,
        }
    }
}
