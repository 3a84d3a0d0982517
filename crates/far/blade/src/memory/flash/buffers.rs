//! Buffers for requests to flash, used again and again: touching new memory costs more than a copy.

use super::residence::PIECE_PAGES;
use farpool_disk::Pages;

/// Buffers of a thread that are kept for the next requests, of one page and of a piece: 9 MiB.
const KEPT_PAGES: usize = 256;
const KEPT_PIECES: usize = 8;

/// Buffers that are free.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pages: Vec<Pages>,
    pieces: Vec<Pages>,
}

impl Buffers {
    /// A buffer of at least so many pages, at most a piece. None if the kernel refuses.
    pub(super) fn take(&mut self, pages: usize) -> Option<Pages> {
        let piece_pages = PIECE_PAGES as usize;
        assert!(pages <= piece_pages, "{pages} pages are more than a piece");
        match pages {
            1 => self.pages.pop().or_else(|| Pages::new(1)),
            _ => self.pieces.pop().or_else(|| Pages::new(piece_pages)),
        }
    }

    pub(super) fn put(&mut self, buffer: Pages) {
        let (kept, limit) = match buffer.count() {
            1 => (&mut self.pages, KEPT_PAGES),
            _ => (&mut self.pieces, KEPT_PIECES),
        };
        if kept.len() < limit {
            kept.push(buffer);
        }
    }
}
