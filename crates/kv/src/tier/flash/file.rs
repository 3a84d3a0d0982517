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

/// Stands for the boot id where nothing is to be taken over.
const GIVEN_UP: [u8; 16] = [0; 16];

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
    #[error(
        "flash {path}: the device is mounted, or used by another program or device",
        path = .path.display()
    )]
    Busy { path: PathBuf },
    #[error("flash {path}: the device has {has} bytes, {bytes} are asked for", path = .path.display())]
    DeviceTooSmall { path: PathBuf, has: u64, bytes: u64 },
    #[error(
        "flash {path}: only {has} of its {bytes} bytes are there; bring back the rest, or --flash-reset to begin empty",
        path = .path.display()
    )]
    CutShort { path: PathBuf, has: u64, bytes: u64 },
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
    /// An earlier process closed it in order.
    was_clean: bool,
}

/// One shard's part of the file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) control: SharedMap,
    pub(super) direct: OwnedFd,
    pub(super) zones_at: u64,
    pub(super) geometry: Geometry,
    pub(super) format_id: u64,
    /// What is mapped is as an earlier process closed it, if the device gives back what it was given.
    pub(super) was_clean: bool,
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
        let file = open_for_us(path)?;
        lock(&file, path)?;
        let geometry = geometry(settings, shards)?;
        check_device(&file, geometry, path)?;
        let has = read_superblock(&file).map_err(failed("it cannot be read"))?;
        let boot_id = boot_id().map_err(failed("the kernel's boot id cannot be read"))?;
        let mut dropped = None;
        let known = match has {
            Some(_) if settings.reset => None,
            None => None,
            Some(Err(reason)) => return Err(FlashError::NotOurs { path: path.clone(), reason }),
            Some(Ok(superblock)) => {
                check_shape(&superblock, geometry, settings)?;
                check_length(&file, geometry, path)?;
                // Zones are written past the page cache, what was forgotten lies in it: after a crash of
                // the machine an old value could come back.
                let is_whole = superblock.state == Use::Clean || superblock.boot_id == boot_id;
                if !is_whole {
                    dropped = Some(if superblock.boot_id == GIVEN_UP {
                        "the device failed when the server ended"
                    } else {
                        "the machine went down while the server ran"
                    });
                }
                is_whole.then_some(superblock)
            }
        };
        let is_new = known.is_none();
        let was_clean = known.is_some_and(|it| it.state == Use::Clean);
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
        } else {
            // A copy may have left out what was zeros: then writing into the mapping could end the process.
            take_room(&file, geometry.file_bytes())
                .map_err(failed("room for it cannot be made"))?;
        }
        let direct = open_direct(path).map_err(failed("it cannot be opened for direct I/O"))?;
        let path = path.clone();
        let opened = Self { path, file, direct, superblock, geometry, dropped, was_clean };
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
        let Superblock { format_id, .. } = self.superblock;
        let (geometry, was_clean) = (self.geometry, self.was_clean);
        Ok(Part { control, direct, zones_at, geometry, format_id, was_clean })
    }

    /// Notes the Unix time at which the clock of the file's items reads 0, where that has changed.
    pub fn set_zero(&mut self, zero_unix_s: i64) -> Result<(), FlashError> {
        if zero_unix_s == self.superblock.zero_unix_s {
            return Ok(());
        }
        self.superblock.zero_unix_s = zero_unix_s;
        self.write_superblock().map_err(|source| FlashError::Io {
            path: self.path.clone(),
            action: "it cannot be written",
            source,
        })
    }

    /// Marks the file as closed in order, once all shards have written theirs.
    pub fn close(mut self) -> std::io::Result<()> {
        self.file.sync_all()?;
        self.superblock.state = Use::Clean;
        self.write_superblock()
    }

    /// Has nothing of the file taken over: what the device did not take of the book-keeping the kernel may forget.
    pub fn give_up(mut self) -> std::io::Result<()> {
        self.superblock.boot_id = GIVEN_UP;
        self.write_superblock()
    }

    fn write_superblock(&self) -> std::io::Result<()> {
        self.file.write_all_at(&self.superblock.encode(), 0)?;
        self.file.sync_all()
    }
}

/// The file through the page cache, made if it is not there. A device is taken for this process alone.
fn open_for_us(path: &Path) -> Result<File, FlashError> {
    let is_device = std::fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
    let mut options = File::options();
    options.read(true).write(true);
    if is_device {
        // For a device this means: unless it is mounted, or a part of another, or somebody else has it so.
        options.custom_flags(libc::O_EXCL);
    } else {
        options.create(true).truncate(false).mode(0o600);
    }
    options.open(path).map_err(|source| {
        let path = path.to_owned();
        if is_device && source.raw_os_error() == Some(libc::EBUSY) {
            return FlashError::Busy { path };
        }
        FlashError::Io { path, action: "it cannot be opened", source }
    })
}

/// Bytes of a file or a device.
fn length(file: &File, path: &Path) -> Result<u64, FlashError> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|errno| FlashError::Io {
        path: path.to_owned(),
        action: "its size cannot be told",
        source: errno.into(),
    })
}

/// A device must be as large as what is asked of it.
fn check_device(file: &File, geometry: Geometry, path: &Path) -> Result<(), FlashError> {
    let is_device = file.metadata().is_ok_and(|it| it.file_type().is_block_device());
    let (has, bytes) = (length(file, path)?, geometry.file_bytes());
    if is_device && has < bytes {
        return Err(FlashError::DeviceTooSmall { path: path.to_owned(), has, bytes });
    }
    Ok(())
}

/// Whoever touches a mapping behind the file's end is killed.
fn check_length(file: &File, geometry: Geometry, path: &Path) -> Result<(), FlashError> {
    let (has, bytes) = (length(file, path)?, geometry.file_bytes());
    if has < bytes {
        return Err(FlashError::CutShort { path: path.to_owned(), has, bytes });
    }
    Ok(())
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
        if let Err(error) = take_room(file, bytes) {
            // What was taken of it is given back.
            let _ = file.set_len(0);
            return Err(error);
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

/// Takes the room of a file; a device has it.
fn take_room(file: &File, bytes: u64) -> std::io::Result<()> {
    if !file.metadata()?.file_type().is_file() {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
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

pub(super) fn random_id() -> u64 {
    let mut bytes = [0; 8];
    // Without the kernel's random numbers a zero serves: it only sets apart files made anew in the same place.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}
