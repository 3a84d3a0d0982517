//! Memory straight from the kernel: zeroed, in whole pages, returned at once when dropped.
//!
//! The allocator is not used for large memory, because what it keeps would be outside the limit.
//!
//! Memory that other processes may read is a memory file ([`Mapping::readable_by_others`]). It is
//! not sealed against future writers: the kernel refuses to release pages of such a file
//! (`MADV_REMOVE` is EPERM). Others cannot write because they get a read-only descriptor, and the
//! file's mode prevents them from opening it anew.

use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsRawFd, OwnedFd};

use farpool_kernel::{MappedMemory, memfd_of};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Only the owner, who has it already, may open the file of shared memory again, and only to read.
const FILE_MODE: Mode = Mode::RUSR;

/// A mapping that only this process writes; a page has no memory before it is first written.
#[derive(Debug)]
pub struct Mapping {
    memory: MappedMemory,
    /// A file in memory, which other processes may read.
    is_shared: bool,
}

impl Mapping {
    /// Maps `bytes` of zeros. None if the kernel refuses.
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let memory = MappedMemory::anonymous(bytes.max(1)).ok()?;
        Some(Self { memory, is_shared: false })
    }

    /// Maps `bytes` of zeros that others can map for reading, with the returned descriptor. The
    /// size is fixed.
    pub fn readable_by_others(bytes: usize) -> Result<(Self, OwnedFd), Errno> {
        let bytes = bytes.max(1);
        let file = memfd_of("farpool-kv-items", bytes as u64)?;
        rustix::fs::fchmod(&file, FILE_MODE)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reader = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // The file is new, its size is sealed, and the descriptor that can write is closed below:
        // nobody but this mapping ever changes it.
        let memory = MappedMemory::shared(&file, 0, bytes)?;
        Ok((Self { memory, is_shared: true }, reader))
    }

    /// Asks for huge pages, which cause far fewer TLB misses. A hint, not a guarantee.
    pub fn wish_huge_pages(&mut self, range: Range<usize>) {
        self.advise(range, Advice::LinuxHugepage);
    }

    /// Asks for no huge pages: memory used and released in small pieces must not take whole ones.
    pub fn refuse_huge_pages(&mut self, range: Range<usize>) {
        self.advise(range, Advice::LinuxNoHugepage);
    }

    fn advise(&mut self, range: Range<usize>, advice: Advice) {
        // SAFETY: `&mut self` says nobody reads the range now.
        // Advice changes how memory is backed; where it takes memory away (`release`), zeros are
        // what the caller asked for.
        let _ = unsafe { self.memory.advise(range, advice) };
    }

    /// Withdraws the request for huge pages: newly touched memory gets small pages, existing huge
    /// ones stay.
    pub fn forgo_huge_pages(&mut self) {
        self.advise(0..self.memory.bytes(), Advice::LinuxNoHugepage);
    }

    #[inline]
    const fn start(&self) -> *mut u8 {
        self.memory.start().as_ptr()
    }

    /// The same memory as words.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &[u64] {
        // SAFETY: the mapping begins at a page, any bits are a u64, and `bytes / 8` words lie
        // inside.
        unsafe { std::slice::from_raw_parts(self.start().cast(), self.memory.bytes() / 8) }
    }

    /// The same memory as words.
    #[inline]
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start().cast(), self.memory.bytes() / 8) }
    }

    /// Returns the memory of `range` to the kernel; it then reads as zeros. The range is whole
    /// pages.
    pub fn release(&mut self, range: Range<usize>) {
        // A shared file keeps pages that are only marked as not needed; they have to be punched
        // out.
        let advice = if self.is_shared { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        self.advise(range, advice);
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `bytes` as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.start(), self.memory.bytes()) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.memory.bytes()) }
    }
}

/// Tells the processor that `bytes[at..]` will be read soon. Harmless for any `at`.
#[inline]
pub fn prefetch(bytes: &[u8], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at).cast::<i8>()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, at);
}
