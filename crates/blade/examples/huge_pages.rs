//! What huge pages are worth to a client on the same host, which reads and writes a segment's memfd
//! by itself, and what they cost:
//!
//!     cargo run --release -p farpool-blade --example huge_pages -- [MiB] [rounds]

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measurement of round numbers"
)]

use farpool_blade::{BackingKind, HugePages, Store};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// What the pager evicts at once.
const CHUNK: usize = 64;
/// Pages of one measurement, about 10 ms: short enough that some are left alone by other work.
const BLOCK: usize = 8192;
/// Measurements of each kind, of which the lowest counts.
const BLOCKS: usize = 16;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().unwrap());
    let mib = arguments.next().unwrap_or(256);
    let rounds = arguments.next().unwrap_or(3);
    println!("ns a page, {mib} MiB: random write, read; {CHUNK} in a row write, read");
    for _ in 0..rounds {
        round(mib << 20);
    }
}

fn round(bytes: usize) {
    let store = Store::open(&BackingKind::Memfd, 0).unwrap();
    let memory = Arc::new(store.segment((bytes >> 24) as u32));
    let file = File::from(memory.share(1, true).unwrap().0);
    let pages = bytes / PAGE;
    (0..pages).for_each(|page| file.write_all_at(&[1; PAGE], (page * PAGE) as u64).unwrap());
    println!("4 KiB pages {}", measure(&file, pages));
    let quiet = longest_reads(&file, pages, &AtomicBool::new(false), Duration::from_millis(500));

    let mut huge_pages = HugePages::default();
    huge_pages.watch(Arc::downgrade(&memory));
    let is_over = AtomicBool::new(false);
    let (time, beside) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| longest_reads(&file, pages, &is_over, Duration::MAX));
        let start = processor_time();
        while huge_pages.look(&|| false) {}
        is_over.store(true, Ordering::Relaxed);
        (processor_time() - start, reader.join().unwrap())
    });
    println!("huge pages  {}", measure(&file, pages));
    let (made, failed) = huge_pages.counts();
    println!(
        "  {made} made, {failed} in vain, {} us each",
        time.as_micros() / u128::from(made.max(1))
    );
    println!("  a read's p99.9 and longest: {quiet}; while they were made: {beside}");
}

/// ns a page of the quickest of some blocks of calls, of so many pages each.
fn lowest(pages_per_call: usize, mut call: impl FnMut()) -> u128 {
    let block = |_| {
        let start = Instant::now();
        (0..BLOCK / pages_per_call).for_each(|_| call());
        start.elapsed().as_nanos() / BLOCK as u128
    };
    (0..BLOCKS).map(block).min().unwrap_or_default()
}

/// Times calls with page numbers in random order.
fn single(pages: usize, mut call: impl FnMut(u64)) -> u128 {
    let mut random = 88_172_645_463_325_252u64;
    lowest(1, || call((draw(&mut random) as usize % pages * PAGE) as u64))
}

fn draw(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

/// Times calls for one chunk after the other.
fn chunks(pages: usize, mut call: impl FnMut(u64)) -> u128 {
    let mut chunk = 0;
    lowest(CHUNK, || {
        call((chunk * CHUNK % pages * PAGE) as u64);
        chunk += 1;
    })
}

/// The thread's own time on a processor.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn measure(file: &File, pages: usize) -> String {
    let mut page = vec![2; PAGE];
    let write = single(pages, |offset| file.write_all_at(&page, offset).unwrap());
    let read = single(pages, |offset| file.read_exact_at(&mut page, offset).unwrap());
    let mut chunk = vec![3; CHUNK * PAGE];
    let chunk_write = chunks(pages, |offset| file.write_all_at(&chunk, offset).unwrap());
    let chunk_read = chunks(pages, |offset| file.read_exact_at(&mut chunk, offset).unwrap());
    format!("{write:6} {read:6} {chunk_write:6} {chunk_read:6}")
}

/// Reads random pages until it is over or the time is.
fn longest_reads(file: &File, pages: usize, is_over: &AtomicBool, time: Duration) -> String {
    let (mut random, mut page) = (1_234_567u64, vec![0; PAGE]);
    let (begin, mut samples) = (Instant::now(), Vec::new());
    while !is_over.load(Ordering::Relaxed) && begin.elapsed() < time {
        let offset = (draw(&mut random) as usize % pages * PAGE) as u64;
        let start = Instant::now();
        file.read_exact_at(&mut page, offset).unwrap();
        samples.push(start.elapsed());
    }
    samples.sort_unstable();
    let at = |permille: usize| samples[(samples.len() - 1) * permille / 1000].as_micros();
    format!("{} us, {} us", at(999), at(1000))
}
