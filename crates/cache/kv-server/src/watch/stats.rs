//! The sections of `stats`, under memcached's names.

use std::sync::atomic::Ordering;

use farpool_kernel::process_cpu_time;

use crate::settings::{Dialect, Settings, Shared};
use crate::tls::{ClientCertificates, TlsSettings};
use crate::watch::report::{ShardReport, TierReport};
use farpool_kv_store::clock::Clock;
use farpool_kv_store::observe::prefix::{self, PrefixCounts};
use farpool_kv_store::quota::QuotaReport;

fn push(out: &mut Vec<u8>, name: &str, value: impl std::fmt::Display) {
    out.extend_from_slice(format!("STAT {name} {value}\r\n").as_bytes());
}

fn push_all(out: &mut Vec<u8>, figures: &[(&str, u64)]) {
    figures.iter().for_each(|&(name, value)| push(out, name, value));
}

/// `stats`.
pub(crate) fn push_general(shared: &Shared, clock: &Clock, sum: &ShardReport, out: &mut Vec<u8>) {
    push(out, "pid", std::process::id());
    push(out, "uptime", clock.uptime_s());
    push(out, "time", clock.unix_s());
    push(out, "version", shared.settings.compat.version());
    push(out, "farpool_version", env!("CARGO_PKG_VERSION"));
    push(out, "pointer_size", usize::BITS);
    push_processor_time(out);
    push_connections(shared, sum, out);
    push_commands(sum, out);
    let thread = &sum.thread;
    push_all(
        out,
        &[
            ("auth_cmds", thread.auth_commands),
            ("auth_errors", thread.auth_errors),
            ("idle_kicks", thread.idle_kicks),
            ("bytes_read", thread.bytes_read),
            ("bytes_written", thread.bytes_written),
            ("limit_maxbytes", shared.memory_bytes.load(Ordering::Relaxed)),
            ("accepting_conns", 1),
            ("listen_disabled_num", 0),
            ("threads", shared.shards() as u64),
            ("conn_yields", thread.yields),
            ("requests_forwarded", thread.forwarded),
            ("log_worker_dropped", thread.journal_dropped),
            ("log_worker_written", thread.journal_written),
            ("log_watcher_skipped", thread.watcher_skipped),
            ("log_watcher_sent", thread.watcher_sent),
            ("log_watchers", shared.watchers.count() as u64),
            ("hash_bytes", sum.index_bytes),
            ("hash_overflow_items", sum.overflow_entries),
            ("policy_bytes", sum.policy_bytes),
            ("memory_used_bytes", sum.used_bytes),
            ("read_buf_bytes", sum.held_bytes),
            ("read_buf_oom", thread.read_buf_oom),
            ("response_obj_oom", thread.response_obj_oom),
            ("bytes", sum.item_bytes),
            ("curr_items", sum.items),
            ("total_items", sum.store.total_items),
            ("evictions", sum.store.evictions),
            ("evicted_unfetched", sum.store.evicted_unfetched),
            ("expired_unfetched", sum.store.expired_unfetched),
            ("reclaimed", sum.store.reclaimed),
            ("items_moved", sum.store.moved),
            ("lru_crawler_starts", sum.store.expiry_rounds),
            // A table of entries of eight bytes would have two to this power.
            ("hash_power_level", (sum.index_bytes / 8).max(1).ilog2().into()),
        ],
    );
    push_all(out, &FIGURES_WITHOUT_MEANING);
    moves(sum).iter().for_each(|(name, value)| push(out, name, value));
    push_leases(shared, sum, out);
    if let Some(tls) = &shared.settings.tls {
        push(out, "ssl_handshake_errors", thread.tls_handshake_errors);
        push(out, "time_since_server_cert_refresh", tls.age_s());
    }
    push_far(shared, sum, out);
    push_tier("far", sum.lower_items - sum.flash_items, &sum.far, out);
    push_tier("flash", sum.flash_items, &sum.flash, out);
    if sum.far.capacity_bytes + sum.flash.capacity_bytes > 0 {
        push(out, "lower_late", sum.late);
    }
    out.extend_from_slice(b"END\r\n");
}

