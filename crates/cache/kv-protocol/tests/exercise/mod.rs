//! Properties that must hold for any bytes: used by the mutation test and by fuzz/.

use std::sync::Arc;

use farpool_kv_protocol::change::Change;
use farpool_kv_protocol::classic::{self, GetProgress};
use farpool_kv_protocol::compat::Compat;
use farpool_kv_protocol::request::{
    AdminRequest, KeyRequest, LINE_BYTES_MAX, ParseLimits, Request, Scan, scan,
};
use farpool_kv_protocol::{CommandCounts, Shard, meta};
use farpool_kv_store::clock::Clock;
use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::observe::Observer;
use farpool_kv_store::observe::journal::{Journal, Kinds};
use farpool_kv_store::observe::prefix::PREFIXES_MAX;
use farpool_kv_store::{SHARD_BYTES_MIN, Store, StoreSettings};
use farpool_policy::CacheKind;

const ITEM_BYTES_MAX: usize = 64 << 10;
const MEMORY_LIMIT_MIN_MIB: u32 = 8;
/// Replies are made in parts of about this size.
const OUT_BYTES_MAX: usize = 4 << 10;
/// The most steps of a long `get`: each must answer something.
const PARTS_MAX: usize = 10_000;

/// What the bytes received so far begin with.
pub(crate) enum Beginning {
    Incomplete {
        want_bytes: usize,
    },
    /// A request of this length, and how many bytes behind it are to be discarded.
    Request {
        bytes: usize,
        skip_bytes: usize,
    },
    /// A request after which the connection ends.
    Last {
        bytes: usize,
    },
}

/// Reads a stream that arrives in the given pieces, as a server does. `look` says with what bytes
/// begin, and is shown each request once.
pub(crate) fn read_pieces(pieces: &[&[u8]], mut look: impl FnMut(&[u8]) -> Beginning) {
    let mut buffer: Vec<u8> = Vec::new();
    let mut skip = 0;
    for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut at = 0;
        loop {
            let skipped = skip.min(buffer.len() - at);
            at += skipped;
            skip -= skipped;
            if at == buffer.len() {
                break;
            }
            let there = buffer.len() - at;
            let bytes = match look(&buffer[at..]) {
                Beginning::Incomplete { want_bytes } => {
                    assert!(want_bytes > there, "what is wanted is there");
                    break;
                }
                Beginning::Request { bytes, skip_bytes } => {
                    skip = skip_bytes;
                    bytes
                }
                Beginning::Last { bytes } => {
                    assert!(bytes > 0 && bytes <= there, "a request of {bytes} bytes");
                    return;
                }
            };
            assert!(bytes > 0 && bytes <= there, "a request of {bytes} bytes");
            at += bytes;
        }
        buffer.drain(..at);
    }
}

