//! Memory straight from the kernel: zeroed, in whole pages, given back at once when dropped.
//!
//! The allocator is not used for what is large, because what it keeps would be memory that the
//! limit does not see.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// An anonymous private mapping; no memory is behind a page before it is written.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is private to this value; whoever owns the value owns the memory.
unsafe impl Send for Mapping {}
// SAFETY: shared access only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` of zeros. None when the kernel refuses.
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .ok()?;
        Some(Self { address: NonNull::new(address.cast())?, bytes })
    }

    /// Asks for huge pages: far fewer misses of the address translation. A wish, not a promise.
    pub fn wish_huge_pages(&mut self) {
        // SAFETY: advice on our own mapping; it changes how memory is backed, never what it holds.
        let _ = unsafe { madvise(self.address.as_ptr().cast(), self.bytes, Advice::LinuxHugepage) };
    }

    /// Takes that wish back: what is touched from now on gets small pages, huge ones that are there stay.
    pub fn forgo_huge_pages(&mut self) {
        // SAFETY: as above.
        let _ =
            unsafe { madvise(self.address.as_ptr().cast(), self.bytes, Advice::LinuxNoHugepage) };
    }

    /// The same memory as words.
    #[inline]
    #[must_use]
    pub fn words(&self) -> &[u64] {
        // SAFETY: the mapping begins at a page, any bits are a u64, and `bytes / 8` words lie inside.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.bytes / 8) }
    }

    /// The same memory as words.
    #[inline]
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.bytes / 8) }
    }

    /// Gives the memory behind `range` back; it reads as zeros afterwards.
    pub fn release(&mut self, range: std::ops::Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        // SAFETY: the range lies in our own mapping, and `&mut self` says nobody reads it now.
        let _ = unsafe {
            madvise(
                self.address.as_ptr().add(range.start).cast(),
                range.len(),
                Advice::LinuxDontNeed,
            )
        };
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable for `bytes` as long as this value lives.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.bytes) };
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
