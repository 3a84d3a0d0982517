//! What a server lists on request: prefixes, items, connections.

mod common;

use std::collections::BTreeSet;
use std::io::Write;

use common::talk::ask;
use common::{Memcached, Ours};
use farpool_kv_server::{Compat, Settings};

fn settings(threads: usize) -> Settings {
    Settings { threads, ..Settings::default() }
}

fn settings_of(compat: Compat, threads: usize) -> Settings {
    Settings { compat, ..settings(threads) }
}

/// The lines of a reply without its end, as a set.
fn lines(reply: &[u8]) -> BTreeSet<String> {
    String::from_utf8_lossy(reply).lines().map(str::to_owned).filter(|it| it != "END").collect()
}

#[test]
fn prefixes_are_counted_as_memcached_counts_them() {
    Memcached::versions().into_iter().for_each(prefixes_are_counted_by);
}

fn prefixes_are_counted_by(compat: Compat) {
    let requests = "get early:1\r\nstats detail dump\r\nstats detail on\r\n\
        get user:1 user:2 nothing\r\nset user:1 0 0 1\r\nx\r\nset user:2:deep 0 0 1\r\ny\r\nget \
        user:1 user:2:deep\r\n\
        set page:1 0 0 x\r\nadd page:1 0 0 1\r\nz\r\nadd page:1 0 0 1\r\nz\r\nreplace page:2 0 0 \
        1\r\nz\r\n\
        delete page:1\r\ndelete page:3\r\nincr page:4 1\r\ntouch page:5 1\r\ngat 0 page:6\r\nset \
        plain 0 0 1\r\nz\r\n\
        stats detail off\r\nget user:1\r\nset user:1 0 0 1\r\nx\r\nstats detail x\r\nstats \
        detail\r\nmn\r\n";
    let told = |mut stream: std::os::unix::net::UnixStream| {
        let replies = ask(&mut stream, requests.as_bytes(), b"MN\r\n");
        let dump = ask(&mut stream, b"stats detail dump\r\n", b"END\r\n");
        ask(&mut stream, b"stats reset\r\n", b"RESET\r\n");
        let empty = ask(&mut stream, b"stats detail dump\r\n", b"END\r\n");
        (String::from_utf8_lossy(&replies).into_owned(), lines(&dump), lines(&empty))
    };
    let theirs = told(Memcached::start_for(compat, &[]).connect());
    assert!(theirs.1.len() >= 2 && theirs.2.is_empty(), "{theirs:?}");
    for threads in [1, 3] {
        let ours = Ours::local(settings_of(compat, threads));
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
    assert!(common::talk::read_to_end(&mut stream).is_empty());
}

const TOOLS_ITEMS: usize = 50;
const BAD_CLASS: &str = "BADCLASS invalid class id";

/// Stores items of every kind that a list shows differently.
fn fill(stream: &mut (impl std::io::Read + Write)) {
    let mut requests = String::new();
    for number in 0..TOOLS_ITEMS {
        let exptime = if number % 2 == 0 { 0 } else { 1_000_000 };
        let value = "v".repeat(number);
        requests += &format!("set key:{number}/%+~é 5 {exptime} {number}\r\n{value}\r\n");
    }
    requests +=
        "ms YmluYXJ5IGtleQ== 1 b\r\nx\r\nset gone 0 -1 1\r\nx\r\nset deleted 0 0 1\r\nx\r\n";
    requests += "delete deleted\r\nget key:1/%+~é\r\nmn\r\n";
    ask(stream, requests.as_bytes(), b"MN\r\n");
}

/// A line of `metadump` without the fields in which two servers differ: times, sizes and numbers.
fn comparable(line: &str) -> String {
    line.split(' ')
        .filter(|word| {
            !["la", "cas", "cls", "size"].contains(&word.split('=').next().unwrap_or(""))
        })
        .map(|word| match word.strip_prefix("exp=") {
            Some(expiry) if expiry.len() == 10 => "exp=far",
            _ => word,
        })
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn metadump_lists_what_memcached_lists() {
    Memcached::versions().into_iter().for_each(metadump_lists_what_is_listed_by);
}

fn metadump_lists_what_is_listed_by(compat: Compat) {
    let theirs = Memcached::start_for(compat, &[]);
    let mut stream = theirs.connect();
    fill(&mut stream);
    // 1.6.45 does not list after other requests that it has not answered yet.
    let dump = ask(&mut stream, b"lru_crawler metadump all\r\n", b"END\r\n");
    let expected: BTreeSet<String> = lines(&dump).iter().map(|it| comparable(it)).collect();
    let has_ok = usize::from(!compat.is_old());
    assert_eq!(expected.len(), TOOLS_ITEMS + 1 + has_ok, "{expected:?}");
    assert!(expected.iter().any(|it| it.contains("exp=far fetch=yes")), "{expected:?}");
    for threads in [1, 3] {
        let ours = Ours::local(settings_of(compat, threads));
        let mut stream = ours.connect();
        fill(&mut stream);
        for classes in ["all", "hash", "1", "3,1"] {
            let request = format!("lru_crawler metadump {classes}\r\n");
            let dump = ask(&mut stream, request.as_bytes(), b"END\r\n");
            let given: BTreeSet<String> = lines(&dump).iter().map(|it| comparable(it)).collect();
            assert_eq!(given, expected, "{threads} threads, {classes}");
        }
        for (request, reply) in [
            ("lru_crawler metadump 2", if compat.is_old() { "END" } else { "OK\r\nEND" }),
            ("lru_crawler metadump x", BAD_CLASS),
            ("lru_crawler metadump 0", BAD_CLASS),
            ("lru_crawler metadump 64", BAD_CLASS),
            ("lru_crawler mgdump x", if compat.is_old() { "ERROR" } else { BAD_CLASS }),
            ("stats cachedump 1", "CLIENT_ERROR bad command line"),
            ("stats cachedump x 1", "CLIENT_ERROR bad command line format"),
            ("stats cachedump 64 1", "CLIENT_ERROR Illegal slab id"),
            ("stats cachedump 63 1", "END"),
        ] {
            let reply = format!("{reply}\r\n");
            let given = ask(&mut stream, format!("{request}\r\n").as_bytes(), reply.as_bytes());
            assert_eq!(String::from_utf8_lossy(&given), reply, "{request}");
        }
        let all = ask(&mut stream, b"stats cachedump 1 0\r\n", b"END\r\n");
        assert_eq!(lines(&all).len(), TOOLS_ITEMS, "keys in base64 are not shown");
        assert!(
            lines(&all).contains("ITEM key:2/%+~é [2 b; 0 s]"),
            "{}",
            common::talk::shown(&all)
        );
        let some = ask(&mut stream, b"stats cachedump 1 7\r\n", b"END\r\n");
        assert_eq!(lines(&some).len(), 7);
    }
}

/// A list longer than any buffer, on several threads, with requests before and after it, slowly
/// read: while nothing changes, nothing is missing and nothing appears twice.
#[test]
fn a_list_of_any_length_comes_whole_and_in_its_place() {
    const ITEMS: usize = 200_000;
    let ours = Ours::local(settings(3));
    let mut stream = ours.connect();
    stream.set_read_timeout(Some(common::PATIENCE)).expect("sockets have timeouts");
    let mut requests = String::new();
    for number in 0..ITEMS {
        requests += &format!("set {number} 0 0 3 noreply\r\nabc\r\n");
    }
    let mut writer = stream.try_clone().expect("a socket can be cloned");
    let sender = std::thread::spawn(move || {
        writer.write_all(requests.as_bytes()).expect("the server takes requests");
        writer
            .write_all(
                b"get 1 2 3\r\nlru_crawler metadump all\r\nget 4 5\r\nstats cachedump 1 \
                3\r\nmn\r\n",
            )
            .expect("the server takes requests");
    });
    let replies = common::talk::read_until(&mut stream, b"MN\r\n");
    sender.join().expect("the sender does not panic");
    let text = String::from_utf8(replies).expect("replies are text");
    let (before, rest) = text.split_once("END\r\n").expect("the first get ends");
    assert_eq!(before.matches("VALUE ").count(), 3);
    let rest = rest.strip_prefix("OK\r\n").expect("the list begins");
    let (list, rest) = rest.split_once("END\r\n").expect("the list ends");
    let keys: BTreeSet<&str> = list
        .lines()
        .map(|line| line.strip_prefix("key=").expect("a line of the list"))
        .map(|line| line.split(' ').next().unwrap_or(line))
        .collect();
    assert_eq!((keys.len(), list.lines().count()), (ITEMS, ITEMS));
    assert_eq!(rest.matches("VALUE ").count(), 2);
    assert_eq!(rest.matches("ITEM ").count(), 3);
    assert!(rest.ends_with("END\r\nMN\r\n"), "{rest}");
}

#[test]
fn lists_can_be_forbidden() {
    let ours = Ours::local(Settings { allows_dump: false, ..settings(2) });
    let mut stream = ours.connect();
    for (request, reply) in [
        ("lru_crawler metadump all", "ERROR metadump not allowed"),
        ("stats cachedump 1 0", "CLIENT_ERROR stats cachedump not allowed"),
    ] {
        let given = ask(&mut stream, format!("{request}\r\n").as_bytes(), b"\r\n");
        assert_eq!(String::from_utf8_lossy(&given), format!("{reply}\r\n"));
    }
}

#[test]
fn connections_are_told_with_their_state() {
    let ours = Ours::tcp(settings(2));
    let idle: Vec<_> = (0..5).map(|_| ours.connect_tcp()).collect();
    let mut asking = ours.connect_tcp();
    let own = asking.local_addr().expect("it is connected");
    let listen = ours.addresses[0];
    let told = common::wait_until("all are accepted", || {
        let told = ask(&mut asking, b"stats conns\r\n", b"END\r\n");
        let told = String::from_utf8(told).expect("replies are text");
        (told.matches(&format!(":listen_addr tcp:{listen}\r\n")).count() == 6).then_some(told)
    });
    assert_eq!(told.matches(":state conn_read\r\n").count(), 5, "{told}");
    assert_eq!(told.matches(":state conn_parse_cmd\r\n").count(), 1, "{told}");
    assert_eq!(told.matches(":state conn_listening\r\n").count(), 1, "{told}");
    assert!(told.contains(&format!(":addr tcp:{listen}\r\n")), "{told}");
    for client in idle.iter().chain([&asking]) {
        let address = client.local_addr().expect("it is connected");
        assert!(told.contains(&format!(":addr tcp:{address}\r\n")), "{own}: {told}");
    }
    assert_eq!(told.matches(":secs_since_last_cmd ").count(), 6, "{told}");
}

#[test]
fn quotas_hold_over_all_threads_and_are_told() {
    const LIMIT: u64 = 1 << 20;
    let quotas = vec![(b"big:".to_vec(), LIMIT), (b"none:".to_vec(), 1000)];
    let ours = Ours::local(Settings { quotas, ..settings(3) });
    let mut stream = ours.connect();
    let value = "v".repeat(500);
    let mut requests = String::from("set other 0 0 1\r\nx\r\n");
    for number in 0..10_000 {
        requests += &format!("set big:{number} 0 0 500 noreply\r\n{value}\r\n");
    }
    requests += &format!("set none:1 0 0 500\r\n{value}\r\nget other\r\nmn\r\n");
    let replies = ask(&mut stream, requests.as_bytes(), b"MN\r\n");
    let wanted = "STORED\r\nSERVER_ERROR out of memory storing object\r\nVALUE other 0 \
        1\r\nx\r\nEND\r\nMN\r\n";
    assert_eq!(String::from_utf8_lossy(&replies), wanted);
    let told = ask(&mut stream, b"stats quotas\r\n", b"END\r\n");
    let told = String::from_utf8(told).expect("text");
    let big: Vec<&str> = told
        .lines()
        .find_map(|it| it.strip_prefix("QUOTA big: "))
        .expect("it is told")
        .split(' ')
        .collect();
    let figure = |name: &str| -> u64 {
        let at = big.iter().position(|it| *it == name).expect("it has its name");
        big[at + 1].parse().expect("a number")
    };
    assert!(figure("limit") <= LIMIT && figure("used") <= figure("limit"), "{told}");
    assert!(figure("used") > LIMIT * 9 / 10, "{told}");
    assert_eq!(figure("items") + figure("evictions"), 10_000, "{told}");
}
