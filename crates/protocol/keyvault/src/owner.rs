//! Which shard owns a key: servers and clients must agree, and items on flash lie in their shard's
//! part of the file, so neither function may ever change.

use twox_hash::XxHash3_64;

/// Returns the hash of a key: XXH3, 64 bits, without a seed.
#[inline]
#[must_use]
pub fn hash_key(key: &[u8]) -> u64 {
    XxHash3_64::oneshot(key)
}

/// Returns the shard of `shards` that owns a key with this hash; the lower half of the hash
/// decides.
#[inline]
#[must_use]
pub const fn shard_of(hash: u64, shards: usize) -> usize {
    (((hash & 0xffff_ffff) * shards as u64) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_documentation() {
        assert_eq!(hash_key(b""), 0x2d06_8005_38d3_94c2);
        let shares = (0..40_000u32).fold([0u32; 4], |mut shares, key| {
            shares[shard_of(hash_key(&key.to_le_bytes()), 4)] += 1;
            shares
        });
        assert!(shares.iter().all(|share| (9_500..10_500).contains(share)), "{shares:?}");
        assert_eq!(shard_of(u64::MAX, 7), 6);
    }
}
