//! The frame's checksums: CRC-32 (IEEE 802.3, reflected, the one of zlib and Ethernet), kept
//! streaming so that scattered pages need no copy.
//!
//! Chosen by speed and strength. A 4 KiB page costs, on a 2026 x86-64 server core: crc32fast 0.19
//! us, xxh3 0.21, crc32c 0.23, memcpy 0.15. A CRC finds every burst of up to 32 flipped bits, which
//! a hash finds only with probability. crates/far/blade/benches/throughput.rs measures what is
//! left of a socket's speed with it.

use crc32fast::Hasher;

/// Running checksum over the pages of one frame, in wire order.
#[derive(Clone, Debug, Default)]
pub struct PagesChecksum(Hasher);

impl PagesChecksum {
    /// Creates a checksum over no bytes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next bytes; slices may be cut anywhere.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the value for `pages_checksum` in the header. Zero over no bytes.
    pub fn value(&self) -> u32 {
        self.0.clone().finalize()
    }

    /// Returns the checksum of one contiguous run of pages.
    pub fn of(bytes: &[u8]) -> u32 {
        crc32fast::hash(bytes)
    }
}

/// Returns the checksum over the header's bytes before it.
pub(crate) fn header_checksum(header_front: &[u8]) -> u32 {
    crc32fast::hash(header_front)
}

/// Returns the checksum over the meta and the header before it: a meta belongs to its header alone.
pub(crate) fn meta_checksum(header: &[u8], meta: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(header);
    hasher.update(meta);
    hasher.finalize()
}
