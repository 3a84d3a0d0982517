//! Probes of the kernel that no other crate makes: the unsafe part of `farpool doctor`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Size of `struct io_uring_params`.
const IO_URING_PARAMS_BYTES: usize = 120;

/// Sets up the smallest io_uring; dropping the descriptor ends it.
pub fn io_uring() -> io::Result<OwnedFd> {
    let mut params = [0_u64; IO_URING_PARAMS_BYTES / size_of::<u64>()];
    // SAFETY: `params` is as large as the structure this call reads and writes; all zero asks for
    // the defaults.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    match i32::try_from(result) {
        // SAFETY: the kernel just made this descriptor for this call; nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
