//! The pages that a forked child still lacks: those that were far at the fork, and that it has not
//! got, dropped or unmapped since. Pure.
//!
//! A child's own children lack the same pages: they share the table until one of them changes it. A
//! page that the child has moved (mremap) is kept separately, with the address that its contents
//! come from.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farpool_units::PAGE_BYTES;

use crate::space::page::{PageState, Phase};
use crate::space::units::{SUPERPAGE_BYTES, SUPERPAGE_PAGES};

/// The pages of one superpage: those that the child lacks are in phase Far (with their layer) or
/// Lost, all others Untouched.
#[derive(Clone, Debug)]
struct Piece {
    pages: Box<[PageState]>,
    lacking: usize,
}

/// See the module's description.
#[derive(Clone, Debug, Default)]
pub struct Remains {
    /// By the address of the superpage; only superpages with a page that the child lacks.
    pieces: BTreeMap<usize, Arc<Piece>>,
    /// Pages that the child has moved, by their current addresses.
    moved: BTreeMap<usize, Lacking>,
}

/// A page that the child lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lacking {
    /// The page's address at the fork, which says where its contents are.
    pub source: usize,
    /// Its state at the fork.
    pub state: PageState,
}

impl Remains {
    /// Adds pages that the child lacks of a superpage that is new here: those of `pages` in phase
    /// Far or Lost; others are ignored.
    pub fn add(&mut self, base: usize, pages: impl Iterator<Item = PageState>) {
        let mut piece =
            Piece { pages: vec![PageState::UNTOUCHED; SUPERPAGE_PAGES].into(), lacking: 0 };
        for (place, state) in piece.pages.iter_mut().zip(pages) {
            if matches!(state.phase(), Phase::Far | Phase::Lost) {
                *place = state;
                piece.lacking += 1;
            }
        }
        if piece.lacking > 0 {
            self.pieces.insert(base, Arc::new(piece));
        }
    }

    /// Whether the child has all its pages.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.moved.is_empty()
    }

    /// How many pages the child lacks.
    pub fn count(&self) -> usize {
        self.pieces.values().map(|piece| piece.lacking).sum::<usize>() + self.moved.len()
    }

    /// The page that the child lacks at an address.
    pub fn get(&self, address: usize) -> Option<Lacking> {
        if let Some(moved) = self.moved.get(&address) {
            return Some(*moved);
        }
        let state = self.pieces.get(&base(address))?.pages[index(address)];
        (state != PageState::UNTOUCHED).then_some(Lacking { source: address, state })
    }

    /// Whether the child lacks a page of a range.
    pub fn lacks_in(&self, range: &Range<usize>) -> bool {
        self.moved.range(range.clone()).next().is_some()
            || self.next(range.start).is_some_and(|(address, _)| address < range.end)
    }

    /// The first page at or after `address` that the child lacks where it was at the fork.
    pub fn next(&self, address: usize) -> Option<(usize, Lacking)> {
        self.pieces.range(base(address)..).find_map(|(base, piece)| {
            let first = address.saturating_sub(*base) / PAGE_BYTES;
            let lacks = |at: &usize| piece.pages[*at] != PageState::UNTOUCHED;
            let found = (first..SUPERPAGE_PAGES).find(lacks)?;
            let source = base + found * PAGE_BYTES;
            Some((source, Lacking { source, state: piece.pages[found] }))
        })
    }

    /// A page that the child lacks and has moved.
    pub fn next_moved(&self) -> Option<(usize, Lacking)> {
        self.moved.first_key_value().map(|(address, lacking)| (*address, *lacking))
    }

    /// Removes pages that the child has now, or no longer wants.
    pub fn remove(&mut self, start: usize, end: usize) {
        self.take(start, end);
    }

    /// Notes that the child has moved a mapping, over whatever was at its new place.
    pub fn follow_move(&mut self, from: usize, to: usize, bytes: usize) {
        self.take(to, to + bytes);
        let taken = self.take(from, from + bytes);
        self.moved.extend(taken.into_iter().map(|(at, lacking)| (at - from + to, lacking)));
    }

    fn take(&mut self, start: usize, end: usize) -> Vec<(usize, Lacking)> {
        let mut taken = Vec::new();
        if start >= end {
            return taken;
        }
        let moved: Vec<usize> = self.moved.range(start..end).map(|(address, _)| *address).collect();
        for address in moved {
            taken.extend(self.moved.remove_entry(&address));
        }
        let bases: Vec<usize> =
            self.pieces.range(base(start)..end).map(|(base, _)| *base).collect();
        for base in bases {
            let first = start.saturating_sub(base) / PAGE_BYTES;
            let last = (end - base).div_ceil(PAGE_BYTES).min(SUPERPAGE_PAGES);
            let Some(shared) = self.pieces.get_mut(&base) else { continue };
            if shared.pages[first..last].iter().all(|state| *state == PageState::UNTOUCHED) {
                continue;
            }
            let piece = Arc::make_mut(shared);
            for (number, state) in piece.pages[first..last].iter_mut().enumerate() {
                if *state != PageState::UNTOUCHED {
                    let source = base + (first + number) * PAGE_BYTES;
                    taken.push((source, Lacking { source, state: *state }));
                    piece.lacking -= 1;
                    *state = PageState::UNTOUCHED;
                }
            }
            if piece.lacking == 0 {
                self.pieces.remove(&base);
            }
        }
        taken
    }

    /// The states of the pages of a superpage, if the child lacks some of them.
    pub fn superpage(&self, base: usize) -> Option<&[PageState]> {
        self.pieces.get(&base).map(|piece| &piece.pages[..])
    }

    /// The layers, one bit each, of the pages that the child lacks.
    pub fn layers(&self) -> u8 {
        let states = self.pieces.values().flat_map(|piece| piece.pages.iter());
        let far = states.filter(|state| state.phase() == Phase::Far);
        far.fold(0, |layers, state| layers | 1 << state.layer())
    }
}

