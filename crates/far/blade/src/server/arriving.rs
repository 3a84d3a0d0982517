//! The pages of a write on their way into a segment's memory.

use crate::gate::Writing;
use crate::memory::Keep;
use crate::sys::Slice;
use farpool_wire::{Header, PagesChecksum};

/// Pages of a write that are still arriving.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    /// Where they go; if empty they are discarded (the write was refused).
    pub(super) slices: Vec<Slice>,
    /// Number of slices that are complete; the next one covers only the part still missing.
    done: usize,
    pub(super) missing_bytes: usize,
    pub(super) checksum: PagesChecksum,
    pub(super) write: Option<Write>,
}

/// A write that was let through and is not yet answered.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) header: Header,
    _keeps: Vec<Keep>,
    _writing: Writing,
}

impl Write {
    /// `keeps` is what must live on while its pages arrive.
    pub(super) fn new(header: Header, keeps: Vec<Keep>, writing: Writing) -> Self {
        Write { header, _keeps: keeps, _writing: writing }
    }
}

impl Arriving {
    /// Expects `bytes`, with no place for them yet.
    pub(super) fn begin(&mut self, bytes: usize) {
        self.slices.clear();
        self.done = 0;
        self.missing_bytes = bytes;
        self.checksum = PagesChecksum::new();
    }

    /// Where the missing bytes go; empty if there are none or they are discarded.
    pub(super) fn missing_slices(&self) -> &[Slice] {
        &self.slices[self.done..]
    }

    /// Takes missing bytes off the front of `bytes`. Returns how many.
    pub(super) fn fill_from(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.missing_bytes);
        let mut left = &bytes[..count];
        if self.slices.is_empty() {
            self.missing_bytes -= count; // a refused write
            return count;
        }
        while !left.is_empty() {
            let slice = self.slices[self.done];
            let (now, later) = left.split_at(left.len().min(slice.bytes()));
            slice.fill(now);
            self.advance(now.len());
            left = later;
        }
        count
    }

    /// Records that the next `count` bytes are in their places.
    pub(super) fn received(&mut self, mut count: usize) {
        while count > 0 {
            let step = count.min(self.slices[self.done].bytes());
            self.advance(step);
            count -= step;
        }
    }

    /// Records that the next `count` bytes, all of one slice, are in their place.
    fn advance(&mut self, count: usize) {
        let slice = &mut self.slices[self.done];
        slice.front(count).checksum(&mut self.checksum);
        *slice = slice.skip(count);
        if slice.bytes() == 0 {
            self.done += 1;
        }
        self.missing_bytes -= count;
    }
}
