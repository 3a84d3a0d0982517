//! Giving frames back to the kernel without an event.
//!
//! The victim buffer is registered with the userfaultfd that tells of the program's memory calls (see
//! [`crate::layout`]). Whoever drops memory of it waits until the event of that is read. So frames are moved to a
//! scratch area first, which is registered with a userfaultfd that asks for no events, and are dropped there.

use std::sync::{Mutex, PoisonError};

use farpool_uffd::{PAGE_BYTES, Pagemap, Uffd, register_mode};

use crate::frames::runs;
use crate::moves::{self, MAX_PAGES};
use crate::sys;

/// Frames that are dropped with one call.
const SCRATCH_PAGES: usize = 4 * MAX_PAGES;

/// See the module's description.
#[derive(Debug)]
pub struct Drain {
    uffd: Uffd,
    /// Held while the scratch area is in use.
    scratch: Mutex<usize>,
}

impl Drain {
    /// `uffd` has agreed with the kernel on MOVE and on no event.
    pub fn new(uffd: Uffd) -> Result<Drain, std::io::Error> {
        let bytes = SCRATCH_PAGES * PAGE_BYTES;
        let scratch = sys::map_local_without_children(bytes)?;
        sys::advise(scratch, bytes, libc::MADV_NOHUGEPAGE).ok();
        uffd.register(scratch, bytes, register_mode::MISSING)?;
        Ok(Drain { uffd, scratch: Mutex::new(scratch) })
    }

    /// Gives `bytes` of frames from `start` on back to the kernel; not all of them need be there.
    pub fn release(&self, pagemap: &Pagemap, start: usize, bytes: usize) {
        let scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = start;
        while at < start + bytes {
            let piece = (SCRATCH_PAGES * PAGE_BYTES).min(start + bytes - at);
            let moved = self.uffd.move_pages(*scratch, at, piece, false, true);
            sys::release(*scratch, piece);
            if moved.errno.is_some() {
                drop_rest(pagemap, at, piece);
            }
            at += piece;
        }
    }
}

/// What could not be moved (a page under migration, or pinned) is dropped where it is.
fn drop_rest(pagemap: &Pagemap, start: usize, bytes: usize) {
    let mut at = start;
    while at < start + bytes {
        let count = MAX_PAGES.min((start + bytes - at) / PAGE_BYTES);
        for (first, count) in runs(moves::occupied(pagemap, at, count)) {
            sys::release(at + first * PAGE_BYTES, count * PAGE_BYTES);
        }
        at += count * PAGE_BYTES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_uffd::features;

    #[test]
    fn frames_are_given_back_and_the_scratch_area_is_empty_again() {
        let uffd = match Uffd::open(features::MOVE, true) {
            Ok(uffd) => uffd,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let (drain, pagemap) = (Drain::new(uffd).expect("scratch"), Pagemap::open().expect("map"));
        let pages = 2 * SCRATCH_PAGES + 3;
        let area = sys::map_local(pages * PAGE_BYTES).expect("area");
        // Every page but the fifth.
        sys::zero_pages(area, 4);
        sys::zero_pages(area + 5 * PAGE_BYTES, pages - 5);
        drain.release(&pagemap, area, (pages - 1) * PAGE_BYTES);
        assert_eq!(moves::occupied(&pagemap, area, MAX_PAGES), 0);
        assert_eq!(moves::occupied(&pagemap, area + (pages - 2) * PAGE_BYTES, 2), 0b10);
        let scratch = *drain.scratch.lock().expect("scratch");
        assert_eq!(moves::occupied(&pagemap, scratch, MAX_PAGES), 0);
    }
}
