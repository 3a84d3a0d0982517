//! First touches in random order: each page is written once, and then all of them are read back.

use farpool_units::PAGE_BYTES;

use super::{Outcome, Shuffle, WorkloadArgs, check_pages, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;

const WORDS: usize = PAGE_BYTES / 8;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let pages = args.pages(2)?;
    let mut memory = Mapping::new(pages * PAGE_BYTES)?;
    let order = Shuffle::new(pages, args.seed);
    let (fill, ()) = timed(|| {
        for number in 0..pages {
            let page = order.at(number);
            memory.words_mut()[page * WORDS] = mix(page as u64 ^ args.seed);
        }
    });
    let (work, sum) = timed(|| check_pages("touch", memory.words(), args.seed));
    Ok(Outcome { ops: pages as u64, fill, work, checksum: sum?, latencies: None })
}
