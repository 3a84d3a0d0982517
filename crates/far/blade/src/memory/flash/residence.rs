//! Where each page of one superpage is: in memory, on flash, on both, or on neither, and then it is
//! zero. Pure: what is to be read, written or given back is returned.
//!
//! Invariants:
//! - What was written last is in memory or on flash, whole. A page leaves memory only once flash
//!   has it, and nothing was written to it meanwhile.
//! - The memory of a pinned page is not given back: it is being sent, or written to.
//! - At a page's place on flash at most one write is under way, and no version is used twice.
//! - What is read from flash counts only if it is the version that flash has when it has arrived.

use crate::memory::bits::{Bits, append};
use crate::memory::room::Threads;
use farpool_seal::Tag;
use farpool_units::PAGES_PER_SUPERPAGE;
use std::ops::Range;

/// Pages that the sweep looks at together: 1 MiB, which flash takes in one request.
pub(super) const PIECE_PAGES: u32 = 256;
/// How often a page may go to flash under one key. No flash lives as long; a page at this limit
/// stays in memory.
const VERSIONS: u32 = u32::MAX;

/// What a page on flash is recognized by. 20 bytes a page, 0.5 % of what has been on flash.
#[derive(Clone, Copy, Debug)]
struct Sealed {
    version: u32,
    tag: Tag,
}

/// A page on its way, and which sealing of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OnWay {
    pub(super) page: u32,
    pub(super) version: u32,
    /// Of a page that is written: known once it is sealed.
    pub(super) tag: Tag,
}

/// The pages of one superpage.
#[derive(Debug, Default)]
pub(super) struct Residence {
    in_memory: Bits,
    /// Flash has what was written last.
    on_flash: Bits,
    /// Read or written since the sweep came by.
    used: Bits,
    /// Being written to flash, and not written to by a client since that began.
    leaving: Bits,
    /// A write to the page's place on flash is under way.
    writing: Bits,
    /// A read of the page's place on flash is under way.
    fetching: Bits,
    /// It could not be read from flash; whoever asks next is told.
    failed: Bits,
    sealed: Option<Box<[Sealed]>>,
    /// Some may be there several times.
    pinned: Vec<Range<u32>>,
    waiting: Threads,
}

/// What a reader finds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// All pages, which are pinned now.
    Here,
    /// Some are on flash only. The thread is woken when any has arrived; those named here are to be
    /// read, and the others are being read.
    Away(Vec<OnWay>),
    /// Some could not be read from flash.
    Failed,
}

/// What becomes of a page that was read from flash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Landing {
    /// It is in memory from now on, once its bytes are copied there.
    Taken,
    /// It is out of date, or nobody wants it any more.
    Dropped,
    /// It is not what was written.
    Failed,
}

/// What a sweep does with a piece.
#[derive(Debug, Default)]
pub(super) struct Swept {
    /// Memory that is to be given back.
    pub(super) dropped: Vec<Range<u32>>,
    /// Pages that are to be written to flash.
    pub(super) leaving: Vec<OnWay>,
}

impl Residence {
    /// Asks for pages to be sent.
    pub(super) fn read(&mut self, range: Range<u32>, thread: usize) -> Found {
        if self.failed.has_any(range.clone()) {
            self.failed.clear_all(range);
            return Found::Failed;
        }
        if self.on_flash.has_beyond(&self.in_memory, range.clone()) {
            self.waiting.insert(thread);
            return Found::Away(self.begin_fetch(range));
        }
        self.used.set_all(range.clone());
        self.pinned.push(range);
        Found::Here
    }

    /// Pages of the range that take memory if they are written to.
    pub(super) fn count_absent(&self, range: Range<u32>) -> u32 {
        exact_len(&range) - self.in_memory.count(range)
    }

    /// Makes pages ready to be written to; what they had is of no use any more. Returns how many
    /// have memory that had none.
    pub(super) fn write(&mut self, range: Range<u32>) -> u32 {
        let absent = self.count_absent(range.clone());
        self.in_memory.set_all(range.clone());
        self.used.set_all(range.clone());
        for stale in [&mut self.on_flash, &mut self.leaving, &mut self.failed] {
            stale.clear_all(range.clone());
        }
        self.pinned.push(range);
        absent
    }

    /// Ends what [`Self::read`] or [`Self::write`] began.
    pub(super) fn unpin(&mut self, range: &Range<u32>) {
        let place = self.pinned.iter().position(|it| it == range);
        self.pinned.swap_remove(place.expect("what is unpinned was pinned"));
    }

    /// Drops the content of pages: they are zero, or keep what they have while they are pinned.
    /// Returns the memory that is to be given back.
    pub(super) fn discard(&mut self, range: Range<u32>) -> Vec<Range<u32>> {
        for stale in [&mut self.on_flash, &mut self.leaving, &mut self.failed] {
            stale.clear_all(range.clone());
        }
        let mut dropped = Vec::new();
        for page in range {
            if self.in_memory.has(page) && !self.is_pinned(page) {
                self.in_memory.clear(page);
                append(&mut dropped, page);
            }
        }
        dropped
    }

