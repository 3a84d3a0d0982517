//! A reply parses the same wherever it is split; wrong replies are reported.

use farpool_load::client::reply::{Reader, Said, Wrong};
use farpool_load::client::request::{Expected, Protocol, Writer};
use farpool_load::client::value::{push_key, push_value};
use farpool_load::workload::{KeyNumber, Operation, Workload};
use proptest::prelude::*;

const FRIENDS: &str = "friendfeed";

/// memcached's answer to a read of these keys, of which some are there.
fn reply(workload: &Workload, protocol: Protocol, keys: &[(KeyNumber, bool)]) -> Vec<u8> {
    let mut out = Vec::new();
    if protocol == Protocol::Binary {
        keys.iter().for_each(|key| push_binary(workload, *key, &mut out));
        return out;
    }
    if protocol == Protocol::Redis && keys.len() > 1 {
        out.extend_from_slice(format!("*{}\r\n", keys.len()).as_bytes());
    }
    for &(key, is_there) in keys {
        let bytes = workload.value_bytes(key);
        match (protocol, is_there) {
            (Protocol::Meta, false) => out.extend_from_slice(b"EN\r\n"),
            (Protocol::Redis, false) => out.extend_from_slice(b"$-1\r\n"),
            (Protocol::Redis, true) => out.extend_from_slice(format!("${bytes}\r\n").as_bytes()),
            (Protocol::Meta, true) => out.extend_from_slice(format!("VA {bytes}\r\n").as_bytes()),
            (_, false) => {}
            (_, true) => {
                out.extend_from_slice(b"VALUE ");
                push_key(&mut out, key, workload.key_bytes(key));
                out.extend_from_slice(format!(" 0 {bytes}\r\n").as_bytes());
            }
        }
        if is_there {
            push_value(&mut out, key, bytes);
            out.extend_from_slice(b"\r\n");
        }
    }
    if protocol == Protocol::Text {
        out.extend_from_slice(b"END\r\n");
    }
    out
}

/// A reply of the binary protocol.
fn push_binary(workload: &Workload, (key, is_there): (KeyNumber, bool), out: &mut Vec<u8>) {
    let (status, extras, mut body) = if is_there { (0, 4, vec![0; 4]) } else { (1, 0, vec![]) };
    if is_there {
        push_value(&mut body, key, workload.value_bytes(key));
    } else {
        body.extend_from_slice(b"Not found");
    }
    out.extend_from_slice(&[0x81, 0, 0, 0, extras, 0, 0, status]);
    out.extend_from_slice(&u32::try_from(body.len()).expect("a short value").to_be_bytes());
    let marked = u32::try_from(key.0).expect("a small number").to_le_bytes();
    out.extend_from_slice(&[&marked[..], &[0; 8]].concat());
    out.extend_from_slice(&body);
}

fn protocols() -> impl Strategy<Value = Protocol> {
    prop::sample::select(vec![Protocol::Text, Protocol::Meta, Protocol::Binary, Protocol::Redis])
}

fn read(
    workload: &Workload,
    protocol: Protocol,
    bytes: &[u8],
    keys: &[KeyNumber],
) -> Result<Option<(usize, Said)>, Wrong> {
    let expected = Expected { operation: Operation::Get, keys: keys.len() };
    Reader { workload, protocol, echo_bytes: 0 }.read(bytes, expected, keys)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_reply_says_the_same_wherever_it_is_split(
        found in prop::collection::vec((0..1000u64, any::<bool>()), 1..10), protocol in protocols(),
    ) {
        let workload = Workload { value_bytes: farpool_load::workload::sizes::Sizes::Fixed(50), ..Workload::named(FRIENDS, 1000).unwrap() };
        let found: Vec<_> = found.into_iter().map(|(key, is_there)| (KeyNumber(key), is_there)).collect();
        let keys: Vec<_> = found.iter().map(|it| it.0).collect();
        // A key that is requested twice is there both times or not at all.
        let found: Vec<_> = keys.iter().map(|key| *found.iter().find(|it| it.0 == *key).unwrap()).collect();
        let mut bytes = reply(&workload, protocol, &found);
        let whole = bytes.len();
        bytes.extend_from_slice(b"VALUE what follows");
        for cut in 0..whole {
            prop_assert_eq!(read(&workload, protocol, &bytes[..cut], &keys), Ok(None), "cut at {}", cut);
        }
        let (length, said) = read(&workload, protocol, &bytes, &keys).unwrap().unwrap();
        let hits = found.iter().filter(|it| it.1).count();
        prop_assert_eq!((length, said.hits, said.misses), (whole, hits, found.len() - hits));
        for (position, it) in found.iter().enumerate() {
            prop_assert_eq!(said.missed & (1 << position) != 0, !it.1);
        }
    }

    #[test]
    fn any_bytes_are_a_reply_or_not(bytes in prop::collection::vec(any::<u8>(), 0..200), protocol in protocols()) {
        let workload = Workload::named("uniform", 10).unwrap();
        let keys = [KeyNumber(1), KeyNumber(2)];
        if let Ok(Some((length, said))) = read(&workload, protocol, &bytes, &keys) {
            prop_assert!(length <= bytes.len() && said.hits + said.misses <= 2);
        }
    }
}

