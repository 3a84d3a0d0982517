//! A key with its hash, by which requests are distributed and looked up, and the seed of that hash.
//!
//! The lower half of a hash decides which shard owns the key (`farpool_keyvault::owner`), which
//! every KeyVault client has to compute, so it has no seed. The upper half, by which the index
//! looks the key up, has one: whoever may name keys must not be able to choose many with one place
//! in the index. Flash holds hashes, so a flash file keeps the seed.

use farpool_keyvault::owner::hash_key;
use siphasher::sip::SipHasher13;

/// The seed of the upper half of hashes: the key of SipHash-1-3. A secret, drawn at random for each
/// process or flash file.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct HashSeed([u8; Self::BYTES]);

impl HashSeed {
    pub const BYTES: usize = 16;

    #[must_use]
    pub const fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    #[must_use]
    pub const fn bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The hash of a key.
    #[inline]
    #[must_use]
    pub fn hash_of(&self, key: &[u8]) -> u64 {
        let seeded = SipHasher13::new_with_key(&self.0).hash(key);
        seeded & (u64::MAX << 32) | hash_key(key) & u64::from(u32::MAX)
    }
}

impl std::fmt::Debug for HashSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Whoever reads a log must not learn it.
        f.write_str("HashSeed(..)")
    }
}

/// A key and its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HashedKey<'a> {
    pub key: &'a [u8],
    pub hash: u64,
}

impl<'a> HashedKey<'a> {
    #[inline]
    #[must_use]
    pub fn of(key: &'a [u8], seed: HashSeed) -> Self {
        Self { key, hash: seed.hash_of(key) }
    }
}

#[cfg(test)]
mod tests {
    use farpool_keyvault::owner::shard_of;

    use super::*;

    #[test]
    fn the_seed_changes_the_place_in_the_index_and_not_the_shard() {
        let (one, other) = (HashSeed::default(), HashSeed::new([7; 16]));
        let same = |key: &u32| {
            let key = key.to_le_bytes();
            assert_eq!(shard_of(one.hash_of(&key), 7), shard_of(hash_key(&key), 7));
            assert_eq!(shard_of(one.hash_of(&key), 7), shard_of(other.hash_of(&key), 7));
            one.hash_of(&key) >> 32 == other.hash_of(&key) >> 32
        };
        assert_eq!((0..1000u32).filter(same).count(), 0);
        // A vector of SipHash-1-3: files on flash depend on it.
        let bytes: Vec<u8> = (0..16).collect();
        let seed = HashSeed::new(bytes.try_into().expect("16 bytes"));
        assert_eq!(seed.hash_of(b"") >> 32, 0xabac_0158);
    }
}
