//! The state as the interface shows it.

use farpool_api::{
    Circuit, CircuitList, ClientAnswer, ClientId, ClientSegment, ClientView, Key, NodeAnswer,
    NodeGrant, NodeList, NodeState, Place, Problem, ProblemKind, Segment, SegmentId, SegmentList,
    SegmentState, Target, Task, TaskId, TaskList, Topology, TopologyBrick, TopologyLink,
    TopologySwitch,
};
use farpool_placement::{SwitchKind, TrayId};
use farpool_units::at_most;

use super::record::{GrantRecord, SegmentRecord};
use super::{Age, Client, Node, State, graph, refuse};

/// Most segments of a page; a higher limit is reduced to this.
pub(super) const PAGE_LIMIT: u32 = 1_000;
/// Segments of a page if no limit is given.
const PAGE_USUAL: u32 = 100;

impl State {
    /// Returns all grants that a node should have.
    ///
    /// # Errors
    /// There is no such node, or another daemon has registered as it: that one's grants are not
    /// this one's, which must neither set them nor drop its own.
    pub fn node_answer(
        &self,
        name: &str,
        incarnation: u64,
        blade_id: u64,
    ) -> Result<NodeAnswer, Problem> {
        let node = self.node_named(name)?;
        node.check_daemon(incarnation, blade_id)?;
        let grants = self.on_node.get(name).into_iter().flatten();
        let grants = grants.filter_map(|id| self.segments.get(id));
        let grants = grants.filter_map(|segment| intended(segment, name)).collect();
        Ok(NodeAnswer { version: node.version, draining: node.record.draining, grants })
    }

    /// The version of a node's intent.
    #[must_use]
    pub fn node_version(&self, name: &str) -> Option<u64> {
        self.nodes.get(name).map(|node| node.version)
    }

    /// The version of the answer to a client.
    #[must_use]
    pub fn client_version(&self, id: ClientId) -> Option<u64> {
        self.clients.get(&id).map(|client| client.version)
    }

    /// The whole answer to a client.
    ///
    /// # Errors
    /// There is no such client.
    pub fn client_answer(&self, id: ClientId, now_ms: u64) -> Result<ClientAnswer, Problem> {
        let client = self.client_with(id)?;
        let segments = client.segments.iter().filter_map(|id| self.segments.get(id));
        let segments = segments.map(|segment| self.client_segment(segment, now_ms)).collect();
        Ok(ClientAnswer { version: client.version, segments })
    }

    fn client_with(&self, id: ClientId) -> Result<&Client, Problem> {
        let unknown = || Problem::new(ProblemKind::NotFound, format!("there is no client {id}"));
        self.clients.get(&id).ok_or_else(unknown)
    }

    fn client_segment(&self, segment: &SegmentRecord, now_ms: u64) -> ClientSegment {
        let place = effective(segment);
        let target = segment.target.as_ref().filter(|_| !segment.evacuated);
        let target = target.filter(|_| self.target_ready(segment));
        ClientSegment {
            id: segment.id,
            epoch: place.epoch,
            state: self.state_of(segment),
            place: self.place(segment, place, Some(place.key)),
            target: target.map(|target| Target {
                epoch: target.epoch,
                place: self.place(segment, target, Some(target.key)),
            }),
            waits_for: match self.state_of(segment) {
                SegmentState::Pending => self.waits_for(segment),
                _ => Vec::new(),
            },
            leave: segment.target.is_none()
                && self.runtime.get(&segment.id).is_some_and(|runtime| runtime.leave),
            deadline_ms: self.deadline_ms(segment.id, now_ms),
        }
    }

    fn deadline_ms(&self, id: SegmentId, now_ms: u64) -> Option<u64> {
        let deadline = self.runtime.get(&id).and_then(|runtime| runtime.deadline_ms)?;
        Some(deadline.saturating_sub(now_ms))
    }

    fn place(&self, segment: &SegmentRecord, place: &GrantRecord, key: Option<Key>) -> Place {
        let addresses = self.nodes.get(&place.node).map(|node| node.record.spec.addresses.clone());
        // Without a topology each node is one, under its own name.
        let domain = self.domain_of(place).filter(|_| self.topology.is_some());
        Place {
            node: place.node.clone(),
            domain: domain.map(str::to_owned),
            addresses: addresses.unwrap_or_default(),
            key,
            bytes: segment.usable_bytes(place),
            read_bytes_per_s: segment.spec.read_bytes_per_s,
            write_bytes_per_s: segment.spec.write_bytes_per_s,
        }
    }

    /// One client.
    ///
    /// # Errors
    /// There is no such client.
    pub fn client(&self, id: ClientId) -> Result<ClientView, Problem> {
        let client = self.client_with(id)?;
        let spec = &client.record.spec;
        Ok(ClientView {
            id,
            host: spec.host.clone(),
            name: spec.name.clone(),
            pid: spec.pid,
            lease_ms: spec.lease_ms,
            tenant: spec.tenant.clone(),
            segments: client.segments.iter().copied().collect(),
        })
    }

