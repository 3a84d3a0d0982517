//! Memory that is lent to the lane during transfers, and the only calls that lend it.

use farpool_pool::{Lane, PageRead, PageWrite, SegmentHandle, SegmentPage};
use farpool_units::PAGE_BYTES;

use farpool_disk::Pages;

/// Whole zones are transferred in pieces of this many pages: other reads wait for no more than one
/// piece.
const SLICE_PAGES: usize = 64;
/// A request of this many pages is a whole zone; a shorter one is being waited for.
pub(super) const WHOLE_PAGES: usize = 512;

#[derive(Debug, Clone, Copy)]
enum Way {
    Read,
    Write,
}

/// Pages of memory lent to a lane: inaccessible until they are returned.
#[derive(Debug)]
pub(super) struct Lent {
    /// None once they have been returned.
    pages: Option<Pages>,
    at: SegmentPage,
    count: usize,
    way: Way,
    /// Pages given to the lane so far.
    sent: usize,
    /// Outstanding completions.
    left: usize,
    failed: bool,
}

impl Lent {
    /// Reads `count` pages from `at`. Each completion carries `token`.
    pub(super) fn read(
        pages: Pages,
        lane: &mut Lane,
        at: SegmentPage,
        count: usize,
        token: u64,
    ) -> Self {
        Self::begin(pages, lane, (at, count), Way::Read, token)
    }

    /// Writes the first `count` pages to `at`, likewise.
    pub(super) fn write(
        pages: Pages,
        lane: &mut Lane,
        at: SegmentPage,
        count: usize,
        token: u64,
    ) -> Self {
        Self::begin(pages, lane, (at, count), Way::Write, token)
    }

    fn begin(
        pages: Pages,
        lane: &mut Lane,
        (at, count): (SegmentPage, usize),
        way: Way,
        token: u64,
    ) -> Self {
        assert!(
            count <= pages.count(),
            "the memory has room for what is read, and what is written"
        );
        let (pages, failed) = (Some(pages), false);
        let mut lent = Self { pages, at, count, way, sent: 0, left: 0, failed };
        lent.go_on(lane, token);
        lent
    }

    /// Gives the lane the next pages once it has completed the previous ones.
    pub(super) fn go_on(&mut self, lane: &mut Lane, token: u64) {
        let Some(pages) = self.pages.as_mut().filter(|_| self.left == 0 && !self.failed) else {
            return;
        };
        let (first, at) = (self.sent, self.at);
        let most = if self.count < WHOLE_PAGES { self.count } else { SLICE_PAGES };
        let slice = first..self.count.min(first + most);
        let sent = match self.way {
            Way::Read => {
                let base = pages.bytes_mut().as_mut_ptr();
                let reads: smallvec::SmallVec<[PageRead; 4]> = slice
                    .clone()
                    .map(|n| PageRead {
                        at: page(at.segment, at.page, n),
                        into: base.wrapping_add(n * PAGE_BYTES),
                        token,
                    })
                    .collect();
                // SAFETY: the pages lie in a mapping that this value owns and does not expose until
                // all completions have arrived; a value dropped before that leaks it (see `Drop`).
                unsafe { lane.read(&reads) }
            }
            Way::Write => {
                let base = pages.bytes().as_ptr();
                let writes: smallvec::SmallVec<[PageWrite; SLICE_PAGES]> = slice
                    .clone()
                    .map(|n| PageWrite {
                        at: page(at.segment, at.page, n),
                        from: base.wrapping_add(n * PAGE_BYTES),
                        token,
                    })
                    .collect();
                // SAFETY: as for reading; memory lent for writing is only exposed for reading
                // meanwhile.
                unsafe { lane.write(&writes) }
            }
        };
        self.failed = sent.is_err();
        self.left = if self.failed { 0 } else { slice.len() };
        self.sent = slice.end;
    }

    /// Takes one completion.
    pub(super) fn complete(&mut self, is_ok: bool) {
        self.left = self.left.saturating_sub(1);
        self.failed |= !is_ok;
    }

    /// Whether all pages have been transferred, or some have failed and no more will be.
    pub(super) const fn is_done(&self) -> bool {
        self.left == 0 && (self.failed || self.sent == self.count)
    }

    /// The bytes being written: they do not change meanwhile.
    pub(super) fn written(&self) -> &[u8] {
        self.pages.as_ref().map_or(&[], Pages::bytes)
    }

    /// Returns the memory, and whether all transfers succeeded. Only when done.
    pub(super) fn give_back(mut self) -> (Pages, bool) {
        assert!(self.is_done(), "memory comes back when all pages have");
        let pages = self.pages.take().expect("it is given back once: `self` is gone then");
        (pages, !self.failed)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.left > 0 {
            // The lane may still write here: a leak is better than reuse.
            std::mem::forget(self.pages.take());
        }
    }
}

fn page(segment: SegmentHandle, first: u32, n: usize) -> SegmentPage {
    SegmentPage { segment, page: first + u32::try_from(n).expect("a zone has few pages") }
}
