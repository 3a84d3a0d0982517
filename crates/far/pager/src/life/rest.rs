//! Which parts of registered memory rest, that is, are unregistered for a while. Pure.
//!
//! On registered memory each madvise(DONTNEED) costs two context switches, and each page that is
//! used again a fault. Memory that is given up and used again all the time stays local anyway, so
//! it gains nothing from being registered. It is watched in pieces. A piece whose events have cost
//! more than two changes of its registration rests, if none of its pages is away: its calls and its
//! faults then involve only the kernel. Nothing reports when it is used less, so a rest ends after
//! a time, which gets longer each time the piece turns out to be used as before.
//!
//! Resting memory may grow without a fault that the pager sees. So it is at most a part of the
//! limit ([`Rests::may_begin`]), and its missing pages count as present
//! ([`crate::shared::budget::Budget::set_unseen`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

use crate::space::units::CHUNK_PAGES;

/// The unit that rests or does not as a whole: the evictor's unit, so a chunk is never half
/// registered.
pub const PIECE_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;
/// Events after which a piece is hot. An event costs about 10 us, each page that is used again a
/// fault of some 5; to unregister and to register again cost about 10 us each. Fewer events would
/// be what any allocator does once.
const HOT_EVENTS: u32 = 4;
/// The events must come within this time. Memory that is given up less often is not worth the
/// mappings that a rest makes.
const HOT_TIME: Duration = Duration::from_secs(1);
/// An event of more pieces than this is expensive by itself: the kernel drops a thousand pages in
/// 50 us.
const MOST_PIECES_OF_EVENT: usize = 16;
/// A piece that was hot and could not rest for this long must become hot again.
const PATIENCE: Duration = Duration::from_millis(100);
/// The first rest, and the longest: at the end of each the events of [`HOT_EVENTS`] are paid for
/// again, some 0.5 ms.
const FIRST_REST: Duration = Duration::from_secs(1);
const LONGEST_REST: Duration = Duration::from_secs(32);
/// The most pieces that are watched; beyond that, those that were not given up recently are
/// forgotten.
const MOST_WATCHED: usize = 4096;
/// The most runs of resting pieces: each adds two mappings to the 65,530 that a process may have.
const MOST_RUNS: usize = 512;
/// Resting memory is at most this part of the limit.
const LIMIT_PART: usize = 4;

/// See the module's description. Pieces go by their numbers.
#[derive(Debug, Default)]
pub struct Rests {
    heats: BTreeMap<usize, Heat>,
    /// Pieces that should rest, and since when.
    hot: BTreeMap<usize, Instant>,
    /// Until when a piece rests.
    resting: BTreeMap<usize, Instant>,
    /// Pieces whose rest is over, but which are not registered yet.
    waking: BTreeSet<usize>,
    /// Nothing rests any more.
    is_over: bool,
}

/// How often a piece was given up.
#[derive(Clone, Copy, Debug)]
struct Heat {
    since: Instant,
    events: u32,
    /// The length of its last rest, and when that ended.
    rest: Duration,
    ended: Option<Instant>,
}

impl Heat {
    fn new(now: Instant) -> Heat {
        Heat { since: now, events: 0, rest: Duration::ZERO, ended: None }
    }
}

impl Rests {
    /// Notes that the program gives a range up.
    pub fn note(&mut self, start: usize, end: usize, now: Instant) {
        let pieces = start / PIECE_BYTES..end.div_ceil(PIECE_BYTES);
        if self.is_over || pieces.len() > MOST_PIECES_OF_EVENT {
            return;
        }
        for piece in pieces {
            if self.resting.contains_key(&piece) {
                continue;
            }
            let heat = self.heats.entry(piece).or_insert_with(|| Heat::new(now));
            if now.duration_since(heat.since) > HOT_TIME {
                (heat.since, heat.events) = (now, 0);
            }
            heat.events += 1;
            if heat.events == HOT_EVENTS {
                self.hot.insert(piece, now);
            }
        }
        if self.heats.len() > MOST_WATCHED {
            let is_kept = |heat: &Heat| now.duration_since(heat.since) <= HOT_TIME;
            self.heats.retain(|_, heat| is_kept(heat));
        }
    }

    /// The pieces that should rest, as ranges.
    pub fn hot(&self) -> Vec<Range<usize>> {
        self.hot.keys().map(|piece| range_of(*piece)).collect()
    }

    pub fn has_hot(&self) -> bool {
        !self.hot.is_empty()
    }

    /// Whether one more piece may rest.
    pub fn may_begin(&self, limit_bytes: usize) -> bool {
        !self.is_over
            && (self.resting.len() + 1) * PIECE_BYTES <= limit_bytes / LIMIT_PART
            && self.ranges().len() < MOST_RUNS
    }

