//! Builds a [`Graph`] piece by piece; every mistake is refused where it is made, so a finished
//! graph is sound. Both the TOML reader and the generator build with it, in the same order, so a
//! graph written and read again is equal to the first.

use std::collections::HashMap;

use farpool_units::{SUPERPAGE_BYTES, format_bytes};

use crate::graph::{
    ComputeBrick, Graph, Link, MemoryBrick, Port, PowerState, Rack, Switch, SwitchKind, Tray,
    Vertex,
};
use crate::ids::{ComputeId, DomainId, LinkId, MemoryId, PortId, RackId, SwitchId, TrayId};

/// Most bricks of a kind, racks, trays or switches: bounds a graph's memory to a few gigabytes.
pub(crate) const VERTEX_LIMIT: usize = 1 << 22;
/// Most ports of one brick or switch; larger switches do not exist.
pub(crate) const PORTS_LIMIT: u32 = 1 << 20;
/// Most ports of a graph.
pub(crate) const ALL_PORTS_LIMIT: usize = 1 << 26;

/// Why a piece does not fit the graph.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BuildError {
    /// A name used twice.
    #[error("the {what} \"{name}\" is there already; names are unique")]
    DuplicateName {
        /// Kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// A name that is not allowed.
    #[error("\"{name}\" is no name; use letters, digits, '-', '_' and '.'")]
    BadName {
        /// The name.
        name: String,
    },
    /// A name that does not exist.
    #[error("there is no {what} \"{name}\"")]
    UnknownName {
        /// Kind of thing.
        what: &'static str,
        /// The name looked for.
        name: String,
    },
    /// A port text that is not `name:number`.
    #[error("\"{text}\" is no port; write it as name:number, for example m0:1")]
    BadPort {
        /// The text as given.
        text: String,
    },
    /// A port number beyond its owner's ports.
    #[error("\"{name}\" has {ports} ports, numbered from 0; there is no port {number}")]
    NoSuchPort {
        /// Owner of the ports.
        name: String,
        /// How many it has.
        ports: usize,
        /// The number asked for.
        number: u32,
    },
    /// A port with two cables.
    #[error("the port {port} has a link already")]
    PortLinkedTwice {
        /// `name:number`.
        port: String,
    },
    /// A cable from a port to itself or between two bricks or within one switch.
    #[error("a link joins a brick to a switch or two switches, not {a} to {b}")]
    BadLink {
        /// One end.
        a: String,
        /// The other end.
        b: String,
    },
    /// A brick or switch without any port.
    #[error("\"{name}\" has no port; give it at least one")]
    NoPorts {
        /// Its name.
        name: String,
    },
    /// A value that must be above zero.
    #[error("the {what} of \"{name}\" is zero")]
    Zero {
        /// Which value.
        what: &'static str,
        /// Name of the thing that has it.
        name: String,
    },
    /// A capacity that is not a whole number of superpages.
    #[error(
        "the capacity {} of \"{name}\" is no whole number of superpages of {}",
        format_bytes(*bytes),
        format_bytes(SUPERPAGE_BYTES)
    )]
    OddCapacity {
        /// Name of the brick.
        name: String,
        /// Its capacity.
        bytes: u64,
    },
    /// More than this crate handles.
    #[error("{found} {what} are too many; the limit is {limit}")]
    TooMany {
        /// Kind of thing.
        what: &'static str,
        /// How many.
        found: u64,
        /// The most there may be.
        limit: u64,
    },
}

/// A graph under construction. `domain`s are named by bricks and made on first use.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    graph: Graph,
    racks: HashMap<String, RackId>,
    trays: HashMap<String, TrayId>,
}

fn check_name(name: &str) -> Result<(), BuildError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || name.len() > 255 || !name.chars().all(allowed) {
        return Err(BuildError::BadName { name: name.to_owned() });
    }
    Ok(())
}

fn check_count(what: &'static str, held: usize) -> Result<(), BuildError> {
    if held >= VERTEX_LIMIT {
        let limit = VERTEX_LIMIT as u64;
        return Err(BuildError::TooMany { what, found: limit + 1, limit });
    }
    Ok(())
}

