//! The victim buffer, which is also the reserve of free frames.
//!
//! It is a range of addresses cut into trays of 64 slots. The evictor moves a chunk's pages into an
//! empty tray, writes them to the blade, and queues the tray: its frames are now free, yet still
//! hold the pages. A fault on such a page takes it back (a second chance without network); a fault
//! that needs frames takes the oldest ones, whose pages are then only far. A run of fetched pages is read
//! into such frames and they are moved into the program, so they go round without the kernel's
//! allocator (FluidMem's idea with stock kernels' UFFDIO_MOVE). Lone pages are copied into new memory
//! instead, and the evictor gives the oldest trays back to the kernel for it.
//!
//! Bits of a tray, one for each slot:
//! * `filled`: a frame is mapped at the slot;
//! * `valid`: the frame holds the page of the tray's chunk with the same index, and that page is in
//!   phase Victim or is just being taken back;
//! * `writing`: the blade is being sent the frame, which must stay where it is;
//! * `busy`: the frame was handed out and has not come back;
//! * `kept`: the page may not be on the blade, so the frame is not free until the page goes back.
//!
//! A tray holds pages of one chunk, and a chunk has pages in one tray at most. The pages of a tray
//! had the rights that its frames have ([`zones`]).

mod queues;
mod slots;
mod trays;
mod zones;

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI64, AtomicU32};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use farpool_uffd::{Pagemap, Uffd};
use farpool_units::{PAGE_BYTES, exactly};

use queues::Queues;
pub use slots::{FrameRun, FrameSlot, TakenTray, bits, runs};
use trays::Tray;
pub use zones::Zone;

use crate::abort::fail_closed;
use crate::space::drain;
use crate::space::page::{PageState, Phase};
use crate::space::{CHUNK_PAGES, NO_TRAY, Page, Superpage};
use crate::sys;

/// Trays of a process: 672 MiB of addresses. When all of a zone hold something, eviction of such
/// memory waits for the blade.
pub const TRAYS: usize = Zone::WriteExecute.first_tray() + Zone::WriteExecute.trays();
pub const TRAY_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;

/// The buffer.
#[derive(Debug)]
pub struct Frames {
    base: usize,
    /// All that there are.
    trays: &'static [Tray],
    can_execute: bool,
    queues: Mutex<Queues>,
    free: AtomicI64,
    /// Changes when frames become free; waited for by those who need one.
    version: AtomicU32,
    recycles: bool,
    /// Missing frames that threads of the program wait for, see [`Frames::note_touched`].
    touched: Mutex<Vec<usize>>,
}

impl Frames {
    /// Reserves the addresses. The caller registers them with userfaultfd. `recycles`: see
    /// [`Frames::recycles`]; then all frames are readable and writable. `executes`: some are to be
    /// executable.
    pub fn new(recycles: bool, executes: bool) -> Result<Frames, std::io::Error> {
        let (base, zones) = zones::map(recycles, executes)?;
        let last = zones[zones.len() - 1];
        let count = last.first_tray() + last.trays();
        // A forked child makes a buffer of its own; sharing this one would only copy its frames.
        sys::keep_from_children(base, count * TRAY_BYTES)?;
        sys::advise(base, count * TRAY_BYTES, libc::MADV_NOHUGEPAGE).ok();
        let queues = Mutex::new(Queues::new(zones));
        let can_execute = zones.contains(&Zone::ReadWriteExecute);
        let (free, version) = (AtomicI64::new(0), AtomicU32::new(0));
        Ok(Frames {
            base,
            trays: trays::table(count)?,
            can_execute,
            queues,
            free,
            version,
            recycles,
            touched: Mutex::default(),
        })
    }

    /// The addresses of the whole buffer.
    pub fn range(&self) -> (usize, usize) {
        (self.base, self.trays.len() * TRAY_BYTES)
    }

    /// Whether there are executable frames.
    pub fn can_execute(&self) -> bool {
        self.can_execute
    }

