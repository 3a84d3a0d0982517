//! How the allocator treats large buffers.

/// Buffers from this size on go back to the kernel when they are freed: requests with the largest
/// items by default fit below, and for larger ones getting the memory anew costs little beside
/// copying it.
const APART_BYTES: libc::c_int = 2 << 20;
/// The end of the heap goes back when it is free and this long.
const TRIM_BYTES: libc::c_int = 1 << 20;

/// Has large buffers have memory of their own, always: by default the allocator keeps what it has
/// once seen freed, up to 64 MiB for each thread, and the memory limit does not see it.
pub fn keep_large_buffers_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: this sets numbers that the allocator reads; it may be called at any time.
    unsafe {
        // A refusal leaves the defaults: more memory, nothing else.
        libc::mallopt(libc::M_MMAP_THRESHOLD, APART_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_BYTES);
    }
}
