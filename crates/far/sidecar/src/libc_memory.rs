//! The C library's memory functions, under its own names: static glibc's start-up, threads and
//! stdio call these instead of its own.
//!
//! Why: the sidecar lives in another program's address space. glibc's early allocator and its
//! malloc move *the* break, which is the host program's; its mmap leaves memory that a fork
//! inherits and that the pager does not know. The symbols replace the members brk.o, sbrk.o,
//! dl-early_allocate.o, mmap64.o, munmap.o and mremap.o of libc.a, with all their names, so that
//! the linker takes none of them. The names are exported in the static build only: a build against
//! the shared C library (for tests and lints) keeps that library's own.

use std::ffi::{c_int, c_void};

use crate::raw::{self, Errno, Wish};

const FAILED: *mut c_void = usize::MAX as *mut c_void;

fn fail(errno: Errno) {
    // SAFETY: errno's address is valid in each thread once thread-local storage is set up; the
    // calls before that (only `_dl_early_allocate`) do not come here.
    unsafe { *libc::__errno_location() = errno.0 }
}

fn as_pointer(answer: Result<usize, Errno>) -> *mut c_void {
    answer.map_or_else(|errno| (fail(errno), FAILED).1, |start| start as *mut c_void)
}

fn as_status(answer: Result<(), Errno>) -> c_int {
    answer.map_or_else(|errno| (fail(errno), -1).1, |()| 0)
}

/// glibc's allocator before malloc: the first thread's thread-local storage. Returns null on
/// failure.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
extern "C" fn _dl_early_allocate(bytes: usize) -> *mut c_void {
    raw::map(Wish::anonymous(bytes)).unwrap_or(0) as *mut c_void
}

macro_rules! c_names {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $back:ty = $does:expr;)*) => { $(
        #[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
        extern "C" fn $name($($arg: $kind),*) -> $back { $does }
    )* };
}

/// glibc's record of the break; brk.o would define it.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
#[allow(non_upper_case_globals)]
static mut __curbrk: *mut c_void = std::ptr::null_mut();

c_names! {
    brk(_to: *mut c_void) -> c_int = as_status(Err(Errno(libc::ENOMEM)));
    __brk(_to: *mut c_void) -> c_int = as_status(Err(Errno(libc::ENOMEM)));
    sbrk(_by: isize) -> *mut c_void = as_pointer(Err(Errno(libc::ENOMEM)));
    __sbrk(_by: isize) -> *mut c_void = as_pointer(Err(Errno(libc::ENOMEM)));
    mmap(at: usize, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64)
        -> *mut c_void = as_pointer(raw::map(Wish { at, bytes, protection, flags, fd, offset }));
    mmap64(at: usize, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64)
        -> *mut c_void = as_pointer(raw::map(Wish { at, bytes, protection, flags, fd, offset }));
    __mmap(at: usize, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64)
        -> *mut c_void = as_pointer(raw::map(Wish { at, bytes, protection, flags, fd, offset }));
    __mmap64(at: usize, bytes: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64)
        -> *mut c_void = as_pointer(raw::map(Wish { at, bytes, protection, flags, fd, offset }));
    munmap(at: usize, bytes: usize) -> c_int = as_status(raw::unmap(at, bytes));
    __munmap(at: usize, bytes: usize) -> c_int = as_status(raw::unmap(at, bytes));
    mremap(at: usize, old: usize, new: usize, how: c_int, to: usize)
        -> *mut c_void = as_pointer(raw::remap(at, old, new, how, to));
    __mremap(at: usize, old: usize, new: usize, how: c_int, to: usize)
        -> *mut c_void = as_pointer(raw::remap(at, old, new, how, to));
}
