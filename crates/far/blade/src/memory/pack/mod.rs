//! Packed memory: a blade that lends more than it has (HPL-2011-31: content-based page sharing, on
//! the blade; Lim 8.3). What was not used for a while is kept as nothing if it is zero, as a word
//! if that fills it, once if others of its domain are equal, and compressed.
//!
//! Clients notice nothing but time. The life of a cold page: written by a client to its place in
//! memory ([`packing::write`]); passed by the packer twice without being used ([`pages`]); packed
//! ([`codec`]) into a frame that equal pages share ([`frames`]), which lies in a slot of its size
//! ([`slabs`]), and its memory given back ([`packer`]). It stays packed when it is read: the copy
//! that is sent is unpacked ([`packing::read`]). It is in memory again when it is written.

mod codec;
mod counters;
mod frames;
mod packer;
mod packing;
mod pages;
#[cfg(test)]
mod pages_tests;
mod slabs;

pub use counters::PackStat;
pub(crate) use frames::Domain;
pub(crate) use packer::Packer;
pub(super) use packing::{PackedSuperpage, Packing, read, write};

use crate::config::PackConfig;
use std::io;
use std::sync::Arc;

/// Opens memory for `superpages`, which take at most `memory_bytes`. Nothing is packed before the
/// packer runs.
///
/// # Errors
/// There is too little memory, or the system's.
pub(super) fn open(
    config: &PackConfig,
    superpages: u32,
    memory_bytes: u64,
) -> io::Result<(Arc<Packing>, Packer)> {
    let packing = Arc::new(Packing::new(superpages, memory_bytes)?);
    Ok((Arc::clone(&packing), Packer::new(packing, config.cold)))
}
