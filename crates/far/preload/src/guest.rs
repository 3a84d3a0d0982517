//! The memory of a guest that can move to another host: QEMU is given a file for it, which it maps
//! shared, and the mapping becomes private anonymous memory, which can be far.
//!
//! QEMU takes the memory for a file's, so that its own migration leaves it out; the file stays
//! empty. Whoever else maps it gets SIGBUS, and never other bytes than the guest has.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::OnceLock;

use farpool_board::{GUEST_SOCKET, GUEST_VARIABLE};
use farpool_pager::{Pager, abort, sys};
use rustix::fs::{fstat, ftruncate, stat};

/// The file of the guest's memory.
struct GuestFile {
    device: u64,
    inode: u64,
    bytes: usize,
}

static FILE: OnceLock<GuestFile> = OnceLock::new();

/// Prepares for the memory that the environment tells of, if any.
pub fn prepare(pager: &'static Pager) {
    let Ok(text) = std::env::var(GUEST_VARIABLE) else { return };
    let Some((file, socket)) = read(&text) else {
        abort::fail_closed(&format!("{GUEST_VARIABLE} tells of no guest's memory"));
    };
    // Programs that this one starts have no guest.
    // SAFETY: the program has no other thread yet, as its first function was not called.
    unsafe { std::env::remove_var(GUEST_VARIABLE) };
    if !pager.expect_guest(file.bytes, socket) {
        abort::fail_closed("the guest has more memory than can be far");
    }
    let _ = FILE.set(file);
}

/// The memory's file, and the desk's socket: the variable is a length in bytes and a path.
fn read(text: &str) -> Option<(GuestFile, PathBuf)> {
    let (bytes, path) = text.split_once(' ')?;
    let status = stat(path).ok()?;
    let bytes = bytes.parse().ok()?;
    let file = GuestFile { device: status.st_dev, inode: status.st_ino, bytes };
    Some((file, PathBuf::from(path).with_file_name(GUEST_SOCKET)))
}

/// Whether a mapping is to be the guest's memory.
pub fn is_memory(flags: c_int, descriptor: c_int, length: usize, offset: i64) -> bool {
    let Some(file) = FILE.get() else { return false };
    if descriptor < 0 || flags & libc::MAP_TYPE != libc::MAP_SHARED || offset != 0 {
        return false;
    }
    // SAFETY: the program gives an open descriptor, or the kernel says that it is none.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let status = fstat(descriptor);
    let is_file = status.is_ok_and(|it| (it.st_dev, it.st_ino) == (file.device, file.inode));
    is_file && length == file.bytes
}

/// Notes that the guest's memory, which may be far, is at this range. `descriptor` is its file.
/// The error is an errno.
pub fn has_memory(
    pager: &'static Pager,
    start: usize,
    end: usize,
    descriptor: c_int,
) -> Result<(), c_int> {
    pager.set_guest(start, end).map_err(|error| {
        sys::say(&format!("this guest cannot move to another host: {error}"));
        libc::EINVAL
    })?;
    // SAFETY: as in `is_memory`.
    let emptied = ftruncate(unsafe { BorrowedFd::borrow_raw(descriptor) }, 0);
    emptied.map_err(rustix::io::Errno::raw_os_error)
}
