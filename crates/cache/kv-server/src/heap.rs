//! How the allocator treats large buffers.

/// Freed buffers of at least this size return to the kernel at once: requests with the largest
/// default items fit below it, and for larger ones new memory costs little beside the copy.
const APART_BYTES: libc::c_int = 2 << 20;
/// A free end of the heap at least this long is returned to the kernel.
const TRIM_BYTES: libc::c_int = 1 << 20;

/// Gives large buffers memory of their own, always: by default the allocator raises the threshold
/// to what it has seen freed, up to 64 MiB for each thread, outside the memory limit.
pub fn keep_large_buffers_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: this sets numbers that the allocator reads; it may be called at any time.
    unsafe {
        // A refusal leaves the defaults: more memory use, nothing else.
        libc::mallopt(libc::M_MMAP_THRESHOLD, APART_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_BYTES);
    }
}

/// Returns the allocator's free memory to the kernel, wherever it is in the heap. Threads that
/// allocate meanwhile wait.
pub fn return_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it changes only memory that is free; it may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
