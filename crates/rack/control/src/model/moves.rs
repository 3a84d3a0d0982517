//! Segments that move. A move is begun by a request, a drain or a donor's need; it ends when the
//! client has reported that its data is at the target, and the old node that it let go.

use std::collections::BTreeSet;

use farpool_api::{MoveRequest, Policy, Problem, ProblemKind, SegmentId};
use farpool_placement::{DomainId, RequestId, SwitchKind, Vertex};
use farpool_switch::Circuit;

use super::record::{GrantRecord, Record};
use super::segments::rack_problem;
use super::{
    Changes, Condition, LEAVE_AFTER_MS, Outcome, RECLAIM_DEADLINE_MS, RETRY_MS, State, graph,
    refuse,
};

impl State {
    pub(super) fn move_segment(
        &mut self,
        id: SegmentId,
        wish: &MoveRequest,
        condition: &Condition,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        self.check_revision(id, condition)?;
        let segment = self.segment_with(id)?;
        let refusal = match segment {
            segment if segment.releasing => Some("is being released"),
            segment if segment.lost => Some("has lost its memory"),
            segment if segment.target.is_some() => Some("is being moved already"),
            segment if segment.spec.client.is_none() => Some("has no client that moves its data"),
            _ => None,
        };
        if let Some(refusal) = refusal {
            return refuse(ProblemKind::Conflict, format!("segment {id} {refusal}"));
        }
        self.check_avoid(&wish.avoid)?;
        self.begin_move(id, wish.policy, &self.ways_out(id, &wish.avoid, true), to)?;
        let task = self.begin_task("move", &id.to_string(), to);
        Ok(Outcome::Task(task))
    }

    /// Returns the failure domains to avoid in a move, and those to avoid if that cannot be. Beside
    /// its copies a segment would be of no use, which matters more than what was to be avoided at
    /// first, unless that is an order (`must_avoid`).
    fn ways_out(&self, id: SegmentId, avoid: &[String], must_avoid: bool) -> Vec<Vec<DomainId>> {
        let domain = |name: &str| self.rack.graph().domain(name);
        let avoid: Vec<_> = avoid.iter().filter_map(|name| domain(name)).collect();
        let apart: Vec<_> = self.domains_of_copies(id).into_iter().filter_map(domain).collect();
        let mut ways = vec![[&avoid[..], &apart[..]].concat()];
        ways.extend((!must_avoid && !apart.is_empty()).then_some(apart));
        ways
    }

    /// Grants a target besides the current place, in the first way that is possible.
    fn begin_move(
        &mut self,
        id: SegmentId,
        policy: Policy,
        ways: &[Vec<DomainId>],
        to: &mut Changes<'_>,
    ) -> Result<(), Problem> {
        let (request, policy) = (RequestId(id.0.as_u128()), graph::policy(policy));
        let (last, better) = ways.split_last().expect("there is a way");
        let rack = &mut self.rack;
        let moved = better.iter().find_map(|avoid| rack.begin_move(request, policy, avoid).ok());
        let moved = moved.map_or_else(|| rack.begin_move(request, policy, last), Ok);
        let grant = moved.map_err(|error| rack_problem(&error))?;
        let target = self.new_grant(&grant, to);
        self.raise_ceilings(to);
        let node = target.node.clone();
        let segment = self.segments.get_mut(&id).expect("what stands in the rack is a segment");
        let from = segment.current.node.clone();
        assert!(target.epoch > segment.current.epoch, "an epoch is above all before it");
        let before = segment.target.replace(target);
        assert!(before.is_none(), "a segment moves to one place");
        segment.revision += 1;
        to.ops.push(segment.put());
        let segment = segment.clone();
        self.index(&segment);
        let version = self.touch_node(&node);
        if let Some(runtime) = self.runtime.get_mut(&id) {
            runtime.target_dropped_version = version;
            runtime.retry_ms = None;
        }
        self.touch_client(segment.spec.client);
        to.event("segment-move-begun", id, format!("from {from} to {node}"));
        self.announce(id, to);
        Ok(())
    }

    /// Returns the failure domains of segments that may have copies of what this one has.
    fn domains_of_copies(&self, id: SegmentId) -> BTreeSet<&str> {
        let own = self.segments.get(&id).filter(|segment| segment.spec.apart);
        let client = own.and_then(|segment| self.clients.get(&segment.spec.client?));
        let others = client.into_iter().flat_map(|client| &client.segments);
        let others = others.filter(|other| **other != id);
        let others = others.filter_map(|other| self.segments.get(other));
        let places = others.filter(|other| !other.lost && !other.releasing);
        let places = places.flat_map(|other| std::iter::once(&other.current).chain(&other.target));
        places.filter_map(|place| self.domain_of(place)).collect()
    }

