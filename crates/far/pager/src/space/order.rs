//! The order in which changes of an address space are applied. Pure.
//!
//! The kernel reports a change after it has released the address space's lock, and for each thread
//! separately: a thread that unmaps a range, or moves it away, may be overtaken by another thread
//! that gets the same addresses meanwhile and moves memory there. Both are reported, the later one
//! first. Taken literally, what is known of the memory that was moved in would be forgotten with
//! what was there before, and its far pages would read as zeros.
//!
//! This shows as a move to addresses of which something is still known: nothing can be mapped where
//! something is mapped, and a thread that moves memory over other memory (MREMAP_FIXED) reports the
//! end of that memory first. So such a move comes after the change that has freed its place. If
//! that change was not read before all of the move was reported, the move waits until every change
//! is read, because its thread may have continued and done something else to the place. Meanwhile
//! the kernel refuses to move pages.
//!
//! A move is reported twice: where the memory went, then that its old place is no longer mapped.
//! Another thread may have moved memory to that place in between. So the second message of a move
//! is expected, and ignored ([`Owed`]).
//!
//! All of this is for programs of several threads: the changes of a single thread are reported in
//! order.

use std::collections::VecDeque;
use std::ops::Range;

use farpool_uffd::Change;

/// What to do with the changes that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// None waits.
    Nothing,
    /// This one, by its place in the queue, comes first.
    Apply(usize),
    /// The first is a move to a place that is taken: every change must be read first.
    Wait,
    /// More than one change could have freed the place, with different results.
    Ambiguous,
}

/// The pager's knowledge of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing is known.
    Free,
    /// Something is known, but a move that is not applied may have brought it there.
    Unsure,
    /// Something is known from before the waiting changes.
    Taken,
}

/// Chooses the change to apply next. `look`: what is known of a range. `all_read`: every change of
/// the program has been read.
pub fn next(
    changes: &VecDeque<Change>,
    look: impl Fn(&Range<usize>) -> Place,
    all_read: bool,
) -> Next {
    let mut at = 0;
    // Each step goes to another change that was overtaken; a circle would mean that nothing was
    // freed.
    for _ in 0..=changes.len() {
        let Some(change) = changes.get(at) else { return Next::Nothing };
        let Change::Moved { to, bytes, .. } = *change else { return Next::Apply(at) };
        let place = to..to + bytes;
        let known = look(&place);
        if known == Place::Free {
            return Next::Apply(at);
        }
        let frees = |other: &usize| {
            *other != at && frees(&changes[*other], &place) && !is_second(changes, *other)
        };
        // Until it has reported the rest of a move its thread is in the call, and no other thread
        // knows of the new place.
        let second = (at + 1..changes.len()).find(|other| is_second_of(&changes[*other], change));
        if let Some(certain) = (0..second.unwrap_or(0)).find(frees) {
            at = certain;
            continue;
        }
        if !all_read {
            return Next::Wait;
        }
        let mut freeing = (0..changes.len()).filter(frees);
        // Nothing has freed the place: what is known of it is out of date.
        let Some(first) = freeing.next() else { return Next::Apply(at) };
        let is_move = |change: usize| matches!(changes[change], Change::Moved { .. });
        if known == Place::Unsure || freeing.any(|other| is_move(first) || is_move(other)) {
            return Next::Ambiguous;
        }
        at = first;
    }
    Next::Ambiguous
}

/// Whether a change is the second message of a move that waits before it. Each move has one:
/// another equal message is of a thread that has unmapped the place before memory was moved there,
/// or after.
fn is_second(changes: &VecDeque<Change>, at: usize) -> bool {
    let mut owed = 0_usize;
    for change in changes.iter().take(at) {
        if is_second_of(&changes[at], change) {
            owed += 1;
        } else if *change == changes[at] {
            owed = owed.saturating_sub(1);
        }
    }
    owed > 0
}

fn is_second_of(change: &Change, first: &Change) -> bool {
    match (*change, *first) {
        (Change::Unmapped { start, end }, Change::Moved { from, bytes, .. }) => {
            (start, end) == (from, from + bytes)
        }
        _ => false,
    }
}

/// Second messages of moves that are still expected.
#[derive(Debug, Default)]
pub struct Owed {
    /// The old place, and what `stamp` was when the move was applied.
    places: Vec<(Range<usize>, u64)>,
}

impl Owed {
    /// Notes that a move was applied. `stamp` changes whenever the kernel has moved or filled
    /// pages, which it does only when every change has been read. A move may have no second message
    /// (MREMAP_DONTUNMAP).
    pub fn note(&mut self, from: usize, bytes: usize, stamp: u64) {
        self.places.retain(|(_, noted)| *noted == stamp);
        self.places.push((from..from + bytes, stamp));
    }

