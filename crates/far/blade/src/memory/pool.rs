//! One file, device or run of huge pages, cut into superpages for all segments.
//!
//! A superpage is zeroed when its last user drops it, and one with unknown bytes when it is taken.
//! A file that is not reserved as a whole ([`Reserve::Each`]) has memory for superpages in use
//! only: a donor has the rest for its own programs.
//! A pool that keeps ([`Pool::keep`]) zeroes nothing more: its blade ends, and what it lent is to
//! be found by the next.

use super::{offset_bytes, to_usize};
use crate::journal::MemoryFile;
use crate::sys::Mapping;
use farpool_kernel::{is_in_memory, lock};
use farpool_units::{SUPERPAGE_BYTES, exactly};
use rustix::fs::{AtFlags, FallocateFlags, MemfdFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What a pool leaves of a file system in which it reserves superpage by superpage: its table lies
/// there, too, and without it nothing can be freed. A table has some 50 bytes for each superpage.
const ROOM_LEFT_BYTES: u64 = 16 << 20;

/// When a file's memory is reserved. With a full file system, touching a hole would kill the
/// blade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reserve {
    /// At the start, all of it; a device always has all of it.
    All,
    /// For each superpage when it is taken, until it is free again.
    Each,
}

/// Superpages, and which are free.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) mapping: Mapping,
    reserve: Reserve,
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
    pub(super) fn open(path: &Path, capacity_bytes: u64, reserve: Reserve) -> io::Result<Pool> {
        let (file, is_new) = open_or_make(path)?;
        lock_alone(file.as_fd())?;
        let stat = rustix::fs::fstat(&file)?;
        let is_file =
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
        if is_file {
            check_private(&stat)?;
        }
        match reserve {
            _ if !is_file => {}
            Reserve::All => {
                rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, capacity_bytes)?;
            }
            Reserve::Each => {
                check_is_memory(file.as_fd())?;
                if exactly::<u64, _>(stat.st_size) < capacity_bytes {
                    rustix::fs::ftruncate(&file, capacity_bytes)?;
                }
            }
        }
        let reserve = if is_file { reserve } else { Reserve::All };
        Self::over(file, is_new, capacity_bytes, reserve)
    }

    /// Huge pages of the system's default size.
    pub(super) fn huge_pages(capacity_bytes: u64) -> io::Result<Pool> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let file = rustix::fs::memfd_create("farpool-hugetlb", flags)?;
        rustix::fs::ftruncate(&file, capacity_bytes)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, capacity_bytes)?;
        Self::over(file, true, capacity_bytes, Reserve::All)
    }

    fn over(
        file: OwnedFd,
        is_new: bool,
        capacity_bytes: u64,
        reserve: Reserve,
    ) -> io::Result<Pool> {
        let mapping = Mapping::shared(file.as_fd(), to_usize(capacity_bytes))?;
        let count = crate::table::superpages_of(capacity_bytes);
        let free = FreeSuperpages { zero: Vec::new(), unknown: (0..count).collect() };
        let identity = identity_of(file.as_fd())?;
        let (free, is_kept) = (Mutex::new(free), AtomicBool::new(false));
        Ok(Pool { mapping, reserve, free, file, identity, is_new, is_kept })
    }

    /// Which file it is, and whether this process made it.
    pub(super) fn identity(&self) -> (MemoryFile, bool) {
        (self.identity, self.is_new)
    }

    /// Takes a superpage, which is zero.
    ///
    /// # Errors
    /// [`io::ErrorKind::StorageFull`]: all are taken, or the file system has no room.
    pub(super) fn take(pool: &Arc<Pool>) -> io::Result<PoolSuperpage> {
        let mut free = lock(&pool.free);
        let zero = free.zero.pop();
        let number = zero.or_else(|| free.unknown.pop_first());
        let number = number.ok_or(io::ErrorKind::StorageFull)?;
        drop(free);
        // From here on an error gives it back.
        let superpage = PoolSuperpage { pool: Arc::clone(pool), number };
        match pool.reserve {
            Reserve::All if zero.is_none() => pool.zero(number),
            Reserve::All => {}
            Reserve::Each => {
                if zero.is_none() {
                    pool.punch(number)?;
                }
                if pool.room_bytes()? < SUPERPAGE_BYTES {
                    return Err(Errno::NOSPC.into());
                }
                pool.allocate(number)?;
            }
        }
        Ok(superpage)
    }

    /// Gives back the memory of superpages that nobody has claimed, if it is not reserved.
    pub(super) fn trim(&self) -> io::Result<()> {
        if self.reserve == Reserve::All {
            return Ok(());
        }
        let mut free = lock(&self.free);
        while let Some(number) = free.unknown.last().copied() {
            self.punch(number)?;
            free.unknown.remove(&number);
            free.zero.push(number);
        }
        // Nothing lies beyond what the pool has now.
        rustix::fs::ftruncate(&self.file, self.mapping.bytes() as u64)?;
        let wanted_bytes = free.zero.len() as u64 * SUPERPAGE_BYTES;
        let room_bytes = self.room_bytes()?;
        if room_bytes < wanted_bytes {
            tracing::warn!(
                room_bytes,
                wanted_bytes,
                "the file system has less room than is to be lent; give it more, or lend less"
            );
        }
        Ok(())
    }

    /// Memory that can still be taken of the file system.
    pub(super) fn room_bytes(&self) -> io::Result<u64> {
        if self.reserve == Reserve::All {
            return Ok(u64::MAX);
        }
        let room = rustix::fs::fstatvfs(&self.file)?;
        // A tmpfs without a limit has no blocks at all.
        let is_limited = room.f_blocks > 0;
        let bytes = room.f_bavail.saturating_mul(room.f_frsize).saturating_sub(ROOM_LEFT_BYTES);
        Ok(if is_limited { bytes } else { u64::MAX })
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

    fn give_back(&self, number: u32) {
        let is_zero = match self.reserve {
            Reserve::All => {
                self.zero(number);
                true
            }
            Reserve::Each => {
                let punched = self.punch(number).inspect_err(|error| {
                    tracing::warn!(%error, "a superpage keeps its memory until it is lent again");
                });
                punched.is_ok()
            }
        };
        let mut free = lock(&self.free);
        if is_zero {
            free.zero.push(number);
        } else {
            free.unknown.insert(number);
        }
    }

    fn allocate(&self, number: u32) -> io::Result<()> {
        let offset = offset_bytes(number);
        Ok(rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, SUPERPAGE_BYTES)?)
    }

    /// Makes it zero, without memory.
    fn punch(&self, number: u32) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset_bytes(number), SUPERPAGE_BYTES)?)
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
        self.pool.give_back(self.number);
    }
}

