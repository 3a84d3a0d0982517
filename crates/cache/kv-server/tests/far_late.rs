//! A blade that answers a read after its request has timed out: a later request must not be
//! answered from that record.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server as Blade};
use farpool_kv_server::{FarSettings, FarSource, SealPolicy, Server, Settings};
use farpool_policy::CacheKind;
use farpool_pool::Address;
use farpool_wire::{HEADER_BYTES, Header};

/// After this long without an event, a test fails; also the deadline of the blade, which is held up
/// for longer than requests wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// Held answers that carry pages, the oldest first; None while answers pass.
type Held = Arc<Mutex<Option<Vec<Answer>>>>;

/// An answer, and the connection that it belongs to.
struct Answer {
    connection: usize,
    to: TcpStream,
    frame: Vec<u8>,
}

/// A proxy to a blade that can hold back read answers. A connection on which nothing comes for a
/// while is replaced by its client, which asks again: then what was held for it is discarded, and
/// the repeated answer is held instead. The threads end with the connections.
struct Proxy {
    address: SocketAddr,
    held: Held,
}

impl Proxy {
    fn start(blade: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let held = Held::default();
        let shared = Arc::clone(&held);
        std::thread::spawn(move || {
            for (connection, client) in listener.incoming().flatten().enumerate() {
                let Ok(server) = TcpStream::connect(blade) else { return };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let held = Arc::clone(&shared);
                std::thread::spawn(move || {
                    let _ = (std::io::copy(&mut from, &mut to), to.shutdown(Shutdown::Write));
                    if let Some(held) = held.lock().unwrap().as_mut() {
                        held.retain(|it| it.connection != connection);
                    }
                });
                let held = Arc::clone(&shared);
                std::thread::spawn(move || {
                    let _ = answer(connection, &server, &client, &held);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        Self { address, held }
    }

    fn hold(&self) {
        *self.held.lock().unwrap() = Some(Vec::new());
    }

    fn waits_for(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.held.lock().unwrap().as_ref().unwrap().len() < count {
            assert!(Instant::now() < deadline, "waited in vain for {count} answers");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends the oldest of `count` answers. False if its connection has just been replaced.
    #[must_use]
    fn release_oldest(&self, count: usize) -> bool {
        let mut held = self.held.lock().unwrap();
        let held = held.as_mut().unwrap();
        held.len() == count && {
            let mut oldest = held.remove(0);
            oldest.to.write_all(&oldest.frame).is_ok()
        }
    }
}

fn answer(
    connection: usize,
    mut server: &TcpStream,
    mut client: &TcpStream,
    held: &Held,
) -> std::io::Result<()> {
    loop {
        let mut head = [0; HEADER_BYTES];
        server.read_exact(&mut head)?;
        let header = Header::decode(&head).expect("a blade's answer");
        let mut frame = head.to_vec();
        frame.resize(header.head_bytes() + header.pages_bytes(), 0);
        server.read_exact(&mut frame[HEADER_BYTES..])?;
        match held.lock().unwrap().as_mut().filter(|_| header.page_count > 0) {
            Some(held) => held.push(Answer { connection, to: client.try_clone()?, frame }),
            None => client.write_all(&frame)?,
        }
    }
}

struct Text(BufReader<TcpStream>);

impl Text {
    fn connect(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, request: &str) {
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The value in the reply to a `get` of one key.
    fn value(&mut self) -> Option<String> {
        if self.line() == "END" {
            return None;
        }
        let value = self.line();
        assert_eq!(self.line(), "END");
        Some(value)
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.send("stats\r\n");
        common::talk::read_statistic(|| self.line(), name)
    }

    fn store(&mut self, key: &str, value: &str) {
        self.send(&format!("set {key} 0 0 {}\r\n{value}\r\n", value.len()));
        assert_eq!(self.line(), "STORED");
    }

    /// Stores twice as much as memory holds.
    fn fill(&mut self, name: &str) {
        let value = "v".repeat(4000);
        for number in 0..8_000 {
            self.send(&format!("set {name}{number} 0 0 4000 noreply\r\n{value}\r\n"));
        }
        self.send("version\r\n");
        assert!(self.line().starts_with("VERSION"));
    }
}

/// False if the blade did not take the stored items in time, or a connection was replaced in the
/// wrong moment: then the run proves nothing.
fn an_answer_comes_late(server: SocketAddr, proxy: &Proxy) -> bool {
    let (mut text, mut other) = (Text::connect(server), Text::connect(server));
    *proxy.held.lock().unwrap() = None;
    text.store("key", "old");
    text.fill("first");
    let late_before = text.statistic("lower_late");
    proxy.hold();
    text.send("get key\r\n");
    proxy.waits_for(1);
    assert_eq!(text.value(), None, "it has waited for too long");
    assert_eq!(text.statistic("lower_late"), late_before + 1);
    text.store("key", "new");
    text.fill("second");
    if text.statistic("far_refused") > 0 {
        return false;
    }
    text.send("get key\r\n");
    proxy.waits_for(2);
    if !proxy.release_oldest(2) {
        return false;
    }
    // The thread checks the blade's answers before it answers this.
    for _ in 0..3 {
        other.statistic("far_reads");
    }
    if !proxy.release_oldest(1) {
        return false;
    }
    assert_eq!(text.value().as_deref(), Some("new"));
    true
}

#[test]
fn what_a_late_read_brings_answers_no_later_request() {
    const ATTEMPTS: usize = 5;
    let any = "127.0.0.1:0".parse().unwrap();
    let config = BladeConfig { memory_bytes: 256 << 20, ..BladeConfig::default() };
    let blade = Blade::bind(&[Address::Tcp(any)], config).unwrap().serve().unwrap();
    let Address::Tcp(at) = blade.addresses()[0] else { panic!("it listens on TCP") };
    let mut is_shown = false;
    for _ in 0..ATTEMPTS {
        let proxy = Proxy::start(at);
        let settings = Settings {
            addresses: vec![any],
            memory_bytes: 16 << 20,
            threads: 1,
            // Items stored first are moved to far memory first, whatever was read.
            policy: CacheKind::Fifo,
            far: Some(FarSettings {
                source: FarSource::Blades(vec![Address::Tcp(proxy.address)]),
                bytes: 192 << 20,
                deadline: PATIENCE,
                seal: SealPolicy::Remote,
                allow_remote_tcp: false,
                credentials: None,
            }),
            ..Settings::default()
        };
        let server = Server::bind(settings, 1_700_000_000).unwrap();
        let (address, shared) = (server.addresses()[0], server.shared());
        let thread = std::thread::spawn(move || server.run());
        let outcome = std::panic::catch_unwind(|| an_answer_comes_late(address, &proxy));
        shared.ask_to_stop();
        thread.join().unwrap().unwrap();
        match outcome {
            Ok(is_whole) => is_shown = is_whole,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        if is_shown {
            break;
        }
    }
    assert!(is_shown, "each of {ATTEMPTS} runs proves nothing");
    blade.shutdown();
}
