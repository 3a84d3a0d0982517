//! A fixed set of small integers, one bit each.

use crate::tables::{resize_exactly, table_bytes};

/// A set over `0..len`, empty at first.
#[derive(Debug, Clone)]
pub(crate) struct BitSet {
    words: Vec<u64>,
}

impl BitSet {
    pub(crate) fn new(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(64)] }
    }

    pub(crate) fn grow(&mut self, len: usize) {
        let words = len.div_ceil(64).max(self.words.len());
        self.words.resize(words, 0);
    }

    /// Resizes the set to `0..len`; no number beyond may be in it.
    pub(crate) fn resize(&mut self, len: usize) {
        resize_exactly(&mut self.words, len.div_ceil(64), 0);
    }

    /// Renumbers `from`: `to` is in the set if `from` was, and `from` no longer is.
    pub(crate) fn rename(&mut self, from: u32, to: u32) {
        if self.take(from) {
            self.set(to);
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        table_bytes(&self.words)
    }

    pub(crate) fn get(&self, at: u32) -> bool {
        self.words[at as usize / 64] >> (at % 64) & 1 == 1
    }

    pub(crate) fn set(&mut self, at: u32) {
        self.words[at as usize / 64] |= 1 << (at % 64);
    }

    pub(crate) fn clear(&mut self, at: u32) {
        self.words[at as usize / 64] &= !(1 << (at % 64));
    }

    /// Clears the bit. True if it was set.
    pub(crate) fn take(&mut self, at: u32) -> bool {
        let was = self.get(at);
        self.clear(at);
        was
    }
}

/// For each page whether it is resident and whether it was referenced: two bits, side by side.
#[derive(Debug, Clone)]
pub(crate) struct Marks {
    words: Vec<u64>,
}

const RESIDENT: u64 = 0b01;
const REFERENCED: u64 = 0b10;

impl Marks {
    pub(crate) fn new(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(32)] }
    }

    #[inline]
    fn place(at: u32) -> (usize, u32) {
        (at as usize / 32, at % 32 * 2)
    }

    /// Resizes the marks to `0..len`; no page beyond may be resident.
    pub(crate) fn resize(&mut self, len: usize) {
        resize_exactly(&mut self.words, len.div_ceil(32), 0);
    }

    /// Moves the marks of `from` to `to`, which must not be resident; `from` no longer is.
    pub(crate) fn rename(&mut self, from: u32, to: u32) {
        let (word, shift) = Self::place(from);
        let marks = self.words[word] >> shift & (RESIDENT | REFERENCED);
        self.leave(from);
        let (word, shift) = Self::place(to);
        self.words[word] |= marks << shift;
    }

    pub(crate) fn bytes(&self) -> usize {
        table_bytes(&self.words)
    }

    pub(crate) fn resident(&self, at: u32) -> bool {
        let (word, shift) = Self::place(at);
        self.words[word] >> shift & RESIDENT != 0
    }

    /// Marks a resident page as referenced. False if it is not resident.
    #[inline]
    pub(crate) fn reference(&mut self, at: u32) -> bool {
        let (word, shift) = Self::place(at);
        let marks = self.words[word] >> shift;
        if marks & RESIDENT == 0 {
            return false;
        }
        if marks & REFERENCED == 0 {
            self.words[word] |= REFERENCED << shift;
        }
        true
    }

    /// Marks the page as resident and not referenced.
    #[inline]
    pub(crate) fn enter(&mut self, at: u32) {
        let (word, shift) = Self::place(at);
        self.words[word] |= RESIDENT << shift;
    }

    /// Marks the page as not resident.
    #[inline]
    pub(crate) fn leave(&mut self, at: u32) {
        let (word, shift) = Self::place(at);
        self.words[word] &= !((RESIDENT | REFERENCED) << shift);
    }

    /// Clears the mark of reference. True if it was set.
    #[inline]
    pub(crate) fn take_reference(&mut self, at: u32) -> bool {
        let (word, shift) = Self::place(at);
        let was = self.words[word] >> shift & REFERENCED != 0;
        self.words[word] &= !(REFERENCED << shift);
        was
    }
}
