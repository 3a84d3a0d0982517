//! Nodes: registration, reports, age, draining.

use std::collections::{BTreeMap, BTreeSet};

use farpool_api::{NodeGrantUse, NodeReport, NodeSpec, Problem, ProblemKind, SegmentId};
use farpool_placement::Vertex;
use farpool_units::exactly;

use super::record::{NodeRecord, Record};
use super::{
    Age, Changes, GrantSeen, NODE_LATE_MS, NODE_LOST_MS, NODES_LIMIT, Node, NodeSeen, Outcome,
    State, graph, refuse,
};

/// Longest name of a node, in bytes, so that keys in the store stay small; a longer one is refused.
const NAME_LIMIT_BYTES: usize = 64;
/// Most addresses of a node; more are refused.
const ADDRESSES_LIMIT: usize = 16;
/// Longest address, in bytes; a longer one is refused.
const ADDRESS_LIMIT_BYTES: usize = 256;

impl Node {
    /// Returns how long ago the node was last heard from.
    pub(crate) fn age_at(&self, now_ms: u64) -> Age {
        match now_ms.saturating_sub(self.heard_ms) {
            age if age >= NODE_LOST_MS => Age::Lost,
            age if age >= NODE_LATE_MS || self.has_ended => Age::Late,
            _ => Age::Fresh,
        }
    }

    /// Whether it has reported this grant.
    pub(crate) fn has(&self, segment: SegmentId, epoch: u64) -> bool {
        let seen = self.seen.as_ref().and_then(|seen| seen.grants.get(&segment));
        seen.is_some_and(|grant| grant.epoch == epoch)
    }

    /// Whether it has carried out an intent without this grant, and does not report it any more.
    pub(crate) fn let_go(&self, segment: SegmentId, epoch: u64, since_version: u64) -> bool {
        let heard = |seen: &NodeSeen| seen.known_version >= since_version;
        self.seen.as_ref().is_some_and(heard) && !self.has(segment, epoch)
    }

    /// Refuses another daemon than the one that has registered.
    pub(super) fn check_daemon(&self, incarnation: u64, blade_id: u64) -> Result<(), Problem> {
        let (name, spec) = (&self.record.name, &self.record.spec);
        if incarnation != spec.incarnation {
            let detail = format!("node {name} has registered with another incarnation");
            return refuse(ProblemKind::NameInUse, detail);
        }
        // Only a registration can say that a blade is new: a delayed report must not make a
        // segment's memory count as lost.
        if blade_id != spec.blade_id {
            let detail = format!("node {name} has registered with another blade");
            return refuse(ProblemKind::NameInUse, detail);
        }
        Ok(())
    }

    /// Refuses a second daemon while the first one reports: taking the name would take from the
    /// first what it has lent. One that goes on with the first one's blade shows that the first has
    /// ended, as its memory is locked.
    fn check_successor(&self, new: &NodeSpec, now_ms: u64) -> Result<(), Problem> {
        let (name, spec) = (&self.record.name, &self.record.spec);
        let is_same = new.incarnation == spec.incarnation || new.blade_id == spec.blade_id;
        if is_same || self.age_at(now_ms) != Age::Fresh {
            return Ok(());
        }
        let at = match spec.addresses.first() {
            Some(address) => format!(" (its blade is at {address})"),
            None => String::new(),
        };
        let detail = format!(
            "another daemon{at} has the name {name} and has reported within the last {} s; give \
             this one another name, or end that one",
            NODE_LATE_MS / 1000
        );
        refuse(ProblemKind::NameInUse, detail)
    }

    /// Whether it has carried out an intent that has this grant with this size, and no more of it
    /// is in use.
    pub(crate) fn keeps_to(&self, segment: SegmentId, epoch: u64, size: u64, since: u64) -> bool {
        let Some(seen) = &self.seen else { return false };
        let fits = |grant: &GrantSeen| {
            grant.epoch == epoch
                && grant.used_bytes <= size
                && grant.bytes.is_some_and(|bytes| bytes <= size)
        };
        seen.known_version >= since && seen.grants.get(&segment).is_some_and(fits)
    }

