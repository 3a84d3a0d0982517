//! Residence against a plain model: clients, a sweep and a flash that is slow, fails, and does what
//! is under way in any order.

use super::residence::{Found, Landing, OnWay, PIECE_PAGES, Residence};
use farpool_seal::Tag;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

/// Two pieces are enough to meet the border between them.
const PAGES: u32 = 2 * PIECE_PAGES;

#[derive(Clone, Debug)]
enum Step {
    Read(Range<u32>),
    Write(Range<u32>),
    Discard(Range<u32>),
    /// Ends the use of pages that was begun as the n-th of those under way.
    Unpin(usize),
    Sweep {
        piece: u32,
        may_write: usize,
    },
    /// There is no memory for the n-th read of flash: it does not take place.
    NotFetched(usize),
    /// Ends the n-th read of flash under way. It finds what was there when it began, or now.
    Fetched {
        which: usize,
        is_late: bool,
        is_ok: bool,
    },
    /// Ends the n-th write to flash under way.
    Left {
        which: usize,
        is_ok: bool,
    },
}

fn any_range() -> impl Strategy<Value = Range<u32>> {
    (0..PAGES, 1u32..6).prop_map(|(first, count)| first..(first + count).min(PAGES))
}

/// A few pages that are used again and again.
fn hot_range() -> impl Strategy<Value = Range<u32>> {
    (252u32..260, 1u32..4).prop_map(|(first, count)| first..first + count)
}

fn any_step() -> impl Strategy<Value = Step> {
    let range = || prop_oneof![3 => hot_range(), 1 => any_range()];
    let mostly = || prop::bool::weighted(0.9);
    prop_oneof![
        4 => range().prop_map(Step::Read),
        4 => range().prop_map(Step::Write),
        1 => range().prop_map(Step::Discard),
        6 => any::<usize>().prop_map(Step::Unpin),
        6 => (0u32..2, 0usize..300).prop_map(|(piece, may_write)| Step::Sweep { piece, may_write }),
        1 => any::<usize>().prop_map(Step::NotFetched),
        4 => (any::<usize>(), any::<bool>(), mostly()).prop_map(|(which, is_late, is_ok)| {
            Step::Fetched { which, is_late, is_ok }
        }),
        4 => (any::<usize>(), mostly()).prop_map(|(which, is_ok)| Step::Left { which, is_ok }),
    ]
}

/// What flash has at a page's place: bytes, and the sealing that they are.
type OnFlash = (u64, u32);

/// Bytes that nobody wrote.
const GARBAGE: OnFlash = (u64::MAX, u32::MAX);

struct World {
    residence: Residence,
    memory: Vec<u64>,
    flash: Vec<OnFlash>,
    /// What was written last; None where anything may be read.
    wanted: Vec<Option<u64>>,
    writes: u64,
    pinned: Vec<Range<u32>>,
    fetches: Vec<(OnWay, OnFlash)>,
    leaves: Vec<(Vec<OnWay>, Vec<u64>)>,
    versions: HashSet<(u32, u32)>,
    /// Pages told as lost.
    failed: BTreeSet<u32>,
}

impl World {
    fn new() -> World {
        let pages = PAGES as usize;
        World {
            residence: Residence::default(),
            memory: vec![0; pages],
            flash: vec![GARBAGE; pages],
            wanted: vec![Some(0); pages],
            writes: 0,
            pinned: Vec::new(),
            fetches: Vec::new(),
            leaves: Vec::new(),
            versions: HashSet::new(),
            failed: BTreeSet::new(),
        }
    }

    fn drop_memory(&mut self, runs: Vec<Range<u32>>) {
        for page in runs.into_iter().flatten() {
            assert!(!self.pinned.iter().any(|it| it.contains(&page)), "{page} is in use");
            self.memory[page as usize] = 0;
        }
    }

