//! Clients in shared memory that do not take their answers, and what remains of clients that have
//! gone. The servers run in this process, and the tests read the kernel's view of its threads and
//! epoll sets, so they run one at a time.

mod common;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use common::{Ours, wait_until};
use farpool_kernel::lock;
use farpool_keyvault::client::{Address, Client, Storing};
use farpool_keyvault::frame::{HEADER_BYTES, Header, Opcode, Status, begin, finish, frame_length};
use farpool_keyvault::message::{Hello, Request};
use farpool_keyvault::ring::{Popped, RING_BYTES_MIN, Reader, Writer};
use farpool_keyvault::share::{Ring, RingSizes, map, receive_with_files};
use farpool_kv_server::Settings;

static ALONE: Mutex<()> = Mutex::new(());
/// Marks a ring's bell in an epoll set.
const BELL_BIT: u64 = 1 << 62;
/// A value whose answer fits into the smallest ring, and one whose answer goes over the socket.
const SMALL: [u8; 600] = [b's'; 600];
const LONG: [u8; 5000] = [b'l'; 5000];

struct Server {
    _ours: Ours,
    path: PathBuf,
    _folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// A server with one thread and two items.
fn server() -> Server {
    let alone = lock(&ALONE);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keyvault.sock");
    let keyvault_path = Some(path.clone());
    let ours = Ours::local(Settings { threads: 1, keyvault_path, ..Settings::default() });
    let mut client = Client::connect(&Address::Unix(path.clone())).unwrap();
    client.set(b"small", &SMALL, Storing::default()).unwrap().unwrap();
    client.set(b"long", &LONG, Storing::default()).unwrap().unwrap();
    Server { _ours: ours, path, _folder: folder, _alone: alone }
}

fn frame(request: &Request<'_>, number: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let (opcode, length) = (request.opcode(), 0);
    let header = Header { length, opcode, status: None, shard: 0, connection: 0, request: number };
    let start = begin(&mut out, header);
    request.write(&mut out);
    finish(&mut out, start, true);
    out
}

/// A client's ends of the smallest rings, and its socket.
struct Raw {
    socket: UnixStream,
    requests: Writer<Ring>,
    answers: Reader<Ring>,
    wake_server: OwnedFd,
    /// Bytes received over the socket and from the ring.
    come: Vec<u8>,
    next: u32,
}

impl Raw {
    fn connect(path: &Path) -> Self {
        let mut socket = UnixStream::connect(path).unwrap();
        let hello = Hello { version: 1, shard: 0, credits: 1024, unchecked: false };
        socket.write_all(&frame(&Request::Hello(hello), 1)).unwrap();
        let mut head = [0; HEADER_BYTES];
        socket.read_exact(&mut head).unwrap();
        let mut body = vec![0; Header::read(&head, false).unwrap().length as usize - HEADER_BYTES];
        socket.read_exact(&mut body).unwrap();
        let bytes = u32::try_from(RING_BYTES_MIN).unwrap();
        let share = Request::Share { request_bytes: bytes, answer_bytes: bytes };
        socket.write_all(&frame(&share, 2)).unwrap();
        let (_, files) = receive_with_files(&socket, &mut [0; 64]).unwrap();
        let [file, wake_server, _wake_client] = <[OwnedFd; 3]>::try_from(files).unwrap();
        let (requests, answers) = map(&file, RingSizes::fitting(bytes, bytes)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let (requests, answers) = (Writer::new(requests), Reader::new(answers));
        Self { socket, requests, answers, wake_server, come: Vec::new(), next: 3 }
    }

    fn get(&mut self, key: &[u8]) -> Vec<u8> {
        self.next += 1;
        frame(&Request::Get { key }, self.next)
    }

    fn wake(&self) {
        if self.requests.reader_sleeps() {
            let _ = rustix::io::write(&self.wake_server, &1u64.to_ne_bytes());
        }
    }

    /// Takes all available answers. Returns the total bytes received.
    fn take(&mut self) -> usize {
        while self.answers.pop(&mut self.come) == Popped::Frame {}
        self.answers.tell();
        let mut buffer = [0; 64 << 10];
        // Answers over the socket may arrive in pieces, those in the ring between them are whole:
        // the socket is read to the end of a frame first.
        let mut long = Vec::new();
        loop {
            match self.socket.read(&mut buffer) {
                Ok(bytes) if bytes > 0 => long.extend_from_slice(&buffer[..bytes]),
                Ok(_) => panic!("the server has ended the connection"),
                Err(_) if is_whole(&long) => break,
                Err(_) => {}
            }
        }
        self.come.extend_from_slice(&long);
        self.come.len()
    }

    /// Numbers of the answered requests, each checked to have its item.
    fn answered(&self) -> Vec<u32> {
        let (mut numbers, mut rest) = (Vec::new(), &self.come[..]);
        while let Some(Ok(length)) = frame_length(rest) {
            let header = Header::read(&rest[..length], true).unwrap();
            assert_eq!((header.status, header.opcode), (Some(Status::Ok), Opcode::Get));
            let value = &rest[HEADER_BYTES + 16..length];
            assert!(value == SMALL || value == LONG);
            numbers.push(header.request);
            rest = &rest[length..];
        }
        numbers
    }
}

fn is_whole(mut bytes: &[u8]) -> bool {
    while let Some(Ok(length)) = frame_length(bytes) {
        let Some(rest) = bytes.get(length..) else { return false };
        bytes = rest;
    }
    bytes.is_empty()
}

/// Processor time of the serving thread.
fn run_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of = |path: PathBuf| {
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let times = std::fs::read_to_string(path.join("schedstat")).ok()?;
        let nanoseconds = times.split(' ').next()?.parse().ok()?;
        (name.trim() == "kv").then(|| Duration::from_nanos(nanoseconds))
    };
    tasks.filter_map(|it| of(it.unwrap().path())).max().expect("the serving thread")
}

/// Waits until the serving thread does nothing but check for room now and then.
fn server_rests() {
    const WINDOW: Duration = Duration::from_millis(20);
    let (mut since, mut before) = (Instant::now(), run_time());
    wait_until("the thread rests", || {
        if since.elapsed() < WINDOW {
            return None;
        }
        let (elapsed, now) = (since.elapsed(), run_time());
        let rests = (now - before) * 5 < elapsed;
        (since, before) = (Instant::now(), now);
        rests.then_some(())
    });
}

/// Number of bells in this process's epoll sets.
fn watched_bells() -> usize {
    let mut bells = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        if std::fs::read_link(entry.path()).is_ok_and(|it| it.ends_with("anon_inode:[eventpoll]")) {
            let info = Path::new("/proc/self/fdinfo").join(entry.file_name());
            for line in std::fs::read_to_string(info).unwrap_or_default().lines() {
                let data = line.split("data:").nth(1).and_then(|it| it.split_whitespace().next());
                let data = data.and_then(|it| u64::from_str_radix(it, 16).ok());
                // Tokens of the thread itself have all upper bits set.
                let is_bell = |it: u64| it & BELL_BIT != 0 && it >> 63 == 0;
                bells += usize::from(data.is_some_and(is_bell));
            }
        }
    }
    bells
}

