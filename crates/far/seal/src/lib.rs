//! Seals pages before they leave this host: encrypts them, and makes a tag without which nothing
//! is taken for them again.
//!
//! Pure: the caller keeps tags and versions, and no blade ever sees a key. A page is bound to the
//! key of its segment, to its number there and to its version, so a page that comes back flipped,
//! swapped for another, out of date, zeroed, from another segment or from another run is refused.
//!
//! Invariant, the caller's: no version of a page is sealed twice under one key.

mod cipher;
mod key;
mod policy;

pub use crate::cipher::Cipher;
pub use crate::key::{KEY_BYTES, NoKey, SealKey};
pub use crate::policy::SealPolicy;

/// Bytes of a tag. A forged page passes with a probability of 2^-128.
pub const TAG_BYTES: usize = 16;

/// What a sealed page is recognized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(pub [u8; TAG_BYTES]);

/// Which sealing of which page: never used twice under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageVersion {
    /// The page's number in its segment.
    pub page: u32,
    /// How often it was sealed.
    pub version: u64,
}

/// The bytes are not those that were sealed; they are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page is not what was stored: its seal does not fit")]
pub struct Broken;
