//! A row of places that counts how many taken places lie before a given one.
//!
//! A Fenwick tree touches a logarithm of cache lines per query and per change. Here counts are kept
//! as prefix sums: a query is one load per level and one popcount, and a change subtracts 1 from
//! all later entries of one block per level, which vector instructions do at once. It takes a sixth
//! of a byte per place: the row of a million pages stays in the second-level cache.

use farpool_units::exactly;

/// Places per word.
const WORD: usize = 64;

/// Words per block: its counts of up to 64 x 64 fit 16 bits.
const BLOCK_WORDS: usize = 64;

/// Entries per block at the levels above.
const FAN_OUT: usize = 32;

#[derive(Debug)]
pub(super) struct Timeline {
    words: Vec<u64>,
    /// Taken places before each word, within its block.
    in_block: Vec<u16>,
    /// Taken places before each block, within its parent; and so on, up to a level with a single
    /// parent.
    above: Vec<Vec<u32>>,
    /// The first place that was never taken.
    now: usize,
    taken: u32,
}

impl Timeline {
    /// Creates a row of `places`, all free.
    pub(super) fn new(places: usize) -> Self {
        let blocks = places.div_ceil(WORD * BLOCK_WORDS).max(1);
        let mut above = Vec::new();
        let mut entries = blocks;
        loop {
            let parents = entries.div_ceil(FAN_OUT);
            above.push(vec![0; parents * FAN_OUT]);
            if parents == 1 {
                break;
            }
            entries = parents;
        }
        let words = blocks * BLOCK_WORDS;
        Self { words: vec![0; words], in_block: vec![0; words], above, now: 0, taken: 0 }
    }

    /// Returns the bytes that a row of `places` takes.
    pub(super) fn memory_bytes(places: u64) -> u64 {
        let words = (places / 64 + 1).next_multiple_of(BLOCK_WORDS as u64);
        words * 10 + words / 12 + 1024
    }

    /// True if every place has been taken once.
    pub(super) fn is_full(&self) -> bool {
        self.now == self.words.len() * WORD
    }

    /// Returns the number of taken places.
    pub(super) fn taken(&self) -> u32 {
        self.taken
    }

    /// Frees all places.
    pub(super) fn restart(&mut self) {
        self.words.fill(0);
        self.now = 0;
        self.taken = 0;
    }

    /// Counts the taken places before `place`, which must have been taken at some time.
    #[inline]
    pub(super) fn taken_before(&self, place: u32) -> u32 {
        let place = place as usize;
        let word = place / WORD;
        let lower = (1u64 << (place % WORD)) - 1;
        let mut count = (self.words[word] & lower).count_ones() + u32::from(self.in_block[word]);
        let mut entry = word / BLOCK_WORDS;
        for level in &self.above {
            count += level[entry];
            entry /= FAN_OUT;
        }
        count
    }

    /// Takes the next place; one must be left. Places are numbered below 2^32.
    #[inline]
    pub(super) fn take_next(&mut self) -> u32 {
        let word = self.now / WORD;
        if self.now.is_multiple_of(WORD) {
            self.open_word(word);
        }
        self.words[word] |= 1 << (self.now % WORD);
        let place = exactly(self.now);
        self.now += 1;
        self.taken += 1;
        place
    }

    /// Sets the sums before a word when the row reaches it; their old values are meaningless.
    #[cold]
    fn open_word(&mut self, word: usize) {
        let before = |words: &[u64], at: usize| words[at - 1].count_ones();
        if !word.is_multiple_of(BLOCK_WORDS) {
            let sum = u32::from(self.in_block[word - 1]) + before(&self.words, word);
            self.in_block[word] = exactly(sum);
            return;
        }
        self.in_block[word] = 0;
        let mut entry = word / BLOCK_WORDS;
        let mut below = match word {
            0 => 0,
            _ => u32::from(self.in_block[word - 1]) + before(&self.words, word),
        };
        for level in &mut self.above {
            if !entry.is_multiple_of(FAN_OUT) {
                level[entry] = level[entry - 1] + below;
                return;
            }
            if entry > 0 {
                below += level[entry - 1];
            }
            level[entry] = 0;
            entry /= FAN_OUT;
        }
    }

    /// Frees a taken place.
    #[inline]
    pub(super) fn free(&mut self, place: u32) {
        let word = place as usize / WORD;
        self.words[word] &= !(1 << (place % 64));
        self.taken -= 1;
        let block = word / BLOCK_WORDS;
        let start = block * BLOCK_WORDS;
        let sums: &mut [u16; BLOCK_WORDS] =
            (&mut self.in_block[start..start + BLOCK_WORDS]).try_into().expect("a block's length");
        let at = low_16(word % BLOCK_WORDS);
        for (other, sum) in (0u16..).zip(sums) {
            *sum = sum.wrapping_sub(u16::from(other > at));
        }
        let mut entry = block;
        for level in &mut self.above {
            let start = entry / FAN_OUT * FAN_OUT;
            let sums: &mut [u32; FAN_OUT] =
                (&mut level[start..start + FAN_OUT]).try_into().expect("a block's length");
            let at = u32::from(low_16(entry % FAN_OUT));
            for (other, sum) in (0u32..).zip(sums) {
                *sum = sum.wrapping_sub(u32::from(other > at));
            }
            entry /= FAN_OUT;
        }
    }
}

/// Converts a number below 2^16.
fn low_16(number: usize) -> u16 {
    exactly(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_policy::Rng;

    #[test]
    fn counts_are_those_of_a_plain_row() {
        // Large enough for three levels above the blocks' sums.
        let places = WORD * BLOCK_WORDS * (FAN_OUT * FAN_OUT + 3);
        let mut row = Timeline::new(places);
        let mut plain = vec![false; places];
        let mut rng = Rng::new(9);
        for at in 0..places {
            assert!(!row.is_full());
            assert_eq!(row.take_next() as usize, at);
            plain[at] = true;
            let other = rng.below(u32::try_from(at + 1).unwrap());
            if std::mem::take(&mut plain[other as usize]) {
                row.free(other);
            }
            if at % 100_003 == 0 || at < 300 {
                let asked = rng.below(u32::try_from(at + 1).unwrap());
                let taken = plain[..asked as usize].iter().filter(|taken| **taken).count();
                assert_eq!(row.taken_before(asked) as usize, taken, "{asked} of {at}");
            }
        }
        assert_eq!(row.taken() as usize, plain.iter().filter(|taken| **taken).count());
        row.restart();
        assert_eq!((row.taken(), row.take_next(), row.taken_before(0)), (0, 0, 0));
    }
}
