//! Who is closed when no further connection may be open: whoever has waited longest, and never who
//! is being answered.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::routing::{get, put};
use farpool_http::serve::{Connections, Limits, serve};
use farpool_testkit::wait_until;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

/// Longest wait for anything here; reached only if something is broken.
const PATIENCE: Duration = Duration::from_secs(30);
/// No head takes this long, so that nothing here ends by time.
const NEVER: Duration = Duration::from_secs(3600);
const HEAD: &str = "PUT /body HTTP/1.1\r\nHost: a\r\n";

/// A server on loopback; stops when dropped.
struct Server {
    addresses: Vec<SocketAddr>,
    /// Requests of `/held` are answered with one of these.
    answers: Arc<Semaphore>,
    /// Requests of `/held` that wait for one.
    held: Arc<Semaphore>,
    _runtime: Runtime,
}

impl Server {
    /// Starts a server on several listeners for this many connections, all of which may wait.
    fn start(listeners: usize, connections: usize) -> Self {
        let runtime = Runtime::new().unwrap();
        let (answers, held) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let (given, waits) = (Arc::clone(&answers), Arc::clone(&held));
        let hold = move || async move {
            waits.add_permits(1);
            given.acquire().await.unwrap().forget();
            "held"
        };
        let router = Router::new()
            .route("/healthz", get(|| async { "well" }))
            .route("/held", get(hold))
            .route("/body", put(|body: Bytes| async move { body }));
        let limits = Limits { connections, waiting: connections, head_timeout: NEVER };
        let all = Connections::new(limits);
        let listen = |_| {
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            let address = listener.local_addr().unwrap();
            runtime.spawn(serve(listener, router.clone(), Arc::clone(&all), None));
            address
        };
        let addresses = (0..listeners).map(listen).collect();
        Self { addresses, answers, held, _runtime: runtime }
    }

    fn send(&self, text: &str) -> TcpStream {
        send(self.addresses[0], text)
    }

    /// Begins a request that is answered later.
    fn hold(&self) -> TcpStream {
        let before = self.held.available_permits();
        let stream = self.send("GET /held HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        wait_until("a request to be held", PATIENCE, || self.held.available_permits() > before);
        stream
    }
}

fn send(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

/// Reads to the end of a connection. A reset is an end, too; no end at all is not.
fn rest(mut stream: &TcpStream) -> String {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is not closed");
    }
    String::from_utf8(bytes).unwrap()
}

fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let read = stream.read(&mut [0; 1]);
    stream.set_nonblocking(false).unwrap();
    read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Asks on a connection of its own, and expects to be served.
fn ask(address: SocketAddr) {
    let text = "GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let answer = rest(&send(address, text));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("well"), "{answer:?}");
}

/// Sends these texts, each on a connection of its own and one after the other.
fn in_turn(server: &Server, texts: &[&str]) -> Vec<TcpStream> {
    let one = |text: &&str| {
        // A complete request first: the connection is known to the server when it is answered.
        let well = "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n";
        let mut stream = server.send(well);
        let mut seen = Vec::new();
        while !seen.ends_with(b"well") {
            let mut bytes = [0; 256];
            let read = stream.read(&mut bytes).unwrap();
            assert!(read > 0, "closed before it was answered");
            seen.extend_from_slice(&bytes[..read]);
        }
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    texts.iter().map(one).collect()
}

#[test]
fn at_the_cap_the_one_that_has_waited_longest_makes_room() {
    let server = Server::start(1, 4);
    let waiting = in_turn(&server, &[HEAD, HEAD, "", HEAD]);
    let mut others = Vec::new();
    for gone in 0..waiting.len() {
        others.extend(in_turn(&server, &[HEAD]));
        assert_eq!(rest(&waiting[gone]), "", "the first of those left is closed");
        assert!(waiting[gone + 1..].iter().chain(&others).all(is_open), "and no other");
    }
}

#[test]
fn a_half_sent_body_keeps_nobody_out() {
    let server = Server::start(1, 4);
    let half = format!("{HEAD}Content-Length: 10\r\n\r\n12345");
    let halves: Vec<TcpStream> = (0..8).map(|_| server.send(&half)).collect();
    for _ in 0..8 {
        ask(server.addresses[0]);
    }
    assert_eq!(rest(&halves[0]), "");
    // One that arrives after all is answered.
    let mut whole = server.send(&half.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n"));
    whole.write_all(b"67890").unwrap();
    assert!(rest(&whole).ends_with("1234567890"));
}

#[test]
fn who_is_being_answered_stays_and_a_further_connection_is_refused() {
    let server = Server::start(1, 2);
    let first = server.hold();
    let half = in_turn(&server, &[HEAD]);
    let second = server.hold();
    assert_eq!(rest(&half[0]), "", "the half-sent request made room");
    let third = server.send("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(rest(&third), "", "both others are being answered");
    server.answers.add_permits(2);
    for held in [first, second] {
        assert!(rest(&held).ends_with("held"));
    }
    ask(server.addresses[0]);
}

#[test]
fn all_listeners_share_one_cap() {
    let server = Server::start(2, 2);
    let halves = in_turn(&server, &[HEAD, HEAD]);
    ask(server.addresses[1]);
    assert_eq!(rest(&halves[0]), "", "it made room for a connection to another address");
    assert!(is_open(&halves[1]));
}

/// Set in the process whose limit on open files is lowered.
const CHILD_VARIABLE: &str = "FARPOOL_TEST_DESCRIPTORS_CHILD";
/// Its limit: a few connections besides what it has open anyway.
const FEW_DESCRIPTORS: u64 = 40;

/// Serves with few descriptors until standard input ends.
fn serve_with_few_descriptors() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let few = Rlimit { current: Some(FEW_DESCRIPTORS), maximum };
    setrlimit(Resource::Nofile, few).unwrap();
    let server = Server::start(1, 1_000);
    println!("\nlistens at {}", server.addresses[0]);
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0; 1]);
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_lack_of_descriptors_closes_who_has_waited_longest() {
    if std::env::var_os(CHILD_VARIABLE).is_some() {
        return serve_with_few_descriptors();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_lack_of_descriptors_closes_who_has_waited_longest", "--nocapture"]);
    child.env(CHILD_VARIABLE, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Ended(child.spawn().unwrap());
    let stdout = std::io::BufReader::new(child.0.stdout.take().unwrap());
    let mut lines = std::io::BufRead::lines(stdout).map(Result::unwrap);
    let address = lines.find_map(|line| line.strip_prefix("listens at ").map(str::to_owned));
    let address: SocketAddr = address.unwrap().parse().unwrap();
    let halves: Vec<TcpStream> = (0..3 * FEW_DESCRIPTORS).map(|_| send(address, HEAD)).collect();
    for _ in 0..20 {
        ask(address);
    }
    assert_eq!(rest(&halves[0]), "");
}
