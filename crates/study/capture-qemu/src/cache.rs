// SPDX-License-Identifier: GPL-2.0-or-later
//! A set-associative cache of 64-byte lines with write-back and exact LRU order in each set.
//!
//! It tells whether a reference goes on to the next level, and whether a changed line is evicted.

/// Bytes of a line.
pub const LINE_BYTES: u64 = 64;

/// The lowest bit of a tag: the line was changed.
const CHANGED: u64 = 1;
/// No line has this tag: line numbers are 58 bits long.
const VACANT: u64 = u64::MAX << 1;

/// The result of a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The line was in the cache.
    Hit,
    /// The line was not in the cache and is now; with the changed line evicted for it, if any.
    Miss(Option<u64>),
}

/// Tags of all sets, each set's most recent line first.
#[derive(Debug)]
pub struct Cache {
    tags: Vec<u64>,
    ways: usize,
    set_mask: u64,
}

impl Cache {
    /// Creates a cache of `bytes` in `ways`. None unless the number of sets is a power of two.
    #[must_use]
    pub fn new(bytes: u64, ways: usize) -> Option<Self> {
        let lines = usize::try_from(bytes / LINE_BYTES).ok()?;
        if ways == 0 || !bytes.is_multiple_of(LINE_BYTES) || !lines.is_multiple_of(ways) {
            return None;
        }
        let sets = lines / ways;
        let set_mask = sets.is_power_of_two().then(|| sets as u64 - 1)?;
        Some(Self { tags: vec![VACANT; lines], ways, set_mask })
    }

    /// Returns the mask that selects a line's set: the lowest bits of its number.
    #[must_use]
    pub fn set_mask(&self) -> u64 {
        self.set_mask
    }

    #[allow(clippy::cast_possible_truncation, reason = "masked to the number of sets")]
    fn set(&mut self, line: u64) -> &mut [u64] {
        let first = (line & self.set_mask) as usize * self.ways;
        &mut self.tags[first..first + self.ways]
    }

    /// Returns the most recent line of the set of `line`: twice its number, plus one if it was
    /// changed. Referencing that line again moves nothing.
    #[must_use]
    pub fn front(&mut self, line: u64) -> u64 {
        self.set(line)[0]
    }

    /// Loads (`is_store` false) or stores `line`.
    pub fn reference(&mut self, line: u64, is_store: bool) -> Outcome {
        let Some((first, others)) = self.set(line).split_first_mut() else {
            return Outcome::Miss(None);
        };
        let (tag, changed) = (line << 1, u64::from(is_store));
        if *first & !CHANGED == tag {
            *first |= changed;
            return Outcome::Hit;
        }
        // One pass finds the line and makes room in front: each tag moves down one place until the
        // line's old place, or the last one, is free.
        let mut moving = std::mem::replace(first, tag | changed);
        for place in others {
            let held = std::mem::replace(place, moving);
            if held & !CHANGED == tag {
                *first = held | changed;
                return Outcome::Hit;
            }
            moving = held;
        }
        Outcome::Miss((moving & CHANGED != 0).then_some(moving >> 1))
    }

    /// Accepts a changed line from the level above. False if this level does not hold it.
    pub fn take_back(&mut self, line: u64) -> bool {
        let tag = line << 1;
        let held = self.set(line).iter_mut().find(|held| **held & !CHANGED == tag);
        held.map(|held| *held |= CHANGED).is_some()
    }
}
