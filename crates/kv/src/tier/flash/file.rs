//! A flash file from the outside: made, opened, locked, closed in order.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;

use super::layout::{Geometry, NotOurs, Promises, Superblock, Use, ZONE_BYTES};
use super::shared_map::SharedMap;
use crate::tier::log::ZONES_MIN;
use crate::tier::pages::PAGE_BYTES;

/// Where the kernel tells one start of the machine from another.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What is asked of a flash tier.
#[derive(Debug, Clone, PartialEq)]
pub struct FlashSettings {
    /// A file, which is made when it is not there, or a block device.
    pub path: PathBuf,
    /// For all shards together.
    pub bytes: u64,
    /// Begin empty, whatever is there.
    pub reset: bool,
    /// The most bytes written per second, if there is a limit.
    pub write_bytes_per_s: Option<f64>,
}

/// Why there is no flash tier.
#[derive(Debug, thiserror::Error)]
pub enum FlashError {
    #[error("flash {path}: {action}: {source}", path = .path.display())]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    #[error("flash {path}: another server uses it", path = .path.display())]
    InUse { path: PathBuf },
    #[error(
        "flash {path}: {reason}; give another path, or --flash-reset to write over it",
        path = .path.display()
    )]
    NotOurs { path: PathBuf, reason: NotOurs },
    #[error(
        "flash {path}: it was made for {had} threads and {had_bytes} bytes, now {shards} threads and {bytes} bytes are asked for; \
         give these again, or --flash-reset to begin empty",
        path = .path.display()
    )]
    OtherShape { path: PathBuf, had: usize, had_bytes: u64, shards: usize, bytes: u64 },
    #[error(
        "flash {path}: {bytes} bytes are too few for {shards} threads: give at least {least} bytes",
        path = .path.display()
    )]
    TooSmall { path: PathBuf, bytes: u64, shards: usize, least: u64 },
    #[error("flash {path}: no memory for its buffers", path = .path.display())]
    Buffers { path: PathBuf },
}

/// A file that is open and locked.
#[derive(Debug)]
pub struct FlashFile {
    path: PathBuf,
    /// Through the page cache: for what is mapped.
    file: File,
    /// Past it: for zones.
    direct: OwnedFd,
    superblock: Superblock,
    geometry: Geometry,
    /// What was in it was not taken over, for this reason.
    dropped: Option<&'static str>,
}

/// One shard's part of the file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) control: SharedMap,
    pub(super) direct: OwnedFd,
    pub(super) zones_at: u64,
    pub(super) geometry: Geometry,
    pub(super) format_id: u64,
}

impl FlashFile {
    /// Opens or makes the file for so many shards. `now_unix_s` is now.
    pub fn open(
        settings: &FlashSettings,
        shards: usize,
        now_unix_s: i64,
    ) -> Result<Self, FlashError> {
        let path = &settings.path;
        let failed = |action| {
            let path = path.clone();
            move |source| FlashError::Io { path, action, source }
        };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path).map_err(failed("it cannot be opened"))?;
        lock(&file, path)?;
        let geometry = geometry(settings, shards)?;
        let has = read_superblock(&file).map_err(failed("it cannot be read"))?;
        let boot_id = boot_id().map_err(failed("the kernel's boot id cannot be read"))?;
        let mut dropped = None;
        let known = match has {
            Some(_) if settings.reset => None,
            None => None,
            Some(Err(reason)) => return Err(FlashError::NotOurs { path: path.clone(), reason }),
            Some(Ok(superblock)) => {
                check_shape(&superblock, geometry, settings)?;
                // Zones are written past the page cache, what was forgotten lies in it: after a crash of
                // the machine an old value could come back.
                let is_whole = superblock.state == Use::Clean || superblock.boot_id == boot_id;
                if !is_whole {
                    dropped = Some("the machine went down while the server ran");
                }
                is_whole.then_some(superblock)
            }
        };
        let is_new = known.is_none();
        let superblock = known.unwrap_or(Superblock {
            shards: u32::try_from(shards).unwrap_or(u32::MAX),
            zones_per_shard: u32::try_from(geometry.zones_per_shard).unwrap_or(u32::MAX),
            format_id: random_id(),
            zero_unix_s: now_unix_s - i64::from(crate::clock::START_S),
            boot_id,
            state: Use::InUse,
        });
        let superblock = Superblock { boot_id, state: Use::InUse, ..superblock };
        if is_new {
            format(&file, geometry).map_err(failed("room for it cannot be made"))?;
        }
        let direct = open_direct(path).map_err(failed("it cannot be opened for direct I/O"))?;
        let opened = Self { path: path.clone(), file, direct, superblock, geometry, dropped };
        opened.write_superblock().map_err(failed("it cannot be written"))?;
        Ok(opened)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unix time at which the clock of the file's items reads 0.
    #[must_use]
    pub const fn zero_unix_s(&self) -> i64 {
        self.superblock.zero_unix_s
    }

