//! Giving frames back to the kernel without an event.
//!
//! The victim buffer is registered with the userfaultfd that tells of the program's memory calls
//! (see [`crate::layout`]): whoever drops memory of it would wait until the event of that is read.
//! So frames are not registered for the moment in which they are dropped. Moving them to memory
//! without events first costs 3 us a page where they are scattered, and 10 to 14 us while another
//! processor runs the program; this costs 0.3 and 0.6 us.

use farpool_uffd::{Uffd, register_mode};

use crate::serve::fail_closed;
use crate::sys;

/// Gives `bytes` of frames from `start` on back to the kernel; not all of them need be there. The caller owns all
/// frames of the range: nobody may move a page into it meanwhile.
pub fn release(uffd: &Uffd, start: usize, bytes: usize) {
    if uffd.unregister(start, bytes).is_err() {
        // No memory for two more mappings: there will be an event, which tells nothing new.
        return sys::release(start, bytes);
    }
    sys::release(start, bytes);
    if let Err(error) = uffd.register(start, bytes, register_mode::MISSING) {
        fail_closed(&format!(
            "the victim buffer at {start:#x} cannot be registered again: {error}"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moves;
    use farpool_uffd::{Pagemap, features};
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
        // Would wait for ever if it raised an event: nobody reads any.
        release(&uffd, area, 6 * PAGE_BYTES);
        assert_eq!(moves::occupied(&pagemap, area, 8), 0b1100_0000);
        sys::zero_pages(source, 1);
        let moved = uffd.move_pages(area + 5 * PAGE_BYTES, source, PAGE_BYTES, false, false);
        assert_eq!((moved.done_bytes, moved.errno), (PAGE_BYTES, None));
    }
}
