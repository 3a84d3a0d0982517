//! Where a sidecar's memory lies in the program's address space: apart from all memory of the
//! program.
//!
//! A program may unmap memory and map at the same place a moment later (MAP_FIXED): alone in its
//! address space it knows that nothing was mapped there meanwhile. But such a hole is just what the
//! kernel chooses for a new mapping. So a sidecar's image is put into the middle of the largest
//! gap, and the sidecar's later mappings behind it. Addresses are not reused: there are some 10^13
//! bytes of them.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use farpool_units::PAGE_BYTES;

/// The first address that is not handed out yet; 0: this process is alone in its address space.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Makes memory be mapped from `start` on. The first call counts.
pub fn begin(start: usize) {
    let _ = NEXT.compare_exchange(0, start, Relaxed, Relaxed);
}

/// Where to map this many bytes: a hint, which the kernel ignores if anything is there. 0:
/// anywhere.
pub fn address(bytes: usize) -> usize {
    let pages = bytes.div_ceil(PAGE_BYTES);
    let taken = NEXT.fetch_update(Relaxed, Relaxed, |next| {
        (next != 0).then(|| next.saturating_add(pages * PAGE_BYTES))
    });
    taken.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_one_another() {
        assert_eq!(address(1), 0, "not begun");
        begin(1 << 40);
        begin(1 << 41);
        assert_eq!(address(1), 1 << 40);
        assert_eq!(address(2 * PAGE_BYTES), (1 << 40) + PAGE_BYTES);
        assert_eq!(address(PAGE_BYTES), (1 << 40) + 3 * PAGE_BYTES);
    }
}
