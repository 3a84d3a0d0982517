//! `PAGEMAP_SCAN`: which pages of a range are present, and how.

use std::io::Error;
use std::os::fd::{AsRawFd, OwnedFd};

use farpool_units::{PAGE_BYTES, exactly};

use crate::abi::{self, ScanArg};

/// Page categories of `PAGEMAP_SCAN`.
pub mod category {
    pub const WRITTEN: u64 = 1 << 1;
    pub const PRESENT: u64 = 1 << 3;
    pub const SWAPPED: u64 = 1 << 4;
    pub const ZERO_PAGE: u64 = 1 << 5;
    /// The program has a page there. `PRESENT` alone is not enough: while the kernel migrates a
    /// page (compaction, NUMA balancing) its entry is a migration entry, which the map shows as
    /// swapped.
    pub const OCCUPIED: u64 = PRESENT | SWAPPED;
}

/// A run of pages that share their categories (`struct page_region`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRange {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

const _: () = assert!(size_of::<PageRange>() == 24);
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

#[allow(clippy::cast_possible_truncation)] // Addresses: usize is 64 bits wide, as asserted above.
impl PageRange {
    /// Address of the first page.
    pub fn first(&self) -> usize {
        self.start as usize
    }

    /// Address after the last page.
    pub fn last(&self) -> usize {
        self.end as usize
    }

    /// The number of pages of the run.
    pub fn pages(&self) -> usize {
        (self.last() - self.first()) / PAGE_BYTES
    }
}

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_EXCLUSIVE: u64 = 1 << 56;
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;

/// An open `/proc/PID/pagemap` of this process's memory.
#[derive(Debug)]
pub struct Pagemap {
    fd: OwnedFd,
}

impl Pagemap {
    /// Opens the calling process's own page map.
    pub fn open() -> Result<Pagemap, Error> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/proc/self/pagemap", flags, Mode::empty())?;
        Ok(Pagemap { fd })
    }

    /// Adopts a page map of this process's memory that another process has opened.
    pub fn adopt(fd: OwnedFd) -> Pagemap {
        Pagemap { fd }
    }

    /// Of up to 64 pages from `start` on, those that are anonymous, present, and also mapped by
    /// another process: bit n stands for page n.
    pub fn shared_pages(&self, start: usize, pages: usize) -> Result<u64, Error> {
        const ENTRY_BYTES: usize = size_of::<u64>();
        let mut buffer = [0_u8; 64 * ENTRY_BYTES];
        let wanted = pages.min(64) * ENTRY_BYTES;
        let offset = (start / PAGE_BYTES * ENTRY_BYTES) as u64;
        let got = rustix::io::pread(&self.fd, &mut buffer[..wanted], offset)?;
        let entries = buffer[..got].chunks_exact(ENTRY_BYTES).enumerate();
        Ok(entries.fold(0, |shared, (page, bytes)| {
            let entry = bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
            let others = ENTRY_EXCLUSIVE | ENTRY_FILE | ENTRY_SWAPPED;
            let is_shared = entry & ENTRY_PRESENT != 0 && entry & others == 0;
            shared | u64::from(is_shared) << page
        }))
    }

    /// Of up to 64 pages from `start` on, those that are occupied ([`category::OCCUPIED`]): bit n
    /// stands for page n.
    pub fn occupied_pages(&self, start: usize, pages: usize) -> Result<u64, Error> {
        let mut ranges = [PageRange::default(); 64];
        let end = start + pages.min(64) * PAGE_BYTES;
        let (found, walked) = self.scan(start, end, category::OCCUPIED, &mut ranges)?;
        if walked != end {
            return Err(Error::other(format!("the page map ends at {walked:#x}, not at {end:#x}")));
        }
        Ok(found.iter().fold(0, |mask, range| {
            let first = (range.first() - start) / PAGE_BYTES;
            (first..first + range.pages()).fold(mask, |mask, page| mask | 1 << page)
        }))
    }

    /// Lists runs of pages of `[start, end)` that are in any of the categories of `any_of`. Returns
    /// the runs and the address at which the walk ended (before `end` only if `buffer` was full).
    pub fn scan<'a>(
        &self,
        start: usize,
        end: usize,
        any_of: u64,
        buffer: &'a mut [PageRange],
    ) -> Result<(&'a [PageRange], usize), Error> {
        let mut argument = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: start as u64,
            end: end as u64,
            walk_end: 0,
            vec: buffer.as_mut_ptr() as u64,
            vec_len: buffer.len() as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: any_of,
            return_mask: any_of,
        };
        let pointer = std::ptr::from_mut(&mut argument);
        // SAFETY: `argument` is a pm_scan_arg whose vector describes `buffer`; the kernel writes at
        // most vec_len entries.
        let found = unsafe { libc::ioctl(self.fd.as_raw_fd(), abi::PAGEMAP_SCAN, pointer) };
        let found = usize::try_from(found).map_err(|_| Error::last_os_error())?;
        Ok((&buffer[..found], exactly(argument.walk_end)))
    }
}
