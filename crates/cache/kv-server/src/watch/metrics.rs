//! `/metrics` for Prometheus and `/keys` for people, on a thread of their own. The serving threads
//! publish their figures once a second, so a query costs them nothing.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use farpool_http::metrics::{register_counters, register_gauges};
use farpool_http::serve::{self as http, Connections, Limits};
use farpool_kernel::lock;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use serde_json::json;

use crate::settings::Shared;
use crate::watch::report::{ShardReport, TierReport};
use farpool_kv_store::observe::hot::HotKey;
use farpool_kv_store::observe::prefix::{self, PrefixCounts};
use farpool_kv_store::observe::{self, Observed};

/// The most prefixes in the metrics: each costs four series.
const PREFIXES_MAX: usize = 64;
/// Most connections: a few scrapers and people. A further one is closed, so that the descriptors of
/// the cache's clients are safe.
const CONNECTIONS_MAX: usize = 64;

type Labelled = Family<Vec<(&'static str, &'static str)>, Counter>;

/// Serves until the process ends.
pub(crate) fn serve(listener: TcpListener, shared: Arc<Shared>) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("kv-metrics".into()).spawn(move || {
        runtime.block_on(async {
            let router = Router::new()
                .route("/metrics", get(answer))
                .route("/keys", get(keys))
                .with_state(shared);
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => {
                    let connections = Connections::new(Limits::of(CONNECTIONS_MAX));
                    http::serve(listener, router, connections, None).await;
                }
                Err(error) => tracing::error!(%error, "metrics cannot be served"),
            }
        });
    })?;
    Ok(())
}

/// Binds the address.
pub(crate) fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address)
}

async fn answer(State(shared): State<Arc<Shared>>) -> Response {
    farpool_http::metrics::answer(&registry(&shared))
}

/// The hottest keys, and the miss ratios at other sizes of memory, as JSON.
async fn keys(State(shared): State<Arc<Shared>>) -> Response {
    let observed = shared.observed_by_all();
    let sampled: u64 = observed.iter().map(|it| it.sampled).sum();
    let mut hot: Vec<&HotKey> = observed.iter().flat_map(|it| &it.hot).collect();
    hot.sort_by_key(|it| std::cmp::Reverse(it.reads - it.error));
    let share = |reads: u64| reads as f64 / sampled.max(1) as f64;
    let hot: Vec<serde_json::Value> = hot
        .into_iter()
        .map(|it| {
            let key = String::from_utf8_lossy(&it.key);
            json!({ "key": key, "share_of_reads": share(it.reads - it.error), "share_at_most": share(it.reads) })
        })
        .collect();
    let memory_bytes = shared.memory_bytes.load(Ordering::Relaxed);
    let curve = |ratios: Option<[f64; observe::TIMES.len()]>| -> Vec<serde_json::Value> {
        ratios
            .into_iter()
            .flat_map(|ratios| observe::TIMES.into_iter().zip(ratios))
            .map(|(times, ratio)| json!({ "memory_bytes": memory_bytes as f64 * times, "miss_ratio": ratio }))
            .collect()
    };
    let prefixes: Vec<serde_json::Value> =
        prefix::join(observed.iter().flat_map(|it| &it.prefixes))
            .into_iter()
            .map(|it| {
                let PrefixCounts { gets, hits, sets, deletes } = it.counts;
                json!({
                    "prefix": String::from_utf8_lossy(&it.prefix),
                    "gets": gets,
                    "hits": hits,
                    "sets": sets,
                    "deletes": deletes,
                    "expected_misses_alone": curve(it.miss_ratios),
                })
            })
            .collect();
    let keys = json!({
        "reads_sampled": sampled,
        "hot": hot,
        "expected_misses": curve(joined_ratios(&observed)),
        "prefixes": prefixes,
    });
    farpool_http::json(StatusCode::OK, &keys)
}

fn joined_ratios(observed: &[Observed]) -> Option<[f64; observe::TIMES.len()]> {
    observe::join_ratios(observed.iter().filter_map(|it| Some((it.reads, it.miss_ratios?))))
}

/// The sum of the figures that all threads published last.
fn sum(shared: &Shared) -> ShardReport {
    let mut sum = ShardReport::default();
    for report in &shared.reports {
        sum.add(&lock(report));
    }
    sum
}

/// All metrics that apply now.
fn registry(shared: &Shared) -> Registry {
    let mut registry = Registry::with_prefix("farpool_kv");
    let sum = sum(shared);
    register_commands(&mut registry, &sum);
    register_store(&mut registry, shared, &sum);
    register_leases(&mut registry, shared, &sum);
    register_far(&mut registry, shared, &sum);
    register_tier(&mut registry, "far", sum.lower_items - sum.flash_items, &sum.far);
    register_tier(&mut registry, "flash", sum.flash_items, &sum.flash);
    register_curve(&mut registry, shared);
    register_prefixes(&mut registry, shared);
    register_quotas(&mut registry, shared);
    registry
}

