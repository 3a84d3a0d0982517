//! What the pages of one superpage are: in memory, packed, or neither, and then they are zero.
//! Pure: what is to be given back is returned.
//!
//! Invariants:
//! - A page in memory is not packed, and a packed one not in memory.
//! - A page is packed only if nobody read or wrote it since its bytes were copied for that, and
//!   nobody does now: a pinned page is being sent, or written to.
//! - Each reference to a frame is in one page's entry, or was returned to be released.
//! - There is a table of entries only while a page is packed.

use super::frames::FrameId;
use crate::memory::bits::{Bits, append};
use farpool_units::PAGES_PER_SUPERPAGE;
use std::ops::Range;

/// Pages that are packed together.
pub(super) const PIECE_PAGES: u32 = 256;

/// What a page that is not in memory is made of. 8 bytes a page, 0.2 % of a superpage of which some
/// are packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Packed {
    /// Nothing: it is zero, or in memory.
    #[default]
    Not,
    /// One word that fills all of it.
    Filled(u32),
    Frame(FrameId),
}

const _: () = assert!(size_of::<Packed>() == 8);

/// The pages of one superpage.
#[derive(Debug, Default)]
pub(super) struct Pages {
    in_memory: Bits,
    /// Read or written since the packer came by.
    used: Bits,
    /// Found not to pack, and not written since.
    stuck: Bits,
    packed: Option<Box<[Packed]>>,
    packed_count: u32,
    /// Some may be there several times.
    pinned: Vec<Range<u32>>,
}

/// Packed pages that are packed no more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Unpacked {
    /// References to be released.
    pub(super) frames: Vec<FrameId>,
    /// Pages that a word filled.
    pub(super) filled: u64,
}

impl Pages {
    /// Asks for pages to be sent. True if no page of them is packed: they are pinned then.
    pub(super) fn read(&mut self, range: Range<u32>) -> bool {
        self.used.set_all(range.clone());
        let has_packed = self.has_packed(range.clone());
        if !has_packed {
            self.pinned.push(range);
        }
        !has_packed
    }

    /// What a page is made of.
    pub(super) fn packed(&self, page: u32) -> Packed {
        self.packed.as_ref().map_or(Packed::Not, |packed| packed[page as usize])
    }

    /// Pages of the range that take memory if they are written to.
    pub(super) fn count_absent(&self, range: Range<u32>) -> u32 {
        range.end - range.start - self.in_memory.count(range)
    }

    /// Makes pages ready to be written to; what they had is of no use any more. Returns how many
    /// have memory that had none.
    pub(super) fn write(&mut self, range: Range<u32>) -> (u32, Unpacked) {
        let absent = self.count_absent(range.clone());
        let unpacked = self.unpack(range.clone());
        self.in_memory.set_all(range.clone());
        self.used.set_all(range.clone());
        self.stuck.clear_all(range.clone());
        self.pinned.push(range);
        (absent, unpacked)
    }

    /// Ends what [`Self::read`] or [`Self::write`] began.
    pub(super) fn unpin(&mut self, range: &Range<u32>) {
        let place = self.pinned.iter().position(|it| it == range);
        self.pinned.swap_remove(place.expect("what is unpinned was pinned"));
    }

    /// Drops the content of pages: they are zero, or keep what they have while they are pinned.
    /// Returns the memory that is to be given back.
    pub(super) fn discard(&mut self, range: Range<u32>) -> (Vec<Range<u32>>, Unpacked) {
        let mut dropped = Vec::new();
        let unpacked = self.unpack(range.clone());
        for page in range {
            if self.in_memory.has(page) && !self.is_pinned(page) {
                self.in_memory.clear(page);
                append(&mut dropped, page);
            }
        }
        (dropped, unpacked)
    }

    /// Pages of a piece that may be packed: in memory, and not used since the last time. What was
    /// used stays until the next time.
    pub(super) fn cold(&mut self, piece: u32) -> Vec<u32> {
        let pages = piece * PIECE_PAGES..(piece + 1) * PIECE_PAGES;
        if !self.in_memory.has_any(pages.clone()) {
            return Vec::new();
        }
        let mut is_cold = |page: &u32| {
            self.in_memory.has(*page)
                && !self.used.take(*page)
                && !self.stuck.has(*page)
                && !self.pinned.iter().any(|range| range.contains(page))
        };
        pages.filter(|page| is_cold(page)).collect()
    }

    /// Packs a page that [`Self::cold`] named, whose bytes were copied since. False if it was used
    /// meanwhile: it stays as it is. Its memory is to be given back.
    #[must_use]
    pub(super) fn pack(&mut self, page: u32, packed: Packed) -> bool {
        if !self.is_still_cold(page) {
            return false;
        }
        self.in_memory.clear(page);
        if packed != Packed::Not {
            let entries = self.packed.get_or_insert_with(|| {
                vec![Packed::Not; PAGES_PER_SUPERPAGE as usize].into_boxed_slice()
            });
            let before = std::mem::replace(&mut entries[page as usize], packed);
            assert_eq!(before, Packed::Not, "page {page} was in memory and packed");
            self.packed_count += 1;
        }
        true
    }

    /// Notes that a page that [`Self::cold`] named does not pack.
    pub(super) fn refuse(&mut self, page: u32) {
        if self.is_still_cold(page) {
            self.stuck.set(page);
        }
    }

    /// Nothing is packed any more.
    pub(super) fn clear(&mut self) -> Unpacked {
        self.unpack(0..PAGES_PER_SUPERPAGE)
    }

    /// Pages in memory.
    pub(super) fn count_in_memory(&self) -> u32 {
        self.in_memory.count(0..PAGES_PER_SUPERPAGE)
    }

    /// Bytes of the table of packed pages.
    pub(super) fn table_bytes(&self) -> u64 {
        self.packed.as_ref().map_or(0, |packed| size_of_val(&**packed) as u64)
    }

    fn is_still_cold(&self, page: u32) -> bool {
        self.in_memory.has(page) && !self.used.has(page) && !self.is_pinned(page)
    }

    fn has_packed(&self, mut range: Range<u32>) -> bool {
        range.any(|page| self.packed(page) != Packed::Not)
    }

    /// Takes the entries of pages away.
    fn unpack(&mut self, range: Range<u32>) -> Unpacked {
        let mut unpacked = Unpacked::default();
        let Some(entries) = &mut self.packed else { return unpacked };
        for entry in &mut entries[range.start as usize..range.end as usize] {
            match std::mem::take(entry) {
                Packed::Not => continue,
                Packed::Filled(_) => unpacked.filled += 1,
                Packed::Frame(id) => unpacked.frames.push(id),
            }
            self.packed_count -= 1;
        }
        if self.packed_count == 0 {
            self.packed = None;
        }
        unpacked
    }

    fn is_pinned(&self, page: u32) -> bool {
        self.pinned.iter().any(|range| range.contains(&page))
    }
}
