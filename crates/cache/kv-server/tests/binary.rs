//! The binary protocol beyond what memcached is compared with: SASL, statistics, which protocol a
//! client speaks, long pipelines over several threads, lower tiers.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use common::talk::{ask as ask_text, exchange, read_to_end, read_until};
use common::{Ours, PATIENCE};
use farpool_kv_server::auth::Credentials;
use farpool_kv_server::{Bookkeeping, Compat, Dialect, FlashSettings, REQUESTS_PER_TURN, Settings};
use farpool_policy::Rng;

const HEADER_BYTES: usize = 24;

mod opcode {
    pub(crate) const GET: u8 = 0x00;
    pub(crate) const SET: u8 = 0x01;
    pub(crate) const QUIT: u8 = 0x07;
    pub(crate) const FLUSH: u8 = 0x08;
    pub(crate) const GETQ: u8 = 0x09;
    pub(crate) const NOOP: u8 = 0x0a;
    pub(crate) const VERSION: u8 = 0x0b;
    pub(crate) const GETKQ: u8 = 0x0d;
    pub(crate) const STAT: u8 = 0x10;
    pub(crate) const SETQ: u8 = 0x11;
    pub(crate) const VERBOSITY: u8 = 0x1b;
    pub(crate) const GAT: u8 = 0x1d;
    pub(crate) const SASL_LIST: u8 = 0x20;
    pub(crate) const SASL_AUTH: u8 = 0x21;
    pub(crate) const SASL_STEP: u8 = 0x22;
}

