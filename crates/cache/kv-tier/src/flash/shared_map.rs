//! A part of a file as memory: what is written there survives the process, without a system call.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;

use farpool_kernel::MappedMemory;
use rustix::mm::{Advice, mlock};

/// A shared mapping of a file, of which this process is the only user (the file is locked).
#[derive(Debug)]
pub(super) struct SharedMap(MappedMemory);

impl SharedMap {
    /// Maps `bytes` of the file from `offset`, a multiple of a page. The file must be that long.
    pub(super) fn new(file: impl AsFd, offset: u64, bytes: usize) -> rustix::io::Result<Self> {
        // The file's lock keeps other servers away; whoever cuts the file short meanwhile has the
        // process killed (SIGBUS), not misled.
        let map = Self(MappedMemory::shared(file, offset, bytes)?);
        map.fetch()?;
        Ok(map)
    }

    /// Loads all of it, and locks it in memory if this user may lock that much: touching a page
    /// that a device cannot return (the flash's or swap) kills the process, and one that it returns
    /// late makes every client wait.
    fn fetch(&self) -> rustix::io::Result<()> {
        // SAFETY: locking our own mapping changes where its pages are, never what they hold.
        let locked = unsafe { mlock(self.0.start().as_ptr().cast(), self.0.bytes()) };
        locked.or_else(|errno| {
            tracing::debug!(%errno, bytes = self.0.bytes(), "flash book-keeping is not locked");
            // SAFETY: as above.
            unsafe { self.0.advise(0..self.0.bytes(), Advice::LinuxPopulateRead) }
        })
    }
}

impl Deref for SharedMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `bytes` as long as this value lives, and nothing else
        // writes to it.
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr(), self.0.bytes()) }
    }
}

impl DerefMut for SharedMap {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), self.0.bytes()) }
    }
}