    /// Returns the name of the failure domain that a place is in.
    pub(super) fn domain_of(&self, place: &GrantRecord) -> Option<&str> {
        let graph = self.rack.graph();
        let memory = graph::memory_of(graph, &place.memory)?;
        let domain = graph.memories()[memory.index()].domain;
        graph.domains().get(domain.index()).map(String::as_str)
    }

    /// Notes that the client reports everything to be at the target; or, with the current place's
    /// epoch, that no process uses that place any more, which releases the segment. A repeated
    /// report, or one with another epoch, changes nothing.
    pub(super) fn note_evacuated(&mut self, id: SegmentId, epoch: u64, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get(&id) else { return };
        // Only if the client was told to leave: a repeated report of a finished move has this
        // epoch, too.
        let is_told = self.runtime.get(&id).is_some_and(|runtime| runtime.leave);
        if is_told && segment.current.epoch == epoch && segment.target.is_none() {
            if !segment.releasing && !segment.lost {
                to.event("segment-left", id, "its client has taken the data elsewhere");
                self.release(id, to);
            }
            return;
        }
        let is_target = segment.target.as_ref().is_some_and(|target| target.epoch == epoch);
        if !is_target || segment.evacuated || !self.target_ready(segment) {
            return;
        }
        let Some(segment) = self.segments.get_mut(&id) else { return };
        segment.evacuated = true;
        segment.revision += 1;
        to.ops.push(segment.put());
        let (old, client) = (segment.current.node.clone(), segment.spec.client);
        let version = self.touch_node(&old);
        if let Some(runtime) = self.runtime.get_mut(&id) {
            runtime.dropped_version = version;
            runtime.deadline_ms = None;
        }
        self.touch_client(client);
        to.event("segment-evacuated", id, format!("{old} may let go of it"));
        self.settle(id, to);
    }

    /// Ends a move: the old place is free.
    pub(super) fn finish_move(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get_mut(&id) else { return };
        let Some(target) = segment.target.take() else { return };
        assert!(segment.evacuated, "a place is free only when the data has left it");
        let finished = self.rack.finish_move(RequestId(id.0.as_u128()));
        assert!(finished.is_ok(), "a target stands in the rack");
        let old = std::mem::replace(&mut segment.current, target);
        segment.evacuated = false;
        segment.revision += 1;
        to.ops.push(segment.put());
        let (node, client) = (segment.current.node.clone(), segment.spec.client);
        self.unindex(id, &old.node);
        if let Some(runtime) = self.runtime.get_mut(&id) {
            runtime.dropped_version = runtime.target_dropped_version;
        }
        self.touch_client(client);
        to.event("segment-moved", id, format!("from {} to {node}", old.node));
    }

    /// Makes a segment leave its node. If no place is found yet, one is sought again later.
    pub(super) fn evacuate(
        &mut self,
        id: SegmentId,
        deadline_ms: Option<u64>,
        to: &mut Changes<'_>,
    ) -> Outcome {
        let Some(segment) = self.segments.get(&id) else { return Outcome::Done };
        if segment.releasing || segment.lost || segment.evacuated {
            return Outcome::Done;
        }
        let (has_target, client) = (segment.target.is_some(), segment.spec.client);
        let (policy, avoid) = (segment.spec.policy, segment.spec.avoid.clone());
        let Some(runtime) = self.runtime.get_mut(&id) else { return Outcome::Done };
        let is_told = runtime.leave;
        if runtime.deadline_ms.is_none() && deadline_ms.is_some() {
            runtime.deadline_ms = deadline_ms;
            self.touch_client(client);
            to.event("segment-reclaimed", id, "its donor needs the memory back");
        }
        if is_told {
            return Outcome::Done;
        }
        // Without a client nothing would move the data.
        let movable = !has_target && client.is_some();
        let ways = self.ways_out(id, &avoid, false);
        if has_target || (movable && self.begin_move(id, policy, &ways, to).is_ok()) {
            return Outcome::Done;
        }
        let now_ms = to.now_ms;
        let Some(runtime) = self.runtime.get_mut(&id) else { return Outcome::Done };
        runtime.retry_ms = Some(now_ms + RETRY_MS);
        let left_ms = runtime.deadline_ms.map(|deadline| deadline.saturating_sub(now_ms));
        if movable && left_ms.is_some_and(|left| left + LEAVE_AFTER_MS <= RECLAIM_DEADLINE_MS) {
            runtime.leave = true;
            self.touch_client(client);
            to.event("segment-to-be-left", id, "no other node has room for it");
        }
        self.announce(id, to);
        Outcome::Done
    }

    /// Lets a segment stay. A move that has begun continues, without a deadline.
    pub(super) fn stay(&mut self, id: SegmentId, to: &mut Changes<'_>) -> Outcome {
        let client = self.segments.get(&id).and_then(|segment| segment.spec.client);
        if let Some(runtime) = self.runtime.get_mut(&id) {
            runtime.deadline_ms = None;
            runtime.retry_ms = None;
            runtime.leave = false;
            runtime.yielding = false;
            self.touch_client(client);
            self.announce(id, to);
        }
        Outcome::Done
    }

