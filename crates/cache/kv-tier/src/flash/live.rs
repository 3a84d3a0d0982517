//! The bookkeeping of a flash in use, as a memory file: writing it waits for no disk, and it
//! outlives the process.
//!
//! Invariants: a file gets its name only when its content is complete (it is created without one);
//! it is locked while its server lives; it is accepted only with the nonce that the flash names,
//! and for the flash for which it was made. All its space is allocated at the start: a full file
//! system is then an error, never a signal later.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use farpool_units::PAGE_BYTES;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, openat};
use rustix::io::Errno;

use super::layout::{Geometry, Nonce, VERSION, long, wide, word};
use super::opening::Side;

const MAGIC: [u8; 8] = *b"FPKVLIVE";
/// Start of the file names; the nonce follows in hexadecimal digits.
const NAME: &str = "farpool-kv-flash-";
/// Others need space in the directory, too: at most one part in this many of the free space is
/// taken.
const ROOM_PARTS: u64 = 2;

/// The flash that a file belongs to: a copy of the flash must not use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    pub device: u64,
    pub inode: u64,
}

impl Identity {
    /// Identifies a file by device and inode, a device by its number.
    pub(super) fn of(flash: &File) -> std::io::Result<Self> {
        let metadata = flash.metadata()?;
        Ok(if metadata.file_type().is_block_device() {
            Self { device: metadata.rdev(), inode: 0 }
        } else {
            Self { device: metadata.dev(), inode: metadata.ino() }
        })
    }
}

/// The beginning of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveHeader {
    pub shards: u32,
    pub zones_per_shard: u32,
    pub format_id: u64,
    pub nonce: Nonce,
    pub identity: Identity,
}

impl LiveHeader {
    pub const BYTES: usize = 64;

    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.shards.to_le_bytes());
        out[16..20].copy_from_slice(&self.zones_per_shard.to_le_bytes());
        out[20..28].copy_from_slice(&self.format_id.to_le_bytes());
        out[28..44].copy_from_slice(&self.nonce.0.to_le_bytes());
        out[44..52].copy_from_slice(&self.identity.device.to_le_bytes());
        out[52..60].copy_from_slice(&self.identity.inode.to_le_bytes());
        let sum = crc32c::crc32c(&out[..60]);
        out[60..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes the header. None if it is not ours, of another version, or damaged.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.first_chunk()?;
        let is_ours = bytes[..8] == MAGIC
            && word(bytes, 8) == VERSION
            && word(bytes, 60) == crc32c::crc32c(&bytes[..60]);
        is_ours.then(|| Self {
            shards: word(bytes, 12),
            zones_per_shard: word(bytes, 16),
            format_id: long(bytes, 20),
            nonce: Nonce(wide(bytes, 28)),
            identity: Identity { device: long(bytes, 44), inode: long(bytes, 52) },
        })
    }
}

/// A memory file, locked by this process.
#[derive(Debug)]
pub(super) struct LiveFile {
    pub(super) file: File,
    directory: OwnedFd,
    path: PathBuf,
}

fn name(nonce: Nonce) -> String {
    format!("{NAME}{:032x}", nonce.0)
}

/// Opens the directory, if it is in memory.
fn in_memory(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    if farpool_kernel::is_in_memory(&directory)? { Ok(directory) } else { Err(Errno::NOTSUP) }
}

/// Opens the file of this name, if it is a regular file of this user.
fn open_ours(directory: &OwnedFd, name: &str) -> Option<File> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, Mode::empty()).ok()?);
    let metadata = file.metadata().ok()?;
    let is_ours =
        metadata.file_type().is_file() && metadata.uid() == rustix::process::geteuid().as_raw();
    is_ours.then_some(file)
}