fn push_leases(shared: &Shared, sum: &ShardReport, out: &mut Vec<u8>) {
    if shared.settings.keyvault_leases {
        push_all(
            out,
            &[
                ("leases", sum.store.leases),
                ("leases_refused", sum.store.leases_refused),
                ("leases_held", sum.leases_held),
                ("leased_bytes", sum.leased_bytes),
            ],
        );
    }
}

/// Far memory as it comes and goes.
fn push_far(shared: &Shared, sum: &ShardReport, out: &mut Vec<u8>) {
    if shared.settings.far.is_none() {
        return;
    }
    let far = &shared.far;
    push_all(
        out,
        &[
            ("far_wanted_bytes", far.wanted_bytes.load(Ordering::Relaxed)),
            ("far_granted_bytes", far.granted_bytes.load(Ordering::Relaxed)),
            ("far_leaving_bytes", far.leaving_bytes.load(Ordering::Relaxed)),
            ("far_reclaims", far.reclaims.load(Ordering::Relaxed)),
            ("far_reclaimed_moved", sum.far.counts.moved),
            ("far_reclaimed_spilled", sum.reclaim.spilled),
            ("far_reclaimed_dropped", sum.reclaim.dropped),
            ("far_grants_lost", far.lost_grants.load(Ordering::Relaxed)),
            ("far_items_lost", sum.reclaim.lost),
        ],
    );
}

fn push_tier(name: &str, items: u64, tier: &TierReport, out: &mut Vec<u8>) {
    let counts = &tier.counts;
    // A tier that has lost all its memory is still reported.
    if tier.capacity_bytes == 0 && counts.records_written == 0 && items == 0 {
        return;
    }
    for (what, value) in [
        ("items", items),
        ("limit_bytes", tier.capacity_bytes),
        ("reads", counts.reads),
        ("reads_at_once", counts.reads_at_once),
        ("reads_failed", counts.reads_failed),
        ("reads_gone", counts.reads_gone),
        ("served", tier.served),
        ("promoted", tier.promoted),
        ("written", counts.records_written),
        ("bytes_written", counts.bytes_written),
        ("refused", counts.refused),
        ("over_budget", counts.over_budget),
        ("kept", counts.kept),
        ("evictions", counts.dropped),
        ("zones_lost", counts.zones_lost),
        ("broken_shards", tier.broken),
    ] {
        push(out, &format!("{name}_{what}"), value);
    }
}

fn push_processor_time(out: &mut Vec<u8>) {
    // The kernel tells user and system time apart in /proc only, in ticks.
    let ticks = std::fs::read_to_string("/proc/self/stat").ok().and_then(|text| {
        let mut fields = text.rsplit(')').next()?.split_whitespace().skip(11);
        Some((fields.next()?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?))
    });
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let seconds = |ticks: u64| {
        format!("{}.{:06}", ticks / per_second, ticks % per_second * 1_000_000 / per_second)
    };
    let whole_s = process_cpu_time().as_secs();
    let (user, system) = ticks.unwrap_or((whole_s.saturating_mul(per_second), 0));
    push(out, "rusage_user", seconds(user));
    push(out, "rusage_system", seconds(system));
}

fn push_connections(shared: &Shared, sum: &ShardReport, out: &mut Vec<u8>) {
    push_all(
        out,
        &[
            ("max_connections", shared.settings.connections_max),
            ("curr_connections", sum.thread.connections),
            ("total_connections", shared.total_connections.load(Ordering::Relaxed)),
            ("rejected_connections", shared.rejected_connections.load(Ordering::Relaxed)),
            ("connection_structures", sum.thread.connections),
        ],
    );
}

