//! The free parts of a range, best fit; adjacent free parts are merged.
//!
//! Only offsets: the memory is the caller's. Free parts cost no memory (their pages are returned to
//! the kernel), so fragmentation costs address space only.

use std::collections::{BTreeMap, BTreeSet};

/// The free parts of a range of bytes.
#[derive(Debug, Default)]
pub struct Extents {
    /// Length by start.
    by_start: BTreeMap<usize, usize>,
    /// The same parts, as length and start.
    by_length: BTreeSet<(usize, usize)>,
}

impl Extents {
    /// A range `from..to` that is all free.
    #[must_use]
    pub fn new(from: usize, to: usize) -> Self {
        let mut extents = Self::default();
        if from < to {
            extents.add(from, to - from);
        }
        extents
    }

    fn add(&mut self, start: usize, length: usize) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn drop(&mut self, start: usize, length: usize) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Takes `length` bytes. Returns where they begin, or None if no free part is that long.
    pub fn take(&mut self, length: usize) -> Option<usize> {
        let &(found, start) = self.by_length.range((length, 0)..).next()?;
        self.drop(start, found);
        if found > length {
            self.add(start + length, found - length);
        }
        Some(start)
    }

    /// Frees a part that was taken.
    pub fn give(&mut self, mut start: usize, mut length: usize) {
        let before = self.by_start.range(..start).next_back().map(|(&at, &length)| (at, length));
        let after = self.by_start.range(start..).next().map(|(&at, &length)| (at, length));
        assert!(
            before.is_none_or(|(at, before)| at + before <= start)
                && after.is_none_or(|(at, _)| start + length <= at),
            "what is given back was taken"
        );
        if let Some((at, before)) = before.filter(|(at, before)| at + before == start) {
            self.drop(at, before);
            (start, length) = (at, before + length);
        }
        if let Some((at, after)) = after.filter(|(at, _)| start + length == *at) {
            self.drop(at, after);
            length += after;
        }
        self.add(start, length);
    }

    /// The free parts in order: start and length.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        self.by_start.iter().map(|(&start, &length)| (start, length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FROM: usize = 100;
    const TO: usize = 1100;

    proptest! {
        /// Against a map of bytes: parts in use never overlap, and free parts are as long as
        /// possible.
        #[test]
        fn what_is_free_is_free(steps in prop::collection::vec((any::<bool>(), 1usize..200, any::<prop::sample::Index>()), 1..200)) {
            let mut extents = Extents::new(FROM, TO);
            let mut used: Vec<(usize, usize)> = Vec::new();
            for (takes, length, which) in steps {
                if takes {
                    let longest = extents.iter().map(|(_, length)| length).max().unwrap_or(0);
                    match extents.take(length) {
                        Some(at) => used.push((at, length)),
                        None => prop_assert!(longest < length),
                    }
                } else if !used.is_empty() {
                    let (at, length) = used.swap_remove(which.index(used.len()));
                    extents.give(at, length);
                }
                let mut all: Vec<(usize, usize, bool)> =
                    used.iter().map(|&(at, length)| (at, length, false)).collect();
                all.extend(extents.iter().map(|(at, length)| (at, length, true)));
                all.sort_unstable();
                let mut end = FROM;
                let mut was_free = false;
                for (at, length, is_free) in all {
                    prop_assert_eq!(at, end);
                    prop_assert!(!(was_free && is_free), "two free parts side by side at {}", at);
                    (end, was_free) = (at + length, is_free);
                }
                prop_assert_eq!(end, TO);
                prop_assert_eq!(extents.by_start.len(), extents.by_length.len());
            }
        }
    }
}