impl GraphBuilder {
    /// An empty graph.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rack.
    ///
    /// # Errors
    /// A name that is taken or not allowed.
    pub fn rack(&mut self, name: &str) -> Result<RackId, BuildError> {
        check_name(name)?;
        check_count("racks", self.graph.racks.len())?;
        let id = RackId::at(self.graph.racks.len());
        if self.racks.insert(name.to_owned(), id).is_some() {
            return Err(BuildError::DuplicateName { what: "rack", name: name.to_owned() });
        }
        self.graph.racks.push(Rack { name: name.to_owned() });
        Ok(id)
    }

    /// Adds a tray to the rack named `rack`.
    ///
    /// # Errors
    /// A name that is taken or not allowed; an unknown rack.
    pub fn tray(&mut self, name: &str, rack: &str) -> Result<TrayId, BuildError> {
        check_name(name)?;
        check_count("trays", self.graph.trays.len())?;
        let unknown = || BuildError::UnknownName { what: "rack", name: rack.to_owned() };
        let rack = *self.racks.get(rack).ok_or_else(unknown)?;
        let id = TrayId::at(self.graph.trays.len());
        if self.trays.insert(name.to_owned(), id).is_some() {
            return Err(BuildError::DuplicateName { what: "tray", name: name.to_owned() });
        }
        self.graph.trays.push(Tray { name: name.to_owned(), rack });
        Ok(id)
    }

