//! Whole, page-aligned pages of memory that are lent to a medium and returned.

use farpool_units::PAGE_BYTES;

use farpool_kv_store::mapping::Mapping;

/// Whole pages of memory.
#[derive(Debug)]
pub struct Pages(Mapping);

impl Pages {
    /// Allocates `pages` pages. None if the kernel refuses.
    #[must_use]
    pub fn new(pages: usize) -> Option<Self> {
        Mapping::zeroed(pages * PAGE_BYTES).map(Self)
    }

    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    pub(super) fn count(&self) -> usize {
        self.0.len() / PAGE_BYTES
    }

    pub(super) fn start(&self) -> *const u8 {
        self.0.as_ptr()
    }

    pub(super) fn start_mut(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}