fn push_commands(sum: &ShardReport, out: &mut Vec<u8>) {
    let (commands, store) = (&sum.commands, &sum.store);
    push_all(
        out,
        &[
            ("cmd_get", commands.cmd_get),
            ("cmd_set", commands.cmd_set),
            ("cmd_flush", sum.thread.flush_commands),
            ("cmd_touch", commands.cmd_touch),
            ("cmd_meta", commands.cmd_meta),
            ("get_hits", commands.get_hits),
            ("get_misses", commands.get_misses),
            ("get_expired", store.get_expired),
            ("get_flushed", store.get_flushed),
            ("delete_misses", commands.delete_misses),
            ("delete_hits", commands.delete_hits),
            ("incr_misses", commands.incr_misses),
            ("incr_hits", commands.incr_hits),
            ("decr_misses", commands.decr_misses),
            ("decr_hits", commands.decr_hits),
            ("cas_misses", commands.cas_misses),
            ("cas_hits", commands.cas_hits),
            ("cas_badval", commands.cas_badval),
            ("touch_hits", commands.touch_hits),
            ("touch_misses", commands.touch_misses),
            ("store_too_large", commands.store_too_large),
            ("store_no_memory", commands.store_no_memory),
        ],
    );
}

/// Figures of `stats` about what memcached has and Farpool does not: exporters and dashboards ask
/// for them.
const FIGURES_WITHOUT_MEANING: [(&str, u64); 9] = [
    ("time_in_listen_disabled_us", 0),
    ("hash_is_expanding", 0),
    ("slab_reassign_running", 0),
    ("slabs_moved", 0),
    ("slab_global_page_pool", 0),
    ("lru_crawler_running", 0),
    ("lru_maintainer_juggles", 0),
    ("malloc_fails", 0),
    ("lru_bumps_dropped", 0),
];

