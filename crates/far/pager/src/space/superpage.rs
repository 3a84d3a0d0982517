//! A superpage of the program, with the states of its pages.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use farpool_units::{PAGE_BYTES, exactly};

use crate::space::page::{PageCell, PageState};
use crate::space::units::{CHUNK_PAGES, CHUNKS, SUPERPAGE_PAGES, bits};

/// The pages of one 16 MiB of the program's addresses. About 1.3 bytes a page.
#[repr(C)]
#[derive(Debug)]
pub struct Superpage {
    pub pages: [PageCell; SUPERPAGE_PAGES],
    /// Pages that were needed again soon after they were moved out: spared once by second chance.
    pub hot: [AtomicU64; CHUNKS],
    /// Pages that came back since the count of uses began.
    pub used: [AtomicU64; CHUNKS],
    /// For each chunk the tray of the victim buffer that holds pages of it.
    pub trays: [AtomicU16; CHUNKS],
    /// Pages in phase Far, and those being fetched from there.
    pub far_pages: AtomicU32,
    /// Pages of which a layer holds a copy though they are local.
    pub copies: AtomicU32,
    /// One bit for each layer: this superpage has memory there.
    pub allocated: AtomicU8,
    pub(super) id: AtomicU32,
    pub(super) base: AtomicU64,
}

impl Superpage {
    /// Its number in every segment.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// Whether no page needs the memory that this superpage has on a blade.
    pub fn is_empty(&self) -> bool {
        self.far_pages.load(Ordering::SeqCst) == 0 && self.copies.load(Ordering::SeqCst) == 0
    }

    /// Restarts the count of uses.
    pub fn forget_uses(&self) {
        self.used.iter().for_each(|used| used.store(0, Ordering::Relaxed));
    }

    /// Pages that came back since the count of uses began, and are out again.
    pub fn used_and_away(&self) -> u64 {
        let chunks = self.used.iter().zip(self.pages.chunks_exact(CHUNK_PAGES));
        let of_chunk = |(used, pages): (&AtomicU64, &[PageCell])| {
            let is_away = |index: &usize| pages[*index].load().phase().is_away();
            bits(used.load(Ordering::Relaxed)).filter(is_away).count() as u64
        };
        chunks.map(of_chunk).sum()
    }

    /// Notes that a page whose state was `state` has given up its copy, if it had one.
    pub fn give_up_copy(&self, state: PageState) {
        if state.has_copy() {
            let before = self.copies.fetch_sub(1, Ordering::SeqCst);
            assert_ne!(before, 0, "a copy is given up once");
        }
    }

    /// Notes that a page that was far, or was being fetched, is no longer far. It was counted
    /// before any thread could see it as far: with too low a count the blade's memory would be
    /// freed while it holds pages.
    pub fn leave_blade(&self) {
        let before = self.far_pages.fetch_sub(1, Ordering::SeqCst);
        assert_ne!(before, 0, "a page leaves its blade once");
    }

    /// Address of its first page in the program.
    pub fn base(&self) -> usize {
        exactly(self.base.load(Ordering::Relaxed))
    }
}

/// One page of the program.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub superpage: &'static Superpage,
    pub index: usize,
}

impl Page {
    pub fn address(self) -> usize {
        self.superpage.base() + self.index * PAGE_BYTES
    }

    pub fn cell(self) -> &'static PageCell {
        &self.superpage.pages[self.index]
    }

    pub fn chunk(self) -> usize {
        self.index / CHUNK_PAGES
    }

    /// The page's bit in its chunk's words.
    pub fn bit(self) -> u64 {
        1 << (self.index % CHUNK_PAGES)
    }

    /// Notes that the page came back to the program. True if it is the first time since the count
    /// of uses began.
    pub fn mark_used(self) -> bool {
        let before = self.superpage.used[self.chunk()].fetch_or(self.bit(), Ordering::Relaxed);
        before & self.bit() == 0
    }

    /// Its number in every segment.
    pub fn segment_page(self) -> u32 {
        self.superpage.id() * SUPERPAGE_PAGES_U32 + exactly::<u32, _>(self.index)
    }
}

#[allow(clippy::cast_possible_truncation)] // It is 4096.
const SUPERPAGE_PAGES_U32: u32 = SUPERPAGE_PAGES as u32;
