//! The text protocol as memcached 1.6.45 answers it: recorded answers, byte for byte.

mod common;

use common::Ours;
use common::talk::{exchange_one_by_one, shown};
use farpool_kv_server::{Compat, Settings};

const RECORDED: &str = include_str!("golden/text_1_6_45.txt");

/// Bytes written with the escapes `\r`, `\n`, `\0` and `\x..`, and with `{N*c}` for N times c.
fn bytes_of(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(['\\', '{']) {
        bytes.extend_from_slice(&rest.as_bytes()[..at]);
        rest = &rest[at..];
        let length = if let Some(times) = rest.strip_prefix('{') {
            let (count, letter) = times.split_once('*').expect("{N*c}");
            let count = count.parse().expect("a number of times");
            bytes.extend(vec![letter.as_bytes()[0]; count]);
            rest.find('}').expect("{N*c}") + 1
        } else {
            let (byte, length) = match rest.as_bytes()[1] {
                b'r' => (b'\r', 2),
                b'n' => (b'\n', 2),
                b'0' => (0, 2),
                b'x' => (u8::from_str_radix(&rest[2..4], 16).expect("two digits"), 4),
                other => panic!("an unknown escape: {other}"),
            };
            bytes.push(byte);
            length
        };
        rest = &rest[length..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

/// The recorded groups: what is sent, piece by piece, and all that is answered.
fn groups() -> Vec<(Vec<Vec<u8>>, Vec<u8>)> {
    let lines_of = |group: &str, mark: &str| -> Vec<Vec<u8>> {
        group.lines().filter_map(|line| line.strip_prefix(mark)).map(bytes_of).collect()
    };
    let groups = RECORDED.split("\n\n").map(|it| (lines_of(it, "> "), lines_of(it, "< ").concat()));
    groups.filter(|(pieces, _)| !pieces.is_empty()).collect()
}

#[test]
fn what_memcached_1_6_45_answers_is_answered() {
    assert!(groups().len() > 20, "the record is read");
    for (pieces, expected) in groups() {
        for threads in [1, 3] {
            let ours = Ours::local(Settings { threads, ..Settings::default() });
            let sent: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let given = exchange_one_by_one(ours.connect(), &sent, || true);
            let sent = sent.concat();
            assert!(
                given == expected,
                "{threads} threads, sent:\n{}\nexpected:\n{}\ngiven:\n{}",
                shown(&sent),
                shown(&expected),
                shown(&given)
            );
        }
    }
}

/// The older version takes the value of a refused command for commands: here it empties the cache.
#[test]
fn only_the_older_version_reads_the_value_of_a_refused_command() {
    for compat in Compat::ALL {
        let ours = Ours::local(Settings { threads: 2, compat, ..Settings::default() });
        let key = "k".repeat(251);
        let stream = format!("set a 0 0 1\r\nx\r\nset {key} 0 0 9\r\nflush_all\r\nget a\r\n");
        let given = exchange_one_by_one(ours.connect(), &[stream.as_bytes()], || true);
        let is_there = given.ends_with(b"VALUE a 0 1\r\nx\r\nEND\r\n");
        assert_eq!(is_there, !compat.is_old(), "{compat:?}: {}", shown(&given));
    }
}
