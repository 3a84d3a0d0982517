//! The secret of one segment.

use farpool_kernel::fill_random;
use farpool_units::PAGE_BYTES;
use zeroize::Zeroize;

use crate::cipher::{self, Cipher};
use crate::{Broken, PageVersion, Tag};

/// Bytes of a key, for either cipher.
pub const KEY_BYTES: usize = 32;
/// Bytes of an encoded key: the cipher's number, then the key.
const ENCODED_BYTES: usize = 1 + KEY_BYTES;

/// The key under which the pages of one segment are sealed. It is random, so every segment has its
/// own, also that of a child of fork; it never leaves the host and is overwritten in the end.
#[derive(Clone)]
pub struct SealKey {
    cipher: Cipher,
    key: [u8; KEY_BYTES],
}

/// The kernel gave no random numbers for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel gave no random numbers for a key; try again")]
pub struct NoKey;

impl SealKey {
    /// A new key for this processor's cipher.
    ///
    /// # Errors
    /// The kernel has no random numbers yet, which ends at the latest with its start.
    pub fn fresh() -> Result<SealKey, NoKey> {
        Self::fresh_for(Cipher::for_this_processor())
    }

    /// A new key for a cipher.
    ///
    /// # Errors
    /// As for [`SealKey::fresh`].
    pub fn fresh_for(cipher: Cipher) -> Result<SealKey, NoKey> {
        let mut key = [0; KEY_BYTES];
        fill_random(&mut key).map_err(|_| NoKey)?;
        Ok(SealKey { cipher, key })
    }

    /// Encodes it, for a process on this host that shares the segment.
    pub fn to_bytes(&self) -> [u8; ENCODED_BYTES] {
        let mut bytes = [0; ENCODED_BYTES];
        bytes[0] = self.cipher as u8;
        bytes[1..].copy_from_slice(&self.key);
        bytes
    }

    /// The inverse of [`SealKey::to_bytes`]. None: these bytes are no key.
    pub fn from_bytes(bytes: &[u8; ENCODED_BYTES]) -> Option<SealKey> {
        let (number, key) = bytes.split_first()?;
        Some(SealKey { cipher: Cipher::from_number(*number)?, key: key.try_into().ok()? })
    }

    /// Encrypts a page in place. Returns the tag with which it can be opened.
    pub fn seal(&self, at: PageVersion, page: &mut [u8; PAGE_BYTES]) -> Tag {
        cipher::seal(self.cipher, &self.key, at, page)
    }

    /// Decrypts a page in place.
    ///
    /// # Errors
    /// It is not what was sealed; its bytes are then of no use.
    pub fn open(
        &self,
        at: PageVersion,
        page: &mut [u8; PAGE_BYTES],
        tag: &Tag,
    ) -> Result<(), Broken> {
        cipher::open(self.cipher, &self.key, at, page, tag)
    }
}

impl Drop for SealKey {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// Does not show the key.
impl std::fmt::Debug for SealKey {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("SealKey").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}
