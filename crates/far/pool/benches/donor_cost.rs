//! What a client costs a donor's own program: a program that never rests and the blade share
//! processor 0, a client on processor 1 reads at a fixed rate. The worst case: with a processor to
//! spare the program loses next to nothing. In the last row the blade knows that the processor is
//! in use, as a node's blade does, and slows down.
//!
//!     cargo bench -p farpool-pool --bench donor_cost -- [SLICES]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farpool_blade::{BladeConfig, Server};
use farpool_kernel::pin_thread;
use farpool_policy::donor_protection::{BUSY_BYTES_PER_S_PER_PROCESSOR, ProcessorSight};
use farpool_pool::{
    Address, Lane, PageRead, PageWrite, Pool, PoolConfig, SUPERPAGE_PAGES, SegmentHandle,
    SegmentPage,
};
use farpool_units::{MIB, PAGE_BYTES};

const SUPERPAGES: u32 = 8;
/// Pages the client asks for at once.
const BATCH_PAGES: u32 = 16;
const BATCH_BYTES: u64 = BATCH_PAGES as u64 * PAGE_BYTES as u64;
/// The program works with and without the client, alternating at this interval.
const SLICE: Duration = Duration::from_millis(500);
/// Words the program walks through: 64 MiB, more than the caches hold.
const WORDS: usize = 8 << 20;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE_BYTES]);

fn main() -> anyhow::Result<()> {
    let slices: usize = farpool_benchargs::arguments().next().map_or(Ok(20), |it| it.parse())?;
    println!("| client's pace MiB/s | client got MiB/s | program lost |");
    println!("|---|---|---|");
    for pace_mib in [8, 32, 119, u64::MAX] {
        let (got, lost) = measure(pace_mib, slices, None)?;
        let pace = if pace_mib == u64::MAX { "any".into() } else { pace_mib.to_string() };
        println!("| {pace} | {got:.0} | {:.1} % |", lost * 100.0);
    }
    let full = ProcessorSight { processors: 1, idle_permille: 0, waiting_permille: None };
    let (got, lost) = measure(u64::MAX, slices, Some(full))?;
    println!("| any, the blade holds back | {got:.0} | {:.1} % |", lost * 100.0);
    Ok(())
}

