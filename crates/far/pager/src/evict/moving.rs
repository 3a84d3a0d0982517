//! Steps 1 to 3 of an eviction: pages are claimed, moved out of the program, and become victims.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use farpool_board::Counter;
use farpool_uffd::Outcome;
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::Mover;
use crate::evict::claim::Claim;
use crate::evict::evictor::Evictor;
use crate::space::page::Phase;
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES, bits, runs};
use crate::space::{Superpage, moves};
use crate::sys;

/// The evictor's progress with a run of pages.
struct Progress {
    /// The next page.
    next: usize,
    /// Pages to try at a time.
    most: usize,
    /// The next page has been made this process's own.
    unshared: bool,
    /// Pages that the kernel refuses to move, one bit each.
    refused: u64,
}

impl Evictor {
    /// Moves the claimed pages out. Returns those that the kernel refuses to move, one bit each.
    pub(super) fn move_out(
        &mut self,
        superpage: &Superpage,
        chunk: usize,
        tray: u16,
        claim: &Claim,
    ) -> u64 {
        runs(claim.mask()).fold(0, |refused, (first, count)| {
            refused | self.move_run(superpage, chunk, tray, claim, first..first + count)
        })
    }

    /// Moves a run in as few pieces as its mappings allow. A piece begins with a resident page of
    /// memory that may be far, and the kernel moves pieces of one mapping only: gaps of other
    /// mappings are never touched.
    fn move_run(
        &mut self,
        superpage: &Superpage,
        chunk: usize,
        tray: u16,
        claim: &Claim,
        run: Range<usize>,
    ) -> u64 {
        let program = superpage.base() + chunk * CHUNK_BYTES;
        let buffer = self.core.frames.tray_address(tray);
        // While every call moved all it was asked to, no move can have gone uncounted.
        let mut is_certain = true;
        let mut at = Progress { next: run.start, most: CHUNK_PAGES, unshared: false, refused: 0 };
        while at.next < run.end {
            if !claim.is_resident(at.next) {
                at.next += 1;
                continue;
            }
            let (from, to) = (program + at.next * PAGE_BYTES, buffer + at.next * PAGE_BYTES);
            let count = at.most.min(run.end - at.next);
            let outcome =
                self.core.step(Mover::Evictor, || self.take_out(to, from, count, is_certain));
            let moved = outcome.done_bytes / PAGE_BYTES;
            is_certain &= moved == count;
            at.next += moved;
            if moved > 0 {
                (at.most, at.unshared) = ((at.most * 2).min(CHUNK_PAGES), false);
                continue;
            }
            // Moved and not counted, or discarded behind our back: absent pages are skipped.
            let left = moves::occupied(&self.core.pagemap, from, count).trailing_zeros() as usize;
            if left > 0 {
                at.next += left.min(count);
                continue;
            }
            if self.see_why(superpage, chunk, tray, &mut at, count, outcome.errno) {
                break;
            }
        }
        at.refused
    }

    /// The kernel moved none of `count` pages, the first of which is present: decides by `errno`
    /// what is tried next. True: nothing more of this run.
    fn see_why(
        &mut self,
        superpage: &Superpage,
        chunk: usize,
        tray: u16,
        at: &mut Progress,
        count: usize,
        errno: Option<i32>,
    ) -> bool {
        let program = superpage.base() + chunk * CHUNK_BYTES;
        match errno {
            // The program changes its address space: what was claimed may be out of date.
            Some(libc::ECANCELED) => return true,
            Some(libc::ENOENT) if self.core.layout.follows() => {
                // A mapping that is being moved is not found until the kernel says EAGAIN.
                if !self.core.uffd.is_changing() {
                    self.core.mistrust(program, program + CHUNK_BYTES);
                }
                return true;
            }
            Some(libc::EAGAIN) if self.core.layout.follows() => return true,
            None | Some(libc::EAGAIN) => {}
            // An unknown frame would be taken for this page.
            Some(libc::EEXIST) => {
                fail_closed(&format!("tray {tray}, page {}: a frame is there already", at.next))
            }
            // Shared with another process: once it is this process's own, it can be moved. Pinned
            // by the kernel for I/O: it keeps failing with EBUSY and stays where it is.
            Some(libc::EBUSY) if self.core.layout.follows() => {
                self.busy |= 1 << at.next;
                self.refuse(superpage, chunk, at);
            }
            // KSM has merged it with an equal one: the next time the chunk's shared pages are
            // written from where they are, see [`super::shared`].
            Some(libc::EBUSY) if self.is_shared(program + at.next * PAGE_BYTES) => {
                self.core.note_sharing();
                return true;
            }
            // Its other users are gone, or have written to copies of their own; the kernel learns
            // by a write that it is this process's own.
            Some(libc::EBUSY) if !at.unshared => {
                at.unshared = true;
                let _ = sys::unshare(program + at.next * PAGE_BYTES, PAGE_BYTES);
            }
            // More than one mapping: a smaller piece may lie in one.
            Some(errno) if errno != libc::EBUSY && count > 1 => at.most = count / 2,
            // Pinned, locked, of other rights, or not the program's any more: it stays.
            _ => {
                self.refuse(superpage, chunk, at);
                at.unshared = false;
            }
        }
        false
    }

