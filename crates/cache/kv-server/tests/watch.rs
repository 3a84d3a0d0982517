//! `watch`: which events are sent, compared with memcached's; who may watch, and what slow watchers
//! miss.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use common::talk::{ask, read_until};
use common::{Memcached, Ours, PATIENCE, wait_until};
use farpool_keyvault::client::{Address, Client, Storing};
use farpool_kv_server::{Compat, Settings};

fn settings(threads: usize) -> Settings {
    Settings { threads, ..Settings::default() }
}

fn begin(mut stream: UnixStream, kinds: &str) -> UnixStream {
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    assert_eq!(ask(&mut stream, format!("watch {kinds}\r\n").as_bytes(), b"\r\n"), b"OK\r\n");
    stream
}

/// An event without the fields in which two servers differ: time, numbers and classes. memcached
/// shows the remaining time of a passed expiry as an unsigned number.
fn comparable(line: &str) -> String {
    let differ = ["ts", "gid", "clsid", "cfd"];
    line.split(' ')
        .filter(|word| !differ.contains(&word.split('=').next().unwrap_or("")))
        .map(|word| if word == "ttl=4294967235" { "ttl=0" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Reads lines until they are `enough`. Returns all of them in comparable form.
fn told_while(stream: &mut UnixStream, enough: impl Fn(&str) -> bool) -> Vec<String> {
    let mut text = String::new();
    while !enough(&text) || !text.ends_with('\n') {
        text += &String::from_utf8(read_until(stream, b"\n")).expect("lines are text");
    }
    text.lines().map(comparable).collect()
}

fn told_until(stream: &mut UnixStream, last: &str) -> Vec<String> {
    told_while(stream, |text| text.contains(last))
}

const REQUESTS: &[u8] = b"set a 0 0 3\r\nabc\r\nget a\r\nget b\r\nadd a 0 0 1\r\nx\r\nadd c/%d 0 \
    100 1\r\nx\r\n\
    incr n 1\r\ndelete d\r\ntouch t 1\r\nma u N0\r\nmd v\r\nme w\r\ngat 0 x\r\n\
    replace zz 0 0 1\r\nx\r\nappend a 0 0 2\r\nde\r\ncas a 0 0 1 999999\r\nx\r\ncas none 0 0 1 \
    1\r\nx\r\n\
    gets a c/%d\r\nset e 0 -1 1\r\nx\r\nget e\r\nmg a v\r\nms m 2\r\nhi\r\nget m\r\nmn\r\n";

#[test]
fn reads_and_writes_are_told_as_memcached_tells_them() {
    Memcached::versions().into_iter().for_each(reads_and_writes_are_told_as_by);
}

fn reads_and_writes_are_told_as_by(compat: Compat) {
    const STORES: usize = 10;
    let stores = |connect: &dyn Fn() -> UnixStream| {
        let mut watcher = begin(connect(), "mutations");
        ask(&mut connect(), REQUESTS, b"MN\r\n");
        told_while(&mut watcher, |text| text.lines().count() >= STORES)
    };
    let reads = |connect: &dyn Fn() -> UnixStream, kind: &str| -> BTreeSet<String> {
        let mut watcher = begin(connect(), kind);
        ask(&mut connect(), REQUESTS, b"MN\r\n");
        told_until(&mut watcher, "key=m status=found").into_iter().collect()
    };
    let theirs = Memcached::start_for(compat, &[]);
    let mutations = stores(&|| theirs.connect());
    let theirs = Memcached::start_for(compat, &[]);
    let all_reads = reads(&|| theirs.connect(), "fetchers");
    for threads in [1, 3] {
        let ours = Ours::local(settings(threads));
        let mut given = stores(&|| ours.connect());
        let mut wanted = mutations.clone();
        if threads > 1 {
            // Shards report in no order.
            given.sort_unstable();
            wanted.sort_unstable();
        }
        assert_eq!(given, wanted, "{threads} threads");
    }
    let ours = Ours::local(settings(1));
    let given = reads(&|| ours.connect(), "");
    assert_eq!(given, all_reads);
    for status in ["a status=found size=3", "b status=not_found size=0", "e status=expired size=0"]
    {
        assert!(given.contains(&format!("type=item_get key={status}")), "{status}: {given:#?}");
    }
}

/// What a watcher of deletions is told while `delete` deletes the value `abc` of `key` in some way.
fn deletion_told(delete: impl Fn(&Ours)) {
    for threads in [1, 3] {
        let ours = Ours::local(settings(threads));
        let mut watcher = begin(ours.connect(), "deletions");
        let mut client = ours.connect();
        ask(&mut client, b"set key 0 0 3\r\nabc\r\n", b"\r\n");
        delete(&ours);
        // What is not there is not deleted; with one thread the last line shows that nothing came
        // between.
        delete(&ours);
        ask(&mut client, b"set last 0 0 2\r\nhi\r\nmd last\r\n", b"HD\r\n");
        let wanted =
            ["type=deleted key=key cmd=delete size=3", "type=deleted key=last cmd=md size=2"];
        assert_eq!(two_deletions(&mut watcher), wanted, "{threads} threads");
    }
}

/// The lines up to those of `key` and `last`, in the order of their keys: shards report in no
/// order.
fn two_deletions(watcher: &mut UnixStream) -> Vec<String> {
    let are_there = |text: &str| text.contains("key=key ") && text.contains("key=last ");
    let mut told = told_while(watcher, are_there);
    told.sort_unstable();
    told
}

#[test]
fn deletions_by_the_text_protocol_are_told() {
    deletion_told(|ours| {
        ask(&mut ours.connect(), b"delete key\r\n", b"\r\n");
    });
    if !Memcached::versions().contains(&Compat::V1_6_45) {
        return;
    }
    let told = |connect: &dyn Fn() -> UnixStream| {
        let mut watcher = begin(connect(), "deletions");
        let requests =
            b"set a 0 0 3\r\nabc\r\ndelete a\r\ndelete a\r\nset b 0 0 2\r\nhi\r\nmd b\r\n\
            set c 0 0 1\r\nx\r\nmd c I T30\r\nmd c x\r\nmn\r\n";
        ask(&mut connect(), requests, b"MN\r\n");
        told_until(&mut watcher, "key=c cmd=md")
    };
    let theirs = Memcached::start_for(Compat::V1_6_45, &[]);
    let ours = Ours::local(settings(1));
    assert_eq!(told(&|| ours.connect()), told(&|| theirs.connect()));
}

#[test]
fn deletions_by_the_binary_protocol_are_told() {
    deletion_told(|ours| {
        let delete = [&b"\x80\x04\0\x03\0\0\0\0\0\0\0\x03"[..], &[0; 12], b"key"].concat();
        let noop = [&b"\x80\x0a"[..], &[0; 22]].concat();
        let answered = [&b"\x81\x0a"[..], &[0; 22]].concat();
        ask(&mut ours.connect(), &[delete, noop].concat(), &answered);
    });
}

#[test]
fn deletions_by_keyvault_are_told() {
    let folder = tempfile::tempdir().expect("a folder for the socket");
    let path = folder.path().join("keyvault");
    for threads in [1, 3] {
        let keyvault_path = Some(path.clone());
        let ours = Ours::local(Settings { keyvault_path, ..settings(threads) });
        let mut watcher = begin(ours.connect(), "deletions");
        let mut client = Client::connect(&Address::Unix(path.clone())).expect("it listens");
        client.set(b"key", b"abc", Storing::default()).expect("it is stored");
        assert!(client.delete(b"key").expect("it is answered"));
        assert!(!client.delete(b"key").expect("it is answered"));
        client.set(b"last", b"hi", Storing::default()).expect("it is stored");
        assert!(client.delete(b"last").expect("it is answered"));
        let line = |key, bytes| format!("type=deleted key={key} cmd=delete size={bytes}");
        let wanted = [line("key", 3), line("last", 2)];
        assert_eq!(two_deletions(&mut watcher), wanted, "{threads} threads");
    }
}

#[test]
fn evictions_are_told() {
    for policy in farpool_policy::CacheKind::ALL {
        evictions_are_told_of(Settings { memory_bytes: 4 << 20, policy, ..settings(1) });
    }
}

fn evictions_are_told_of(settings: Settings) {
    let ours = Ours::local(settings);
    let mut watcher = begin(ours.connect(), "evictions mutations");
    let mut client = ours.connect();
    let value = "v".repeat(1000);
    let sender = std::thread::spawn(move || {
        for number in 0..20_000 {
            let request = format!("set key{number} 0 1000 1000 noreply\r\n{value}\r\n");
            client.write_all(request.as_bytes()).expect("the server takes requests");
        }
        ask(&mut client, b"stats\r\n", b"END\r\n")
    });
    let told = told_until(&mut watcher, "type=eviction");
    let stats = String::from_utf8(sender.join().expect("it does not panic")).expect("text");
    let line = told.iter().find(|line| line.starts_with("type=eviction")).expect("one came");
    assert!(line.contains(" fetch=no ttl=") && line.ends_with(" size=1000"), "{line}");
    assert!(stats.contains("STAT log_watchers 1\r\n"), "{stats}");
    assert!(!stats.contains("STAT log_worker_written 0\r\n"), "{stats}");
}

#[test]
fn clients_that_come_and_go_are_told() {
    if !Memcached::is_there() {
        return;
    }
    let theirs = Memcached::start(&[]);
    let ours = Ours::local(settings(2));
    let told = |connect: &dyn Fn() -> UnixStream| {
        let mut watcher = begin(connect(), "connevents");
        let mut client = connect();
        client.write_all(b"quit\r\n").expect("the server takes requests");
        assert!(common::talk::read_to_end(&mut client).is_empty());
        let mut lines = told_until(&mut watcher, "type=conn_close");
        let mut browser = connect();
        browser.write_all(b"GET / HTTP/1.1\r\n").expect("the server takes requests");
        common::talk::read_to_end(&mut browser);
        lines.extend(told_until(&mut watcher, "reason=error"));
        drop(connect());
        lines.extend(told_until(&mut watcher, "type=conn_close"));
        lines.sort_unstable();
        lines
    };
    assert_eq!(told(&|| ours.connect()), told(&|| theirs.connect()));
    let ours = Ours::tcp(settings(1));
    let mut watcher = ours.connect_tcp();
    ask(&mut watcher, b"watch connevents\r\n", b"\r\n");
    let client = ours.connect_tcp();
    let port = client.local_addr().expect("it is connected").port();
    let came = String::from_utf8(read_until(&mut watcher, b"\n")).expect("text");
    let wanted = format!("type=conn_new rip=127.0.0.1 rport={port} transport=tcp");
    assert_eq!(came.lines().map(comparable).collect::<Vec<_>>(), [wanted]);
}

#[test]
fn only_so_many_watch_and_only_who_may() {
    let ours = Ours::local(settings(2));
    let mut watchers: Vec<_> = (0..20).map(|_| begin(ours.connect(), "sysevents")).collect();
    let mut late = ours.connect();
    let full = b"WATCHER_TOO_MANY log watcher limit reached\r\n";
    assert_eq!(ask(&mut late, b"watch\r\n", b"\r\n"), full);
    assert_eq!(ask(&mut late, b"watch nothing\r\n", b"\r\n"), b"ERROR\r\n");
    // The input of a watcher is ignored; when it leaves there is room again.
    watchers[7].write_all(b"get a\r\nstats\r\n").expect("the server takes it");
    drop(watchers.pop());
    wait_until("its place is free", || {
        (ask(&mut late, b"watch\r\n", b"\r\n") == b"OK\r\n").then_some(())
    });
    let forbidden = Ours::local(Settings { allows_watch: false, ..settings(1) });
    let no = b"CLIENT_ERROR watch commands not allowed\r\n";
    assert_eq!(ask(&mut forbidden.connect(), b"watch\r\n", b"\r\n"), no);
}

/// A watcher that does not read holds no client up, and is told later how much it missed.
#[test]
fn a_slow_watcher_misses_lines_and_is_told_so() {
    let ours = Ours::local(settings(2));
    let mut watcher = begin(ours.connect(), "fetchers");
    let mut client = ours.connect();
    client.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    for _ in 0..200 {
        ask(&mut client, &[&b"get some_key\r\n".repeat(300)[..], b"mn\r\n"].concat(), b"MN\r\n");
    }
    let mut buffer = vec![0; 1 << 20];
    let mut text = String::new();
    wait_until("it is told", || {
        // A new event, sent when there is room.
        ask(&mut client, b"get some_key\r\n", b"END\r\n");
        let bytes = watcher.read(&mut buffer).expect("lines come");
        text += &String::from_utf8_lossy(&buffer[..bytes]);
        text.contains("skipped=").then_some(())
    });
    let told = text.matches("key=some_key status=not_found").count();
    assert!(told > 100 && text.starts_with("ts="), "{told} lines");
}