/// Locks a file until it is closed.
///
/// # Errors
/// Another process has it locked.
pub(super) fn lock_alone(file: BorrowedFd<'_>) -> io::Result<()> {
    let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    rustix::fs::flock(file, exclusive).map_err(|errno| match errno {
        Errno::WOULDBLOCK => io::Error::new(
            io::ErrorKind::WouldBlock,
            "another process uses the file, a blade that has not ended perhaps",
        ),
        other => other.into(),
    })
}

/// Refuses a file that somebody else could read or change: it may have been put there, as anyone
/// may in /dev/shm.
pub(super) fn check_private(stat: &rustix::fs::Stat) -> io::Result<()> {
    const OF_OTHERS: u32 = 0o077;
    let refuse = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        let owner = stat.st_uid;
        return refuse(format!(
            "the file belongs to user {owner}, and the blade runs as user {user}; give another \
             file, or remove this one"
        ));
    }
    if stat.st_mode & OF_OTHERS != 0 {
        let mode = stat.st_mode & 0o777;
        return refuse(format!(
            "others may read or change the file (mode {mode:o}), and what programs store would be \
             theirs; chmod 600 it, or give another file"
        ));
    }
    Ok(())
}

/// Refuses a file on a disk: its pages are a cache that the system counts as free, so a donor could
/// not tell what its own programs need.
fn check_is_memory(file: BorrowedFd<'_>) -> io::Result<()> {
    if is_in_memory(file)? {
        return Ok(());
    }
    let why = "the file lies on a disk, and a node lends memory; give a file in a tmpfs, such as \
               /dev/shm or /run";
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
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