    /// Notes that the piece at an address could not rest now. It is retried for a while.
    pub fn put_off(&mut self, at: usize, now: Instant) {
        let piece = at / PIECE_BYTES;
        if self.hot.get(&piece).is_some_and(|since| now.duration_since(*since) > PATIENCE) {
            self.hot.remove(&piece);
            self.heats.remove(&piece);
        }
    }

    /// Notes that the piece at an address rests from now on.
    pub fn begin(&mut self, at: usize, now: Instant) {
        let piece = at / PIECE_BYTES;
        self.hot.remove(&piece);
        let heat = self.heats.entry(piece).or_insert_with(|| Heat::new(now));
        // It was awake for no longer than its last rest.
        let is_as_before = heat.ended.is_some_and(|ended| now.duration_since(ended) <= heat.rest);
        heat.rest = if is_as_before { (heat.rest * 2).min(LONGEST_REST) } else { FIRST_REST };
        heat.events = 0;
        self.waking.remove(&piece);
        self.resting.insert(piece, now + heat.rest);
    }

    /// Ends the rests that are due, or all of them if memory `is_short`. Returns their ranges.
    pub fn take_due(&mut self, now: Instant, is_short: bool) -> Vec<Range<usize>> {
        let is_due = |until: Instant| is_short || self.is_over || until <= now;
        let due: BTreeSet<usize> = self
            .resting
            .iter()
            .filter(|(_, until)| is_due(**until))
            .map(|(piece, _)| *piece)
            .collect();
        for piece in &due {
            self.resting.remove(piece);
            let heat = self.heats.entry(*piece).or_insert_with(|| Heat::new(now));
            (heat.since, heat.events, heat.ended) = (now, 0, Some(now));
        }
        self.waking.extend(&due);
        merged(due.into_iter())
    }

    /// Notes that all memory that does not rest is registered.
    pub fn have_woken(&mut self) {
        self.waking.clear();
    }

    /// Whether some of a range neither rests nor has just ended its rest.
    pub fn is_partly_new(&self, start: usize, end: usize) -> bool {
        let is_new = |piece| !self.resting.contains_key(&piece) && !self.waking.contains(&piece);
        (start / PIECE_BYTES..end.div_ceil(PIECE_BYTES)).any(is_new)
    }

    /// Ends the rests in a range.
    pub fn wake(&mut self, start: usize, end: usize) {
        let pieces = start / PIECE_BYTES..end.div_ceil(PIECE_BYTES);
        self.resting.retain(|piece, _| !pieces.contains(piece));
    }

    /// Allows no rests any more.
    pub fn end_all(&mut self) {
        self.is_over = true;
        self.hot.clear();
        self.heats.clear();
    }

    /// The resting ranges, neighbours joined.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        merged(self.resting.keys().copied())
    }

    /// The parts of a range that do not rest.
    pub fn awake_parts(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let mut parts = Vec::new();
        let mut from = start;
        for piece in self.resting.range(start / PIECE_BYTES..end.div_ceil(PIECE_BYTES)) {
            let piece = range_of(*piece.0);
            if piece.start > from {
                parts.push((from, piece.start));
            }
            from = piece.end;
        }
        if from < end {
            parts.push((from, end));
        }
        parts
    }
}

fn range_of(piece: usize) -> Range<usize> {
    piece * PIECE_BYTES..(piece + 1) * PIECE_BYTES
}

