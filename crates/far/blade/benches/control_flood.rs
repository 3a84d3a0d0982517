//! What control requests take of a blade's threads, one kind after the other, and what a flood of
//! them over many connections does to a client that reads page after page.
//!
//!     cargo bench -p farpool-blade --bench control_flood -- [SECONDS [CONNECTIONS]]
//!
//! The flood comes from one thread, through all connections in turn, as fast as their sockets take
//! it. Processor time is that of the blade's own threads (`/proc/self/task`), without the flood's.

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE};
use farpool_wire::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Requests that a flooding connection sends at once.
const IN_FLIGHT: u32 = 100;
/// Superpages, or extents, of a large request.
const LARGE: u32 = 4000;
/// Clients that a stat lists.
const CLIENTS: u32 = 300;
const FLOODING: u128 = 1;
const MODEST: u128 = 2;

fn main() {
    let mut arguments = farpool_benchargs::arguments().map(|text| text.parse::<u32>().unwrap());
    let time = Duration::from_secs(u64::from(arguments.next().unwrap_or(3)));
    let connections = arguments.next().unwrap_or(64);
    println!("| request | in a second | us of the blade's threads |");
    println!("|---|---|---|");
    costs(time);
    println!();
    println!(
        "| flood of {connections} connections | modest reads/s | p50 us | p99 us | worst us \
         | flood's requests/s | blade's processors |"
    );
    println!("|---|---|---|---|---|---|---|");
    let default = BladeConfig::default().control_requests_per_s;
    flood("none", time, 0, default, &[]);
    let list = Request::ListSuperpages { segment: SegmentId(2), skip: 0 };
    for (name, request) in [
        ("ping", Request::Ping),
        ("stat", Request::Stat { skip_clients: 0 }),
        ("list of 4000", list),
    ] {
        flood(&format!("{name}, no limit"), time, connections, u64::MAX, &[request]);
        flood(&format!("{name}, {default} a second"), time, connections, default, &[request]);
    }
}

/// Nanoseconds that the blade's threads have run.
fn blade_ns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let of = |path: std::path::PathBuf| {
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
        let ns = text.split(' ').next()?.parse::<u64>().ok()?;
        name.starts_with("fp-blade-").then_some(ns)
    };
    tasks.filter_map(|task| of(task.unwrap().path())).sum()
}

fn blade(control_requests_per_s: u64) -> (Serving, SocketAddr) {
    let config =
        BladeConfig { memory_bytes: 256 << 30, control_requests_per_s, ..Default::default() };
    let serving =
        Server::bind(&["tcp://127.0.0.1:0".parse().unwrap()], config).unwrap().serve().unwrap();
    let Address::Tcp(address) = serving.addresses()[0] else { unreachable!() };
    (serving, address)
}

fn costs(time: Duration) {
    let (_serving, address) = blade(u64::MAX);
    let mut client = Client::connect(address, FLOODING);
    let _others: Vec<_> =
        (0..CLIENTS).map(|id| Client::connect(address, 100 + u128::from(id))).collect();
    let segment = client.segment(LARGE);
    let first = SuperpageNumber(0);
    let allocate = |count| Request::AllocateSuperpages { segment, first, count };
    let free = |count| Request::FreeSuperpages { segment, first, count };
    let extents: Vec<_> =
        (0..LARGE).map(|at| Extent::page(PageNumber(at * PAGES_PER_SUPERPAGE))).collect();
    let discard = |count: usize| Request::Discard { segment, extents: &extents[..count] };
    cost("ping", time, &mut client, &[Request::Ping]);
    cost("report", time, &mut client, &[Request::Report { pages_read: 1, pages_written: 1 }]);
    cost("stat of 300", time, &mut client, &[Request::Stat { skip_clients: 0 }]);
    let pair = [allocate(1), free(1)];
    cost("allocate and free 1", time, &mut client, &pair);
    let pair = [allocate(100), free(100)];
    cost("allocate and free 100", time, &mut client, &pair);
    let pair = [allocate(LARGE), free(LARGE)];
    cost("allocate and free 4000", time, &mut client, &pair);
    client.call(&allocate(LARGE));
    cost("list of 4000", time, &mut client, &[Request::ListSuperpages { segment, skip: 0 }]);
    cost("discard 1", time, &mut client, &[discard(1)]);
    cost("discard 100", time, &mut client, &[discard(100)]);
    cost("discard 4000", time, &mut client, &[discard(4000)]);
    let pair = [Request::Freeze { segment }, Request::Thaw { segment }];
    cost("freeze and thaw", time, &mut client, &pair);
    cost("create", time, &mut client, &[Request::CreateSegment { span_superpages: 1 << 20 }]);
    let (start, before) = (Instant::now(), blade_ns());
    let mut count = 0;
    while start.elapsed() < time {
        Client::connect(address, 1 << 64 | u128::from(count)).call(&Request::Goodbye);
        count += 1;
    }
    say("connect, hello, goodbye", count, start.elapsed(), blade_ns() - before);
}

