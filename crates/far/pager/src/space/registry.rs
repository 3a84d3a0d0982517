//! The far-eligible ranges of the program's addresses. Pure: it knows addresses, not memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

use crate::sys::Protection;

/// The pages at the end of a range, its tail, in which a thread's descriptor is looked for.
const TAIL_PAGES: usize = 2;
/// How long a thread may take from the first touch of its stack to its descriptor's first word,
/// because it may have to wait for a processor between them. Until then that tail stays local.
const SETTLING_TIME: Duration = Duration::from_millis(250);

/// What lies at the end of a far-eligible range, see [`crate::evict::exits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tail {
    #[default]
    Unknown,
    /// It held no descriptor when it was first checked, at this time.
    Unsettled(Instant),
    Plain,
    /// The descriptor of a thread: the end is not moved out.
    Descriptor,
}

impl Tail {
    /// What is known after another check, which has found a descriptor or not.
    pub fn seen(self, is_descriptor: bool, now: Instant) -> Tail {
        match self {
            _ if is_descriptor => Tail::Descriptor,
            Tail::Unknown => Tail::Unsettled(now),
            Tail::Unsettled(since) if !is_settled(since, now) => self,
            _ => Tail::Plain,
        }
    }
}

/// Whether a thread that was being made when its stack was checked has its descriptor by now.
pub fn is_settled(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= SETTLING_TIME
}

/// A far-eligible range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    pub start: usize,
    pub end: usize,
    /// Locked by the program (mlock), or of rights with which it cannot be moved: none of it is
    /// moved out.
    pub pinned: bool,
    /// What the program may do with it, as the pager last saw it.
    pub protection: Protection,
    /// A child of fork has nothing there (MADV_DONTFORK).
    pub unshared: bool,
    pub tail: Tail,
}

impl Region {
    /// Its last pages.
    pub fn tail_range(&self) -> Range<usize> {
        self.end.saturating_sub(TAIL_PAGES * PAGE_BYTES).max(self.start)..self.end
    }

    /// The part of it from `start` to `end`. If it has another end, nothing is known of that end.
    fn part(self, start: usize, end: usize) -> Region {
        let tail = if end == self.end { self.tail } else { Tail::Unknown };
        Region { start, end, tail, ..self }
    }

    pub fn bytes(&self) -> usize {
        self.end - self.start
    }
}

/// Disjoint far-eligible ranges, by address.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    by_start: BTreeMap<usize, Region>,
    bytes: usize,
    generation: u64,
}

impl Registry {
    /// Bytes of all ranges together.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Changes with every change of the ranges.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Adds `[start, end)`, replacing what was there.
    pub fn add(&mut self, start: usize, end: usize) {
        self.insert(Region { start, end, ..Region::default() });
    }

    /// As [`Registry::add`], for a range of which more is known.
    pub fn insert(&mut self, region: Region) {
        if region.start >= region.end {
            return;
        }
        self.remove(region.start, region.end);
        self.bytes += region.bytes();
        self.by_start.insert(region.start, region);
        self.generation += 1;
    }

    /// Removes `[start, end)`, splitting ranges at its ends. Returns the parts that were
    /// far-eligible.
    pub fn remove(&mut self, start: usize, end: usize) -> Vec<Region> {
        let parts = self.overlapping(start, end);
        for part in &parts {
            let whole = self.containing(part.start);
            let Some(whole) = whole else { continue };
            self.by_start.remove(&whole.start);
            self.bytes -= part.bytes();
            for (left, right) in [(whole.start, part.start), (part.end, whole.end)] {
                if left < right {
                    self.by_start.insert(left, whole.part(left, right));
                }
            }
        }
        if !parts.is_empty() {
            self.generation += 1;
        }
        parts
    }

    /// The far-eligible parts of `[start, end)`, clipped to it.
    pub fn overlapping(&self, start: usize, end: usize) -> Vec<Region> {
        let mut parts = Vec::new();
        let first = self.containing(start).map_or(start, |region| region.start);
        for region in self.by_start.range(first..end).map(|(_, region)| *region) {
            let clipped = region.part(region.start.max(start), region.end.min(end));
            if clipped.start < clipped.end {
                parts.push(clipped);
            }
        }
        parts
    }

    /// The first far-eligible part of `[start, end)`, as start and end.
    pub fn first_in(&self, start: usize, end: usize) -> Option<(usize, usize)> {
        let first = self.containing(start).map_or(start, |region| region.start);
        let (_, region) = self.by_start.range(first..end.max(first)).next()?;
        let part = (region.start.max(start), region.end.min(end));
        (part.0 < part.1).then_some(part)
    }

