//! Requests about the server as a whole.

use std::sync::atomic::Ordering;

use super::dump::{Dump, List};
use super::journal;
use super::report::{Gather, GatherFor, ShardReport};
use super::stats;
use super::tuning;
use super::watchers::Watcher;
use crate::binary;
use crate::clients::connection::{Client, Phase, Watch};
use crate::mail::mailbox::{Ask, ConnectionId};
use crate::settings::Shared;
use crate::worker::Worker;
use farpool_kv_protocol::listing::{SLAB_CLASS, SLAB_CLASSES, lists_our_class};
use farpool_kv_protocol::reply::{BAD_FORMAT, push_line, push_unless};
use farpool_kv_protocol::request::AdminRequest;
use farpool_kv_protocol::token::Words;
use farpool_kv_store::clock::Clock;
use farpool_kv_store::observe::journal::Kinds;

/// The highest verbosity.
pub(crate) const VERBOSITY_MAX: u32 = 3;
/// The smallest limit that `cache_memlimit` accepts, in MiB.
const MEMORY_LIMIT_MIN_MIB: u32 = 8;
/// A number of MiB above this is taken as bytes.
const MEMORY_LIMIT_MAX_MIB: u32 = 1_000_000_000;

/// Answers a request, or begins to gather its answer.
pub(crate) fn answer(
    worker: &mut Worker,
    client: &mut Client,
    id: ConnectionId,
    request: AdminRequest<'_>,
) {
    match request {
        AdminRequest::Version => {
            let version = worker.me.shared.settings.compat.version();
            push_line(&mut worker.clients.out, &format!("VERSION {version}"));
        }
        AdminRequest::MetaNoop => push_line(&mut worker.clients.out, "MN"),
        AdminRequest::Quit => client.phase = Phase::Closing,
        AdminRequest::Verbosity { level, quiet } => {
            worker.me.shared.verbosity.store(level.min(VERBOSITY_MAX), Ordering::Relaxed);
            push_unless(&mut worker.clients.out, quiet, "OK");
        }
        AdminRequest::FlushAll { exptime, quiet } => flush_all(worker, client, id, exptime, quiet),
        AdminRequest::MemoryLimit { mebibytes, quiet } => {
            memory_limit(worker, client, id, mebibytes, quiet)
        }
        AdminRequest::RefreshCertificates { quiet } => refresh_certificates(worker, quiet),
        AdminRequest::Stats { line } => answer_stats(worker, client, id, &Words::of(line)),
        AdminRequest::Shutdown { line } => shutdown(worker, client, &Words::of(line)),
        AdminRequest::Watch { line } => watch(worker, client, id, &Words::of(line)),
        AdminRequest::Tuning { line } => {
            let (words, compat) = (Words::of(line), worker.me.limits.compat);
            if let Some(list) = tuning::list_of_items(&words, compat) {
                return list_items(worker, client, id, list, &words);
            }
            let quiet = tuning::is_quiet(&words, compat);
            push_unless(&mut worker.clients.out, quiet, tuning::answer(&words, compat));
        }
    }
}

/// Has every shard carry out `ask`, and reserves a place for the reply.
pub(crate) fn gather(
    worker: &mut Worker,
    client: &mut Client,
    id: ConnectionId,
    what: GatherFor,
    ask: Ask,
) {
    worker.clients.push_ready(client);
    let shards = worker.me.shared.shards();
    let mut gather = Gather::new(what, shards);
    let own = worker.do_for_all(ask);
    if gather.take(&own) {
        // There is no other shard.
        let reply = gathered(&worker.me.shared, &worker.shard.clock, &gather);
        client.replies.push_ready(&reply);
        return;
    }
    let ticket = client.replies.push_gathered(gather);
    worker.mail.ask_others(&worker.me, id.address(ticket), ask);
}

/// The reply once all shards have contributed.
pub(crate) fn gathered(shared: &Shared, clock: &Clock, gather: &Gather) -> Vec<u8> {
    reply_to(shared, clock, &gather.what, &gather.sum)
}

fn reply_to(shared: &Shared, clock: &Clock, what: &GatherFor, sum: &ShardReport) -> Vec<u8> {
    let mut reply = Vec::new();
    match what {
        GatherFor::Line { line, quiet } => push_unless(&mut reply, *quiet, line),
        GatherFor::MemoryLimit { quiet } => {
            let failed = "MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust";
            push_unless(&mut reply, *quiet, if sum.limit_was_set { "OK" } else { failed });
        }
        GatherFor::Stats => stats::push_general(shared, clock, sum, &mut reply),
        GatherFor::Items => stats::push_items(sum, &mut reply),
        GatherFor::Slabs => stats::push_slabs(sum, &mut reply),
        GatherFor::Prefixes => stats::push_prefixes(shared, &mut reply),
        GatherFor::Quotas => stats::push_quotas(shared, &mut reply),
        GatherFor::Binary { head, what } => {
            return binary::encode(*head, what, &reply_to(shared, clock, what, sum));
        }
    }
    reply
}

