//! KeyVault against a real server, over every transport, and beside the text protocol.

mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::talk::exchange;
use farpool_keyvault::client::{Address, Client, ClientError, Connection, Storing};
use farpool_keyvault::frame::{
    BROADCAST, HEADER_BYTES, Header, Opcode, Status, begin, finish, frame_length,
};
use farpool_keyvault::message::{Hello, Request, SetMode};
use farpool_keyvault::owner::{hash_key, shard_of};
use farpool_kv_server::{Server, ServerError, Settings, Shared};

struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    text: std::net::SocketAddr,
    tcp: std::net::SocketAddr,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start(threads: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyvault.sock");
        let any = "127.0.0.1:0".parse().unwrap();
        let settings = Settings {
            addresses: vec![any],
            keyvault_addresses: vec![any],
            keyvault_path: Some(path.clone()),
            memory_bytes: 256 << 20,
            threads,
            item_bytes_max: 8 << 20,
            ..Settings::default()
        };
        let server = Server::bind(settings, 1_700_000_000).unwrap();
        let &[text, tcp] = server.addresses() else { panic!("two addresses") };
        let shared = server.shared();
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { shared, thread, text, tcp, path, _folder: folder }
    }

    fn addresses(&self) -> [Address; 3] {
        [
            Address::Tcp(self.tcp),
            Address::Unix(self.path.clone()),
            Address::Shared(self.path.clone()),
        ]
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.ask_to_stop();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap().unwrap();
        }
    }
}

fn exercise(address: &Address, shards: usize) {
    let mut client = Client::connect(address).unwrap();
    assert_eq!(client.shards(), shards);
    client.flush_all().unwrap();
    assert_eq!(client.get(b"none").unwrap(), None);
    let names: Vec<Vec<u8>> = (0..3000).map(|number| format!("{number}").into_bytes()).collect();
    for name in &names {
        let how = Storing { client_flags: 9, ..Storing::default() };
        assert!(client.set(name, &name.repeat(20), how).unwrap().is_some());
    }
    let keys: Vec<&[u8]> = names.iter().map(|name| &name[..]).chain([&b"none"[..]]).collect();
    let values = client.get_many(&keys).unwrap();
    assert_eq!(values.last(), Some(&None));
    for (name, value) in names.iter().zip(&values) {
        let value = value.as_ref().unwrap();
        assert_eq!((value.client_flags, &value.bytes), (9, &name.repeat(20)));
    }
    let cas = client.get(b"7").unwrap().unwrap().cas;
    let add = Storing { mode: SetMode::Add, ..Storing::default() };
    assert_eq!(client.set(b"7", b"x", add).unwrap(), None);
    let newer = client.set(b"7", b"x", Storing { cas, ..Storing::default() }).unwrap().unwrap();
    assert_eq!(client.set(b"7", b"y", Storing { cas, ..Storing::default() }).unwrap(), None);
    assert!(newer > cas);
    client
        .set(b"7", b"y", Storing { mode: SetMode::Append, ..Storing::default() })
        .unwrap()
        .unwrap();
    assert_eq!(client.get(b"7").unwrap().unwrap().bytes, b"xy");
    assert!(matches!(client.change(b"7", 1, None), Err(ClientError::Status(Status::NotNumeric))));
    assert_eq!(client.change(b"count", 5, None).unwrap(), None);
    assert_eq!(client.change(b"count", 5, Some(40)).unwrap(), Some(40));
    assert_eq!(client.change(b"count", 5, None).unwrap(), Some(45));
    assert_eq!(client.change(b"count", -50, None).unwrap(), Some(0));
    assert!(client.touch(b"count", -1).unwrap());
    assert_eq!(client.get(b"count").unwrap(), None);
    assert!(client.delete(b"7").unwrap());
    assert!(!client.delete(b"7").unwrap());
    let large = vec![7; 900_000];
    client.set(b"large", &large, Storing::default()).unwrap().unwrap();
    assert!(client.get(b"large").unwrap().unwrap().bytes == large);
    client.flush_all().unwrap();
    assert!(client.get_many(&keys).unwrap().iter().all(Option::is_none));
}

#[test]
fn everything_works_over_every_transport() {
    for threads in [1, 3] {
        let server = Running::start(threads);
        for address in server.addresses() {
            exercise(&address, threads);
        }
    }
}

#[test]
fn text_and_keyvault_clients_see_the_same_items() {
    let server = Running::start(2);
    let mut text = TcpStream::connect(server.text).unwrap();
    let mut light = Client::connect(&Address::Tcp(server.tcp)).unwrap();
    text.write_all(b"set one 5 0 3\r\nabc\r\n").unwrap();
    let mut reply = [0; 8];
    text.read_exact(&mut reply).unwrap();
    let value = light.get(b"one").unwrap().unwrap();
    assert_eq!((value.client_flags, &value.bytes[..]), (5, &b"abc"[..]));
    light.set(b"two", b"xyz", Storing { client_flags: 6, ..Storing::default() }).unwrap().unwrap();
    text.write_all(b"get two\r\n").unwrap();
    let mut reply = [0; 25];
    text.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"VALUE two 6 3\r\nxyz\r\nEND\r\n");
}