    /// Why what was in the file was not taken over.
    #[must_use]
    pub const fn dropped(&self) -> Option<&'static str> {
        self.dropped
    }

    /// One shard's part of the file.
    pub(super) fn part(&self, shard: usize) -> Result<Part, FlashError> {
        let failed = |action| {
            move |source: std::io::Error| FlashError::Io { path: self.path.clone(), action, source }
        };
        let (at, bytes) = (self.geometry.control_at(shard), self.geometry.control_bytes());
        let control = SharedMap::new(&self.file, at, bytes)
            .map_err(|errno| failed("it cannot be mapped")(errno.into()))?;
        let direct = self.direct.try_clone().map_err(failed("it cannot be used by a thread"))?;
        let zones_at = self.geometry.zones_at(shard);
        let format_id = self.superblock.format_id;
        Ok(Part { control, direct, zones_at, geometry: self.geometry, format_id })
    }

    /// Marks the file as closed in order, once all shards have written theirs.
    pub fn close(mut self) -> std::io::Result<()> {
        self.file.sync_all()?;
        self.superblock.state = Use::Clean;
        self.write_superblock()
    }

    fn write_superblock(&self) -> std::io::Result<()> {
        self.file.write_all_at(&self.superblock.encode(), 0)?;
        self.file.sync_all()
    }
}

fn lock(file: &File, path: &Path) -> Result<(), FlashError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(FlashError::InUse { path: path.to_owned() }),
        Err(errno) => Err(FlashError::Io {
            path: path.to_owned(),
            action: "it cannot be locked",
            source: errno.into(),
        }),
    }
}

fn geometry(settings: &FlashSettings, shards: usize) -> Result<Geometry, FlashError> {
    Geometry::fitting(settings.bytes, shards, ZONES_MIN).ok_or_else(|| {
        let least = Geometry { shards, zones_per_shard: ZONES_MIN }.file_bytes();
        let (path, bytes) = (settings.path.clone(), settings.bytes);
        FlashError::TooSmall { path, bytes, shards, least }
    })
}

fn check_shape(
    superblock: &Superblock,
    asked: Geometry,
    settings: &FlashSettings,
) -> Result<(), FlashError> {
    let had = Geometry {
        shards: superblock.shards as usize,
        zones_per_shard: superblock.zones_per_shard as usize,
    };
    if had == asked {
        return Ok(());
    }
    Err(FlashError::OtherShape {
        path: settings.path.clone(),
        had: had.shards,
        had_bytes: had.file_bytes(),
        shards: asked.shards,
        bytes: settings.bytes,
    })
}

/// What the file begins with; None when it is empty.
fn read_superblock(file: &File) -> std::io::Result<Option<Result<Superblock, NotOurs>>> {
    let metadata = file.metadata()?;
    if metadata.len() == 0 && !metadata.file_type().is_block_device() {
        return Ok(None);
    }
    let mut bytes = [0; Superblock::BYTES];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(Some(Superblock::decode(&bytes))),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Ok(Some(Err(NotOurs::Magic)))
        }
        Err(error) => Err(error),
    }
}

/// Takes the room, all of it now rather than when it is too late, and wipes what is mapped.
fn format(file: &File, geometry: Geometry) -> std::io::Result<()> {
    let bytes = geometry.file_bytes();
    let metadata = file.metadata()?;
    if metadata.file_type().is_file() {
        // Asked first: some file systems would take all there is before they find that it is too little.
        let system = rustix::fs::fstatvfs(file)?;
        let has = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
        if system.f_bavail.saturating_mul(system.f_frsize).saturating_add(has) < bytes {
            return Err(Errno::NOSPC.into());
        }
        file.set_len(bytes)?;
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(errno) => {
                // What was taken of it is given back.
                let _ = file.set_len(0);
                return Err(errno.into());
            }
        }
    }
    let zeros = vec![0; ZONE_BYTES];
    let first_zone = geometry.zones_at(0);
    let mut at = 0;
    while at < first_zone {
        let bytes = (first_zone - at).min(ZONE_BYTES as u64);
        file.write_all_at(&zeros[..usize::try_from(bytes).unwrap_or(PAGE_BYTES)], at)?;
        at += bytes;
    }
    let promises = Promises::default().encode();
    for shard in 0..geometry.shards {
        file.write_all_at(&promises, geometry.control_at(shard))?;
    }
    Ok(())
}

/// The same file past the page cache; through it where the file system cannot do otherwise.
fn open_direct(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags | OFlags::DIRECT, rustix::fs::Mode::empty()) {
        Ok(file) => Ok(file),
        Err(Errno::INVAL) => {
            tracing::warn!(
                path = %path.display(),
                "this file system has no direct I/O: flash is read and written through the page cache"
            );
            Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
        }
        Err(errno) => Err(errno.into()),
    }
}

fn boot_id() -> std::io::Result<[u8; 16]> {
    let text = std::fs::read_to_string(BOOT_ID)?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).unwrap_or_default();
        *byte = u8::from_str_radix(pair, 16).unwrap_or_default();
    }
    Ok(id)
}

fn random_id() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's random numbers a zero serves: it only sets apart files made anew in the same place.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}