fn base(address: usize) -> usize {
    address & !(SUPERPAGE_BYTES - 1)
}

fn index(address: usize) -> usize {
    address % SUPERPAGE_BYTES / PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The pages that the tests are about straddle two superpages.
    const FIRST: usize = (1 << 32) + SUPERPAGE_BYTES - 8 * PAGE_BYTES;
    const PAGES: usize = 16;

    fn far() -> PageState {
        PageState::UNTOUCHED.with_layer(3).with_phase(Phase::Far)
    }

    fn remains(lacking: &BTreeSet<usize>) -> Remains {
        let mut remains = Remains::default();
        for base in [1 << 32, (1 << 32) + SUPERPAGE_BYTES] {
            let state = |at: usize| {
                let page = (base + at * PAGE_BYTES).wrapping_sub(FIRST) / PAGE_BYTES;
                if lacking.contains(&page) { far() } else { PageState::UNTOUCHED }
            };
            remains.add(base, (0..SUPERPAGE_PAGES).map(state));
        }
        remains
    }

    /// Where the child lacks pages, and their addresses at the fork.
    fn listed(remains: &Remains) -> BTreeMap<usize, usize> {
        let number = |address: usize| address.wrapping_sub(FIRST) / PAGE_BYTES;
        let mut found = BTreeMap::new();
        for page in 0..PAGES {
            let lacking = remains.get(FIRST + page * PAGE_BYTES);
            found.extend(lacking.map(|lacking| (page, number(lacking.source))));
        }
        let (mut in_place, mut at) = (0, 0);
        while let Some((address, lacking)) = remains.next(at) {
            assert_eq!((address, lacking.state), (lacking.source, far()));
            (in_place, at) = (in_place + 1, address + PAGE_BYTES);
        }
        assert_eq!(remains.count(), found.len());
        assert_eq!(remains.is_empty(), found.is_empty());
        assert_eq!(remains.next_moved().is_some(), in_place < found.len());
        found
    }

    #[derive(Clone, Debug)]
    enum Step {
        Remove(usize, usize),
        Move(usize, usize, usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let remove = (0..PAGES, 0..PAGES).prop_map(|(start, end)| Step::Remove(start, end));
        let half = PAGES / 2;
        let moved =
            (0..half, 0..half, 1..=half, any::<bool>()).prop_map(move |(a, b, count, up)| {
                // Neither range reaches into the other's half.
                let (a, b) = (a.min(half - count), half + b.min(half - count));
                if up { Step::Move(a, b, count) } else { Step::Move(b, a, count) }
            });
        proptest::collection::vec(prop_oneof![remove, moved], 0..8)
    }

    proptest! {
        /// Compares with a map from page to source; a clone that is taken on the way keeps its
        /// content.
        #[test]
        fn a_child_lacks_what_it_has_not_got(
            lacking in proptest::collection::btree_set(0..PAGES, 0..PAGES),
            steps in steps(),
        ) {
            let mut model: BTreeMap<usize, usize> = lacking.iter().map(|page| (*page, *page)).collect();
            let (mut remains, before) = (remains(&lacking), model.clone());
            let copy = remains.clone();
            let address = |page: usize| FIRST + page * PAGE_BYTES;
            for step in steps {
                match step {
                    Step::Remove(start, end) => {
                        remains.remove(address(start), address(end));
                        model.retain(|page, _| !(start..end).contains(page));
                    }
                    Step::Move(from, to, count) => {
                        remains.follow_move(address(from), address(to), count * PAGE_BYTES);
                        model.retain(|page, _| !(to..to + count).contains(page));
                        model = model
                            .into_iter()
                            .map(|(page, source)| {
                                let is_moved = (from..from + count).contains(&page);
                                (if is_moved { page - from + to } else { page }, source)
                            })
                            .collect();
                    }
                }
                prop_assert_eq!(&listed(&remains), &model);
            }
            prop_assert_eq!(listed(&copy), before);
        }
    }

    #[test]
    fn resident_pages_are_not_lacking() {
        let mut remains = Remains::default();
        let resident = PageState::UNTOUCHED.with_phase(Phase::Resident).with_copy(true);
        remains.add(1 << 32, [resident, PageState::DROPPED].into_iter());
        assert!(remains.is_empty());
    }

    #[test]
    fn the_layers_of_lacking_pages_are_known() {
        let mut remains = Remains::default();
        let lost = PageState::UNTOUCHED.with_layer(6).with_phase(Phase::Lost);
        remains.add(1 << 32, [far(), lost].into_iter());
        assert_eq!(remains.layers(), 1 << 3);
    }
}