fn flush_all(
    worker: &mut Worker,
    client: &mut Client,
    id: ConnectionId,
    exptime: i32,
    quiet: bool,
) {
    worker.me.counts.flush_commands += 1;
    if !worker.me.shared.settings.allows_flush {
        return push_unless(&mut worker.clients.out, quiet, "CLIENT_ERROR flush_all not allowed");
    }
    let at_s = worker.shard.clock.flush_s(exptime.into());
    gather(worker, client, id, GatherFor::Line { line: "OK", quiet }, Ask::Flush { at_s });
}

fn memory_limit(
    worker: &mut Worker,
    client: &mut Client,
    id: ConnectionId,
    mebibytes: u32,
    quiet: bool,
) {
    if mebibytes < MEMORY_LIMIT_MIN_MIB {
        let small = "MEMLIMIT_TOO_SMALL cannot set maxbytes to less than 8m";
        return push_unless(&mut worker.clients.out, quiet, small);
    }
    if mebibytes > MEMORY_LIMIT_MAX_MIB {
        let large = "MEMLIMIT_ADJUST_FAILED input value is megabytes not bytes";
        return push_unless(&mut worker.clients.out, quiet, large);
    }
    let bytes = (mebibytes as usize) << 20;
    worker.me.shared.memory_bytes.store(bytes as u64, Ordering::Relaxed);
    let ask = Ask::SetLimit { bytes: bytes / worker.me.shared.shards() };
    gather(worker, client, id, GatherFor::MemoryLimit { quiet }, ask);
}

/// The sections of `stats` that 1.6.45 also knows by their beginnings, in the order in which it
/// compares them.
const SECTIONS: [&str; 5] = ["reset", "detail", "settings", "cachedump", "conns"];

fn answer_stats(worker: &mut Worker, client: &mut Client, id: ConnectionId, words: &Words<'_>) {
    let compat = worker.me.limits.compat;
    let sections = SECTIONS.map(|name| (name, name.as_bytes()));
    let what = match compat.find(words.get(1), sections).unwrap_or(words.get(1)) {
        b"" => GatherFor::Stats,
        b"items" => GatherFor::Items,
        b"slabs" => GatherFor::Slabs,
        b"quotas" => return gather(worker, client, id, GatherFor::Quotas, Ask::LeaveObserved),
        b"reset" => {
            let line = GatherFor::Line { line: "RESET", quiet: false };
            return gather(worker, client, id, line, Ask::ResetCounts);
        }
        b"settings" => return stats::push_settings(&worker.me.shared, &mut worker.clients.out),
        b"sizes" => {
            worker.clients.out.extend_from_slice(b"STAT sizes_status disabled\r\nEND\r\n");
            return;
        }
        b"detail" => return stats_detail(worker, client, id, words.get(2)),
        b"cachedump" => return cachedump(worker, client, id, words),
        b"conns" => {
            client.dump = Some(Dump::new(List::Connections, usize::MAX));
            return go_on(worker, client, id);
        }
        _ => return push_line(&mut worker.clients.out, "ERROR"),
    };
    gather(worker, client, id, what, Ask::Report);
}

/// Asks for the client's next piece, or ends the list, once nothing is awaited any more.
pub(crate) fn go_on(worker: &mut Worker, client: &mut Client, id: ConnectionId) {
    let Some(dump) = client.dump.filter(|_| client.replies.is_empty()) else { return };
    if dump.shard == worker.me.shared.shards() || dump.lines_left == 0 || dump.bytes_left == 0 {
        client.dump = None;
        push_line(&mut worker.clients.out, dump.list.end());
        return;
    }
    let Dump { list, from, lines_left, bytes_left, .. } = dump;
    let address = worker.clients.await_slow(client, id);
    let ask = Ask::List { list, from, lines_max: lines_left, bytes_max: bytes_left };
    // This thread's own shard is asked this way, too, so that the client is back in its place
    // meanwhile.
    worker.mail.ask(dump.shard, address, ask, |_| {});
}

/// `lru_crawler metadump` and `mgdump`: a line for each item in memory.
fn list_items(
    worker: &mut Worker,
    client: &mut Client,
    id: ConnectionId,
    list: List,
    words: &Words<'_>,
) {
    let compat = worker.me.limits.compat;
    if !worker.me.shared.settings.allows_dump {
        let what = if list == List::Mgdump { "key dump" } else { "metadump" };
        return push_line(&mut worker.clients.out, &format!("ERROR {what} not allowed"));
    }
    let lines_max = match lists_our_class(words.get(2), compat) {
        Some(true) => usize::MAX,
        Some(false) => 0,
        None => return push_line(&mut worker.clients.out, "BADCLASS invalid class id"),
    };
    if !compat.is_old() {
        push_line(&mut worker.clients.out, "OK");
    }
    client.dump = Some(Dump::new(list, lines_max));
    go_on(worker, client, id);
}