    fn read(&mut self, range: Range<u32>) -> bool {
        match self.residence.read(range.clone(), 7) {
            Found::Here => {
                for page in range.clone() {
                    let (has, wanted) = (self.memory[page as usize], self.wanted[page as usize]);
                    assert!(wanted.is_none_or(|wanted| has == wanted), "{page}: {has}, {wanted:?}");
                }
                self.pinned.push(range);
                true
            }
            Found::Away(pages) => {
                let flash = &self.flash;
                self.fetches.extend(pages.into_iter().map(|it| (it, flash[it.page as usize])));
                assert!(!self.fetches.is_empty(), "somebody will wake it");
                false
            }
            Found::Failed => {
                assert!(range.into_iter().any(|page| self.failed.contains(&page)), "it failed");
                false
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Read(range) => {
                self.read(range);
            }
            Step::Write(range) => {
                self.residence.write(range.clone());
                self.writes += 1;
                for page in range.clone() {
                    self.memory[page as usize] = self.writes;
                    self.wanted[page as usize] = Some(self.writes);
                    self.failed.remove(&page);
                }
                self.pinned.push(range);
            }
            Step::Discard(range) => {
                let dropped = self.residence.discard(range.clone());
                self.drop_memory(dropped);
                range.for_each(|page| self.wanted[page as usize] = None);
            }
            Step::Unpin(which) if !self.pinned.is_empty() => {
                let range = self.pinned.swap_remove(which % self.pinned.len());
                self.residence.unpin(&range);
            }
            Step::Sweep { piece, may_write } => self.sweep(piece, may_write),
            Step::NotFetched(which) if !self.fetches.is_empty() => {
                let (it, _) = self.fetches.swap_remove(which % self.fetches.len());
                self.residence.cancel_fetch(&[it]);
            }
            Step::Fetched { which, is_late, is_ok } if !self.fetches.is_empty() => {
                let (it, before) = self.fetches.swap_remove(which % self.fetches.len());
                self.land(&it, if is_late { self.flash[it.page as usize] } else { before }, is_ok);
            }
            Step::Left { which, is_ok } if !self.leaves.is_empty() => {
                let (pages, bytes) = self.leaves.swap_remove(which % self.leaves.len());
                self.left(&pages, &bytes, is_ok);
            }
            Step::Unpin(_) | Step::NotFetched(_) | Step::Fetched { .. } | Step::Left { .. } => {}
        }
    }

    fn sweep(&mut self, piece: u32, may_write: usize) {
        let swept = self.residence.sweep(piece, may_write);
        assert!(swept.leaving.len() <= may_write);
        self.drop_memory(swept.dropped);
        for it in &swept.leaving {
            assert!(self.versions.insert((it.page, it.version)), "{it:?} is used twice");
            let under_way = self.leaves.iter().flat_map(|(pages, _)| pages);
            assert!(!under_way.into_iter().any(|other| other.page == it.page), "two at one place");
        }
        let bytes = swept.leaving.iter().map(|it| self.memory[it.page as usize]).collect();
        if !swept.leaving.is_empty() {
            self.leaves.push((swept.leaving, bytes));
        }
    }

    fn land(&mut self, it: &OnWay, (bytes, version): OnFlash, is_ok: bool) {
        match self.residence.end_fetch(it, is_ok && version == it.version) {
            Landing::Taken => self.memory[it.page as usize] = bytes,
            Landing::Dropped => {}
            Landing::Failed => {
                assert!(!is_ok, "page {} is lost though flash is whole", it.page);
                self.failed.insert(it.page);
            }
        }
        assert_eq!(self.residence.take_waiting().iter().filter(|it| *it != 7).count(), 0);
    }

    fn left(&mut self, pages: &[OnWay], bytes: &[u64], is_ok: bool) {
        for (it, bytes) in pages.iter().zip(bytes) {
            self.flash[it.page as usize] = if is_ok { (*bytes, it.version) } else { GARBAGE };
        }
        let sealed: Vec<_> = pages.iter().map(|it| OnWay { tag: Tag([1; 16]), ..*it }).collect();
        let dropped = self.residence.end_leave(&sealed, is_ok);
        self.drop_memory(dropped);
    }

    /// Everything that was written can be read in the end.
    fn end(mut self) {
        for (pages, bytes) in std::mem::take(&mut self.leaves) {
            self.left(&pages, &bytes, true);
        }
        for page in 0..PAGES {
            for _tries in 0..3 {
                if self.read(page..page + 1) {
                    break;
                }
                for (it, _) in std::mem::take(&mut self.fetches) {
                    let found = self.flash[it.page as usize];
                    self.land(&it, found, true);
                }
            }
            assert!(self.pinned.iter().any(|it| *it == (page..page + 1)), "{page} cannot be read");
        }
        for range in std::mem::take(&mut self.pinned) {
            self.residence.unpin(&range);
        }
        // Nothing is in use: two rounds empty the memory.
        for _round in 0..2 {
            (0..2).for_each(|piece| self.sweep(piece, usize::MAX));
            for (pages, bytes) in std::mem::take(&mut self.leaves) {
                self.left(&pages, &bytes, true);
            }
        }
        assert_eq!(self.residence.count_in_memory(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read(steps in prop::collection::vec(any_step(), 1..250)) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.step(step));
        world.end();
    }
}
