//! A part of a file as memory: what is written there survives the process, without a system call.

use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, munmap};

/// A shared mapping of a file, of which this process is the only user (the file is locked).
#[derive(Debug)]
pub(super) struct SharedMap {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone; the owner of the value owns the memory.
unsafe impl Send for SharedMap {}

impl SharedMap {
    /// The `bytes` of the file from `offset`, a multiple of a page, on. The file must be that long.
    pub(super) fn new(file: impl AsFd, offset: u64, bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing. The file's
        // lock keeps other servers away; if another program truncates the file the process is
        // killed (SIGBUS), not misled.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                offset,
            )
        }?;
        let address = NonNull::new(address.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        let map = Self { address, bytes };
        map.fetch()?;
        Ok(map)
    }

    /// Loads all of it into memory, and locks it if this user may lock that much: touching a page
    /// that a device cannot give back (of the flash, or of swap) ends the process, and one that it
    /// gives back late delays every client.
    fn fetch(&self) -> rustix::io::Result<()> {
        // SAFETY: locking our own mapping changes where its pages are, never what they hold.
        let locked = unsafe { mlock(self.address.as_ptr().cast(), self.bytes) };
        locked.or_else(|errno| {
            tracing::debug!(%errno, bytes = self.bytes, "flash book-keeping is not locked");
            // SAFETY: as above.
            unsafe { madvise(self.address.as_ptr().cast(), self.bytes, Advice::LinuxPopulateRead) }
        })
    }
}

impl Deref for SharedMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `bytes` as long as this value lives, and nothing else
        // writes to it.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }
}

impl DerefMut for SharedMap {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}