    /// Marks the far-eligible parts of `[start, end)` as pinned or not.
    pub fn pin(&mut self, start: usize, end: usize, pinned: bool) {
        for part in self.remove(start, end) {
            self.insert(Region { pinned, ..part });
        }
    }

    /// Notes what the program may do with the far-eligible parts of `[start, end)`, and whether
    /// they stay because of that.
    pub fn set_protection(
        &mut self,
        start: usize,
        end: usize,
        protection: Protection,
        pinned: bool,
    ) {
        for part in self.remove(start, end) {
            self.insert(Region { protection, pinned, ..part });
        }
    }

    /// Notes whether a child of fork does not get the far-eligible parts of `[start, end)`.
    pub fn set_unshared(&mut self, start: usize, end: usize, unshared: bool) {
        for part in self.remove(start, end) {
            self.insert(Region { unshared, ..part });
        }
    }

    /// Notes what was found at the end of the range that ends at `end`, if there is one.
    pub fn see_tail(&mut self, end: usize, is_descriptor: bool, now: Instant) {
        let before = self.by_start.range_mut(..end).next_back();
        if let Some((_, region)) = before.filter(|(_, region)| region.end == end) {
            region.tail = region.tail.seen(is_descriptor, now);
        }
    }

    /// Whether a child of fork lacks some of `[start, end)`.
    pub fn is_unshared(&self, start: usize, end: usize) -> bool {
        self.overlapping(start, end).iter().any(|part| part.unshared)
    }

    /// Removes, in a child of fork, the ranges that it did not get, and returns them.
    pub fn take_unshared(&mut self) -> Vec<Region> {
        let unshared: Vec<Region> = self.iter().filter(|region| region.unshared).collect();
        for region in &unshared {
            self.remove(region.start, region.end);
        }
        unshared
    }

    /// All ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Region> + '_ {
        self.by_start.values().copied()
    }

    /// The region that an address lies in.
    pub fn containing(&self, address: usize) -> Option<Region> {
        let (_, region) = self.by_start.range(..=address).next_back()?;
        (region.end > address).then_some(*region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Add(usize, usize),
        Remove(usize, usize),
        Pin(usize, usize, bool),
        Unshare(usize, usize, bool),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = (0_usize..60, 1_usize..20).prop_map(|(start, len)| (start, start + len));
        let step = (range, 0..5).prop_map(|((start, end), kind)| match kind {
            0 | 1 => Step::Add(start, end),
            2 => Step::Remove(start, end),
            3 => Step::Unshare(start, end, start % 3 != 0),
            _ => Step::Pin(start, end, start % 2 == 0),
        });
        proptest::collection::vec(step, 1..40)
    }

    proptest! {
        /// Checks the registry against an array that says for each address: not far-eligible, or
        /// far-eligible and whether it is pinned and unshared.
        #[test]
        fn behaves_like_an_array(steps in steps()) {
            let mut registry = Registry::default();
            let mut model = [None::<(bool, bool)>; 80];
            for step in steps {
                match step {
                    Step::Add(start, end) => {
                        registry.add(start, end);
                        model[start..end].fill(Some((false, false)));
                    }
                    Step::Remove(start, end) => {
                        let removed: usize = registry.remove(start, end).iter().map(Region::bytes).sum();
                        let expected = model[start..end].iter().flatten().count();
                        prop_assert_eq!(removed, expected);
                        model[start..end].fill(None);
                    }
                    Step::Pin(start, end, pinned) => {
                        registry.pin(start, end, pinned);
                        model[start..end].iter_mut().flatten().for_each(|cell| cell.0 = pinned);
                    }
                    Step::Unshare(start, end, unshared) => {
                        registry.set_unshared(start, end, unshared);
                        let far = model[start..end].iter_mut().flatten();
                        far.for_each(|cell| cell.1 = unshared);
                    }
                }
                for start in [0, 20, 60] {
                    let parts = registry.overlapping(start, 60);
                    let first = parts.first().map(|part| (part.start, part.end));
                    prop_assert_eq!(registry.first_in(start, 60), first);
                }
                let mut seen = [None; 80];
                for region in registry.overlapping(0, 80) {
                    prop_assert!(seen[region.start..region.end].iter().all(Option::is_none));
                    seen[region.start..region.end].fill(Some((region.pinned, region.unshared)));
                }
                prop_assert_eq!(&seen[..], &model[..]);
                prop_assert_eq!(registry.bytes(), model.iter().flatten().count());
            }
            let is_left = |cell: &&(bool, bool)| !cell.1;
            let left = model.iter().flatten().filter(is_left).count();
            let gone: usize = registry.take_unshared().iter().map(Region::bytes).sum();
            prop_assert_eq!(gone + left, model.iter().flatten().count());
            prop_assert_eq!(registry.bytes(), left);
        }
    }
}
