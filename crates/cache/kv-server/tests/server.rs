//! The server over sockets: how it reads, answers, waits, refuses and ends.

mod common;

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use common::talk::{ask, exchange, read_to_end, read_until, shown};
use common::{Ours, PATIENCE, unix_s, wait_until};
use farpool_kv_server::{Server, ServerError, Settings, THREADS_MAX};

fn settings(threads: usize) -> Settings {
    Settings { threads, ..Settings::default() }
}

/// A figure of `stats`.
fn stat(stream: &mut (impl Read + Write), name: &str) -> u64 {
    let text = String::from_utf8(ask(stream, b"stats\r\n", b"END\r\n")).expect("stats are text");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("STAT ")?.split_once(' '));
    let value = lines.find(|(found, _)| *found == name).map(|(_, value)| value);
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// One request of each kind, on separate keys; without CAS numbers, which go on from stream to
/// stream.
const STREAM: &[u8] = b"set a 5 0 3\r\nabc\r\nadd a 0 0 1\r\nx\r\nget a nobody b\r\nappend a 0 0 \
    2\r\nde\r\n\
    ms b 4 T0 k O7\r\n\r\nxy\r\nmg b v s k\r\nincr n 1\r\nset n 0 0 2 noreply\r\n41\r\nincr n \
    1\r\nmn\r\n\
    nonsense\r\nset toolong 0 0 3\r\nabcd\r\nmg Zm9v b v k N30\r\nma n v D8\r\ntouch a \
    0\nversion\r\n\
    get a b n Zm9v\r\nset big 0 0 2000000\r\n";

fn after_data() -> Vec<u8> {
    let skipped = vec![b'x'; 2_000_000];
    let rest =
        b"\r\ndelete a\r\nmd b\r\ndelete n\r\nmd Zm9v b\r\nflush_all\r\nget a b n\r\nquit\r\n";
    [&skipped[..], rest].concat()
}

#[test]
fn requests_may_be_cut_at_every_byte() {
    for threads in [1, 3] {
        let ours = Ours::local(settings(threads));
        let rest = after_data();
        let whole = [STREAM, &rest].concat();
        let expected = exchange(ours.connect(), &[&whole]);
        let text = String::from_utf8_lossy(&expected);
        assert!(text.contains("VALUE a 5 5\r\nabcde\r\nVALUE b 0 4\r\n\r\nxy\r\n"), "{text}");
        assert!(text.contains("object too large for cache\r\nDELETED\r\nHD\r\n"), "{text}");
        for cut in 1..STREAM.len() {
            let given = exchange(ours.connect(), &[&whole[..cut], &whole[cut..]]);
            assert!(given == expected, "cut at {cut}:\n{}", shown(&given));
        }
        let mut bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        bytes.push(&rest);
        assert_eq!(shown(&exchange(ours.connect(), &bytes)), shown(&expected), "every byte alone");
    }
}

#[test]
fn a_client_that_ended_its_side_gets_its_replies() {
    let ours = Ours::tcp(settings(3));
    let mut stream = ours.connect_tcp();
    let mut requests = String::new();
    let mut expected = String::new();
    for number in 0..20_000 {
        write!(requests, "set key{number} 0 0 5\r\n{number:05}\r\nget key{number}\r\n")
            .expect("text");
        write!(expected, "STORED\r\nVALUE key{number} 0 5\r\n{number:05}\r\nEND\r\n")
            .expect("text");
    }
    let mut sender = stream.try_clone().expect("a socket can be cloned");
    let sending = std::thread::spawn(move || {
        sender.write_all(requests.as_bytes()).expect("the server takes requests");
        sender.shutdown(Shutdown::Write).expect("it is open");
    });
    let given = read_to_end(&mut stream);
    sending.join().expect("the sender does not panic");
    assert!(given == expected.as_bytes(), "{}", shown(&given));
}

