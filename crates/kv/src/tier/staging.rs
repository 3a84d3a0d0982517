//! Memory that is lent to the lane while pages travel, and the only calls that lend it.

use farpool_pool::{Lane, PageRead, PageWrite, SegmentHandle, SegmentPage};

use super::pages::{PAGE_BYTES, Pages};

/// Pages of memory that are lent to a lane: nobody can touch them until they are given back.
#[derive(Debug)]
pub(super) struct Lent {
    /// None once they were given back.
    pages: Option<Pages>,
    /// Completions still to come.
    left: usize,
    failed: bool,
}

impl Lent {
    /// Fetches `count` pages from `first` on. Each completion carries `token`.
    pub(super) fn read(
        pages: Pages,
        lane: &mut Lane,
        at: SegmentPage,
        count: usize,
        token: u64,
    ) -> Self {
        let mut pages = pages;
        assert!(count <= pages.count(), "the memory has room for what is read");
        let base = pages.start_mut();
        let reads: smallvec::SmallVec<[PageRead; 4]> = (0..count)
            .map(|n| PageRead {
                at: page(at.segment, at.page, n),
                into: base.wrapping_add(n * PAGE_BYTES),
                token,
            })
            .collect();
        // SAFETY: the pages lie in a mapping that this value owns and shows to nobody until all
        // completions have come; a value dropped before that leaks it (see `Drop`).
        let sent = unsafe { lane.read(&reads) };
        Self {
            pages: Some(pages),
            left: if sent.is_ok() { count } else { 0 },
            failed: sent.is_err(),
        }
    }

    /// Stores the first `count` pages from `first` on, likewise.
    pub(super) fn write(
        pages: Pages,
        lane: &mut Lane,
        at: SegmentPage,
        count: usize,
        token: u64,
    ) -> Self {
        assert!(count <= pages.count(), "the memory has what is written");
        let base = pages.start();
        let writes: Vec<PageWrite> = (0..count)
            .map(|n| PageWrite {
                at: page(at.segment, at.page, n),
                from: base.wrapping_add(n * PAGE_BYTES),
                token,
            })
            .collect();
        // SAFETY: as in `read`; what is lent for reading is only shown for reading meanwhile.
        let sent = unsafe { lane.write(&writes) };
        Self {
            pages: Some(pages),
            left: if sent.is_ok() { count } else { 0 },
            failed: sent.is_err(),
        }
    }

    /// Takes one completion.
    pub(super) fn complete(&mut self, is_ok: bool) {
        self.left = self.left.saturating_sub(1);
        self.failed |= !is_ok;
    }

    pub(super) const fn is_done(&self) -> bool {
        self.left == 0
    }

    /// What is being written: it does not change meanwhile.
    pub(super) fn written(&self) -> &[u8] {
        self.pages.as_ref().map_or(&[], Pages::bytes)
    }

    /// The memory back, and whether all went well. Only when done.
    pub(super) fn give_back(mut self) -> (Pages, bool) {
        assert!(self.is_done(), "memory comes back when all pages have");
        let pages = self.pages.take().expect("it is given back once: `self` is gone then");
        (pages, !self.failed)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.left > 0 {
            // The lane may still write here: better lost than used twice.
            std::mem::forget(self.pages.take());
        }
    }
}

fn page(segment: SegmentHandle, first: u32, n: usize) -> SegmentPage {
    SegmentPage { segment, page: first + u32::try_from(n).expect("a zone has few pages") }
}
