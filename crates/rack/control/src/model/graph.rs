//! Conversion between records, which have names, and the rack, which has numbers.
//!
//! Without a topology the graph is made of the nodes: each is a compute brick with its name and, if
//! it lends memory, a memory brick `name.memory`, on a tray and in a failure domain of its own, all
//! on one packet switch `net`. A node keeps its slot at the switch, so that ports keep their names
//! when other nodes join and leave.

use std::collections::BTreeMap;

use farpool_api::{Policy, SegmentSpec};
use farpool_units::SUPERPAGE_BYTES;

use farpool_placement::{
    Allocator, BuildError, ComputeBrick, Epoch, Grant, Graph, GraphBuilder, MemPortEntry,
    MemoryBrick, MemoryId, Path, PlacementPolicy, RackError, RateLimits, Request, RequestId,
    SegmentId, SwitchKind, Vertex,
};

use super::record::{GrantRecord, NodeRecord, SegmentRecord};

/// Name of the switch that joins all nodes.
pub const NETWORK_NAME: &str = "net";

/// Why stored records do not fit the rack.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The graph cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The graph has no such brick or port.
    #[error("segment {segment} needs {name}, which the rack does not have")]
    NoName { segment: farpool_api::SegmentId, name: String },
    /// The rack refuses a grant.
    #[error("segment {segment} cannot be taken over: {reason}")]
    Refused { segment: farpool_api::SegmentId, reason: RackError },
}

/// Returns the name of a node's memory brick if there is no topology.
pub fn memory_name(node: &str) -> String {
    format!("{node}.memory")
}

/// Returns `bytes` rounded down to whole superpages.
pub fn whole(bytes: u64) -> u64 {
    bytes / SUPERPAGE_BYTES * SUPERPAGE_BYTES
}

/// Returns the graph of nodes on one packet switch.
pub fn of_nodes<'a>(nodes: impl Iterator<Item = &'a NodeRecord>) -> Result<Graph, BuildError> {
    let nodes: Vec<&NodeRecord> = nodes.collect();
    let mut builder = GraphBuilder::new();
    let Some(slots) = nodes.iter().map(|node| node.slot.saturating_add(1)).max() else {
        return Ok(builder.finish());
    };
    builder.rack("rack")?;
    builder.switch(NETWORK_NAME, SwitchKind::Packet, slots.saturating_mul(2), 0, 0)?;
    for node in nodes {
        add_node(&mut builder, node)?;
    }
    Ok(builder.finish())
}

fn add_node(builder: &mut GraphBuilder, node: &NodeRecord) -> Result<(), BuildError> {
    let name = node.name.as_str();
    let tray = builder.tray(name, "rack")?;
    let domain = builder.domain(name)?;
    let brick =
        ComputeBrick { name: name.to_owned(), tray, domain, power_watts: 0, ports: Vec::new() };
    builder.compute(brick, 1)?;
    // The network itself is not the bottleneck here: a node's bandwidth limits what it lends.
    cable(builder, name, node.slot * 2, u64::MAX >> 8)?;
    let capacity_bytes = whole(node.spec.donate_bytes);
    if capacity_bytes == 0 {
        return Ok(());
    }
    let memory = memory_name(name);
    let brick = MemoryBrick {
        capacity_bytes,
        read_limit_bytes_per_s: node.spec.read_bytes_per_s,
        write_limit_bytes_per_s: node.spec.write_bytes_per_s,
        ..GraphBuilder::usual_memory(&memory, tray, domain)
    };
    builder.memory(brick, 1)?;
    let most = node.spec.read_bytes_per_s.max(node.spec.write_bytes_per_s);
    cable(builder, &memory, node.slot * 2 + 1, most)
}

fn cable(builder: &mut GraphBuilder, brick: &str, port: u32, rate: u64) -> Result<(), BuildError> {
    let from = builder.find_port(&format!("{brick}:0"))?;
    let to = builder.find_port(&format!("{NETWORK_NAME}:{port}"))?;
    builder.link(from, to, rate, 0).map(drop)
}

/// Returns a rack with all stored segments.
pub fn rack_with(
    graph: Graph,
    segments: &BTreeMap<farpool_api::SegmentId, SegmentRecord>,
    highest: (u64, u64),
) -> Result<Allocator, AdoptError> {
    let mut rack = Allocator::new(graph);
    let mut all: Vec<&SegmentRecord> = segments.values().collect();
    all.sort_by_key(|segment| segment.current.number);
    for segment in all {
        adopt(&mut rack, segment)?;
    }
    rack.raise_ids(SegmentId(highest.0), Epoch(highest.1));
    Ok(rack)
}

