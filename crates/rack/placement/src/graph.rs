//! The resource graph: the bricks and their cabling. It does not change; reservations are the
//! [`Allocator`](crate::Allocator)'s.
//!
//! Compute bricks are the sources, memory bricks the sinks, ports and switches lie between
//! (Syrivelis 2017, figure 4). Lists are dense, ids are indices into them; names of bricks and
//! switches share one space because links refer to all of them.

use std::collections::HashMap;

use crate::ids::{ComputeId, DomainId, LinkId, MemoryId, PortId, RackId, SwitchId, TrayId};

/// How a switch joins its ports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SwitchKind {
    /// Joins ports in pairs, as it has been set; a port is in one pair at most.
    Circuit,
    /// Forwards from any port to any port; links are shared by bandwidth.
    Packet,
}

/// Whether an unused brick has power.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PowerState {
    /// It has power.
    On,
    /// It is switched off until a segment is placed on it.
    Off,
}

/// A rack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rack {
    /// Unique among racks.
    pub name: String,
}

/// A tray of a rack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tray {
    /// Unique among trays.
    pub name: String,
    /// Where it is.
    pub rack: RackId,
}

/// A brick with processors, which uses far memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ComputeBrick {
    /// Unique among bricks and switches.
    pub name: String,
    /// Where it is.
    pub tray: TrayId,
    /// Its failure domain.
    pub domain: DomainId,
    /// Power that it draws when on.
    pub power_watts: u32,
    /// Its transceivers, in order.
    pub ports: Vec<PortId>,
}

/// A brick with memory, which serves it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryBrick {
    /// Unique among bricks and switches.
    pub name: String,
    /// Where it is.
    pub tray: TrayId,
    /// Its failure domain.
    pub domain: DomainId,
    /// Memory it lends: a whole number of superpages.
    pub capacity_bytes: u64,
    /// The read bandwidth of its memory controllers. Its ports together may carry more (section III
    /// of the paper), which is why grants carry rate limits.
    pub read_limit_bytes_per_s: u64,
    /// The write bandwidth of its memory controllers.
    pub write_limit_bytes_per_s: u64,
    /// Its power when unused.
    pub power: PowerState,
    /// Power that it draws when on.
    pub power_watts: u32,
    /// Load that does not come from grants, in thousandths.
    pub load_permille: u16,
    /// Time from its port to its memory and back.
    pub latency_ns: u32,
    /// Its transceivers, in order.
    pub ports: Vec<PortId>,
}

/// A switch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Switch {
    /// Unique among bricks and switches.
    pub name: String,
    /// Circuit or packet.
    pub kind: SwitchKind,
    /// Time from port to port.
    pub latency_ns: u32,
    /// Power that it draws.
    pub power_watts: u32,
    /// Its ports, in order.
    pub ports: Vec<PortId>,
}

/// A brick or a switch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Vertex {
    /// A compute brick.
    Compute(ComputeId),
    /// A memory brick.
    Memory(MemoryId),
    /// A switch.
    Switch(SwitchId),
}

/// A port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    /// What it belongs to.
    pub owner: Vertex,
    /// Its place among its owner's ports, from 0.
    pub number: u32,
    /// The cable in it, if any.
    pub link: Option<LinkId>,
}

/// A cable. It carries its bandwidth in each direction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// One end.
    pub a: PortId,
    /// The other end.
    pub b: PortId,
    /// What it carries per direction.
    pub bandwidth_bytes_per_s: u64,
    /// Time from end to end.
    pub latency_ns: u32,
}

/// A checked graph; made by a [`GraphBuilder`](crate::GraphBuilder) or by [`crate::topology`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Graph {
    pub(crate) racks: Vec<Rack>,
    pub(crate) trays: Vec<Tray>,
    pub(crate) domains: Vec<String>,
    pub(crate) computes: Vec<ComputeBrick>,
    pub(crate) memories: Vec<MemoryBrick>,
    pub(crate) switches: Vec<Switch>,
    pub(crate) ports: Vec<Port>,
    pub(crate) links: Vec<Link>,
    pub(crate) names: HashMap<String, Vertex>,
    pub(crate) domain_names: HashMap<String, DomainId>,
}