/// Locks the file. False if another process holds the lock.
fn is_free(file: &File) -> bool {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

fn read_header(file: &File) -> Option<LiveHeader> {
    let mut bytes = [0; LiveHeader::BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    LiveHeader::decode(&bytes)
}

impl LiveFile {
    /// Searches for the file that the flash names. `wanted` is the header it must have.
    pub(super) fn find(directories: &[PathBuf], wanted: &LiveHeader) -> (Side, Option<Self>) {
        let name = name(wanted.nonce);
        for path in directories {
            let Ok(directory) = in_memory(path) else { continue };
            let Some(file) = open_ours(&directory, &name) else { continue };
            let Some(has) = read_header(&file) else { return (Side::Damaged, None) };
            if has.identity != wanted.identity {
                // It belongs to the flash of which this one is a copy.
                continue;
            }
            if !is_free(&file) {
                return (Side::Held, None);
            }
            let bytes = book_bytes(wanted);
            if has != *wanted || file.metadata().map_or(0, |it| it.len()) != bytes {
                return (Side::Damaged, None);
            }
            return (Side::Whole, Some(Self { file, directory, path: path.join(name) }));
        }
        (Side::Absent, None)
    }

    /// Creates an unnamed file of zeros with all its space allocated. Fails with each directory's
    /// reason.
    pub(super) fn create(directories: &[PathBuf], bytes: u64) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for path in directories {
            match Self::create_in(path, bytes) {
                Ok(live) => return Ok(live),
                Err(errno) => reasons.push(format!("{}: {errno}", path.display())),
            }
        }
        Err(reasons.join("; "))
    }

    fn create_in(path: &Path, bytes: u64) -> rustix::io::Result<Self> {
        let directory = in_memory(path)?;
        let system = rustix::fs::fstatvfs(&directory)?;
        // A file system that reports no blocks has no limit.
        let has = system.f_bavail.saturating_mul(system.f_frsize);
        if system.f_blocks > 0 && has / ROOM_PARTS < bytes {
            return Err(Errno::NOSPC);
        }
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = File::from(openat(&directory, ".", flags, Mode::RUSR | Mode::WUSR)?);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => write_zeros(&file, bytes)?,
            Err(errno) => return Err(errno),
        }
        Ok(Self { file, directory, path: path.to_owned() })
    }

    /// Writes the header and gives the file its name. The rest of its content must be complete.
    pub(super) fn name(&mut self, header: &LiveHeader) -> std::io::Result<()> {
        self.file.write_all_at(&header.encode(), 0)?;
        let name = name(header.nonce);
        let unnamed = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let flags = AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(rustix::fs::CWD, unnamed, &self.directory, &name, flags)?;
        self.path.push(name);
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file; the flash has all of its content.
    pub(super) fn remove(self) -> std::io::Result<()> {
        let name = self.path.file_name().unwrap_or_default();
        Ok(rustix::fs::unlinkat(&self.directory, name, AtFlags::empty())?)
    }
}

/// Removes files left by earlier lives of the same flash, if they are not locked and do not have
/// the nonce `kept`.
pub(super) fn remove_stale(directories: &[PathBuf], identity: Identity, kept: Option<Nonce>) {
    for path in directories {
        let (Ok(directory), Ok(entries)) = (in_memory(path), std::fs::read_dir(path)) else {
            continue;
        };
        for entry in entries.flatten() {
            let file_name = entry.file_name();
            let Some(name) = file_name.to_str().filter(|it| it.starts_with(NAME)) else { continue };
            let Some(file) = open_ours(&directory, name) else { continue };
            let is_stale = read_header(&file)
                .is_some_and(|it| it.identity == identity && Some(it.nonce) != kept);
            if is_stale && is_free(&file) {
                // It makes no difference if the file is gone already.
                let _ = rustix::fs::unlinkat(&directory, name, AtFlags::empty());
            }
        }
    }
}

fn book_bytes(header: &LiveHeader) -> u64 {
    let (shards, zones_per_shard) = (header.shards as usize, header.zones_per_shard as usize);
    Geometry { shards, zones_per_shard }.book_bytes()
}

fn write_zeros(file: &File, bytes: u64) -> rustix::io::Result<()> {
    let zeros = [0; PAGE_BYTES];
    for at in (0..bytes).step_by(PAGE_BYTES) {
        let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        file.write_all_at(&zeros, at).map_err(failed)?;
    }
    Ok(())
}
