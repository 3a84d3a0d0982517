//! What a greedy client does to a modest one on the same blade, over TCP: bandwidth of both and the
//! modest one's latency, alone, beside the greedy one without limits, and with a grant's rate for
//! each. Neither client throttles itself: the blade does.
//!
//!     cargo bench -p farpool-blade --bench fair_share -- [SECONDS [GREEDY_MIB_PER_S]]
//!
//! The greedy client has four connections, each with 16 reads of 1 MiB in flight. The modest one
//! reads one page, waits for it, and reads the next; its own rate is above what that can reach.
//! With few processors the slowest reads are due to the scheduler.

use farpool_blade::{BladeConfig, GrantId, GrantKey, GrantSpec, Server, Serving};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE};
use farpool_wire::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SUPERPAGES: u32 = 4;
const PAGES: u32 = SUPERPAGES * PAGES_PER_SUPERPAGE;
const GREEDY_CONNECTIONS: u32 = 4;
const GREEDY_IN_FLIGHT: u32 = 16;
const GREEDY_PAGES: u32 = 256;
const GREEDY: u128 = 1;
const MODEST: u128 = 2;
/// The modest client's rate in bytes per second, where there are limits.
const MODEST_RATE: u64 = 1 << 30;

fn main() {
    let mut arguments = farpool_benchargs::arguments().map(|text| text.parse::<u64>().unwrap());
    let time = Duration::from_secs(arguments.next().unwrap_or(5));
    let greedy_rate = arguments.next().unwrap_or(256) << 20;
    let unlimited = u64::MAX;
    println!(
        "modest: one page at a time; greedy: 4 connections, 16 x 1 MiB in flight; {time:?} each"
    );
    println!("| | modest MiB/s | p50 us | p99 us | worst us | greedy MiB/s | held back ms |");
    println!("|---|---|---|---|---|---|---|");
    measure("alone", time, false, [unlimited; 2]);
    measure("beside the greedy one, no limits", time, true, [unlimited; 2]);
    let name = format!("beside the greedy one, held to {} MiB/s", greedy_rate >> 20);
    measure(&name, time, true, [greedy_rate, MODEST_RATE]);
}