/// Many requests in flight, for shards other than the connection's: each is answered once.
#[test]
fn requests_for_other_shards_are_passed_on() {
    let server = Running::start(3);
    for address in server.addresses() {
        let mut connection = Connection::connect(&address, BROADCAST, 200, false).unwrap();
        let names: Vec<String> = (0..2000).map(|number| format!("key{number}")).collect();
        let mut open = std::collections::HashMap::new();
        let mut next = 0;
        let mut answered = 0;
        while answered < 2 * names.len() {
            while connection.has_credit() && next < 2 * names.len() {
                let name = names[next % names.len()].as_bytes();
                // All are stored before the first is read.
                if next == names.len() && !open.is_empty() {
                    break;
                }
                let request = if next < names.len() {
                    Request::Set {
                        mode: SetMode::Set,
                        key: name,
                        value: name,
                        client_flags: 0,
                        exptime: 0,
                        cas: 0,
                    }
                } else {
                    Request::Get { key: name }
                };
                open.insert(connection.send(&request).unwrap(), next);
                next += 1;
            }
            connection.flush().unwrap();
            connection
                .receive(|answer| {
                    let at =
                        open.remove(&answer.request).expect("an answer to what was asked, once");
                    assert_eq!(answer.status, Status::Ok);
                    if at >= names.len() {
                        assert_eq!(&answer.body[16..], names[at - names.len()].as_bytes());
                    }
                    answered += 1;
                })
                .unwrap();
        }
        assert_eq!(connection.unanswered(), 0);
    }
}

fn frame(opcode: Opcode, request: u32, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let header = Header { length: 0, opcode, status: None, shard: 0, connection: 0, request };
    let start = begin(&mut out, header);
    out.extend_from_slice(body);
    finish(&mut out, start, true);
    out
}

fn read_answer(stream: &mut impl Read) -> Header {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).unwrap();
    let header = Header::read(&head, false).unwrap();
    let mut body = vec![0; header.length as usize - HEADER_BYTES];
    stream.read_exact(&mut body).unwrap();
    header
}

#[test]
fn damaged_frames_are_asked_for_again_and_nonsense_ends_the_connection() {
    let server = Running::start(2);
    let mut hello = Vec::new();
    Request::Hello(Hello { version: 1, shard: BROADCAST, credits: 4, unchecked: false })
        .write(&mut hello);
    let greeting = frame(Opcode::Hello, 1, &hello);
    let mut stream = UnixStream::connect(&server.path).unwrap();
    // One byte at a time: frames may arrive in any pieces.
    greeting.iter().for_each(|byte| stream.write_all(&[*byte]).unwrap());
    assert_eq!(read_answer(&mut stream).status, Some(Status::Ok));
    let mut damaged = frame(Opcode::Get, 2, b"key");
    damaged[17] ^= 1;
    stream.write_all(&damaged).unwrap();
    let answer = read_answer(&mut stream);
    assert_eq!((answer.status, answer.request), (Some(Status::Damaged), 2));
    stream.write_all(&frame(Opcode::Get, 2, b"key")).unwrap();
    assert_eq!(read_answer(&mut stream).status, Some(Status::NotFound));
    stream.write_all(&frame(Opcode::Get, 3, b"")).unwrap();
    assert_eq!(read_answer(&mut stream).status, Some(Status::Malformed));
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "the connection ends");

    for nonsense in [frame(Opcode::Get, 1, b"key"), vec![3, 0, 0, 0, 0, 0], vec![0; 64]] {
        let mut stream = UnixStream::connect(&server.path).unwrap();
        stream.write_all(&nonsense).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.len() <= HEADER_BYTES, "{rest:?}");
    }
}

/// Status and value of each answer, by request number. CAS numbers are cut off: they go on from
/// stream to stream.
fn answers(mut bytes: &[u8]) -> BTreeMap<u32, (Option<Status>, Vec<u8>)> {
    /// Bytes in front of the value in the answer to a GET.
    const BEFORE_VALUE: usize = 16;
    let mut answers = BTreeMap::new();
    while !bytes.is_empty() {
        let length = frame_length(bytes).unwrap().unwrap();
        let (answer, rest) = bytes.split_at(length);
        let header = Header::read(answer, true).unwrap();
        let body = &answer[HEADER_BYTES..];
        let value = if header.opcode == Opcode::Get { body.get(BEFORE_VALUE..) } else { None };
        let value = value.unwrap_or_default().to_vec();
        assert!(answers.insert(header.request, (header.status, value)).is_none(), "answered twice");
        bytes = rest;
    }
    answers
}