/// The client has the bell, too: if it stayed registered, it could wake the thread for ever.
#[test]
fn a_bell_is_watched_no_longer_than_its_connection_lives() {
    let server = server();
    let raw = Raw::connect(&server.path);
    wait_until("the bell is watched", || (watched_bells() == 1).then_some(()));
    let Raw { socket, wake_server: bell, .. } = raw;
    drop(socket);
    wait_until("the bell is gone", || (watched_bells() == 0).then_some(()));
    rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
    server_rests();
}

#[test]
fn who_shares_memory_twice_is_refused_and_gets_no_second_bell() {
    let server = server();
    let mut raw = Raw::connect(&server.path);
    wait_until("the bell is watched", || (watched_bells() == 1).then_some(()));
    let share = Request::Share { request_bytes: 4096, answer_bytes: 4096 };
    raw.socket.write_all(&frame(&share, 3)).unwrap();
    let answer = wait_until("the answer", || {
        let mut answer = Vec::new();
        (raw.answers.pop(&mut answer) == Popped::Frame).then_some(answer)
    });
    assert_eq!(Header::read(&answer, true).unwrap().status, Some(Status::Unsupported));
    assert_eq!(watched_bells(), 1);
    drop(raw);
    wait_until("the bell is gone", || (watched_bells() == 0).then_some(()));
}