    /// Pages that [`Self::read`] named are not read after all; who waits for them has to ask again.
    pub(super) fn cancel_fetch(&mut self, pages: &[OnWay]) {
        for it in pages {
            assert!(self.fetching.take(it.page), "page {} was not being read", it.page);
        }
    }

    /// A page was read; `is_whole` if its seal fits.
    pub(super) fn end_fetch(&mut self, it: &OnWay, is_whole: bool) -> Landing {
        assert!(self.fetching.take(it.page), "page {} was not being read", it.page);
        let is_wanted = self.on_flash.has(it.page);
        if !is_wanted || self.sealed()[to_index(it.page)].version != it.version {
            return Landing::Dropped;
        }
        assert!(!self.in_memory.has(it.page), "page {} came twice", it.page);
        if !is_whole {
            self.failed.set(it.page);
            return Landing::Failed;
        }
        self.in_memory.set(it.page);
        self.used.set(it.page);
        Landing::Taken
    }

    /// Who waited for pages.
    pub(super) fn take_waiting(&mut self) -> Threads {
        std::mem::take(&mut self.waiting)
    }

    /// Looks at the pages of a piece that are in memory: those used since the last time stay until
    /// the next, of the others memory is given back, or flash is to get them first. `may_write`:
    /// at most so many.
    pub(super) fn sweep(&mut self, piece: u32, may_write: usize) -> Swept {
        let mut swept = Swept::default();
        let pages = piece * PIECE_PAGES..(piece + 1) * PIECE_PAGES;
        if !self.in_memory.has_any(pages.clone()) {
            return swept;
        }
        for page in pages {
            if !self.in_memory.has(page) || self.writing.has(page) || self.is_pinned(page) {
                continue;
            }
            if self.used.take(page) {
                continue;
            }
            if self.on_flash.has(page) {
                self.in_memory.clear(page);
                append(&mut swept.dropped, page);
            } else if swept.leaving.len() < may_write
                && let Some(version) = self.next_version(page)
            {
                self.leaving.set(page);
                self.writing.set(page);
                swept.leaving.push(OnWay { page, version, tag: NO_TAG });
            }
        }
        swept
    }

    /// Pages that [`Self::sweep`] named were written, or could not be. Returns the memory that is
    /// to be given back.
    pub(super) fn end_leave(&mut self, pages: &[OnWay], is_written: bool) -> Vec<Range<u32>> {
        let mut dropped = Vec::new();
        for it in pages {
            assert!(self.writing.take(it.page), "page {} was not being written", it.page);
            if !self.leaving.take(it.page) || !is_written {
                continue;
            }
            assert!(self.in_memory.has(it.page), "what is leaving is in memory");
            self.on_flash.set(it.page);
            let sealed = &mut self.sealed()[to_index(it.page)];
            assert_eq!(sealed.version, it.version, "one write of a page at a time");
            sealed.tag = it.tag;
            if !self.used.has(it.page) {
                assert!(!self.is_pinned(it.page), "page {} is in use and was not used", it.page);
                self.in_memory.clear(it.page);
                append(&mut dropped, it.page);
            }
        }
        dropped
    }

    /// Pages in memory.
    pub(super) fn count_in_memory(&self) -> u32 {
        self.in_memory.count(0..PAGES_PER_SUPERPAGE)
    }

    /// Pages of the range that are to be read from flash.
    fn begin_fetch(&mut self, range: Range<u32>) -> Vec<OnWay> {
        let mut pages = Vec::new();
        for page in range {
            let is_away = self.on_flash.has(page) && !self.in_memory.has(page);
            if is_away && !self.fetching.has(page) {
                let Sealed { version, tag } = self.sealed()[to_index(page)];
                self.fetching.set(page);
                pages.push(OnWay { page, version, tag });
            }
        }
        pages
    }

    fn is_pinned(&self, page: u32) -> bool {
        self.pinned.iter().any(|range| range.contains(&page))
    }

    fn sealed(&mut self) -> &mut [Sealed] {
        self.sealed.get_or_insert_with(|| {
            vec![Sealed { version: 0, tag: NO_TAG }; to_index(PAGES_PER_SUPERPAGE)].into()
        })
    }

    fn next_version(&mut self, page: u32) -> Option<u32> {
        let sealed = &mut self.sealed()[to_index(page)];
        if sealed.version == VERSIONS {
            return None;
        }
        sealed.version += 1;
        Some(sealed.version)
    }
}

/// Of a page that is not sealed yet.
const NO_TAG: Tag = Tag([0; farpool_seal::TAG_BYTES]);

fn to_index(page: u32) -> usize {
    page as usize
}

fn exact_len(range: &Range<u32>) -> u32 {
    range.end - range.start
}
