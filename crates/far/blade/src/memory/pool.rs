//! One file, device or run of huge pages, cut into superpages for all segments.
//!
//! A superpage is zeroed when its last user drops it, and one with unknown bytes when it is taken.
//! A pool that keeps ([`Pool::keep`]) zeroes nothing more: its blade ends, and what it lent is to
//! be found by the next.

use super::{offset_bytes, to_usize};
use crate::journal::MemoryFile;
use crate::sys::Mapping;
use farpool_kernel::lock;
use farpool_units::{SUPERPAGE_BYTES, exactly};
use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Superpages, and which are free.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) mapping: Mapping,
    free: Mutex<FreeSuperpages>,
    /// Held for its lock: two blades on one file would overwrite each other.
    file: OwnedFd,
    identity: MemoryFile,
    /// The file was made by this process.
    is_new: bool,
    is_kept: AtomicBool,
}

/// Free superpages: zeroed ones are handed out first, then those with bytes from before the start.
#[derive(Debug)]
struct FreeSuperpages {
    zero: Vec<u32>,
    unknown: BTreeSet<u32>,
}

/// One superpage of a pool, zeroed and returned to it when dropped.
#[derive(Debug)]
pub(super) struct PoolSuperpage {
    pool: Arc<Pool>,
    pub(super) number: u32,
}

impl Pool {
    pub(super) fn open(path: &Path, capacity_bytes: u64) -> io::Result<Pool> {
        let (file, is_new) = open_or_make(path)?;
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&file, exclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => io::Error::new(
                io::ErrorKind::WouldBlock,
                "another process uses the file, a blade that has not ended perhaps",
            ),
            other => other.into(),
        })?;
        let stat = rustix::fs::fstat(&file)?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile {
            // Reserved now: with a full file system, touching a hole later would kill the blade.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, capacity_bytes)?;
        }
        Self::over(file, is_new, capacity_bytes)
    }

    /// Huge pages of the system's default size.
    pub(super) fn huge_pages(capacity_bytes: u64) -> io::Result<Pool> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let file = rustix::fs::memfd_create("farpool-hugetlb", flags)?;
        rustix::fs::ftruncate(&file, capacity_bytes)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, capacity_bytes)?;
        Self::over(file, true, capacity_bytes)
    }

    fn over(file: OwnedFd, is_new: bool, capacity_bytes: u64) -> io::Result<Pool> {
        let mapping = Mapping::shared(file.as_fd(), to_usize(capacity_bytes))?;
        let count = crate::table::superpages_of(capacity_bytes);
        let free = FreeSuperpages { zero: Vec::new(), unknown: (0..count).collect() };
        let identity = identity_of(file.as_fd())?;
        let (free, is_kept) = (Mutex::new(free), AtomicBool::new(false));
        Ok(Pool { mapping, free, file, identity, is_new, is_kept })
    }

    /// Which file it is, and whether this process made it.
    pub(super) fn identity(&self) -> (MemoryFile, bool) {
        (self.identity, self.is_new)
    }

    pub(super) fn take(pool: &Arc<Pool>) -> Option<PoolSuperpage> {
        let mut free = lock(&pool.free);
        if let Some(number) = free.zero.pop() {
            return Some(PoolSuperpage { pool: Arc::clone(pool), number });
        }
        let number = free.unknown.pop_first()?;
        drop(free);
        pool.zero(number);
        Some(PoolSuperpage { pool: Arc::clone(pool), number })
    }

    /// Takes the superpage `number` with the bytes it has; None if there is none or it is taken.
    pub(super) fn claim(pool: &Arc<Pool>, number: u32) -> Option<PoolSuperpage> {
        let is_free = lock(&pool.free).unknown.remove(&number);
        is_free.then(|| PoolSuperpage { pool: Arc::clone(pool), number })
    }

    /// From now on, what is dropped keeps its bytes, and is not handed out again.
    pub(super) fn keep(&self) {
        self.is_kept.store(true, Ordering::Release);
    }

    /// Returns once all bytes are in the file, whatever happens to the machine.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }

    fn zero(&self, number: u32) {
        self.mapping.zero(to_usize(offset_bytes(number)), to_usize(SUPERPAGE_BYTES));
    }
}

impl Drop for PoolSuperpage {
    fn drop(&mut self) {
        if self.pool.is_kept.load(Ordering::Acquire) {
            return;
        }
        self.pool.zero(self.number);
        lock(&self.pool.free).zero.push(self.number);
    }
}

/// Opens a file or device; true if it had to be made.
fn open_or_make(path: &Path) -> io::Result<(OwnedFd, bool)> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::open(path, flags, mode) {
        Err(Errno::NOENT) => {}
        opened => return Ok((opened?, false)),
    }
    let make = flags | OFlags::CREATE | OFlags::EXCL;
    Ok((rustix::fs::open(path, make, mode)?, true))
}

/// Which file or device is at this path.
pub(crate) fn identity_at(path: &Path) -> io::Result<MemoryFile> {
    identity_of(std::fs::File::open(path)?.as_fd())
}

/// A device is known by its number, a file by its inode.
fn identity_of(file: BorrowedFd<'_>) -> io::Result<MemoryFile> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?;
    let number = |major: u32, minor: u32| u64::from(major) << 32 | u64::from(minor);
    let is_device = stat.stx_rdev_major != 0;
    let device = match is_device {
        true => number(stat.stx_rdev_major, stat.stx_rdev_minor),
        false => number(stat.stx_dev_major, stat.stx_dev_minor),
    };
    let knows_birth = !is_device && stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let born_ns = knows_birth.then(|| {
        let seconds = i128::from(stat.stx_btime.tv_sec);
        exactly::<u64, _>(seconds * 1_000_000_000 + i128::from(stat.stx_btime.tv_nsec))
    });
    Ok(MemoryFile { device, inode: if is_device { 0 } else { stat.stx_ino }, born_ns })
}
