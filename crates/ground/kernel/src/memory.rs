//! Memory that is mapped, and files that lie in memory.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A mapping, given back when this value is dropped.
///
/// It tells where the memory is and makes no reference into it: who reads and writes there, and
/// when, is for its owner to say.
#[derive(Debug)]
pub struct MappedMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length, which do not change; nothing here reads or writes there.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Private memory that reads as zeros. No memory is behind a page before it is touched.
    pub fn anonymous(bytes: usize) -> Result<Self, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, flags) }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// The `bytes` of a file from `offset` on, a multiple of a page, shared with all who map them.
    pub fn shared(file: impl AsFd, offset: u64, bytes: usize) -> Result<Self, Errno> {
        Self::of_file(file, offset, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// As [`shared`](Self::shared), only to be read.
    pub fn readable(file: impl AsFd, offset: u64, bytes: usize) -> Result<Self, Errno> {
        Self::of_file(file, offset, bytes, ProtFlags::READ)
    }

    fn of_file(
        file: impl AsFd,
        offset: u64,
        bytes: usize,
        access: ProtFlags,
    ) -> Result<Self, Errno> {
        // In a shared mapping NORESERVE counts for huge pages only: their file has them already.
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, file, offset) }?;
        Ok(Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, bytes })
    }

    /// The address of the first byte.
    #[inline]
    pub const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes are mapped.
    #[inline]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Advises the kernel on a range of the bytes, which begins at a page.
    ///
    /// # Safety
    /// An advice can take contents away: no reference to them may be alive then.
    ///
    /// # Panics
    /// The range does not lie inside.
    pub unsafe fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Errno> {
        assert!(range.start <= range.end && range.end <= self.bytes, "a range of this mapping");
        let start = self.start.as_ptr().wrapping_add(range.start);
        // SAFETY: the range lies in our own mapping; the caller vouches for its contents.
        unsafe { rustix::mm::madvise(start.cast(), range.len(), advice) }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by this value, whose owner lets nobody use the memory for longer.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping cannot fail");
    }
}

/// A file in memory of so many bytes, zeros. Its size can change no more.
pub fn memfd_of(name: &str, bytes: u64) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// True for a file or folder of a file system that is memory: a tmpfs or ramfs.
pub fn is_in_memory(file: impl AsFd) -> Result<bool, Errno> {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    // The type of this field differs between machines.
    #[allow(clippy::unnecessary_cast, clippy::cast_lossless)]
    let kind = rustix::fs::fstatfs(file)?.f_type as i64;
    Ok(kind == TMPFS || kind == RAMFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 2 * 4096;

    fn byte(memory: &MappedMemory, at: usize) -> *mut u8 {
        assert!(at < memory.bytes());
        memory.start().as_ptr().wrapping_add(at)
    }

    #[test]
    fn two_mappings_of_a_file_are_the_same_memory() {
        let file = memfd_of("farpool-test", BYTES as u64).expect("a file");
        let one = MappedMemory::shared(&file, 0, BYTES).expect("mapped");
        let other = MappedMemory::readable(&file, 4096, 4096).expect("mapped");
        // SAFETY: both bytes lie inside mappings that are alive, and no reference is made.
        unsafe {
            byte(&one, 5000).write(7);
            assert_eq!(byte(&other, 5000 - 4096).read(), 7);
        }
        assert!(MappedMemory::shared(&file, 1, 4096).is_err(), "no multiple of a page");
    }

    #[test]
    fn what_is_memory_is_told_from_what_is_not() {
        let file = memfd_of("farpool-test", BYTES as u64).expect("a file");
        assert_eq!(is_in_memory(&file), Ok(true));
        let other = std::fs::File::open("/proc/self/stat").expect("a file that is no memory");
        assert_eq!(is_in_memory(&other), Ok(false));
    }

    #[test]
    fn a_file_keeps_its_size() {
        let file = memfd_of("farpool-test", BYTES as u64).expect("a file");
        for bytes in [0, 2 * BYTES as u64] {
            assert_eq!(rustix::fs::ftruncate(&file, bytes), Err(Errno::PERM));
        }
        assert!(rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).is_err(), "nor its seals");
    }

    #[test]
    fn what_is_given_up_reads_as_zero() {
        let memory = MappedMemory::anonymous(BYTES).expect("mapped");
        // SAFETY: the bytes lie inside the mapping, and no reference is made.
        unsafe {
            byte(&memory, 0).write(1);
            byte(&memory, 4096).write(2);
            memory.advise(4096..BYTES, Advice::LinuxDontNeed).expect("given up");
            assert_eq!([byte(&memory, 0).read(), byte(&memory, 4096).read()], [1, 0]);
        }
    }

    #[test]
    #[should_panic(expected = "a range of this mapping")]
    fn advice_on_other_memory_is_refused() {
        let memory = MappedMemory::anonymous(BYTES).expect("mapped");
        // SAFETY: nobody refers to the contents.
        let _ = unsafe { memory.advise(4096..BYTES + 1, Advice::LinuxDontNeed) };
    }
}