    /// One segment.
    ///
    /// # Errors
    /// There is no such segment.
    pub fn segment(&self, id: SegmentId, now_ms: u64) -> Result<Segment, Problem> {
        Ok(self.segment_view(self.segment_with(id)?, now_ms))
    }

    fn segment_view(&self, segment: &SegmentRecord, now_ms: u64) -> Segment {
        let place = effective(segment);
        let target = segment.target.as_ref().filter(|_| !segment.evacuated);
        Segment {
            id: segment.id,
            client: segment.spec.client,
            host: segment.host.clone(),
            state: self.state_of(segment),
            epoch: place.epoch,
            revision: segment.revision,
            spec: Some(segment.spec.clone()),
            place: self.place(segment, place, None),
            target: target.map(|target| Target {
                epoch: target.epoch,
                place: self.place(segment, target, None),
            }),
            waits_for: self.waits_for(segment),
            used_bytes: self.runtime.get(&segment.id).and_then(|runtime| runtime.used_bytes),
            deadline_ms: self.deadline_ms(segment.id, now_ms),
        }
    }

    /// Returns the reasons why a segment, or the place it is to be moved to, is not usable. Empty
    /// if it is.
    fn waits_for(&self, segment: &SegmentRecord) -> Vec<String> {
        let place = match (self.state_of(segment), &segment.target) {
            (SegmentState::Pending, _) => &segment.current,
            (SegmentState::Moving, Some(target)) => target,
            _ => return Vec::new(),
        };
        let node = Some(&place.node).filter(|_| !self.is_confirmed(segment.id, place));
        let node = node.map(|node| format!("node {node} has not confirmed it"));
        let down = self.circuits_of(place).filter(|circuit| !self.standing.contains(circuit));
        let circuits = down.map(|(switch, low, high)| {
            let why = self.troubles.get(&switch).map(|why| format!(": {why}")).unwrap_or_default();
            format!("the circuit {low}-{high} of switch {switch} does not stand{why}")
        });
        node.into_iter().chain(circuits).collect()
    }

    /// A page of segments after the one with id `after`.
    #[must_use]
    pub fn segment_page(
        &self,
        after: Option<SegmentId>,
        limit: Option<u32>,
        now_ms: u64,
    ) -> SegmentList {
        use std::ops::Bound::{Excluded, Unbounded};
        let limit = limit.unwrap_or(PAGE_USUAL).clamp(1, PAGE_LIMIT) as usize;
        let from = after.map_or(Unbounded, Excluded);
        let mut rest = self.segments.range((from, Unbounded));
        let page: Vec<_> =
            rest.by_ref().take(limit).map(|(_, all)| self.segment_view(all, now_ms)).collect();
        let more = rest.next().is_some();
        let next_page_token = page.last().filter(|_| more).map(|last| last.id.to_string());
        SegmentList { segments: page, next_page_token }
    }

    /// One node.
    ///
    /// # Errors
    /// There is no such node.
    pub fn node(&self, name: &str, now_ms: u64) -> Result<farpool_api::Node, Problem> {
        Ok(self.node_view(self.node_named(name)?, now_ms))
    }

    /// All nodes.
    #[must_use]
    pub fn node_list(&self, now_ms: u64) -> NodeList {
        NodeList { nodes: self.nodes.values().map(|node| self.node_view(node, now_ms)).collect() }
    }

    fn node_view(&self, node: &Node, now_ms: u64) -> farpool_api::Node {
        let record = &node.record;
        let state = match (node.age_at(now_ms), record.draining) {
            (Age::Lost, _) => NodeState::Lost,
            (Age::Late, _) => NodeState::Late,
            (Age::Fresh, true) => NodeState::Draining,
            (Age::Fresh, false) => NodeState::Up,
        };
        let segments = self.on_node.get(&record.name).map_or(0, |all| all.len() as u64);
        let seen = node.seen.as_ref();
        farpool_api::Node {
            name: record.name.clone(),
            state,
            draining: record.draining,
            addresses: record.spec.addresses.clone(),
            donate_bytes: graph::whole(record.spec.donate_bytes),
            granted_bytes: self.granted_bytes(&record.name),
            segments,
            incarnation: record.spec.incarnation,
            blade_id: record.spec.blade_id,
            capacity_bytes: seen.map(|seen| seen.capacity_bytes),
            lendable_bytes: seen.map(|seen| seen.lendable_bytes),
            used_bytes: seen.map(|seen| seen.used_bytes),
            load_permille: seen.map(|seen| seen.load_permille),
            read_bytes_total: seen.map(|seen| seen.read_bytes_total),
            write_bytes_total: seen.map(|seen| seen.write_bytes_total),
            report_age_ms: seen.map(|_| now_ms.saturating_sub(node.heard_ms)),
        }
    }