fn adopt(rack: &mut Allocator, segment: &SegmentRecord) -> Result<(), AdoptError> {
    let refused = |reason| AdoptError::Refused { segment: segment.id, reason };
    let missing = |name: &str| AdoptError::NoName { segment: segment.id, name: name.to_owned() };
    let Some(Vertex::Compute(compute)) = rack.graph().vertex(&segment.host) else {
        return Err(missing(&segment.host));
    };
    // What is reserved, which is more than was asked for while the segment shrinks.
    let request = Request {
        bytes: segment.current.bytes(),
        ..request(rack.graph(), segment.id, &segment.spec, compute)
    };
    let current = to_grant(rack, &request, &segment.current).map_err(|name| missing(&name))?;
    rack.adopt(&request, &current).map_err(refused)?;
    if let Some(target) = &segment.target {
        let target = to_grant(rack, &request, target).map_err(|name| missing(&name))?;
        rack.adopt_move(request.id, &target).map_err(refused)?;
    }
    Ok(())
}

/// Returns the request to the rack. Failure domains that do not exist any more are left out.
pub fn request(
    graph: &Graph,
    id: farpool_api::SegmentId,
    spec: &SegmentSpec,
    compute: farpool_placement::ComputeId,
) -> Request {
    Request {
        id: RequestId(id.0.as_u128()),
        compute,
        bytes: spec.bytes,
        rates: rates(spec),
        policy: policy(spec.policy),
        avoid: spec.avoid.iter().filter_map(|name| graph.domain(name)).collect(),
        may_split: spec.may_split,
    }
}

fn rates(spec: &SegmentSpec) -> RateLimits {
    RateLimits {
        read_bytes_per_s: spec.read_bytes_per_s,
        write_bytes_per_s: spec.write_bytes_per_s,
    }
}

/// Returns the rack's form of a policy.
pub fn policy(policy: Policy) -> PlacementPolicy {
    match policy {
        Policy::FirstFit => PlacementPolicy::FirstFit,
        Policy::Pack => PlacementPolicy::Pack,
        Policy::Spread => PlacementPolicy::Spread,
        Policy::Nearest => PlacementPolicy::Nearest,
        Policy::LeastLoaded => PlacementPolicy::LeastLoaded,
    }
}

/// Returns the grant of a record. Errors with the name that the graph does not have.
fn to_grant(rack: &Allocator, request: &Request, from: &GrantRecord) -> Result<Grant, String> {
    let graph = rack.graph();
    let Some(Vertex::Memory(memory)) = graph.vertex(&from.memory) else {
        return Err(from.memory.clone());
    };
    let port = |name: &String| {
        let (owner, number) = name.rsplit_once(':')?;
        let ports = graph.ports_of(graph.vertex(owner)?);
        ports.get(number.parse::<usize>().ok()?).copied()
    };
    let mut ports = Vec::with_capacity(from.path.len());
    for name in &from.path {
        ports.push(port(name).ok_or_else(|| name.clone())?);
    }
    let Some(&first) = ports.first() else { return Err("a path".to_owned()) };
    let path = Path { ports };
    let settings = rack.settings_of(&path).ok_or_else(|| "a path of its ports".to_owned())?;
    let circuit = settings.first().map(|setting| setting.circuit);
    let entry = |&(client_base_bytes, length_bytes, brick_offset_bytes): &(u64, u64, u64)| {
        MemPortEntry { client_base_bytes, length_bytes, port: first, circuit, brick_offset_bytes }
    };
    Ok(Grant {
        segment: SegmentId(from.number),
        epoch: Epoch(from.epoch),
        compute: request.compute,
        memory,
        entries: from.pieces.iter().map(entry).collect(),
        path,
        settings,
        client_limits: request.rates,
        blade_limits: request.rates,
    })
}

/// Returns the record of a grant on `node`.
pub fn to_record(graph: &Graph, grant: &Grant, node: &str, key: farpool_api::Key) -> GrantRecord {
    let piece = |entry: &MemPortEntry| {
        (entry.client_base_bytes, entry.length_bytes, entry.brick_offset_bytes)
    };
    GrantRecord {
        number: grant.segment.0,
        epoch: grant.epoch.0,
        key,
        node: node.to_owned(),
        memory: graph.name(Vertex::Memory(grant.memory)).to_owned(),
        path: grant.path.ports.iter().map(|port| graph.port_name(*port)).collect(),
        pieces: grant.entries.iter().map(piece).collect(),
    }
}

/// Returns the memory brick with this name. None if there is none.
pub fn memory_of(graph: &Graph, name: &str) -> Option<MemoryId> {
    match graph.vertex(name) {
        Some(Vertex::Memory(id)) => Some(id),
        _ => None,
    }
}
