//! Eviction on request: a quarter of the memory is written, evicted with `MADV_PAGEOUT` and timed
//! until at most 1/64 of its pages are resident. The kernel's own swapping serves the same request.

use super::{Outcome, WorkloadArgs, check_pages, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;
use std::ops::Range;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;
/// Default number of rounds.
const PASSES: u32 = 4;
/// Pages that stay resident after this long are not going to leave (pinned, or no far memory here).
const WAIT_MAX: Duration = Duration::from_secs(2);

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let pages = args.pages(4)?;
    let mut memory = Mapping::new(pages * PAGE_BYTES)?;
    let (fill, ()) = timed(|| write(&mut memory, 0..pages, args.seed));
    let (mut ops, mut work, mut sum) = (0, Duration::ZERO, 0u64);
    for pass in 0..args.passes.unwrap_or(PASSES) {
        let seed = args.seed ^ u64::from(pass);
        write(&mut memory, 0..pages / 4, seed);
        let (evicted, took) = evict(&memory, 0..pages / 4)?;
        ops += evicted as u64;
        work += took;
        sum =
            sum.rotate_left(3) ^ check_pages("evict", &memory.words()[..pages / 4 * WORDS], seed)?;
    }
    Ok(Outcome { ops, fill, work, checksum: sum, latencies: None })
}

fn write(memory: &mut Mapping, pages: Range<usize>, seed: u64) {
    for page in pages {
        memory.words_mut()[page * WORDS] = mix(page as u64 ^ seed);
    }
}

/// Evicts `pages`. Returns how many left, and how long that took.
fn evict(memory: &Mapping, pages: Range<usize>) -> Result<(usize, Duration), BenchError> {
    let count = || {
        let resident = memory.resident_pages(pages.clone());
        resident.map_err(BenchError::os("count resident pages"))
    };
    let before = count()?;
    let start = Instant::now();
    memory.page_out(pages.clone()).map_err(BenchError::os("ask for pages to be moved out"))?;
    let mut took = start.elapsed();
    let mut after = count()?;
    while after > pages.len() / 64 && start.elapsed() < WAIT_MAX {
        std::thread::sleep(Duration::from_micros(100));
        took = start.elapsed();
        after = count()?;
    }
    Ok((before.saturating_sub(after), took))
}