    /// Forgets all of them, once every change has been read and applied.
    pub fn forget(&mut self) {
        self.places.clear();
    }

    /// Whether the end of a range is the second message of a move. If so, it is no longer expected.
    pub fn takes(&mut self, start: usize, end: usize, stamp: u64) -> bool {
        self.places.retain(|(_, noted)| *noted == stamp);
        let found = self.places.iter().position(|(place, _)| *place == (start..end));
        found.is_some_and(|at| {
            self.places.swap_remove(at);
            true
        })
    }
}

/// Whether a change ends what was mapped at part of a place.
fn frees(change: &Change, place: &Range<usize>) -> bool {
    let (start, end) = match *change {
        Change::Unmapped { start, end } => (start, end),
        Change::Moved { from, bytes, .. } => (from, from + bytes),
        Change::Removed { .. } | Change::Forked { .. } => return false,
    };
    start < place.end && place.start < end
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_units::PAGE_BYTES;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn moved(from: usize, to: usize) -> Change {
        Change::Moved { from: from * PAGE_BYTES, to: to * PAGE_BYTES, bytes: PAGE_BYTES }
    }

    fn unmapped(page: usize) -> Change {
        Change::Unmapped { start: page * PAGE_BYTES, end: (page + 1) * PAGE_BYTES }
    }

    fn taken_if(known: bool) -> Place {
        if known { Place::Taken } else { Place::Free }
    }

    fn next_of(changes: &[Change], taken: &[usize], all_read: bool) -> Next {
        let look = |place: &Range<usize>| taken_if(taken.contains(&(place.start / PAGE_BYTES)));
        next(&changes.iter().copied().collect(), look, all_read)
    }

    #[test]
    fn changes_are_applied_as_they_were_told_where_nothing_was_overtaken() {
        assert_eq!(next_of(&[], &[], false), Next::Nothing);
        assert_eq!(next_of(&[moved(1, 2), unmapped(2)], &[1], false), Next::Apply(0));
        assert_eq!(next_of(&[unmapped(2), moved(1, 2)], &[1, 2], false), Next::Apply(0));
    }

    #[test]
    fn what_freed_a_place_comes_before_the_move_to_it() {
        let next_of = |changes: &[Change], taken: &[usize]| next_of(changes, taken, true);
        assert_eq!(next_of(&[moved(1, 2), unmapped(5), unmapped(2)], &[1, 2]), Next::Apply(2));
        assert_eq!(next_of(&[moved(1, 2), moved(2, 3)], &[1, 2]), Next::Apply(1));
        // The freeing change was overtaken, too.
        assert_eq!(next_of(&[moved(1, 2), moved(2, 3), unmapped(3)], &[1, 2, 3]), Next::Apply(2));
        assert_eq!(next_of(&[moved(1, 2), unmapped(5)], &[1, 2]), Next::Apply(0));
    }

    #[test]
    fn what_was_read_before_the_rest_of_a_move_is_older() {
        let changes = [moved(1, 2), moved(2, 3), unmapped(1), unmapped(2), moved(2, 1)];
        assert_eq!(next_of(&changes, &[1, 2], false), Next::Apply(1));
        let changes = [moved(1, 2), unmapped(1), moved(2, 3), unmapped(2)];
        assert_eq!(next_of(&changes, &[1, 2], false), Next::Wait);
    }

    #[test]
    fn what_is_not_sure_to_be_old_is_not_taken_for_it() {
        let next =
            |changes: &[Change]| next(&changes.iter().copied().collect(), |_| Place::Unsure, true);
        assert_eq!(next(&[moved(1, 2), unmapped(1)]), Next::Apply(0));
        assert_eq!(next(&[moved(1, 2), unmapped(1), unmapped(2)]), Next::Ambiguous);
        assert_eq!(next(&[moved(1, 2), unmapped(2), unmapped(1)]), Next::Apply(1));
    }

    #[test]
    fn the_second_message_of_a_move_frees_nothing() {
        let changes = [moved(1, 2), moved(2, 3), unmapped(2)];
        assert_eq!(next_of(&changes, &[1, 2], true), Next::Apply(1));
        let mut owed = Owed::default();
        owed.note(0x1000, 0x2000, 7);
        assert!(!owed.takes(0x1000, 0x3000, 8), "pages have moved since: it must have come");
        owed.note(0x1000, 0x2000, 8);
        assert!(!owed.takes(0x1000, 0x2000, 8), "another range");
        assert!(owed.takes(0x1000, 0x3000, 8));
        assert!(!owed.takes(0x1000, 0x3000, 8), "once");
        owed.note(0x1000, 0x2000, 8);
        owed.forget();
        assert!(!owed.takes(0x1000, 0x3000, 8), "it must have come");
    }

    #[test]
    fn what_may_mean_two_things_is_not_guessed() {
        assert_eq!(next_of(&[moved(1, 2), unmapped(2)], &[1, 2], false), Next::Wait);
        let changes = [moved(1, 2), moved(2, 3), moved(2, 4)];
        assert_eq!(next_of(&changes, &[1, 2], true), Next::Ambiguous);
        assert_eq!(next_of(&[moved(1, 2), moved(2, 1)], &[1, 2], true), Next::Ambiguous);
        // Two equal changes are not ambiguous.
        assert_eq!(
            next_of(&[moved(1, 2), unmapped(2), unmapped(2)], &[1, 2], true),
            Next::Apply(1)
        );
    }

    /// Of two equal messages only one is the rest of the move; the other may have freed the place
    /// before.
    #[test]
    fn each_move_has_one_second_message() {
        let changes = [moved(1, 2), unmapped(1), moved(2, 3), unmapped(2)];
        assert_eq!(next_of(&changes, &[1, 2], true), Next::Apply(2));
        let twice = [&changes[..], &[unmapped(2)]].concat();
        assert_eq!(next_of(&twice, &[1, 2], true), Next::Ambiguous);
    }

    /// The content of each page, named by the page it was at first.
    type Memory = BTreeMap<usize, usize>;

    fn apply(memory: &mut Memory, change: Change) {
        match change {
            Change::Moved { from, to, .. } => {
                let what = memory.remove(&(from / PAGE_BYTES));
                memory.remove(&(to / PAGE_BYTES));
                memory.extend(what.map(|what| (to / PAGE_BYTES, what)));
            }
            Change::Unmapped { start, .. } => drop(memory.remove(&(start / PAGE_BYTES))),
            Change::Removed { .. } | Change::Forked { .. } => {}
        }
    }

    /// A system call of a thread, with the messages it has not sent yet. No other thread knows
    /// where it has moved memory to.
    struct Call {
        untold: VecDeque<Change>,
        to: usize,
    }

    /// Applies the changes that can be applied. False: they are ambiguous.
    fn settle(
        told: &mut VecDeque<Change>,
        known: &mut Memory,
        owed: &mut Owed,
        all_read: bool,
    ) -> bool {
        loop {
            let is_known =
                |place: &Range<usize>| taken_if(known.contains_key(&(place.start / PAGE_BYTES)));
            match next(told, is_known, all_read) {
                Next::Nothing | Next::Wait => return true,
                Next::Ambiguous => return false,
                Next::Apply(at) => {
                    let change = told.remove(at).expect("a change");
                    match change {
                        Change::Moved { from, bytes, .. } => owed.note(from, bytes, 0),
                        Change::Unmapped { start, end } if owed.takes(start, end, 0) => continue,
                        _ => {}
                    }
                    apply(known, change);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Threads unmap pages, and move pages to where nothing is mapped, and report it later.
        /// Every unambiguous case must end in the true state.
        #[test]
        fn what_is_told_late_changes_nothing(
            steps in proptest::collection::vec((0usize..6, 0usize..9, any::<bool>()), 1..24),
        ) {
            let mut truth: Memory = (0..4).map(|page| (page, page)).collect();
            let mut known = truth.clone();
            let (mut told, mut calls, mut owed) = (VecDeque::new(), Vec::<Call>::new(), Owed::default());
            let mut choices = steps.iter().map(|step| step.0).cycle();
            let mut steps = steps.iter();
            loop {
                let step = steps.next();
                match step {
                    Some((from, to, true)) => {
                        let is_secret = calls.iter().any(|call| call.to == *from);
                        let is_free = *to >= 7 || !truth.contains_key(to);
                        if truth.contains_key(from) && !is_secret && is_free {
                            let untold: VecDeque<Change> = if *to >= 7 {
                                [unmapped(*from)].into()
                            } else {
                                [moved(*from, *to), unmapped(*from)].into()
                            };
                            apply(&mut truth, untold[0]);
                            calls.push(Call { untold, to: *to });
                        }
                    }
                    _ if !calls.is_empty() => {
                        let at = choices.next().unwrap_or(0) % calls.len();
                        told.extend(calls[at].untold.pop_front());
                        calls.retain(|call| !call.untold.is_empty());
                    }
                    Some(_) => {}
                    None => break,
                }
                if !settle(&mut told, &mut known, &mut owed, calls.is_empty()) {
                    return Ok(());
                }
            }
            prop_assert!(told.is_empty());
            prop_assert_eq!(known, truth);
        }
    }
}