#[test]
fn a_get_over_all_shards_answers_in_order() {
    let ours = Ours::local(settings(3));
    let mut stream = ours.connect();
    let mut expected = String::new();
    let mut keys = String::new();
    for number in 0..3000 {
        let value = format!("value {number}");
        let set = format!("set key{number} 0 0 {} noreply\r\n{value}\r\n", value.len());
        stream.write_all(set.as_bytes()).expect("the server takes requests");
        write!(expected, "VALUE key{number} 0 {}\r\n{value}\r\n", value.len()).expect("text");
        write!(keys, " key{number} nobody{number}").expect("text");
    }
    let request = format!("get{keys}\r\nmn\r\n");
    let given = ask(&mut stream, request.as_bytes(), b"MN\r\n");
    assert_eq!(shown(&given), shown(format!("{expected}END\r\nMN\r\n").as_bytes()));
}

#[test]
fn flush_all_comes_between_what_was_sent_before_and_after() {
    let ours = Ours::local(settings(3));
    let mut requests = String::new();
    let mut expected = String::new();
    for round in 0..50 {
        for key in 0..20 {
            write!(requests, "set k{key} 0 0 3\r\nold\r\n").expect("text");
            expected += "STORED\r\n";
        }
        requests += if round % 2 == 0 { "flush_all\r\n" } else { "flush_all noreply\r\n" };
        expected += if round % 2 == 0 { "OK\r\n" } else { "" };
        for key in 0..20 {
            write!(requests, "get k{key}\r\nset k{key} 0 0 3\r\nnew\r\nget k{key}\r\n")
                .expect("text");
            write!(expected, "END\r\nSTORED\r\nVALUE k{key} 0 3\r\nnew\r\nEND\r\n").expect("text");
        }
    }
    let given = exchange(ours.connect(), &[requests.as_bytes()]);
    assert_eq!(shown(&given), shown(expected.as_bytes()));
    assert!(given == expected.as_bytes());
}

#[test]
fn who_does_not_read_makes_nobody_wait() {
    // Threads that ask each other may owe the client more: 64 values.
    for (threads, written_max) in [(1, 10_000_000), (3, 80_000_000)] {
        let ours = Ours::local(settings(threads));
        let mut deaf = ours.connect();
        let value = "v".repeat(1_000_000);
        for key in 0..8 {
            let set = format!("set big{key} 0 0 1000000\r\n{value}\r\n");
            assert_eq!(ask(&mut deaf, set.as_bytes(), b"\r\n"), b"STORED\r\n");
        }
        // 104 MB of replies in 104 requests, then as many requests as the sockets take.
        let get = (0..8).fold(String::new(), |text, key| text + &format!("get big{key}\r\n"));
        deaf.write_all(get.repeat(13).as_bytes()).expect("the server takes requests");
        deaf.set_nonblocking(true).expect("it is a socket");
        let more = get.repeat(125);
        while deaf.write(more.as_bytes()).is_ok() {}
        let mut other = ours.connect();
        other.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        for _ in 0..100 {
            assert_eq!(ask(&mut other, b"get nobody\r\n", b"END\r\n"), b"END\r\n");
        }
        let resident = common::resident_bytes(std::process::id());
        assert!(resident < 400_000_000, "{threads} threads: {resident} bytes of memory");
        let written = stat(&mut other, "bytes_written");
        assert!(written < written_max, "{written} bytes went to somebody who reads nothing");
        deaf.set_nonblocking(false).expect("it is a socket");
        deaf.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        let mut reply = vec![0; 104 * (value.len() + 33)];
        deaf.read_exact(&mut reply).expect("the replies come when they are read");
    }
}

#[test]
fn too_many_clients_are_told_so() {
    let ours = Ours::tcp(Settings { connections_max: 2, ..settings(2) });
    let mut first = ours.connect_tcp();
    let mut second = ours.connect_tcp();
    for stream in [&mut first, &mut second] {
        assert_eq!(ask(stream, b"mn\r\n", b"\r\n"), b"MN\r\n");
    }
    let told = read_to_end(&mut ours.connect_tcp());
    assert_eq!(shown(&told), shown(b"ERROR Too many open connections\r\n"));
    drop(second);
    wait_until("there is room again", || {
        let mut stream = ours.connect_tcp();
        // If the connection is refused, the write may fail as well.
        let _ = stream.write_all(b"mn\r\nquit\r\n");
        (read_to_end(&mut stream) == b"MN\r\n").then_some(())
    });
    assert!(stat(&mut first, "rejected_connections") >= 1);
}