fn cost(name: &str, time: Duration, client: &mut Client, requests: &[Request<'_>]) {
    let (start, before, mut count) = (Instant::now(), blade_ns(), 0u64);
    // A segment is a table entry for ever; a limited number of them is enough.
    while start.elapsed() < time && count < 50_000 {
        for _ in 0..10 {
            requests.iter().for_each(|request| client.put(request));
        }
        client.push();
        (0..10 * requests.len()).for_each(|_| client.take());
        count += 10;
    }
    say(name, count, start.elapsed(), blade_ns() - before);
}

fn say(name: &str, count: u64, elapsed: Duration, ns: u64) {
    let rate = count as f64 / elapsed.as_secs_f64();
    println!("| {name} | {rate:.0} | {:.2} |", ns as f64 / count as f64 / 1000.0);
}

fn flood(name: &str, time: Duration, connections: u32, rate: u64, requests: &[Request<'_>]) {
    let (_serving, address) = blade(rate);
    let mut modest = Client::connect(address, MODEST);
    let mine = modest.segment(1);
    modest.call(&Request::AllocateSuperpages {
        segment: mine,
        first: SuperpageNumber(0),
        count: 1,
    });
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut latencies = Vec::with_capacity(1 << 20);
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..connections).map(|at| Client::connect_slot(address, FLOODING, at)).collect();
        let mut clients = clients.into_iter();
        if let Some(mut first) = clients.next() {
            let segment = first.segment(LARGE);
            first.call(&Request::AllocateSuperpages {
                segment,
                first: SuperpageNumber(0),
                count: LARGE,
            });
            let clients: Vec<_> = std::iter::once(first).chain(clients).collect();
            scope.spawn(|| pour(clients, &requests[0], &stop, &count));
        }
        let (start, before) = (Instant::now(), (count.load(Ordering::Relaxed), blade_ns()));
        let mut page = 7;
        while start.elapsed() < time {
            let asked = Instant::now();
            let extents = [Extent::page(PageNumber(page))];
            modest.call(&Request::Read { segment: mine, extents: &extents });
            latencies.push(asked.elapsed());
            page = (page + 977) % PAGES_PER_SUPERPAGE;
        }
        let rate = |after: u64, before| (after - before) as f64 / start.elapsed().as_secs_f64();
        let requests = rate(count.load(Ordering::Relaxed), before.0);
        let processors = rate(blade_ns(), before.1) / 1e9;
        stop.store(true, Ordering::Relaxed);
        let reads = latencies.len() as f64 / start.elapsed().as_secs_f64();
        latencies.sort_unstable();
        let micros = |per_mille: usize| {
            let at = (latencies.len() * per_mille / 1000).min(latencies.len() - 1);
            latencies[at].as_nanos() as f64 / 1000.0
        };
        println!(
            "| {name} | {reads:.0} | {:.1} | {:.1} | {:.0} | {requests:.0} | {processors:.2} |",
            micros(500),
            micros(990),
            micros(1000)
        );
    });
}

struct Client {
    stream: TcpStream,
    out: Vec<u8>,
    buffer: Vec<u8>,
    /// What `out` was sent of, in this round.
    sent: usize,
    /// Received and not yet counted.
    answers: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr, id: u128) -> Client {
        Client::connect_slot(address, id, 0)
    }

    fn connect_slot(address: SocketAddr, id: u128, slot: u32) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let buffer = vec![0; HEAD_LIMIT_BYTES + PAGE_BYTES];
        let (out, answers) = (Vec::new(), Vec::new());
        let mut client = Client { stream, out, buffer, sent: 0, answers };
        let hello = Hello { slot, ..Hello::first(ClientId(id), "control_flood") };
        client.call(&Request::Hello(hello));
        client
    }

    fn segment(&mut self, span_superpages: u32) -> SegmentId {
        self.call(&Request::CreateSegment { span_superpages });
        let head = split_head(&self.buffer).unwrap().unwrap();
        let Ok(Response::SegmentCreated { segment, .. }) = Response::decode(&head) else {
            panic!("no segment");
        };
        segment
    }

    fn put(&mut self, request: &Request<'_>) {
        request.encode(RequestId(1), 0, &mut self.out).unwrap();
    }

    fn push(&mut self) {
        self.stream.write_all(&self.out).unwrap();
        self.out.clear();
    }

    fn take(&mut self) {
        self.stream.read_exact(&mut self.buffer[..HEADER_BYTES]).unwrap();
        let header = Header::decode(self.buffer.first_chunk().unwrap()).unwrap();
        let end = header.head_bytes() + header.pages_bytes();
        self.stream.read_exact(&mut self.buffer[HEADER_BYTES..end]).unwrap();
        let is_good = header.kind != Kind::Error;
        assert!(is_good, "{:?}", Response::decode(&split_head(&self.buffer).unwrap().unwrap()));
    }

    fn call(&mut self, request: &Request<'_>) {
        self.put(request);
        self.push();
        self.take();
    }

    /// Sends more of what `out` holds, again and again, as far as the socket takes it. Returns the
    /// answers received.
    fn pour(&mut self) -> u64 {
        if let Ok(bytes) = self.stream.write(&self.out[self.sent..]) {
            self.sent = (self.sent + bytes) % self.out.len();
        }
        if let Ok(bytes) = self.stream.read(&mut self.buffer) {
            self.answers.extend_from_slice(&self.buffer[..bytes]);
        }
        let (mut taken, mut count) = (0, 0);
        while let Some(head) = split_head(&self.answers[taken..]).unwrap() {
            taken += head.header.head_bytes();
            count += 1;
        }
        self.answers.drain(..taken);
        count
    }
}

/// Floods the blade through all connections until told to stop.
fn pour(mut clients: Vec<Client>, request: &Request<'_>, stop: &AtomicBool, count: &AtomicU64) {
    for client in &mut clients {
        client.stream.set_nonblocking(true).unwrap();
        (0..IN_FLIGHT).for_each(|_| client.put(request));
    }
    while !stop.load(Ordering::Relaxed) {
        let answers: u64 = clients.iter_mut().map(Client::pour).sum();
        count.fetch_add(answers, Ordering::Relaxed);
        if answers == 0 {
            std::thread::yield_now();
        }
    }
}