    /// Whether an address lies in the buffer.
    pub fn contains(&self, address: usize) -> bool {
        (self.base..self.base + self.trays.len() * TRAY_BYTES).contains(&address)
    }

    /// Where a frame is mapped.
    pub fn address(&self, slot: FrameSlot) -> usize {
        self.tray_address(slot.tray) + usize::from(slot.index) * PAGE_BYTES
    }

    /// Where a tray begins.
    pub fn tray_address(&self, tray: u16) -> usize {
        self.base + usize::from(tray) * TRAY_BYTES
    }

    /// What is known of the frame at an address, for a message.
    pub fn describe(&self, address: usize) -> String {
        let offset = (address - self.base) / PAGE_BYTES;
        let (tray, index) = (offset / CHUNK_PAGES, offset % CHUNK_PAGES);
        let entry = &self.trays[tray];
        let [filled, valid, writing, busy] =
            [&entry.filled, &entry.valid, &entry.writing, &entry.busy].map(|it| it.load(SeqCst));
        let page = self.page_of(entry, index).map(|page| page.cell().load());
        format!(
            "frame {index} of tray {tray}, filled {filled:#x}, valid {valid:#x}, writing {writing:#x}, \
             busy {busy:#x}, page {page:?}"
        )
    }

    /// Frames that can be handed out, about.
    pub fn free(&self) -> i64 {
        self.free.load(Relaxed)
    }

    /// Pages mapped in the buffer, about, and counts the free ones anew.
    pub fn count(&self) -> u64 {
        let Ok(queues) = self.queues.lock() else {
            return 0;
        };
        let bits = |tray: &u16, busy: bool| {
            let tray = &self.trays[usize::from(*tray)];
            let taken = if busy { 0 } else { tray.busy.load(Relaxed) };
            (tray.filled.load(Relaxed) & !taken).count_ones()
        };
        let free: u32 = queues.clean.iter().map(|tray| bits(tray, false)).sum();
        self.free.store(i64::from(free), Relaxed);
        queues.clean.iter().map(|tray| u64::from(bits(tray, true))).sum()
    }

    /// True when no frame is in the buffer and no write is under way. Retires drained trays.
    pub fn is_empty(&self) -> bool {
        let Ok(mut queues) = self.queues.lock() else {
            return false;
        };
        self.retire_drained(&mut queues);
        queues.empties() == self.trays.len()
    }

    /// True when no tray is being filled or written: what the buffer holds is on the blades, but for what is kept.
    pub fn is_at_rest(&self) -> bool {
        let Ok(queues) = self.queues.lock() else {
            return false;
        };
        queues.empties() + queues.clean.len() == self.trays.len()
    }

    /// Whether the frame at `slot` is the only copy of its page.
    pub fn is_kept(&self, slot: FrameSlot) -> bool {
        self.trays[usize::from(slot.tray)].kept.load(SeqCst) & slot.bit() != 0
    }

    /// Makes drained trays empty at once, so that their chunks can be evicted again.
    pub fn retire_all(&self) {
        if let Ok(mut queues) = self.queues.lock() {
            self.retire_drained(&mut queues);
        }
    }

    /// An empty tray of a zone for the evictor to move a chunk into.
    pub fn take_empty(&self, zone: Zone) -> Option<u16> {
        let mut queues = self.queues.lock().ok()?;
        if queues.vacant[zone as usize].used.is_empty() {
            self.retire_drained(&mut queues);
        }
        queues.vacant[zone as usize].take()
    }

    /// Gives back a tray into which nothing was moved.
    pub fn return_empty(&self, tray: u16) {
        let filled = self.trays[usize::from(tray)].filled.load(SeqCst);
        assert_eq!(filled, 0, "tray {tray} is not empty");
        if let Ok(mut queues) = self.queues.lock() {
            queues.vacant_of(tray).push_front(tray);
        }
    }

