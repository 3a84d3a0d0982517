//! Collapsing over a real store. Nothing is judged by time.

#![allow(clippy::cast_possible_truncation, reason = "pages of small segments")]

use super::plan::EXTENT_PAGES;
use super::window::Window;
use super::*;
use crate::config::BackingKind;
use crate::memory::Store;
use crate::table::{Run, ScrubPart};
use farpool_wire::{PAGE_BYTES, PAGES_PER_SUPERPAGE, PagesChecksum, SegmentId};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const EXTENTS_PER_SUPERPAGE: u32 = 8;

struct Fixture {
    memory: Arc<SegmentMemory>,
    file: File,
    _store: Store,
}

impl Fixture {
    fn new(superpages: u32) -> Fixture {
        let store = Store::open(&BackingKind::Memfd, 0).unwrap();
        let memory = Arc::new(store.segment(superpages));
        for rmma in 0..superpages {
            memory.commit(rmma).unwrap();
        }
        let file = File::from(memory.share(1, true).unwrap().0);
        Fixture { memory, file, _store: store }
    }

    fn write(&self, page: u32, stamp: u64) {
        self.file.write_all_at(&bytes_of(page, stamp), offset_of(page)).unwrap();
    }

    /// Whether the page, read through the descriptor, is what was written; 0 stands for zeros.
    fn holds(&self, page: u32, stamp: u64) -> bool {
        let mut bytes = [0; PAGE_BYTES];
        self.file.read_exact_at(&mut bytes, offset_of(page)).unwrap();
        bytes == bytes_of(page, stamp)
    }

    fn slice(&self, page: u32) -> crate::sys::Slice {
        let (mut slices, mut keeps) = (Vec::new(), Vec::new());
        self.memory.place(&[run_of(page)], &mut slices, &mut keeps).unwrap();
        slices[0] // the segment outlives its users here
    }

    /// The same, read through the blade's mapping.
    fn holds_mapped(&self, page: u32, stamp: u64) -> bool {
        let (mut found, mut expected) = (PagesChecksum::default(), PagesChecksum::default());
        self.slice(page).checksum(&mut found);
        expected.update(&bytes_of(page, stamp));
        found.value() == expected.value()
    }

    fn free(&self, rmmas: impl IntoIterator<Item = u32>) {
        let rmmas = rmmas.into_iter().collect();
        self.memory.scrub(&ScrubPart::Superpages { segment: SegmentId(1), rmmas }).unwrap();
    }

    fn pages(&self) -> u64 {
        self.file.metadata().unwrap().blocks() * 512 / PAGE_BYTES as u64
    }

    fn collapse_all(&self) -> HugePages {
        let mut huge_pages = HugePages::default();
        huge_pages.watch(Arc::downgrade(&self.memory));
        while huge_pages.look(&|| false) {}
        huge_pages
    }

    /// Whether the kernel maps the extent with one entry.
    fn is_huge(&self, extent: u32) -> bool {
        let mut window = Window::new().unwrap();
        let offset = u64::from(extent) * EXTENT_BYTES;
        let view = window.show(self.file.as_fd(), offset).unwrap();
        let start = format!("{:x}-", view.touched());
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let mapped = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
        mapped.trim() == "2048 kB"
    }
}

fn offset_of(page: u32) -> u64 {
    u64::from(page) * PAGE_BYTES as u64
}

fn run_of(page: u32) -> Run {
    let offset_bytes = page % PAGES_PER_SUPERPAGE * PAGE_BYTES as u32;
    Run { rmma: page / PAGES_PER_SUPERPAGE, offset_bytes, bytes: PAGE_BYTES as u32 }
}

fn bytes_of(page: u32, stamp: u64) -> [u8; PAGE_BYTES] {
    let word = stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(page);
    let word = if stamp == 0 { 0 } else { word };
    let mut bytes = [0; PAGE_BYTES];
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_le_bytes()));
    bytes
}

