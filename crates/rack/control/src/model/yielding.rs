//! Who gives memory up when the rack is full.
//!
//! Lim 2010, 3.2.3: management decides which other clients must give up capacity, and tells them
//! how much; which ones is left open there. Here it is who has most beyond its promise.
//!
//! Invariants:
//! - Others are asked only for a new segment, when memory is short, and only if it can be granted
//!   once they have left.
//! - Nobody is asked to give up what it was promised.
//! - What is given up is kept for the tenant it was taken for, for [`CLAIM_MS`].
//! - Giving up loses no data: a client that does not leave keeps its memory, and who asked waits.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use farpool_api::{ClientId, Problem, ProblemKind, SegmentId, SegmentSpec};
use farpool_placement::{RackError, Request, RequestId};
use farpool_units::SUPERPAGE_BYTES;

use super::record::SegmentRecord;
use super::tenants::superpages_for;
use super::{Age, Changes, Outcome, RECLAIM_DEADLINE_MS, State, graph, refuse};

/// How long memory that others give up is kept for the tenant it is for: as long as they have to
/// leave it.
const CLAIM_MS: u64 = RECLAIM_DEADLINE_MS;
/// Most nodes on which it is tried whether a segment would fit once others have left: each trial
/// copies the rack. If it fits on none of those with the least harm, nobody is asked.
const NODES_TRIED: usize = 8;
/// Most segments of a node that are tried one by one whether they may stay, where the free memory
/// has to be in one piece; of more, some may be asked to leave without need.
const STAYS_TRIED: usize = 64;

/// Memory that others were asked to give up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// The node on which it will be free.
    node: String,
    /// How much of it.
    superpages: u64,
    /// When it ends, in ms.
    until_ms: u64,
}

/// The harm of making room on a node; the least is chosen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Harm {
    /// The highest priority of those that give up.
    priority: u8,
    /// Data that has to move; what is not known counts as full.
    used_bytes: u64,
    superpages: u64,
    segments: usize,
}

/// How room is made on a node.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Plan<'a> {
    harm: Harm,
    node: &'a str,
    leaves: Vec<SegmentId>,
}

/// What a tenant can give up on one node.
struct Giver<'a> {
    priority: u8,
    /// Superpages beyond its promise that it has still.
    over: u64,
    /// Its segments there, the next to leave last.
    segments: Vec<&'a SegmentRecord>,
}

/// A segment that can be given up, and its tenant's priority.
type Given<'a> = (&'a SegmentRecord, u8);

/// What a tenant can give up at all: its priority, and superpages beyond its promise.
type Beyond<'a> = BTreeMap<&'a str, (u8, u64)>;

impl State {
    /// Refuses superpages beyond a tenant's promise while memory is on its way to another.
    pub(super) fn check_claims(
        &self,
        client: Option<ClientId>,
        more: u64,
        now_ms: u64,
    ) -> Result<(), Problem> {
        let tenant = self.tenant_of(client);
        let mut others = self.claims.iter().filter(|(name, _)| name.as_str() != tenant);
        let Some((other, _)) = others.find(|(_, claim)| claim.until_ms > now_ms) else {
            return Ok(());
        };
        if self.is_within_promise(tenant, more) {
            return Ok(());
        }
        let detail = format!("the rack is full, and tenant {other} gets what is free next");
        refuse(ProblemKind::NoRoom, detail)
    }

    /// The nodes on which memory is on its way to a tenant.
    pub(crate) fn claimed_nodes(&self, now_ms: u64) -> BTreeSet<&str> {
        let lasting = self.claims.values().filter(|claim| claim.until_ms > now_ms);
        lasting.map(|claim| claim.node.as_str()).collect()
    }

    /// Ends a tenant's claim: it has got memory.
    pub(super) fn end_claim(&mut self, client: Option<ClientId>) {
        let tenant = self.tenant_of(client).to_owned();
        self.claims.remove(&tenant);
    }

    /// Asks tenants that are beyond their promises to give up memory for a segment that was refused
    /// for lack of it. [`Outcome::Created`] says that memory is on its way.
    pub(super) fn make_room(
        &mut self,
        id: SegmentId,
        spec: &SegmentSpec,
        to: &mut Changes<'_>,
    ) -> Outcome {
        let now_ms = to.now_ms;
        self.claims.retain(|_, claim| claim.until_ms > now_ms);
        // Where a segment lies it can only grow into what is beside it.
        let Some(request) = self.wish(id, spec).filter(|_| !self.segments.contains_key(&id)) else {
            return Outcome::Done;
        };
        let tenant = self.tenant_of(spec.client).to_owned();
        if self.check_allowed(spec, needs(spec)).is_err() {
            return Outcome::Done;
        }
        let has_claim = self.claims.contains_key(&tenant);
        let beyond = self.beyond_promise(&tenant, needs(spec));
        // Where nobody can give anything up, what comes free is for whoever asks first. Whether
        // memory is short is found out on a copy of the rack.
        if !has_claim && beyond.is_empty() || !self.is_memory_short(&request) {
            return Outcome::Done;
        }
        if has_claim {
            return Outcome::Created;
        }
        let Some((node, leaves)) = self.choose_yielding(&beyond, spec, &request) else {
            return Outcome::Done;
        };
        for id in leaves {
            self.ask_to_yield(id, &tenant, to);
        }
        let (superpages, until_ms) = (needs(spec), now_ms + CLAIM_MS);
        self.claims.insert(tenant, Claim { node, superpages, until_ms });
        Outcome::Created
    }

