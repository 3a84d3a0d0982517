//! Allocations of mixed sizes through malloc: allocated, written in full, kept for a while,
//! checked, freed. Most of the time goes into first touches and the allocator.

use super::{Outcome, WorkloadArgs, mix, timed};
use crate::BenchError;
use farpool_policy::Rng;
use farpool_units::exactly;
use std::time::Duration;

/// Smallest and largest allocation, as powers of two: 64 B to 1 MiB.
const SIZE_BITS: std::ops::RangeInclusive<u32> = 6..=20;
/// Bytes allocated in total, as a multiple of the memory held at a time.
const TURNOVER: u64 = 4;

/// An allocation, and the number from which its contents follow.
type Block = (Vec<u64>, u64);

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let (work, result) = timed(|| churn(args));
    let (ops, checksum) = result?;
    Ok(Outcome { ops, fill: Duration::ZERO, work, checksum, latencies: None })
}

fn churn(args: &WorkloadArgs) -> Result<(u64, u64), BenchError> {
    let held_max = args.bytes_here()?.max(1 << 21);
    let total = args.bytes.saturating_mul(TURNOVER);
    let mut rng = Rng::new(args.seed);
    let mut blocks: Vec<Block> = Vec::new();
    let (mut held, mut allocated, mut ops, mut sum) = (0, 0, 0u64, 0u64);
    while allocated < total && args.ops.is_none_or(|limit| ops < limit) {
        let block = allocate(&mut rng, ops);
        let bytes = block.0.len() * 8;
        (held, allocated, ops) = (held + bytes, allocated + bytes as u64, ops + 1);
        blocks.push(block);
        while held > held_max {
            let at = rng.below(exactly(blocks.len())) as usize;
            let block = blocks.swap_remove(at);
            held -= block.0.len() * 8;
            sum = sum.wrapping_add(check(&block)?);
        }
    }
    for block in &blocks {
        sum = sum.wrapping_add(check(block)?);
    }
    Ok((ops, sum))
}

/// Allocates a block. Sizes are spread evenly over the powers of two, as in real heaps: many small,
/// few large.
fn allocate(rng: &mut Rng, number: u64) -> Block {
    let (low, high) = SIZE_BITS.into_inner();
    let bits = low + rng.below(high - low);
    let bytes = (1 << bits) + rng.below(1 << bits);
    let words = bytes / 8;
    ((0..words).map(|i| mix(number) ^ u64::from(i)).collect(), number)
}

fn check((words, number): &Block) -> Result<u64, BenchError> {
    let seed = mix(*number);
    let mut sum = 0u64;
    for (i, word) in words.iter().enumerate() {
        if *word != seed ^ i as u64 {
            let detail = format!("word {i} of allocation {number} reads {word:#x}");
            return Err(BenchError::WrongData { workload: "alloc", detail });
        }
        sum = sum.wrapping_add(*word);
    }
    Ok(sum)
}
