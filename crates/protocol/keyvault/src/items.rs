//! The memory that holds the items of one shard, as the server's clients map it: read-only.

use std::os::fd::AsFd;

use farpool_kernel::MappedMemory;
use rustix::fs::SealFlags;
use rustix::io::Errno;

/// A shard's item memory.
#[derive(Debug)]
pub struct ItemMemory(MappedMemory);

impl ItemMemory {
    /// Maps `bytes` of a file that a server sent. Refuses one that is shorter or may shrink: a read
    /// behind its end would kill the process.
    pub fn map(file: impl AsFd, bytes: u64) -> Result<Self, Errno> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let length = u64::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::INVAL)?;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::INVAL)?;
        let is_whole = seals.contains(SealFlags::SHRINK) && length >= bytes as u64;
        if !is_whole || bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(Errno::INVAL);
        }
        Ok(Self(MappedMemory::readable(&file, 0, bytes)?))
    }

    /// True if `bytes` bytes from `at` on are inside.
    #[must_use]
    pub const fn holds(&self, at: u64, bytes: u64) -> bool {
        match at.checked_add(bytes) {
            Some(end) => end <= self.0.bytes() as u64,
            None => false,
        }
    }

    /// Returns the bytes of a leased value; None if they are not all inside.
    #[must_use]
    pub fn value(&self, at: u64, bytes: u64) -> Option<&[u8]> {
        if !self.holds(at, bytes) {
            return None;
        }
        let (at, bytes) = (usize::try_from(at).ok()?, usize::try_from(bytes).ok()?);
        // SAFETY: inside the mapping (checked above), which lives as long as `self`, and whose file
        // cannot shrink. The server does not change these bytes while they are leased: that is what
        // a lease is. One that breaks its word can show bytes that change, as it could have sent
        // others; any bytes are bytes, and nothing is read outside.
        Some(unsafe { std::slice::from_raw_parts(self.0.start().as_ptr().add(at), bytes) })
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn only_what_is_there_and_stays_is_mapped_and_read() {
        let make = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create("test", flags).unwrap();
            ftruncate(&file, 8192).unwrap();
            rustix::io::pwrite(&file, b"value", 5000).unwrap();
            file
        };
        let file = make();
        assert_eq!(ItemMemory::map(&file, 8192).err(), Some(Errno::INVAL), "it could shrink");
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        for bytes in [0, 8193, u64::MAX, 1 << 63] {
            assert!(ItemMemory::map(&file, bytes).is_err(), "{bytes}");
        }
        let memory = ItemMemory::map(&file, 8192).unwrap();
        assert_eq!(memory.value(5000, 5), Some(&b"value"[..]));
        assert_eq!(memory.value(8192, 0), Some(&b""[..]));
        for (at, bytes) in
            [(8192, 1), (8190, 3), (0, 8193), (u64::MAX, 1), (1, u64::MAX), (9000, 0)]
        {
            assert_eq!(memory.value(at, bytes), None, "{at} {bytes}");
        }
    }
}
