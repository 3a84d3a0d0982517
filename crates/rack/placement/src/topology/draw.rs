//! The rack as a text tree, for `farpool rack show`.

use std::fmt::Write;

use farpool_units::format_bytes;

use crate::Allocator;
use crate::graph::{PowerState, SwitchKind};
use crate::ids::{ComputeId, MemoryId};

/// Racks, trays and bricks with their use, then switches with their circuits; plain ASCII.
#[must_use]
pub fn draw(rack: &Allocator) -> String {
    let graph = rack.graph();
    let mut lines: Vec<Vec<String>> = vec![Vec::new(); graph.trays().len()];
    let segments = segments_per_compute(rack);
    for (index, brick) in graph.computes().iter().enumerate() {
        let used = &segments[ComputeId::at(index).index()];
        lines[brick.tray.index()].push(format!(
            "{}  compute  {} in {} segments",
            brick.name,
            format_bytes(used.0),
            used.1
        ));
    }
    for index in 0..graph.memories().len() {
        let id = MemoryId::at(index);
        lines[graph.memories()[index].tray.index()].push(memory_line(rack, id));
    }
    let mut text = String::new();
    let mut trays: Vec<Vec<usize>> = vec![Vec::new(); graph.racks().len()];
    for (index, tray) in graph.trays().iter().enumerate() {
        trays[tray.rack.index()].push(index);
    }
    // Writing to a string cannot fail.
    for (index, rack) in graph.racks().iter().enumerate() {
        let _ = writeln!(text, "rack {}", rack.name);
        for (at, tray) in trays[index].iter().enumerate() {
            let last = at + 1 == trays[index].len();
            let _ = writeln!(text, "{} tray {}", fork(last), graph.trays()[*tray].name);
            for (at, line) in lines[*tray].iter().enumerate() {
                let stem = if last { "   " } else { "|  " };
                let _ = writeln!(text, "{stem}{} {line}", fork(at + 1 == lines[*tray].len()));
            }
        }
    }
    switches(rack, &mut text);
    text
}

fn fork(last: bool) -> &'static str {
    if last { "`--" } else { "|--" }
}

/// Bytes and segments of every compute brick.
fn segments_per_compute(rack: &Allocator) -> Vec<(u64, u32)> {
    let mut all = vec![(0, 0); rack.graph().computes().len()];
    for (_, grant, _) in rack.grants() {
        let used = &mut all[grant.compute.index()];
        used.0 += grant.length_bytes();
        used.1 += 1;
    }
    all
}

fn memory_line(rack: &Allocator, id: MemoryId) -> String {
    let brick = &rack.graph().memories()[id.index()];
    let used = brick.capacity_bytes - rack.free_bytes(id);
    let power = match (rack.is_powered(id), brick.power) {
        (false, _) => ", off",
        (true, PowerState::Off) => ", on while used",
        (true, PowerState::On) => "",
    };
    format!(
        "{}  memory   {} of {} used, {} segments, load {}%{power}",
        brick.name,
        format_bytes(used),
        format_bytes(brick.capacity_bytes),
        rack.segments_on(id),
        rack.load_permille(id) / 10
    )
}

fn switches(rack: &Allocator, text: &mut String) {
    let graph = rack.graph();
    let mut circuits = vec![0_usize; graph.switches().len()];
    for (setting, _) in rack.circuits() {
        circuits[setting.switch.index()] += 1;
    }
    for (switch, circuits) in graph.switches().iter().zip(circuits) {
        let use_now = match switch.kind {
            SwitchKind::Circuit => format!("circuit, {circuits} circuits"),
            SwitchKind::Packet => "packet".to_owned(),
        };
        let linked = switch.ports.iter().filter(|port| graph.far_end(**port).is_some()).count();
        let ports = switch.ports.len();
        let _ =
            writeln!(text, "switch {}  {use_now}, {linked} of {ports} ports linked", switch.name);
    }
}
