//! How long a demand read waits at a blade of one thread while other connections evict, or move
//! memory in the background: each round they send as much as their sockets take, then a page is
//! demanded, and then the blade begins to work. Without pauses and other programs in between, the
//! figures are of the order in which it serves.
//!
//!     cargo bench -p farpool-blade --bench priorities -- [ROUNDS [CONNECTIONS]]

use farpool_blade::{BladeConfig, SteppedServer};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE};
use farpool_wire::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Pages of a write or a background read: as many as a client puts into one.
const BULK_PAGES: u32 = 256;
/// Reads that a connection sends ahead.
const READS_AHEAD: usize = 64;

#[derive(Clone, Copy, PartialEq)]
enum Bulk {
    Evict,
    Read,
}

fn main() {
    let mut arguments = farpool_benchargs::arguments().map(|text| text.parse::<usize>().unwrap());
    stay_on(0);
    let rounds = arguments.next().unwrap_or(200);
    let connections = arguments.next().unwrap_or(8);
    println!("| beside {connections} connections that | p50 us | p99 us | worst us | MiB/s |");
    println!("|---|---|---|---|---|");
    measure("are idle", rounds, connections, &[]);
    measure("evict", rounds, connections, &[Bulk::Evict]);
    measure("read in the background", rounds, connections, &[Bulk::Read]);
    measure("do one or the other", rounds, connections, &[Bulk::Evict, Bulk::Read]);
}

fn measure(name: &str, rounds: usize, connections: usize, kinds: &[Bulk]) {
    let config = BladeConfig { memory_bytes: 1 << 30, ..Default::default() };
    let mut server = SteppedServer::new(config).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut demanding = Client::new(&listener, &mut server, 1);
    let mut bulk: Vec<_> = (0..connections)
        .filter(|_| !kinds.is_empty())
        .map(|at| {
            let mut client = Client::new(&listener, &mut server, 2 + at as u128);
            client.prepare(kinds[at % kinds.len()]);
            (client, kinds[at % kinds.len()])
        })
        .collect();
    let mut reader = demanding.stream.try_clone().unwrap();
    let (answers, arrived) = mpsc::channel();
    let taking = std::thread::spawn(move || {
        stay_on(1);
        let mut answer = vec![0; HEADER_BYTES + PAGE_BYTES];
        while reader.read_exact(&mut answer).is_ok() && answers.send(Instant::now()).is_ok() {}
    });
    let (mut latencies, mut served, mut bytes) = (Vec::new(), Duration::ZERO, 0);
    for round in 0..rounds {
        bytes += bulk.iter_mut().map(|(client, kind)| client.pour(*kind)).sum::<usize>();
        let extents = [Extent::page(PageNumber(page_of(round) % PAGES_PER_SUPERPAGE))];
        demanding.send(&Request::Read { segment: demanding.segment, extents: &extents });
        let began = Instant::now();
        server.step().unwrap();
        served += began.elapsed();
        latencies.push(arrived.recv().unwrap().duration_since(began));
    }
    demanding.stream.shutdown(std::net::Shutdown::Both).unwrap();
    taking.join().unwrap();
    latencies.sort_unstable();
    let micros = |per_mille: usize| {
        let at = (latencies.len() * per_mille / 1000).min(latencies.len() - 1);
        latencies[at].as_nanos() as f64 / 1000.0
    };
    let rate = bytes as f64 / f64::from(1 << 20) / served.as_secs_f64();
    println!(
        "| {name} | {:.0} | {:.0} | {:.0} | {rate:.0} |",
        micros(500),
        micros(990),
        micros(1000)
    );
}

/// The blade, and who waits for its answer, have a processor each, if there are two.
fn stay_on(cpu: usize) {
    let mut one = rustix::thread::CpuSet::new();
    one.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &one);
}

fn page_of(number: usize) -> u32 {
    number.try_into().unwrap()
}

struct Client {
    stream: TcpStream,
    segment: SegmentId,
    out: Vec<u8>,
    sent: usize,
    buffer: Vec<u8>,
}

impl Client {
    fn new(listener: &TcpListener, server: &mut SteppedServer, id: u128) -> Client {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.set_nodelay(true).unwrap();
        let accepted = listener.accept().unwrap().0;
        accepted.set_nonblocking(true).unwrap();
        server.arrive(accepted.into());
        let (out, buffer) = (Vec::new(), vec![0; 4 << 20]);
        let mut client = Client { stream, segment: SegmentId(0), out, sent: 0, buffer };
        client.call(server, &Request::Hello(Hello::first(ClientId(id), "priorities")));
        let head = client.call(server, &Request::CreateSegment { span_superpages: 1 });
        let head = split_head(&client.buffer[..head]).unwrap().unwrap();
        let Ok(Response::SegmentCreated { segment, .. }) = Response::decode(&head) else {
            panic!("no segment");
        };
        client.segment = segment;
        let first = SuperpageNumber(0);
        client.call(server, &Request::AllocateSuperpages { segment, first, count: 1 });
        client
    }

    fn send(&mut self, request: &Request<'_>) {
        let mut frame = Vec::new();
        request.encode(RequestId(1), 0, &mut frame).unwrap();
        self.stream.write_all(&frame).unwrap();
    }

    fn call(&mut self, server: &mut SteppedServer, request: &Request<'_>) -> usize {
        self.send(request);
        server.step().unwrap();
        let count = self.stream.read(&mut self.buffer).unwrap();
        let head = split_head(&self.buffer[..count]).unwrap().unwrap();
        assert_ne!(head.header.kind, Kind::Error, "{:?}", Response::decode(&head));
        count
    }

    /// Fills `out` with what is to be sent again and again.
    fn prepare(&mut self, kind: Bulk) {
        self.stream.set_nonblocking(true).unwrap();
        let extents = [Extent::new(PageNumber(0), BULK_PAGES)];
        let (segment, extents) = (self.segment, &extents[..]);
        match kind {
            Bulk::Read => {
                for _ in 0..READS_AHEAD {
                    let read = Request::Read { segment, extents };
                    read.encode_in_background(RequestId(1), 0, &mut self.out).unwrap();
                }
            }
            Bulk::Evict => {
                let pages = vec![7; BULK_PAGES as usize * PAGE_BYTES];
                let write = Request::Write { segment, extents };
                write.encode(RequestId(1), PagesChecksum::of(&pages), &mut self.out).unwrap();
                self.out.extend_from_slice(&pages);
            }
        }
    }

    /// Takes the answers there are, and sends what the socket takes, of reads one round. Returns
    /// the bytes of pages that will have passed.
    fn pour(&mut self, kind: Bulk) -> usize {
        let mut bytes = 0;
        while let Ok(count) = self.stream.read(&mut self.buffer) {
            bytes += if kind == Bulk::Read { count } else { 0 };
        }
        while let Ok(count) = self.stream.write(&self.out[self.sent..]) {
            self.sent = (self.sent + count) % self.out.len();
            bytes += if kind == Bulk::Evict { count } else { 0 };
            if kind == Bulk::Read && self.sent == 0 {
                break;
            }
        }
        bytes
    }
}