/// Says why a test cannot say anything here.
fn is_refused(huge_pages: &HugePages) -> bool {
    if huge_pages.counts().0 == 0 {
        println!("SKIP: the kernel makes no huge page of a memfd: {huge_pages:?}");
    }
    huge_pages.counts().0 == 0
}

#[test]
fn a_filled_segment_becomes_huge_and_keeps_its_bytes() {
    let fixture = Fixture::new(2);
    let pages = 2 * PAGES_PER_SUPERPAGE;
    (0..pages).for_each(|page| fixture.write(page, 1));
    let mut huge_pages = fixture.collapse_all();
    if is_refused(&huge_pages) {
        return;
    }
    let made = (0..2 * EXTENTS_PER_SUPERPAGE).filter(|extent| fixture.is_huge(*extent)).count();
    assert_eq!(made as u64, huge_pages.counts().0);
    assert!((0..pages).all(|page| fixture.holds(page, 1)));
    assert_eq!(fixture.pages(), u64::from(pages));

    // Nothing changed, so nothing is tried.
    let before = huge_pages.counts();
    assert!(!huge_pages.look(&|| false));
    assert_eq!(huge_pages.counts(), before);

    fixture.free([0]);
    assert_eq!(fixture.pages(), u64::from(pages / 2));
    fixture.free([1]);
    assert_eq!(fixture.pages(), 0);
    while huge_pages.look(&|| false) {}
    assert_eq!(fixture.pages(), 0, "freed memory is not brought back");
    // Another's memory now.
    (0..PAGES_PER_SUPERPAGE).for_each(|page| fixture.write(page, 2));
    while huge_pages.look(&|| false) {}
    assert!(huge_pages.counts().0 > before.0);
    assert!((0..PAGES_PER_SUPERPAGE).all(|page| fixture.holds(page, 2)));
}

#[test]
fn a_sparse_segment_does_not_grow() {
    let fixture = Fixture::new(2);
    (0..2 * PAGES_PER_SUPERPAGE).step_by(2).for_each(|page| fixture.write(page, 1));
    let before = fixture.pages();
    let huge_pages = fixture.collapse_all();
    assert_eq!(huge_pages.counts(), (0, 0));
    assert_eq!(fixture.pages(), before);
    // One extent that is filled by more than half grows, to less than twice.
    fixture.write(1, 1);
    let huge_pages = fixture.collapse_all();
    if is_refused(&huge_pages) {
        return;
    }
    assert_eq!(huge_pages.counts().0, 1);
    assert_eq!(fixture.pages(), before + u64::from(EXTENT_PAGES / 2));
    assert!(fixture.is_huge(0) && fixture.holds(1, 1) && fixture.holds(2, 1));
    assert!(fixture.holds(3, 0), "a hole reads as zeros");
}

#[test]
fn what_was_discarded_is_not_brought_back() {
    let fixture = Fixture::new(1);
    (0..PAGES_PER_SUPERPAGE).for_each(|page| fixture.write(page, 1));
    let mut huge_pages = fixture.collapse_all();
    (0..100).for_each(|page| fixture.memory.discard(run_of(page)).unwrap());
    let pages = fixture.pages();
    while huge_pages.look(&|| false) {}
    assert_eq!(fixture.pages(), pages);
    assert!(fixture.holds(99, 0) && fixture.holds(100, 1));
}

#[test]
fn a_look_ends_when_the_thread_is_needed() {
    let fixture = Fixture::new(1);
    (0..PAGES_PER_SUPERPAGE).for_each(|page| fixture.write(page, 1));
    let mut huge_pages = HugePages::default();
    huge_pages.watch(Arc::downgrade(&fixture.memory));
    assert!(huge_pages.look(&|| true), "there is more to do");
    assert_eq!(huge_pages.counts(), (0, 0));
    drop(fixture);
    assert!(!huge_pages.look(&|| false) && huge_pages.segments.is_empty());
}