#[test]
fn frames_may_be_cut_at_every_byte() {
    for threads in [1, 3] {
        let server = Running::start(threads);
        let set = |key, value| Request::Set {
            mode: SetMode::Set,
            key,
            value,
            client_flags: 7,
            exptime: 0,
            cas: 0,
        };
        let requests = [
            Request::Hello(Hello { version: 1, shard: BROADCAST, credits: 64, unchecked: false }),
            set(b"a", b"first"),
            set(b"key of another shard", b"second value"),
            Request::Get { key: b"a" },
            Request::Get { key: b"key of another shard" },
            Request::Get { key: b"nobody" },
            set(b"a", b"third"),
            Request::Get { key: b"a" },
            Request::Delete { key: b"a", cas: 0 },
            Request::Get { key: b"a" },
        ];
        let mut whole = Vec::new();
        for (number, request) in (1..).zip(&requests) {
            let mut body = Vec::new();
            request.write(&mut body);
            whole.extend_from_slice(&frame(request.opcode(), number, &body));
        }
        let connect = || UnixStream::connect(&server.path).unwrap();
        let expected = answers(&exchange(connect(), &[&whole]));
        assert_eq!(expected.len(), requests.len(), "{expected:?}");
        assert_eq!(expected[&5], (Some(Status::Ok), b"second value".to_vec()));
        assert_eq!(expected[&8], (Some(Status::Ok), b"third".to_vec()));
        assert_eq!(expected[&10].0, Some(Status::NotFound));
        for cut in 1..whole.len() {
            let given = answers(&exchange(connect(), &[&whole[..cut], &whole[cut..]]));
            assert_eq!(given, expected, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = whole.chunks(1).collect();
        assert_eq!(answers(&exchange(connect(), &bytes)), expected, "every byte alone");
    }
}

/// Clients in shared memory that vanish leave nothing behind that harms others.
#[test]
fn clients_in_shared_memory_come_and_go() {
    let server = Running::start(1);
    let address = Address::Shared(server.path.clone());
    let mut stays = Client::connect(&address).unwrap();
    stays.set(b"key", b"value", Storing::default()).unwrap();
    for _ in 0..50 {
        let mut goes = Connection::connect(&address, 0, 8, true).unwrap();
        goes.send(&Request::Get { key: b"key" }).unwrap();
        goes.flush().unwrap();
        drop(goes);
        assert_eq!(stays.get(b"key").unwrap().unwrap().bytes, b"value");
    }
    // The server notices that the last one has gone when it next checks its sockets.
    let deadline = Instant::now() + common::PATIENCE;
    while server.shared.connections.load(std::sync::atomic::Ordering::Relaxed) != 1 {
        assert!(Instant::now() < deadline, "connections that ended are still counted");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn after_an_error_a_client_reads_the_answers_to_its_own_requests() {
    let running = Running::start(2);
    let mut client = Client::connect(&Address::Tcp(running.tcp)).unwrap();
    for number in 0..50 {
        let name = format!("key{number}");
        client.set(name.as_bytes(), name.as_bytes(), Storing::default()).unwrap().unwrap();
    }
    let names: Vec<String> = (0..50).map(|number| format!("key{number}")).collect();
    let mut keys: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    // The first shard refuses a key of this length; the second answers nevertheless.
    let long =
        (0..).map(|n| format!("{n:0>255}")).find(|it| shard_of(hash_key(it.as_bytes()), 2) == 0);
    let long = long.unwrap();
    keys.push(long.as_bytes());
    assert!(client.get_many(&keys).is_err());
    let mut served = 0;
    for name in &names {
        let value = client.get(name.as_bytes());
        // The refusal ends that connection; no answer ever goes to another request.
        if let Ok(value) = value {
            assert_eq!(value.unwrap().bytes, name.as_bytes());
            served += 1;
        }
    }
    assert!(served > 10, "{served} of the second shard's keys");
}

#[test]
fn many_answers_that_are_long_together_all_come_through_shared_memory() {
    let running = Running::start(1);
    let address = Address::Shared(running.path.clone());
    let value = vec![b'v'; 8 << 10];
    let mut client = Client::connect(&address).unwrap();
    for number in 0..200 {
        let name = format!("key{number:03}");
        client.set(name.as_bytes(), &value, Storing::default()).unwrap().unwrap();
    }
    let (done, waits) = std::sync::mpsc::channel();
    let asking = std::thread::spawn(move || {
        let mut connection = Connection::connect(&address, 0, 256, true).unwrap();
        for number in 0..200 {
            let name = format!("key{number:03}");
            connection.send(&Request::Get { key: name.as_bytes() }).unwrap();
        }
        connection.flush().unwrap();
        let mut whole = 0;
        while connection.unanswered() > 0 {
            let is_whole = |body: &[u8]| body.ends_with(&[b'v'; 8 << 10]);
            connection.receive(|it| whole += usize::from(is_whole(it.body))).unwrap();
        }
        done.send(whole).unwrap();
    });
    assert_eq!(waits.recv_timeout(common::PATIENCE), Ok(200));
    asking.join().unwrap();
}