    /// Returns the most bytes that it lends now.
    pub(crate) fn lendable_bytes(&self) -> u64 {
        let offered = graph::whole(self.record.spec.donate_bytes);
        self.seen.as_ref().map_or(offered, |seen| seen.lendable_bytes.min(offered))
    }
}

fn seen_grant(grant: &NodeGrantUse) -> (SegmentId, GrantSeen) {
    let NodeGrantUse { segment, epoch, bytes, used_bytes, .. } = *grant;
    (segment, GrantSeen { epoch, bytes, used_bytes })
}

/// Refuses what is no name of a node or tenant.
pub(super) fn check_name(name: &str, what: &str) -> Result<(), Problem> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > NAME_LIMIT_BYTES || !name.chars().all(allowed) {
        let detail =
            format!("a {what}'s name is 1 to 64 letters, digits, hyphens, underscores and dots");
        return refuse(ProblemKind::Invalid, detail);
    }
    Ok(())
}

fn check_spec(name: &str, spec: &NodeSpec) -> Result<(), Problem> {
    check_name(name, "node")?;
    let is_address = |text: &String| {
        let rest = text.strip_prefix("tcp://").or_else(|| text.strip_prefix("unix:"));
        text.len() <= ADDRESS_LIMIT_BYTES
            && rest.is_some_and(|rest| !rest.is_empty())
            && text.chars().all(|c| c.is_ascii_graphic())
    };
    if let Some(bad) = spec.addresses.iter().find(|address| !is_address(address)) {
        let detail = format!("{bad:?} is no address of a blade; give tcp://host:port or unix:path");
        return refuse(ProblemKind::Invalid, detail);
    }
    if spec.addresses.len() > ADDRESSES_LIMIT {
        let detail = format!("a node has {ADDRESSES_LIMIT} addresses at most");
        return refuse(ProblemKind::Invalid, detail);
    }
    if spec.donate_bytes > 0 && spec.addresses.is_empty() {
        return refuse(ProblemKind::Invalid, "a node that lends memory needs an address");
    }
    if spec.read_bytes_per_s == 0 || spec.write_bytes_per_s == 0 {
        return refuse(ProblemKind::Invalid, "a node serves at least one byte a second");
    }
    Ok(())
}

impl State {
    pub(super) fn put_node(
        &mut self,
        name: &str,
        spec: NodeSpec,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        check_spec(name, &spec)?;
        let known = self.nodes.get(name);
        known.map_or(Ok(()), |node| node.check_successor(&spec, to.now_ms))?;
        if known.is_none() && self.nodes.len() >= NODES_LIMIT {
            return refuse(ProblemKind::NoRoom, format!("there are {NODES_LIMIT} nodes already"));
        }
        let slot = known.map_or_else(|| self.free_slot(), |node| node.record.slot);
        let draining = known.is_some_and(|node| node.record.draining);
        let spec = self.with_promises(name, spec);
        let record = NodeRecord { name: name.to_owned(), spec, slot, draining };
        match &self.topology {
            Some(_) => self.check_bricks(&record)?,
            None => self.rebuild_with(&record)?,
        }
        let (donated, brick) = (record.spec.donate_bytes, self.brick_of(&record));
        let outcome = match self.nodes.contains_key(name) {
            false => {
                to.put(&record);
                to.event("node-joined", name, format!("it lends {donated} bytes"));
                self.insert_node(record, to.now_ms);
                Outcome::Created
            }
            true => {
                self.change_node(record, to);
                Outcome::Done
            }
        };
        if self.topology.is_some() {
            let capacity = brick.as_deref().and_then(|brick| self.capacity_of(brick));
            if capacity.unwrap_or(0) < graph::whole(donated) {
                let detail = format!("it offers {donated} bytes, its brick has {capacity:?}");
                to.event("node-clamped", name, detail);
            }
        }
        self.apply_to_rack();
        self.touch_node(name);
        Ok(outcome)
    }

