//! Memory straight from the kernel: zeroed, in whole pages, given back at once when dropped.
//!
//! The allocator is not used for what is large, because what it keeps would be memory that the
//! limit does not see.
//!
//! Memory that other processes read is a file in memory ([`Mapping::readable_by_others`]). It is
//! not sealed against future writers: the kernel refuses to take pages out of such a file
//! (`MADV_REMOVE` is EPERM). Other processes cannot write because they get a read-only descriptor,
//! and a mode with which no process can open the file anew.

use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsRawFd, OwnedFd};

use farpool_kernel::{MappedMemory, memfd_of};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Only the owner, who has it already, may open the file of shared memory again, and only to read.
const FILE_MODE: Mode = Mode::RUSR;

/// A mapping that this process alone writes; no memory is behind a page before it is written.
#[derive(Debug)]
pub struct Mapping {
    memory: MappedMemory,
    /// A file in memory, which other processes may read.
    is_shared: bool,
}

impl Mapping {
    /// `bytes` of zeros. None when the kernel refuses.
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let memory = MappedMemory::anonymous(bytes.max(1)).ok()?;
        Some(Self { memory, is_shared: false })
    }

    /// `bytes` of zeros that others can map with the descriptor that comes back, to read them. The
    /// size stays.
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

    /// Asks for huge pages: far fewer misses of the address translation. A wish, not a promise.
    pub fn wish_huge_pages(&mut self, range: Range<usize>) {
        self.advise(range, Advice::LinuxHugepage);
    }

    /// Asks for none: what is taken and given back in small pieces must not take whole ones.
    pub fn refuse_huge_pages(&mut self, range: Range<usize>) {
        self.advise(range, Advice::LinuxNoHugepage);
    }

    fn advise(&mut self, range: Range<usize>, advice: Advice) {
        // SAFETY: `&mut self` says nobody reads the range now.
        // Advice changes how memory is backed; where it takes memory away (`release`), zeros are
        // what the caller asked for.
        let _ = unsafe { self.memory.advise(range, advice) };
    }

    /// Takes that wish back: what is touched from now on gets small pages, huge ones that are there
    /// stay.
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

    /// Gives the memory behind `range` back; it reads as zeros afterwards. The range is of whole
    /// pages.
    pub fn release(&mut self, range: Range<usize>) {
        // A shared file keeps what is only not needed; it has to be cut out.
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
