//! All memory in address order, as a table scan does.

use farpool_units::PAGE_BYTES;

use super::{Outcome, WorkloadArgs, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    if args.step_bytes < 8 || !args.step_bytes.is_multiple_of(8) {
        return Err(BenchError::Arguments("--step-bytes is a multiple of 8".to_owned()));
    }
    let mut memory = Mapping::new(args.pages(1)? * PAGE_BYTES)?;
    let passes = args.passes.unwrap_or(2);
    let (fill, ()) = timed(|| {
        for (i, word) in memory.words_mut().iter_mut().enumerate() {
            *word = mix(i as u64 ^ args.seed);
        }
    });
    let (work, sums) = timed(|| {
        let pass = |_| std::hint::black_box(read_all(memory.words(), args.step_bytes / 8));
        (0..passes).map(pass).collect::<Vec<u64>>()
    });
    check(&sums)?;
    let ops = u64::from(passes) * (memory.len() / args.step_bytes) as u64;
    Ok(Outcome { ops, fill, work, checksum: sums.first().copied().unwrap_or(0), latencies: None })
}

fn read_all(words: &[u64], step: usize) -> u64 {
    words.iter().step_by(step).fold(0, |sum, word| sum.rotate_left(1) ^ word)
}

fn check(sums: &[u64]) -> Result<(), BenchError> {
    match sums.windows(2).position(|pair| pair[0] != pair[1]) {
        None => Ok(()),
        Some(pass) => {
            let detail = format!("pass {} read other data than pass {pass}", pass + 1);
            Err(BenchError::WrongData { workload: "scan", detail })
        }
    }
}