    /// Notes what the evictor moved into a tray. To be called before the pages become victims.
    pub fn fill(&self, tray: u16, superpage: &'static Superpage, chunk: usize, filled: u64) {
        let entry = &self.trays[usize::from(tray)];
        let in_use =
            entry.filled.load(SeqCst) | entry.busy.load(SeqCst) | entry.writing.load(SeqCst);
        assert_eq!(in_use, 0, "tray {tray} is filled while it is in use");
        assert_ne!(filled, 0, "tray {tray} is filled with nothing");
        let other = superpage.trays[chunk].load(Acquire);
        assert_eq!(other, NO_TRAY, "chunk {chunk} has pages in one tray at most");
        entry.superpage.store(std::ptr::from_ref(superpage).cast_mut(), Release);
        entry.chunk.store(exactly(chunk), Relaxed);
        entry.valid.store(filled, SeqCst);
        entry.filled.store(filled, SeqCst);
        superpage.trays[chunk].store(tray, Release);
    }

    /// Marks the victims of a tray as being written, and returns their bits. A page that is
    /// taken back from now on is copied, not moved, so that the frame stays.
    pub fn begin_write(&self, tray: u16) -> u64 {
        let entry = &self.trays[usize::from(tray)];
        let wanted = entry.valid.load(SeqCst);
        entry.writing.fetch_or(wanted, SeqCst);
        let mut writing = 0;
        for index in bits(wanted) {
            if self
                .page_of(entry, index)
                .is_some_and(|page| page.cell().load().phase() == Phase::Victim)
            {
                writing |= 1 << index;
            }
        }
        entry.writing.store(writing, SeqCst);
        writing
    }

    /// The frame at `slot` needs to stay no longer.
    pub fn end_write(&self, slot: FrameSlot) {
        let before = self.trays[usize::from(slot.tray)].writing.fetch_and(!slot.bit(), SeqCst);
        assert_ne!(before & slot.bit(), 0, "a frame's writing ends once");
    }

    /// All of the tray is on the blade: its frames are free now.
    pub fn push_clean(&self, tray: u16) {
        let filled = self.trays[usize::from(tray)].filled.load(SeqCst).count_ones();
        if let Ok(mut queues) = self.queues.lock() {
            queues.clean.push_back(tray);
        }
        self.free.fetch_add(i64::from(filled), Relaxed);
        if self.recycles {
            self.announce();
        }
    }

    /// The page that a slot holds as a victim.
    pub fn victim(&self, slot: FrameSlot) -> Option<Page> {
        let entry = &self.trays[usize::from(slot.tray)];
        (entry.valid.load(SeqCst) & slot.bit() != 0)
            .then(|| self.page_of(entry, usize::from(slot.index)))
            .flatten()
    }

    /// Where the victim buffer holds a page that the caller has claimed from phase Victim, and whether
    /// the frame has to stay (it is being written).
    pub fn locate(&self, page: Page) -> Option<(FrameSlot, bool)> {
        let tray = page.superpage.trays[page.chunk()].load(Acquire);
        if tray == NO_TRAY {
            return None;
        }
        let slot = FrameSlot { tray, index: exactly(page.index % CHUNK_PAGES) };
        let stays = self.trays[usize::from(tray)].writing.load(SeqCst) & slot.bit() != 0;
        Some((slot, stays))
    }

    /// Whether the blade is still being sent something that was at this page. With the registry locked nothing
    /// new is sent of a page that is no victim.
    pub fn is_being_written(&self, page: Page) -> bool {
        self.locate(page).is_some_and(|(_, stays)| stays)
    }

    /// The frame at `slot` was moved into the program.
    pub fn moved_away(&self, slot: FrameSlot) {
        let entry = &self.trays[usize::from(slot.tray)];
        // Busy meanwhile: `take_from`, which may have seen the slot filled, must not see a frame without a
        // page and take it for a free one.
        let was_busy = entry.busy.fetch_or(slot.bit(), SeqCst) & slot.bit() != 0;
        entry.valid.fetch_and(!slot.bit(), SeqCst);
        let filled = entry.filled.fetch_and(!slot.bit(), SeqCst);
        assert_ne!(filled & slot.bit(), 0, "a frame is moved away once");
        entry.kept.fetch_and(!slot.bit(), SeqCst);
        entry.busy.fetch_and(!slot.bit(), SeqCst);
        if !was_busy {
            self.free.fetch_sub(1, Relaxed);
        }
    }

