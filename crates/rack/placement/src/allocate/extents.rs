//! Free space as extents: of a memory brick, and of a compute brick's window of far addresses.
//!
//! Extents are sorted, disjoint and coalesced, so equal free space is equal data, and "release
//! undoes allocate" is checked by comparison. Lists stay short (fragments of one brick), so first
//! fit walks them, and a list of usual length lies inside its brick's record.

use smallvec::{SmallVec, smallvec};

/// Runs of superpages as (first, count); most segments have one.
pub(super) type Pieces = SmallVec<[(u32, u32); 2]>;

/// Free superpages as (first, count), in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Extents {
    free: SmallVec<[(u32, u32); 8]>,
    total: u32,
}

impl Extents {
    /// Everything in `0..count` is free.
    pub(super) fn new(count: u32) -> Self {
        Self { free: smallvec![(0, count)], total: count }
    }

    /// Free superpages.
    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// The longest run of free superpages.
    pub(super) fn largest(&self) -> u32 {
        self.free.iter().map(|(_, count)| *count).max().unwrap_or(0)
    }

    /// Takes `count` superpages from the first run that has them. Returns the first superpage, or
    /// None if no run is long enough.
    pub(super) fn take(&mut self, count: u32) -> Option<u32> {
        assert_ne!(count, 0, "nobody takes nothing");
        let at = self.free.iter().position(|(_, free)| *free >= count)?;
        let (first, free) = self.free[at];
        if free == count {
            self.free.remove(at);
        } else {
            self.free[at] = (first + count, free - count);
        }
        self.total -= count;
        Some(first)
    }

    /// Takes `count` superpages as one run if any holds them, otherwise as several in order.
    pub(super) fn take_split(&mut self, count: u32) -> Option<Pieces> {
        if self.total < count {
            return None;
        }
        if let Some(first) = self.take(count) {
            return Some(smallvec![(first, count)]);
        }
        let mut taken = Pieces::new();
        let mut wanted = count;
        while wanted > 0 {
            let run = self.free.first().map_or(0, |(_, free)| wanted.min(*free));
            let first = self.take(run).expect("the first run holds its own length");
            taken.push((first, run));
            wanted -= run;
        }
        Some(taken)
    }

    /// Takes exactly this run. Returns false, and takes nothing, if it is not free.
    #[must_use]
    pub(super) fn take_at(&mut self, first: u32, count: u32) -> bool {
        let at = self.free.partition_point(|(start, _)| *start <= first);
        let Some((start, free)) = at.checked_sub(1).map(|at| self.free[at]) else { return false };
        let (Some(end), whole_end) = (first.checked_add(count), start + free) else { return false };
        if count == 0 || end > whole_end {
            return false;
        }
        let left = (start, first - start);
        let right = (end, whole_end - end);
        self.free.remove(at - 1);
        let rest = [left, right].into_iter().filter(|(_, count)| *count > 0);
        self.free.insert_many(at - 1, rest);
        self.total -= count;
        true
    }

    /// Gives a run back and joins it with its free neighbours.
    ///
    /// # Panics
    /// If part of it is free already: two owners had it.
    pub(super) fn give(&mut self, first: u32, count: u32) {
        assert_ne!(count, 0, "nobody gives nothing back");
        let at = self.free.partition_point(|(start, _)| *start < first);
        let joins_left = at > 0 && {
            let (start, free) = self.free[at - 1];
            assert!(start + free <= first, "superpage {first} is given back twice");
            start + free == first
        };
        let joins_right = at < self.free.len() && {
            let (start, _) = self.free[at];
            assert!(first + count <= start, "superpage {start} is given back twice");
            first + count == start
        };
        match (joins_left, joins_right) {
            (true, true) => {
                self.free[at - 1].1 += count + self.free[at].1;
                self.free.remove(at);
            }
            (true, false) => self.free[at - 1].1 += count,
            (false, true) => self.free[at] = (first, count + self.free[at].1),
            (false, false) => self.free.insert(at, (first, count)),
        }
        self.total += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_joined_again() {
        let mut extents = Extents::new(10);
        assert_eq!(extents.take(3), Some(0));
        assert_eq!(extents.take(3), Some(3));
        assert_eq!(extents.take(3), Some(6));
        extents.give(0, 3);
        extents.give(6, 3);
        assert_eq!((extents.total(), extents.largest()), (7, 4));
        assert_eq!(extents.take(5), None, "seven are free, but not five in a row");
        assert_eq!(extents.take_split(5), Some(smallvec![(0, 3), (6, 2)]));
        extents.give(0, 3);
        extents.give(3, 3);
        extents.give(6, 2);
        assert_eq!(extents, Extents::new(10));
    }

    #[test]
    fn a_run_is_taken_where_it_is_asked_for_or_not_at_all() {
        let mut extents = Extents::new(10);
        assert!(extents.take_at(4, 2));
        for (first, count) in [(3, 2), (4, 1), (5, 2), (9, 2), (0, 0), (u32::MAX, 2)] {
            assert!(!extents.take_at(first, count), "{first} {count}");
        }
        assert!(extents.take_at(6, 4));
        assert!(extents.take_at(0, 4));
        assert_eq!(extents.total(), 0);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_run_given_back_twice_is_a_mistake_of_the_program() {
        let mut extents = Extents::new(4);
        assert_eq!(extents.take(2), Some(0));
        extents.give(0, 2);
        extents.give(1, 1);
    }
}
