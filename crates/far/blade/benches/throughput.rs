//! How fast the blade serves reads and writes over TCP loopback, beside a bare loop of send and
//! receive that moves the same bytes:
//!
//!     cargo bench -p farpool-blade --bench throughput -- [pages] [in flight] [seconds]

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a measurement of round numbers"
)]

use farpool_blade::{BladeConfig, Server};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE};
use farpool_wire::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SUPERPAGES: u32 = 16;

struct Setup {
    pages: u32,
    in_flight: u32,
    time: Duration,
}

fn main() {
    let mut arguments = farpool_benchargs::arguments().map(|text| text.parse::<u32>().unwrap());
    let pages = arguments.next().unwrap_or(8);
    let in_flight = arguments.next().unwrap_or(32);
    let time = Duration::from_secs(u64::from(arguments.next().unwrap_or(2)));
    let setup = Setup { pages, in_flight, time };
    let bare = bare_loop(&setup);
    println!("bare send/receive loop     {bare:7.0} MiB/s");
    for (name, is_checked) in [("blade reads", false), ("blade reads, verified", true)] {
        let rate = blade_reads(&setup, is_checked);
        println!("{name:26} {rate:7.0} MiB/s  {:4.2} x", rate / bare);
    }
    let rate = blade_writes(&setup);
    println!("{:26} {rate:7.0} MiB/s  {:4.2} x", "blade writes", rate / bare);
}

fn mib(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / (1 << 20) as f64 / time.as_secs_f64()
}

fn memory() -> Vec<u8> {
    (0..(SUPERPAGES as usize * 16) << 20).map(|i| (i / 7) as u8).collect()
}

fn bare_loop(setup: &Setup) -> f64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let bytes = setup.pages as usize * PAGE_BYTES;
    let sender = std::thread::spawn(move || {
        let memory = memory();
        let (mut stream, _) = listener.accept().unwrap();
        for chunk in memory.chunks_exact(bytes).cycle() {
            if stream.write_all(chunk).is_err() {
                return;
            }
        }
    });
    let mut stream = TcpStream::connect(address).unwrap();
    let mut buffer = vec![0; bytes];
    stream.read_exact(&mut buffer).unwrap();
    let (start, mut moved) = (Instant::now(), 0);
    while start.elapsed() < setup.time {
        stream.read_exact(&mut buffer).unwrap();
        moved += bytes as u64;
    }
    let rate = mib(moved, start.elapsed());
    drop(stream);
    sender.join().unwrap();
    rate
}

struct Client {
    stream: TcpStream,
    segment: SegmentId,
    frame: Vec<u8>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    _serving: farpool_blade::Serving,
}

impl Client {
    fn new() -> Client {
        let config = BladeConfig { memory_bytes: 1 << 30, ..Default::default() };
        let address = ["tcp://127.0.0.1:0".parse().unwrap()];
        let serving = Server::bind(&address, config).unwrap().serve().unwrap();
        let Address::Tcp(address) = serving.addresses()[0] else { unreachable!() };
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut client = Client {
            stream,
            segment: SegmentId(1),
            frame: Vec::new(),
            buffer: vec![0; 4 << 20],
            start: 0,
            end: 0,
            _serving: serving,
        };
        client.ask(&Request::Hello(Hello::first(ClientId(1), "throughput")));
        client.ask(&Request::CreateSegment { span_superpages: SUPERPAGES });
        let (segment, first) = (client.segment, SuperpageNumber(0));
        client.ask(&Request::AllocateSuperpages { segment, first, count: SUPERPAGES });
        client
    }

    fn ask(&mut self, request: &Request<'_>) {
        self.send(request, &[], 0);
        self.take_answer(true);
    }

    fn send(&mut self, request: &Request<'_>, pages: &[u8], checksum: u32) {
        self.frame.clear();
        request.encode(RequestId(1), checksum, &mut self.frame).unwrap();
        if pages.is_empty() {
            return self.stream.write_all(&self.frame).unwrap();
        }
        let slices = [std::io::IoSlice::new(&self.frame), std::io::IoSlice::new(pages)];
        let sent = self.stream.write_vectored(&slices).unwrap();
        if sent < self.frame.len() + pages.len() {
            self.stream.write_all(&pages[sent - self.frame.len()..]).unwrap();
        }
    }

    /// Reads one answer, in large pieces as a real client would.
    fn take_answer(&mut self, is_checked: bool) {
        loop {
            if let Some(head) = split_head(&self.buffer[self.start..self.end]).unwrap() {
                let response = Response::decode(&head).unwrap();
                assert!(!matches!(response, Response::Error { .. }), "{response:?}");
                let pages = self.start + head.header.head_bytes();
                let end = pages + head.header.pages_bytes();
                if end <= self.end {
                    if is_checked {
                        let checksum = PagesChecksum::of(&self.buffer[pages..end]);
                        assert_eq!(checksum, head.header.pages_checksum);
                    }
                    self.start = end;
                    return;
                }
            }
            if self.start > self.buffer.len() / 2 || self.start == self.end {
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            let room = (self.end + (256 << 10)).min(self.buffer.len());
            self.end += self.stream.read(&mut self.buffer[self.end..room]).unwrap();
        }
    }
}

fn extents(setup: &Setup) -> Vec<[Extent; 1]> {
    let count = SUPERPAGES * PAGES_PER_SUPERPAGE / setup.pages;
    (0..count).map(|i| [Extent::new(PageNumber(i * setup.pages), setup.pages)]).collect()
}

fn fill(client: &mut Client) {
    let memory = memory();
    let setup = Setup { pages: 256, in_flight: 1, time: Duration::ZERO };
    for (extents, pages) in extents(&setup).iter().zip(memory.chunks_exact(1 << 20)) {
        let segment = client.segment;
        client.send(&Request::Write { segment, extents }, pages, PagesChecksum::of(pages));
        client.take_answer(true);
    }
}

fn blade_reads(setup: &Setup, is_checked: bool) -> f64 {
    let mut client = Client::new();
    fill(&mut client);
    let segment = client.segment;
    let extents = extents(setup);
    let mut next = extents.iter().cycle();
    let mut ask = |client: &mut Client| {
        let extents = next.next().unwrap();
        client.send(&Request::Read { segment, extents }, &[], 0);
    };
    (0..setup.in_flight).for_each(|_| ask(&mut client));
    let (start, mut moved) = (Instant::now(), 0);
    while start.elapsed() < setup.time {
        client.take_answer(is_checked);
        moved += u64::from(setup.pages) * PAGE_BYTES as u64;
        ask(&mut client);
    }
    mib(moved, start.elapsed())
}

fn blade_writes(setup: &Setup) -> f64 {
    let mut client = Client::new();
    fill(&mut client);
    let segment = client.segment;
    let extents = extents(setup);
    let data = memory();
    let chunks = data.chunks_exact(setup.pages as usize * PAGE_BYTES);
    let mut next = extents.iter().zip(chunks).cycle();
    let mut ask = |client: &mut Client| {
        let (extents, pages) = next.next().unwrap();
        client.send(&Request::Write { segment, extents }, pages, PagesChecksum::of(pages));
    };
    (0..setup.in_flight).for_each(|_| ask(&mut client));
    let (start, mut moved) = (Instant::now(), 0);
    while start.elapsed() < setup.time {
        client.take_answer(false);
        moved += u64::from(setup.pages) * PAGE_BYTES as u64;
        ask(&mut client);
    }
    mib(moved, start.elapsed())
}
