//! Metrics for Prometheus, made from the state on request.

use std::sync::atomic::AtomicU64;

use farpool_http::metrics::{register_counters, register_gauges};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::core::Core;
use crate::status::{Status, status};

type Labelled = Family<Vec<(&'static str, &'static str)>, Gauge<u64, AtomicU64>>;

const CLASSES: [&str; 3] = ["client", "neutral", "server"];

/// Returns the metrics of `/metrics`.
pub(super) fn registry(core: &Core) -> Registry {
    let mut registry = Registry::with_prefix("farpool_collaborate");
    register(&mut registry, &status(core));
    registry
}

fn register(registry: &mut Registry, status: &Status) {
    let class = Labelled::default();
    for name in CLASSES {
        class.get_or_create(&vec![("class", name)]).set(u64::from(name == status.class));
    }
    registry.register("class", "1 for what the node is", class);
    let bytes = [
        ("own", "What this node's programs need, memory on other nodes included", status.own_bytes),
        ("total", "Memory of the node", status.total_bytes),
        ("offered", "What the node would lend in all", status.offered_bytes),
        ("lent", "What it has lent", status.lent_bytes),
        ("lent_used", "What of that holds data", status.lent_used_bytes),
        ("wanted", "What its programs want from others", status.wanted_bytes),
        ("borrowed", "What they have there", status.borrowed_bytes),
        ("borrowed_used", "What of that holds data", status.borrowed_used_bytes),
        ("here", "Granted to its own programs on its own blade", status.here_bytes),
    ];
    register_gauges(registry, Some(Unit::Bytes), &bytes);
    let counts = [
        ("peers", "Nodes known", status.peers.len() as u64),
        ("clients", "Programs of this node", status.clients.len() as u64),
    ];
    register_gauges(registry, None, &counts);
    let datagrams = status.datagrams;
    let totals = [
        ("grants_made", "Grants to others", status.grants_made),
        ("grants_used", "Grants of others", status.grants_used),
        ("grants_revoked", "Grants to others that ended", status.grants_revoked),
        ("grants_cut_off", "Grants that ended before they were left", status.grants_cut_off),
        ("grants_unused", "Grants taken back because they held no data", status.grants_unused),
        ("moves", "Grants that programs here had to leave", status.moves),
        ("grants_lost", "Grants that were lost with data", status.grants_lost),
        ("datagrams_sent", "Datagrams sent", datagrams.sent),
        ("datagrams_received", "Datagrams received", datagrams.received),
        ("datagrams_damaged", "Datagrams that could not be read", datagrams.damaged),
        ("datagrams_misdirected", "Datagrams for somebody else", datagrams.misdirected),
        ("datagrams_other_version", "Datagrams of another version", datagrams.other_version),
        ("datagrams_unauthentic", "Datagrams not made with the rack key", datagrams.unauthentic),
        ("datagrams_replayed", "Signed datagrams that came again", datagrams.replayed),
        ("datagrams_ahead", "Datagrams of a life that begins in the future", datagrams.ahead),
    ];
    register_counters(registry, &totals);
}
