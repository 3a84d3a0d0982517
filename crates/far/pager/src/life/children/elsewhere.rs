//! Children that were handed over to pagers of their own: only these may read their userfaultfds.
//!
//! Known by their descriptors' numbers to the process that has the descriptor table when this
//! process is killed: without locks, and without allocating.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::SeqCst;

/// The most children that are being handed over at a time, which takes each some milliseconds.
const MOST: usize = 64;
const NOBODY: RawFd = -1;

static ELSEWHERE: [AtomicI32; MOST] = [const { AtomicI32::new(NOBODY) }; MOST];

/// Notes a child. False: there are too many.
#[must_use]
pub fn add(descriptor: RawFd) -> bool {
    replace(NOBODY, descriptor)
}

/// Forgets a child that is served here again, or is about to be closed here.
pub fn remove(descriptor: RawFd) {
    replace(descriptor, NOBODY);
}

pub fn contains(descriptor: RawFd) -> bool {
    ELSEWHERE.iter().any(|place| place.load(SeqCst) == descriptor)
}

fn replace(old: RawFd, new: RawFd) -> bool {
    ELSEWHERE.iter().any(|place| place.compare_exchange(old, new, SeqCst, SeqCst).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_handed_over_is_known_until_that_is_over() {
        assert!(!contains(7));
        assert!(add(7) && contains(7));
        for number in 1000..1000 + 63 {
            assert!(add(number));
        }
        assert!(!add(8), "there are too many");
        remove(7);
        assert!(!contains(7) && add(8));
    }
}
