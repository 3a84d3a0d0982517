//! The exact curve of LRU at every size.
//!
//! A reference hits in every LRU cache that has room for the pages referenced since the same page's
//! last reference, itself included: its stack distance. One pass counts how often each distance
//! occurs.

use super::timeline::Timeline;
use crate::misses::DensePages;

/// Places of the timeline per page: when all have been taken once, at most a quarter is in use, and
/// the timeline is compacted. More places make that rarer, fewer keep the timeline in the
/// processor's cache.
const PLACES_PER_PAGE: usize = 4;

/// Never referenced yet.
const NEVER: u32 = u32::MAX;

/// Misses of LRU as a function of the size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LruCurve {
    /// References at each stack distance, from 1; those to new pages at 0.
    references_at: Vec<u64>,
    /// Misses at each capacity from 0, up to the first at which only first references miss.
    misses: Vec<u64>,
}

impl LruCurve {
    /// Computes the curve in one pass. `progress` is called about every million requests with their
    /// number.
    ///
    /// # Panics
    /// 2^30 pages or more.
    #[must_use]
    pub fn new(trace: DensePages<'_>, mut progress: impl FnMut(usize)) -> Self {
        let mut stack = Stack::new(trace.page_count);
        for block in trace.pages.chunks(1 << 20) {
            for page in block {
                stack.reference(*page);
            }
            progress(block.len());
        }
        Self::from_distances(stack.references_at)
    }

    fn from_distances(mut references_at: Vec<u64>) -> Self {
        let used = references_at.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        references_at.truncate(used.max(1));
        let mut misses: Vec<u64> = references_at.clone();
        let first = references_at[0];
        let mut farther = 0;
        for (at, count) in references_at.iter().enumerate().rev() {
            misses[at] = first + farther;
            farther += if at == 0 { 0 } else { *count };
        }
        Self { references_at, misses }
    }

    /// Returns the misses at a capacity of `capacity` pages.
    #[must_use]
    pub fn misses(&self, capacity: usize) -> u64 {
        self.misses[capacity.min(self.misses.len() - 1)]
    }

    /// Returns the number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.misses[0]
    }

    /// Returns the least capacity at which only first references miss.
    #[must_use]
    pub fn capacity_max(&self) -> usize {
        self.misses.len() - 1
    }

    /// Returns the references whose stack distance is `distance`; at 0, those to pages never
    /// referenced before.
    #[must_use]
    pub fn references_at(&self, distance: usize) -> u64 {
        self.references_at.get(distance).copied().unwrap_or(0)
    }

    /// Returns an upper bound of the bytes that [`LruCurve::new`] takes beside the trace.
    #[must_use]
    pub fn memory_bytes(page_count: u64) -> u64 {
        let timeline = Timeline::memory_bytes((page_count + 1) * PLACES_PER_PAGE as u64);
        timeline + 4 * page_count + 2 * 8 * (page_count + 1)
    }
}

struct Stack {
    timeline: Timeline,
    /// Where on the timeline each page was last referenced.
    last: Vec<u32>,
    references_at: Vec<u64>,
}

impl Stack {
    fn new(page_count: usize) -> Self {
        assert!(page_count < 1 << 30, "{page_count} pages; a timeline has room for 2^30");
        Self {
            timeline: Timeline::new((page_count + 1) * PLACES_PER_PAGE),
            last: vec![NEVER; page_count],
            references_at: vec![0; page_count + 1],
        }
    }

    #[inline]
    fn reference(&mut self, page: u32) {
        if self.timeline.is_full() {
            self.close_up();
        }
        let last = self.last[page as usize];
        if last == NEVER {
            self.references_at[0] += 1;
        } else {
            let distance = self.timeline.taken() - self.timeline.taken_before(last);
            self.references_at[distance as usize] += 1;
            if distance == 1 {
                return;
            }
            self.timeline.free(last);
        }
        self.last[page as usize] = self.timeline.take_next();
    }

    /// Compacts the timeline: moves all pages to its beginning and keeps their order.
    fn close_up(&mut self) {
        for last in self.last.iter_mut().filter(|last| **last != NEVER) {
            *last = self.timeline.taken_before(*last);
        }
        let taken = self.timeline.taken();
        self.timeline.restart();
        for _ in 0..taken {
            self.timeline.take_next();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::misses::{CacheConfig, MissPolicy, count_misses};
    use crate::synthetic::Synthetic;
    use farpool_policy::CacheKind;
    use proptest::prelude::*;

    fn curve_agrees_with_caches(pages: &[u32], page_count: usize, sizes: &[usize]) {
        let trace = DensePages { pages, page_count };
        let curve = LruCurve::new(trace, |_| {});
        assert_eq!(curve.requests(), pages.len() as u64);
        for &capacity in sizes {
            let lru = MissPolicy::Online(CacheKind::Lru);
            let misses = count_misses(trace, CacheConfig { policy: lru, capacity }).unwrap();
            assert_eq!(curve.misses(capacity), misses, "{capacity}");
        }
    }

    proptest! {
        #[test]
        fn every_size_is_that_of_a_cache_of_its_own(
            pages in proptest::collection::vec(0u32..40, 0..400),
        ) {
            let sizes: Vec<usize> = (1..45).collect();
            curve_agrees_with_caches(&pages, 40, &sizes);
        }
    }

    #[test]
    fn so_it_is_when_the_timeline_is_closed_up_many_times() {
        let sizes = [1, 2, 10, 100, 1000, 4000, 9999, 16_384];
        for trace in [
            Synthetic::zipf(1 << 14, 300_000, 1),
            Synthetic::cycle(5000, 100_000),
            Synthetic::walk(3000, 100_000, 2),
        ] {
            curve_agrees_with_caches(&trace.pages, trace.page_count, &sizes);
        }
    }

    #[test]
    fn nothing_makes_an_empty_curve() {
        let curve = LruCurve::new(DensePages { pages: &[], page_count: 0 }, |_| {});
        assert_eq!((curve.requests(), curve.misses(0), curve.misses(7)), (0, 0, 0));
    }
}
