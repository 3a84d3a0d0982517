//! Whole, page-aligned pages of memory that are lent to a device and returned.

use farpool_kernel::MappedMemory;
use farpool_units::PAGE_BYTES;

/// Whole pages of memory, zero at first, that this value alone refers to.
#[derive(Debug)]
pub struct Pages(MappedMemory);

impl Pages {
    /// Allocates `pages` pages, at least one. None if the kernel refuses.
    #[must_use]
    pub fn new(pages: usize) -> Option<Self> {
        MappedMemory::anonymous(pages.max(1) * PAGE_BYTES).ok().map(Self)
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, and nobody else knows of it; a device writes there only
        // while the ring owns this value (see `Ring::lent`).
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr(), self.0.bytes()) }
    }

    /// Their bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.0.start().as_ptr(), self.0.bytes()) }
    }

    /// How many pages they are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.bytes() / PAGE_BYTES
    }

    pub(crate) fn start(&self) -> *const u8 {
        self.0.start().as_ptr()
    }

    pub(crate) fn start_mut(&mut self) -> *mut u8 {
        self.0.start().as_ptr()
    }
}
