//! Pages against a model in which each page has a content: clients read, write and discard while a
//! packer copies and packs, in any order.

use super::frames::FrameId;
use super::pages::{Packed, Pages, Unpacked};
use farpool_units::PAGES_PER_SUPERPAGE;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

#[derive(Clone, Debug)]
enum Step {
    BeginWrite(Range<u32>),
    EndWrite(prop::sample::Index),
    BeginRead(Range<u32>),
    EndRead(prop::sample::Index),
    Discard(Range<u32>),
    /// The packer looks at a piece and copies what is cold of it.
    Copy(u32),
    /// It packs what it has copied.
    Pack,
}

fn any_range() -> impl Strategy<Value = Range<u32>> {
    // At the seam of two pieces, so that runs lie in one or in both.
    (240_u32..272, 1_u32..12).prop_map(|(first, count)| first..first + count)
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any_range().prop_map(Step::BeginWrite),
        4 => any::<prop::sample::Index>().prop_map(Step::EndWrite),
        3 => any_range().prop_map(Step::BeginRead),
        3 => any::<prop::sample::Index>().prop_map(Step::EndRead),
        1 => any_range().prop_map(Step::Discard),
        5 => (0..2_u32).prop_map(Step::Copy),
        5 => Just(Step::Pack),
    ]
}

/// What a page holds: 0 for zeros, and the number of the write that it is of.
type Content = u32;

#[derive(Default)]
struct World {
    pages: Pages,
    /// What the memory of pages holds; None: it was given back, and is zero.
    memory: BTreeMap<u32, Content>,
    frames: BTreeMap<u32, Content>,
    next_frame: u32,
    next_write: Content,
    /// What a reader has to find; None while it is written to.
    expected: BTreeMap<u32, Option<Content>>,
    writing: Vec<(Range<u32>, Content)>,
    /// What is being sent, and which pages of it are in memory.
    reading: Vec<(Range<u32>, Vec<u32>)>,
    copied: Vec<(u32, Content)>,
    filled: u64,
}

impl World {
    fn release(&mut self, unpacked: Unpacked) {
        for id in unpacked.frames {
            assert!(self.frames.remove(&id.number()).is_some(), "{id:?} is released twice");
        }
        self.filled -= unpacked.filled;
    }

    fn found(&self, page: u32) -> Content {
        match self.pages.packed(page) {
            Packed::Not => self.memory.get(&page).copied().unwrap_or(0),
            Packed::Filled(word) => word,
            Packed::Frame(id) => self.frames[&id.number()],
        }
    }

