//! The allocator of our own code. Its memory comes straight from the kernel and is never far: a
//! fault thread that waited for its own page would wait for ever.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use dlmalloc::Dlmalloc;

use farpool_pager::sys;

/// Memory for the C library's allocations for a pager thread (thread-local storage): a few KiB a
/// thread.
const ARENA_BYTES: usize = 1 << 20;
const ALIGNMENT: usize = 64;

#[global_allocator]
static LOCAL: Local = Local {
    locked: AtomicU32::new(0),
    heap: UnsafeCell::new(Dlmalloc::new_with_allocator(Kernel)),
};

struct Local {
    /// 0 = free, 1 = locked, 2 = locked and waited for.
    locked: AtomicU32,
    heap: UnsafeCell<Dlmalloc<Kernel>>,
}

// SAFETY: the heap is used only while `locked` is held.
unsafe impl Sync for Local {}

/// Memory straight from the kernel.
struct Kernel;

// SAFETY: returns fresh private mappings of the size it reports, or null.
unsafe impl dlmalloc::Allocator for Kernel {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        match sys::map_local(size) {
            Ok(base) => (base as *mut u8, size, 0),
            Err(_) => (std::ptr::null_mut(), 0, 0),
        }
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, pointer: *mut u8, size: usize) -> bool {
        sys::unmap(pointer as usize, size);
        true
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

impl Local {
    fn with<T>(&self, work: impl FnOnce(&mut Dlmalloc<Kernel>) -> T) -> T {
        self.lock();
        // SAFETY: the lock gives exclusive access.
        let result = work(unsafe { &mut *self.heap.get() });
        self.unlock();
        result
    }

    fn lock(&self) {
        if self.locked.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
            return;
        }
        while self.locked.swap(2, Acquire) != 0 {
            sys::wait(&self.locked, 2, None);
        }
    }

    fn unlock(&self) {
        if self.locked.swap(0, Release) == 2 {
            sys::wake(&self.locked);
        }
    }
}

// SAFETY: forwards to dlmalloc under a lock; layouts are passed through.
unsafe impl GlobalAlloc for Local {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps GlobalAlloc's contract, which is dlmalloc's.
        self.with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        self.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        self.with(|heap| unsafe { heap.free(pointer, layout.size(), layout.align()) });
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        self.with(|heap| unsafe { heap.realloc(pointer, layout.size(), layout.align(), size) })
    }
}

/// Locks the allocator during a fork, so that the child's copy is consistent.
pub fn lock_for_fork() {
    LOCAL.lock();
}

/// Ends [`lock_for_fork`], in the parent and in the child.
pub fn unlock_after_fork() {
    LOCAL.unlock();
}

#[repr(align(64))]
struct Arena(UnsafeCell<[u8; ARENA_BYTES]>);

// SAFETY: each part is handed out once, by an atomic counter.
unsafe impl Sync for Arena {}

static ARENA: Arena = Arena(UnsafeCell::new([0; ARENA_BYTES]));
static ARENA_USED: AtomicUsize = AtomicUsize::new(0);

/// Allocates zeroed local memory that is never freed. Null when the arena is used up.
pub fn arena_alloc(size: usize, alignment: usize) -> *mut u8 {
    let alignment = alignment.max(ALIGNMENT);
    let base = ARENA.0.get() as usize;
    let mut taken = std::ptr::null_mut();
    let _ = ARENA_USED
        .fetch_update(Relaxed, Relaxed, |used| {
            // The size is stored in the word before each block.
            let start = (base + used + size_of::<usize>()).next_multiple_of(alignment);
            let end = start.checked_add(size)?.checked_sub(base)?;
            taken = start as *mut u8;
            (end <= ARENA_BYTES).then_some(end)
        })
        .map_err(|_| taken = std::ptr::null_mut());
    if !taken.is_null() {
        // SAFETY: the word before the block lies in the part of the arena that was taken above.
        unsafe { taken.cast::<usize>().sub(1).write(size) };
    }
    taken
}

/// Whether a pointer came from [`arena_alloc`].
#[inline]
pub fn is_arena(pointer: *const u8) -> bool {
    (pointer as usize).wrapping_sub(ARENA.0.get() as usize) < ARENA_BYTES
}

/// Size of a block of the arena.
pub fn arena_size(pointer: *const u8) -> usize {
    // SAFETY: only called with pointers that `arena_alloc` returned; the size is stored before
    // them.
    unsafe { pointer.cast::<usize>().sub(1).read() }
}
