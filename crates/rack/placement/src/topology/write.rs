//! Graph to TOML. Reading the text again with [`read`](super::read) gives an equal graph.

use std::fmt::Write;

use farpool_units::format_bytes;

use crate::graph::{Graph, PowerState, SwitchKind};

/// The graph as a topology. Names need no escapes: the builder allows none that would.
#[must_use]
pub fn write(graph: &Graph) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = places(graph, &mut text);
    let _ = bricks(graph, &mut text);
    let _ = links(graph, &mut text);
    text
}

fn places(graph: &Graph, to: &mut String) -> std::fmt::Result {
    for rack in graph.racks() {
        writeln!(to, "[[rack]]\nname = \"{}\"\n", rack.name)?;
    }
    for tray in graph.trays() {
        let rack = &graph.racks()[tray.rack.index()].name;
        writeln!(to, "[[tray]]\nname = \"{}\"\nrack = \"{rack}\"\n", tray.name)?;
    }
    for switch in graph.switches() {
        let kind = match switch.kind {
            SwitchKind::Circuit => "circuit",
            SwitchKind::Packet => "packet",
        };
        writeln!(to, "[[switch]]\nname = \"{}\"\nkind = \"{kind}\"", switch.name)?;
        writeln!(to, "ports = {}", switch.ports.len())?;
        number(to, "latency_ns", switch.latency_ns)?;
        number(to, "power_watts", switch.power_watts)?;
        writeln!(to)?;
    }
    Ok(())
}

fn bricks(graph: &Graph, to: &mut String) -> std::fmt::Result {
    for brick in graph.computes() {
        let tray = &graph.trays()[brick.tray.index()].name;
        let domain = &graph.domains()[brick.domain.index()];
        writeln!(to, "[[compute]]\nname = \"{}\"\ntray = \"{tray}\"", brick.name)?;
        writeln!(to, "domain = \"{domain}\"\nports = {}", brick.ports.len())?;
        number(to, "power_watts", brick.power_watts)?;
        writeln!(to)?;
    }
    for brick in graph.memories() {
        let tray = &graph.trays()[brick.tray.index()].name;
        let domain = &graph.domains()[brick.domain.index()];
        writeln!(to, "[[memory]]\nname = \"{}\"\ntray = \"{tray}\"", brick.name)?;
        writeln!(to, "domain = \"{domain}\"\nports = {}", brick.ports.len())?;
        writeln!(to, "capacity = \"{}\"", format_bytes(brick.capacity_bytes))?;
        let (read, write) = (brick.read_limit_bytes_per_s, brick.write_limit_bytes_per_s);
        writeln!(to, "read_bandwidth = \"{}/s\"", format_bytes(read))?;
        writeln!(to, "write_bandwidth = \"{}/s\"", format_bytes(write))?;
        if brick.power == PowerState::Off {
            writeln!(to, "power = \"off\"")?;
        }
        number(to, "power_watts", brick.power_watts)?;
        number(to, "load_permille", u32::from(brick.load_permille))?;
        number(to, "latency_ns", brick.latency_ns)?;
        writeln!(to)?;
    }
    Ok(())
}

fn links(graph: &Graph, to: &mut String) -> std::fmt::Result {
    for link in graph.links() {
        let (from, far) = (graph.port_name(link.a), graph.port_name(link.b));
        let bandwidth = format_bytes(link.bandwidth_bytes_per_s);
        writeln!(to, "[[link]]\nfrom = \"{from}\"\nto = \"{far}\"\nbandwidth = \"{bandwidth}/s\"")?;
        number(to, "latency_ns", link.latency_ns)?;
        writeln!(to)?;
    }
    Ok(())
}

/// A line for a number that is not its default.
fn number(to: &mut String, key: &str, value: u32) -> std::fmt::Result {
    if value == 0 { Ok(()) } else { writeln!(to, "{key} = {value}") }
}