#[test]
fn a_wrong_value_a_wrong_key_and_wrong_flags_are_named() {
    let workload = Workload::named("uniform", 10).unwrap();
    let keys = [KeyNumber(7)];
    let right = reply(&workload, Protocol::Text, &[(keys[0], true)]);
    assert!(read(&workload, Protocol::Text, &right, &keys).unwrap().is_some());
    let mut value = right.clone();
    value[40] ^= 1;
    let error = read(&workload, Protocol::Text, &value, &keys).unwrap_err();
    assert!(error.to_string().contains("k00000000007"), "{error}");
    let of_another = reply(&workload, Protocol::Text, &[(KeyNumber(8), true)]);
    let error = read(&workload, Protocol::Text, &of_another, &keys).unwrap_err();
    assert!(matches!(error, Wrong::Key { .. }), "{error}");
    let flags = String::from_utf8_lossy(&right).replacen(" 0 ", " 5 ", 1).into_bytes();
    let error = read(&workload, Protocol::Text, &flags[..25], &keys).unwrap_err();
    assert!(matches!(error, Wrong::Flags { .. }), "{error}");
}

#[test]
fn wrong_replies_of_the_binary_protocol_are_named() {
    let workload = Workload::named("uniform", 10).unwrap();
    let keys = [KeyNumber(7)];
    let read = |bytes: &[u8], operation| {
        let expected = Expected { operation, keys: 1 };
        let reader = Reader { workload: &workload, protocol: Protocol::Binary, echo_bytes: 0 };
        reader.read(bytes, expected, &keys)
    };
    let right = reply(&workload, Protocol::Binary, &[(keys[0], true)]);
    assert_eq!(read(&right, Operation::Get).unwrap().unwrap().1.hits, 1);
    let changed = |at: usize| {
        let mut bytes = right.clone();
        bytes[at] ^= 1;
        read(&bytes, Operation::Get).unwrap_err()
    };
    assert!(matches!(changed(0), Wrong::Line { .. }), "no reply");
    assert!(matches!(changed(1), Wrong::Line { .. }), "another command");
    assert!(matches!(changed(12), Wrong::Key { .. }), "another request");
    assert!(matches!(changed(27), Wrong::Flags { .. }));
    assert!(matches!(changed(28), Wrong::Value { .. }));
    for at in [6, 7] {
        // A status that no read has: the lower byte makes it a miss.
        let mut bytes = right.clone();
        bytes[at] = 0x05;
        assert!(matches!(read(&bytes, Operation::Get), Err(Wrong::Line { .. })), "status {at}");
    }
    for (operation, code) in [(Operation::Set, 0x01), (Operation::Delete, 0x04)] {
        let mut bytes = right.clone();
        bytes[1] = code;
        let error = read(&bytes, operation).unwrap_err();
        assert!(matches!(error, Wrong::Line { .. }), "a value with {operation:?}: {error}");
    }
}

#[test]
fn requests_are_memcacheds() {
    let workload = Workload::named("uniform", 10).unwrap();
    let request = |protocol, operation, keys: &[KeyNumber]| {
        let mut out = Vec::new();
        Writer { workload: &workload, protocol }.push(&mut out, operation, keys);
        out
    };
    let keys = [KeyNumber(1), KeyNumber(40)];
    let get = request(Protocol::Text, Operation::Get, &keys);
    assert_eq!(get, b"get k00000000001 k00000000018\r\n");
    let get = request(Protocol::Meta, Operation::Get, &keys);
    assert_eq!(get, b"mg k00000000001 v\r\nmg k00000000018 v\r\n");
    let set = request(Protocol::Text, Operation::Set, &keys[..1]);
    assert!(set.starts_with(b"set k00000000001 0 0 64\r\n") && set.ends_with(b"\r\n"));
    assert_eq!(set.len(), 25 + 64 + 2);
    let get = request(Protocol::Redis, Operation::Get, &keys[..1]);
    assert_eq!(get, b"*2\r\n$3\r\nGET\r\n$12\r\nk00000000001\r\n");
    let set = request(Protocol::Redis, Operation::Set, &keys[..1]);
    assert!(set.starts_with(b"*3\r\n$3\r\nSET\r\n$12\r\nk00000000001\r\n$64\r\n"), "{set:?}");
    assert_eq!(request(Protocol::Meta, Operation::Delete, &keys[..1]), b"md k00000000001\r\n");
}