/// Other clients are served, the thread rests, and no further request is taken. In the end each
/// request has its answer.
fn others_are_served(server: &Server, raw: &mut Raw, asked: u32) {
    server_rests();
    let mut other = Client::connect(&Address::Shared(server.path.clone())).unwrap();
    for _ in 0..100 {
        assert_eq!(other.get(b"small").unwrap().unwrap().bytes, SMALL);
    }
    drop(other);
    wait_until("all answers", || {
        raw.take();
        (raw.answered().len() == asked as usize).then_some(())
    });
    let mut numbers = raw.answered();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), asked as usize, "each is answered once");
    // It continues as before.
    let get = raw.get(b"small");
    assert!(raw.requests.push(&get));
    raw.wake();
    wait_until("one more answer", || {
        raw.take();
        (raw.answered().len() == asked as usize + 1).then_some(())
    });
}

/// Sends requests through the ring until the server takes no more: it rests, and there is still no
/// room.
fn ask_in_vain(server: &Server, is_long: impl Fn(u32) -> bool) {
    /// The most requests that both rings, the socket's buffers and the batches under way hold: far
    /// fewer than would otherwise be sent.
    const TAKEN_MAX: u32 = 400;
    let mut raw = Raw::connect(&server.path);
    let mut asked = 0;
    loop {
        let get = raw.get(if is_long(asked) { b"long" } else { b"small" });
        let is_taken = raw.requests.push(&get) || {
            raw.wake();
            server_rests();
            raw.requests.push(&get)
        };
        if !is_taken {
            break;
        }
        asked += 1;
        assert!(asked < TAKEN_MAX, "the server takes request after request");
    }
    assert!(asked > 20);
    others_are_served(server, &mut raw, asked);
}

#[test]
fn who_does_not_take_his_answers_out_of_the_ring_costs_nobody_anything() {
    ask_in_vain(&server(), |_| false);
}

/// An answer too long for the ring goes over the socket, even while the ring is full.
#[test]
fn long_answers_that_come_while_the_ring_is_full_are_not_lost() {
    ask_in_vain(&server(), |number| number % 7 == 3);
}

#[test]
fn who_does_not_take_long_answers_from_the_socket_costs_nobody_anything() {
    ask_in_vain(&server(), |_| true);
}

#[test]
fn who_asks_over_the_socket_and_does_not_look_into_the_ring_costs_little_memory() {
    /// The most that the socket's buffers, one read and the answers to a batch hold; unbounded if
    /// the server did not stop.
    const TAKEN_BYTES_MAX: usize = 4 << 20;
    let server = server();
    let mut raw = Raw::connect(&server.path);
    let (mut asked, mut taken_bytes) = (0, 0);
    'ask: loop {
        let get = raw.get(b"small");
        let mut sent = 0;
        while sent < get.len() {
            match raw.socket.write(&get[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(_) if sent > 0 => server_rests(),
                Err(_) => {
                    server_rests();
                    match raw.socket.write(&get) {
                        Ok(bytes) => sent += bytes,
                        Err(_) => break 'ask,
                    }
                }
            }
        }
        asked += 1;
        taken_bytes += get.len();
        assert!(taken_bytes < TAKEN_BYTES_MAX, "the server takes request after request");
    }
    others_are_served(&server, &mut raw, asked);
}
