//! Memory that is written once and kept until the program's input ends; then all of it is checked.
//! For measurements of what is done to a program from outside.

use super::{Outcome, WorkloadArgs, check_pages, mix, timed};
use crate::BenchError;
use crate::sys::Mapping;
use std::io::Read;

use farpool_units::PAGE_BYTES;

const WORDS: usize = PAGE_BYTES / 8;

pub(super) fn run(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let pages = args.pages(2)?;
    let mut memory = Mapping::new(pages * PAGE_BYTES)?;
    let (fill, ()) = timed(|| {
        for page in 0..pages {
            memory.words_mut()[page * WORDS] = mix(page as u64 ^ args.seed);
        }
    });
    let mut input = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut input);
    read.map_err(BenchError::os("wait for the end of the input"))?;
    let (work, sum) = timed(|| check_pages("hold", memory.words(), args.seed));
    Ok(Outcome { ops: pages as u64, fill, work, checksum: sum?, latencies: None })
}
