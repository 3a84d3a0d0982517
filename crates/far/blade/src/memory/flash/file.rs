//! The file or device that cold pages are on. Its first page says whose it is, so that a blade
//! never overwrites what is not its own; what is behind that is of no use to a later process.

use crate::config::FlashConfig;
use crate::memory::pool::{check_private, lock_alone};
use farpool_disk::{Ring, open_direct, open_exclusive, take_room};
use farpool_kernel::is_in_memory;
use farpool_units::SUPERPAGE_BYTES;
use rustix::io::Errno;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};

/// Where the superpages begin. Before that is the name, and nothing else: pieces of 1 MiB stay
/// aligned.
pub(super) const DATA_AT_BYTES: u64 = 1 << 20;
/// What a blade's flash begins with.
const NAME: &[u8; 24] = b"farpool blade's flash 1\n";

/// The flash of one blade.
#[derive(Debug)]
pub(super) struct FlashFile {
    direct: OwnedFd,
    /// It is no device.
    is_regular: bool,
    /// Held for its lock.
    _locked: File,
}

/// Opens the flash for this process alone, with room for all that it is to hold.
///
/// # Errors
/// It cannot be opened or is in use, it is not a blade's, others may read it, it lies in memory, or
/// it has too little room.
pub(super) fn open(config: &FlashConfig, superpages: u32) -> Result<FlashFile> {
    let (file, is_new) = open_exclusive(&config.path).map_err(|error| {
        let is_busy = error.raw_os_error() == Some(Errno::BUSY.raw_os_error());
        let used = "the device is mounted, part of another device, or used by another process";
        if is_busy { Error::new(ErrorKind::ResourceBusy, used) } else { error }
    })?;
    let opened = prepare(&file, is_new, config, superpages);
    if opened.is_err() && is_new {
        // What this call made, it takes away again.
        let _ = std::fs::remove_file(&config.path);
    }
    let is_regular = file.metadata()?.file_type().is_file();
    Ok(FlashFile { direct: opened?, is_regular, _locked: file })
}

impl FlashFile {
    /// A thread's access to it.
    ///
    /// # Errors
    /// The system has no io_uring, or too little memory or descriptors.
    pub(super) fn ring(&self) -> Result<Ring> {
        Ring::new(self.direct.try_clone()?, self.is_regular)
    }
}

fn prepare(file: &File, is_new: bool, config: &FlashConfig, superpages: u32) -> Result<OwnedFd> {
    let kind = file.metadata()?.file_type();
    let bytes = DATA_AT_BYTES + u64::from(superpages) * SUPERPAGE_BYTES;
    lock_alone(file.as_fd())?;
    if kind.is_file() {
        check_private(&rustix::fs::fstat(file)?)?;
        if is_in_memory(file)? {
            let why = "the file lies in memory; give one on a disk, or a block device";
            return Err(Error::new(ErrorKind::InvalidInput, why));
        }
    } else if !kind.is_block_device() {
        let why = "it is no file and no block device";
        return Err(Error::new(ErrorKind::InvalidInput, why));
    }
    if !is_new {
        check_name(file)?;
    }
    if kind.is_file() {
        let had_bytes = file.metadata()?.len();
        file.set_len(bytes.max(had_bytes))?;
        take_room(file, bytes).map_err(|error| {
            // Gives back what was allocated.
            let _ = file.set_len(had_bytes);
            let is_full = error.raw_os_error() == Some(Errno::NOSPC.raw_os_error());
            let why = "its file system has too little room; give less, or a file on another";
            if is_full { Error::new(ErrorKind::StorageFull, why) } else { error }
        })?;
    } else {
        let has_bytes = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
        if has_bytes < bytes {
            let why = format!("the device has {has_bytes} bytes, and {bytes} are needed");
            return Err(Error::new(ErrorKind::StorageFull, why));
        }
    }
    file.write_all_at(NAME, 0)?;
    file.sync_data()?;
    open_direct(&config.path)
}

/// Refuses what is neither a blade's flash nor empty.
fn check_name(file: &File) -> Result<()> {
    let mut found = [0; NAME.len()];
    match file.read_exact_at(&mut found, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof && file.metadata()?.len() == 0 => {
            return Ok(());
        }
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => return Err(error),
        _ => {}
    }
    let is_empty_device =
        found == [0; NAME.len()] && file.metadata()?.file_type().is_block_device();
    if found == *NAME || is_empty_device {
        return Ok(());
    }
    let why = "it is no blade's flash, and what is there would be overwritten; give another, or \
               remove the file (of a device: wipefs --all, then dd zeros over its first page)";
    Err(Error::new(ErrorKind::AlreadyExists, why))
}
