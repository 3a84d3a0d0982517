//! Segments: creation, release, and the consequences of their nodes' reports.

use farpool_api::{Problem, ProblemKind, SegmentId, SegmentSpec, SegmentState};
use farpool_placement::{Grant, RackError, RequestId, Vertex};

use super::record::{GrantRecord, Record, SegmentRecord};
use super::tenants::superpages_for;
use super::{Age, Changes, Condition, Outcome, Runtime, SEGMENTS_LIMIT, State, graph, refuse};

/// Most failure domains that a segment may avoid; more are refused.
const AVOID_LIMIT: usize = 64;

/// Converts a refusal of the rack into a problem.
pub(super) fn rack_problem(error: &RackError) -> Problem {
    let kind = match error {
        RackError::NoCapacity { .. }
        | RackError::LargerThanPool { .. }
        | RackError::LargerThanAnyBrick { .. }
        | RackError::NoPort(_)
        | RackError::NoCircuit
        | RackError::NoBandwidth
        | RackError::NoAddress => ProblemKind::NoRoom,
        RackError::IdInUse(_) | RackError::Moving(_) | RackError::NotMoving(_) => {
            ProblemKind::Conflict
        }
        _ => ProblemKind::Invalid,
    };
    let limit = match error {
        RackError::LargerThanPool { pool_bytes, .. } => Some(*pool_bytes),
        RackError::LargerThanAnyBrick { brick_bytes, .. } => Some(*brick_bytes),
        _ => None,
    };
    Problem { limit, ..Problem::new(kind, error.to_string()) }
}

