//! Leases with a real server: clients read values where they lie, come, go and are killed, and
//! leave nothing behind.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use farpool_keyvault::client::{Address, Client, ClientError, Connection, Storing};
use farpool_keyvault::frame::{HEADER_BYTES, Header, Opcode, Status, begin, finish};
use farpool_keyvault::lease::RELEASE_BATCH;
use farpool_keyvault::message::{Hello, LeasesGranted, MaybeLeased, Request};
use farpool_keyvault::share::receive_with_files;
use farpool_kv_protocol::lease::LEASES_MAX;
use farpool_kv_server::{Server, ServerError, Settings, Shared};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Memory of one thread's shard.
const SHARD_BYTES: usize = 64 << 20;
/// Every event has to happen within this time, or the test fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Tells this test's own binary, run again, from which server to lease until it is killed.
const VICTIM_VARIABLE: &str = "FARPOOL_TEST_LEASES_FROM";

struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    text: std::net::SocketAddr,
    tcp: std::net::SocketAddr,
    metrics: std::net::SocketAddr,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start(threads: usize, leases: bool) -> Self {
        Self::start_with(threads, leases, 0)
    }

    fn start_with(threads: usize, leases: bool, idle_timeout_s: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyvault.sock");
        let any = "127.0.0.1:0".parse().unwrap();
        let settings = Settings {
            addresses: vec![any],
            keyvault_addresses: vec![any],
            keyvault_path: Some(path.clone()),
            metrics_address: Some(any),
            keyvault_leases: leases,
            memory_bytes: threads * SHARD_BYTES,
            threads,
            item_bytes_max: 8 << 20,
            idle_timeout_s,
            ..Settings::default()
        };
        let server = Server::bind(settings, 1_700_000_000).unwrap();
        let &[text, tcp] = server.addresses() else { panic!("two addresses") };
        let (shared, metrics) = (server.shared(), server.metrics_address().unwrap());
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { shared, thread, text, tcp, metrics, path, _folder: folder }
    }

    fn client(&self, bytes_min: u32) -> Client {
        Client::connect_leasing(&Address::Shared(self.path.clone()), bytes_min).unwrap()
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

fn value(number: usize, bytes: usize) -> Vec<u8> {
    let mut value = format!("{number}:").into_bytes();
    value.resize(bytes, u8::try_from(number % 251).unwrap());
    value
}

fn store(client: &mut Client, key: &str, value: &[u8]) {
    let how = Storing { client_flags: 5, ..Storing::default() };
    client.set(key.as_bytes(), value, how).unwrap().unwrap();
}

#[test]
fn leases_show_the_value_as_it_was() {
    for threads in [1, 3] {
        let server = Running::start(threads, true);
        for transport in [Address::Shared, Address::Unix] {
            let mut client = Client::connect_leasing(&transport(server.path.clone()), 0).unwrap();
            assert!(client.is_leasing());
            let sizes = [0, 1, 64, 1024, 9000, 64 << 10, 1 << 20, 5 << 20];
            let mut kept = Vec::new();
            for (number, bytes) in sizes.into_iter().enumerate() {
                let key = format!("key{number}");
                store(&mut client, &key, &value(number, bytes));
                let leased = client.get_lease(key.as_bytes()).unwrap().unwrap();
                assert!(leased.is_leased(), "{bytes} bytes");
                let copied = client.get(key.as_bytes()).unwrap().unwrap();
                assert_eq!((leased.client_flags, leased.cas), (5, copied.cas));
                kept.push((leased, value(number, bytes)));
            }
            assert!(client.get_lease(b"none").unwrap().is_none());
            store(&mut client, "number", b"100");
            let number = client.get_lease(b"number").unwrap().unwrap();
            assert_eq!(client.change(b"number", 5, None).unwrap(), Some(105));
            assert_eq!(&number[..], b"100");
            assert_eq!(&client.get_lease(b"number").unwrap().unwrap()[..], b"105");
            // Replaced, deleted, flushed: the holder of a lease does not notice.
            for (at, (leased, expected)) in kept.iter().enumerate() {
                let key = format!("key{at}");
                store(&mut client, &key, &vec![b'x'; expected.len()]);
                assert!(**leased == expected[..]);
                assert!(
                    client.get_lease(key.as_bytes()).unwrap().unwrap().iter().all(|&it| it == b'x')
                );
                client.delete(key.as_bytes()).unwrap();
            }
            client.flush_all().unwrap();
            for number in 0..3 * threads * SHARD_BYTES / 100_000 {
                store(&mut client, &format!("fill{number}"), &vec![b'y'; 100_000]);
            }
            assert!(kept.iter().all(|(leased, expected)| **leased == expected[..]));
            // A lease outlives its client: the connection stays until the lease ends.
            drop(client);
            let mut other = server.client(0);
            for number in 0..threads * SHARD_BYTES / 100_000 {
                store(&mut other, &format!("more{number}"), &vec![b'z'; 100_000]);
            }
            assert!(kept.iter().all(|(leased, expected)| **leased == expected[..]));
        }
    }
}

/// A figure from `stats`.
fn statistic(server: &Running, name: &str) -> u64 {
    let mut stream = std::net::TcpStream::connect(server.text).unwrap();
    stream.write_all(b"stats\r\nquit\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let front = format!("STAT {name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&front));
    line.unwrap_or_else(|| panic!("stats has no {name}")).parse().unwrap()
}

/// The text of `/metrics`.
fn metrics(server: &Running) -> String {
    let mut stream = std::net::TcpStream::connect(server.metrics).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kv\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn leases_are_released_in_batches_or_at_once() {
    let server = Running::start(1, true);
    let mut client = server.client(0);
    store(&mut client, "key", b"value");
    for _ in 0..10 * RELEASE_BATCH {
        assert_eq!(&client.get_lease(b"key").unwrap().unwrap()[..], b"value");
    }
    let held = statistic(&server, "leases_held");
    assert!(held > 0 && held <= RELEASE_BATCH as u64, "{held} leases");
    client.release_ended().unwrap();
    assert_eq!(statistic(&server, "leases_held"), 0);
    assert_eq!(statistic(&server, "leases"), 10 * RELEASE_BATCH as u64);
    assert_eq!(statistic(&server, "leased_bytes"), 0);
    let kept = client.get_lease(b"key").unwrap().unwrap();
    farpool_testkit::wait_until("a report", PATIENCE, || {
        metrics(&server).contains("farpool_kv_leases_held 1\n")
    });
    let total = format!("farpool_kv_leases_total {}\n", 10 * RELEASE_BATCH + 1);
    let pinned_bytes = statistic(&server, "leased_bytes");
    let wanted = [total, format!("farpool_kv_leased_bytes {pinned_bytes}\n")];
    let told = metrics(&server);
    assert!(wanted.iter().all(|line| told.contains(line)), "{told}");
    assert!(pinned_bytes > 0 && told.contains("farpool_kv_leases_refused_total 0\n"));
    assert_eq!(kept[..], *b"value");
}

#[test]
fn beyond_the_limits_values_are_copied() {
    let server = Running::start(1, true);
    let mut client = server.client(100);
    store(&mut client, "short", &[1; 99]);
    store(&mut client, "key", &[2; 100]);
    assert!(!client.get_lease(b"short").unwrap().unwrap().is_leased());
    let mut kept: Vec<_> =
        (0..LEASES_MAX).map(|_| client.get_lease(b"key").unwrap().unwrap()).collect();
    assert!(kept.iter().all(|it| it.is_leased()));
    let copied = client.get_lease(b"key").unwrap().unwrap();
    assert!(!copied.is_leased() && copied[..] == [2; 100]);
    // A lease that ends makes room for another once the server knows.
    kept.pop();
    client.release_ended().unwrap();
    assert!(client.get_lease(b"key").unwrap().unwrap().is_leased());
    kept.clear();
    client.release_ended().unwrap();

    // A quarter of the memory, and no more.
    let mut leased = Vec::new();
    let mut copies = 0;
    for number in 0..60 {
        let key = format!("large{number}");
        store(&mut client, &key, &value(number, 1 << 20));
        let it = client.get_lease(key.as_bytes()).unwrap().unwrap();
        assert!(it[..] == value(number, 1 << 20));
        if it.is_leased() { leased.push(it) } else { copies += 1 }
    }
    assert!((10..=16).contains(&leased.len()) && copies > 40, "{} leased", leased.len());
    assert_eq!(statistic(&server, "leases_refused"), copies + 1);
}

#[test]
fn only_who_may_gets_leases() {
    let without = Running::start(1, false);
    let mut client = without.client(0);
    assert!(!client.is_leasing());
    store(&mut client, "key", b"value");
    let copied = client.get_lease(b"key").unwrap().unwrap();
    assert!(!copied.is_leased() && copied[..] == *b"value" && copied.client_flags == 5);
    assert!(client.get_lease(b"none").unwrap().is_none());

    let with = Running::start(1, true);
    let mut client = Client::connect_leasing(&Address::Tcp(with.tcp), 0).unwrap();
    assert!(!client.is_leasing());
    store(&mut client, "key", b"value");
    assert!(!client.get_lease(b"key").unwrap().unwrap().is_leased());
    // A client that asks all the same is refused, and still served.
    let mut connection = Connection::connect(&Address::Tcp(with.tcp), 0, 8, false).unwrap();
    for (request, expected) in [
        (Request::Leases { bytes_min: 0 }, Status::Unsupported),
        (Request::Share { request_bytes: 4096, answer_bytes: 4096 }, Status::Unsupported),
        (Request::GetLease { key: b"key" }, Status::Ok),
        (Request::Noop, Status::Ok),
    ] {
        connection.send(&request).unwrap();
        connection.flush().unwrap();
        connection
            .receive(|answer| {
                assert_eq!(answer.status, expected);
                if matches!(request, Request::GetLease { .. }) {
                    let read = MaybeLeased::read(answer.body);
                    assert!(matches!(read, Some(MaybeLeased::Copy(it)) if it.value == b"value"));
                }
            })
            .unwrap();
    }
}

/// Run as another process: takes leases, reports that, and never releases them.
#[test]
fn a_client_that_is_killed() {
    let Some(path) = std::env::var_os(VICTIM_VARIABLE) else { return };
    let mut client = Client::connect_leasing(&Address::Shared(path.into()), 0).unwrap();
    let leases: Vec<_> = (0..12)
        .map(|at| client.get_lease(format!("key{at}").as_bytes()).unwrap().unwrap())
        .collect();
    assert!(leases.iter().all(|it| it.is_leased()));
    store(&mut client, "ready", b"");
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_killed_client_leaves_no_leases_behind() {
    let server = Running::start(2, true);
    let mut stays = server.client(0);
    for number in 0..12 {
        store(&mut stays, &format!("key{number}"), &value(number, 700_000));
    }
    let mine = stays.get_lease(b"key3").unwrap().unwrap();
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_client_that_is_killed", "--nocapture"])
        .env(VICTIM_VARIABLE, &server.path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    farpool_testkit::wait_until("the other client", PATIENCE, || {
        stays.get(b"ready").unwrap().is_some()
    });
    assert_eq!(statistic(&server, "leases_held"), 13);
    for number in 0..12 {
        assert!(stays.delete(format!("key{number}").as_bytes()).unwrap());
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    farpool_testkit::wait_until("the end of its leases", PATIENCE, || {
        statistic(&server, "leases_held") == 1
    });
    let held_bytes = statistic(&server, "leased_bytes");
    assert!((700_000..800_000).contains(&held_bytes), "{held_bytes} bytes are pinned");
    assert!(mine[..] == value(3, 700_000));
    drop(mine);
    stays.release_ended().unwrap();
    assert_eq!(statistic(&server, "leases_held"), 0);
}

/// A client that holds leases is not disconnected as idle: it could not know that the memory is
/// freed.
#[test]
fn readers_are_not_idle() {
    let server = Running::start_with(1, true, 5);
    let (mut reader, mut idler) = (server.client(0), server.client(0));
    store(&mut reader, "key", b"value");
    assert!(idler.get(b"key").unwrap().is_some());
    let leased = reader.get_lease(b"key").unwrap().unwrap();
    farpool_testkit::wait_until("the idle client's end", PATIENCE, || {
        server.shared.connections.load(Ordering::Relaxed) == 1
    });
    assert_eq!(&leased[..], b"value");
    assert!(reader.get(b"key").unwrap().is_some());
    assert!(matches!(idler.get(b"key"), Err(ClientError::Closed | ClientError::Io(_))));
}

fn frame(request: &Request<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    let opcode = request.opcode();
    let header = Header { length: 0, opcode, status: None, shard: 0, connection: 0, request: 1 };
    let start = begin(&mut out, header);
    request.write(&mut out);
    finish(&mut out, start, true);
    out
}

fn greet(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    let hello = Hello { version: 1, shard: 0, credits: 4, unchecked: false };
    stream.write_all(&frame(&Request::Hello(hello))).unwrap();
    stream.read_exact(&mut [0; HEADER_BYTES + 12]).unwrap();
    stream
}

/// The descriptor handed to a client is read-only, whatever the client tries with it.
#[test]
fn what_is_handed_out_only_reads() {
    let server = Running::start(1, true);
    let mut stream = greet(&server.path);
    stream.write_all(&frame(&Request::Leases { bytes_min: 0 })).unwrap();
    let mut answer = [0; HEADER_BYTES + 16];
    let (bytes, files) = receive_with_files(&stream, &mut answer).unwrap();
    assert_eq!(bytes, answer.len());
    let header = Header::read(&answer, true).unwrap();
    assert_eq!((header.opcode, header.status), (Opcode::Leases, Some(Status::Ok)));
    let granted = LeasesGranted::read(&answer[HEADER_BYTES..]).unwrap();
    assert_eq!(granted.leases as usize, LEASES_MAX);
    let [file] = &files[..] else { panic!("{} descriptors", files.len()) };
    let map = |access| {
        let bytes = usize::try_from(granted.memory_bytes).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file.as_fd(), 0) }
    };
    assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE).err(), Some(Errno::ACCESS));
    assert!(map(ProtFlags::READ).is_ok());
    assert_eq!(rustix::io::pwrite(file, b"x", 0).err(), Some(Errno::BADF));
    // A second request is refused, and unknown lease numbers are ignored.
    stream.write_all(&frame(&Request::Leases { bytes_min: 0 })).unwrap();
    let mut answer = [0; HEADER_BYTES];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(Header::read(&answer, true).unwrap().status, Some(Status::Unsupported));
    let mut ids = farpool_keyvault::message::LeaseIdList::default();
    [1, 0x1000, u32::MAX]
        .into_iter()
        .filter_map(std::num::NonZeroU32::new)
        .for_each(|id| ids.push(id));
    stream.write_all(&frame(&Request::Release(ids.ids()))).unwrap();
    let mut answer = [0; HEADER_BYTES + 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[HEADER_BYTES..], [0; 4]);
}

/// A server that gives wrong positions for values is not believed.
#[test]
fn nonsense_of_a_hostile_server_is_refused() {
    use farpool_keyvault::message::LeasedItem;
    let server = Running::start(1, true);
    let address = Address::Shared(server.path.clone());
    let connection = Connection::connect_leasing(&address, 0, 8, true, 0).unwrap();
    let leases = connection.leases().unwrap();
    let memory_bytes = {
        let mut stream = greet(&server.path);
        stream.write_all(&frame(&Request::Leases { bytes_min: 0 })).unwrap();
        let mut answer = [0; HEADER_BYTES + 16];
        receive_with_files(&stream, &mut answer).unwrap();
        LeasesGranted::read(&answer[HEADER_BYTES..]).unwrap().memory_bytes
    };
    let lease = std::num::NonZeroU32::new(7).unwrap();
    let body = |at, value_bytes| {
        let mut body = Vec::new();
        LeasedItem { client_flags: 0, lease, cas: 1, at, value_bytes }.write(&mut body);
        body
    };
    assert_eq!(leases.read(&body(memory_bytes - 5, 5)).unwrap().len(), 5);
    for (at, bytes) in [(memory_bytes - 4, 5), (memory_bytes + 1, 0), (u64::MAX, 1), (0, u32::MAX)]
    {
        assert!(leases.read(&body(at, bytes)).is_none(), "{at} {bytes}");
    }
    assert!(leases.read(&body(0, 8)[..31]).is_none());
}
