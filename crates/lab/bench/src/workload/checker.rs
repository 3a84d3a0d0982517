//! Many threads read and write one memory, and every value read is checked.
//!
//! Slots belong to threads in turn, so that each page is used by many threads at once; only
//! its owner touches a slot. What a slot must hold follows from its number and its version; the
//! versions are the shadow, one byte a slot, on the owner's own stack.

use super::{Outcome, WorkloadArgs, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;
use farpool_policy::Rng;
use farpool_units::{PAGE_BYTES, exactly};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Default number of threads: more than the cores of any machine here, so that threads wait for
/// each other's page faults.
const THREADS: usize = 64;
/// Most slots that a thread can own: its shadow of one byte each has to fit its stack.
const SLOTS_MAX: usize = 1 << 16;
const STACK_BYTES: usize = SLOTS_MAX + (256 << 10);
/// Words of the smallest slot: one cache line.
const SLOT_WORDS_MIN: usize = 8;
const WRITE_PERCENT: u32 = 50;
/// Default number of accesses for each slot of a thread.
const OPS_PER_SLOT: u64 = 4;

/// How the memory is divided.
#[derive(Debug, Clone, Copy)]
struct Layout {
    threads: usize,
    /// Slots of each thread.
    slots: usize,
    slot_words: usize,
}

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let memory = Mapping::new(args.pages(1)? * PAGE_BYTES)?;
    let threads = args.threads.unwrap_or(THREADS).max(1);
    let words = memory.len() / 8;
    let slot_words = (words / threads / SLOTS_MAX).max(SLOT_WORDS_MIN).next_power_of_two();
    let layout = Layout { threads, slots: words / slot_words / threads, slot_words };
    if layout.slots == 0 {
        return Err(BenchError::Arguments("too little memory for so many threads".to_owned()));
    }
    let ops = args.ops.unwrap_or(layout.slots as u64 * OPS_PER_SLOT);
    let (work, sums) = timed(|| run_threads(memory.atomic_words(), layout, ops, args));
    let checksum = sums?.into_iter().fold(0u64, u64::wrapping_add);
    let ops = ops * threads as u64;
    Ok(Outcome { ops, fill: std::time::Duration::ZERO, work, checksum, latencies: None })
}

fn run_threads(
    words: &[AtomicU64],
    layout: Layout,
    ops: u64,
    args: &WorkloadArgs,
) -> Result<Vec<u64>, BenchError> {
    std::thread::scope(|scope| {
        let spawn = |thread| {
            let builder = std::thread::Builder::new().stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, move || run_thread(words, layout, thread, ops, args))
        };
        let workers: Result<Vec<_>, _> = (0..layout.threads).map(spawn).collect();
        let workers = workers.map_err(BenchError::os("start a thread"))?;
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(panicked())))
            .collect()
    })
}

fn panicked() -> BenchError {
    BenchError::WrongData { workload: "checker", detail: "a thread panicked".to_owned() }
}

fn run_thread(
    words: &[AtomicU64],
    layout: Layout,
    thread: usize,
    ops: u64,
    args: &WorkloadArgs,
) -> Result<u64, BenchError> {
    let mut versions = [0u8; SLOTS_MAX];
    let mut rng = Rng::new(mix(args.seed ^ thread as u64));
    let mut sum = 0u64;
    for _ in 0..ops {
        let random = rng.next_u64();
        let slot = exactly::<usize, _>(random >> 32) % layout.slots;
        let version = &mut versions[slot];
        sum = sum.wrapping_add(check(words, layout, thread, slot, *version)?);
        if args.is_write(random & 0xFFFF_FFFF, WRITE_PERCENT) {
            *version = version.wrapping_add(1).max(1);
            write(words, layout, thread, slot, *version);
        }
    }
    for (slot, version) in versions.iter().enumerate().take(layout.slots) {
        sum = sum.wrapping_add(check(words, layout, thread, slot, *version)?);
    }
    Ok(sum)
}

/// Returns the first and the last word of a slot, which carry its value, so that a slot longer than
/// a page uses two pages.
fn ends(layout: Layout, thread: usize, slot: usize) -> [usize; 2] {
    let first = (slot * layout.threads + thread) * layout.slot_words;
    [first, first + layout.slot_words - 1]
}

/// Returns what a word must hold. Version 0 was never written and reads as zero.
fn value(word: usize, version: u8) -> u64 {
    if version == 0 { 0 } else { mix(word as u64 ^ u64::from(version) << 56) }
}

fn write(words: &[AtomicU64], layout: Layout, thread: usize, slot: usize, version: u8) {
    for word in ends(layout, thread, slot) {
        words[word].store(value(word, version), Relaxed);
    }
}

fn check(
    words: &[AtomicU64],
    layout: Layout,
    thread: usize,
    slot: usize,
    version: u8,
) -> Result<u64, BenchError> {
    let mut sum = 0u64;
    for word in ends(layout, thread, slot) {
        let (read, expected) = (words[word].load(Relaxed), value(word, version));
        if read != expected {
            let detail = format!(
                "thread {thread} reads {read:#x} at byte {}, not {expected:#x} (version {version})",
                word * 8
            );
            return Err(BenchError::WrongData { workload: "checker", detail });
        }
        sum = sum.wrapping_add(read);
    }
    Ok(sum)
}