    /// Whether another process, or another page of this one, also maps what is at `address`.
    fn is_shared(&self, address: usize) -> bool {
        self.core.pagemap.shared_pages(address, 1).is_ok_and(|shared| shared != 0)
    }

    /// Notes that the next page stays.
    fn refuse(&self, superpage: &Superpage, chunk: usize, at: &mut Progress) {
        self.core.count(Counter::Refused, 1);
        superpage.hot[chunk].fetch_or(1 << at.next, Relaxed);
        at.refused |= 1 << at.next;
        at.next += 1;
    }

    /// One move out of the program. Where it maps memory unseen, that memory may not be registered:
    /// touched after the move, it would read as zeros. The kernel moves within one mapping only, so
    /// a fill first asks whether the first page's mapping is registered (ENOENT: it is not; a page
    /// that is present cannot be filled). The layout's lock is held, and no registered mapping goes
    /// before its event has been read.
    ///
    /// The question fills a page that is absent. That is right where the program has just dropped
    /// it, but a page that the last call moved and did not count must not be filled. `is_certain`:
    /// there is no such page.
    fn take_out(&self, to: usize, from: usize, count: usize, is_certain: bool) -> Outcome {
        if self.core.layout.follows() {
            if !is_certain && moves::occupied(&self.core.pagemap, from, 1) == 0 {
                return Outcome { done_bytes: 0, errno: Some(libc::ENODATA) };
            }
            let asked = self.core.uffd.zero(from, PAGE_BYTES, false);
            if matches!(asked.errno, Some(libc::ENOENT | libc::EAGAIN)) {
                return asked;
            }
        }
        self.core.uffd.move_pages(to, from, count * PAGE_BYTES, false, true)
    }

    /// Sets the states by what really arrived. Returns the bits of the victims.
    pub(super) fn settle(
        &mut self,
        superpage: &'static Superpage,
        chunk: usize,
        tray: u16,
        layer: usize,
        claim: &Claim,
    ) -> u64 {
        let arrived = self.arrived(tray);
        if arrived & !claim.mask() != 0 {
            fail_closed(&format!(
                "tray {tray} of the victim buffer holds frames {arrived:#x} where only {:#x} can \
                 be",
                claim.mask()
            ));
        }
        if arrived != 0 {
            self.core.frames.fill(tray, superpage, chunk, arrived);
        }
        for index in bits(claim.mask()) {
            let cell = &superpage.pages[chunk * CHUNK_PAGES + index];
            let before = claim.before(index);
            let state = match (arrived & (1 << index) != 0, before.has_copy()) {
                (false, _) => before,
                (true, true) => before.with_phase(Phase::Victim),
                (true, false) => before.with_phase(Phase::Victim).with_layer(layer),
            };
            cell.store(state);
        }
        arrived
    }

    fn arrived(&self, tray: u16) -> u64 {
        moves::occupied(&self.core.pagemap, self.core.frames.tray_address(tray), CHUNK_PAGES)
    }
}