#[test]
fn who_says_nothing_is_sent_away_and_who_talks_stays() {
    let ours = Ours::local(Settings { idle_timeout_s: 2, ..settings(1) });
    let (mut silent, mut talking) = (ours.connect(), ours.connect());
    silent.set_nonblocking(true).expect("it is a socket");
    wait_until("the silent one is sent away", || {
        assert_eq!(ask(&mut talking, b"mn\r\n", b"\r\n"), b"MN\r\n");
        matches!(silent.read(&mut [0; 8]), Ok(0)).then_some(())
    });
    assert_eq!(stat(&mut talking, "idle_kicks"), 1);
}

#[test]
fn the_socket_file_has_its_mode_and_replaces_only_what_is_dead() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let at_path =
        || Settings { socket_path: Some(path.clone()), socket_mode: 0o640, ..settings(1) };
    // The socket of a server that died.
    drop(UnixListener::bind(&path).expect("nothing is there"));
    assert!(path.exists() && UnixStream::connect(&path).is_err());
    let server = Server::bind(at_path(), unix_s()).expect("a dead socket is replaced");
    let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    let shared = server.shared();
    let running = std::thread::spawn(move || server.run());
    let refused = Server::bind(at_path(), unix_s());
    assert!(matches!(refused, Err(ServerError::SocketInUse { .. })), "{refused:?}");
    let mut client = UnixStream::connect(&path).expect("the first still listens");
    assert_eq!(ask(&mut client, b"mn\r\n", b"\r\n"), b"MN\r\n");
    shared.ask_to_stop();
    running.join().expect("it does not panic").expect("it ends well");
    assert!(!path.exists(), "the socket file is left");
    std::fs::write(&path, "precious").expect("a file");
    let refused = Server::bind(at_path(), unix_s());
    assert!(matches!(refused, Err(ServerError::SocketInUse { .. })), "{refused:?}");
    assert_eq!(std::fs::read(&path).expect("it is there"), b"precious");
}

#[test]
fn more_threads_than_frames_can_number_are_refused() {
    for threads in [0, THREADS_MAX + 1] {
        let refused = Server::bind(settings(threads), unix_s());
        assert!(matches!(refused, Err(ServerError::Threads(_))), "{refused:?}");
    }
}

#[test]
fn shutdown_sends_what_was_promised_first() {
    let ours = Ours::local(Settings { allows_shutdown: true, ..settings(3) });
    let mut requests = String::new();
    let mut expected = String::new();
    for number in 0..5000 {
        write!(requests, "set k{number} 0 0 1\r\nx\r\nget k{number}\r\n").expect("text");
        write!(expected, "STORED\r\nVALUE k{number} 0 1\r\nx\r\nEND\r\n").expect("text");
    }
    requests += "shutdown\r\n";
    let given = exchange(ours.connect(), &[requests.as_bytes()]);
    assert!(given == expected.as_bytes(), "{}", shown(&given));
    ours.ended().expect("it ends well");
}

#[test]
fn without_eviction_the_full_server_refuses_and_keeps() {
    let ours = Ours::local(Settings { memory_bytes: 16 << 20, evicts: false, ..settings(1) });
    let mut stream = ours.connect();
    let value = "v".repeat(10_000);
    let mut stored = 0;
    loop {
        let set = format!("set k{stored} 0 0 10000\r\n{value}\r\n");
        match &ask(&mut stream, set.as_bytes(), b"\r\n")[..] {
            b"STORED\r\n" => stored += 1,
            reply => {
                assert_eq!(reply, b"SERVER_ERROR out of memory storing object\r\n");
                break;
            }
        }
    }
    assert!((1000..1700).contains(&stored), "{stored} items of 10 kB in 16 MiB");
    for number in 0..stored {
        let get = format!("mg k{number} s\r\n");
        assert_eq!(ask(&mut stream, get.as_bytes(), b"\r\n"), b"HD s10000\r\n", "k{number}");
    }
    assert_eq!(ask(&mut stream, b"delete k0\r\n", b"\r\n"), b"DELETED\r\n");
}