fn measure(name: &str, time: Duration, is_greedy_there: bool, rates: [u64; 2]) {
    let serving = blade(rates);
    let Address::Tcp(address) = serving.addresses()[0] else { unreachable!() };
    let (stop, greedy_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut greedy_mib = 0.0;
    std::thread::scope(|scope| {
        if is_greedy_there {
            let first = Client::new(address, GREEDY, 0);
            let segment = first.segment;
            let mut clients = vec![first];
            clients.extend(
                (1..GREEDY_CONNECTIONS)
                    .map(|slot| Client { segment, ..Client::connect(address, GREEDY, slot) }),
            );
            for client in clients {
                scope.spawn(|| be_greedy(client, &stop, &greedy_bytes));
            }
            while greedy_bytes.load(Ordering::Relaxed) < 64 << 20 {
                std::thread::yield_now(); // until it is up to speed, and its burst is spent
            }
        }
        let mut modest = Client::new(address, MODEST, 0);
        let (start, before) = (Instant::now(), greedy_bytes.load(Ordering::Relaxed));
        let mut page = 7;
        while start.elapsed() < time {
            let asked = Instant::now();
            modest.ask(page, 1);
            modest.take_pages(true);
            latencies.push(asked.elapsed());
            page = (page + 977) % PAGES;
        }
        let moved = greedy_bytes.load(Ordering::Relaxed) - before;
        greedy_mib = mib(moved) / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
    });
    let stats = serving.blade().grants();
    let held_ns = stats.iter().find(|stat| stat.id == GrantId(GREEDY)).unwrap().read_throttled_ns;
    let modest_mib = mib(latencies.len() as u64 * PAGE_BYTES as u64) / time.as_secs_f64();
    latencies.sort_unstable();
    let micros = |per_mille: usize| {
        let at = latencies.len() * per_mille / 1000;
        latencies[at.min(latencies.len() - 1)].as_nanos() as f64 / 1000.0
    };
    println!(
        "| {name} | {modest_mib:.1} | {:.1} | {:.1} | {:.0} | {greedy_mib:.0} | {} |",
        micros(500),
        micros(990),
        micros(1000),
        held_ns / 1_000_000
    );
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn blade([greedy, modest]: [u64; 2]) -> Serving {
    let config = BladeConfig { memory_bytes: 1 << 30, require_grants: true, ..Default::default() };
    let address = ["tcp://127.0.0.1:0".parse().unwrap()];
    let serving = Server::bind(&address, config).unwrap().serve().unwrap();
    for (id, read_bytes_per_s) in [(GREEDY, greedy), (MODEST, modest)] {
        let spec = GrantSpec {
            id: GrantId(id),
            epoch: 1,
            key: GrantKey(id),
            bytes: 256 << 20,
            read_bytes_per_s,
            write_bytes_per_s: u64::MAX,
        };
        serving.blade().set_grant(&spec).unwrap();
    }
    serving
}

/// Keeps its connection full of large reads.
fn be_greedy(mut client: Client, stop: &AtomicBool, bytes: &AtomicU64) {
    (0..GREEDY_IN_FLIGHT).for_each(|_| client.ask(0, GREEDY_PAGES));
    let mut page = 0;
    while !stop.load(Ordering::Relaxed) {
        let count = client.take_pages(false);
        bytes.fetch_add(count as u64, Ordering::Relaxed);
        page = (page + GREEDY_PAGES) % PAGES;
        client.ask(page, GREEDY_PAGES);
    }
}

struct Client {
    stream: TcpStream,
    segment: SegmentId,
    frame: Vec<u8>,
    buffer: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr, id: u128, slot: u32) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let buffer = vec![0; HEAD_LIMIT_BYTES + GREEDY_PAGES as usize * PAGE_BYTES];
        let mut client = Client { stream, segment: SegmentId(0), frame: Vec::new(), buffer };
        let hello = Hello {
            client: ClientId(id),
            grant: Some(Grant { key: GrantKey(id), epoch: 1 }),
            purpose: Purpose::Client,
            pid: std::process::id(),
            slot,
            generation: 0,
            quota_wanted_bytes: 0,
            sharing_group: None,
            name: "fair_share",
        };
        client.send(&Request::Hello(hello), &[]);
        client.take(true);
        client
    }

    /// A client with a segment full of bytes.
    fn new(address: SocketAddr, id: u128, slot: u32) -> Client {
        let mut client = Client::connect(address, id, slot);
        client.send(&Request::CreateSegment { span_superpages: SUPERPAGES }, &[]);
        let head = client.take(true);
        let head = split_head(&client.buffer[..head]).unwrap().unwrap();
        let Ok(Response::SegmentCreated { segment, .. }) = Response::decode(&head) else {
            panic!("no segment");
        };
        client.segment = segment;
        let first = SuperpageNumber(0);
        client.send(&Request::AllocateSuperpages { segment, first, count: SUPERPAGES }, &[]);
        client.take(true);
        let pages = vec![0xa5; GREEDY_PAGES as usize * PAGE_BYTES];
        for at in (0..PAGES).step_by(GREEDY_PAGES as usize) {
            let extents = [Extent::new(PageNumber(at), GREEDY_PAGES)];
            client.send(&Request::Write { segment, extents: &extents }, &pages);
            client.take(true);
        }
        client
    }

    fn send(&mut self, request: &Request<'_>, pages: &[u8]) {
        self.frame.clear();
        request.encode(RequestId(1), PagesChecksum::of(pages), &mut self.frame).unwrap();
        self.stream.write_all(&self.frame).unwrap();
        self.stream.write_all(pages).unwrap();
    }

    fn ask(&mut self, page: u32, count: u32) {
        let extents = [Extent::new(PageNumber(page), count)];
        self.send(&Request::Read { segment: self.segment, extents: &extents }, &[]);
    }

    /// Reads one answer into the buffer. Returns the bytes of its head. With `is_checked`, it must
    /// not be an error, and its pages must be intact.
    fn take(&mut self, is_checked: bool) -> usize {
        self.stream.read_exact(&mut self.buffer[..HEADER_BYTES]).unwrap();
        let header = Header::decode(self.buffer.first_chunk().unwrap()).unwrap();
        let (head, end) = (header.head_bytes(), header.head_bytes() + header.pages_bytes());
        self.stream.read_exact(&mut self.buffer[HEADER_BYTES..end]).unwrap();
        assert_ne!(header.kind, Kind::Error, "{:?}", split_head(&self.buffer[..head]));
        if is_checked {
            assert_eq!(PagesChecksum::of(&self.buffer[head..end]), header.pages_checksum);
        }
        head
    }

    /// Reads the answer to a read. Returns the bytes of its pages.
    fn take_pages(&mut self, is_checked: bool) -> usize {
        self.take(is_checked);
        Header::decode(self.buffer.first_chunk().unwrap()).unwrap().pages_bytes()
    }
}
