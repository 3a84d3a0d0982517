//! Evicts pages that a fork shares with another process, or that KSM has merged with equal ones.
//!
//! UFFDIO_MOVE takes only pages of one process. Making them the process's own first, by copying,
//! would take memory just when it is short: right after a fork each process would copy all shared
//! pages, and to un-merge a page costs a frame and several times what dropping its mapping does. So
//! such pages are written to the blade while they stay where they are, write-protected, and then
//! dropped:
//! 1. the chunk's pages are in phase Evicting (claimed by the caller), so that faults wait;
//! 2. they are write-protected: a writing thread faults, and waits too;
//! 3. the pages that are still shared now are copied, written to the blade, and acknowledged;
//! 4. the mapping is dropped, and only then is the phase Far.
//!
//! The kernel cannot write to them for a device either (O_DIRECT, io_uring): it pins a page for
//! that only after making it the process's own, and can no longer do so once it is protected. A
//! page that became the process's own before that may be pinned, and what the device writes would
//! be lost with the mapping: hence the second check in step 3. The registry's lock is held all the
//! time, so no fork and no unmapping comes between.

use std::sync::atomic::Ordering::SeqCst;

use farpool_board::Counter;
use farpool_pool::PageWrite;
use farpool_units::PAGE_BYTES;

use crate::evict::claim::Claim;
use crate::evict::evictor::Evictor;
use crate::evict::in_place::{IN_PLACE, InPlace};
use crate::space::page::{PageState, Phase};
use crate::space::units::{CHUNK_PAGES, bits, runs};
use crate::space::{Page, Superpage};
use crate::sys;

impl Evictor {
    /// Moves out the claimed pages of a chunk that another process also maps, and takes them from
    /// the claim. Returns how many were moved out. The registry must be locked.
    pub(crate) fn write_shared(
        &mut self,
        superpage: &'static Superpage,
        chunk: usize,
        layer: usize,
        claim: &mut Claim,
    ) -> i64 {
        // Under a sidecar shared pages are moved like any others, see [`super::own`].
        if !self.core.shares.load(SeqCst) || self.core.layout.follows() {
            return 0;
        }
        let start = superpage.base() + chunk * CHUNK_PAGES * PAGE_BYTES;
        let protected = self.protect_shared(start, claim.taken());
        if protected == 0 {
            return 0;
        }
        claim.give_up_copies(superpage, protected);
        let stored = self.store(superpage, chunk, layer, protected);
        for (first, count) in runs(stored) {
            let _ =
                sys::advise(start + first * PAGE_BYTES, count * PAGE_BYTES, libc::MADV_DONTNEED);
        }
        superpage.far_pages.fetch_add(stored.count_ones(), SeqCst);
        for index in bits(protected) {
            let far = PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(layer);
            let state = if stored & (1 << index) == 0 { claim.before(index) } else { far };
            superpage.pages[chunk * CHUNK_PAGES + index].store(state);
        }
        self.unprotect(start, protected & !stored);
        let _ = self.core.uffd.wake(start, CHUNK_PAGES * PAGE_BYTES);
        claim.release(protected);
        let count = stored.count_ones();
        self.core.count(Counter::Evictions, u64::from(count));
        self.core.count(Counter::PagesWritten, u64::from(count));
        i64::from(count)
    }

    /// Protects the pages that another process also maps, and still does once they are protected.
    /// Returns their bits.
    fn protect_shared(&self, start: usize, pages: u64) -> u64 {
        let shared = || self.core.pagemap.shared_pages(start, CHUNK_PAGES).unwrap_or(0);
        let protected = self.protect(start, shared() & pages);
        if protected == 0 {
            return 0;
        }
        let still = shared() & protected;
        self.unprotect(start, protected & !still);
        still
    }

    fn protect(&self, start: usize, pages: u64) -> u64 {
        let mut protected = 0;
        for (first, count) in runs(pages) {
            let from = start + first * PAGE_BYTES;
            if self.core.uffd.write_protect(from, count * PAGE_BYTES, true).is_ok() {
                (first..first + count).for_each(|index| protected |= 1 << index);
            }
        }
        protected
    }

    fn unprotect(&self, start: usize, pages: u64) {
        for (first, count) in runs(pages) {
            // It fails where the mapping is gone.
            let from = start + first * PAGE_BYTES;
            let _ = self.core.uffd.write_protect(from, count * PAGE_BYTES, false);
        }
    }

    /// Frees the memory of `copies` if it was used.
    pub(crate) fn release_copies(&mut self) {
        if std::mem::take(&mut self.in_place.used) {
            // If the program has locked it, it stays, and is written over.
            let _ = sys::release(self.copies, CHUNK_PAGES * PAGE_BYTES);
        }
    }

    /// Copies the pages to `copies`. Returns the bits of those that were present.
    fn copy(&self, start: usize, pages: u64) -> u64 {
        let mut copied = 0;
        for (first, count) in runs(pages) {
            let mut next = first;
            while next < first + count {
                let at = next * PAGE_BYTES;
                let left = first + count - next;
                let read = sys::read_program(&self.core.memory, start + at, self.copies + at, left);
                (next..next + read).for_each(|index| copied |= 1 << index);
                next += read + 1; // the page it stopped at stays
            }
        }
        copied
    }

    /// Writes the pages to the blade. Returns the bits of those that it stored.
    fn store(
        &mut self,
        superpage: &'static Superpage,
        chunk: usize,
        layer: usize,
        pages: u64,
    ) -> u64 {
        let start = superpage.base() + chunk * CHUNK_PAGES * PAGE_BYTES;
        let mut writes = std::mem::take(&mut self.writes);
        writes.clear();
        for index in bits(self.copy(start, pages)) {
            let page = Page { superpage, index: chunk * CHUNK_PAGES + index };
            if let Some(at) = self.core.place(page, layer) {
                let from = (self.copies + index * PAGE_BYTES) as *const u8;
                writes.push(PageWrite { at, from, token: IN_PLACE | index as u64 });
            }
        }
        let segment = self.core.layers.segment(layer);
        let blade = segment.and_then(|segment| self.core.pool.blade_of(segment, superpage.id()));
        let blade = blade.unwrap_or_default();
        self.in_place = InPlace { used: true, blade, ..InPlace::default() };
        writes.iter().for_each(|write| self.in_place.waiting |= 1 << (write.token & 63));
        // SAFETY: `copies` is this thread's own memory, and nothing touches it before all are
        // acknowledged.
        let sent = unsafe { self.lane.write(&writes) };
        self.writes = writes;
        if let Err(error) = sent {
            sys::say(&format!("an eviction could not be sent: {error}"));
            return 0;
        }
        while self.in_place.waiting != 0 {
            self.lane.wait(&mut self.done);
            self.settle_done();
        }
        self.in_place.stored
    }
}
