//! Properties that must hold for any bytes of the binary protocol: used by the mutation test and by
//! fuzz/.

use farpool_kv_protocol::binary::{
    self, HEADER_BYTES, Head, Request, Rules, Scan, ServerRequest, push_refusal, scan,
};
use farpool_kv_protocol::compat::Compat;
use farpool_kv_protocol::request::ParseLimits;
use farpool_policy::CacheKind;

use super::exercise::{Beginning, cut, full_shard, read_pieces};

const ITEM_BYTES_MAX: usize = 64 << 10;

/// The rules that two bits of input select.
fn rules_of(byte: u8) -> Rules {
    Rules {
        limits: ParseLimits::new(ITEM_BYTES_MAX, Compat::V1_6_45),
        has_sasl: byte & 1 != 0,
        is_authenticated: byte & 2 == 0,
    }
}

/// Reads a stream that arrives in the given pieces; passes every complete request to `take`.
fn read_all(pieces: &[&[u8]], rules: &Rules, mut take: impl FnMut(Head, &Request<'_>)) {
    read_pieces(pieces, |buffer| match scan(buffer, rules) {
        Scan::Incomplete { want_bytes, .. } => {
            let most = HEADER_BYTES + 255 + 250 + ITEM_BYTES_MAX;
            assert!(want_bytes <= most, "{want_bytes} bytes are to be kept");
            Beginning::Incomplete { want_bytes }
        }
        Scan::Request { bytes, head, request } => {
            take(head, &request);
            match request {
                Request::RefusedForGood(_)
                | Request::NoRequest
                | Request::Server(ServerRequest::Quit) => Beginning::Last { bytes },
                Request::Refused { skip_bytes, .. } => Beginning::Request { bytes, skip_bytes },
                _ => Beginning::Request { bytes, skip_bytes: 0 },
            }
        }
    });
}

/// Any bytes give the same requests in one piece and in pieces of the lengths that `cuts` gives in
/// turn.
pub(crate) fn scan_any(bytes: &[u8], rules: u8, cuts: &[u8]) {
    let rules = rules_of(rules);
    let (mut whole, mut parts) = (Vec::new(), Vec::new());
    read_all(&[bytes], &rules, |head, request| whole.push(format!("{head:?} {request:?}")));
    let pieces = cut(bytes, cuts);
    read_all(&pieces, &rules, |head, request| parts.push(format!("{head:?} {request:?}")));
    assert_eq!(parts, whole);
}

/// Checks that `out` is one reply to the request, or none if that is quiet.
fn check_reply(head: Head, out: &[u8]) {
    if head.is_quiet && out.is_empty() {
        return;
    }
    let header: &[u8; HEADER_BYTES] = out.first_chunk().expect("a reply has a header");
    let [magic, opcode, key_0, key_1, extras, _, _, _, b0, b1, b2, b3, opaque @ ..] = *header;
    assert_eq!((magic, opcode), (0x81, head.opcode));
    assert_eq!(opaque[..4], head.opaque);
    let body_bytes = u32::from_be_bytes([b0, b1, b2, b3]) as usize;
    assert_eq!(out.len(), HEADER_BYTES + body_bytes, "one reply");
    let key_bytes = usize::from(u16::from_be_bytes([key_0, key_1]));
    assert!(key_bytes + usize::from(extras) <= body_bytes);
}

/// Any stream is executed without a panic, replies are whole, and memory stays bounded. The clock
/// advances by `step_s` with each request.
pub(crate) fn execute_any(bytes: &[u8], step_s: u8, policy: CacheKind) {
    let mut shard = full_shard(false, policy);
    let mut out = Vec::new();
    let mut uptime_s = 0;
    read_all(&[bytes], &rules_of(0), |head, request| {
        out.clear();
        match request {
            Request::Key(request) => {
                let hash = shard.store.hash_of(request.key());
                binary::execute(&mut shard, head, request, hash, &mut out);
                check_reply(head, &out);
            }
            Request::Refused { refusal, .. } | Request::RefusedForGood(refusal) => {
                push_refusal(&mut out, head, *refusal);
                check_reply(head, &out);
            }
            Request::Server(ServerRequest::Flush { exptime }) => {
                shard.store.flush_all(shard.clock.flush_s((*exptime).into()));
            }
            Request::Server(_) | Request::NoRequest => {}
        }
        let (used, limit) = (shard.store.used_bytes(), shard.store.settings().limit_bytes);
        assert!(used <= limit + 2 * ITEM_BYTES_MAX, "{used} bytes of {limit}");
        uptime_s += u32::from(step_s);
        shard.clock.set_uptime(uptime_s);
        shard.store.set_now(shard.clock.now_s());
        shard.store.free_expired();
    });
}
