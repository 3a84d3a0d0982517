//! Metrics for Prometheus, made from the state on request.

use std::sync::atomic::AtomicU64;

use farpool_api::{NodeState, SegmentState};
use farpool_http::metrics::{register_counters, register_gauges};
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

/// Returns the metrics of `/metrics`; for a standby, only that it is one.
pub(crate) fn registry(core: Option<&Core>) -> Registry {
    let mut registry = Registry::with_prefix("farpool_control");
    let leads = u64::from(core.is_some());
    register_gauges(&mut registry, None, &[("leader", "Whether this controller leads", leads)]);
    if let Some(core) = core {
        let (durable, _) = core.commits();
        register_counters(&mut registry, &[("changes_stored", "Changes made durable", durable)]);
        core.peek(|state, now_ms| of_state(&mut registry, state, now_ms));
    }
    registry
}

fn of_state(registry: &mut Registry, state: &State, now_ms: u64) {
    let nodes = Labelled::default();
    let (mut donated, mut granted) = (0_u64, 0_u64);
    for (_, label) in NODE_STATES {
        nodes.get_or_create(&vec![("state", label)]).set(0);
    }
    for node in state.node_list(now_ms).nodes {
        let label = NODE_STATES.iter().find(|(state, _)| *state == node.state);
        let label = label.map_or("", |(_, label)| label);
        nodes.get_or_create(&vec![("state", label)]).inc();
        donated = donated.saturating_add(node.donate_bytes);
        granted = granted.saturating_add(node.granted_bytes);
    }
    registry.register("nodes", "Nodes by state", nodes);
    let bytes = [
        ("donated", "Memory that nodes may lend", donated),
        ("granted", "Memory granted on nodes", granted),
    ];
    register_gauges(registry, Some(Unit::Bytes), &bytes);
    let segments = Labelled::default();
    for (_, label) in SEGMENT_STATES {
        segments.get_or_create(&vec![("state", label)]).set(0);
    }
    for runtime in state.runtime.values() {
        let label = SEGMENT_STATES.iter().find(|(state, _)| *state == runtime.state);
        segments.get_or_create(&vec![("state", label.map_or("", |(_, label)| label))]).inc();
    }
    registry.register("segments", "Segments by state", segments);
    register_gauges(registry, None, &[("clients", "Clients", state.clients.len() as u64)]);
}
