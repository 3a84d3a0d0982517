//! How the allocator treats large buffers.

use farpool_units::PAGE_BYTES;
use rustix::mm::{Advice, madvise};

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

/// Frees a buffer whose memory goes to the kernel at once. Freed as usual, it stays resident as a
/// gap in the heap until something of its length comes.
pub fn give_back(mut buffer: Vec<u8>) {
    drop_pages(&mut buffer);
}

/// Drops the content of all pages that lie whole within a buffer: they read as zeros.
fn drop_pages(buffer: &mut Vec<u8>) {
    let start = buffer.as_mut_ptr();
    let until_page = start.align_offset(PAGE_BYTES);
    let pages_bytes = buffer.capacity().saturating_sub(until_page) / PAGE_BYTES * PAGE_BYTES;
    if pages_bytes > 0 {
        // SAFETY: the pages lie whole within the buffer, which nothing else refers to; zeros are
        // bytes like others.
        unsafe {
            let pages = start.add(until_page).cast();
            // A refusal (memory that is locked) leaves them resident, as without this.
            let _ = madvise(pages, pages_bytes, Advice::LinuxDontNeed);
        }
    }
}

/// Makes room for `more` bytes in a buffer. Memory that it leaves goes to the kernel at once.
pub fn grow(buffer: &mut Vec<u8>, more: usize) {
    if buffer.capacity() - buffer.len() < more {
        let mut larger = Vec::with_capacity(buffer.len() + more);
        larger.extend_from_slice(buffer);
        give_back(std::mem::replace(buffer, larger));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_grows_keeps_its_bytes() {
        let mut buffer = Vec::new();
        for number in 0..300_000_u32 {
            if buffer.len() == buffer.capacity() {
                let more = buffer.len().max(7);
                grow(&mut buffer, more);
            }
            buffer.push(number.to_le_bytes()[0]);
        }
        let expected = (0..300_000_u32).map(|number| number.to_le_bytes()[0]);
        assert!(buffer.iter().copied().eq(expected));
    }

    #[test]
    fn only_what_lies_within_a_buffer_goes_to_the_kernel() {
        for bytes in [0, 1, PAGE_BYTES, 3 * PAGE_BYTES, 1_000_003] {
            let mut buffer = vec![7; bytes];
            drop_pages(&mut buffer);
            let until_page = buffer.as_ptr().align_offset(PAGE_BYTES).min(bytes);
            let (before, rest) = buffer.split_at(until_page);
            let (pages, after) = rest.split_at(rest.len() / PAGE_BYTES * PAGE_BYTES);
            assert!(pages.iter().all(|byte| *byte == 0), "{bytes}: they have gone");
            assert!(before.iter().chain(after).all(|byte| *byte == 7), "{bytes}: others' pages");
        }
    }
}