/// The client's MiB/s, and the share of its work that the program lost.
fn measure(
    pace_mib: u64,
    slices: usize,
    seen: Option<ProcessorSight>,
) -> anyhow::Result<(f64, f64)> {
    pin_thread(0)?;
    let memory_bytes = u64::from(SUPERPAGES + 1) * 16 * MIB;
    let config = BladeConfig { memory_bytes, threads: 1, ..BladeConfig::default() };
    let server = Server::bind(&["tcp://127.0.0.1:0".parse()?], config)?;
    let address = server.addresses().pop().context("an address")?;
    let serving = server.serve()?; // its threads stay where this one is
    let (is_active, is_over, bytes) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let mut time = Duration::ZERO;
    std::thread::scope(|scope| -> anyhow::Result<()> {
        let client = scope.spawn(|| read_at_pace(&address, pace_mib, &is_active, &is_over, &bytes));
        let mut program = Program::new();
        for slice in 0..2 * slices + 2 {
            let with_client = slice % 2 == 1;
            is_active.store(with_client, Relaxed);
            let begun = Instant::now();
            let rounds = program.work(SLICE);
            let rate = rounds as f64 / begun.elapsed().as_secs_f64();
            if slice == 1
                && let Some(seen) = seen
            {
                serving.blade().consider(&seen, BUSY_BYTES_PER_S_PER_PROCESSOR);
            }
            if slice >= 2 {
                if with_client { &mut beside } else { &mut alone }.push(rate);
                time += if with_client { begun.elapsed() } else { Duration::ZERO };
            } else {
                bytes.store(0, Relaxed); // the first two warm up
            }
        }
        is_over.store(true, Relaxed);
        client.join().ok().context("the client")?
    })?;
    drop(serving);
    let got = bytes.load(Relaxed) as f64 / MIB as f64 / time.as_secs_f64();
    Ok((got, 1.0 - median(&mut beside) / median(&mut alone)))
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// Walks from word to word of its memory, as a program does that looks things up.
struct Program {
    memory: Vec<u64>,
    at: u64,
}

impl Program {
    fn new() -> Self {
        Program { memory: (0..WORDS as u64).map(|word| word.rotate_left(17)).collect(), at: 1 }
    }

    fn work(&mut self, time: Duration) -> u64 {
        let begun = Instant::now();
        let mut rounds = 0;
        while begun.elapsed() < time {
            for _ in 0..1000 {
                let word = &mut self.memory[(self.at >> 32) as usize % WORDS];
                *word = word.wrapping_add(self.at);
                self.at = (self.at ^ *word).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
            }
            rounds += 1;
        }
        rounds
    }
}

fn read_at_pace(
    address: &Address,
    pace_mib: u64,
    is_active: &AtomicBool,
    is_over: &AtomicBool,
    bytes: &AtomicU64,
) -> anyhow::Result<()> {
    pin_thread(1)?;
    let pool = Pool::connect(PoolConfig {
        blades: vec![address.clone().into()],
        client: farpool_pool::fresh_client()?,
        client_name: "donor_cost".into(),
        quota_bytes: u64::from(SUPERPAGES) * 16 * MIB,
        sharing_group: None,
        deadline: Duration::from_secs(10),
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages: false,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    })?;
    let segment = pool.create_segment()?;
    (0..SUPERPAGES).try_for_each(|superpage| pool.allocate_superpage(segment, superpage))?;
    let mut lane = pool.lane()?;
    let mut into = vec![Page([7; PAGE_BYTES]); BATCH_PAGES as usize];
    for first in (0..SUPERPAGES * SUPERPAGE_PAGES).step_by(BATCH_PAGES as usize) {
        write(&mut lane, segment, first, &into)?;
    }
    let (mut number, mut due) = (1u32, Instant::now());
    let step = Duration::from_secs_f64(BATCH_BYTES as f64 / (pace_mib as f64 * MIB as f64));
    while !is_over.load(Relaxed) {
        let now = Instant::now();
        if !is_active.load(Relaxed) || due > now {
            due = due.max(now.checked_sub(Duration::from_millis(20)).unwrap_or(now));
            std::thread::sleep(Duration::from_micros(200));
            continue;
        }
        due += step;
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        read(&mut lane, segment, number, &mut into)?;
        bytes.fetch_add(BATCH_BYTES, Relaxed);
    }
    Ok(())
}

fn write(lane: &mut Lane, segment: SegmentHandle, first: u32, from: &[Page]) -> anyhow::Result<()> {
    let writes: Vec<_> = (first..)
        .zip(from)
        .map(|(page, memory)| PageWrite {
            at: SegmentPage { segment, page },
            from: memory.0.as_ptr(),
            token: u64::from(page),
        })
        .collect();
    // SAFETY: the memory outlives the wait for the completions.
    unsafe { lane.write(&writes) }?;
    finish(lane, writes.len())
}

/// Reads neighbouring pages somewhere in the segment.
fn read(
    lane: &mut Lane,
    segment: SegmentHandle,
    number: u32,
    into: &mut [Page],
) -> anyhow::Result<()> {
    let first = (number >> 8) % (SUPERPAGES * SUPERPAGE_PAGES - BATCH_PAGES);
    let reads: Vec<_> = (first..)
        .zip(into)
        .map(|(page, page_memory)| PageRead {
            at: SegmentPage { segment, page },
            into: page_memory.0.as_mut_ptr(),
            token: u64::from(page),
        })
        .collect();
    // SAFETY: the memory outlives the wait for the completions.
    unsafe { lane.read(&reads) }?;
    finish(lane, reads.len())
}

fn finish(lane: &mut Lane, count: usize) -> anyhow::Result<()> {
    let mut done = Vec::new();
    while done.len() < count {
        lane.wait(&mut done);
    }
    ensure!(done.iter().all(|completion| completion.result.is_ok()), "a page was not moved");
    Ok(())
}
