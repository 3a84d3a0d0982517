//! Makes the state from a store, and a new rack for changed nodes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farpool_api::SegmentState;
use farpool_placement::{Allocator, Graph, Vertex};

use super::graph::{self, AdoptError};
use super::record::{MetaRecord, NodeRecord, Record, Records, SegmentRecord, StoreOp};
use super::{Age, Client, LIFE_SHIFT, Node, Runtime, State};

impl State {
    /// Returns the state from a store at the beginning of a new life of the controller, and what
    /// must be stored before it answers any request. All nodes and clients have a fresh lease at
    /// `now_ms`.
    ///
    /// # Errors
    /// The stored state does not fit the topology.
    pub fn load(
        topology: Option<Graph>,
        records: Records,
        now_ms: u64,
    ) -> Result<(Self, Vec<StoreOp>), AdoptError> {
        let meta = MetaRecord { life: records.meta.life + 1, ..records.meta };
        let segments: BTreeMap<_, _> = records.segments.into_iter().map(|s| (s.id, s)).collect();
        let graph = match &topology {
            Some(graph) => graph.clone(),
            None => graph::of_nodes(records.nodes.iter())?,
        };
        let rack = graph::rack_with(graph, &segments, (meta.number_ceiling, meta.epoch_ceiling))?;
        let first = meta.life << LIFE_SHIFT;
        let mut state = Self {
            topology,
            rack,
            meta,
            nodes: BTreeMap::new(),
            clients: BTreeMap::new(),
            segments,
            runtime: BTreeMap::new(),
            on_node: BTreeMap::new(),
            node_of_brick: BTreeMap::new(),
            tasks: VecDeque::new(),
            tenants: records.tenants.into_iter().map(|it| (it.name.clone(), it)).collect(),
            claims: BTreeMap::new(),
            standing: BTreeSet::new(),
            troubles: BTreeMap::new(),
            last_version: first + 1,
            last_event: first,
        };
        for record in records.nodes {
            state.insert_node(record, now_ms);
        }
        for record in records.clients {
            let segments = BTreeSet::new();
            let version = first + 1;
            let client = Client { record, heard_ms: now_ms, sequence: None, version, segments };
            state.clients.insert(client.record.id, client);
        }
        let all: Vec<SegmentRecord> = state.segments.values().cloned().collect();
        for segment in &all {
            state.index(segment);
            let mut runtime = Runtime::new(first + 1);
            runtime.state = match (segment.releasing, segment.lost) {
                (true, _) => SegmentState::Releasing,
                (false, true) => SegmentState::Lost,
                (false, false) => SegmentState::Pending,
            };
            state.runtime.insert(segment.id, runtime);
        }
        state.apply_to_rack();
        Ok((state, vec![meta.put()]))
    }

    /// Adds a new node. The rack has its bricks already.
    pub(super) fn insert_node(&mut self, record: NodeRecord, now_ms: u64) {
        let memory = self.brick_of(&record);
        if let Some(memory) = &memory {
            self.node_of_brick.insert(memory.clone(), record.name.clone());
        }
        self.on_node.entry(record.name.clone()).or_default();
        let version = self.last_version;
        let node = Node {
            memory,
            seen: None,
            heard_ms: now_ms,
            age: Age::Fresh,
            has_ended: false,
            version,
            record,
        };
        let before = self.nodes.insert(node.record.name.clone(), node);
        assert!(before.is_none(), "a node is new once");
    }

    /// Returns the memory brick of a node, if it lends any memory.
    pub(super) fn brick_of(&self, record: &NodeRecord) -> Option<String> {
        if graph::whole(record.spec.donate_bytes) == 0 {
            return None;
        }
        match &self.topology {
            None => Some(graph::memory_name(&record.name)),
            Some(graph) => {
                let name = record.spec.memory_brick.as_ref().unwrap_or(&record.name);
                matches!(graph.vertex(name), Some(Vertex::Memory(_))).then(|| name.clone())
            }
        }
    }

    /// Returns a rack of these nodes with all present segments.
    pub(super) fn rebuilt(
        &self,
        nodes: &BTreeMap<&str, &NodeRecord>,
    ) -> Result<Allocator, AdoptError> {
        let graph = graph::of_nodes(nodes.values().copied())?;
        let (number, epoch) = self.rack.highest_ids();
        graph::rack_with(graph, &self.segments, (number.0, epoch.0))
    }

    /// Passes what nodes have reported to a new rack. Bricks without a node lend nothing.
    pub(super) fn apply_to_rack(&mut self) {
        let bricks: Vec<String> =
            self.rack.graph().memories().iter().map(|brick| brick.name.clone()).collect();
        for brick in bricks {
            self.apply_brick(&brick);
        }
    }

    /// Passes to the rack how much may be placed on a brick, and its load.
    pub(super) fn apply_brick(&mut self, brick: &str) {
        let Some(id) = graph::memory_of(self.rack.graph(), brick) else { return };
        let node = self.node_of_brick.get(brick).and_then(|name| self.nodes.get(name));
        let (closed, lendable_bytes, load) = match node {
            None => (true, 0, 0),
            Some(node) => {
                let seen = node.seen.as_ref();
                let lendable = seen.map_or(u64::MAX, |seen| seen.lendable_bytes);
                (
                    node.record.draining || node.age != Age::Fresh,
                    lendable.min(node.record.spec.donate_bytes),
                    seen.map_or(0, |seen| seen.load_permille),
                )
            }
        };
        let told = self.rack.set_draining(id, closed);
        let told = told.and_then(|()| self.rack.set_lendable(id, lendable_bytes));
        let told = told.and_then(|()| self.rack.observe_load(id, load));
        assert_eq!(told, Ok(()), "the brick was found in the graph");
    }

    /// Notes on which nodes a segment's grants are, and which client has it.
    pub(super) fn index(&mut self, segment: &SegmentRecord) {
        let places = [Some(&segment.current), segment.target.as_ref()];
        for place in places.into_iter().flatten() {
            self.on_node.entry(place.node.clone()).or_default().insert(segment.id);
        }
        if let Some(client) = segment.spec.client.and_then(|id| self.clients.get_mut(&id)) {
            client.segments.insert(segment.id);
        }
    }

    /// Notes that a segment has no grant on a node any more.
    pub(super) fn unindex(&mut self, id: farpool_api::SegmentId, node: &str) {
        if let Some(all) = self.on_node.get_mut(node) {
            all.remove(&id);
        }
    }
}

impl Runtime {
    pub(super) fn new(version: u64) -> Self {
        Self {
            state: SegmentState::Pending,
            target_ready: false,
            used_bytes: None,
            deadline_ms: None,
            leave: false,
            retry_ms: None,
            yielding: false,
            resized_version: version,
            dropped_version: version,
            target_dropped_version: version,
        }
    }
}
