//! Pages in the buffer that are found, go back into the program, or are forgotten.

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

    /// Where the victim buffer holds a page that the caller has claimed from phase Victim, and
    /// whether the frame has to stay (it is being written).
    pub fn locate(&self, page: Page) -> Option<(FrameSlot, bool)> {
        let tray = page.superpage.trays[page.chunk()].load(Acquire);
        if tray == NO_TRAY {
            return None;
        }
        let slot = FrameSlot { tray, index: exactly(page.index % CHUNK_PAGES) };
        let stays = self.trays[usize::from(tray)].writing.load(SeqCst) & slot.bit() != 0;
        Some((slot, stays))
    }

    /// Whether the blade is still being sent something that was at this page. With the registry
    /// locked nothing new is sent of a page that is no victim.
    pub fn is_being_written(&self, page: Page) -> bool {
        self.locate(page).is_some_and(|(_, stays)| stays)
    }

    /// The frame at `slot` was moved into the program.
    pub fn moved_away(&self, slot: FrameSlot) {
        let entry = &self.trays[usize::from(slot.tray)];
        // Busy meanwhile: `take_from`, which may have seen the slot filled, must not see a frame
        // without a page and take it for a free one.
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

    /// The page at `slot`, which the caller has claimed, becomes a victim again. The evictor may
    /// have passed it over when it wrote the tray, so the frame is its only copy.
    pub fn keep(&self, slot: FrameSlot) {
        self.trays[usize::from(slot.tray)].kept.fetch_or(slot.bit(), SeqCst);
    }

    /// Whether the frame at `slot` is the only copy of its page.
    pub fn is_kept(&self, slot: FrameSlot) -> bool {
        self.trays[usize::from(slot.tray)].kept.load(SeqCst) & slot.bit() != 0
    }

    /// Puts back a victim that was to be taken back. It may not have been written, for it was not
    /// one meanwhile, so its frame stays. At one go for who lets frames go ([`Frames::take`]): that
    /// would not know the victim from what it was before.
    pub fn put_back(&self, page: Page, state: PageState, slot: FrameSlot) {
        let _queues = lock(&self.queues);
        self.keep(slot);
        page.cell().store(state);
    }
}
