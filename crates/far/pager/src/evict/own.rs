//! Moves out, under a sidecar, pages that a fork shares with another process.
//!
//! UFFDIO_MOVE takes only pages of one process. The preloaded library drops such pages where they
//! are ([`super::shared`]), which a sidecar must not do: its own MADV_DONTNEED would be an event
//! like one of the program's, and the kernel releases the address space's lock until the event is
//! read, and then looks the mapping up anew. By then the program can have something else there,
//! which would be dropped.
//!
//! So such pages are first made this process's own, by copying. That takes memory just when it is
//! short: right after a fork each process would have a copy of all shared pages if they were not
//! moved out at once. Hence one chunk at a time:
//! 1. the pages to take from a chunk are known, and some of them are shared: nothing is claimed,
//!    the lock is released;
//! 2. the evictor's writes are drained, because the steward, for which faults may have to wait, may
//!    wait for them;
//! 3. the pages are made the process's own, as by a write of the program: this can wait for a fault
//!    if the program has dropped a page meanwhile, and does not change what the page holds;
//! 4. the same pages of the chunk are moved out like any others, before anything else is moved out.
//!
//! Invariant: of each process at most one chunk has been copied and not moved out. Between 3 and 4
//! anything may happen to the pages: step 4 takes what is there then. Pages that a fork has shared
//! again meanwhile wait for the next time.

use std::sync::atomic::Ordering::Relaxed;

use farpool_uffd::{PageRange, Pagemap, category};
use farpool_units::PAGE_BYTES;

use crate::evict::evictor::Evictor;
use crate::evict::wanted::{Tried, Wanted};
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES, CHUNKS, runs};
use crate::sys;

impl Evictor {
    /// The given pages of a chunk that another process also maps.
    pub(super) fn shared_pages(&self, number: usize, pages: u64) -> u64 {
        self.chunk_start(number).map_or(0, |start| shared_pages(&self.core.pagemap, start) & pages)
    }

    /// Takes the pages of a chunk that the kernel has just refused to move. If other processes also
    /// map them, this process shares pages without a fork that was reported: it has shared them
    /// since before it had a pager.
    pub(super) fn take_busy(&mut self, number: usize) -> u64 {
        let busy = std::mem::take(&mut self.busy);
        if busy != 0 && !self.core.shares.load(Relaxed) && self.shared_pages(number, busy) != 0 {
            self.core.note_sharing();
        }
        busy
    }

    /// Makes pages of a chunk this process's own, so that they can be moved. The caller holds no
    /// lock and no claim, see the module's description.
    ///
    /// Pages that could not be moved are pinned by the kernel for I/O, and stay so; or another
    /// process maps them too, or did until it wrote to its own copies, since a fork or because KSM
    /// has merged them. The page map does not tell these apart: a page whose only user is this
    /// process is still not its own until it is written to.
    pub(super) fn make_own(&mut self, number: usize, pages: u64) {
        let Some(start) = self.chunk_start(number).filter(|_| pages != 0) else { return };
        self.drain();
        for (first, count) in runs(pages) {
            let from = start + first * PAGE_BYTES;
            if sys::unshare(from, count * PAGE_BYTES).is_err() {
                // It fails where the mapping is gone or may not be written to, and ends there.
                (0..count).for_each(|page| {
                    let _ = sys::unshare(from + page * PAGE_BYTES, PAGE_BYTES);
                });
            }
        }
    }

    /// Moves out the pages that were made the process's own for that. None: not now; they come
    /// first the next time.
    pub(super) fn move_own(&mut self) -> Option<i64> {
        let Some(own) = self.own else { return Some(0) };
        let tried = self.try_chunk(own.number, Wanted::These(own.take))?;
        self.own = None;
        match tried {
            Tried::Moved(pages) => Some(pages),
            Tried::Shared(_) => Some(0),
        }
    }

    fn chunk_start(&self, number: usize) -> Option<usize> {
        let superpage = self.core.space.by_id(number / CHUNKS)?;
        Some(superpage.base() + number % CHUNKS * CHUNK_BYTES)
    }
}

/// The pages of a chunk that another process also maps; none if the kernel does not say.
fn shared_pages(pagemap: &Pagemap, start: usize) -> u64 {
    let shared = pagemap.shared_pages(start, CHUNK_PAGES).unwrap_or(0);
    if shared == 0 { 0 } else { shared & !zero_pages(pagemap, start) }
}

/// The pages of a chunk that map the kernel's zero page: they can be moved as they are, and take no
/// memory before they are written to.
fn zero_pages(pagemap: &Pagemap, start: usize) -> u64 {
    let mut ranges = [PageRange::default(); CHUNK_PAGES];
    let found = pagemap.scan(start, start + CHUNK_BYTES, category::ZERO_PAGE, &mut ranges);
    let bits = |range: &PageRange| {
        let first = (range.first() - start) / PAGE_BYTES;
        (first..first + range.pages()).fold(0_u64, |bits, page| bits | 1 << page)
    };
    found.map_or(0, |(found, _)| found.iter().map(bits).fold(0, |all, bits| all | bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::wanted::Own;

    fn write(start: usize, page: usize) {
        // SAFETY: a page of the test's own mapping, which is never unmapped.
        unsafe { std::ptr::write_volatile((start + page * PAGE_BYTES) as *mut u8, 1) };
    }

    fn read(start: usize, page: usize) {
        // SAFETY: as above.
        unsafe { std::ptr::read_volatile((start + page * PAGE_BYTES) as *const u8) };
    }

    /// A child that shares all memory until it is killed.
    struct Child(i32);

    impl Child {
        fn fork() -> Child {
            // SAFETY: the child makes one system call again and again, and nothing else.
            match unsafe { libc::fork() } {
                0 => loop {
                    // SAFETY: no arguments.
                    unsafe { libc::pause() };
                },
                pid => Child(pid),
            }
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            let mut status = 0;
            // SAFETY: the test's own child, and a status to write to.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, &raw mut status, 0);
            }
        }
    }

    #[test]
    fn pages_are_shared_from_a_fork_until_they_are_made_own_and_zeros_never_are() {
        let pagemap = Pagemap::open().expect("page map");
        let start = sys::map_local(CHUNK_BYTES).expect("map");
        // It fails where the kernel has no huge pages.
        let _ = sys::advise(start, CHUNK_BYTES, libc::MADV_NOHUGEPAGE);
        [0, 1, 5, 63].into_iter().for_each(|page| write(start, page));
        [2, 62].into_iter().for_each(|page| read(start, page));
        assert_eq!(shared_pages(&pagemap, start), 0);
        assert_eq!(zero_pages(&pagemap, start), 1 << 2 | 1 << 62);
        let child = Child::fork();
        assert_eq!(shared_pages(&pagemap, start), 1 << 0 | 1 << 1 | 1 << 5 | 1 << 63);
        write(start, 1);
        sys::unshare(start + 5 * PAGE_BYTES, PAGE_BYTES).expect("unshare");
        assert_eq!(shared_pages(&pagemap, start), 1 << 0 | 1 << 63);
        drop(child);
        assert_eq!(shared_pages(&pagemap, start), 0);
    }

    #[test]
    fn a_chunk_is_made_own_once() {
        let own = Own { number: 3, take: 7, shared: 2 };
        assert_eq!(Tried::of(own), Tried::Shared(own));
        assert_eq!(Tried::of(Own { shared: 0, ..own }), Tried::Moved(0));
        assert!(Wanted::Chosen.may_be_shared() && Wanted::All.may_be_shared());
        assert!(!Wanted::These(7).may_be_shared() && !Wanted::Still.may_be_shared());
    }
}
