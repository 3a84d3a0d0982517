//! The sidecar's only allocator: dlmalloc on mapped pages, for Rust and, by C's names, for glibc.
//!
//! Invariants: no break is ever moved; all pages come from [`raw::map`] and are recorded as the
//! sidecar's own. C's names are those that glibc requires of a replacement; `malloc_usable_size` is
//! left out, so that a dependency that needs it fails to link instead of mixing two allocators.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use dlmalloc::{Allocator, Dlmalloc};
use farpool_units::PAGE_BYTES;

use crate::lock::Lock;
use crate::raw::{self, Wish};

/// The heap grows by multiples of this: fewer mappings, and at most this much beyond need.
const GRANULARITY_BYTES: usize = 256 << 10;

struct Pages;

// SAFETY: `alloc` gives fresh zeroed mappings of at least the size asked for, which live until
// `free` or `free_part` unmaps them.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        raw::map(Wish::anonymous(size)).map_or((null_mut(), 0, 0), |at| (at as *mut u8, size, 0))
    }
    fn remap(&self, _at: *mut u8, _old: usize, _new: usize, _can_move: bool) -> *mut u8 {
        null_mut()
    }
    fn free_part(&self, at: *mut u8, old: usize, new: usize) -> bool {
        raw::unmap(at as usize + new, old - new).is_ok()
    }
    fn free(&self, at: *mut u8, size: usize) -> bool {
        raw::unmap(at as usize, size).is_ok()
    }
    fn can_release_part(&self, _flags: u32) -> bool {
        true
    }
    fn allocates_zeros(&self) -> bool {
        true
    }
    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

static HEAP: Lock<Dlmalloc<Pages>> = Lock::new(
    const {
        let mut heap = Dlmalloc::new_with_allocator(Pages);
        assert!(heap.set_granularity(GRANULARITY_BYTES));
        heap
    },
);

/// Rust's interface to the heap.
pub struct Heap;

// SAFETY: dlmalloc keeps GlobalAlloc's contract, and the lock makes it one caller at a time.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: malloc takes any size and a valid alignment.
        HEAP.with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in alloc.
        HEAP.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller got `at` from this heap with this layout.
        HEAP.with(|heap| unsafe { heap.free(at, layout.size(), layout.align()) });
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller got `at` from this heap with this layout.
        HEAP.with(|heap| unsafe { heap.realloc(at, layout.size(), layout.align(), size) })
    }
}

fn aligned(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        return null_mut();
    }
    // SAFETY: memalign takes any size and a power of two.
    HEAP.with(|heap| unsafe { heap.c_memalign(align, size) }).cast()
}

/// C's malloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: c_malloc takes any size.
    HEAP.with(|heap| unsafe { heap.c_malloc(size) }).cast()
}

/// C's calloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return null_mut() };
    // SAFETY: calloc takes any size; C's natural alignment is two words.
    HEAP.with(|heap| unsafe { heap.calloc(bytes, 2 * size_of::<usize>()) }).cast()
}

/// C's realloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
unsafe extern "C" fn realloc(at: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: C's caller got `at` from this heap, or it is null.
    HEAP.with(|heap| unsafe { heap.c_realloc(at.cast(), size) }).cast()
}

/// C's free.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
unsafe extern "C" fn free(at: *mut c_void) {
    // SAFETY: C's caller got `at` from this heap, or it is null.
    HEAP.with(|heap| unsafe { heap.c_free(at.cast()) });
}

/// C's aligned_alloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    aligned(align, size)
}

/// The older form of aligned_alloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    aligned(align, size)
}

/// POSIX's form of aligned_alloc.
#[cfg_attr(target_feature = "crt-static", unsafe(no_mangle))]
unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || align < size_of::<usize>() {
        return libc::EINVAL;
    }
    let at = aligned(align, size);
    if at.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller passes a pointer that can be written.
    unsafe { *out = at };
    0
}
