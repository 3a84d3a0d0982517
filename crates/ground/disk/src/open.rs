//! Files and block devices: opened so that no other process uses them too, and past the page cache.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

/// Opens a file through the page cache for reading and writing, and creates it for this user alone
/// if it does not exist: then also true. A block device is opened exclusively.
///
/// # Errors
/// The system's. [`Errno::BUSY`] for a device that is mounted, part of another device, or opened
/// exclusively elsewhere.
pub fn open_exclusive(path: &Path) -> std::io::Result<(File, bool)> {
    let is_device = std::fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
    let mut options = File::options();
    options.read(true).write(true);
    if is_device {
        // Of a device O_EXCL asks for what is said above; it needs no O_CREAT.
        let exclusive: i32 = OFlags::EXCL.bits().try_into().map_err(std::io::Error::other)?;
        options.custom_flags(exclusive);
    } else {
        options.mode(0o600);
        // If this fails for another reason than that it exists, what follows tells why.
        if let Ok(file) = options.clone().create_new(true).open(path) {
            return Ok((file, true));
        }
        options.create(true).truncate(false);
    }
    options.open(path).map(|file| (file, false))
}

/// Opens the same file for direct I/O, or through the page cache if the file system does not
/// support that.
///
/// # Errors
/// The system's.
pub fn open_direct(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    // Without updating the access time, if permitted: that update can wait for a disk that hangs.
    let quiet = flags | OFlags::DIRECT | OFlags::NOATIME;
    if let Ok(file) = rustix::fs::open(path, quiet, Mode::empty()) {
        return Ok(file);
    }
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(file) => Ok(file),
        Err(Errno::INVAL) => {
            tracing::warn!(
                path = %path.display(),
                "this file system has no direct I/O: flash is read and written through the page \
                 cache"
            );
            Ok(rustix::fs::open(path, flags, Mode::empty())?)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Allocates the space of a file, as far as its file system can; a device has it already.
///
/// # Errors
/// The system's: no space is left.
pub fn take_room(file: &File, bytes: u64) -> std::io::Result<()> {
    if !file.metadata()?.file_type().is_file() {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_is_made_once_and_for_this_user() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("flash");
        let (file, is_new) = open_exclusive(&path).expect("made");
        assert!(is_new);
        assert_eq!(file.metadata().expect("there").mode() & 0o777, 0o600);
        take_room(&file, 1 << 20).expect("a little room");
        assert_eq!(file.metadata().expect("there").len(), 1 << 20);
        let (again, is_new) = open_exclusive(&path).expect("opened");
        assert!(!is_new);
        assert_eq!(again.metadata().expect("there").len(), 1 << 20, "it keeps what it has");
    }
}
