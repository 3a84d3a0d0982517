//! How the evictor fills trays and has them written.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use farpool_units::exactly;

use crate::space::frames::buffer::Frames;
use crate::space::frames::slots::FrameSlot;
use crate::space::frames::zones::Zone;
use crate::space::page::Phase;
use crate::space::superpage::Superpage;
use crate::space::units::{NO_TRAY, bits};

impl Frames {
    /// An empty tray of a zone for the evictor to move a chunk into.
    pub fn take_empty(&self, zone: Zone) -> Option<u16> {
        let mut queues = self.queues.lock().ok()?;
        if queues.vacant[zone as usize].used.is_empty() {
            self.retire_drained(&mut queues);
        }
        queues.vacant[zone as usize].take()
    }

    /// Returns a tray into which nothing was moved.
    pub fn return_empty(&self, tray: u16) {
        let filled = self.trays[usize::from(tray)].filled.load(SeqCst);
        assert_eq!(filled, 0, "tray {tray} is not empty");
        if let Ok(mut queues) = self.queues.lock() {
            queues.vacant_of(tray).push_front(tray);
        }
    }

    /// Notes the pages that the evictor moved into a tray. To be called before they become victims.
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

    /// Notes that the frame at `slot` need not stay any longer.
    pub fn end_write(&self, slot: FrameSlot) {
        let before = self.trays[usize::from(slot.tray)].writing.fetch_and(!slot.bit(), SeqCst);
        assert_ne!(before & slot.bit(), 0, "a frame's writing ends once");
    }

    /// Notes that all of the tray is on the blade, so that its frames are free.
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
}