/// `bytes` in pieces of the lengths that `cuts` gives in turn.
pub(crate) fn cut<'a>(bytes: &'a [u8], cuts: &[u8]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    for &cut in cuts.iter().cycle().take(bytes.len()) {
        let (piece, after) =
            rest.split_at(usize::from(cut).clamp(1, rest.len().max(1)).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// Reads a stream as a version of memcached does; passes every complete request to `take`.
fn read_all(compat: Compat, pieces: &[&[u8]], mut take: impl FnMut(&Request<'_>)) {
    let limits = ParseLimits::new(ITEM_BYTES_MAX, compat);
    read_pieces(pieces, |buffer| match scan(buffer, &limits) {
        Scan::Incomplete { want_bytes, .. } => Beginning::Incomplete { want_bytes },
        Scan::Request { bytes, request } => {
            take(&request);
            match request {
                Request::Close | Request::Admin(AdminRequest::Quit) => Beginning::Last { bytes },
                Request::Skipped { skip_bytes, .. } => Beginning::Request { bytes, skip_bytes },
                _ => Beginning::Request { bytes, skip_bytes: 0 },
            }
        }
    });
}

/// Any bytes give the same requests in one piece and in pieces.
///
/// How a line that is too long is judged depends on how much of it has arrived, as in memcached;
/// such streams are left out.
pub(crate) fn scan_any(bytes: &[u8], cuts: &[u8]) {
    if bytes.split(|&byte| byte == b'\n').any(|line| line.len() >= LINE_BYTES_MAX) {
        return;
    }
    for compat in Compat::ALL {
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        read_all(compat, &[bytes], |request| whole.push(format!("{request:?}")));
        read_all(compat, &cut(bytes, cuts), |request| parts.push(format!("{request:?}")));
        assert_eq!(parts, whole);
    }
}

/// The policy that a byte of input selects.
pub(crate) fn policy_of(byte: u8) -> CacheKind {
    CacheKind::ALL[usize::from(byte) % CacheKind::ALL.len()]
}

/// A full, small shard; `leases` says whether its values can be leased.
pub(crate) fn full_shard(leases: bool, policy: CacheKind) -> Shard {
    let settings = StoreSettings {
        limit_bytes: SHARD_BYTES_MIN,
        item_bytes_max: ITEM_BYTES_MAX,
        evicts: true,
    };
    let make = if leases { Store::leasing } else { Store::new };
    let mut store = make(settings).expect("there is address space");
    store.set_policy(policy).expect("there is memory");
    let mut shard = Shard {
        store,
        clock: Clock::start(1_700_000_000),
        counts: CommandCounts::default(),
        observer: Some(Box::new(Observer::sampling())),
    };
    shard.store.set_now(shard.clock.now_s());
    // Everything is observed. The delimiter occurs in the keys that streams consist of.
    shard.observer.iter_mut().for_each(|observer| observer.count_prefixes(b'm'));
    let kinds = Kinds::FETCHERS.with(Kinds::MUTATIONS).with(Kinds::EVICTIONS);
    let kinds = kinds.with(Kinds::DELETIONS);
    shard.store.set_journal(Some(Box::new(Journal::new(kinds, Arc::default()))));
    let value = [b'v'; 50 << 10];
    for number in 0..=SHARD_BYTES_MIN / value.len() {
        let key = format!("fill{number}");
        let parts = ItemParts { key: key.as_bytes(), value: [&value, b""], ..ItemParts::default() };
        let hash = shard.store.hash_of(key.as_bytes());
        shard.store.insert(&parts, hash).expect("old items make room");
    }
    shard
}

/// Any stream is executed without a panic, replies are lines, and memory stays bounded. The clock
/// advances by `step_s` with each request.
pub(crate) fn execute_any(bytes: &[u8], step_s: u8, policy: CacheKind) {
    Compat::ALL.iter().for_each(|&compat| execute_as(compat, bytes, step_s, policy));
}

fn execute_as(compat: Compat, bytes: &[u8], step_s: u8, policy: CacheKind) {
    let mut shard = full_shard(false, policy);
    let mut out = Vec::new();
    let mut uptime_s = 0;
    read_all(compat, &[bytes], |request| {
        out.clear();
        execute(&mut shard, request, &mut out);
        assert!(out.is_empty() || out.ends_with(b"\r\n"), "{}", out.escape_ascii());
        let (used, limit) = (shard.store.used_bytes(), shard.store.settings().limit_bytes);
        assert!(used <= limit + 2 * ITEM_BYTES_MAX, "{used} bytes of {limit}");
        uptime_s += u32::from(step_s);
        shard.clock.set_uptime(uptime_s);
        shard.store.set_now(shard.clock.now_s());
        shard.store.free_expired();
        let observed =
            shard.observer.as_mut().map(|observer| observer.tell(SHARD_BYTES_MIN as u64));
        assert!(observed.is_some_and(|it| it.prefixes.len() <= PREFIXES_MAX + 1));
        if let Some((lines, _)) = shard.store.journal_mut().and_then(Journal::take) {
            assert!(lines.iter().all(|(_, line)| line.ends_with('\n') && line.is_ascii()));
        }
    });
}

fn execute(shard: &mut Shard, request: &Request<'_>, out: &mut Vec<u8>) {
    match *request {
        Request::Keys(KeyRequest::Get { keys, flags }) => {
            let mut rest = keys;
            for _ in 0..PARTS_MAX {
                out.clear();
                match classic::get_many(shard, rest, flags, out, OUT_BYTES_MAX) {
                    GetProgress::Done => return,
                    GetProgress::Stopped { done_bytes } => rest = &rest[done_bytes..],
                }
            }
            panic!("a get without end");
        }
        Request::Keys(KeyRequest::Store(store)) => {
            let hash = shard.store.hash_of(store.key);
            classic::execute_store(shard, &store, hash, out);
        }
        Request::Keys(KeyRequest::Delete { key, quiet }) => {
            let key = HashedKey::of(key, shard.store.hash_seed());
            classic::execute_delete(shard, key, quiet, out);
        }
        Request::Keys(KeyRequest::Arithmetic { key, delta, increments, quiet }) => {
            let key = HashedKey::of(key, shard.store.hash_seed());
            classic::execute_change(shard, &Change::new(key, delta, increments), quiet, out);
        }
        Request::Keys(KeyRequest::Touch { key, exptime, quiet }) => {
            let hash = shard.store.hash_of(key);
            classic::execute_touch(shard, key, hash, (exptime, quiet), out);
        }
        Request::Keys(KeyRequest::Meta(request)) => {
            if let Ok(prepared) = meta::prepare(&request, shard.store.hash_seed()) {
                meta::execute(shard, &prepared, out);
            }
        }
        Request::Admin(AdminRequest::FlushAll { exptime, .. }) => {
            shard.store.flush_all(shard.clock.flush_s(exptime.into()));
        }
        // An impossible limit is refused; the server itself refuses less than this.
        Request::Admin(AdminRequest::MemoryLimit { mebibytes, .. })
            if mebibytes >= MEMORY_LIMIT_MIN_MIB =>
        {
            let _ = shard.store.set_limit((mebibytes as usize) << 20);
        }
        _ => {}
    }
}