    fn ask_to_yield(&mut self, id: SegmentId, tenant: &str, to: &mut Changes<'_>) {
        let client = self.segments.get(&id).and_then(|segment| segment.spec.client);
        let Some(runtime) = self.runtime.get_mut(&id) else { return };
        runtime.yielding = true;
        runtime.leave = true;
        runtime.retry_ms = Some(to.now_ms);
        self.touch_client(client);
        let owner = self.tenant_of(client).to_owned();
        let detail = format!(
            "the rack is full: tenant {owner} has most beyond its promise, and {tenant} needs it"
        );
        to.event("segment-to-be-given-up", id, detail);
        self.announce(id, to);
    }

    /// The request to the rack for a new segment; None if there can be none.
    fn wish(&self, id: SegmentId, spec: &SegmentSpec) -> Option<Request> {
        let host = self.host_of(spec).ok()?;
        let compute = self.compute_named(&host).ok()?;
        Some(graph::request(self.rack.graph(), id, spec, compute))
    }

    /// Whether a segment is refused for lack of memory, and would be wherever it might lie.
    fn is_memory_short(&self, request: &Request) -> bool {
        let anywhere = Request { avoid: Vec::new(), ..request.clone() };
        matches!(self.rack.try_without(&anywhere, []), Err(RackError::NoCapacity { .. }))
    }

    /// Returns the node on which a segment gets room with the least harm, and the segments that
    /// have to leave it: of the tenants with the lowest priority first, of those from the one that
    /// has most beyond its promise, and of its segments from the one that holds least data.
    fn choose_yielding(
        &self,
        beyond: &Beyond<'_>,
        spec: &SegmentSpec,
        request: &Request,
    ) -> Option<(String, Vec<SegmentId>)> {
        let mut here: BTreeMap<&str, Vec<&SegmentRecord>> = BTreeMap::new();
        for segment in self.segments.values().filter(|segment| self.may_yield(segment)) {
            here.entry(segment.current.node.as_str()).or_default().push(segment);
        }
        let claimed = self.claimed_superpages();
        let there = |node: &str| here.get(node).map_or(&[][..], Vec::as_slice);
        let mut plans: Vec<Plan<'_>> = self
            .nodes
            .values()
            .filter(|node| node.memory.is_some() && !self.is_avoided(node, request))
            .filter_map(|node| {
                let name = node.record.name.as_str();
                let free_bytes = node.lendable_bytes().saturating_sub(self.granted_bytes(name));
                // What others give up is on its way to those with claims.
                let free = free_bytes / SUPERPAGE_BYTES + self.yielding_superpages(name);
                let promised = claimed.get(name).copied().unwrap_or(0);
                let wanted = needs(spec).saturating_add(promised);
                let missing = wanted.saturating_sub(free);
                let (chosen, sum) = self.in_order(there(name), missing, beyond);
                let spare = sum.checked_sub(missing)?;
                Some(self.without_needless(name, chosen, spare))
            })
            .collect();
        plans.sort();
        plans.into_iter().take(NODES_TRIED).find_map(|Plan { node, leaves, .. }| {
            let leaves = match self.fits(request, node, &leaves) {
                true => leaves,
                false => {
                    let (all, _) = self.in_order(there(node), u64::MAX, beyond);
                    self.in_one_piece(request, node, &all)?
                }
            };
            Some((node.to_owned(), leaves))
        })
    }

    /// Whether a segment fits once these have left a node, and what is leaving it already.
    fn fits(&self, request: &Request, node: &str, leaves: &[SegmentId]) -> bool {
        let on_node = self.on_node.get(node).into_iter().flatten();
        let is_going = |id: &&SegmentId| {
            self.segments.get(id).is_some_and(|segment| segment.releasing) || self.is_yielding(id)
        };
        let gone = on_node.filter(is_going).chain(leaves);
        self.rack.try_without(request, gone.map(|id| RequestId(id.0.as_u128()))).is_ok()
    }

    /// Returns the segments that have to leave where it matters which ones, because the free memory
    /// has to be in one piece: of all that can, those without which the segment does not fit.
    fn in_one_piece(
        &self,
        request: &Request,
        node: &str,
        all: &[Given<'_>],
    ) -> Option<Vec<SegmentId>> {
        let mut leaves: Vec<SegmentId> = all.iter().map(|(segment, _)| segment.id).collect();
        if !self.fits(request, node, &leaves) {
            return None;
        }
        // Those that should leave last stay first.
        for (segment, _) in all.iter().rev().take(STAYS_TRIED) {
            let mut fewer = leaves.clone();
            fewer.retain(|id| *id != segment.id);
            if self.fits(request, node, &fewer) {
                leaves = fewer;
            }
        }
        Some(leaves)
    }

    /// What each tenant can give up to this one, which asks for so many superpages more.
    fn beyond_promise(&self, tenant: &str, more: u64) -> Beyond<'_> {
        let is_within = self.is_within_promise(tenant, more);
        let own = self.spec_of(tenant).priority;
        let mut beyond = Beyond::new();
        for (name, used) in self.uses() {
            let priority = self.spec_of(name).priority;
            let kept = used.superpages.saturating_sub(used.yielding);
            let over = kept.saturating_sub(self.promise_of(name));
            if name != tenant && over > 0 && (is_within || priority < own) {
                beyond.insert(name, (priority, over));
            }
        }
        beyond
    }