impl Graph {
    /// All racks, by id.
    #[must_use]
    pub fn racks(&self) -> &[Rack] {
        &self.racks
    }

    /// All trays, by id.
    #[must_use]
    pub fn trays(&self) -> &[Tray] {
        &self.trays
    }

    /// Names of all failure domains, by id.
    #[must_use]
    pub fn domains(&self) -> &[String] {
        &self.domains
    }

    /// All compute bricks, by id.
    #[must_use]
    pub fn computes(&self) -> &[ComputeBrick] {
        &self.computes
    }

    /// All memory bricks, by id.
    #[must_use]
    pub fn memories(&self) -> &[MemoryBrick] {
        &self.memories
    }

    /// All switches, by id.
    #[must_use]
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// All ports, by id.
    #[must_use]
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// All links, by id.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The brick or switch of this name.
    #[must_use]
    pub fn vertex(&self, name: &str) -> Option<Vertex> {
        self.names.get(name).copied()
    }

    /// The failure domain of this name.
    #[must_use]
    pub fn domain(&self, name: &str) -> Option<DomainId> {
        self.domain_names.get(name).copied()
    }

    /// The name of a brick or switch of this graph.
    #[must_use]
    pub fn name(&self, vertex: Vertex) -> &str {
        match vertex {
            Vertex::Compute(id) => &self.computes[id.index()].name,
            Vertex::Memory(id) => &self.memories[id.index()].name,
            Vertex::Switch(id) => &self.switches[id.index()].name,
        }
    }

    /// A port as topologies write it: `owner:number`.
    #[must_use]
    pub fn port_name(&self, port: PortId) -> String {
        let port = &self.ports[port.index()];
        format!("{}:{}", self.name(port.owner), port.number)
    }

    /// The ports of a brick or switch.
    #[must_use]
    pub fn ports_of(&self, vertex: Vertex) -> &[PortId] {
        match vertex {
            Vertex::Compute(id) => &self.computes[id.index()].ports,
            Vertex::Memory(id) => &self.memories[id.index()].ports,
            Vertex::Switch(id) => &self.switches[id.index()].ports,
        }
    }

    /// The port at the other end of this port's cable, if it has one.
    #[must_use]
    pub fn far_end(&self, port: PortId) -> Option<PortId> {
        let link = &self.links[self.ports[port.index()].link?.index()];
        Some(if link.a == port { link.b } else { link.a })
    }

    /// Memory bricks that no compute brick can reach over any setting of the switches.
    #[must_use]
    pub fn unreachable_memories(&self) -> Vec<MemoryId> {
        let mut seen = vec![false; self.switches.len()];
        let mut queue: Vec<SwitchId> = Vec::new();
        let reach = |ports: &[PortId], seen: &mut Vec<bool>, queue: &mut Vec<SwitchId>| {
            for far in ports.iter().filter_map(|port| self.far_end(*port)) {
                if let Vertex::Switch(id) = self.ports[far.index()].owner
                    && !std::mem::replace(&mut seen[id.index()], true)
                {
                    queue.push(id);
                }
            }
        };
        for brick in &self.computes {
            reach(&brick.ports, &mut seen, &mut queue);
        }
        while let Some(id) = queue.pop() {
            reach(&self.switches[id.index()].ports, &mut seen, &mut queue);
        }
        let reached = |brick: &MemoryBrick| {
            brick.ports.iter().filter_map(|port| self.far_end(*port)).any(|far| {
                matches!(self.ports[far.index()].owner, Vertex::Switch(id) if seen[id.index()])
            })
        };
        let lost = self.memories.iter().enumerate().filter(|(_, brick)| !reached(brick));
        lost.map(|(index, _)| MemoryId::at(index)).collect()
    }
}
