//! A place of 2 MiB to see an extent of a file through: the kernel makes huge pages of mapped memory
//! only, and the blade maps few of its segments.

#![allow(unsafe_code)]

use super::plan::{EXTENT_BYTES, EXTENT_PAGES};
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;

const WINDOW_BYTES: usize = 2 << 20;
const _: () = assert!(WINDOW_BYTES as u64 == EXTENT_BYTES);
/// So much address space has an aligned window in it.
const RESERVED_BYTES: usize = 2 * WINDOW_BYTES;

/// Address space for one extent, empty while no [`View`] lives.
#[derive(Debug)]
pub(super) struct Window {
    reserved: *mut c_void,
    start: *mut c_void,
}

// SAFETY: the window is address space that this object alone knows; nothing ties it to a thread.
unsafe impl Send for Window {}

/// An extent in the window.
#[derive(Debug)]
pub(super) struct View<'w>(&'w Window);

impl Window {
    pub(super) fn new() -> io::Result<Window> {
        let (flags, none) = (MapFlags::PRIVATE | MapFlags::NORESERVE, ProtFlags::empty());
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let reserved = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), RESERVED_BYTES, none, flags)?
        };
        let skip = reserved.addr().next_multiple_of(WINDOW_BYTES) - reserved.addr();
        Ok(Window { reserved, start: reserved.wrapping_byte_add(skip) })
    }

    /// Shows 2 MiB of a file until the view is dropped.
    pub(super) fn show(&mut self, file: BorrowedFd<'_>, offset: u64) -> io::Result<View<'_>> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range lies in this window's own address space, in which nothing else lives.
        unsafe { rustix::mm::mmap(self.start, WINDOW_BYTES, access, flags, file, offset)? };
        Ok(View(self))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: address space of this object, and no view of it lives.
        let unmapped = unsafe { rustix::mm::munmap(self.reserved, RESERVED_BYTES) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping cannot fail");
    }
}

impl View<'_> {
    /// How many pages of the extent exist; makes none.
    pub(super) fn pages(&self) -> io::Result<u16> {
        let mut exists = [0u8; EXTENT_PAGES as usize];
        // SAFETY: the range is mapped, and the list has a byte for each of its pages.
        match unsafe { libc::mincore(self.0.start, WINDOW_BYTES, exists.as_mut_ptr()) } {
            0 => Ok(exists.iter().map(|page| u16::from(page & 1)).sum()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes the extent one huge page, holes filled with zeros, whatever sysfs says of shared memory.
    pub(super) fn collapse(&self) -> io::Result<()> {
        // SAFETY: the range is mapped; the advice moves its bytes to other memory and changes none.
        match unsafe { libc::madvise(self.0.start, WINDOW_BYTES, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Where the extent is; touched, so that the kernel's tables say how it is mapped.
    #[cfg(test)]
    pub(super) fn touched(&self) -> usize {
        // SAFETY: the range is mapped for reading, and a byte has no invalid value.
        let _first = unsafe { std::ptr::read_volatile(self.0.start.cast::<u8>()) };
        self.0.start.addr()
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // Else the file, and its memory, would outlive its segment here.
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let none = ProtFlags::empty();
        // SAFETY: as in `show`; nobody can reach the extent here any more.
        let hidden = unsafe { rustix::mm::mmap_anonymous(self.0.start, WINDOW_BYTES, none, flags) };
        debug_assert!(hidden.is_ok(), "own address space can be replaced");
    }
}