    /// Superpages of each node that are on their way to tenants.
    fn claimed_superpages(&self) -> BTreeMap<&str, u64> {
        let mut claimed = BTreeMap::new();
        for claim in self.claims.values() {
            let sum: &mut u64 = claimed.entry(claim.node.as_str()).or_default();
            *sum = sum.saturating_add(claim.superpages);
        }
        claimed
    }

    fn is_yielding(&self, id: &SegmentId) -> bool {
        self.runtime.get(id).is_some_and(|runtime| runtime.yielding)
    }

    /// Superpages of a node that are being given up.
    fn yielding_superpages(&self, node: &str) -> u64 {
        let here = self.on_node.get(node).into_iter().flatten();
        let going = here.filter(|id| self.is_yielding(id)).filter_map(|id| self.segments.get(id));
        going.filter(|segment| !segment.releasing).map(SegmentRecord::superpages).sum()
    }

    fn is_avoided(&self, node: &super::Node, request: &Request) -> bool {
        let graph = self.rack.graph();
        let brick = node.memory.as_deref().and_then(|name| graph::memory_of(graph, name));
        let domain = brick.map(|brick| graph.memories()[brick.index()].domain);
        domain.is_none_or(|domain| request.avoid.contains(&domain))
    }

    /// Returns segments of a node in the order in which they should be given up, until `enough`
    /// superpages are free or there are no more, and how many superpages they have. Each tenant
    /// gives up what it has beyond its promise at most, wherever that lies.
    fn in_order<'a>(
        &'a self,
        here: &[&'a SegmentRecord],
        enough: u64,
        beyond: &Beyond<'a>,
    ) -> (Vec<Given<'a>>, u64) {
        let mut givers: BTreeMap<&str, Giver<'a>> = BTreeMap::new();
        for segment in here {
            let owner = self.tenant_of(segment.spec.client);
            let Some(&(priority, over)) = beyond.get(owner) else { continue };
            let giver = Giver { priority, over, segments: Vec::new() };
            givers.entry(owner).or_insert(giver).segments.push(segment);
        }
        // The largest last of equals, so that few programs are disturbed.
        let order = |segment: &&SegmentRecord| {
            (Reverse(self.used_bytes(segment)), segment.superpages(), Reverse(segment.id))
        };
        givers.values_mut().for_each(|giver| giver.segments.sort_by_key(order));
        let rank = |(owner, giver): (&&'a str, &Giver<'a>)| {
            (Reverse(giver.priority), giver.over, Reverse(*owner))
        };
        let mut turns: BinaryHeap<_> = givers.iter().map(rank).collect();
        let (mut chosen, mut sum) = (Vec::new(), 0);
        while sum < enough
            // Whoever has most beyond its promise now.
            && let Some((priority, _, owner)) = turns.pop()
        {
            let Some(giver) = givers.get_mut(owner.0) else { continue };
            let Some(segment) = giver.segments.pop() else { continue };
            if segment.superpages() <= giver.over {
                giver.over -= segment.superpages();
                sum += segment.superpages();
                chosen.push((segment, giver.priority));
            }
            turns.push((priority, giver.over, owner));
        }
        (chosen, sum)
    }

    /// Makes a plan of what was chosen, without what turned out to be more than is missing.
    fn without_needless<'a>(
        &self,
        node: &'a str,
        mut chosen: Vec<Given<'_>>,
        mut spare: u64,
    ) -> Plan<'a> {
        chosen.retain(|(segment, _)| {
            let is_needless = segment.superpages() <= spare;
            spare -= if is_needless { segment.superpages() } else { 0 };
            !is_needless
        });
        let mut harm = Harm { segments: chosen.len(), ..Harm::default() };
        for (segment, priority) in &chosen {
            harm.priority = harm.priority.max(*priority);
            harm.superpages += segment.superpages();
            harm.used_bytes = harm.used_bytes.saturating_add(self.used_bytes(segment));
        }
        Plan { harm, node, leaves: chosen.iter().map(|(segment, _)| segment.id).collect() }
    }

    /// The bytes of a segment that hold data; all of them if that is not known.
    fn used_bytes(&self, segment: &SegmentRecord) -> u64 {
        let used = self.runtime.get(&segment.id).and_then(|runtime| runtime.used_bytes);
        used.unwrap_or_else(|| segment.current.bytes())
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
}

fn needs(spec: &SegmentSpec) -> u64 {
    superpages_for(spec.bytes)
}
