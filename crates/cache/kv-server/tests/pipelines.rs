//! Long pipelines over several threads: each reply is the right one, in its place, whichever thread
//! makes it.

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};

use common::talk::{ask, shown};
use common::{Ours, PATIENCE};
use farpool_kv_server::Settings;
use farpool_policy::Rng;

const KEYS: u32 = 60;
const REQUESTS: usize = 6000;
/// The most bytes written and read at a time.
const PIECE_BYTES_MAX: u32 = 20_000;

/// Random requests on few keys, and what a server must reply to them.
fn requests_and_replies(random: &mut Rng) -> (Vec<u8>, Vec<u8>) {
    let mut items: HashMap<u32, Vec<u8>> = HashMap::new();
    let (mut requests, mut replies) = (Vec::new(), Vec::new());
    let mut say = |request: &[u8], reply: &[u8]| {
        requests.extend_from_slice(request);
        replies.extend_from_slice(reply);
    };
    for number in 0..REQUESTS {
        let key = random.below(KEYS);
        match random.below(10) {
            0..=2 => {
                // Now and then a value too long to be made ahead.
                let bytes = if random.below(50) == 0 { 300_000 } else { random.below(900) };
                let value =
                    vec![b'a' + u8::try_from(number % 26).expect("a letter"); bytes as usize];
                let quiet = random.below(4) == 0;
                let tail = if quiet { " noreply" } else { "" };
                say(format!("set key{key} 7 0 {bytes}{tail}\r\n").as_bytes(), b"");
                say(&value, if quiet { b"" } else { b"STORED\r\n" });
                say(b"\r\n", b"");
                items.insert(key, value);
            }
            3 => {
                let reply: &[u8] =
                    if items.remove(&key).is_some() { b"DELETED\r\n" } else { b"NOT_FOUND\r\n" };
                say(format!("delete key{key}\r\n").as_bytes(), reply);
            }
            4 => say(b"mn\r\n", b"MN\r\n"),
            5 => {
                let reply = items
                    .get(&key)
                    .map_or("EN\r\n".to_owned(), |value| format!("HD s{} f7\r\n", value.len()));
                say(format!("mg key{key} s f\r\n").as_bytes(), reply.as_bytes());
            }
            _ => {
                let most = if random.below(8) == 0 { 200 } else { 3 };
                let keys = 1 + random.below(most);
                say(b"get", b"");
                for _ in 0..keys {
                    let key = random.below(KEYS);
                    say(format!(" key{key}").as_bytes(), b"");
                    if let Some(value) = items.get(&key) {
                        say(b"", format!("VALUE key{key} 7 {}\r\n", value.len()).as_bytes());
                        say(b"", value);
                        say(b"", b"\r\n");
                    }
                }
                say(b"\r\n", b"END\r\n");
            }
        }
    }
    (requests, replies)
}

/// A line of many keys comes in small pieces: it is read as they come, not byte by byte, which
/// would not end in time.
#[test]
fn a_line_that_comes_in_pieces_is_answered_in_time() {
    let ours = Ours::local(Settings { threads: 2, ..Settings::default() });
    let mut stream = ours.connect();
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    assert_eq!(ask(&mut stream, b"set last 0 0 1\r\nx\r\n", b"\r\n"), b"STORED\r\n");
    let names: String = (0..30_000).map(|key| format!(" some-longer-key-{key}")).collect();
    let line = format!("get{names} last\r\n");
    for piece in line.as_bytes().chunks(10_000) {
        stream.write_all(piece).expect("the server takes requests");
    }
    assert_eq!(ask(&mut stream, b"", b"END\r\n"), b"VALUE last 0 1\r\nx\r\nEND\r\n");
}

/// Sends the requests and compares the replies as they arrive, both in pieces of any size.
fn play(ours: &Ours, seed: u64, told: &str) {
    let mut stream = ours.connect();
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    assert_eq!(ask(&mut stream, b"flush_all\r\n", b"\r\n"), b"OK\r\n");
    let mut random = Rng::new(seed);
    let (requests, replies) = requests_and_replies(&mut random);
    let mut writer = stream.try_clone().expect("a second handle");
    let mut pieces = random.clone();
    let writing = std::thread::spawn(move || {
        let mut rest = &requests[..];
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(piece_bytes(&mut pieces).min(rest.len()));
            writer.write_all(piece).expect("the server takes requests");
            rest = behind;
        }
    });
    let mut rest = &replies[..];
    let mut given = vec![0; PIECE_BYTES_MAX as usize];
    while !rest.is_empty() {
        let bytes = piece_bytes(&mut random).min(rest.len());
        let read = stream.read(&mut given[..bytes]).expect("replies come");
        let (expected, behind) = rest.split_at(read);
        assert!(given[..read] == *expected, "{told}: {}", shown(&given[..read]));
        assert!(read > 0, "{told}: the server ended it");
        rest = behind;
    }
    writing.join().expect("it does not panic");
}

fn piece_bytes(random: &mut Rng) -> usize {
    1 + random.below(PIECE_BYTES_MAX) as usize
}

#[test]
fn every_reply_of_a_pipeline_is_the_right_one_in_its_place() {
    for threads in [1, 2, 5] {
        let ours = Ours::local(Settings { threads, ..Settings::default() });
        // One after the other, as all use the same keys.
        (1..4).for_each(|seed| play(&ours, seed, &format!("{threads} threads, seed {seed}")));
    }
}
