//! A fixed set of small integers, one bit each.

/// A set over `0..len`, all absent at first.
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

    pub(crate) fn get(&self, at: u32) -> bool {
        self.words[at as usize / 64] >> (at % 64) & 1 == 1
    }

    pub(crate) fn set(&mut self, at: u32) {
        self.words[at as usize / 64] |= 1 << (at % 64);
    }

    pub(crate) fn clear(&mut self, at: u32) {
        self.words[at as usize / 64] &= !(1 << (at % 64));
    }

    /// Clears the bit and says whether it was set.
    pub(crate) fn take(&mut self, at: u32) -> bool {
        let was = self.get(at);
        self.clear(at);
        was
    }
}
