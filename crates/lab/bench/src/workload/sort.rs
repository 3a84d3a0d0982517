//! An in-memory sort of random numbers: the standard library's, on a plain vector.

use super::{Outcome, WorkloadArgs, timed};
use crate::BenchError;
use farpool_policy::Rng;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let count = (args.bytes_here()? / 8).max(2);
    let mut rng = Rng::new(args.seed);
    let (fill, mut numbers) = timed(|| (0..count).map(|_| rng.next_u64()).collect::<Vec<u64>>());
    let before = numbers.iter().fold(0u64, |sum, n| sum.wrapping_add(*n));
    let (work, ()) = timed(|| numbers.sort_unstable());
    check(&numbers, before)?;
    let checksum = numbers.iter().fold(0u64, |sum, n| sum.rotate_left(1) ^ n);
    Ok(Outcome { ops: count as u64, fill, work, checksum, latencies: None })
}

fn check(numbers: &[u64], sum_before: u64) -> Result<(), BenchError> {
    let wrong = |detail: String| Err(BenchError::WrongData { workload: "sort", detail });
    if let Some(at) = numbers.windows(2).position(|pair| pair[0] > pair[1]) {
        return wrong(format!("number {} is larger than its successor", at));
    }
    let sum = numbers.iter().fold(0u64, |sum, n| sum.wrapping_add(*n));
    if sum != sum_before {
        return wrong("the sorted numbers are not those that went in".to_owned());
    }
    Ok(())
}
