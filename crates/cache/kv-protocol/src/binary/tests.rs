//! Requests and replies, byte for byte.

use super::*;
use crate::CommandCounts;
use crate::Shard;
use crate::command::StoreMode;
use crate::compat::Compat;
use crate::request::ParseLimits;
use farpool_kv_store::clock::Clock;
use farpool_kv_store::{SHARD_BYTES_MIN, Store as Items, StoreSettings};

const RULES: Rules = Rules {
    limits: ParseLimits::new(1 << 20, Compat::V1_6_45),
    has_sasl: false,
    is_authenticated: true,
};

/// A request's bytes: opcode, extras, key, value, CAS number. Its opaque number is `abcd`.
fn request(opcode: u8, extras: &[u8], key: &[u8], value: &[u8], cas: u64) -> Vec<u8> {
    let body = u32::try_from(extras.len() + key.len() + value.len()).unwrap();
    let mut bytes = vec![MAGIC, opcode];
    bytes.extend_from_slice(&u16::try_from(key.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(&[u8::try_from(extras.len()).unwrap(), 0, 0, 0]);
    bytes.extend_from_slice(&body.to_be_bytes());
    bytes.extend_from_slice(b"abcd");
    bytes.extend_from_slice(&cas.to_be_bytes());
    [&bytes, extras, key, value].concat()
}

/// A reply's bytes, as [`request`].
fn reply(opcode: u8, status: u16, extras: &[u8], key: &[u8], value: &[u8], cas: u64) -> Vec<u8> {
    let mut bytes = request(opcode, extras, key, value, cas);
    bytes[0] = 0x81;
    bytes[6..8].copy_from_slice(&status.to_be_bytes());
    bytes
}

fn shard() -> Shard {
    let settings = StoreSettings {
        limit_bytes: SHARD_BYTES_MIN,
        item_bytes_max: RULES.limits.item_bytes_max,
        evicts: true,
    };
    let clock = Clock::start(1_700_000_000);
    let mut store = Items::new(settings).unwrap();
    store.set_now(clock.now_s());
    Shard { store, clock, counts: CommandCounts::default(), observer: None }
}

/// The reply to one request on a key.
fn ask(shard: &mut Shard, bytes: &[u8]) -> Vec<u8> {
    let Scan::Request { bytes: length, head, request: Request::Key(request) } = scan(bytes, &RULES)
    else {
        panic!("not a request on a key: {:?}", scan(bytes, &RULES));
    };
    assert_eq!(length, bytes.len());
    let mut out = Vec::new();
    let hash = shard.store.hash_of(request.key());
    execute(shard, head, &request, hash, &mut out);
    out
}

#[test]
fn items_are_stored_and_read() {
    let mut shard = shard();
    let set = request(0x01, &[0, 0, 0, 7, 0, 0, 0, 0], b"k\n", b"value", 0);
    assert_eq!(ask(&mut shard, &set), reply(0x01, 0, b"", b"", b"", 1));
    let flags = [0, 0, 0, 7];
    let got = reply(0x00, 0, &flags, b"", b"value", 1);
    assert_eq!(ask(&mut shard, &request(0x00, b"", b"k\n", b"", 0)), got);
    let got = reply(0x0d, 0, &flags, b"k\n", b"value", 1);
    assert_eq!(ask(&mut shard, &request(0x0d, b"", b"k\n", b"", 0)), got);
    let touched = reply(0x1c, 0, &flags, b"", b"", 1);
    assert_eq!(ask(&mut shard, &request(0x1c, &[0, 0, 0, 9], b"k\n", b"", 0)), touched);
    assert_eq!(ask(&mut shard, &request(0x19, b"", b"k\n", b"!", 0)), b"", "quiet");
    let got = reply(0x24, 0, &flags, b"k\n", b"value!", 2);
    assert_eq!(ask(&mut shard, &request(0x24, &[0; 4], b"k\n", b"", 0)), got);
    let counts = shard.counts;
    assert_eq!((counts.get_hits, counts.touch_hits, counts.cmd_set), (2, 2, 2));
}

#[test]
fn a_miss_tells_its_key_if_the_hit_would() {
    let mut shard = shard();
    let missing = reply(0x00, 1, b"", b"", b"Not found", 0);
    assert_eq!(ask(&mut shard, &request(0x00, b"", b"k", b"", 0)), missing);
    let missing = reply(0x0c, 1, b"", b"k", b"", 0);
    assert_eq!(ask(&mut shard, &request(0x0c, b"", b"k", b"", 0)), missing);
    let missing = reply(0x23, 1, b"", b"k", b"", 0);
    assert_eq!(ask(&mut shard, &request(0x23, &[0; 4], b"k", b"", 0)), missing);
    assert_eq!(ask(&mut shard, &request(0x09, b"", b"k", b"", 0)), b"");
    let missing = reply(0x14, 1, b"", b"", b"Not found", 0);
    assert_eq!(ask(&mut shard, &request(0x14, b"", b"k", b"", 0)), missing, "quiet, but failed");
}

#[test]
fn a_cas_number_makes_any_store_a_cas() {
    let mut shard = shard();
    for opcode in [0x01, 0x02, 0x03] {
        let missing = reply(opcode, 1, b"", b"", b"Not found", 0);
        assert_eq!(ask(&mut shard, &request(opcode, &[0; 8], b"k", b"v", 5)), missing);
    }
    ask(&mut shard, &request(0x01, &[0; 8], b"k", b"v", 0));
    for opcode in [0x01, 0x02, 0x03, 0x0e, 0x0f] {
        let extras = if opcode < 0x0e { &[0; 8][..] } else { b"" };
        let exists = reply(opcode, 2, b"", b"", b"Data exists for key.", 0);
        assert_eq!(ask(&mut shard, &request(opcode, extras, b"k", b"v", 5)), exists);
    }
    let stored = ask(&mut shard, &request(0x02, &[0; 8], b"k", b"new", 1));
    assert_eq!(stored, reply(0x02, 0, b"", b"", b"", 2), "even ADD");
    let exists = reply(0x02, 2, b"", b"", b"Data exists for key.", 0);
    assert_eq!(ask(&mut shard, &request(0x02, &[0; 8], b"k", b"v", 0)), exists);
    let missing = reply(0x13, 1, b"", b"", b"Not found", 0);
    assert_eq!(ask(&mut shard, &request(0x13, &[0; 8], b"l", b"v", 0)), missing);
    let not_stored = reply(0x0e, 5, b"", b"", b"Not stored.", 0);
    assert_eq!(ask(&mut shard, &request(0x0e, b"", b"l", b"v", 0)), not_stored);
}

#[test]
fn numbers_are_made_changed_and_expire() {
    let mut shard = shard();
    let extras = |delta: u64, initial: u64, exptime: u32| {
        let numbers = [delta.to_be_bytes(), initial.to_be_bytes()].concat();
        [&numbers[..], &exptime.to_be_bytes()].concat()
    };
    let missing = reply(0x05, 1, b"", b"", b"Not found", 0);
    let never = request(0x05, &extras(1, 7, u32::MAX), b"n", b"", 0);
    assert_eq!(ask(&mut shard, &never), missing);
    let number = |value: u64, cas| reply(0x05, 0, b"", b"", &value.to_be_bytes(), cas);
    let incr = request(0x05, &extras(1, 7, 10), b"n", b"", 0);
    assert_eq!(ask(&mut shard, &incr), number(7, 1));
    assert_eq!(ask(&mut shard, &incr), number(8, 2));
    let exists = reply(0x06, 2, b"", b"", b"Data exists for key.", 0);
    assert_eq!(ask(&mut shard, &request(0x06, &extras(1, 0, 0), b"n", b"", 1)), exists);
    let decr = request(0x16, &extras(100, 0, 0), b"n", b"", 2);
    assert_eq!(ask(&mut shard, &decr), b"", "quiet");
    assert_eq!(ask(&mut shard, &incr), number(1, 4));
    shard.clock.set_uptime(11);
    shard.store.set_now(shard.clock.now_s());
    assert_eq!(ask(&mut shard, &incr), number(7, 5), "made anew");
    ask(&mut shard, &request(0x01, &[0; 8], b"n", b"x", 0));
    let text = b"Non-numeric server-side value for incr or decr";
    assert_eq!(ask(&mut shard, &incr), reply(0x05, 6, b"", b"", text, 0));
}

#[test]
fn what_is_too_large_is_refused_before_it_is_there() {
    let large = request(0x11, &[0; 8], b"k", &vec![0; 1 << 20], 0);
    for bytes in [&large[..], &large[..33]] {
        let Scan::Request { bytes, head, request: refused } = scan(bytes, &RULES) else {
            panic!("more is wanted");
        };
        assert_eq!((bytes, head.is_quiet), (33, true));
        let expected = Request::Refused {
            refusal: Status::TooLarge.into(),
            skip_bytes: 1 << 20,
            drop: Some(b"k"),
        };
        assert_eq!(refused, expected);
    }
    assert_eq!(scan(&large[..32], &RULES), Scan::Incomplete { want_bytes: 33, refused: None });
}

#[test]
fn lengths_that_do_not_fit_end_the_connection() {
    let refused = |bytes: &[u8], rules: &Rules| match scan(bytes, rules) {
        Scan::Request { request: Request::RefusedForGood(refusal), .. } => Some(refusal.status),
        _ => None,
    };
    let invalid = Some(Status::InvalidArguments);
    for (opcode, extras, key, value) in [
        (0x00, 4, 1, 0),
        (0x00, 0, 0, 0),
        (0x00, 0, 1, 1),
        (0x01, 0, 1, 1),
        (0x01, 8, 0, 1),
        (0x04, 0, 1, 1),
        (0x05, 8, 1, 0),
        (0x07, 0, 1, 0),
        (0x08, 8, 0, 0),
        (0x0a, 0, 0, 1),
        (0x0e, 8, 1, 1),
        (0x10, 4, 1, 0),
        (0x1c, 0, 1, 0),
        (0x00, 0, 251, 0),
    ] {
        let bytes = request(opcode, &vec![0; extras], &vec![b'k'; key], &vec![0; value], 0);
        assert_eq!(refused(&bytes, &RULES), invalid, "{opcode:#x}");
    }
    let mut short_body = request(0x00, b"", b"key", b"", 0);
    short_body[11] = 2;
    assert_eq!(refused(&short_body, &RULES), Some(Status::UnknownCommand));
    let mut long_body = request(0x01, &[0; 8], b"key", b"", 0);
    long_body[8] = 0xff;
    assert_eq!(refused(&long_body, &RULES), invalid);
    let stranger = Rules { has_sasl: true, is_authenticated: false, ..RULES };
    let get = request(0x00, b"", b"key", b"", 0);
    assert_eq!(refused(&get, &stranger), Some(Status::AuthError));
    assert_eq!(refused(&request(0x0b, b"", b"", b"", 0), &stranger), None);
    let text = Scan::Request {
        bytes: 5,
        head: Head { opcode: 0, opaque: [0; 4], is_quiet: false },
        request: Request::NoRequest,
    };
    assert_eq!(scan(b"get a", &RULES), text);
}

#[test]
fn unknown_commands_are_skipped_whole() {
    let bytes = request(0x40, &[0; 8], b"key", b"value", 0);
    let Scan::Request { bytes, request: refused, .. } = scan(&bytes, &RULES) else {
        panic!("more is wanted");
    };
    let refusal = Status::UnknownCommand.into();
    assert_eq!((bytes, refused), (35, Request::Refused { refusal, skip_bytes: 5, drop: None }));
}

#[test]
fn statistics_become_one_reply_each() {
    let mut out = Vec::new();
    let head = Head { opcode: 0x10, opaque: *b"abcd", is_quiet: false };
    push_stats(&mut out, head, b"STAT pid 12\r\nSTAT stat_key_prefix :\r\nEND\r\n");
    let expected = [
        reply(0x10, 0, b"", b"pid", b"12", 0),
        reply(0x10, 0, b"", b"stat_key_prefix", b":", 0),
        reply(0x10, 0, b"", b"", b"", 0),
    ];
    assert_eq!(out, expected.concat());
    let mode = KeyRequest::Store(Store {
        mode: StoreMode::Set,
        key: b"k",
        value: b"",
        client_flags: 0,
        exptime: 0,
        cas: 0,
    });
    assert!(mode.replaces() && !mode.is_plain_read());
}
