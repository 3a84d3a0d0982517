//! The malloc family, from mimalloc, whose memory is far like any other large mapping.
//!
//! Memory that the C library allocates for a pager thread that is being started comes from a local
//! arena instead, and is recognised by its address.

use std::ffi::{c_char, c_int, c_long, c_void};

use libmimalloc_sys as mi;

use crate::local::{arena_alloc, arena_size, is_arena};
use farpool_pager::is_internal_allocation;

/// `mi_option_arena_reserve` of mimalloc 2 (the binding does not name it); the value is in KiB.
const ARENA_RESERVE: mi::mi_option_t = 23;
/// The allocator takes memory from the kernel in steps of 64 MiB instead of 1 GiB, so that a small
/// program is seen to be small.
const ARENA_RESERVE_KIB: c_long = 64 << 10;
/// `mi_option_purge_delay`: free memory is returned to the kernel after this time. Longer than the
/// default 10 ms, because that takes a request to the pager's steward.
const PURGE_DELAY: mi::mi_option_t = 15;
const PURGE_DELAY_MS: c_long = 100;

/// Sets up the allocator, before its first use in a program that has a pager.
pub fn configure() {
    // SAFETY: plain setters of process-wide options.
    unsafe {
        mi::mi_option_set_default(ARENA_RESERVE, ARENA_RESERVE_KIB);
        mi::mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS);
    }
}

/// Exports a function of the malloc family under its C name.
macro_rules! export {
    ($(#[$meta:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block) => {
        $(#[$meta])*
        /// # Safety
        /// As the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result $body
    };
}

fn or_enomem(pointer: *mut c_void) -> *mut c_void {
    if pointer.is_null() {
        crate::set_errno(libc::ENOMEM);
    }
    pointer
}

export!(
    fn malloc(size: usize) -> *mut c_void {
        if is_internal_allocation() {
            return arena_alloc(size, 16).cast();
        }
        // SAFETY: no precondition.
        or_enomem(unsafe { mi::mi_malloc(size) })
    }
);

export!(
    fn calloc(count: usize, size: usize) -> *mut c_void {
        if is_internal_allocation() {
            return arena_alloc(count.saturating_mul(size), 16).cast();
        }
        // SAFETY: no precondition.
        or_enomem(unsafe { mi::mi_calloc(count, size) })
    }
);

export!(
    fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void {
        if is_arena(pointer.cast()) {
            // SAFETY: both blocks are at least as long as the copied part, and do not overlap.
            return unsafe {
                let moved = malloc(size);
                if !moved.is_null() {
                    let bytes = size.min(arena_size(pointer.cast()));
                    std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), moved.cast(), bytes);
                }
                moved
            };
        }
        // SAFETY: the caller's pointer is from this allocator or null.
        or_enomem(unsafe { mi::mi_realloc(pointer, size) })
    }
);

export!(
    fn reallocarray(pointer: *mut c_void, count: usize, size: usize) -> *mut c_void {
        match count.checked_mul(size) {
            // SAFETY: as realloc.
            Some(bytes) => unsafe { realloc(pointer, bytes) },
            None => or_enomem(std::ptr::null_mut()),
        }
    }
);

export!(
    fn free(pointer: *mut c_void) -> () {
        if !is_arena(pointer.cast()) {
            // SAFETY: the caller's pointer is from this allocator or null.
            unsafe { mi::mi_free(pointer) }
        }
    }
);

export!(
    fn cfree(pointer: *mut c_void) -> () {
        // SAFETY: as free.
        unsafe { free(pointer) }
    }
);

export!(
    fn posix_memalign(result: *mut *mut c_void, alignment: usize, size: usize) -> c_int {
        if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<*const c_void>()) {
            return libc::EINVAL;
        }
        // SAFETY: as memalign.
        let pointer = unsafe { aligned(alignment, size) };
        if pointer.is_null() {
            return libc::ENOMEM;
        }
        // SAFETY: the caller gives a place for the result.
        unsafe { result.write(pointer) };
        0
    }
);

export!(
    fn memalign(alignment: usize, size: usize) -> *mut c_void {
        if !alignment.is_power_of_two() {
            crate::set_errno(libc::EINVAL);
            return std::ptr::null_mut();
        }
        // SAFETY: no precondition.
        or_enomem(unsafe { aligned(alignment, size) })
    }
);

export!(
    fn aligned_alloc(alignment: usize, size: usize) -> *mut c_void {
        // SAFETY: no precondition.
        unsafe { memalign(alignment, size) }
    }
);

export!(
    fn valloc(size: usize) -> *mut c_void {
        // SAFETY: no precondition.
        unsafe { memalign(4096, size) }
    }
);

export!(
    fn pvalloc(size: usize) -> *mut c_void {
        match size.checked_next_multiple_of(4096) {
            // SAFETY: no precondition.
            Some(size) => unsafe { memalign(4096, size) },
            None => or_enomem(std::ptr::null_mut()),
        }
    }
);

export!(
    fn malloc_usable_size(pointer: *mut c_void) -> usize {
        if is_arena(pointer.cast()) {
            return arena_size(pointer.cast());
        }
        // SAFETY: the caller's pointer is from this allocator or null.
        unsafe { mi::mi_usable_size(pointer) }
    }
);

export!(
    /// Returns free memory to the kernel.
    fn malloc_trim(_pad: usize) -> c_int {
        // SAFETY: no precondition.
        unsafe { mi::mi_collect(true) };
        1
    }
);

unsafe fn aligned(alignment: usize, size: usize) -> *mut c_void {
    if is_internal_allocation() {
        return arena_alloc(size, alignment).cast();
    }
    // SAFETY: the alignment is a power of two.
    unsafe { mi::mi_malloc_aligned(size, alignment.max(size_of::<usize>())) }
}

/// Identifies this library to people (and `farpool doctor`).
#[unsafe(no_mangle)]
pub static farpool_preload_version: [c_char; 1] = [0];
