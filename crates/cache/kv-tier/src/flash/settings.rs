//! The settings of a flash tier, and why opening one can fail.

use std::path::PathBuf;

use super::layout::NotOurs;

/// The settings of a flash tier.
#[derive(Debug, Clone, PartialEq)]
pub struct FlashSettings {
    /// A file, created if it does not exist, or a block device.
    pub path: PathBuf,
    /// For all shards together.
    pub bytes: u64,
    /// Begin empty, whatever is there.
    pub reset: bool,
    /// The most bytes written per second, if there is a limit.
    pub write_bytes_per_s: Option<f64>,
    pub books: Bookkeeping,
}

/// Where the bookkeeping of a flash in use is. Directories that are not in memory are skipped.
#[derive(Debug, Clone, PartialEq)]
pub enum Bookkeeping {
    /// In the first of these that has space, otherwise in the flash.
    Preferably(Vec<PathBuf>),
    /// In this one, or opening fails.
    Only(PathBuf),
}

impl Bookkeeping {
    pub(super) fn directories(&self) -> &[PathBuf] {
        match self {
            Self::Preferably(directories) => directories,
            Self::Only(directory) => std::slice::from_ref(directory),
        }
    }
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
        "flash {path}: it was made for {had} threads and {had_bytes} bytes, now {shards} threads \
         and {bytes} bytes are asked for; \
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
        "flash {path}: {bytes} bytes are more than {shards} threads can use: \
         give more threads, or at most {most} bytes",
        path = .path.display()
    )]
    TooLarge { path: PathBuf, bytes: u64, shards: usize, most: u64 },
    #[error(
        "flash {path}: the device is mounted, or used by another program or device",
        path = .path.display()
    )]
    Busy { path: PathBuf },
    #[error(
        "flash {path}: the device has {has} bytes, {bytes} are asked for",
        path = .path.display()
    )]
    DeviceTooSmall { path: PathBuf, has: u64, bytes: u64 },
    #[error(
        "flash {path}: only {has} of its {bytes} bytes are there; bring back the rest, \
         or --flash-reset to begin empty",
        path = .path.display()
    )]
    CutShort { path: PathBuf, has: u64, bytes: u64 },
    #[error(
        "flash {path}: its book-keeping, {bytes} bytes, finds no place in memory ({reason}): \
         name a directory on a tmpfs with twice the room",
        path = .path.display()
    )]
    Bookkeeping { path: PathBuf, bytes: u64, reason: String },
    #[error("flash {path}: no memory for its buffers", path = .path.display())]
    Buffers { path: PathBuf },
}
