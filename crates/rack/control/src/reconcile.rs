//! What to do next, from intent and observation: pure decisions, carried out by `core`.
//!
//! Checks everything at each tick. That is simple and cannot miss anything; a check of 1,000 nodes
//! and 10,000 segments takes 6 ms (benches/state_speed.rs), five times a second.

use std::collections::BTreeMap;

use farpool_api::{SegmentId, TaskState};
use farpool_switch::Circuit;

use crate::model::record::SegmentRecord;
use crate::model::{Command, Node, RECLAIM_DEADLINE_MS, State};

/// Returns everything that is due at `now_ms`.
pub fn due(state: &State, now_ms: u64) -> Vec<Command> {
    let mut due = Vec::new();
    let claimed = state.claimed_nodes(now_ms);
    for (name, node) in &state.nodes {
        if node.age_at(now_ms) != node.age {
            due.push(Command::NoteAge { name: name.clone() });
        }
        let moment = Moment { now_ms, is_claimed: claimed.contains(name.as_str()) };
        leave(state, name, node, moment, &mut due);
    }
    for (id, client) in &state.clients {
        if now_ms.saturating_sub(client.heard_ms) > client.record.spec.lease_ms {
            due.push(Command::ExpireClient { id: *id });
        }
    }
    for (id, segment) in &state.segments {
        // A lost node lets go without a report, so nothing else would settle these segments.
        if segment.releasing || segment.evacuated {
            due.push(Command::Settle { id: *id });
        }
    }
    let running = state.tasks.iter().filter(|task| task.state == TaskState::Running);
    due.extend(running.map(|task| Command::CheckTask { id: task.id }));
    due
}

/// What is the same for all segments of a node at a tick.
#[derive(Clone, Copy)]
struct Moment {
    now_ms: u64,
    /// Whether memory of the node is on its way to a tenant.
    is_claimed: bool,
}

/// Adds to `due` what must leave a node, may stay on it after all, or is given up.
fn leave(state: &State, name: &str, node: &Node, moment: Moment, due: &mut Vec<Command>) {
    let Moment { now_ms, is_claimed } = moment;
    let here: Vec<&SegmentRecord> = state
        .on_node
        .get(name)
        .into_iter()
        .flatten()
        .filter_map(|id| state.segments.get(id))
        .filter(|segment| segment.current.node == name && !segment.evacuated)
        .filter(|segment| !segment.releasing && !segment.lost)
        .collect();
    let wanted = wanted_back(state, name, node, &here);
    for segment in here {
        let Some(runtime) = state.runtime.get(&segment.id) else { continue };
        let id = segment.id;
        if runtime.deadline_ms.is_some_and(|deadline| deadline <= now_ms) {
            due.push(Command::GiveUp { id });
            continue;
        }
        let reclaimed = wanted.contains(&id);
        let draining = node.record.draining;
        // It leaves for a tenant that is within its promise, as long as that waits for it.
        if runtime.yielding && !reclaimed && is_claimed {
            continue;
        }
        let waits = runtime.deadline_ms.is_some() || runtime.retry_ms.is_some();
        let seeks_only = draining && runtime.deadline_ms.is_none();
        if !reclaimed && waits && !seeks_only {
            due.push(Command::Stay { id });
        } else if reclaimed || draining {
            let deadline_ms = reclaimed.then_some(now_ms + RECLAIM_DEADLINE_MS);
            let hurries = deadline_ms.is_some() && runtime.deadline_ms.is_none();
            let seeks = segment.target.is_none()
                && runtime.retry_ms.is_none_or(|retry_ms| retry_ms <= now_ms);
            if hurries || seeks {
                due.push(Command::Evacuate { id, deadline_ms });
            }
        }
    }
}

/// Returns the segments whose memory a donor gets back, so that no more is granted than it lends:
/// first those that are leaving already, then the largest, so that few programs are disturbed.
fn wanted_back(state: &State, name: &str, node: &Node, here: &[&SegmentRecord]) -> Vec<SegmentId> {
    let lendable_bytes = node.lendable_bytes();
    let mut over_bytes = state.granted_bytes(name).saturating_sub(lendable_bytes);
    if over_bytes == 0 {
        return Vec::new();
    }
    let mut candidates = here.to_vec();
    let hurries = |segment: &SegmentRecord| {
        state.runtime.get(&segment.id).is_some_and(|runtime| runtime.deadline_ms.is_some())
    };
    candidates.sort_by_key(|segment| {
        let bytes = std::cmp::Reverse(segment.current.bytes());
        (!hurries(segment), segment.target.is_none(), bytes, segment.id)
    });
    let mut wanted = Vec::new();
    for segment in candidates {
        if over_bytes == 0 {
            break;
        }
        over_bytes = over_bytes.saturating_sub(segment.current.bytes());
        wanted.push(segment.id);
    }
    wanted
}

/// What to change on a switch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct SwitchSteps {
    /// Taken down first, because ports may be used again.
    pub disconnect: Vec<Circuit>,
    pub connect: Vec<Circuit>,
}

/// Returns the circuits that each switch should have.
pub(crate) fn wanted_circuits(state: &State) -> BTreeMap<String, Vec<Circuit>> {
    let mut wanted: BTreeMap<String, Vec<Circuit>> = BTreeMap::new();
    for circuit in state.circuit_list().circuits {
        if let Some(pair) = Circuit::new(circuit.from_port, circuit.to_port) {
            wanted.entry(circuit.switch).or_default().push(pair);
        }
    }
    wanted
}

/// Returns the steps from the circuits that are up to the wanted ones.
pub(crate) fn switch_steps(wanted: &[Circuit], standing: &[Circuit]) -> SwitchSteps {
    let without = |all: &[Circuit], others: &[Circuit]| {
        all.iter().filter(|circuit| !others.contains(circuit)).copied().collect()
    };
    SwitchSteps { disconnect: without(standing, wanted), connect: without(wanted, standing) }
}
