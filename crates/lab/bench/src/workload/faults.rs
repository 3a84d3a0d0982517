//! Demand faults one at a time: fill all pages, then touch each once per pass in random order and
//! time it. With little local memory nearly every touch is a fault.

use super::{FAULT_MIN, Outcome, Shuffle, WorkloadArgs, mix, timed};
use crate::BenchError;
use crate::latency::Latencies;
use crate::sys::Mapping;
use std::time::Instant;

use farpool_units::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let pages = args.pages(2)?;
    let mut memory = Mapping::new(pages * PAGE_BYTES)?;
    let (fill, ()) = timed(|| fill(memory.words_mut(), args.seed));
    let mut latencies = Latencies::new();
    let passes = args.passes.unwrap_or(1);
    let (work, sum) = timed(|| {
        (0..passes).try_fold(0u64, |sum, pass| {
            touch_all(&mut memory, u64::from(pass), args, &mut latencies)
                .map(|s| sum.wrapping_add(s))
        })
    });
    let ops = pages as u64 * u64::from(passes);
    Ok(Outcome { ops, fill, work, checksum: sum?, latencies: Some(latencies) })
}

/// Writes whole pages: a page of zeros with one word would compress to nothing.
fn fill(words: &mut [u64], seed: u64) {
    for (i, word) in words.iter_mut().enumerate() {
        *word = mix(i as u64 ^ seed);
    }
}

fn touch_all(
    memory: &mut Mapping,
    pass: u64,
    args: &WorkloadArgs,
    latencies: &mut Latencies,
) -> Result<u64, BenchError> {
    let order = Shuffle::new(memory.pages(), args.seed ^ pass);
    let mut sum = 0u64;
    for i in 0..memory.pages() {
        let page = order.at(i);
        let start = Instant::now();
        let read = memory.touch(page);
        let took = start.elapsed();
        if took >= FAULT_MIN {
            latencies.record(took);
        }
        let expected = mix((page * WORDS) as u64 ^ args.seed);
        if read != expected {
            let detail = format!("page {page} reads {read:#x}, not {expected:#x}");
            return Err(BenchError::WrongData { workload: "faults", detail });
        }
        sum = sum.rotate_left(7) ^ read;
        if args.is_write(mix(i as u64), 0) {
            memory.words_mut()[page * WORDS + 1] = sum;
        }
    }
    Ok(sum)
}