    /// The page at `slot` is no victim any more, but its frame stays.
    pub fn invalidate(&self, slot: FrameSlot) {
        let entry = &self.trays[usize::from(slot.tray)];
        entry.valid.fetch_and(!slot.bit(), SeqCst);
        entry.kept.fetch_and(!slot.bit(), SeqCst);
    }

    /// The page at `slot`, which the caller has claimed, becomes a victim again. The evictor may have passed it over
    /// when it wrote the tray, so the frame is its only copy.
    pub fn keep(&self, slot: FrameSlot) {
        self.trays[usize::from(slot.tray)].kept.fetch_or(slot.bit(), SeqCst);
    }

    /// Puts back a victim that was to be taken back. It may not have been written, for it was not
    /// one meanwhile, so its frame stays. At one go for who lets frames go ([`Frames::take`]): that
    /// would not know the victim from what it was before.
    pub fn put_back(&self, page: Page, state: PageState, slot: FrameSlot) {
        let _queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        self.keep(slot);
        page.cell().store(state);
    }

    /// Gives a frame back that was handed out and not used.
    pub fn give_back(&self, slot: FrameSlot) {
        let before = self.trays[usize::from(slot.tray)].busy.fetch_and(!slot.bit(), SeqCst);
        assert_ne!(before & slot.bit(), 0, "only what was handed out is given back");
        self.free.fetch_add(1, Relaxed);
        self.announce();
    }

    /// Whether frames are handed out for other pages. Not where the program's calls are not seen: it may have given a
    /// page to a pipe or a socket (vmsplice, MSG_ZEROCOPY), which hold on to the frame, not to the page, and would send
    /// what comes into it next. UFFDIO_MOVE refuses pinned pages, and takes these.
    pub fn recycles(&self) -> bool {
        self.recycles
    }

    /// Hands out up to `most` neighbouring free frames, the oldest first. Their pages, if they
    /// still were victims, are only far from now on. Returns also how many pages that concerned.
    pub fn take(&self, most: usize) -> Option<(FrameRun, u64)> {
        if !self.recycles() {
            return None;
        }
        let mut queues = self.queues.lock().ok()?;
        for _ in 0..queues.clean.len() {
            let tray = *queues.clean.front()?;
            if let Some((run, far)) = self.take_from(tray, most) {
                self.free.fetch_sub(exactly(run.count), Relaxed);
                return Some((run, far));
            }
            queues.clean.pop_front();
            if !self.retire(&mut queues, tray) {
                queues.clean.push_back(tray);
            }
        }
        None
    }

    /// Takes all free frames of the oldest trays, at least `least` in all if there are so many. Their pages are
    /// only far from now on. Appends what was taken.
    pub fn take_trays(&self, least: usize, taken: &mut Vec<TakenTray>) {
        let Ok(mut queues) = self.queues.lock() else { return };
        let mut count = 0;
        for _ in 0..queues.clean.len() {
            if count >= least {
                break;
            }
            let Some(tray) = queues.clean.pop_front() else { break };
            if !self.retire(&mut queues, tray) {
                count += self.take_tray(tray, taken);
                queues.clean.push_back(tray);
            }
        }
        self.free.fetch_sub(exactly(count), Relaxed);
    }

    /// As [`Frames::take_trays`], for the one tray of a chunk, if nothing of it is being written.
    pub fn take_tray_of(&self, superpage: &Superpage, chunk: usize, taken: &mut Vec<TakenTray>) {
        let Ok(_queues) = self.queues.lock() else { return };
        let tray = superpage.trays[chunk].load(Acquire);
        if tray != NO_TRAY {
            let count = self.take_tray(tray, taken);
            self.free.fetch_sub(exactly(count), Relaxed);
        }
    }

