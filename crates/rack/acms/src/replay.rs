//! Which of a sender's datagrams have been received, so that a recorded one does nothing when it
//! is sent again.
//!
//! Invariant: a number is taken once; one that is too old to be remembered, or older than the first
//! one taken, is not taken.

/// Words of the bitmap.
const WORDS: usize = 16;
const WORD_BITS: u64 = 64;
/// How far behind the highest number a late datagram may be, in datagrams that its sender sent to
/// anyone: some seconds of a node that sends as much as it may. An older one counts as lost.
pub(crate) const LATE_MAX: u64 = (WORDS as u64 - 1) * WORD_BITS;

/// The numbers received of one life of a sender.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    highest: u64,
    /// A bit for each number, at the number modulo the bits.
    seen: [u64; WORDS],
}

impl Received {
    /// Takes the first number. Earlier ones may be recordings, and are not taken.
    pub(crate) fn first(number: u64) -> Self {
        let mut seen = [u64::MAX; WORDS];
        let word: usize = farpool_units::exactly(number / WORD_BITS % WORDS as u64);
        // Those above it in its word are still to come.
        seen[word] = u64::MAX >> (WORD_BITS - 1 - number % WORD_BITS);
        Self { highest: number, seen }
    }

    /// Takes a number. Returns false if it was taken before or is too old.
    pub(crate) fn take(&mut self, number: u64) -> bool {
        let word = |number: u64| number / WORD_BITS;
        let place = |word: u64| farpool_units::exactly::<usize, _>(word % WORDS as u64);
        if number > self.highest {
            let skipped = (word(number) - word(self.highest)).min(WORDS as u64);
            for step in 1..=skipped {
                self.seen[place(word(self.highest).wrapping_add(step))] = 0;
            }
            self.highest = number;
        } else if self.highest - number >= LATE_MAX {
            return false;
        }
        let (bits, bit) = (&mut self.seen[place(word(number))], 1 << (number % WORD_BITS));
        let is_new = *bits & bit == 0;
        *bits |= bit;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_taken_once_and_late_ones_while_they_are_remembered(
            start in prop_oneof![Just(1), 0..3_000u64, any::<u64>()],
            steps in proptest::collection::vec(-1_100i64..1_100, 1..200),
        ) {
            let (mut received, mut taken) = (Received::first(start), BTreeSet::from([start]));
            let (mut number, mut highest) = (start, start);
            for step in steps {
                number = number.saturating_add_signed(step);
                let is_late = highest >= number && highest - number >= LATE_MAX;
                let expected = number > start && !is_late && taken.insert(number);
                prop_assert_eq!(received.take(number), expected, "{} after {}", number, highest);
                highest = highest.max(number);
            }
        }
    }
}
