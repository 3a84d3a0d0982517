//! The hot/cold microbenchmark of HPL-2011-31: 90 % of the accesses go to 10 % of the pages, which
//! lie together. An access reads a word of a random page; by default one in four also writes it.

use super::{Outcome, WorkloadArgs, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;
use farpool_policy::Rng;
use farpool_units::{PAGE_BYTES, exactly};

/// Words of a page.
const WORDS: usize = PAGE_BYTES / 8;
/// Default percentage of writes, so that evictions have something to write.
const WRITE_PERCENT: u32 = 25;
/// Default number of accesses for each page.
const OPS_PER_PAGE: u64 = 16;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let pages = args.pages(10)?;
    let mut memory = Mapping::new(pages * PAGE_BYTES)?;
    let ops = args.ops.unwrap_or(pages as u64 * OPS_PER_PAGE);
    let (fill, ()) = timed(|| fill(memory.words_mut(), args.seed));
    let (work, sum) = timed(|| access(memory.words_mut(), pages, ops, args));
    Ok(Outcome { ops, fill, work, checksum: sum ^ fold(memory.words()), latencies: None })
}

fn fill(words: &mut [u64], seed: u64) {
    for (i, word) in words.iter_mut().enumerate() {
        *word = mix(i as u64 ^ seed);
    }
}

fn access(words: &mut [u64], pages: usize, ops: u64, args: &WorkloadArgs) -> u64 {
    let hot = pages / 10;
    let mut rng = Rng::new(args.seed);
    let mut sum = 0u64;
    for _ in 0..ops {
        let page = if rng.below(10) < 9 {
            below(&mut rng, hot)
        } else {
            hot + below(&mut rng, pages - hot)
        };
        let random = rng.next_u64();
        let word = &mut words[page * WORDS + exactly::<usize, _>(random >> 32) % WORDS];
        sum = sum.wrapping_add(*word);
        if args.is_write(random & 0xFFFF_FFFF, WRITE_PERCENT) {
            *word = word.wrapping_mul(3).wrapping_add(random);
        }
    }
    sum
}

fn below(rng: &mut Rng, bound: usize) -> usize {
    rng.below(exactly(bound)) as usize
}

fn fold(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.rotate_left(1) ^ word)
}