    fn take_tray(&self, tray: u16, taken: &mut Vec<TakenTray>) -> usize {
        let entry = &self.trays[usize::from(tray)];
        let mut frames = 0;
        while let Some((run, _)) = self.take_from(tray, CHUNK_PAGES) {
            (0..run.count).for_each(|offset| frames |= run.slot(offset).bit());
        }
        if frames != 0 {
            let whole = entry.filled.load(SeqCst) == frames;
            taken.push(TakenTray { tray, frames, whole });
        }
        frames.count_ones() as usize
    }

    /// Gives frames back to the kernel and forgets them; `taken` is empty afterwards. `uffd` has
    /// the buffer.
    pub fn release(&self, uffd: &Uffd, pagemap: &Pagemap, taken: &mut Vec<TakenTray>) {
        taken.sort_unstable_by_key(|tray| tray.tray);
        for group in taken.chunk_by(|a, b| a.whole && b.whole && a.tray + 1 == b.tray) {
            if group[0].whole {
                self.release_range(
                    uffd,
                    pagemap,
                    self.tray_address(group[0].tray),
                    group.len() * TRAY_BYTES,
                );
                continue;
            }
            for (first, count) in runs(group[0].frames) {
                let start = self.tray_address(group[0].tray) + first * PAGE_BYTES;
                self.release_range(uffd, pagemap, start, count * PAGE_BYTES);
            }
        }
        for TakenTray { tray, frames, .. } in taken.drain(..) {
            let entry = &self.trays[usize::from(tray)];
            entry.valid.fetch_and(!frames, SeqCst);
            let filled = entry.filled.fetch_and(!frames, SeqCst);
            let busy = entry.busy.fetch_and(!frames, SeqCst);
            assert_eq!(filled & busy & frames, frames, "what is released was taken before");
        }
    }

    /// Gives frames back that the caller owns.
    pub fn release_range(&self, uffd: &Uffd, pagemap: &Pagemap, start: usize, bytes: usize) {
        if !self.recycles {
            return drain::release(uffd, pagemap, start, bytes, || self.unlock());
        }
        // The program's calls are seen, and none of them locks the buffer.
        if let Err(error) = sys::release(start, bytes) {
            fail_closed(&format!("frames at {start:#x} cannot be dropped: {error}"));
        }
    }

    /// Unlocks the buffer, which a program locks that locks all its memory.
    pub fn unlock(&self) {
        let (base, bytes) = self.range();
        if let Err(error) = sys::unlock(base, bytes) {
            fail_closed(&format!("the victim buffer cannot be unlocked: {error}"));
        }
    }

    /// Notes a frame that is missing and that a thread of the program waits for. True for the first
    /// of them that nobody has taken yet.
    pub fn note_touched(&self, address: usize) -> bool {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        touched.push(address);
        touched.len() == 1
    }

