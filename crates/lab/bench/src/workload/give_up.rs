//! Memory given up and used again all the time, as allocators do: blocks of 64 KiB that are
//! resident are dropped with `MADV_DONTNEED`, each call timed, and written again. The memory beside
//! them is too large to be all local.

use super::{Outcome, WorkloadArgs, mix};
use crate::BenchError;
use crate::latency::Latencies;
use crate::sys::Mapping;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;
/// The unit that allocators give up at a time: jemalloc's and Go's extents, a page run of the
/// JVM's.
const BLOCK_PAGES: usize = 16;
/// Number of blocks that are given up in turn. They stay local since they are written all the time.
const BLOCKS: usize = 64;
/// Default number of calls.
const OPS: u64 = 4000;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let busy = BLOCKS * BLOCK_PAGES;
    let pages = args.pages(2 * busy)?;
    let mut memory = Mapping::small_pages(pages * PAGE_BYTES)?;
    let start = Instant::now();
    (0..pages).for_each(|page| memory.words_mut()[page * WORDS] = mix(page as u64 ^ args.seed));
    let fill = start.elapsed();
    let mut latencies = Latencies::new();
    let (mut work, mut sum) = (Duration::ZERO, 0u64);
    let ops = args.ops.unwrap_or(OPS);
    let mut block = 0;
    for op in 0..ops {
        let range = block..block + BLOCK_PAGES;
        block = (block + BLOCK_PAGES) % busy;
        let start = Instant::now();
        memory.give_up(range.clone()).map_err(BenchError::os("give memory up"))?;
        let took = start.elapsed();
        latencies.record(took);
        work += took;
        for page in range {
            let word = &mut memory.words_mut()[page * WORDS];
            if *word != 0 {
                let detail = format!("page {page} was given up and reads {word:#x}, not 0");
                return Err(BenchError::WrongData { workload: "give-up", detail });
            }
            *word = mix(op ^ page as u64);
            sum = sum.rotate_left(5) ^ *word;
        }
    }
    for page in busy..pages {
        let (read, expected) = (memory.touch(page), mix(page as u64 ^ args.seed));
        if read != expected {
            let detail = format!("page {page} reads {read:#x}, not {expected:#x}");
            return Err(BenchError::WrongData { workload: "give-up", detail });
        }
    }
    Ok(Outcome { ops, fill, work, checksum: sum, latencies: Some(latencies) })
}
