//! A key with its hash, by which requests are distributed and looked up.

use farpool_keyvault::owner::hash_key;

/// A key and its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HashedKey<'a> {
    pub key: &'a [u8],
    pub hash: u64,
}

impl<'a> HashedKey<'a> {
    #[inline]
    #[must_use]
    pub fn of(key: &'a [u8]) -> Self {
        Self { key, hash: hash_key(key) }
    }
}
