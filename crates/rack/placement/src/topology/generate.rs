//! Topologies of any size by rule, for simulations, measurements and first steps.
//!
//! Each rack has one switch with all its bricks' ports; with more than one rack, one spine switch
//! joins them. Uplinks are a quarter of a rack's brick ports (4:1, usual in practice), at least
//! one.

use crate::builder::{BuildError, GraphBuilder};
use crate::graph::{ComputeBrick, Graph, MemoryBrick, SwitchKind};
use crate::ids::PortId;

/// Which switches join the bricks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NetworkKind {
    /// Packet switches only.
    Packet,
    /// Circuit switches only.
    Circuit,
    /// Circuits within a rack, packets between racks.
    Mixed,
}

/// What to generate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RackSpec {
    /// How many racks.
    pub racks: u32,
    /// Trays of each.
    pub trays_per_rack: u32,
    /// Compute bricks of each tray.
    pub compute_per_tray: u32,
    /// Memory bricks of each tray.
    pub memory_per_tray: u32,
    /// Ports of each brick.
    pub ports_per_brick: u32,
    /// Which switches.
    pub network: NetworkKind,
    /// Memory of each memory brick.
    pub capacity_bytes: u64,
    /// What each memory brick serves, per direction.
    pub served_bytes_per_s: u64,
    /// What each link carries, per direction.
    pub link_bytes_per_s: u64,
}

impl RackSpec {
    /// One rack of dReDBox's kind: 16 GTH transceivers of 10 Gb/s a brick in the paper's prototype
    /// (section VI); four are used here.
    #[must_use]
    pub fn new(network: NetworkKind) -> Self {
        Self {
            racks: 1,
            trays_per_rack: 4,
            compute_per_tray: 4,
            memory_per_tray: 4,
            ports_per_brick: 4,
            network,
            capacity_bytes: 64 << 30,
            served_bytes_per_s: 4 << 30,
            link_bytes_per_s: 5 << 28,
        }
    }
}

/// The graph that `spec` describes. Bricks are `r0t1c2` and `r0t1m2`, switches `r0` and `spine`.
///
/// # Errors
/// A count or value of zero where one is needed, or more than a graph may have.
pub fn generate(spec: &RackSpec) -> Result<Graph, BuildError> {
    let mut builder = GraphBuilder::new();
    let per_tray = u64::from(spec.compute_per_tray) + u64::from(spec.memory_per_tray);
    let brick_ports = per_tray * u64::from(spec.trays_per_rack) * u64::from(spec.ports_per_brick);
    let uplinks = if spec.racks > 1 { (brick_ports / 4).max(1) } else { 0 };
    let (inner, outer) = match spec.network {
        NetworkKind::Packet => (SwitchKind::Packet, SwitchKind::Packet),
        NetworkKind::Circuit => (SwitchKind::Circuit, SwitchKind::Circuit),
        NetworkKind::Mixed => (SwitchKind::Circuit, SwitchKind::Packet),
    };
    for rack in 0..spec.racks {
        builder.rack(&format!("r{rack}"))?;
        for tray in 0..spec.trays_per_rack {
            builder.tray(&format!("r{rack}t{tray}"), &format!("r{rack}"))?;
        }
    }
    for rack in 0..spec.racks {
        builder.switch(&format!("r{rack}"), inner, count(brick_ports + uplinks)?, 100, 0)?;
    }
    if spec.racks > 1 {
        builder.switch("spine", outer, count(uplinks * u64::from(spec.racks))?, 100, 0)?;
    }
    let mut cables = Vec::new();
    for kind in ["c", "m"] {
        for rack in 0..spec.racks {
            for tray in 0..spec.trays_per_rack {
                bricks(&mut builder, spec, kind, rack, tray, &mut cables)?;
            }
        }
    }
    connect(&mut builder, spec, &cables, uplinks)?;
    Ok(builder.finish())
}

fn count(number: u64) -> Result<u32, BuildError> {
    let limit = u64::from(u32::MAX);
    u32::try_from(number).map_err(|_| BuildError::TooMany { what: "ports", found: number, limit })
}

/// Adds the bricks of one kind to one tray, and their ports with the rack to `cables`.
fn bricks(
    builder: &mut GraphBuilder,
    spec: &RackSpec,
    kind: &str,
    rack: u32,
    tray: u32,
    cables: &mut Vec<(u32, PortId)>,
) -> Result<(), BuildError> {
    let tray_name = format!("r{rack}t{tray}");
    let (tray_id, domain) = (builder.find_tray(&tray_name)?, builder.domain(&tray_name)?);
    let memory = kind == "m";
    for number in 0..if memory { spec.memory_per_tray } else { spec.compute_per_tray } {
        let name = format!("{tray_name}{kind}{number}");
        if memory {
            let brick = MemoryBrick {
                capacity_bytes: spec.capacity_bytes,
                read_limit_bytes_per_s: spec.served_bytes_per_s,
                write_limit_bytes_per_s: spec.served_bytes_per_s,
                latency_ns: 100,
                ..GraphBuilder::usual_memory(&name, tray_id, domain)
            };
            builder.memory(brick, spec.ports_per_brick)?;
        } else {
            let ports = Vec::new();
            let brick =
                ComputeBrick { name: name.clone(), tray: tray_id, domain, power_watts: 0, ports };
            builder.compute(brick, spec.ports_per_brick)?;
        }
        for port in 0..spec.ports_per_brick {
            cables.push((rack, builder.find_port(&format!("{name}:{port}"))?));
        }
    }
    Ok(())
}

/// Links all bricks' ports to their rack's switch, and the uplinks to the spine.
fn connect(
    builder: &mut GraphBuilder,
    spec: &RackSpec,
    cables: &[(u32, PortId)],
    uplinks: u64,
) -> Result<(), BuildError> {
    let mut used = vec![0_u32; spec.racks as usize];
    let mut next = |builder: &GraphBuilder, rack: u32| {
        let number = &mut used[rack as usize];
        *number += 1;
        builder.find_port(&format!("r{rack}:{}", *number - 1))
    };
    for (rack, port) in cables {
        let at_switch = next(builder, *rack)?;
        builder.link(*port, at_switch, spec.link_bytes_per_s, 5)?;
    }
    for rack in 0..spec.racks {
        for uplink in 0..uplinks {
            let at_switch = next(builder, rack)?;
            let at_spine = u64::from(rack) * uplinks + uplink;
            let at_spine = builder.find_port(&format!("spine:{at_spine}"))?;
            builder.link(at_switch, at_spine, spec.link_bytes_per_s, 25)?;
        }
    }
    Ok(())
}