/// Writers, each with pages of its own in every extent, so that each extent is everybody's.
struct Hammer<'a> {
    fixture: &'a Fixture,
    number: u32,
    stamps: Vec<u64>,
    random: u64,
}

const HAMMERS: u32 = 4;
const HAMMERED_SUPERPAGES: u32 = 2;
const OPERATIONS: usize = 60_000;

impl Hammer<'_> {
    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize % below
    }

    fn run(&mut self) {
        let fixture = self.fixture;
        for _ in 0..OPERATIONS {
            let index = self.draw(self.stamps.len());
            let page = index as u32 * HAMMERS + self.number;
            match self.draw(512) {
                // Rarely, and refilled soon: an extent with holes is not collapsed.
                0 => {
                    fixture.memory.discard(run_of(page)).unwrap();
                    assert!(fixture.holds(page, 0) && fixture.holds_mapped(page, 0));
                    self.stamps[index] += 1;
                    fixture.write(page, self.stamps[index]);
                }
                1..=160 => {
                    self.stamps[index] += 1;
                    fixture.write(page, self.stamps[index]);
                }
                161..=320 => {
                    self.stamps[index] += 1;
                    fixture.slice(page).fill(&bytes_of(page, self.stamps[index]));
                }
                321..=416 => assert!(fixture.holds(page, self.stamps[index])),
                _ => assert!(fixture.holds_mapped(page, self.stamps[index])),
            }
        }
        for (index, stamp) in self.stamps.iter().enumerate() {
            assert!(fixture.holds(index as u32 * HAMMERS + self.number, *stamp));
        }
    }
}

/// Fills a superpage, frees it, and finds zeros.
fn fill_and_free(fixture: &Fixture, rmma: u32, is_over: &AtomicBool) {
    let pages = rmma * PAGES_PER_SUPERPAGE..(rmma + 1) * PAGES_PER_SUPERPAGE;
    let mut stamp = 1;
    while !is_over.load(Ordering::Relaxed) {
        pages.clone().for_each(|page| fixture.write(page, stamp));
        assert!(pages.clone().all(|page| fixture.holds(page, stamp)));
        fixture.free([rmma]);
        assert!(pages.clone().all(|page| fixture.holds(page, 0)));
        stamp += 1;
    }
}

#[test]
fn memory_is_true_while_it_is_collapsed_and_punched() {
    let fixture = Fixture::new(HAMMERED_SUPERPAGES + 1);
    let (is_over, collapsed) = (AtomicBool::new(false), AtomicU64::new(0));
    let pages = HAMMERED_SUPERPAGES * PAGES_PER_SUPERPAGE;
    (0..pages).for_each(|page| fixture.write(page, 1));
    std::thread::scope(|scope| {
        let hammers = [0, 1, 2, 3].map(|number| {
            let stamps = vec![1; (pages / HAMMERS) as usize];
            let random = 88_172_645_463_325_252 + u64::from(number);
            let mut hammer = Hammer { fixture: &fixture, number, stamps, random };
            scope.spawn(move || hammer.run())
        });
        scope.spawn(|| fill_and_free(&fixture, HAMMERED_SUPERPAGES, &is_over));
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // Anew each time: it shall try what it would leave alone.
                let mut huge_pages = HugePages::default();
                huge_pages.watch(Arc::downgrade(&fixture.memory));
                for _ in 0..8 {
                    huge_pages.look(&|| is_over.load(Ordering::Relaxed));
                }
                collapsed.fetch_add(huge_pages.counts().0, Ordering::Relaxed);
            }
        });
        hammers.into_iter().for_each(|hammer| hammer.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
    });
    println!("{} extents were made huge", collapsed.load(Ordering::Relaxed));
    fixture.free(0..=HAMMERED_SUPERPAGES);
    assert_eq!(fixture.pages(), 0, "all of it is given back");
}
