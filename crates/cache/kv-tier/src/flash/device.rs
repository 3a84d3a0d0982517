//! The file or device under a flash: opening, locking, measuring it, and allocating its space.

use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use farpool_kernel::fill_random;
use farpool_kv_store::key::HashSeed;
use farpool_units::exactly;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::layout::{Geometry, Nonce, NotOurs, Superblock, ZONE_BYTES, ZONES_MAX};
use super::settings::{FlashError, FlashSettings};
use crate::log::ZONES_MIN;

/// Where the kernel gives an id for each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Opens the file through the page cache, and creates it if it does not exist: then also true. A
/// device is opened exclusively.
pub(super) fn open_for_us(path: &Path) -> Result<(File, bool), FlashError> {
    farpool_disk::open_exclusive(path).map_err(|source| {
        let path = path.to_owned();
        let is_device = std::fs::metadata(&path).is_ok_and(|it| it.file_type().is_block_device());
        if is_device && source.raw_os_error() == Some(libc::EBUSY) {
            return FlashError::Busy { path };
        }
        FlashError::Io { path, action: "it cannot be opened", source }
    })
}

/// The length of a file or device in bytes.
pub(super) fn length(file: &File, path: &Path) -> Result<u64, FlashError> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(|errno| FlashError::Io {
        path: path.to_owned(),
        action: "its size cannot be told",
        source: errno.into(),
    })
}

/// Checks that a device is as large as the settings ask for.
pub(super) fn check_device(file: &File, geometry: Geometry, path: &Path) -> Result<(), FlashError> {
    let is_device = file.metadata().is_ok_and(|it| it.file_type().is_block_device());
    let (has, bytes) = (length(file, path)?, geometry.file_bytes());
    if is_device && has < bytes {
        return Err(FlashError::DeviceTooSmall { path: path.to_owned(), has, bytes });
    }
    Ok(())
}

/// Checks that the file is long enough: touching a mapping beyond its end kills the process.
pub(super) fn check_length(file: &File, geometry: Geometry, path: &Path) -> Result<(), FlashError> {
    let (has, bytes) = (length(file, path)?, geometry.file_bytes());
    if has < bytes {
        return Err(FlashError::CutShort { path: path.to_owned(), has, bytes });
    }
    Ok(())
}

pub(super) fn lock(file: &File, path: &Path) -> Result<(), FlashError> {
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

/// The largest file that this many threads can use: each names at most [`ZONES_MAX`] zones, 1 TiB.
/// The superblock's 32 bits for the number of zones are enough for that.
fn most_bytes(shards: usize) -> u64 {
    const { assert!(ZONES_MAX <= u32::MAX as usize) };
    Geometry { shards, zones_per_shard: ZONES_MAX }.file_bytes()
}

/// The smallest flash for this many shards, in bytes.
#[must_use]
pub fn least_bytes(shards: usize) -> u64 {
    Geometry { shards, zones_per_shard: ZONES_MIN }.file_bytes()
}

pub(super) fn geometry(settings: &FlashSettings, shards: usize) -> Result<Geometry, FlashError> {
    let most = most_bytes(shards);
    if settings.bytes > most {
        let (path, bytes) = (settings.path.clone(), settings.bytes);
        return Err(FlashError::TooLarge { path, bytes, shards, most });
    }
    Geometry::fitting(settings.bytes, shards, ZONES_MIN).ok_or_else(|| {
        let least = least_bytes(shards);
        let (path, bytes) = (settings.path.clone(), settings.bytes);
        FlashError::TooSmall { path, bytes, shards, least }
    })
}

pub(super) fn check_shape(
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

/// Reads the superblock. None if the file is empty.
pub(super) fn read_superblock(file: &File) -> std::io::Result<Option<Result<Superblock, NotOurs>>> {
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

/// Checks that there is space for a new flash: some file systems would allocate all that is free
/// before they find that it is too little.
pub(super) fn check_room(file: &File, geometry: Geometry) -> std::io::Result<()> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_file() {
        return Ok(());
    }
    let system = rustix::fs::fstatvfs(file)?;
    let has = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    let free = system.f_bavail.saturating_mul(system.f_frsize).saturating_add(has);
    if free < geometry.file_bytes() { Err(Errno::NOSPC.into()) } else { Ok(()) }
}

/// Allocates the whole space of a new flash now rather than when it is too late.
pub(super) fn make_room(file: &File, geometry: Geometry) -> std::io::Result<()> {
    if !file.metadata()?.file_type().is_file() {
        return Ok(());
    }
    file.set_len(geometry.file_bytes())?;
    farpool_disk::take_room(file, geometry.file_bytes()).inspect_err(|_| {
        // Frees what was allocated.
        let _ = file.set_len(0);
    })
}

/// Wipes the bookkeeping in the flash.
pub(super) fn wipe_book(file: &File, geometry: Geometry) -> std::io::Result<()> {
    let zeros = vec![0; ZONE_BYTES];
    let (mut at, end) = (geometry.control_at(0), geometry.book_bytes());
    while at < end {
        let bytes = (end - at).min(ZONE_BYTES as u64);
        file.write_all_at(&zeros[..exactly(bytes)], at)?;
        at += bytes;
    }
    Ok(())
}

pub(super) fn boot_id() -> std::io::Result<[u8; 16]> {
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
    // Without the kernel's random numbers a zero serves: it only sets apart files made anew in the
    // same place.
    let _ = fill_random(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// A seed that nobody knows.
pub fn random_seed() -> Result<HashSeed, Errno> {
    let mut bytes = [0; HashSeed::BYTES];
    fill_random(&mut bytes)?;
    Ok(HashSeed::new(bytes))
}

/// A random number, never used before.
pub(super) fn random_nonce() -> std::io::Result<Nonce> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    Ok(Nonce(u128::from_le_bytes(bytes)))
}