/// A request's bytes.
fn request(opcode: u8, extras: &[u8], key: &[u8], value: &[u8]) -> Vec<u8> {
    let body = u32::try_from(extras.len() + key.len() + value.len()).unwrap();
    let mut bytes = vec![0x80, opcode];
    bytes.extend_from_slice(&u16::try_from(key.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(&[u8::try_from(extras.len()).unwrap(), 0, 0, 0]);
    bytes.extend_from_slice(&body.to_be_bytes());
    bytes.extend_from_slice(b"abcd\0\0\0\0\0\0\0\0");
    [&bytes, extras, key, value].concat()
}

/// A reply's opcode, status, key and value.
#[derive(Debug, PartialEq, Eq)]
struct Reply {
    opcode: u8,
    status: u16,
    key: Vec<u8>,
    value: Vec<u8>,
}

fn reply(opcode: u8, status: u16, key: &[u8], value: &[u8]) -> Reply {
    Reply { opcode, status, key: key.to_vec(), value: value.to_vec() }
}

fn read_reply(stream: &mut impl Read) -> Reply {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("a header");
    assert_eq!((header[0], &header[12..16]), (0x81, &b"abcd"[..]), "{header:?}");
    let mut body = vec![0; u32::from_be_bytes(header[8..12].try_into().unwrap()) as usize];
    stream.read_exact(&mut body).expect("a body");
    let key_at = usize::from(header[4]);
    let value_at = key_at + usize::from(u16::from_be_bytes([header[2], header[3]]));
    let status = u16::from_be_bytes([header[6], header[7]]);
    reply(header[1], status, &body[key_at..value_at], &body[value_at..])
}

fn ask(stream: &mut (impl Read + Write), bytes: &[u8]) -> Reply {
    stream.write_all(bytes).expect("the server takes requests");
    read_reply(stream)
}

fn connect(ours: &Ours) -> UnixStream {
    let stream = ours.connect();
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    stream
}

fn with_password() -> Settings {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "foo:bar\n").unwrap();
    let credentials = Credentials::read(file.path()).unwrap();
    Settings { credentials: Some(Arc::new(credentials)), ..Settings::default() }
}

#[test]
fn the_first_byte_or_the_setting_decides_the_protocol() {
    let ours = Ours::local(Settings::default());
    let version = reply(opcode::VERSION, 0, b"", Compat::default().version().as_bytes());
    let (mut binary, mut text) = (connect(&ours), connect(&ours));
    assert_eq!(ask(&mut binary, &request(opcode::VERSION, b"", b"", b"")), version);
    ask(&mut binary, &request(opcode::SET, &[0, 0, 0, 5, 0, 0, 0, 0], b"key", b"value"));
    let found = ask_text(&mut text, b"get key\r\n", b"END\r\n");
    assert_eq!(found, b"VALUE key 5 5\r\nvalue\r\nEND\r\n", "both see the same items");
    assert_eq!(exchange(ours.connect(), &[b"\x80", b"get"]), b"", "text after the first byte");
    binary.write_all(b"get key\r\n").unwrap();
    assert_eq!(read_to_end(&mut binary), b"", "a client keeps its protocol");
    let ours = Ours::local(Settings { dialect: Dialect::Text, ..Settings::default() });
    let refused = exchange(ours.connect(), &[b"\x80\r\n"]);
    assert_eq!(refused, b"CLIENT_ERROR bad command line format\r\n", "a word of one letter");
    let ours = Ours::local(Settings { dialect: Dialect::Binary, ..Settings::default() });
    assert_eq!(exchange(ours.connect(), &[b"version\r\n"]), b"");
    assert_eq!(ask(&mut connect(&ours), &request(opcode::VERSION, b"", b"", b"")), version);
}

#[test]
fn clients_authenticate_by_sasl() {
    let ours = Ours::local(with_password());
    let mut stream = connect(&ours);
    let failed = |opcode| reply(opcode, 0x20, b"", b"Auth failure.");
    let welcome = |opcode| reply(opcode, 0, b"", b"Authenticated");
    let get = request(opcode::GET, b"", b"key", b"");
    assert_eq!(ask(&mut connect(&ours), &get), failed(opcode::GET));
    assert_eq!(exchange(ours.connect(), &[&get, &get]).len(), HEADER_BYTES + 13, "and no more");
    let list = request(opcode::SASL_LIST, b"", b"", b"");
    assert_eq!(ask(&mut stream, &list), reply(opcode::SASL_LIST, 0, b"", b"PLAIN"));
    let auth = |name: &[u8], message: &[u8]| request(opcode::SASL_AUTH, b"", name, message);
    for (name, message) in [
        (&b"PLAIN"[..], &b"\0foo\0ba"[..]),
        (b"PLAIN", b"\0fo\0bar"),
        (b"PLAIN", b"root\0foo\0bar"),
        (b"CRAM-MD5", b"\0foo\0bar"),
    ] {
        assert_eq!(ask(&mut stream, &auth(name, message)), failed(opcode::SASL_AUTH));
    }
    let step = request(opcode::SASL_STEP, b"", b"PLAIN", b"\0foo\0bar");
    assert_eq!(ask(&mut stream, &step), failed(opcode::SASL_STEP), "nothing has begun");
    let long = auth(b"PLAIN", &[b'x'; 100_000]);
    assert_eq!(ask(&mut stream, &long).status, 0x82, "it is not kept");
    let right = auth(b"PLAIN", b"\0foo\0bar");
    assert_eq!(ask(&mut stream, &right), welcome(opcode::SASL_AUTH));
    assert_eq!(ask(&mut stream, &get), reply(opcode::GET, 1, b"", b"Not found"));
    assert_eq!(ask(&mut stream, &auth(b"PLAIN", b"\0x\0y")), failed(opcode::SASL_AUTH));
    assert_eq!(ask(&mut stream, &get), failed(opcode::GET), "whoever fails is out");
    let mut stream = connect(&ours);
    assert_eq!(ask(&mut stream, &auth(b"PLAIN", b"")), reply(opcode::SASL_AUTH, 0x21, b"", b""));
    assert_eq!(ask(&mut stream, &step), welcome(opcode::SASL_STEP));
    assert_eq!(ask(&mut stream, &get), reply(opcode::GET, 1, b"", b"Not found"));
    let mut text = connect(&ours);
    let stored = ask_text(&mut text, b"set x 0 0 7\r\nfoo bar\r\n", b"\r\n");
    assert_eq!(stored, b"STORED\r\n", "text clients authenticate beside them");
}

#[test]
fn a_stranger_cannot_make_the_server_keep_a_value() {
    let ours = Ours::local(with_password());
    let mut stream = connect(&ours);
    // The header of a SET with a value of 1 MB is answered at once.
    let set = request(opcode::SET, &[0; 8], b"key", &vec![0; 1_000_000]);
    assert_eq!(ask(&mut stream, &set[..HEADER_BYTES]).status, 0x20);
    assert_eq!(read_to_end(&mut stream), b"");
}

#[test]
fn the_server_answers_for_itself() {
    let ours = Ours::local(Settings { threads: 3, ..Settings::default() });
    let mut stream = connect(&ours);
    for number in 0..20 {
        let key = format!("user:{number}");
        ask(&mut stream, &request(opcode::SET, &[0; 8], key.as_bytes(), b"value"));
    }
    let figures = |stream: &mut UnixStream, what: &[u8]| {
        stream.write_all(&request(opcode::STAT, b"", what, b"")).unwrap();
        let replies = std::iter::from_fn(|| {
            let reply = read_reply(stream);
            assert_eq!((reply.opcode, reply.status), (opcode::STAT, 0), "{reply:?}");
            (!reply.key.is_empty() || !reply.value.is_empty()).then_some(reply)
        });
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        replies.map(|it| (text(it.key), text(it.value))).collect::<Vec<_>>()
    };
    let value = |figures: &[(String, String)], name: &str| {
        let found = figures.iter().find(|it| it.0 == name);
        found.unwrap_or_else(|| panic!("no {name} in {figures:?}")).1.clone()
    };
    let all = figures(&mut stream, b"");
    assert_eq!((&*value(&all, "curr_items"), &*value(&all, "cmd_set")), ("20", "20"));
    let settings = figures(&mut stream, b"settings");
    assert_eq!(value(&settings, "binding_protocol"), "auto-negotiate");
    assert_eq!(value(&figures(&mut stream, b"items"), "items:1:number"), "20");
    assert_eq!(value(&figures(&mut stream, b"slabs"), "1:used_chunks"), "20");
    assert_eq!(figures(&mut stream, b"detail on"), []);
    ask(&mut stream, &request(opcode::GET, b"", b"user:1", b""));
    let dump = value(&figures(&mut stream, b"detail dump"), "detailed");
    assert_eq!(dump, "PREFIX user get 1 hit 1 set 0 del 0\r\nEND\r\n");
    assert_eq!(figures(&mut stream, b"reset"), []);
    assert_eq!(value(&figures(&mut stream, b""), "cmd_set"), "0");
    let unknown = request(opcode::STAT, b"", b"nothing", b"");
    assert_eq!(ask(&mut stream, &unknown), reply(opcode::STAT, 1, b"", b"Not found"));
    let verbosity = request(opcode::VERBOSITY, &[0, 0, 0, 2], b"", b"");
    assert_eq!(ask(&mut stream, &verbosity), reply(opcode::VERBOSITY, 0, b"", b""));
    assert_eq!(value(&figures(&mut stream, b"settings"), "verbosity"), "2");
    let flush = request(opcode::FLUSH, b"", b"", b"");
    assert_eq!(ask(&mut stream, &flush), reply(opcode::FLUSH, 0, b"", b""));
    assert_eq!(ask(&mut stream, &request(opcode::GET, b"", b"user:1", b"")).status, 1);
    let quit = request(opcode::QUIT, b"", b"", b"");
    assert_eq!(ask(&mut stream, &quit), reply(opcode::QUIT, 0, b"", b""));
    assert_eq!(read_to_end(&mut stream), b"");
    let ours = Ours::local(Settings { allows_flush: false, ..Settings::default() });
    assert_eq!(ask(&mut connect(&ours), &flush), reply(opcode::FLUSH, 0x20, b"", b"Auth failure."));
}

#[test]
fn unknown_commands_are_skipped_with_all_they_have() {
    let ours = Ours::local(Settings::default());
    let unknown = request(0x40, &[0; 8], b"key", &vec![b'v'; 200_000]);
    let mut stream = connect(&ours);
    assert_eq!(ask(&mut stream, &unknown), reply(0x40, 0x81, b"", b"Unknown command"));
    assert_eq!(ask(&mut stream, &request(opcode::NOOP, b"", b"", b"")).status, 0);
}

/// Values of a pipeline, by key; some are longer than what the server makes ahead.
fn fill(stream: &mut UnixStream, keys: usize, random: &mut Rng) -> Vec<Vec<u8>> {
    let mut values = Vec::new();
    for number in 0..keys {
        let bytes = if random.below(40) == 0 { 300_000 } else { random.below(900) as usize };
        let value = vec![b'a' + u8::try_from(number % 26).unwrap(); bytes];
        let key = format!("key{number}");
        stream.write_all(&request(opcode::SETQ, &[0; 8], key.as_bytes(), &value)).unwrap();
        values.push(value);
    }
    assert_eq!(ask(stream, &request(opcode::NOOP, b"", b"", b"")).opcode, opcode::NOOP);
    values
}

#[test]
fn long_pipelines_over_several_threads_are_answered_in_order() {
    const KEYS: usize = 300;
    let ours = Ours::local(Settings { threads: 3, ..Settings::default() });
    let mut stream = connect(&ours);
    let mut random = Rng::new(7);
    let values = fill(&mut stream, KEYS, &mut random);
    let mut writer = stream.try_clone().unwrap();
    let asked: Vec<usize> = (0..4 * REQUESTS_PER_TURN)
        .map(|_| random.below(u32::try_from(2 * KEYS).unwrap()) as usize)
        .collect();
    let numbers = asked.clone();
    let sender = std::thread::spawn(move || {
        for number in numbers {
            let key = format!("key{number}");
            writer.write_all(&request(opcode::GETKQ, b"", key.as_bytes(), b"")).unwrap();
        }
        writer.write_all(&request(opcode::NOOP, b"", b"", b"")).unwrap();
    });
    // Half of the keys are not there: nothing is said of them.
    for &number in asked.iter().filter(|&&number| number < KEYS) {
        let expected = reply(opcode::GETKQ, 0, format!("key{number}").as_bytes(), &values[number]);
        assert!(read_reply(&mut stream) == expected, "key{number}");
    }
    assert_eq!(read_reply(&mut stream).opcode, opcode::NOOP);
    sender.join().unwrap();
}

#[test]
fn items_on_flash_are_read_in_their_turn() {
    const KEYS: usize = 40_000;
    let disk = tempfile::tempdir().unwrap();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let flash = FlashSettings {
        path: disk.path().join("flash"),
        bytes: 192 << 20,
        reset: false,
        write_bytes_per_s: None,
        books: Bookkeeping::Only(memory.path().to_owned()),
    };
    let settings =
        Settings { memory_bytes: 16 << 20, threads: 2, flash: Some(flash), ..Settings::default() };
    let ours = Ours::local(settings);
    let mut stream = connect(&ours);
    let value = |number: usize| vec![u8::try_from(number % 251).unwrap(); 1000];
    for number in 0..KEYS {
        let key = format!("key{number}");
        let set = request(opcode::SETQ, &[0; 8], key.as_bytes(), &value(number));
        stream.write_all(&set).unwrap();
    }
    assert_eq!(ask(&mut stream, &request(opcode::NOOP, b"", b"", b"")).status, 0);
    let get = |opcode, number: usize| {
        let extras: &[u8] = if opcode == opcode::GAT { &[0; 4] } else { b"" };
        request(opcode, extras, format!("key{number}").as_bytes(), b"")
    };
    // Plain reads are answered from flash, the second one and touches after promotion.
    let mut hits = 0;
    for number in (0..KEYS).step_by(7) {
        for code in [opcode::GETQ, opcode::GAT, opcode::GET] {
            stream.write_all(&get(code, number)).unwrap();
        }
        let mut replies = vec![read_reply(&mut stream)];
        while replies.last().is_some_and(|it| it.opcode != opcode::GET) {
            replies.push(read_reply(&mut stream));
        }
        for it in &replies {
            assert!(it.status == 1 || it.value == value(number), "key{number}: {it:?}");
        }
        hits += usize::from(replies.iter().all(|it| it.status == 0));
    }
    assert!(hits > KEYS / 7 * 9 / 10, "{hits} hits");
    let text = ask_text(&mut stream_of_text(&ours), b"stats\r\n", b"END\r\n");
    let text = String::from_utf8(text).unwrap();
    let served = text.lines().find(|line| line.starts_with("STAT flash_served ")).unwrap();
    assert_ne!(served, "STAT flash_served 0");
}

fn stream_of_text(ours: &Ours) -> UnixStream {
    let mut stream = connect(ours);
    stream.write_all(b"mn\r\n").unwrap();
    assert_eq!(read_until(&mut stream, b"MN\r\n"), b"MN\r\n");
    stream
}
