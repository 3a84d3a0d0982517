//! The few unsafe calls of this crate: plain anonymous memory and volatile access to it.

use crate::BenchError;
use std::io;
use std::ptr::NonNull;

use farpool_units::{PAGE_BYTES, at_most};

/// Anonymous private memory of this process, as any program maps it; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; sharing it between threads is governed by the references that
// its methods hand out, as for a Vec.
unsafe impl Send for Mapping {}
// SAFETY: as above; through a shared reference it can only be read or accessed atomically.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` bytes, rounded up to whole pages, all zero.
    pub(crate) fn new(bytes: usize) -> Result<Self, BenchError> {
        let len = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        // SAFETY: a fresh anonymous mapping at an address the kernel picks touches nothing of ours.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { start, len }),
            _ => Err(BenchError::os(format!("map {len} bytes"))(io::Error::last_os_error())),
        }
    }

    /// Maps memory without huge pages, so that every page faults by itself.
    pub(crate) fn small_pages(bytes: usize) -> Result<Self, BenchError> {
        let mapping = Self::new(bytes)?;
        // SAFETY: the range is exactly our own mapping, and the advice changes no contents.
        unsafe { libc::madvise(mapping.start.as_ptr().cast(), mapping.len, libc::MADV_NOHUGEPAGE) };
        Ok(mapping)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn pages(&self) -> usize {
        self.len / PAGE_BYTES
    }

    /// Address of the first byte, for system calls.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().addr()
    }

    pub(crate) fn words(&self) -> &[u64] {
        // SAFETY: the mapping is page aligned, initialised (zero) and lives as long as `self`;
        // while this reference lives no exclusive one can.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / 8) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as in `words`, and `&mut self` makes the reference exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / 8) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `words`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `words_mut`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Returns the memory as words that several threads may write at once.
    pub(crate) fn atomic_words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: AtomicU64 has the layout of u64, the memory is aligned and initialised, and as
        // long as this shared reference lives `words_mut` cannot be borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / 8) }
    }

    /// Reads one word of page `page` so that the compiler cannot leave it out.
    pub(crate) fn touch(&self, page: usize) -> u64 {
        let word = &self.words()[page * PAGE_BYTES / 8];
        // SAFETY: the pointer comes from a live reference.
        unsafe { std::ptr::from_ref(word).read_volatile() }
    }

    /// Returns where page `page` starts, for code that fills it through a pointer.
    pub(crate) fn page_pointer(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages(), "a page of this mapping");
        self.start.as_ptr().wrapping_add(page * PAGE_BYTES)
    }

    /// Asks for the pages `pages` to be moved out of local memory, contents kept.
    pub(crate) fn page_out(&self, pages: std::ops::Range<usize>) -> io::Result<()> {
        let (start, len) = self.byte_range(pages);
        // SAFETY: the range lies in our own mapping, and the advice keeps the contents.
        let result = unsafe { libc::madvise(start, len, libc::MADV_PAGEOUT) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the pages `pages` up: they read as zeros afterwards. Errors if the system refuses.
    pub(crate) fn give_up(&mut self, pages: std::ops::Range<usize>) -> io::Result<()> {
        let (start, len) = self.byte_range(pages);
        // SAFETY: the range lies in our own mapping, and the exclusive reference means that nothing
        // else reads it.
        let result = unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns how many of the pages `pages` are in local memory.
    pub(crate) fn resident_pages(&self, pages: std::ops::Range<usize>) -> io::Result<usize> {
        let mut resident = vec![0u8; pages.len()];
        let (start, len) = self.byte_range(pages);
        // SAFETY: the range lies in our own mapping, and the vector has a byte for each of its
        // pages.
        let result = unsafe { libc::mincore(start, len, resident.as_mut_ptr()) };
        if result == 0 {
            Ok(resident.iter().filter(|byte| **byte & 1 == 1).count())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    fn byte_range(&self, pages: std::ops::Range<usize>) -> (*mut libc::c_void, usize) {
        assert!(pages.start <= pages.end && pages.end <= self.pages(), "pages of this mapping");
        let start = self.start.as_ptr().wrapping_add(pages.start * PAGE_BYTES);
        (start.cast(), pages.len() * PAGE_BYTES)
    }

    /// Gives all pages up: they read as zeros (or fault) afterwards.
    pub(crate) fn discard(&mut self) {
        // SAFETY: the range is exactly our own mapping and `&mut self` means that nothing else
        // reads it.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly our own mapping and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Returns the peak resident memory of this process in bytes.
pub(crate) fn peak_resident_bytes() -> u64 {
    // SAFETY: a zeroed rusage is valid and the call fills it in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    at_most::<u64, _>(usage.ru_maxrss) * 1024
}

/// Keeps the calling thread on `core`, modulo the number of cores.
pub(crate) fn pin_to_core(core: usize) {
    let _ = farpool_kernel::pin_thread(core % cores());
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