    /// Without a topology: raises a node's bandwidth to what was promised of it before. A node
    /// whose link has become slower must be able to come back; nothing more is placed on it.
    fn with_promises(&self, name: &str, mut spec: NodeSpec) -> NodeSpec {
        if self.topology.is_none() {
            let (read, write) = self.promised_rates(name);
            spec.read_bytes_per_s = spec.read_bytes_per_s.max(read);
            spec.write_bytes_per_s = spec.write_bytes_per_s.max(write);
        }
        spec
    }

    fn capacity_of(&self, brick: &str) -> Option<u64> {
        let id = graph::memory_of(self.rack.graph(), brick)?;
        self.rack.graph().memories().get(id.index()).map(|brick| brick.capacity_bytes)
    }

    /// Returns the lowest slot at the switch that no node has.
    fn free_slot(&self) -> u32 {
        let taken: BTreeSet<u32> = self.nodes.values().map(|node| node.record.slot).collect();
        (0..).find(|slot| !taken.contains(slot)).unwrap_or(0)
    }

    /// With a topology: refuses unless the bricks exist and are no other node's, and nothing is on
    /// a brick that the node gives up.
    fn check_bricks(&self, record: &NodeRecord) -> Result<(), Problem> {
        let Some(graph) = &self.topology else { return Ok(()) };
        let spec = &record.spec;
        let compute = spec.compute_brick.as_ref().unwrap_or(&record.name);
        let is_compute = matches!(graph.vertex(compute), Some(Vertex::Compute(_)));
        let memory = spec.memory_brick.as_ref().unwrap_or(&record.name);
        let is_memory = matches!(graph.vertex(memory), Some(Vertex::Memory(_)));
        if (spec.compute_brick.is_some() && !is_compute)
            || (spec.memory_brick.is_some() && !is_memory)
            || !(is_compute || is_memory)
        {
            let detail = format!("the topology has no such bricks for node {}", record.name);
            return refuse(ProblemKind::Invalid, detail);
        }
        if spec.donate_bytes > 0 && !is_memory {
            let detail = format!("node {} lends memory and is no memory brick", record.name);
            return refuse(ProblemKind::Invalid, detail);
        }
        let brick = self.brick_of(record);
        let other = brick.as_ref().and_then(|brick| self.node_of_brick.get(brick));
        if let Some(other) = other.filter(|other| **other != record.name) {
            return refuse(ProblemKind::Conflict, format!("node {other} is that memory brick"));
        }
        let before = self.nodes.get(&record.name).and_then(|node| node.memory.as_ref());
        if before != brick.as_ref() && self.is_used(&record.name) {
            let detail = format!("segments are on node {}; drain it first", record.name);
            return refuse(ProblemKind::Conflict, detail);
        }
        Ok(())
    }

    fn is_used(&self, node: &str) -> bool {
        self.on_node.get(node).is_some_and(|all| !all.is_empty())
    }

    /// Without a topology: builds a rack with this node, or with its changes.
    fn rebuild_with(&mut self, record: &NodeRecord) -> Result<(), Problem> {
        let shape = |record: &NodeRecord| {
            let spec = &record.spec;
            let rates = (spec.read_bytes_per_s, spec.write_bytes_per_s);
            (graph::whole(spec.donate_bytes), rates)
        };
        let before = self.nodes.get(&record.name);
        if before.is_some_and(|node| shape(&node.record) == shape(record)) {
            return Ok(());
        }
        let mut nodes: BTreeMap<&str, &NodeRecord> =
            self.nodes.iter().map(|(name, node)| (name.as_str(), &node.record)).collect();
        nodes.insert(&record.name, record);
        let rack = self.rebuilt(&nodes).map_err(|error| match error {
            graph::AdoptError::Build(error) => {
                Problem::new(ProblemKind::Invalid, error.to_string())
            }
            error => {
                let detail = format!("what is on the node does not fit then: {error}");
                Problem::new(ProblemKind::Conflict, detail)
            }
        })?;
        self.rack = rack;
        Ok(())
    }