#[test]
fn the_memory_limit_goes_down_and_up() {
    let ours = Ours::local(Settings { memory_bytes: 64 << 20, ..settings(2) });
    let mut stream = ours.connect();
    let fill = |stream: &mut UnixStream, items: usize| {
        let value = "v".repeat(10_000);
        for number in 0..items {
            let set = format!("set k{number} 0 0 10000 noreply\r\n{value}\r\n");
            stream.write_all(set.as_bytes()).expect("the server takes requests");
        }
        assert_eq!(ask(stream, b"mn\r\n", b"\r\n"), b"MN\r\n");
        stat(stream, "curr_items")
    };
    assert_eq!(fill(&mut stream, 5000), 5000);
    assert_eq!(ask(&mut stream, b"cache_memlimit 16\r\n", b"\r\n"), b"OK\r\n");
    assert_eq!(stat(&mut stream, "limit_maxbytes"), 16 << 20);
    let used = stat(&mut stream, "memory_used_bytes");
    assert!(used <= 16 << 20, "{used} bytes are used");
    assert!(fill(&mut stream, 5000) < 1700);
    assert!(stat(&mut stream, "evictions") > 0);
    assert_eq!(ask(&mut stream, b"cache_memlimit 128\r\n", b"\r\n"), b"OK\r\n");
    assert_eq!(fill(&mut stream, 10_000), 10_000);
    assert!(stat(&mut stream, "memory_used_bytes") <= 128 << 20);
}

#[test]
fn the_least_limit_leaves_every_shard_usable() {
    let ours = Ours::local(Settings { memory_bytes: 64 << 20, ..settings(9) });
    let mut stream = ours.connect();
    assert_eq!(ask(&mut stream, b"cache_memlimit 8\r\n", b"\r\n"), b"OK\r\n");
    for number in 0..100 {
        let set = format!("set k{number} 0 0 1\r\nx\r\n");
        assert_eq!(ask(&mut stream, set.as_bytes(), b"\r\n"), b"STORED\r\n", "k{number}");
    }
}

#[test]
fn a_request_that_never_ends_costs_no_more_than_what_came() {
    let ours = Ours::local(Settings { item_bytes_max: 1 << 30, ..settings(1) });
    let mut streams: Vec<UnixStream> = (0..50).map(|_| ours.connect()).collect();
    for stream in &mut streams {
        stream.write_all(b"set k 0 0 1000000000\r\nx").expect("the server takes requests");
    }
    // 50 GB were announced: if memory were allocated for them, this line would not be reached.
    let mut other = ours.connect();
    assert_eq!(ask(&mut other, b"mn\r\n", b"\r\n"), b"MN\r\n");
    drop(streams);
    assert_eq!(read_until(&mut send(other, b"get k\r\n"), b"END\r\n"), b"END\r\n");
}

fn send(mut stream: UnixStream, request: &[u8]) -> UnixStream {
    stream.write_all(request).expect("the server takes requests");
    stream
}

