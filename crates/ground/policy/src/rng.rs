//! The one source of randomness: SplitMix64, seeded, so that every run is reproducible.

use farpool_units::exactly;

/// A small seeded generator; not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator that always gives the same numbers for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..bound`, almost uniform (bias below `bound` / 2^32); 0 if `bound` is
    /// 0.
    pub fn below(&mut self, bound: u32) -> u32 {
        let scaled = ((self.next_u64() >> 32) * u64::from(bound)) >> 32;
        exactly(scaled)
    }
}