/// `stats cachedump`: takes a class and the most items to list.
fn cachedump(worker: &mut Worker, client: &mut Client, id: ConnectionId, words: &Words<'_>) {
    if !worker.me.shared.settings.allows_dump {
        return push_line(&mut worker.clients.out, "CLIENT_ERROR stats cachedump not allowed");
    }
    if words.len() < 4 {
        return push_line(&mut worker.clients.out, "CLIENT_ERROR bad command line");
    }
    let number = |at| worker.me.limits.compat.unsigned_32(words.get(at));
    let (Some(class), Some(limit)) = (number(2), number(3)) else {
        return push_line(&mut worker.clients.out, BAD_FORMAT);
    };
    if class >= SLAB_CLASSES {
        return push_line(&mut worker.clients.out, "CLIENT_ERROR Illegal slab id");
    }
    let lines_max = match (class, limit) {
        (SLAB_CLASS, 0) => usize::MAX,
        (SLAB_CLASS, limit) => limit as usize,
        _ => 0,
    };
    client.dump = Some(Dump::new(List::Cachedump, lines_max));
    go_on(worker, client, id);
}

/// Answers `watch`: from now on the client is sent events, and its input is ignored.
fn watch(worker: &mut Worker, client: &mut Client, id: ConnectionId, words: &Words<'_>) {
    if !worker.me.shared.settings.allows_watch {
        return push_line(&mut worker.clients.out, "CLIENT_ERROR watch commands not allowed");
    }
    let mut kinds = if words.len() > 1 { Kinds::default() } else { Kinds::FETCHERS };
    for name in words.from(1) {
        let compat = worker.me.limits.compat;
        let known = compat.find(name, Kinds::NAMED);
        let Some(kind) = known.filter(|kind| !(compat.is_old() && kind.is_of_1_6_45())) else {
            return push_line(&mut worker.clients.out, "ERROR");
        };
        kinds = kinds.with(kind);
    }
    if !worker.me.shared.watchers.add(Watcher { thread: worker.me.number, id, kinds }) {
        return push_line(&mut worker.clients.out, "WATCHER_TOO_MANY log watcher limit reached");
    }
    client.watch = Some(Watch { kinds, skipped: 0 });
    push_line(&mut worker.clients.out, "OK");
    journal::keep(&mut worker.shard.store, &worker.me.shared.watchers);
}

/// `stats detail`: turns counting by prefix on or off, or shows the counts.
fn stats_detail(worker: &mut Worker, client: &mut Client, id: ConnectionId, what: &[u8]) {
    let compat = worker.me.limits.compat;
    if !compat.is_old() && !worker.me.shared.settings.allows_dump {
        return push_line(&mut worker.clients.out, "CLIENT_ERROR stats detail not allowed");
    }
    let on = match compat.find(what, [("on", Some(true)), ("off", Some(false)), ("dump", None)]) {
        Some(Some(on)) => on,
        Some(None) => return gather(worker, client, id, GatherFor::Prefixes, Ask::LeaveObserved),
        None => {
            let usage = "CLIENT_ERROR usage: stats detail on|off|dump";
            return push_line(&mut worker.clients.out, usage);
        }
    };
    worker.me.shared.counts_prefixes.store(on, Ordering::Relaxed);
    let line = GatherFor::Line { line: "OK", quiet: false };
    gather(worker, client, id, line, Ask::CountPrefixes { on });
}

fn shutdown(worker: &mut Worker, client: &mut Client, words: &Words<'_>) {
    let compat = worker.me.limits.compat;
    let quiet = !compat.is_old() && words.asks_no_reply();
    if !worker.me.shared.settings.allows_shutdown {
        let kind = if compat.is_old() { "ERROR" } else { "SERVER_ERROR" };
        let reply = format!("{kind}: shutdown not enabled");
        return push_unless(&mut worker.clients.out, quiet, &reply);
    }
    match words.len() {
        1 => {}
        2 if compat.means(words.get(1), "graceful") => {}
        _ => {
            let reply = "CLIENT_ERROR invalid shutdown mode";
            return push_unless(&mut worker.clients.out, quiet, reply);
        }
    }
    client.phase = Phase::Closing;
    worker.me.shared.ask_to_stop();
}

/// `refresh_certs`: an error is told even to who asks for no reply, as in memcached.
fn refresh_certificates(worker: &mut Worker, quiet: bool) {
    let refreshed = match &worker.me.shared.settings.tls {
        Some(tls) => tls.refresh().map_err(|error| error.to_string()),
        None => Err("Error TLS not enabled".into()),
    };
    match refreshed {
        Ok(()) => {
            tracing::info!("certificates were loaded anew");
            push_unless(&mut worker.clients.out, quiet, "OK");
        }
        Err(error) => {
            tracing::warn!(error, "certificates were not loaded anew; those in use stay");
            push_line(&mut worker.clients.out, &error);
        }
    }
}