    /// The tray of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn find_tray(&self, name: &str) -> Result<TrayId, BuildError> {
        let unknown = || BuildError::UnknownName { what: "tray", name: name.to_owned() };
        self.trays.get(name).copied().ok_or_else(unknown)
    }

    /// The failure domain of this name, made if it is new.
    ///
    /// # Errors
    /// The name is not allowed.
    pub fn domain(&mut self, name: &str) -> Result<DomainId, BuildError> {
        if let Some(id) = self.graph.domain_names.get(name) {
            return Ok(*id);
        }
        check_name(name)?;
        check_count("failure domains", self.graph.domains.len())?;
        let id = DomainId::at(self.graph.domains.len());
        self.graph.domains.push(name.to_owned());
        self.graph.domain_names.insert(name.to_owned(), id);
        Ok(id)
    }

    /// Adds a compute brick with `port_count` new ports (what `brick.ports` holds is replaced).
    ///
    /// # Errors
    /// A name that is taken or not allowed; no port.
    pub fn compute(
        &mut self,
        mut brick: ComputeBrick,
        port_count: u32,
    ) -> Result<ComputeId, BuildError> {
        check_count("compute bricks", self.graph.computes.len())?;
        let id = ComputeId::at(self.graph.computes.len());
        brick.ports = self.own_ports(&brick.name, Vertex::Compute(id), port_count)?;
        self.graph.computes.push(brick);
        Ok(id)
    }

    /// Adds a memory brick with `port_count` new ports (what `brick.ports` holds is replaced).
    ///
    /// # Errors
    /// A name that is taken or not allowed; no port; no memory or an odd amount; a limit of zero.
    pub fn memory(
        &mut self,
        mut brick: MemoryBrick,
        port_count: u32,
    ) -> Result<MemoryId, BuildError> {
        let name = || brick.name.clone();
        check_count("memory bricks", self.graph.memories.len())?;
        let values = [
            ("capacity", brick.capacity_bytes),
            ("read bandwidth", brick.read_limit_bytes_per_s),
            ("write bandwidth", brick.write_limit_bytes_per_s),
        ];
        if let Some((what, _)) = values.iter().find(|(_, value)| *value == 0) {
            return Err(BuildError::Zero { what, name: name() });
        }
        let bytes = brick.capacity_bytes;
        if !bytes.is_multiple_of(SUPERPAGE_BYTES) {
            return Err(BuildError::OddCapacity { name: name(), bytes });
        }
        let limit = u64::from(u32::MAX >> 1);
        let found = bytes / SUPERPAGE_BYTES;
        if found > limit {
            return Err(BuildError::TooMany { what: "superpages of one brick", found, limit });
        }
        let id = MemoryId::at(self.graph.memories.len());
        brick.ports = self.own_ports(&brick.name, Vertex::Memory(id), port_count)?;
        self.graph.memories.push(brick);
        Ok(id)
    }

    /// Adds a switch with `port_count` ports.
    ///
    /// # Errors
    /// A name that is taken or not allowed; no port.
    pub fn switch(
        &mut self,
        name: &str,
        kind: SwitchKind,
        port_count: u32,
        latency_ns: u32,
        power_watts: u32,
    ) -> Result<SwitchId, BuildError> {
        check_count("switches", self.graph.switches.len())?;
        let id = SwitchId::at(self.graph.switches.len());
        let ports = self.own_ports(name, Vertex::Switch(id), port_count)?;
        let name = name.to_owned();
        self.graph.switches.push(Switch { name, kind, latency_ns, power_watts, ports });
        Ok(id)
    }

    fn own_ports(
        &mut self,
        name: &str,
        owner: Vertex,
        count: u32,
    ) -> Result<Vec<PortId>, BuildError> {
        check_name(name)?;
        if count == 0 {
            return Err(BuildError::NoPorts { name: name.to_owned() });
        }
        let all = self.graph.ports.len() + count as usize;
        if count > PORTS_LIMIT || all > ALL_PORTS_LIMIT {
            let (found, limit) = (u64::from(count), u64::from(PORTS_LIMIT));
            return Err(BuildError::TooMany { what: "ports", found, limit });
        }
        if self.graph.names.contains_key(name) {
            let what = "brick or switch";
            return Err(BuildError::DuplicateName { what, name: name.to_owned() });
        }
        self.graph.names.insert(name.to_owned(), owner);
        let first = self.graph.ports.len();
        self.graph.ports.extend((0..count).map(|number| Port { owner, number, link: None }));
        Ok((first..all).map(PortId::at).collect())
    }

    /// The port written as `name:number`.
    ///
    /// # Errors
    /// The text is no port, or there is no such brick, switch or port.
    pub fn find_port(&self, text: &str) -> Result<PortId, BuildError> {
        let bad = || BuildError::BadPort { text: text.to_owned() };
        let (name, number) = text.rsplit_once(':').ok_or_else(bad)?;
        let number: u32 = number.parse().map_err(|_| bad())?;
        let unknown = || BuildError::UnknownName { what: "brick or switch", name: name.to_owned() };
        let ports = self.graph.ports_of(self.graph.vertex(name).ok_or_else(unknown)?);
        let missing =
            || BuildError::NoSuchPort { name: name.to_owned(), ports: ports.len(), number };
        ports.get(number as usize).copied().ok_or_else(missing)
    }

    /// Puts a cable between two ports.
    ///
    /// # Errors
    /// A port with a cable; a cable that no path can use; no bandwidth.
    pub fn link(
        &mut self,
        a: PortId,
        b: PortId,
        bandwidth_bytes_per_s: u64,
        latency_ns: u32,
    ) -> Result<LinkId, BuildError> {
        let owners = (self.graph.ports[a.index()].owner, self.graph.ports[b.index()].owner);
        let useful = match owners {
            (Vertex::Switch(s), Vertex::Switch(t)) => s != t,
            (Vertex::Switch(_), _) | (_, Vertex::Switch(_)) => true,
            _ => false,
        };
        if !useful {
            let (a, b) = (self.graph.port_name(a), self.graph.port_name(b));
            return Err(BuildError::BadLink { a, b });
        }
        for port in [a, b] {
            if self.graph.ports[port.index()].link.is_some() {
                return Err(BuildError::PortLinkedTwice { port: self.graph.port_name(port) });
            }
        }
        if bandwidth_bytes_per_s == 0 {
            let name = format!("{} - {}", self.graph.port_name(a), self.graph.port_name(b));
            return Err(BuildError::Zero { what: "bandwidth", name });
        }
        let id = LinkId::at(self.graph.links.len());
        self.graph.links.push(Link { a, b, bandwidth_bytes_per_s, latency_ns });
        self.graph.ports[a.index()].link = Some(id);
        self.graph.ports[b.index()].link = Some(id);
        Ok(id)
    }

    /// A brick's usual values, for callers that change a few.
    #[must_use]
    pub fn usual_memory(name: &str, tray: TrayId, domain: DomainId) -> MemoryBrick {
        MemoryBrick {
            name: name.to_owned(),
            tray,
            domain,
            capacity_bytes: 64 << 30,
            read_limit_bytes_per_s: 16 << 30,
            write_limit_bytes_per_s: 16 << 30,
            power: PowerState::On,
            power_watts: 0,
            load_permille: 0,
            latency_ns: 0,
            ports: Vec::new(),
        }
    }

    /// The finished graph.
    #[must_use]
    pub fn finish(self) -> Graph {
        self.graph
    }
}
