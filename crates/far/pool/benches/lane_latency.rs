//! How long a lane takes to read one page, by transport, beside the least that the machine takes.
//!
//!     cargo bench -p farpool-pool --bench lane_latency

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server};
use farpool_pool::{
    Address, Lane, PageRead, PageWrite, Pool, PoolConfig, SUPERPAGE_PAGES, SegmentHandle,
    SegmentPage, fresh_client,
};
use farpool_units::PAGE_BYTES;

type Failure = Box<dyn std::error::Error>;

/// Superpages read from: 64 MiB, more than the processor's caches hold.
const SUPERPAGES: u32 = 4;
/// Reads per measurement: a second at most.
const READS: usize = 40_000;
/// Bytes of a request for one page and of its answer in the protocol.
const REQUEST_BYTES: usize = 48;
const ANSWER_BYTES: usize = 32 + PAGE_BYTES;

#[repr(C, align(4096))]
struct Aligned([u8; PAGE_BYTES]);

fn main() -> Result<(), Failure> {
    let _ = farpool_benchargs::arguments();
    let folder = std::env::temp_dir().join(format!("farpool-latency-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    println!("{:<28}{:>10}{:>10}", "one page, random", "p50 ns", "p99 ns");
    report("memcpy", memcpy());
    report("TCP ping-pong, same bytes", ping_pong()?);
    let path = folder.join("blade.sock");
    let tcp = "tcp://127.0.0.1:0".parse()?;
    for address in [Address::Shm(path.clone()), Address::Unix(path), tcp] {
        let name = address.to_string();
        let name = name.split(':').next().unwrap_or_default();
        let (reads, writes) = lane(&address)?;
        report(&format!("{name} read"), reads);
        report(&format!("{name} write"), writes);
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

fn report(name: &str, mut samples: Vec<Duration>) {
    samples.sort_unstable();
    let at = |share: usize| samples[samples.len() * share / 100].as_nanos();
    println!("{name:<28}{:>10}{:>10}", at(50), at(99));
}

/// Times `body`, called with page numbers in random order.
fn measure(mut body: impl FnMut(u32)) -> Vec<Duration> {
    let mut state = 88_172_645_463_325_252u64;
    let mut samples = Vec::with_capacity(READS);
    for round in 0..READS + READS / 10 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [a, b, c, d, ..] = state.to_le_bytes();
        let page = u32::from_le_bytes([a, b, c, d]) % (SUPERPAGES * SUPERPAGE_PAGES);
        let begun = Instant::now();
        body(page);
        if round >= READS / 10 {
            samples.push(begun.elapsed());
        }
    }
    samples
}

fn memcpy() -> Vec<Duration> {
    let pages = (SUPERPAGES * SUPERPAGE_PAGES) as usize;
    let from = vec![1u8; pages * PAGE_BYTES];
    let mut into = Box::new(Aligned([0; PAGE_BYTES]));
    measure(|page| {
        let at = page as usize * PAGE_BYTES;
        into.0.copy_from_slice(&from[at..at + PAGE_BYTES]);
        std::hint::black_box(&mut into.0);
    })
}

fn ping_pong() -> Result<Vec<Duration>, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    client.set_nodelay(true)?;
    let (mut server, _) = listener.accept()?;
    server.set_nodelay(true)?;
    let answering = std::thread::spawn(move || {
        let (mut request, answer) = ([0; REQUEST_BYTES], [1; ANSWER_BYTES]);
        while server.read_exact(&mut request).is_ok() && server.write_all(&answer).is_ok() {}
    });
    let mut answer = [0; ANSWER_BYTES];
    let mut failure = None;
    let samples = measure(|_| {
        let sent = client.write_all(&[2; REQUEST_BYTES]);
        failure = sent.and_then(|()| client.read_exact(&mut answer)).err().or(failure.take());
    });
    drop(client);
    answering.join().map_err(|_| "the answering thread failed")?;
    failure.map_or(Ok(samples), |error| Err(error.into()))
}

fn lane(address: &Address) -> Result<(Vec<Duration>, Vec<Duration>), Failure> {
    let config = BladeConfig { memory_bytes: 1 << 30, ..BladeConfig::default() };
    let server = Server::bind(std::slice::from_ref(address), config)?;
    let address = match address {
        Address::Tcp(_) => server.addresses()[0].clone(),
        local => local.clone(),
    };
    let serving = server.serve()?;
    let pool = Pool::connect(PoolConfig {
        blades: vec![address.into()],
        client: fresh_client()?,
        client_name: "lane_latency".into(),
        quota_bytes: 1 << 30,
        sharing_group: None,
        deadline: Duration::from_secs(5),
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages: false,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    })?;
    let segment = pool.create_segment()?;
    (0..SUPERPAGES).try_for_each(|sma| pool.allocate_superpage(segment, sma))?;
    let mut lane = pool.lane()?;
    let mut page = Box::new(Aligned([7; PAGE_BYTES]));
    for number in 0..SUPERPAGES * SUPERPAGE_PAGES {
        write_one(&mut lane, segment, number, &page);
    }
    let reads = measure(|number| read_one(&mut lane, segment, number, &mut page));
    let writes = measure(|number| write_one(&mut lane, segment, number, &page));
    pool.goodbye();
    serving.shutdown();
    Ok((reads, writes))
}

fn read_one(lane: &mut Lane, segment: SegmentHandle, page: u32, into: &mut Aligned) {
    let at = SegmentPage { segment, page };
    let read = PageRead { at, into: into.0.as_mut_ptr(), token: 0 };
    // SAFETY: the page outlives the call, and `finish` waits for the completion.
    unsafe { lane.read(&[read]) }
        .and_then(|()| finish(lane))
        .unwrap_or_else(|error| panic!("{error}"));
}

fn write_one(lane: &mut Lane, segment: SegmentHandle, page: u32, from: &Aligned) {
    let at = SegmentPage { segment, page };
    let write = PageWrite { at, from: from.0.as_ptr(), token: 0 };
    // SAFETY: as for `read_one`.
    unsafe { lane.write(&[write]) }
        .and_then(|()| finish(lane))
        .unwrap_or_else(|error| panic!("{error}"));
}

fn finish(lane: &mut Lane) -> Result<(), farpool_pool::PoolError> {
    let mut done = Vec::with_capacity(1);
    lane.wait(&mut done);
    match done[..] {
        [one] if one.result.is_ok() => Ok(()),
        _ => panic!("{done:?}"),
    }
}