fn register_commands(registry: &mut Registry, sum: &ShardReport) {
    let commands = &sum.commands;
    let results = Labelled::default();
    for (command, result, value) in [
        ("get", "hit", commands.get_hits),
        ("get", "miss", commands.get_misses),
        ("set", "asked", commands.cmd_set),
        ("touch", "hit", commands.touch_hits),
        ("touch", "miss", commands.touch_misses),
        ("delete", "hit", commands.delete_hits),
        ("delete", "miss", commands.delete_misses),
        ("incr", "hit", commands.incr_hits),
        ("incr", "miss", commands.incr_misses),
        ("decr", "hit", commands.decr_hits),
        ("decr", "miss", commands.decr_misses),
        ("cas", "hit", commands.cas_hits),
        ("cas", "miss", commands.cas_misses),
        ("cas", "other", commands.cas_badval),
        ("flush_all", "asked", sum.thread.flush_commands),
    ] {
        results.get_or_create(&vec![("command", command), ("result", result)]).inc_by(value);
    }
    registry.register("commands", "Commands on keys, by outcome", results);
    let thread = &sum.thread;
    register_counters(
        registry,
        &[
            ("bytes_read", "Bytes read from clients", thread.bytes_read),
            ("bytes_written", "Bytes written to clients", thread.bytes_written),
            (
                "requests_forwarded",
                "Requests that another thread's shard answered",
                thread.forwarded,
            ),
            ("yields", "Turns that ended before a client's requests did", thread.yields),
            ("idle_kicks", "Clients sent away because they said nothing", thread.idle_kicks),
            ("auth_errors", "Wrong names or passwords", thread.auth_errors),
            ("store_too_large", "Items refused for their size", commands.store_too_large),
            ("store_no_memory", "Items refused for want of memory", commands.store_no_memory),
        ],
    );
}

fn register_store(registry: &mut Registry, shared: &Shared, sum: &ShardReport) {
    let store = &sum.store;
    register_counters(
        registry,
        &[
            ("evictions", "Items evicted from memory", store.evictions),
            ("evicted_unfetched", "Evicted items that were never read", store.evicted_unfetched),
            ("reclaimed", "Expired items whose memory was reclaimed", store.reclaimed),
            (
                "items_moved",
                "Items moved to keep them another round, or to close holes",
                store.moved,
            ),
            ("items_stored", "Items ever stored", store.total_items),
            (
                "connections_accepted",
                "Connections ever accepted",
                shared.total_connections.load(Ordering::Relaxed),
            ),
            (
                "connections_rejected",
                "Connections refused beyond the limit",
                shared.rejected_connections.load(Ordering::Relaxed),
            ),
        ],
    );
    register_gauges(
        registry,
        None,
        &[
            ("items", "Items in memory", sum.items),
            ("connections", "Clients", sum.thread.connections),
            ("threads", "Threads, each with its shard", shared.shards() as u64),
        ],
    );
    register_gauges(
        registry,
        Some(Unit::Bytes),
        &[
            ("limit", "Memory it may take", shared.memory_bytes.load(Ordering::Relaxed)),
            ("used", "Memory in use: segments, index and policy", sum.used_bytes),
            ("items", "Memory in use by items with their headers", sum.item_bytes),
            ("index", "Memory in use by the index", sum.index_bytes),
            ("policy", "Memory in use by the policy, if not S3-FIFO", sum.policy_bytes),
        ],
    );
    let policy = Info::new(vec![("policy", shared.settings.policy.name())]);
    registry.register("eviction", "Which items go when memory is full", policy);
}

/// Values that clients read where they lie.
fn register_leases(registry: &mut Registry, shared: &Shared, sum: &ShardReport) {
    if !shared.settings.keyvault_leases {
        return;
    }
    let store = &sum.store;
    register_counters(
        registry,
        &[
            ("leases", "Values handed over without a copy", store.leases),
            ("leases_refused", "Values copied because too many were leased", store.leases_refused),
        ],
    );
    register_gauges(
        registry,
        None,
        &[("leases_held", "Values that clients read now", sum.leases_held)],
    );
    let help = "Memory that cannot be evicted as clients read in it";
    register_gauges(registry, Some(Unit::Bytes), &[("leased", help, sum.leased_bytes)]);
}

/// Far memory as it comes and goes.
fn register_far(registry: &mut Registry, shared: &Shared, sum: &ShardReport) {
    if shared.settings.far.is_none() {
        return;
    }
    let far = &shared.far;
    let registry = registry.sub_registry_with_prefix("far");
    register_gauges(
        registry,
        Some(Unit::Bytes),
        &[
            ("wanted", "Far memory that was asked for", far.wanted_bytes.load(Ordering::Relaxed)),
            (
                "granted",
                "Far memory granted and not reclaimed",
                far.granted_bytes.load(Ordering::Relaxed),
            ),
            (
                "leaving",
                "Far memory reclaimed or lost, and not returned yet",
                far.leaving_bytes.load(Ordering::Relaxed),
            ),
        ],
    );
    register_counters(
        registry,
        &[
            (
                "reclaims",
                "Grants of far memory that were reclaimed",
                far.reclaims.load(Ordering::Relaxed),
            ),
            (
                "reclaimed_moved",
                "Items of reclaimed grants that moved to other grants",
                sum.far.counts.moved,
            ),
            (
                "reclaimed_spilled",
                "Items of reclaimed grants that went to flash",
                sum.reclaim.spilled,
            ),
            (
                "reclaimed_dropped",
                "Items of reclaimed grants that were dropped",
                sum.reclaim.dropped,
            ),
            (
                "grants_lost",
                "Grants of far memory lost without notice",
                far.lost_grants.load(Ordering::Relaxed),
            ),
            ("items_lost", "Items lost with these grants", sum.reclaim.lost),
        ],
    );
}

