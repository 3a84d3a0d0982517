//! Memory that a segment has for itself, so that the kernel's zeroing is the scrub.

use super::{offset_bytes, to_usize};
use crate::sys::Mapping;
use farpool_kernel::memfd_of;
use farpool_units::exactly;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

/// Kinds of memory that each segment has for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OwnKind {
    Memfd,
    Anonymous,
}

/// The memory of one segment, for itself. Files and mappings are made when first needed.
#[derive(Debug)]
pub(super) struct OwnMemory {
    kind: OwnKind,
    superpages: u32,
    file: OnceLock<OwnedFd>,
    mapping: OnceLock<Mapping>,
}

impl OwnMemory {
    pub(super) fn new(kind: OwnKind, superpages: u32) -> OwnMemory {
        OwnMemory { kind, superpages, file: OnceLock::new(), mapping: OnceLock::new() }
    }

    /// The file, if descriptors of it may have been handed out.
    pub(super) fn handed_out(&self) -> Option<&OwnedFd> {
        self.file.get()
    }

    /// Another descriptor of its file, and its length in bytes; see
    /// [`super::SegmentMemory::share`].
    ///
    /// # Errors
    /// `Unsupported` for memory without a file; the system's.
    pub(super) fn share(&self, writable: bool) -> io::Result<(OwnedFd, u64)> {
        if self.kind != OwnKind::Memfd {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok((reopen(self.file()?.as_fd(), writable)?, self.bytes()))
    }

    fn bytes(&self) -> u64 {
        offset_bytes(self.superpages)
    }

    fn file(&self) -> io::Result<&OwnedFd> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = self.make_file()?;
        Ok(self.file.get_or_init(|| file)) // another thread's, if that was first
    }

    fn make_file(&self) -> io::Result<OwnedFd> {
        Ok(memfd_of("farpool-segment", self.bytes())?)
    }

    pub(super) fn mapping(&self) -> io::Result<&Mapping> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let mapping = match self.kind {
            OwnKind::Anonymous => Mapping::anonymous(to_usize(self.bytes()))?,
            _ => Mapping::shared(self.file()?.as_fd(), to_usize(self.bytes()))?,
        };
        Ok(self.mapping.get_or_init(|| mapping))
    }

    pub(super) fn commit(&self) -> io::Result<()> {
        match self.kind {
            OwnKind::Memfd => self.file().map(drop),
            OwnKind::Anonymous => self.mapping().map(drop),
        }
    }

    /// Of a file, all that it has, what waits to be zeroed included.
    pub(super) fn backed_bytes(&self, rmmas: &[u32]) -> io::Result<u64> {
        /// The unit of `st_blocks`, whatever the file system's blocks are.
        const BLOCK_BYTES: u64 = 512;
        match (self.kind, self.file.get(), self.mapping.get()) {
            (OwnKind::Memfd, Some(file), _) => {
                Ok(exactly::<u64, _>(rustix::fs::fstat(file)?.st_blocks) * BLOCK_BYTES)
            }
            (OwnKind::Anonymous, _, Some(mapping)) => {
                let of = |rmma: &u32| mapping.resident_bytes(to_usize(offset_bytes(*rmma)));
                rmmas.iter().map(of).sum()
            }
            _ => Ok(0),
        }
    }

    pub(super) fn drop_content(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if self.kind == OwnKind::Anonymous {
            return match self.mapping.get() {
                Some(mapping) => mapping.drop_content(to_usize(offset), to_usize(bytes)),
                None => Ok(()),
            };
        }
        match self.file.get() {
            Some(file) => Ok(rustix::fs::fallocate(
                file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                offset,
                bytes,
            )?),
            None => Ok(()),
        }
    }

    /// Zeroes at once, although answers being sent may keep the memory open for a moment.
    pub(super) fn scrub_all(&self) -> io::Result<()> {
        if self.superpages == 0 { Ok(()) } else { self.drop_content(0, self.bytes()) }
    }
}

fn reopen(file: BorrowedFd<'_>, writable: bool) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let opened = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?;
    Ok(opened)
}