    /// Updates a known node that has registered again.
    fn change_node(&mut self, record: NodeRecord, to: &mut Changes<'_>) {
        let brick = self.brick_of(&record);
        let name = record.name.clone();
        let Some(node) = self.nodes.get_mut(&name) else { return };
        let before = std::mem::replace(&mut node.record, record);
        node.heard_ms = to.now_ms;
        node.age = Age::Fresh;
        node.has_ended = false;
        let left = std::mem::replace(&mut node.memory, brick.clone());
        if node.record != before {
            to.ops.push(node.record.put());
        }
        let restarted = node.record.spec.incarnation != before.spec.incarnation;
        if restarted {
            // A new daemon counts its reports from the beginning; its grants are not known yet.
            node.seen = None;
            to.event("node-restarted", &name, "its daemon has started again");
        }
        if let Some(left) = left {
            self.node_of_brick.remove(&left);
        }
        if let Some(brick) = brick {
            self.node_of_brick.insert(brick, name.clone());
        }
        let blade_id = self.nodes[&name].record.spec.blade_id;
        if blade_id != before.spec.blade_id {
            self.lose_blade(&name, to);
        }
        self.refresh_node(&name, to);
    }

    pub(super) fn delete_node(
        &mut self,
        name: &str,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let node = self.node_named(name)?;
        if self.is_used(name) {
            let detail = format!("segments are on node {name}; drain it first");
            return refuse(ProblemKind::Conflict, detail);
        }
        let compute = match &self.topology {
            None => name,
            Some(_) => node.record.spec.compute_brick.as_deref().unwrap_or(name),
        };
        let uses = self.segments.values().any(|segment| segment.host == compute)
            || self.clients.values().any(|client| client.record.spec.host == compute);
        if uses && self.topology.is_none() {
            let detail = format!("clients or segments of node {name} use far memory; end them");
            return refuse(ProblemKind::Conflict, detail);
        }
        if self.topology.is_none() {
            let others = self.nodes.iter().filter(|(other, _)| *other != name);
            let others = others.map(|(name, node)| (name.as_str(), &node.record)).collect();
            let conflict =
                |error: graph::AdoptError| Problem::new(ProblemKind::Conflict, error.to_string());
            self.rack = self.rebuilt(&others).map_err(conflict)?;
        }
        if let Some(node) = self.nodes.remove(name) {
            to.ops.push(node.record.delete());
            if let Some(brick) = node.memory {
                self.node_of_brick.remove(&brick);
            }
        }
        self.on_node.remove(name);
        self.apply_to_rack();
        to.event("node-left", name, "it was deleted");
        Ok(Outcome::Done)
    }

    pub(super) fn node_named(&self, name: &str) -> Result<&Node, Problem> {
        let unknown = || Problem::new(ProblemKind::NotFound, format!("there is no node {name:?}"));
        self.nodes.get(name).ok_or_else(unknown)
    }

    pub(super) fn drain(
        &mut self,
        name: &str,
        draining: bool,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        self.node_named(name)?;
        let Some(node) = self.nodes.get_mut(name) else { return Ok(Outcome::Done) };
        if node.record.draining != draining {
            node.record.draining = draining;
            to.ops.push(node.record.put());
            let brick = node.memory.clone();
            if let Some(brick) = brick {
                self.apply_brick(&brick);
            }
            self.touch_node(name);
            let what = if draining { "node-draining" } else { "node-undrained" };
            to.event(what, name, "by request");
        }
        if !draining {
            return Ok(Outcome::Done);
        }
        let task = self.begin_task("drain", name, to);
        Ok(Outcome::Task(task))
    }

    pub(super) fn node_report(
        &mut self,
        name: &str,
        report: NodeReport,
        to: &mut Changes<'_>,
    ) -> Result<Outcome, Problem> {
        let node = self.node_named(name)?;
        node.check_daemon(report.incarnation, report.blade_id)?;
        let distinct: BTreeSet<SegmentId> =
            report.grants.iter().map(|grant| grant.segment).collect();
        if distinct.len() != report.grants.len() {
            return refuse(ProblemKind::Invalid, "a segment is in the report twice");
        }
        if node.seen.as_ref().is_some_and(|seen| report.sequence <= seen.sequence) {
            return Ok(Outcome::Done);
        }
        let has_ended = report.ending;
        let seen = self.check_report(name, report, to);
        let Some(node) = self.nodes.get_mut(name) else { return Ok(Outcome::Done) };
        node.seen = Some(seen);
        node.heard_ms = to.now_ms;
        node.has_ended = has_ended;
        self.note_age(name, to);
        if let Some(brick) = self.nodes.get(name).and_then(|node| node.memory.clone()) {
            self.apply_brick(&brick);
        }
        self.refresh_node(name, to);
        Ok(Outcome::Done)
    }