fn register_tier(registry: &mut Registry, name: &str, items: u64, tier: &TierReport) {
    let counts = &tier.counts;
    // A tier that has lost all its memory is still reported.
    if tier.capacity_bytes == 0 && counts.records_written == 0 && items == 0 {
        return;
    }
    let registry = registry.sub_registry_with_prefix(name);
    register_gauges(
        registry,
        None,
        &[
            ("items", "Items in the tier", items),
            ("broken_shards", "Shards whose device failed too often to be written", tier.broken),
        ],
    );
    register_gauges(
        registry,
        Some(Unit::Bytes),
        &[("limit", "Capacity of the tier", tier.capacity_bytes)],
    );
    register_counters(
        registry,
        &[
            ("reads", "Items read from the tier", counts.reads),
            ("reads_failed", "Reads that the tier did not answer", counts.reads_failed),
            ("reads_gone", "Reads whose item was not there any more", counts.reads_gone),
            ("served", "Reads answered without promoting the item", tier.served),
            ("promoted", "Items brought back into memory", tier.promoted),
            ("written", "Items written to the tier", counts.records_written),
            ("written_bytes", "Bytes of items written to the tier", counts.bytes_written),
            ("refused", "Items lost because the tier could not take them in time", counts.refused),
            ("over_budget", "Items lost to the limit on writing", counts.over_budget),
            ("kept", "Items that were hit and kept when their zone was reused", counts.kept),
            ("evictions", "Items dropped when their zone was reused", counts.dropped),
            ("zones_lost", "Zones that could not be written", counts.zones_lost),
        ],
    );
}

/// The miss ratios of an LRU cache of other sizes for the same reads.
fn register_curve(registry: &mut Registry, shared: &Shared) {
    let Some(ratios) = joined_ratios(&shared.observed_by_all()) else { return };
    let gauges: Family<Vec<(&'static str, String)>, Gauge<f64, AtomicU64>> = Family::default();
    for (times, ratio) in observe::TIMES.into_iter().zip(ratios) {
        gauges.get_or_create(&vec![("memory_times", times.to_string())]).set(ratio);
    }
    let help = "Share of the reads that an LRU cache of memory_times the memory would miss";
    registry.register("expected_miss_ratio", help, gauges);
}

/// Commands by prefix, for the busiest prefixes.
fn register_prefixes(registry: &mut Registry, shared: &Shared) {
    let observed = shared.observed_by_all();
    let mut prefixes = prefix::join(observed.iter().flat_map(|it| &it.prefixes));
    if prefixes.is_empty() {
        return;
    }
    prefixes.truncate(PREFIXES_MAX);
    let commands: Family<Vec<(&'static str, String)>, Counter> = Family::default();
    for it in &prefixes {
        let PrefixCounts { gets, hits, sets, deletes } = it.counts;
        for (command, value) in [("get", gets), ("hit", hits), ("set", sets), ("delete", deletes)] {
            let name = String::from_utf8_lossy(&it.prefix).into_owned();
            let labels = vec![("prefix", name), ("command", command.to_owned())];
            commands.get_or_create(&labels).inc_by(value);
        }
    }
    let help = "Commands by prefix of the key; hit counts the reads that found an item";
    registry.register("prefix_commands", help, commands);
}

/// The use of quotas, and the evictions they cause.
fn register_quotas(registry: &mut Registry, shared: &Shared) {
    let quotas = shared.quotas();
    if quotas.is_empty() {
        return;
    }
    let bytes: Family<Vec<(&'static str, String)>, Gauge<u64, AtomicU64>> = Family::default();
    let evictions: Family<Vec<(&'static str, String)>, Counter> = Family::default();
    for it in quotas {
        let prefix = ("prefix", String::from_utf8_lossy(&it.prefix).into_owned());
        for (what, value) in [("limit", it.limit_bytes), ("used", it.used_bytes)] {
            bytes.get_or_create(&vec![prefix.clone(), ("what", what.to_owned())]).set(value);
        }
        evictions.get_or_create(&vec![prefix]).inc_by(it.evictions);
    }
    let help = "Memory that the items of a prefix may take (limit) and take (used)";
    registry.register_with_unit("quota", help, Unit::Bytes, bytes);
    registry.register("quota_evictions", "Items evicted for their prefix's quota", evictions);
}
