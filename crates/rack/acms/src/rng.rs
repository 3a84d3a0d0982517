//! The crate's sources of randomness, from one seed that the caller gives, so that a run can be
//! repeated: SplitMix64 for choices and delays, ChaCha20 for the keys and epochs of grants.
//!
//! Invariant: an observer of all choices of a node and of all its keys and epochs but one cannot
//! compute that one. The two generators share no byte of the seed, because SplitMix64 reveals its
//! state.

use std::convert::Infallible;

use chacha20::ChaCha20Rng;
use farpool_units::exactly;
use rand::rand_core::{Rng as _, SeedableRng as _, TryRng};

use crate::ids::{Epoch, GrantKey};

/// Bytes of the seed that are used for choices.
const CHOICES_BYTES: usize = 8;

/// A small seeded generator.
#[derive(Clone)]
pub struct Rng(u64);

impl std::fmt::Debug for Rng {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rng(..)")
    }
}

impl Rng {
    /// Creates a generator; the same seed gives the same numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The generator of a node's choices.
    pub(crate) fn of_seed(seed: &[u8; 32]) -> Self {
        let bytes = seed.iter().take(CHOICES_BYTES).rev();
        Self(bytes.fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let scaled = (u128::from(self.bits()) * u128::from(bound)) >> 64;
        exactly(scaled)
    }

    /// An index of a list of `len`; 0 when it is empty.
    pub fn index(&mut self, len: usize) -> usize {
        exactly(self.below(len as u64))
    }
}

impl TryRng for Rng {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok(exactly(self.bits() >> 32))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(self.bits())
    }

    fn try_fill_bytes(&mut self, dst: &mut [u8]) -> Result<(), Infallible> {
        for chunk in dst.chunks_mut(8) {
            let bytes = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
        Ok(())
    }
}

/// A node's generator of keys and epochs.
pub(crate) struct Keys(ChaCha20Rng);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(..)")
    }
}

impl Keys {
    pub(crate) fn of_seed(seed: &[u8; 32]) -> Self {
        let mut secret = *seed;
        secret[..CHOICES_BYTES].fill(0);
        Self(ChaCha20Rng::from_seed(secret))
    }

    pub(crate) fn key(&mut self) -> GrantKey {
        GrantKey(u128::from(self.0.next_u64()) << 64 | u128::from(self.0.next_u64()))
    }

    pub(crate) fn epoch(&mut self) -> Epoch {
        // 0 stands for no grant.
        Epoch(self.0.next_u64().max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_and_keys_have_no_byte_of_the_seed_in_common() {
        let zero = [0; 32];
        let (choice, key) = (Rng::of_seed(&zero).bits(), Keys::of_seed(&zero).key());
        for at in 0..zero.len() {
            let mut seed = zero;
            seed[at] = 1;
            let same_choice = Rng::of_seed(&seed).bits() == choice;
            let same_key = Keys::of_seed(&seed).key() == key;
            assert_eq!((same_choice, same_key), (at >= 8, at < 8), "byte {at}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_keys_each_of_its_own() {
        let keys = || {
            let mut keys = Keys::of_seed(&[7; 32]);
            (0..1000).map(|_| keys.key()).collect::<Vec<_>>()
        };
        assert_eq!(keys(), keys());
        let different: std::collections::BTreeSet<_> = keys().into_iter().collect();
        assert_eq!(different.len(), 1000);
    }
}