/// Pieces in order as ranges, neighbours joined.
fn merged(pieces: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for piece in pieces.map(range_of) {
        match ranges.last_mut().filter(|last| last.end == piece.start) {
            Some(last) => last.end = piece.end,
            None => ranges.push(piece),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT_BYTES: usize = 64 * PIECE_BYTES;
    const EVENT_BYTES: usize = PIECE_BYTES / 4;

    fn heat(rests: &mut Rests, piece: usize, now: Instant) {
        for _ in 0..HOT_EVENTS {
            rests.note(piece * PIECE_BYTES, piece * PIECE_BYTES + EVENT_BYTES, now);
        }
    }

    fn run(pieces: Range<usize>) -> Vec<Range<usize>> {
        merged(pieces)
    }

    #[test]
    fn a_piece_that_is_given_up_often_enough_in_a_second_is_hot() {
        let (mut rests, start) = (Rests::default(), Instant::now());
        for event in 0..20 {
            rests.note(0, EVENT_BYTES, start + HOT_TIME * event / 2);
        }
        assert!(!rests.has_hot(), "two a second are few");
        // Expensive by itself.
        for _ in 0..20 {
            rests.note(0, (MOST_PIECES_OF_EVENT + 1) * PIECE_BYTES, start);
        }
        assert!(!rests.has_hot());
        heat(&mut rests, 5, start);
        assert_eq!(rests.hot(), run(5..6));
        rests.begin(5 * PIECE_BYTES, start);
        assert!(!rests.has_hot());
        assert_eq!(rests.ranges(), run(5..6));
    }

    #[test]
    fn a_rest_gets_longer_while_the_piece_stays_hot() {
        let (mut rests, mut now) = (Rests::default(), Instant::now());
        let mut rest = FIRST_REST;
        for _ in 0..8 {
            heat(&mut rests, 1, now);
            rests.begin(PIECE_BYTES, now);
            let soon = Duration::from_millis(1);
            assert!(rests.take_due(now + rest - soon, false).is_empty());
            now += rest;
            assert_eq!(rests.take_due(now, false), run(1..2));
            rest = (rest * 2).min(LONGEST_REST);
        }
        now += LONGEST_REST + FIRST_REST;
        heat(&mut rests, 1, now);
        rests.begin(PIECE_BYTES, now);
        assert!(!rests.take_due(now + FIRST_REST, false).is_empty(), "it was cool for long");
    }

    #[test]
    fn a_piece_that_cannot_rest_must_become_hot_again() {
        let (mut rests, start) = (Rests::default(), Instant::now());
        heat(&mut rests, 0, start);
        rests.put_off(0, start + PATIENCE);
        assert!(rests.has_hot());
        rests.put_off(0, start + PATIENCE * 2);
        assert!(!rests.has_hot());
        rests.note(0, EVENT_BYTES, start + PATIENCE * 2);
        assert!(!rests.has_hot());
        heat(&mut rests, 0, start + PATIENCE * 2);
        assert!(rests.has_hot());
    }

    #[test]
    fn rests_are_part_of_the_limit_and_end_when_memory_is_short() {
        let (mut rests, now) = (Rests::default(), Instant::now());
        let mut begun = 0;
        while rests.may_begin(LIMIT_BYTES) {
            rests.begin(begun * PIECE_BYTES, now);
            begun += 1;
        }
        assert_eq!(begun * PIECE_BYTES, LIMIT_BYTES / LIMIT_PART);
        assert_eq!(rests.ranges(), run(0..begun));
        assert_eq!(rests.take_due(now, true), run(0..begun));
        assert!(rests.ranges().is_empty() && rests.may_begin(LIMIT_BYTES));
        rests.begin(0, now);
        rests.end_all();
        assert_eq!(rests.take_due(now, false), run(0..1));
        heat(&mut rests, 0, now);
        assert!(!rests.has_hot() && !rests.may_begin(LIMIT_BYTES));
    }

    #[test]
    fn what_has_just_rested_is_not_new() {
        let (mut rests, now) = (Rests::default(), Instant::now());
        (1..4).for_each(|piece| rests.begin(piece * PIECE_BYTES, now));
        rests.begin(2 * PIECE_BYTES, now + FIRST_REST);
        assert_eq!(rests.take_due(now + FIRST_REST, false).len(), 2);
        let is_new =
            |rests: &Rests, first, end| rests.is_partly_new(first * PIECE_BYTES, end * PIECE_BYTES);
        assert!(!is_new(&rests, 1, 4) && is_new(&rests, 0, 4) && is_new(&rests, 3, 5));
        rests.have_woken();
        assert!(is_new(&rests, 1, 4) && !is_new(&rests, 2, 3));
    }

    proptest! {
        /// Compares the awake quarters of pieces with a set.
        #[test]
        fn what_is_awake_is_what_does_not_rest(
            pieces in proptest::collection::btree_set(0_usize..20, 0..20),
            woken in 0_usize..20,
            (start, length) in (0_usize..80, 0_usize..80),
        ) {
            let (mut rests, now) = (Rests::default(), Instant::now());
            pieces.iter().for_each(|piece| rests.begin(piece * PIECE_BYTES, now));
            rests.wake(woken * PIECE_BYTES, (woken + 2) * PIECE_BYTES);
            let rests_there = |quarter: usize| {
                let piece = quarter / 4;
                pieces.contains(&piece) && piece != woken && piece != woken + 1
            };
            let range = start * EVENT_BYTES..(start + length) * EVENT_BYTES;
            let parts = rests.awake_parts(range.start, range.end);
            for quarter in 0..160 {
                let at = quarter * EVENT_BYTES;
                let is_awake = parts.iter().any(|(start, end)| *start <= at && at < *end);
                prop_assert_eq!(is_awake, range.contains(&at) && !rests_there(quarter));
                let is_resting = rests.ranges().iter().any(|range| range.contains(&at));
                prop_assert_eq!(is_resting, rests_there(quarter));
            }
        }
    }
}