/// Figures of `stats` and of its only class that memcached has about its queues. There is one queue
/// here, which is memcached's cold one; what looks for expired items is its crawler, and a client
/// that stores evicts by itself.
fn moves(sum: &ShardReport) -> [(&'static str, u64); 8] {
    let store = &sum.store;
    [
        ("evicted_active", 0),
        ("crawler_reclaimed", store.expiry_reclaimed),
        ("crawler_items_checked", store.expiry_checked),
        ("lrutail_reflocked", 0),
        ("moves_to_cold", 0),
        ("moves_to_warm", 0),
        ("moves_within_lru", store.moved),
        ("direct_reclaims", store.evictions),
    ]
}

/// `stats items`: items of all sizes are in one class here.
pub(crate) fn push_items(sum: &ShardReport, out: &mut Vec<u8>) {
    let (commands, store) = (&sum.commands, &sum.store);
    let figures = [
        ("number", sum.items),
        ("number_hot", 0),
        ("number_warm", 0),
        ("number_cold", sum.items),
        ("number_temp", 0),
        ("age_hot", 0),
        ("age_warm", 0),
        ("age", sum.age_s),
        ("mem_requested", sum.item_bytes),
        ("evicted", store.evictions),
        ("evicted_nonzero", store.evicted_nonzero),
        ("evicted_time", store.evicted_idle_s),
        ("outofmemory", commands.store_no_memory),
        ("tailrepairs", 0),
        ("reclaimed", store.reclaimed),
        ("expired_unfetched", store.expired_unfetched),
        ("evicted_unfetched", store.evicted_unfetched),
        ("hits_to_hot", 0),
        ("hits_to_warm", 0),
        ("hits_to_cold", commands.get_hits),
        ("hits_to_temp", 0),
    ];
    if sum.items > 0 {
        let moves = moves(sum);
        let all = figures.iter().chain(&moves);
        all.for_each(|(name, value)| push(out, &format!("items:1:{name}"), value));
    }
    out.extend_from_slice(b"END\r\n");
}

/// The pages in which memory is counted for `stats slabs`, in bytes: memcached's.
const PAGE_BYTES: u64 = 1 << 20;

/// `stats slabs`: items of all sizes are in one class here.
pub(crate) fn push_slabs(sum: &ShardReport, out: &mut Vec<u8>) {
    let commands = &sum.commands;
    // Items lie one after the other: a chunk has the mean size of an item.
    let chunk_bytes = (sum.item_bytes / sum.items.max(1)).max(1);
    let chunks = (sum.used_bytes / chunk_bytes).max(sum.items);
    push_all(
        out,
        &[
            ("1:chunk_size", chunk_bytes),
            ("1:chunks_per_page", PAGE_BYTES / chunk_bytes),
            ("1:total_pages", sum.used_bytes.div_ceil(PAGE_BYTES)),
            ("1:total_chunks", chunks),
            ("1:used_chunks", sum.items),
            ("1:free_chunks", chunks - sum.items),
            ("1:free_chunks_end", 0),
            ("1:mem_requested", sum.item_bytes),
            ("1:get_hits", commands.get_hits),
            ("1:cmd_set", commands.cmd_set),
            ("1:delete_hits", commands.delete_hits),
            ("1:incr_hits", commands.incr_hits),
            ("1:decr_hits", commands.decr_hits),
            ("1:cas_hits", commands.cas_hits),
            ("1:cas_badval", commands.cas_badval),
            ("1:touch_hits", commands.touch_hits),
            ("active_slabs", 1),
            ("total_malloced", sum.used_bytes),
        ],
    );
    out.extend_from_slice(b"END\r\n");
}

/// `stats detail dump`, from what all shards have published.
pub(crate) fn push_prefixes(shared: &Shared, out: &mut Vec<u8>) {
    let observed = shared.observed_by_all();
    for it in prefix::join(observed.iter().flat_map(|it| &it.prefixes)) {
        let PrefixCounts { gets, hits, sets, deletes } = it.counts;
        out.extend_from_slice(b"PREFIX ");
        out.extend_from_slice(&it.prefix);
        let counts = format!(" get {gets} hit {hits} set {sets} del {deletes}\r\n");
        out.extend_from_slice(counts.as_bytes());
    }
    out.extend_from_slice(b"END\r\n");
}

/// `stats quotas`, from what all shards have published.
pub(crate) fn push_quotas(shared: &Shared, out: &mut Vec<u8>) {
    for it in shared.quotas() {
        out.extend_from_slice(b"QUOTA ");
        out.extend_from_slice(&it.prefix);
        let QuotaReport { limit_bytes, used_bytes, items, evictions, .. } = it;
        let figures = format!(
            " limit {limit_bytes} used {used_bytes} items {items} evictions {evictions}\r\n"
        );
        out.extend_from_slice(figures.as_bytes());
    }
    out.extend_from_slice(b"END\r\n");
}

/// The part of `stats settings` about TLS.
fn push_tls_settings(settings: &Settings, out: &mut Vec<u8>) {
    push(out, "ssl_enabled", yes_or_no(settings.tls.is_some()));
    let Some(tls) = &settings.tls else { return };
    let TlsSettings { chain, key, client_roots, .. } = &tls.settings;
    let mode = match tls.settings.client_certificates {
        ClientCertificates::Unasked => 0,
        ClientCertificates::Asked => 1,
        ClientCertificates::Required => 2,
    };
    let roots = client_roots.as_ref().map_or_else(|| "NULL".into(), |it| it.display().to_string());
    push(out, "ssl_chain_cert", chain.display());
    push(out, "ssl_key", key.display());
    push(out, "ssl_verify_mode", mode);
    push(out, "ssl_ca_cert", roots);
    push(out, "ssl_session_cache", yes_or_no(tls.settings.keeps_sessions));
    let oldest = if tls.settings.only_newest { "tlsv1.3" } else { "tlsv1.2" };
    push(out, "ssl_min_version", oldest);
}

/// Settings about memcached's queues and slabs, for exporters and dashboards. Expired items are
/// freed without being asked for, which there the crawler does; there is one queue, and no slabs.
const SETTINGS_WITHOUT_MEANING: [(&str, &str); 18] = [
    ("growth_factor", "1.00"),
    ("chunk_size", "1"),
    ("hashpower_init", "0"),
    ("slab_reassign", "no"),
    ("slab_automove", "0"),
    ("slab_automove_ratio", "0.00"),
    ("slab_automove_window", "0"),
    ("lru_crawler", "yes"),
    ("lru_crawler_sleep", "0"),
    ("lru_crawler_tocrawl", "0"),
    ("tail_repair_time", "0"),
    ("lru_maintainer_thread", "no"),
    ("lru_segmented", "no"),
    ("hot_lru_pct", "0"),
    ("warm_lru_pct", "0"),
    ("hot_max_factor", "0.00"),
    ("warm_max_factor", "0.00"),
    ("temp_lru", "no"),
];

/// memcached's name for a protocol.
const fn protocol_name(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Auto => "auto-negotiate",
        Dialect::Text => "ascii",
        Dialect::Binary => "binary",
    }
}

