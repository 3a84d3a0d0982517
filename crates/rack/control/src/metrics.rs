//! Figures for Prometheus, made from the state when they are asked for.

use std::sync::atomic::AtomicU64;

use farpool_api::{NodeState, SegmentState};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::core::Core;
use crate::model::State;

type Labelled = Family<Vec<(&'static str, &'static str)>, Gauge<u64, AtomicU64>>;

const NODE_STATES: [(NodeState, &str); 4] = [
    (NodeState::Up, "up"),
    (NodeState::Late, "late"),
    (NodeState::Lost, "lost"),
    (NodeState::Draining, "draining"),
];

const SEGMENT_STATES: [(SegmentState, &str); 5] = [
    (SegmentState::Pending, "pending"),
    (SegmentState::Ready, "ready"),
    (SegmentState::Moving, "moving"),
    (SegmentState::Releasing, "releasing"),
    (SegmentState::Lost, "lost"),
];

/// The text of `/metrics`; of a standby, only that it is one.
pub(crate) fn text(core: Option<&Core>) -> String {
    let mut registry = Registry::with_prefix("farpool_control");
    let leader: Gauge<u64, AtomicU64> = Gauge::default();
    leader.set(u64::from(core.is_some()));
    registry.register("leader", "Whether this controller leads", leader);
    if let Some(core) = core {
        let (durable, _) = core.commits();
        let commits: Counter = Counter::default();
        commits.inc_by(durable);
        registry.register("changes_stored", "Changes made durable", commits);
        core.peek(|state, now_ms| of_state(&mut registry, state, now_ms));
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

fn of_state(registry: &mut Registry, state: &State, now_ms: u64) {
    let nodes = Labelled::default();
    let mut bytes = [0_u64; 2];
    for (_, label) in NODE_STATES {
        nodes.get_or_create(&vec![("state", label)]).set(0);
    }
    for node in state.node_list(now_ms).nodes {
        let label = NODE_STATES.iter().find(|(state, _)| *state == node.state);
        let label = label.map_or("", |(_, label)| label);
        nodes.get_or_create(&vec![("state", label)]).inc();
        bytes[0] = bytes[0].saturating_add(node.donate_bytes);
        bytes[1] = bytes[1].saturating_add(node.granted_bytes);
    }
    registry.register("nodes", "Nodes by state", nodes);
    let names = [("donated", "Memory that nodes may lend"), ("granted", "Memory granted on nodes")];
    for ((name, help), bytes) in names.into_iter().zip(bytes) {
        let gauge: Gauge<u64, AtomicU64> = Gauge::default();
        gauge.set(bytes);
        registry.register_with_unit(name, help, Unit::Bytes, gauge);
    }
    let segments = Labelled::default();
    for (_, label) in SEGMENT_STATES {
        segments.get_or_create(&vec![("state", label)]).set(0);
    }
    for runtime in state.runtime.values() {
        let label = SEGMENT_STATES.iter().find(|(state, _)| *state == runtime.state);
        segments.get_or_create(&vec![("state", label.map_or("", |(_, label)| label))]).inc();
    }
    registry.register("segments", "Segments by state", segments);
    let clients: Gauge<u64, AtomicU64> = Gauge::default();
    clients.set(state.clients.len() as u64);
    registry.register("clients", "Clients", clients);
}
