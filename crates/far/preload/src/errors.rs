//! Descriptions of error numbers, without the C library's translations.
//!
//! Rust's standard library calls strerror_r, which looks for a translation with the program's locks
//! held and in memory from malloc. A thread of the pager that reported an error that way would wait
//! for memory that it has to serve itself.

use std::ffi::{c_char, c_int};

use farpool_pager::sys::is_pager_thread;

use crate::exec::next;

type StrerrorR = unsafe extern "C" fn(c_int, *mut c_char, usize) -> c_int;

unsafe extern "C" {
    /// The untranslated text, or null: constant, without locks.
    safe fn strerrordesc_np(number: c_int) -> *const c_char;
}

/// # Safety
/// As strerror_r(3) of POSIX.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xpg_strerror_r(number: c_int, into: *mut c_char, bytes: usize) -> c_int {
    let next = if is_pager_thread() { None } else { next::<StrerrorR>(c"__xpg_strerror_r") };
    if let Some(next) = next {
        // SAFETY: as the caller guarantees.
        return unsafe { next(number, into, bytes) };
    }
    let text = strerrordesc_np(number);
    if text.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: a constant C string.
    let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_bytes_with_nul();
    if bytes < text.len() {
        return libc::ERANGE;
    }
    // SAFETY: the caller owns `bytes` bytes, which are enough.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), into.cast(), text.len()) };
    0
}
