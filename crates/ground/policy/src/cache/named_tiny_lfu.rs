//! W-TinyLFU as a [`Ranking`]: page numbers are reused, so its sketch counts names; and it grows
//! with the pages.

use super::sketch::NameSketch;
use super::slru::Segments;
use super::{TINY_LFU_PROBATION_PERCENT, TINY_LFU_SAMPLE_PER_PAGE, TINY_LFU_WINDOW_PERCENT};
use super::{part, percent};
use crate::list::IndexList;
use crate::ranking::Ranking;
use crate::tables::{Renumber, resize_exactly, table_bytes};

/// As [`super::TinyLfu`]; 21 bytes per page, and 8 to 16 for the sketch.
#[derive(Debug)]
pub struct NamedTinyLfu {
    window: IndexList,
    main: Segments<2>,
    names: Vec<u32>,
    sketch: NameSketch,
    /// References in the sketch's counts: halved with them.
    counted: u64,
    window_max: u32,
    capacity: u32,
    /// Pages were evicted. From then on the main part is not filled unconditionally, as the
    /// capacity varies a little.
    has_evicted: bool,
}

impl Default for NamedTinyLfu {
    fn default() -> Self {
        let mut cache = Self {
            window: IndexList::new(0),
            main: Segments::new(0, 0, [u32::MAX; 2]),
            names: Vec::new(),
            sketch: NameSketch::default(),
            counted: 0,
            window_max: 0,
            capacity: 0,
            has_evicted: false,
        };
        cache.divide(1);
        cache
    }
}

impl NamedTinyLfu {
    fn divide(&mut self, capacity: u32) {
        self.capacity = capacity;
        self.window_max = percent(capacity, TINY_LFU_WINDOW_PERCENT);
        let main = capacity - self.window_max;
        let protected = part(main, 100 - TINY_LFU_PROBATION_PERCENT);
        self.main.divide(main, [u32::MAX, protected]);
        self.sketch.fit(capacity);
    }

    /// While the cache fills, admits what exceeds the window to the main part unconditionally.
    fn settle(&mut self) {
        while !self.has_evicted
            && self.window.len() > self.window_max
            && self.main.len < self.main.capacity
            && let Some(page) = self.window.pop_back()
        {
            self.main.insert(page);
        }
    }

    fn seen(&self, page: u32) -> u8 {
        self.sketch.estimate(self.names[page as usize])
    }

    /// Counts a reference, as [`super::Ageing::Additions`].
    fn count(&mut self, name: u32) {
        self.sketch.add(name);
        self.counted += 1;
        // The capacity may have changed since: a small one while filling must not age the counts
        // of a large one, and after a large one more than one halving may be due.
        while self.counted >= u64::from(self.capacity) * TINY_LFU_SAMPLE_PER_PAGE {
            self.sketch.halve();
            self.counted /= 2;
        }
    }
}

impl Renumber for NamedTinyLfu {
    fn rename(&mut self, from: u32, to: u32) {
        self.window.rename(from, to);
        self.main.rename(from, to);
        self.names[to as usize] = self.names[from as usize];
    }

    fn resize(&mut self, page_count: usize) {
        self.window.resize(page_count);
        self.main.resize(page_count);
        resize_exactly(&mut self.names, page_count, 0);
    }

    fn bytes(&self) -> usize {
        let tables = self.window.bytes() + self.main.bytes() + table_bytes(&self.names);
        tables + self.sketch.bytes()
    }
}

impl Ranking for NamedTinyLfu {
    fn insert(&mut self, page: u32, name: u32, _: &mut Vec<u32>) {
        let len = self.window.len() + self.main.len + 1;
        if len > self.capacity {
            self.divide(len);
        }
        self.names[page as usize] = name;
        self.window.push_front(page);
        self.count(name);
        self.settle();
    }

    fn touch(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        let is_held = self.window.move_to_front(page)
            || self.main.reference(page, &mut |_| unreachable!("probation takes all"));
        if is_held {
            self.count(self.names[page as usize]);
        }
        is_held
    }

    fn victim(&mut self, _: &mut Vec<u32>) -> Option<u32> {
        self.has_evicted = true;
        loop {
            // If the window is half empty, a surplus of the main part is evicted without a
            // comparison.
            let main_is_next =
                self.main.len > self.main.capacity && self.window.len() <= self.window_max / 2;
            let candidate = if main_is_next { None } else { self.window.pop_back() };
            let Some(candidate) = candidate else { return self.main.evict() };
            let other = self.main.next_victim();
            let wins = other.is_none_or(|other| self.seen(candidate) > self.seen(other));
            if !wins {
                return Some(candidate);
            }
            let is_full = self.main.len >= self.main.capacity;
            let victim = if is_full { self.main.evict() } else { None };
            self.main.insert(candidate);
            if victim.is_some() {
                return victim;
            }
        }
    }

    fn remove(&mut self, page: u32, _: &mut Vec<u32>) -> bool {
        self.window.remove(page) || self.main.remove(page)
    }

    fn set_capacity(&mut self, capacity: u32, _: &mut Vec<u32>) {
        let len = self.window.len() + self.main.len;
        self.divide(capacity.max(len).max(1));
    }

    fn contains(&self, page: u32) -> bool {
        self.window.contains(page) || self.main.contains(page)
    }

    fn knows(&self, page: u32) -> bool {
        self.contains(page)
    }

    fn len(&self) -> usize {
        (self.window.len() + self.main.len) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of a thousand pages, each referenced eight times.
    fn used() -> NamedTinyLfu {
        let mut cache = NamedTinyLfu::default();
        let mut none = Vec::new();
        cache.resize(1000);
        cache.set_capacity(1000, &mut none);
        (0..1000).for_each(|page| cache.insert(page, page, &mut none));
        for _ in 1..8 {
            assert!((0..1000).all(|page| cache.touch(page, &mut none)));
        }
        cache
    }

    #[test]
    fn counts_age_to_the_sample_of_a_capacity_that_shrank() {
        let mut cache = used();
        let mut none = Vec::new();
        assert_eq!(cache.counted, 8000, "less than a sample of ten a page");
        assert!((0..1000).all(|page| cache.seen(page) >= 8));
        while cache.len() > 20 {
            cache.victim(&mut none).expect("a page");
        }
        cache.set_capacity(20, &mut none);
        assert_eq!(cache.counted, 8000, "a change of capacity counts nothing");
        let held = (0..1000).find(|page| cache.contains(*page)).expect("twenty are");
        cache.touch(held, &mut none);
        // 8001 halved until it is below 200: six times, which leaves nothing of a count of nine.
        assert_eq!((cache.counted, cache.seen(held)), (125, 0));
        // From now on the sample is that of twenty pages.
        (0..3).for_each(|_| assert!(cache.touch(held, &mut none)));
        assert_eq!((cache.counted, cache.seen(held)), (128, 3));
    }

    #[test]
    fn a_small_capacity_while_filling_ages_nothing() {
        let mut cache = NamedTinyLfu::default();
        let mut none = Vec::new();
        cache.resize(1000);
        (0..1000).for_each(|page| cache.insert(page, page, &mut none));
        assert!((0..1000).all(|page| cache.seen(page) >= 1));
    }
}