const fn yes_or_no(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

/// `stats settings`.
pub(crate) fn push_settings(shared: &Shared, out: &mut Vec<u8>) {
    let settings = &shared.settings;
    let port = settings.addresses.first().map_or(0, |address| address.port());
    let path = settings
        .socket_path
        .as_ref()
        .map_or_else(|| "NULL".into(), |path| path.display().to_string());
    let interfaces: Vec<String> =
        settings.addresses.iter().map(|address| address.ip().to_string()).collect();
    let credentials = settings.credentials_file.as_ref();
    push(out, "maxbytes", shared.memory_bytes.load(Ordering::Relaxed));
    push(out, "maxconns", settings.connections_max);
    push(out, "tcpport", port);
    push(out, "udpport", 0);
    push(out, "inter", if interfaces.is_empty() { "NULL".into() } else { interfaces.join(",") });
    push(out, "verbosity", shared.verbosity.load(Ordering::Relaxed));
    push(out, "oldest", 0);
    push(out, "evictions", if settings.evicts { "on" } else { "off" });
    push(out, "eviction_policy", settings.policy);
    push(out, "domain_socket", path);
    push(out, "umask", format!("{:o}", settings.socket_mode));
    push(out, "shutdown_command", yes_or_no(settings.allows_shutdown));
    push(out, "num_threads", settings.threads);
    push(out, "stat_key_prefix", char::from(settings.prefix_delimiter));
    push(out, "detail_enabled", yes_or_no(shared.counts_prefixes.load(Ordering::Relaxed)));
    push(out, "reqs_per_event", settings.requests_per_turn);
    push(out, "cas_enabled", "yes");
    push(out, "tcp_backlog", settings.backlog);
    push(out, "binding_protocol", protocol_name(settings.dialect));
    push(out, "auth_enabled_sasl", yes_or_no(settings.credentials.is_some()));
    push(
        out,
        "auth_enabled_ascii",
        credentials.map_or_else(|| "no".into(), |path| path.display().to_string()),
    );
    push(out, "item_size_max", settings.item_bytes_max);
    push(out, "maxconns_fast", "yes");
    push(out, "flush_enabled", yes_or_no(settings.allows_flush));
    push(out, "dump_enabled", yes_or_no(settings.allows_dump));
    push(out, "hash_algorithm", "xxh3");
    SETTINGS_WITHOUT_MEANING.iter().for_each(|(name, value)| push(out, name, value));
    push(out, "idle_timeout", settings.idle_timeout_s);
    push_tls_settings(settings, out);
    out.extend_from_slice(b"END\r\n");
}