    /// Takes what was noted by [`Frames::note_touched`].
    pub fn take_touched(&self) -> Vec<usize> {
        std::mem::take(&mut *self.touched.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until frames became free since `version` was read, at most for `timeout`.
    pub fn wait(&self, version: u32, timeout: Duration) {
        sys::wait(&self.version, version, Some(timeout));
    }

    pub fn version(&self) -> u32 {
        self.version.load(SeqCst)
    }

    /// Wakes all who wait for a frame.
    pub fn announce(&self) {
        self.version.fetch_add(1, SeqCst);
        sys::wake(&self.version);
    }

    fn take_from(&self, tray: u16, most: usize) -> Option<(FrameRun, u64)> {
        let entry = &self.trays[usize::from(tray)];
        let free = entry.filled.load(SeqCst)
            & !entry.busy.load(SeqCst)
            & !entry.writing.load(SeqCst)
            & !entry.kept.load(SeqCst);
        let mut run: Option<FrameRun> = None;
        let mut far = 0;
        for index in bits(free) {
            let end = run.map(|run| usize::from(run.first.index) + run.count);
            if end.is_some_and(|end| end != index) || run.is_some_and(|run| run.count >= most) {
                break;
            }
            let valid = entry.valid.load(SeqCst) & (1 << index) != 0;
            let available = if valid { self.let_go(entry, index) } else { entry.is_free(index) };
            if !available {
                if run.is_some() {
                    break;
                }
                continue;
            }
            far += u64::from(valid);
            entry.busy.fetch_or(1 << index, SeqCst);
            let first = FrameSlot { tray, index: exactly(index) };
            run = Some(run.map_or(FrameRun { first, count: 1 }, |run| FrameRun {
                count: run.count + 1,
                ..run
            }));
        }
        run.map(|run| (run, far))
    }

    /// Makes a victim that is on the blade only far, unless somebody is taking it back.
    fn let_go(&self, entry: &Tray, index: usize) -> bool {
        let Some(page) = self.page_of(entry, index) else {
            return true;
        };
        let state = page.cell().load();
        let far = PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(state.layer());
        if state.phase() != Phase::Victim {
            // Taken back or discarded; whoever did it clears the valid bit.
            return false;
        }
        // Counted before anybody can see the page as far and count it down again.
        page.superpage.far_pages.fetch_add(1, SeqCst);
        if !page.cell().change(state, far) {
            page.superpage.leave_blade();
            return false;
        }
        page.superpage.give_up_copy(state);
        entry.valid.fetch_and(!(1 << index), SeqCst);
        true
    }

    fn page_of(&self, entry: &Tray, index: usize) -> Option<Page> {
        // SAFETY: `fill` stored a reference to a superpage, and superpages live for ever.
        let superpage = unsafe { entry.superpage.load(Acquire).as_ref()? };
        let index = entry.chunk.load(Relaxed) as usize * CHUNK_PAGES + index;
        Some(Page { superpage, index })
    }

    /// Takes all trays without frames out of the queue.
    fn retire_drained(&self, queues: &mut Queues) {
        for _ in 0..queues.clean.len() {
            let Some(tray) = queues.clean.pop_front() else {
                return;
            };
            if !self.retire(queues, tray) {
                queues.clean.push_back(tray);
            }
        }
    }

    /// Makes a tray (already out of the queue) empty if it has no frames; says whether it did.
    fn retire(&self, queues: &mut Queues, tray: u16) -> bool {
        let entry = &self.trays[usize::from(tray)];
        let in_use =
            entry.filled.load(SeqCst) | entry.busy.load(SeqCst) | entry.writing.load(SeqCst);
        if in_use != 0 {
            return false;
        }
        if let Some(page) = self.page_of(entry, 0) {
            let known = page.superpage.trays[page.chunk()].swap(NO_TRAY, AcqRel);
            assert_eq!(known, tray, "a chunk has pages in one tray at most");
        }
        entry.valid.store(0, SeqCst);
        entry.superpage.store(std::ptr::null_mut(), Release);
        queues.vacant_of(tray).push_back(tray);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Space;
    use std::sync::atomic::AtomicU64;

    fn victims(space: &Space, frames: &Frames, base: usize, mask: u64) -> (Page, u16) {
        let page = space.page_or_new(base).expect("page");
        let tray = frames.take_empty(Zone::ReadWrite).expect("tray");
        frames.fill(tray, page.superpage, page.chunk(), mask);
        for index in bits(mask) {
            let cell = &page.superpage.pages[page.chunk() * CHUNK_PAGES + index];
            cell.store(PageState::UNTOUCHED.with_phase(Phase::Victim).with_layer(5));
        }
        (page, tray)
    }

    #[test]
    fn frames_are_handed_out_once_and_their_pages_become_far() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b1011_0111);
        assert!(frames.take(1).is_none(), "nothing is free before it is on the blade");
        assert_eq!(frames.begin_write(tray), 0b1011_0111);
        for index in [0, 1, 2, 4, 5, 7] {
            frames.end_write(FrameSlot { tray, index });
        }
        frames.push_clean(tray);
        assert_eq!(frames.free(), 6);
        let (run, far) = frames.take(2).expect("frames");
        assert_eq!((run.first.index, run.count, far), (0, 2, 2));
        let (run, _) = frames.take(9).expect("frames");
        assert_eq!((run.first.index, run.count), (2, 1), "a run has no holes");
        let state = page.cell().load();
        assert_eq!((state.phase(), state.layer()), (Phase::Far, 5));
        assert_eq!(page.superpage.far_pages.load(Relaxed), 3);
    }

    #[test]
    fn a_page_that_is_taken_back_keeps_its_frame_from_others() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b11);
        frames.begin_write(tray);
        frames.end_write(FrameSlot { tray, index: 0 });
        frames.end_write(FrameSlot { tray, index: 1 });
        frames.push_clean(tray);
        page.cell().claim(Phase::Victim, Phase::Fetching).expect("claim");
        let (run, _) = frames.take(4).expect("the other frame");
        assert_eq!((run.first.index, run.count), (1, 1));
        let (slot, stays) = frames.locate(page).expect("located");
        assert_eq!((slot.index, stays), (0, false));
        frames.moved_away(slot);
        frames.moved_away(run.first);
        assert!(frames.take(1).is_none());
        assert_eq!(page.superpage.trays[0].load(Acquire), NO_TRAY, "the drained tray is retired");
    }

    /// One thread takes pages back while another hands out frames: no frame may go to both.
    #[test]
    fn a_frame_that_was_taken_back_is_not_handed_out() {
        const ROUNDS: u64 = 20_000;
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let page = space.page_or_new(0x1000_0000).expect("page");
        // Both threads run when a turn begins: a sleeping barrier would let one finish before the other wakes.
        let turn = AtomicU64::new(0);
        let wait_for = |number: u64| {
            while turn.load(SeqCst) < number {
                std::thread::yield_now();
            }
        };
        let take_back = || {
            let mut back = 0_u64;
            for index in (0..CHUNK_PAGES).rev() {
                let page = Page { index, ..page };
                if page.cell().claim(Phase::Victim, Phase::Fetching).is_some() {
                    let (slot, _) = frames.locate(page).expect("located");
                    frames.moved_away(slot);
                    back |= slot.bit();
                }
            }
            back
        };
        let hand_out = || {
            let (_, tray) = victims(&space, &frames, 0x1000_0000, u64::MAX);
            frames.begin_write(tray);
            (0..64).for_each(|index| frames.end_write(FrameSlot { tray, index }));
            frames.push_clean(tray);
            turn.fetch_add(1, SeqCst);
            let mut handed_out = Vec::new();
            while let Some((run, _)) = frames.take(usize::MAX) {
                handed_out.extend((0..run.count).map(|offset| run.slot(offset)));
            }
            handed_out
        };
        let taken_back = AtomicU64::new(0);
        let rounds = std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    wait_for(round * 2 + 1);
                    taken_back.store(take_back(), SeqCst);
                    turn.fetch_add(1, SeqCst);
                }
            });
            (0..ROUNDS).find(|round| {
                let handed_out = hand_out();
                wait_for(round * 2 + 2);
                handed_out.iter().for_each(|slot| frames.moved_away(*slot));
                let mask = handed_out.iter().fold(0, |mask, slot| mask | slot.bit());
                let right = mask ^ taken_back.load(SeqCst) == u64::MAX && frames.is_empty();
                if !right {
                    turn.store(u64::MAX / 2, SeqCst);
                }
                !right
            })
        });
        assert_eq!(rounds, None, "a frame went to both, or to nobody, in this round");
    }

    #[test]
    fn a_page_taken_back_before_the_write_is_not_written() {
        let (space, frames) =
            (Space::new().expect("space"), Frames::new(true, false).expect("frames"));
        let (page, tray) = victims(&space, &frames, 0x1000_0000, 0b1);
        page.cell().claim(Phase::Victim, Phase::Fetching).expect("claim");
        assert_eq!(frames.begin_write(tray), 0);
    }
}