    fn is_written(&self, page: u32) -> bool {
        self.writing.iter().any(|(range, _)| range.contains(&page))
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::BeginWrite(range) => {
                // One writer for each page: what two write at once is anybody's guess.
                if range.clone().any(|page| self.is_written(page)) {
                    return;
                }
                let absent = self.pages.count_absent(range.clone());
                let (taken, unpacked) = self.pages.write(range.clone());
                assert_eq!(taken, absent);
                self.release(unpacked);
                self.next_write += 1;
                for page in range.clone() {
                    self.expected.insert(page, None);
                    self.memory.insert(page, Content::MAX); // garbled until it ends
                }
                self.writing.push((range, self.next_write));
            }
            Step::EndWrite(index) if !self.writing.is_empty() => {
                let (range, content) = self.writing.remove(index.index(self.writing.len()));
                for page in range.clone() {
                    self.memory.insert(page, content);
                    self.expected.insert(page, Some(content));
                }
                self.pages.unpin(&range);
            }
            Step::BeginRead(range) => {
                let is_pinned = self.pages.read(range.clone());
                let has_packed = range.clone().any(|it| self.pages.packed(it) != Packed::Not);
                assert_eq!(is_pinned, !has_packed);
                if is_pinned {
                    let sent = range.clone().filter(|page| self.memory.contains_key(page));
                    self.reading.push((range.clone(), sent.collect()));
                }
            }
            Step::EndRead(index) if !self.reading.is_empty() => {
                let (range, sent) = self.reading.remove(index.index(self.reading.len()));
                for page in sent {
                    assert!(self.memory.contains_key(&page), "page {page} left while it was sent");
                }
                self.pages.unpin(&range);
            }
            Step::EndWrite(_) | Step::EndRead(_) => {}
            Step::Discard(range) => self.discard(range),
            Step::Copy(piece) => {
                let cold = self.pages.cold(piece);
                self.copied = cold.iter().map(|page| (*page, self.memory[page])).collect();
            }
            Step::Pack => self.pack(),
        }
    }

    fn discard(&mut self, range: Range<u32>) {
        let (dropped, unpacked) = self.pages.discard(range.clone());
        self.release(unpacked);
        for page in dropped.into_iter().flatten() {
            assert!(!self.is_written(page), "page {page} is being written to");
            self.memory.remove(&page);
        }
        for page in range {
            if !self.is_written(page) {
                let found = self.found(page);
                assert!(found == 0 || Some(Some(found)) == self.expected.get(&page).copied());
                self.expected.insert(page, Some(found));
            }
        }
    }

    /// Packs by what the pages hold: every third is as if a word filled it, every fourth is zero,
    /// every fifth does not pack.
    fn pack(&mut self) {
        for (page, content) in std::mem::take(&mut self.copied) {
            if content % 5 == 4 {
                self.pages.refuse(page);
                continue;
            }
            let packed = match content {
                0 => Packed::Not,
                filled if filled % 3 == 0 => Packed::Filled(filled),
                _ => {
                    self.next_frame += 1;
                    self.frames.insert(self.next_frame, content);
                    Packed::Frame(FrameId::of_number(self.next_frame))
                }
            };
            if self.pages.pack(page, packed) {
                self.memory.remove(&page);
                self.filled += u64::from(matches!(packed, Packed::Filled(_)));
            } else if let Packed::Frame(id) = packed {
                self.frames.remove(&id.number());
            }
        }
    }

    fn check(&self) {
        for (page, expected) in &self.expected {
            if let Some(expected) = expected {
                assert_eq!(self.found(*page), *expected, "page {page}");
            }
        }
        let all = 0..PAGES_PER_SUPERPAGE;
        let packed: Vec<_> = all.map(|page| self.pages.packed(page)).collect();
        let in_frames: BTreeSet<_> = packed.iter().filter_map(|it| it.frame()).collect();
        let frames: BTreeSet<_> = self.frames.keys().copied().collect();
        assert_eq!(in_frames, frames, "each reference is in one page's entry");
        let filled = packed.iter().filter(|it| matches!(it, Packed::Filled(_))).count();
        assert_eq!(filled as u64, self.filled);
        assert_eq!(self.pages.count_in_memory() as usize, self.memory.len());
        let has_table = packed.iter().any(|it| *it != Packed::Not);
        assert_eq!(self.pages.table_bytes() > 0, has_table);
    }
}

impl Packed {
    fn frame(self) -> Option<u32> {
        match self {
            Packed::Frame(id) => Some(id.number()),
            Packed::Not | Packed::Filled(_) => None,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn pages_hold_what_was_written_last(steps in prop::collection::vec(any_step(), 1..200)) {
        let mut world = World::default();
        for step in steps {
            world.step(step);
            world.check();
        }
        let unpacked = world.pages.clear();
        world.release(unpacked);
        prop_assert!(world.frames.is_empty());
    }
}

#[test]
fn what_was_used_since_it_was_copied_is_not_packed() {
    let mut pages = Pages::default();
    let one = 7..8;
    let (_, _) = pages.write(one.clone());
    assert!(pages.cold(0).is_empty(), "it was used");
    assert!(pages.cold(0).is_empty(), "it is being written");
    pages.unpin(&one);
    assert_eq!(pages.cold(0), [7]);
    let (_, _) = pages.write(one.clone());
    pages.unpin(&one);
    assert!(!pages.pack(7, Packed::Filled(1)), "it was written after it was copied");
    assert!(pages.cold(0).is_empty() && pages.cold(0) == [7]);
    pages.refuse(7);
    assert!(pages.cold(0).is_empty(), "it does not pack");
    let (_, _) = pages.write(one.clone());
    pages.unpin(&one);
    assert!(pages.cold(0).is_empty() && pages.cold(0) == [7], "what is there now may");
    assert!(pages.pack(7, Packed::Filled(1)));
    assert_eq!((pages.packed(7), pages.count_in_memory()), (Packed::Filled(1), 0));
    assert!(!pages.read(one), "it is packed");
    assert!(pages.read(8..9), "it is zero");
}
