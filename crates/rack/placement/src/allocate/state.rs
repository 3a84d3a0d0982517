//! The reservations as plain data, to compare and to show.

use std::collections::BTreeMap;

use crate::graph::{SwitchKind, Vertex};
use crate::ids::{ComputeId, DomainId, LinkId, MemoryId, RequestId};

use super::Allocator;
use super::bricks::{ComputeState, MemoryState};
use super::grant::{Grant, Path, RateLimits, SwitchSetting};
use super::network;
use super::standing::Standing;

/// All that is reserved at one moment. Two snapshots are equal exactly when the same is reserved;
/// the numbers that only grow (the next segment id and epoch) are left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    memories: Vec<MemoryState>,
    computes: Vec<ComputeState>,
    links: Vec<[u64; 2]>,
    ports: Vec<(u32, u32)>,
    standing: BTreeMap<RequestId, Standing>,
}

impl Allocator {
    /// Everything reserved now. Costs a copy of the whole state.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            memories: self.memories.clone(),
            computes: self.computes.clone(),
            links: self.network.all_left(),
            ports: self.network.port_use(),
            standing: self.standing.iter().map(|one| (one.id(), one.clone())).collect(),
        }
    }

    /// Standing circuits, each with the number of segments over it.
    pub fn circuits(&self) -> impl Iterator<Item = (SwitchSetting, u32)> + '_ {
        self.network.circuits()
    }

    /// How the circuit switches on a path are set for it. None if the path has ports that do not
    /// exist.
    #[must_use]
    pub fn settings_of(&self, path: &Path) -> Option<Vec<SwitchSetting>> {
        let (ports, switches) = (self.graph.ports(), self.graph.switches());
        if path.ports.iter().any(|port| port.index() >= ports.len()) {
            return None;
        }
        let set = path.crossings().filter_map(|(from, to)| {
            let Vertex::Switch(switch) = ports[from.index()].owner else { return None };
            let is_circuit = switches[switch.index()].kind == SwitchKind::Circuit;
            is_circuit.then(|| network::setting(switch, from, to))
        });
        Some(set.collect())
    }

    /// The bandwidth that a memory brick has left. None if there is no such brick.
    #[must_use]
    pub fn rates_left(&self, memory: MemoryId) -> Option<RateLimits> {
        self.memories.get(memory.index()).map(|state| state.left)
    }

    /// Bandwidth left on a link, from its end a to b and from b to a, in bytes per second.
    #[must_use]
    pub fn link_left(&self, link: LinkId) -> Option<[u64; 2]> {
        self.network.left(link)
    }

    /// The time that a request spends on the path and in the brick: links both ways and switches
    /// both ways, and the brick once.
    #[must_use]
    pub fn latency_ns(&self, grant: &Grant) -> u64 {
        let ports = self.graph.ports();
        let links = grant.path.ports.chunks_exact(2).filter_map(|ends| ports[ends[0].index()].link);
        let cables: u64 =
            links.map(|link| u64::from(self.graph.links()[link.index()].latency_ns)).sum();
        let switches: u64 = grant
            .path
            .crossings()
            .map(|(port, _)| match ports[port.index()].owner {
                Vertex::Switch(id) => u64::from(self.graph.switches()[id.index()].latency_ns),
                _ => 0,
            })
            .sum();
        2 * (cables + switches) + u64::from(self.graph.memories()[grant.memory.index()].latency_ns)
    }

    /// Segments of a compute brick per failure domain, sorted. None if there is no such brick.
    #[must_use]
    pub fn spread_of(&self, compute: ComputeId) -> Option<&[(DomainId, u32)]> {
        self.computes.get(compute.index()).map(|state| state.per_domain.as_slice())
    }
}
