//! Returns frames to the kernel without an event.
//!
//! The victim buffer is registered with the userfaultfd that reports the program's memory calls
//! (see [`crate::space::layout`]): a thread that drops memory of it would wait until that event is
//! read. So frames are unregistered for the moment in which they are dropped. Moving them to memory
//! without events first costs 3 us a page where they are scattered, and 10 to 14 us while another
//! processor runs the program; this costs 0.3 and 0.6 us.

use farpool_uffd::{Pagemap, Uffd, register_mode};

use crate::abort::fail_closed;
use crate::space::moves;
use crate::sys;

/// Tries before giving up: each but the first follows a call of the program that locked memory in
/// the microseconds of the try before.
const TRIES: usize = 1000;

/// Returns `bytes` of frames from `start` on to the kernel; not all of them need be present. The
/// caller owns all frames of the range: no page may be moved into it meanwhile. `unlock` unlocks
/// the buffer, which a program that locks all its memory has locked, too (mlockall).
pub fn release(uffd: &Uffd, pagemap: &Pagemap, start: usize, bytes: usize, unlock: impl Fn()) {
    for _ in 0..TRIES {
        // No memory for two more mappings: there will be an event, which carries no news.
        let is_unseen = uffd.unregister(start, bytes).is_ok();
        if sys::release(start, bytes).is_err() {
            unlock();
        }
        if is_unseen && let Err(error) = uffd.register(start, bytes, register_mode::MISSING) {
            fail_closed(&format!(
                "the victim buffer at {start:#x} cannot be registered again: {error}"
            ));
        }
        // If the buffer is locked, the kernel drops nothing. It fills what a call of mlockall finds
        // unregistered.
        if moves::first_occupied(pagemap, start, start + bytes).is_none() {
            return;
        }
    }
    fail_closed(&format!("frames of the victim buffer at {start:#x} cannot be dropped"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_uffd::features;
    use farpool_units::PAGE_BYTES;

    #[test]
    fn frames_are_given_back_without_an_event_and_can_be_moved_to_again() {
        let uffd = match Uffd::open(features::MOVE | features::EVENT_REMOVE, true) {
            Ok(uffd) => uffd,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let pagemap = Pagemap::open().expect("map");
        let area = sys::map_local(8 * PAGE_BYTES).expect("area");
        let source = sys::map_local(PAGE_BYTES).expect("source");
        sys::zero_pages(area, 4);
        sys::zero_pages(area + 5 * PAGE_BYTES, 3);
        uffd.register(area, 8 * PAGE_BYTES, register_mode::MISSING).expect("registered");
        // It would wait for ever if it raised an event, which nothing here reads.
        release(&uffd, &pagemap, area, 6 * PAGE_BYTES, || panic!("nothing is locked"));
        assert_eq!(moves::occupied(&pagemap, area, 8), 0b1100_0000);
        sys::zero_pages(source, 1);
        let moved = uffd.move_pages(area + 5 * PAGE_BYTES, source, PAGE_BYTES, false, false);
        assert_eq!((moved.done_bytes, moved.errno), (PAGE_BYTES, None));
    }

    #[test]
    fn frames_that_the_program_has_locked_are_given_back() {
        let uffd = match Uffd::open(features::MOVE | features::EVENT_REMOVE, true) {
            Ok(uffd) => uffd,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let pagemap = Pagemap::open().expect("map");
        let (area, bytes) = (sys::map_local(4 * PAGE_BYTES).expect("area"), 4 * PAGE_BYTES);
        sys::zero_pages(area, 4);
        uffd.register(area, bytes, register_mode::MISSING).expect("registered");
        // SAFETY: a lock changes nothing that memory holds.
        let locked = unsafe { libc::mlock(area as *const _, bytes) };
        assert_eq!(locked, 0, "a limit of 64 KiB and more is usual");
        release(&uffd, &pagemap, area, bytes, || sys::unlock(area, bytes).expect("unlocked"));
        assert_eq!(moves::occupied(&pagemap, area, 4), 0);
    }
}