/// Connected clients stay until they leave; new ones are refused; the address is free for a
/// successor.
#[test]
fn a_server_that_drains_keeps_its_clients_and_takes_no_more() {
    let patient = Settings { drain: Duration::from_secs(3600), ..Settings::default() };
    let ours = Ours::local(patient.clone());
    let mut stays = ours.connect();
    ask(&mut stays, b"set a 0 0 1\r\nx\r\n", b"\r\n");
    ours.shared.ask_to_drain();
    wait_until("the address is free", || (!ours.socket.exists()).then_some(()));
    assert!(UnixStream::connect(&ours.socket).is_err());
    assert_eq!(ask(&mut stays, b"get a\r\n", b"END\r\n"), b"VALUE a 0 1\r\nx\r\nEND\r\n");
    drop(stays);
    ours.ended().expect("it ends when nobody is there any more");

    let ours = Ours::local(patient);
    let mut stays = ours.connect();
    ask(&mut stays, b"version\r\n", b"\r\n");
    ours.shared.ask_to_drain();
    wait_until("the address is free", || (!ours.socket.exists()).then_some(()));
    ours.shared.ask_to_stop();
    assert!(read_to_end(&mut stays).is_empty());
    ours.ended().expect("asked twice, it ends at once");

    let ours = Ours::local(Settings { drain: Duration::from_millis(200), ..Settings::default() });
    let mut stays = ours.connect();
    ask(&mut stays, b"version\r\n", b"\r\n");
    ours.shared.ask_to_drain();
    assert!(read_to_end(&mut stays).is_empty());
    ours.ended().expect("it waits no longer than it was told");
}

/// A client's number is reused when it has left; replies it was still owed must not go to its
/// successor.
#[test]
fn what_somebody_who_has_gone_was_owed_costs_nobody_else_anything() {
    let ours = Ours::local(settings(3));
    let mut watching = ours.connect();
    let gets = (0..300).fold(String::new(), |text, key| text + &format!("get k{key}\r\n"));
    let mut stayed = Vec::new();
    for _ in 0..300 {
        let mut goes = ours.connect();
        goes.write_all(gets.as_bytes()).expect("the server takes requests");
        drop(goes);
        let mut stays = ours.connect();
        stays.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        assert_eq!(ask(&mut stays, b"get nobody\r\n", b"END\r\n"), b"END\r\n");
        stayed.push(stays);
    }
    for stays in &mut stayed {
        assert_eq!(ask(stays, b"get nobody\r\n", b"END\r\n"), b"END\r\n");
    }
    drop(stayed);
    wait_until("all places are free again", || {
        (stat(&mut watching, "curr_connections") == 1).then_some(())
    });
}

/// They read all the time, so that none is ever idle, but too little of what they have asked for.
#[test]
fn clients_that_read_too_slowly_give_their_replies_up() {
    const CLIENTS: usize = 40;
    const VALUE_BYTES: usize = 1_000_000;
    const READ_BYTES_PER_S: f64 = (512 << 10) as f64;
    let memory_bytes = 32 << 20;
    let share = memory_bytes as u64 / 4;
    let ours = Ours::local(Settings { memory_bytes, ..settings(1) });
    let mut watching = ours.connect();
    watching.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    let set = format!("set big 0 0 {VALUE_BYTES}\r\n{}\r\n", "v".repeat(VALUE_BYTES));
    assert_eq!(ask(&mut watching, set.as_bytes(), b"\r\n"), b"STORED\r\n");
    let connect = || {
        let mut reader = ours.connect();
        reader.write_all(&b"get big big big big\r\n".repeat(50)).expect("requests are short");
        reader.set_nonblocking(true).expect("sockets may be so");
        reader
    };
    let mut readers: Vec<_> = (0..CLIENTS).map(|_| (connect(), 0)).collect();
    let start = Instant::now();
    let mut buffer = vec![0; 64 << 10];
    let mut most = 0;
    wait_until("they give up", || {
        for (reader, read_bytes) in &mut readers {
            if (*read_bytes as f64) < start.elapsed().as_secs_f64() * READ_BYTES_PER_S {
                // Those that were closed may be told so.
                *read_bytes += reader.read(&mut buffer).unwrap_or(0);
            }
        }
        let held = stat(&mut watching, "read_buf_bytes");
        most = most.max(held);
        (held <= share && stat(&mut watching, "response_obj_oom") > 0).then_some(())
    });
    assert!(most > share, "replies took more than their share before: {most} bytes");
    let reply = ask(&mut watching, b"get big big\r\n", b"END\r\n");
    assert!(reply.len() > 2 * VALUE_BYTES, "who reads is served: {} bytes", reply.len());
}
