//! Finds pages in the buffer, and notes that they go back into the program or are forgotten.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use farpool_kernel::lock;
use farpool_units::exactly;

use crate::space::frames::buffer::Frames;
use crate::space::frames::slots::FrameSlot;
use crate::space::page::PageState;
use crate::space::superpage::Page;
use crate::space::units::{CHUNK_PAGES, NO_TRAY};

impl Frames {
    /// The page that a slot holds as a victim.
    pub fn victim(&self, slot: FrameSlot) -> Option<Page> {
        let entry = &self.trays[usize::from(slot.tray)];
        (entry.valid.load(SeqCst) & slot.bit() != 0)
            .then(|| self.page_of(entry, usize::from(slot.index)))
            .flatten()
    }

    /// The slot of a page that the caller has claimed from phase Victim, and whether the frame has
    /// to stay (it is being written).
    pub fn locate(&self, page: Page) -> Option<(FrameSlot, bool)> {
        let tray = page.superpage.trays[page.chunk()].load(Acquire);
        if tray == NO_TRAY {
            return None;
        }
        let slot = FrameSlot { tray, index: exactly(page.index % CHUNK_PAGES) };
        let stays = self.trays[usize::from(tray)].writing.load(SeqCst) & slot.bit() != 0;
        Some((slot, stays))
    }

    /// Whether an earlier content of this page is still being sent to the blade. While the registry
    /// is locked no new write of a page that is no victim begins.
    pub fn is_being_written(&self, page: Page) -> bool {
        self.locate(page).is_some_and(|(_, stays)| stays)
    }

    /// Notes that the frame at `slot` was moved into the program.
    pub fn moved_away(&self, slot: FrameSlot) {
        let entry = &self.trays[usize::from(slot.tray)];
        // Busy meanwhile: `take_from`, which may have seen the slot filled, must not take a slot
        // without a frame for a free frame.
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

    /// Notes that the page at `slot` is no victim any more, but its frame stays.
    pub fn invalidate(&self, slot: FrameSlot) {
        let entry = &self.trays[usize::from(slot.tray)];
        entry.valid.fetch_and(!slot.bit(), SeqCst);
        entry.kept.fetch_and(!slot.bit(), SeqCst);
    }

    /// Marks a page that the caller has claimed and that becomes a victim again. The evictor may
    /// have passed it over when it wrote the tray, so the frame is its only copy.
    pub fn keep(&self, slot: FrameSlot) {
        self.trays[usize::from(slot.tray)].kept.fetch_or(slot.bit(), SeqCst);
    }

    /// Whether the frame at `slot` is the only copy of its page.
    pub fn is_kept(&self, slot: FrameSlot) -> bool {
        self.trays[usize::from(slot.tray)].kept.load(SeqCst) & slot.bit() != 0
    }

    /// Puts back a victim that was claimed to be taken back. It may not have been written, because
    /// it was not a victim meanwhile, so its frame stays. Both steps are done under the queues'
    /// lock, because [`Frames::take`] could not tell it from the victim it was before.
    pub fn put_back(&self, page: Page, state: PageState, slot: FrameSlot) {
        let _queues = lock(&self.queues);
        self.keep(slot);
        page.cell().store(state);
    }
}