    /// Returns the report with everything impossible reduced to what is possible. Each kind of lie
    /// is an event when it begins.
    fn check_report(&self, name: &str, report: NodeReport, to: &mut Changes<'_>) -> NodeSeen {
        let node = &self.nodes[name];
        let mut lies = BTreeSet::new();
        let mut clamp = |lie: &'static str, value: u64, limit: u64| {
            if value > limit {
                lies.insert(lie);
            }
            value.min(limit)
        };
        let donated = node.record.spec.donate_bytes;
        let capacity_bytes =
            clamp("a capacity above what it donates", report.capacity_bytes, donated);
        let lendable_bytes =
            clamp("lending more than its capacity", report.lendable_bytes, capacity_bytes);
        let used_bytes = clamp("using more than its capacity", report.used_bytes, capacity_bytes);
        let load = clamp("a load above 1000", u64::from(report.load_permille), 1000);
        let known_version = clamp(
            "knowing a version that was never given",
            report.known_version,
            self.last_version,
        );
        // Such a version proves nothing about the grants that it has let go of.
        let known_version = if known_version < report.known_version { 0 } else { known_version };
        for grant in &report.grants {
            match self.granted_bytes_on(name, grant.segment, grant.epoch) {
                Some(bytes) => {
                    clamp("a grant with more used than granted", grant.used_bytes, bytes);
                }
                // A grant that it was told to drop, or never had from this controller, is not a lie
                // by itself: the answer does not have it, and the node must let go of it.
                None if !self.segments.contains_key(&grant.segment) => {
                    clamp("a segment that does not exist", 1, 0);
                }
                None => {}
            }
        }
        let before = node.seen.as_ref().map(|seen| seen.lies.clone()).unwrap_or_default();
        for lie in lies.difference(&before) {
            to.event("node-lied", name, format!("it reports {lie}; the report is cut down"));
        }
        NodeSeen {
            sequence: report.sequence,
            known_version,
            capacity_bytes,
            used_bytes,
            lendable_bytes,
            read_bytes_total: report.read_bytes_total,
            write_bytes_total: report.write_bytes_total,
            load_permille: exactly(load),
            grants: report.grants.iter().map(seen_grant).collect(),
            lies,
        }
    }

    fn granted_bytes_on(&self, node: &str, segment: SegmentId, epoch: u64) -> Option<u64> {
        let segment = self.segments.get(&segment)?;
        let places = [Some(&segment.current), segment.target.as_ref()];
        let mut here = places.into_iter().flatten();
        here.find(|place| place.node == node && place.epoch == epoch).map(|place| place.bytes())
    }

    /// Notes that a node has become late, lost, or fresh again.
    pub(super) fn note_age(&mut self, name: &str, to: &mut Changes<'_>) -> Outcome {
        let Some(node) = self.nodes.get_mut(name) else { return Outcome::Done };
        let age = node.age_at(to.now_ms);
        if std::mem::replace(&mut node.age, age) != age {
            let (kind, detail) = match age {
                Age::Fresh => ("node-up", "it reports again"),
                Age::Late if node.has_ended => ("node-late", "its daemon has ended"),
                Age::Late => ("node-late", "it has not reported for 5 s"),
                Age::Lost => ("node-lost", "it has not reported for 30 s"),
            };
            to.event(kind, name, detail);
            if let Some(brick) = self.nodes.get(name).and_then(|node| node.memory.clone()) {
                self.apply_brick(&brick);
            }
        }
        Outcome::Done
    }

    /// Settles every segment on a node.
    pub(super) fn refresh_node(&mut self, name: &str, to: &mut Changes<'_>) {
        let all: Vec<SegmentId> = self.on_node.get(name).into_iter().flatten().copied().collect();
        for id in all {
            self.settle(id, to);
        }
    }
}
