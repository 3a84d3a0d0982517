//! Calls that lend the program's pages to the kernel by reference, without pinning them.
//!
//! The kernel's own swapping leaves such a page alone until the last reference is gone. UFFDIO_MOVE
//! takes it (its reference count cannot be seen from here), its frame is reused, and the reader of
//! the pipe would get another page's contents. So these calls copy.

use std::ffi::{c_int, c_uint, c_void};

use farpool_units::exactly;

use crate::{pager, set_errno, status};

/// # Safety
/// As vmsplice(2). Far memory is copied into the pipe, or from it, instead of being lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    descriptor: c_int,
    vectors: *const libc::iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    if pager().is_none() {
        // SAFETY: the program asked for exactly this call.
        let moved = unsafe { libc::syscall(libc::SYS_vmsplice, descriptor, vectors, count, flags) };
        return exactly(moved);
    }
    let Ok(vector_count) = c_int::try_from(count) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    let mode = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::RWF_NOWAIT } else { 0 };
    // SAFETY: the vectors are the program's, for the same transfer; at offset -1 these calls are
    // writev and readv with flags.
    unsafe {
        match libc::fcntl(descriptor, libc::F_GETFL) & libc::O_ACCMODE {
            libc::O_RDONLY => libc::preadv2(descriptor, vectors, vector_count, -1, mode),
            _ => libc::pwritev2(descriptor, vectors, vector_count, -1, mode),
        }
    }
}

/// # Safety
/// As setsockopt(2). SO_ZEROCOPY is refused, as by a kernel without it: programs then send by
/// copying.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: libc::socklen_t,
) -> c_int {
    if level == libc::SOL_SOCKET && name == libc::SO_ZEROCOPY && pager().is_some() {
        set_errno(libc::ENOPROTOOPT);
        return -1;
    }
    // SAFETY: the program asked for exactly this call.
    status(unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, name, value, length) })
}