    /// Gives a donor its memory back: the segment is lost.
    pub(super) fn give_up(&mut self, id: SegmentId, to: &mut Changes<'_>) -> Outcome {
        self.lose(id, "it was not moved away before its donor's deadline", to);
        Outcome::Done
    }

    fn lose(&mut self, id: SegmentId, why: &str, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get_mut(&id) else { return };
        if segment.lost || segment.releasing {
            return;
        }
        self.drop_grants(id);
        let Some(segment) = self.segments.get_mut(&id) else { return };
        segment.lost = true;
        segment.revision += 1;
        to.ops.push(segment.put());
        let client = segment.spec.client;
        to.event("segment-memory-lost", id, why);
        self.touch_client(client);
        self.announce(id, to);
    }

    /// Notes that a node has a new blade: what was on the old one is gone.
    pub(super) fn lose_blade(&mut self, name: &str, to: &mut Changes<'_>) {
        to.event("blade-lost", name, "its blade has started anew and is empty");
        let all: Vec<SegmentId> = self.on_node.get(name).into_iter().flatten().copied().collect();
        for id in all {
            let Some(segment) = self.segments.get(&id) else { continue };
            let data_here = match segment.evacuated {
                true => segment.target.as_ref().is_some_and(|target| target.node == name),
                false => segment.current.node == name,
            };
            if data_here {
                self.lose(id, "its node's blade has started anew", to);
            } else if !segment.evacuated && !segment.releasing && !segment.lost {
                self.abort_move(id, to);
            }
        }
        self.touch_node(name);
    }

    /// Aborts a move whose target is gone before all data was certain to be there.
    fn abort_move(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get_mut(&id) else { return };
        let Some(target) = segment.target.take() else { return };
        let aborted = self.rack.abort_move(RequestId(id.0.as_u128()));
        assert!(aborted.is_ok(), "a target stands in the rack");
        segment.revision += 1;
        to.ops.push(segment.put());
        let client = segment.spec.client;
        self.unindex(id, &target.node);
        self.touch_client(client);
        to.event("segment-move-aborted", id, format!("{} has lost its memory", target.node));
        self.announce(id, to);
    }

    /// Returns the circuits on the path to a place: switch, lower port, higher port.
    pub(super) fn circuits_of<'a>(
        &'a self,
        place: &'a GrantRecord,
    ) -> impl Iterator<Item = (String, u32, u32)> + 'a {
        let inner = place.path.get(1..place.path.len().saturating_sub(1)).unwrap_or(&[]);
        inner.chunks_exact(2).filter_map(|crossing| {
            let (switch, from) = crossing[0].rsplit_once(':')?;
            let (_, to) = crossing[1].rsplit_once(':')?;
            let graph = self.rack.graph();
            let Some(Vertex::Switch(id)) = graph.vertex(switch) else { return None };
            if graph.switches()[id.index()].kind == SwitchKind::Packet {
                return None;
            }
            let (low, high) = Circuit::new(from.parse().ok()?, to.parse().ok()?)?.ports();
            Some((switch.to_owned(), low, high))
        })
    }

    /// Returns why a switch is not in its desired state. None if it is.
    pub(crate) fn trouble_of(&self, switch: &str) -> Option<&String> {
        self.troubles.get(switch)
    }

    /// Notes why a switch cannot be set, or that it is set.
    pub(super) fn note_trouble(
        &mut self,
        switch: &str,
        trouble: Option<String>,
        to: &mut Changes<'_>,
    ) {
        if self.troubles.get(switch) == trouble.as_ref() {
            return;
        }
        match trouble {
            Some(trouble) => {
                to.event("switch-troubled", switch, &trouble);
                self.troubles.insert(switch.to_owned(), trouble);
            }
            None => {
                to.event("switch-set", switch, "as it shall be");
                self.troubles.remove(switch);
            }
        }
    }

    /// Notes which circuits a switch reports as up.
    pub(super) fn note_circuits(
        &mut self,
        switch: &str,
        circuits: &[Circuit],
        to: &mut Changes<'_>,
    ) -> Outcome {
        let now = circuits.iter().map(|circuit| (switch.to_owned(), circuit.ports()));
        let mut standing = self.standing.clone();
        standing.retain(|(other, _, _)| other != switch);
        standing.extend(now.map(|(switch, (low, high))| (switch, low, high)));
        if std::mem::replace(&mut self.standing, standing.clone()) == standing {
            return Outcome::Done;
        }
        to.event("circuits-changed", switch, format!("{} stand", circuits.len()));
        let all: Vec<SegmentId> = self.segments.keys().copied().collect();
        for id in all {
            self.announce(id, to);
        }
        Outcome::Done
    }
}
