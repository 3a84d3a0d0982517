//! What a server tells of its keys and clients on request: prefixes, items, connections.

mod common;

use std::collections::BTreeSet;
use std::io::Write;

use common::talk::ask;
use common::{Memcached, Ours};
use farpool_kv::server::Settings;

fn settings(threads: usize) -> Settings {
    Settings { threads, ..Settings::default() }
}

/// The lines of a reply without its end, in no order.
fn lines(reply: &[u8]) -> BTreeSet<String> {
    String::from_utf8_lossy(reply).lines().map(str::to_owned).filter(|it| it != "END").collect()
}

#[test]
fn prefixes_are_counted_as_memcached_counts_them() {
    if !Memcached::is_there() {
        return;
    }
    let requests = "get early:1\r\nstats detail dump\r\nstats detail on\r\n\
        get user:1 user:2 nothing\r\nset user:1 0 0 1\r\nx\r\nset user:2:deep 0 0 1\r\ny\r\nget user:1 user:2:deep\r\n\
        set page:1 0 0 x\r\nadd page:1 0 0 1\r\nz\r\nadd page:1 0 0 1\r\nz\r\nreplace page:2 0 0 1\r\nz\r\n\
        delete page:1\r\ndelete page:3\r\nincr page:4 1\r\ntouch page:5 1\r\ngat 0 page:6\r\nset plain 0 0 1\r\nz\r\n\
        stats detail off\r\nget user:1\r\nset user:1 0 0 1\r\nx\r\nstats detail x\r\nstats detail\r\nversion\r\n";
    let told = |mut stream: std::os::unix::net::UnixStream| {
        let replies = ask(&mut stream, requests.as_bytes(), b"VERSION 1.6.18\r\n");
        let dump = ask(&mut stream, b"stats detail dump\r\n", b"END\r\n");
        ask(&mut stream, b"stats reset\r\n", b"RESET\r\n");
        let empty = ask(&mut stream, b"stats detail dump\r\n", b"END\r\n");
        (String::from_utf8_lossy(&replies).into_owned(), lines(&dump), lines(&empty))
    };
    let theirs = told(Memcached::start(&[]).connect());
    assert!(theirs.1.len() >= 2 && theirs.2.is_empty(), "{theirs:?}");
    for threads in [1, 3] {
        let ours = Ours::local(settings(threads));
        assert_eq!(told(ours.connect()), theirs, "{threads} threads");
    }
}

#[test]
fn prefixes_can_be_counted_from_the_start() {
    let from_start = Settings { prefix_delimiter: b'/', counts_prefixes: true, ..settings(2) };
    let ours = Ours::local(from_start);
    let mut stream = ours.connect();
    ask(
        &mut stream,
        b"get a/b:c\r\nget a:b\r\nmg a/c v\r\nmd a/d\r\nms a/e 1\r\nx\r\nmn\r\n",
        b"MN\r\n",
    );
    let dump = ask(&mut stream, b"stats detail dump\r\n", b"END\r\n");
    assert_eq!(dump, b"PREFIX a get 2 hit 0 set 1 del 1\r\nEND\r\n");
    let told = ask(&mut stream, b"stats settings\r\n", b"END\r\n");
    let told = String::from_utf8_lossy(&told);
    assert!(told.contains("STAT stat_key_prefix /\r\nSTAT detail_enabled yes\r\n"), "{told}");
    stream.write_all(b"quit\r\n").expect("it still listens");
    assert!(read_until_end(stream).is_empty());
}

fn read_until_end(mut stream: std::os::unix::net::UnixStream) -> Vec<u8> {
    common::talk::read_to_end(&mut stream)
}