impl State {
    pub(super) fn check_avoid(&self, avoid: &[String]) -> Result<(), Problem> {
        if avoid.len() > AVOID_LIMIT {
            let detail = format!("{AVOID_LIMIT} failure domains to avoid at most");
            return refuse(ProblemKind::Invalid, detail);
        }
        match avoid.iter().find(|name| self.rack.graph().domain(name).is_none()) {
            Some(name) => {
                refuse(ProblemKind::NotFound, format!("there is no failure domain named {name:?}"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn host_of(&self, spec: &SegmentSpec) -> Result<String, Problem> {
        match (spec.client, &spec.host) {
            (Some(id), None) => match self.clients.get(&id) {
                Some(client) => Ok(client.record.spec.host.clone()),
                None => refuse(ProblemKind::NotFound, format!("there is no client {id}")),
            },
            (None, Some(host)) => Ok(host.clone()),
            _ => refuse(ProblemKind::Invalid, "a segment has either a client or a host"),
        }
    }

    pub(super) fn put_segment(
        &mut self,
        id: SegmentId,
        spec: SegmentSpec,
        condition: &Condition,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        self.check_condition(id, condition)?;
        if let Some(known) = self.segments.get(&id) {
            let same = SegmentSpec { bytes: spec.bytes, ..known.spec.clone() } == spec;
            return match (same, known.releasing) {
                (true, false) if known.spec.bytes == spec.bytes => Ok(Outcome::Done),
                (true, false) => self.resize(id, spec.bytes, to),
                (_, releasing) => {
                    let what = if releasing { "being released" } else { "another segment" };
                    refuse(ProblemKind::Conflict, format!("{id} is {what}; choose a new id"))
                }
            };
        }
        if self.segments.len() >= SEGMENTS_LIMIT {
            let detail = format!("there are {SEGMENTS_LIMIT} segments already");
            return refuse(ProblemKind::NoRoom, detail);
        }
        let host = self.host_of(&spec)?;
        let compute = self.compute_named(&host)?;
        self.check_avoid(&spec.avoid)?;
        let superpages = superpages_for(spec.bytes);
        self.check_allowed(&spec, superpages)?;
        self.check_claims(spec.client, superpages, to.now_ms)?;
        let request = graph::request(self.rack.graph(), id, &spec, compute);
        let grant = self.rack.allocate(&request);
        let grant = grant.map_err(|error| self.refusal(&error, &spec))?;
        self.end_claim(spec.client);
        let current = self.new_grant(&grant, to);
        self.raise_ceilings(to);
        let node = current.node.clone();
        let record = SegmentRecord {
            id,
            spec,
            host,
            current,
            target: None,
            evacuated: false,
            releasing: false,
            lost: false,
            revision: 1,
        };
        to.put(&record);
        to.event("segment-created", id, format!("{} bytes on {node}", record.current.bytes()));
        self.index(&record);
        let client = record.spec.client;
        let before = self.segments.insert(id, record);
        assert!(before.is_none(), "a segment is granted once");
        let version = self.touch_node(&node);
        self.runtime.insert(id, Runtime::new(version));
        self.touch_client(client);
        self.settle(id, to);
        Ok(Outcome::Created)
    }

    /// Returns the record of a grant that the rack has just made, with a key of its own.
    pub(super) fn new_grant(&self, grant: &Grant, to: &mut Changes<'_>) -> GrantRecord {
        let graph = self.rack.graph();
        let brick = graph.name(Vertex::Memory(grant.memory));
        let node = self.node_of_brick.get(brick).expect("bricks that are no node are closed");
        graph::to_record(graph, grant, node, to.key())
    }

    pub(super) fn segment_with(&self, id: SegmentId) -> Result<&SegmentRecord, Problem> {
        let unknown = || Problem::new(ProblemKind::NotFound, format!("there is no segment {id}"));
        self.segments.get(&id).ok_or_else(unknown)
    }

    /// Refuses if there is no such segment, or it is not as the request demands.
    pub(super) fn check_revision(
        &self,
        id: SegmentId,
        condition: &Condition,
    ) -> Result<(), Problem> {
        self.segment_with(id)?;
        self.check_condition(id, condition)
    }

    /// Refuses if the segment, there or not, is not as the request demands.
    fn check_condition(&self, id: SegmentId, condition: &Condition) -> Result<(), Problem> {
        let now = self.segments.get(&id).map(|segment| segment.revision);
        if condition.admits(now) {
            return Ok(());
        }
        let detail = match now {
            Some(now) => format!("segment {id} is at revision {now}"),
            None => format!("there is no segment {id}"),
        };
        let etag = now.map(|now| format!("\"{now}\"").into());
        Err(Problem { etag, ..Problem::new(ProblemKind::PreconditionFailed, detail) })
    }

    pub(super) fn delete_segment(
        &mut self,
        id: SegmentId,
        condition: &Condition,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        self.check_revision(id, condition)?;
        self.release(id, to);
        Ok(Outcome::Done)
    }

    /// Takes a segment from its owner. Its memory is free when its nodes have let go of it.
    pub(super) fn release(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get_mut(&id).filter(|segment| !segment.releasing) else {
            return;
        };
        segment.releasing = true;
        segment.revision += 1;
        to.ops.push(segment.put());
        let (was_lost, client) = (segment.lost, segment.spec.client);
        if !was_lost {
            self.drop_grants(id);
        }
        self.touch_client(client);
        self.settle(id, to);
    }

    /// Notes that no grant of the segment is in its nodes' intent from now on.
    pub(super) fn drop_grants(&mut self, id: SegmentId) {
        let Some(segment) = self.segments.get(&id) else { return };
        let node = segment.current.node.clone();
        let target = segment.target.as_ref().map(|target| target.node.clone());
        // The current grant of an evacuated segment has been dropped before.
        let version = (!segment.evacuated).then(|| self.touch_node(&node));
        let target_version = target.map(|node| self.touch_node(&node));
        let Some(runtime) = self.runtime.get_mut(&id) else { return };
        runtime.dropped_version = version.unwrap_or(runtime.dropped_version);
        runtime.target_dropped_version = target_version.unwrap_or(runtime.target_dropped_version);
        runtime.deadline_ms = None;
        runtime.retry_ms = None;
    }

    /// Whether a grant that is in no intent any more is gone, from its node or with the node.
    pub(super) fn is_gone(&self, id: SegmentId, place: &GrantRecord, since_version: u64) -> bool {
        let Some(node) = self.nodes.get(&place.node) else { return true };
        node.age == Age::Lost || node.let_go(id, place.epoch, since_version)
    }

    /// Completes what only waited for nodes to let go, and announces changes.
    pub(super) fn settle(&mut self, id: SegmentId, to: &mut Changes<'_>) -> Outcome {
        let Some(segment) = self.segments.get(&id) else { return Outcome::Done };
        let Some(runtime) = self.runtime.get(&id) else { return Outcome::Done };
        let current_gone = self.is_gone(id, &segment.current, runtime.dropped_version);
        if segment.releasing {
            let target_gone = segment
                .target
                .as_ref()
                .is_none_or(|place| self.is_gone(id, place, runtime.target_dropped_version));
            if current_gone && target_gone {
                self.forget(id, to);
                return Outcome::Done;
            }
        } else if segment.evacuated && !segment.lost && current_gone {
            self.finish_move(id, to);
        }
        self.settle_size(id, to);
        self.announce(id, to);
        Outcome::Done
    }

    /// Ends a segment: its memory is free.
    fn forget(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.remove(&id) else { return };
        assert!(segment.releasing, "only what was released is free");
        let released = self.rack.release(RequestId(id.0.as_u128()));
        assert!(released.is_ok(), "every segment stands in the rack");
        self.runtime.remove(&id);
        self.unindex(id, &segment.current.node);
        if let Some(target) = &segment.target {
            self.unindex(id, &target.node);
        }
        if let Some(client) = segment.spec.client.and_then(|id| self.clients.get_mut(&id)) {
            client.segments.remove(&id);
        }
        self.touch_client(segment.spec.client);
        to.ops.push(segment.delete());
        to.event("segment-released", id, format!("{} is free of it", segment.current.node));
    }

    /// Announces a changed state of a segment to its client, and as an event.
    pub(super) fn announce(&mut self, id: SegmentId, to: &mut Changes<'_>) {
        let Some(segment) = self.segments.get(&id) else { return };
        let (state, target_ready) = (self.state_of(segment), self.target_ready(segment));
        let client = segment.spec.client;
        let Some(runtime) = self.runtime.get_mut(&id) else { return };
        let before = (runtime.state, runtime.target_ready);
        if before == (state, target_ready) {
            return;
        }
        (runtime.state, runtime.target_ready) = (state, target_ready);
        if before.0 != state {
            let kind = match state {
                SegmentState::Pending => "segment-pending",
                SegmentState::Ready => "segment-ready",
                SegmentState::Moving => "segment-moving",
                SegmentState::Releasing => "segment-releasing",
                SegmentState::Lost => "segment-lost",
            };
            to.event(kind, id, "");
        }
        self.touch_client(client);
    }

    /// Returns a segment's state, from its record and from what its nodes and the switches report.
    pub(super) fn state_of(&self, segment: &SegmentRecord) -> SegmentState {
        let sought = self.runtime.get(&segment.id).is_some_and(|run| run.retry_ms.is_some());
        let usable = |place: &GrantRecord| self.is_usable(segment.id, place);
        match segment {
            SegmentRecord { releasing: true, .. } => SegmentState::Releasing,
            SegmentRecord { lost: true, .. } => SegmentState::Lost,
            SegmentRecord { evacuated: true, .. } => SegmentState::Ready,
            SegmentRecord { target: Some(_), .. } => SegmentState::Moving,
            _ if sought => SegmentState::Moving,
            _ if usable(&segment.current) => SegmentState::Ready,
            _ => SegmentState::Pending,
        }
    }

    /// Whether the new place of a moving segment can be used.
    pub(super) fn target_ready(&self, segment: &SegmentRecord) -> bool {
        let is_usable = |place: &GrantRecord| self.is_usable(segment.id, place);
        !segment.lost && !segment.releasing && segment.target.as_ref().is_some_and(is_usable)
    }

    /// Whether the node of a place has reported the grant.
    pub(super) fn is_confirmed(&self, id: SegmentId, place: &GrantRecord) -> bool {
        self.nodes.get(&place.node).is_some_and(|node| node.has(id, place.epoch))
    }

    /// Whether the node of a place has reported the grant and all circuits on the path are up.
    fn is_usable(&self, id: SegmentId, place: &GrantRecord) -> bool {
        self.is_confirmed(id, place)
            && self.circuits_of(place).all(|circuit| self.standing.contains(&circuit))
    }
}
