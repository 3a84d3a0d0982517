//! The resident pages of the superpage that the evictor is at, by the kernel's page map: one scan
//! serves all its chunks. It may be out of date by `MAP_LIFE`; the page states decide what is
//! really taken.

use std::time::{Duration, Instant};

use farpool_uffd::{PageRange, category};
use farpool_units::{PAGE_BYTES, at_most};

use crate::core::Core;
use crate::space::Superpage;
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES, CHUNKS, SUPERPAGE_BYTES, SUPERPAGE_PAGES};

/// How long the map of a superpage's resident pages is used at most.
const MAP_LIFE: Duration = Duration::from_millis(20);

/// The pages of one superpage that are resident and far-eligible.
#[derive(Debug)]
pub(crate) struct ResidentMap {
    superpage: Option<u32>,
    generation: u64,
    made: Instant,
    chunks: [u64; CHUNKS],
    ranges: Vec<PageRange>,
}

impl ResidentMap {
    pub(crate) fn new() -> ResidentMap {
        ResidentMap {
            superpage: None,
            generation: 0,
            made: Instant::now(),
            chunks: [0; CHUNKS],
            ranges: vec![PageRange::default(); SUPERPAGE_PAGES / 2],
        }
    }

    pub(crate) fn forget(&mut self, chunk: usize) {
        self.chunks[chunk] = 0;
    }

    /// The resident, far-eligible pages of a chunk. The registry must be locked.
    pub(crate) fn resident(
        &mut self,
        core: &Core,
        registry: &Registry,
        superpage: &Superpage,
        chunk: usize,
    ) -> u64 {
        let fresh = self.superpage == Some(superpage.id())
            && self.generation == registry.generation()
            && self.made.elapsed() < MAP_LIFE;
        if !fresh {
            self.make(core, registry, superpage);
        }
        self.chunks[chunk]
    }

    /// How many chunks after this one, which was just asked for and is empty, are empty too, within
    /// the map.
    pub(crate) fn empty_after(&self, chunk: usize) -> usize {
        empty_after(&self.chunks, chunk)
    }

    fn make(&mut self, core: &Core, registry: &Registry, superpage: &Superpage) {
        self.superpage = Some(superpage.id());
        self.generation = registry.generation();
        self.made = Instant::now();
        self.chunks.fill(0);
        let base = superpage.base();
        for region in registry.overlapping(base, base + SUPERPAGE_BYTES) {
            if !region.pinned {
                self.scan(core, base, region.start, region.end);
            }
        }
    }

    fn scan(&mut self, core: &Core, base: usize, start: usize, end: usize) {
        let mut from = start;
        while from < end {
            // Pages under migration, which are occupied too, wait for the next scan.
            let found = core.pagemap.scan(from, end, category::PRESENT, &mut self.ranges);
            let Ok((found, walked)) = found else { return };
            for range in found {
                let chunk_of = |address: usize| (address - base) / CHUNK_BYTES;
                for chunk in chunk_of(range.first())..=chunk_of(range.last() - 1) {
                    self.chunks[chunk] |= page_bits(range, base + chunk * CHUNK_BYTES, CHUNK_PAGES);
                }
            }
            if walked <= from {
                return;
            }
            from = walked;
        }
    }
}

fn empty_after(chunks: &[u64], chunk: usize) -> usize {
    chunks[chunk + 1..].iter().take_while(|resident| **resident == 0).count()
}

/// The bits of a range's pages among the `count` pages from `start`.
fn page_bits(range: &PageRange, start: usize, count: usize) -> u64 {
    let page = |address: u64| {
        let offset = at_most::<usize, _>(address).saturating_sub(start);
        (offset / PAGE_BYTES).min(count)
    };
    let (first, last) = (page(range.start), page(range.end));
    if first >= last {
        return 0;
    }
    let ones = if last - first == 64 { u64::MAX } else { (1 << (last - first)) - 1 };
    ones << first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_chunks_are_counted_up_to_the_next_that_is_not() {
        assert_eq!(empty_after(&[0, 0, 0, 4, 0], 0), 2);
        assert_eq!(empty_after(&[0, 0, 0, 4, 0], 3), 1);
        assert_eq!(empty_after(&[0, 0, 0, 4, 0], 4), 0);
    }
}
