//! Random numbers that are the same on every machine, so that a seed reproduces its groupings.

use farpool_policy::Rng;
use farpool_units::exactly;

/// The policies' seeded generator, for choosing and shuffling.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(Rng::new(seed))
    }

    /// Returns the next 64 bits.
    pub fn next_bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `bound`, which must not be zero. By multiplication: the bias is below
    /// 2^-32 for the sizes shuffled here.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "nothing is below zero");
        let product = u128::from(self.next_bits()) * bound as u128;
        // The upper half of a product of 64 bits with a usize is below that usize.
        exactly(product >> 64)
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        let mut random = Random::new(1_234_567);
        // From the reference implementation for this seed.
        assert_eq!(random.next_bits(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_bits(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn a_shuffle_keeps_all_items_and_comes_out_again() {
        let shuffled = |seed| {
            let mut items: Vec<usize> = (0..100).collect();
            Random::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = shuffled(7);
        assert_eq!(sorted, shuffled(7));
        assert_ne!(sorted, shuffled(8));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
