//! Moving pages that no thread waits for: memcpy, `UFFDIO_COPY` and `UFFDIO_MOVE` in batches. The
//! far side is memory larger than the caches, as a blade's is.

use super::fault::open;
use crate::BenchError;
use crate::sys::Mapping;
use farpool_uffd::{Outcome, Uffd, features, register_mode};
use farpool_units::PAGE_BYTES;
use std::time::Instant;

/// Pages of one batch: what the pager moves at a time.
const BATCH_PAGES: usize = 64;
const BATCH_BYTES: usize = BATCH_PAGES * PAGE_BYTES;

/// Copies pages from a large memory into one warm page, in an order that the CPU's prefetchers
/// cannot predict. Returns the mean time of a page.
pub(super) fn memcpy_page_ns(pages: usize) -> Result<f64, BenchError> {
    let pages = pages.next_power_of_two();
    let blade = filled(pages * PAGE_BYTES)?;
    let mut page = vec![0u8; PAGE_BYTES];
    let start = Instant::now();
    for i in 0..pages {
        // An odd multiplier modulo a power of two: every page once.
        let from = i.wrapping_mul(0x9E37_79B1) % pages * PAGE_BYTES;
        page.copy_from_slice(&blade.bytes()[from..from + PAGE_BYTES]);
        std::hint::black_box(&mut page);
    }
    Ok(per_page_ns(start, pages))
}

/// Fills missing pages from a large memory, 64 pages a call. Returns the mean time of a page.
pub(super) fn uffd_copy_page_ns(pages: usize) -> Result<f64, BenchError> {
    let bytes = pages.next_multiple_of(BATCH_PAGES) * PAGE_BYTES;
    let blade = filled(bytes)?;
    let program = Mapping::small_pages(bytes)?;
    let uffd = open(0)?;
    register(&uffd, &program)?;
    let start = Instant::now();
    for at in (0..bytes).step_by(BATCH_BYTES) {
        let outcome = uffd.copy(program.address() + at, blade.address() + at, BATCH_BYTES, false);
        check(outcome, "fill memory with UFFDIO_COPY")?;
    }
    Ok(per_page_ns(start, bytes / PAGE_BYTES))
}

/// Moves pages out of a program's memory, 64 a call, and copies each to a large memory. Returns the
/// mean time of a page.
pub(super) fn move_page_ns(pages: usize) -> Result<f64, BenchError> {
    let bytes = pages.next_multiple_of(BATCH_PAGES) * PAGE_BYTES;
    let mut blade = filled(bytes)?;
    let mut program = Mapping::small_pages(bytes)?;
    program.bytes_mut().fill(3);
    let mut buffer = Mapping::small_pages(BATCH_BYTES)?;
    let uffd = open(features::MOVE)?;
    // Both ends are registered: pages must be missing at the destination, and the source has to
    // fault when it is touched again.
    register(&uffd, &program)?;
    register(&uffd, &buffer)?;
    let mut spent_ns = 0.0;
    for at in (0..bytes).step_by(BATCH_BYTES) {
        let start = Instant::now();
        let outcome =
            uffd.move_pages(buffer.address(), program.address() + at, BATCH_BYTES, false, true);
        check(outcome, "move memory with UFFDIO_MOVE")?;
        blade.bytes_mut()[at..at + BATCH_BYTES].copy_from_slice(buffer.bytes());
        spent_ns += start.elapsed().as_secs_f64() * 1e9;
        // Freeing the buffer is not part of the floor: a pager can reuse the frames.
        buffer.discard();
    }
    Ok(spent_ns / (bytes / PAGE_BYTES) as f64)
}

/// Returns memory in which every page is present.
pub(super) fn filled(bytes: usize) -> Result<Mapping, BenchError> {
    let mut memory = Mapping::small_pages(bytes)?;
    for (i, word) in memory.words_mut().iter_mut().enumerate() {
        *word = i as u64;
    }
    Ok(memory)
}

fn register(uffd: &Uffd, memory: &Mapping) -> Result<(), BenchError> {
    let register = uffd.register(memory.address(), memory.len(), register_mode::MISSING);
    register.map_err(BenchError::os("register memory with userfaultfd"))
}

fn check(outcome: Outcome, action: &str) -> Result<(), BenchError> {
    match outcome.errno {
        None => Ok(()),
        Some(errno) => Err(BenchError::os(action)(std::io::Error::from_raw_os_error(errno))),
    }
}

fn per_page_ns(start: Instant, pages: usize) -> f64 {
    start.elapsed().as_secs_f64() * 1e9 / pages as f64
}