    /// Returns the bytes of all grants that a node should have.
    pub(crate) fn granted_bytes(&self, name: &str) -> u64 {
        let all = self.on_node.get(name).into_iter().flatten();
        let all = all.filter_map(|id| self.segments.get(id));
        all.filter_map(|segment| intended(segment, name)).map(|grant| grant.bytes).sum()
    }

    /// All tasks.
    #[must_use]
    pub fn task_list(&self) -> TaskList {
        TaskList { tasks: self.tasks.iter().cloned().collect() }
    }

    /// One task.
    ///
    /// # Errors
    /// There is no such task.
    pub fn task(&self, id: TaskId) -> Result<Task, Problem> {
        match self.tasks.iter().find(|task| task.id == id) {
            Some(task) => Ok(task.clone()),
            None => refuse(ProblemKind::NotFound, format!("there is no task {id}")),
        }
    }

    /// All circuits that should be up.
    #[must_use]
    pub fn circuit_list(&self) -> CircuitList {
        let graph = self.rack.graph();
        let circuits = self.rack.circuits().map(|(setting, segments)| {
            let switch = graph.switches()[setting.switch.index()].name.clone();
            let from_port = graph.ports()[setting.from.index()].number;
            let to_port = graph.ports()[setting.to.index()].number;
            let key = (switch.clone(), from_port.min(to_port), from_port.max(to_port));
            let standing = self.standing.contains(&key);
            Circuit { switch, from_port, to_port, segments, standing }
        });
        CircuitList { circuits: circuits.collect() }
    }

    /// The rack as a drawing.
    #[must_use]
    pub fn topology_drawing(&self) -> String {
        farpool_placement::topology::draw(&self.rack)
    }

    /// The rack's graph as a topology file.
    #[must_use]
    pub fn topology_toml(&self) -> String {
        farpool_placement::topology::write(self.rack.graph())
    }

    /// The rack's graph.
    #[must_use]
    pub fn topology(&self) -> Topology {
        let graph = self.rack.graph();
        let brick =
            |name: &String, tray: TrayId, domain: farpool_placement::DomainId, ports: usize| {
                let tray = &graph.trays()[tray.index()];
                TopologyBrick {
                    name: name.clone(),
                    tray: tray.name.clone(),
                    rack: graph.racks()[tray.rack.index()].name.clone(),
                    domain: graph.domains()[domain.index()].clone(),
                    ports: at_most(ports),
                    capacity_bytes: None,
                    node: None,
                }
            };
        let compute = graph.computes().iter().map(|compute| TopologyBrick {
            node: self.nodes.contains_key(&compute.name).then(|| compute.name.clone()),
            ..brick(&compute.name, compute.tray, compute.domain, compute.ports.len())
        });
        let memory = graph.memories().iter().map(|memory| TopologyBrick {
            capacity_bytes: Some(memory.capacity_bytes),
            node: self.node_of_brick.get(&memory.name).cloned(),
            ..brick(&memory.name, memory.tray, memory.domain, memory.ports.len())
        });
        let switch = |switch: &farpool_placement::Switch| TopologySwitch {
            name: switch.name.clone(),
            kind: if switch.kind == SwitchKind::Circuit { "circuit" } else { "packet" }.to_owned(),
            ports: at_most(switch.ports.len()),
        };
        let link = |link: &farpool_placement::Link| TopologyLink {
            from: graph.port_name(link.a),
            to: graph.port_name(link.b),
            bandwidth_bytes_per_s: link.bandwidth_bytes_per_s,
        };
        Topology {
            compute: compute.collect(),
            memory: memory.collect(),
            switches: graph.switches().iter().map(switch).collect(),
            links: graph.links().iter().map(link).collect(),
        }
    }
}

/// The place where a segment's data is.
pub(super) fn effective(segment: &SegmentRecord) -> &GrantRecord {
    match &segment.target {
        Some(target) if segment.evacuated => target,
        _ => &segment.current,
    }
}

/// Returns the grant of a segment that a node should have, if any.
fn intended(segment: &SegmentRecord, node: &str) -> Option<NodeGrant> {
    if segment.releasing || segment.lost {
        return None;
    }
    let current = Some(&segment.current).filter(|_| !segment.evacuated);
    let mut places = current.into_iter().chain(segment.target.as_ref());
    let place = places.find(|place| place.node == node)?;
    Some(NodeGrant {
        segment: segment.id,
        epoch: place.epoch,
        key: place.key,
        bytes: segment.usable_bytes(place),
        read_bytes_per_s: segment.spec.read_bytes_per_s,
        write_bytes_per_s: segment.spec.write_bytes_per_s,
    })
}
