//! Step 4 of an eviction: victims go to the blade, and those that it refuses go back.

use farpool_board::Counter;
use farpool_pool::{BladeIndex, PageError, PageWrite};
use farpool_units::{PAGE_BYTES, exactly};

use crate::abort::fail_closed;
use crate::core::{Mover, move_pages, until_settled};
use crate::evict::evictor::Evictor;
use crate::space::copies::{Leaving, leaving};
use crate::space::frames::FrameSlot;
use crate::space::page::Phase;
use crate::space::units::{CHUNK_PAGES, bits};
use crate::space::{Page, Superpage};
use crate::sys;

impl Evictor {
    pub(super) fn write(&mut self, superpage: &'static Superpage, tray: u16, layer: usize) {
        let writing = self.core.frames.begin_write(tray);
        self.writes.clear();
        for index in bits(writing) {
            #[allow(clippy::cast_possible_truncation)] // A bit's number, below 64.
            let slot = FrameSlot { tray, index: index as u8 };
            let Some(page) = self.core.frames.victim(slot) else {
                self.core.frames.end_write(slot);
                continue;
            };
            assert!(std::ptr::eq(page.superpage, superpage), "a tray holds pages of one chunk");
            if !self.must_write(page, slot, layer) {
                self.core.frames.end_write(slot);
                continue;
            }
            let Some(at) = self.core.place(page, layer) else {
                continue;
            };
            let from = self.core.frames.address(slot) as *const u8;
            let token = u64::from(tray) << 8 | index as u64;
            self.writes.push(PageWrite { at, from, token });
        }
        let count = self.writes.len();
        if count == 0 {
            self.core.frames.push_clean(tray);
            return;
        }
        let segment = self.core.layers.segment(layer);
        let blade = segment.and_then(|segment| self.core.pool.blade_of(segment, superpage.id()));
        self.sent_to[usize::from(tray)] = blade.unwrap_or_default();
        assert!(count <= CHUNK_PAGES, "{count} writes of a tray of {CHUNK_PAGES} pages");
        #[allow(clippy::cast_possible_truncation)] // At most 64, as was just asserted.
        let unacknowledged = count as u8;
        let before = std::mem::replace(&mut self.unacknowledged[usize::from(tray)], unacknowledged);
        assert_eq!(before, 0, "tray {tray} is written a second time");
        self.trays_in_flight += 1;
        // SAFETY: the frames of a tray in flight belong to the evictor until its pages are
        // acknowledged.
        if let Err(error) = unsafe { self.lane.write(&self.writes) } {
            sys::say(&format!("an eviction could not be sent: {error}"));
            let failed = std::mem::take(&mut self.writes);
            for write in &failed {
                self.acknowledge(write.token, Err(PageError::Deadline));
            }
            self.writes = failed;
        }
    }

    /// Whether a victim, whose frame stays where it is meanwhile, has to be written. If so, its
    /// copy, if any, is given up before anything can be written to the copy's place.
    fn must_write(&mut self, page: Page, slot: FrameSlot, layer: usize) -> bool {
        let (core, state) = (self.core, page.cell().load());
        match leaving(state) {
            Leaving::Write => return true,
            Leaving::Return => return false,
            Leaving::Compare => {}
        }
        // SAFETY: the frame is present, and no thread writes to it while it is marked as being
        // written.
        let bytes = unsafe { &*(core.frames.address(slot) as *const [u8; PAGE_BYTES]) };
        let unchanged = core.copies.matches(page, bytes);
        core.copies.set_wanted(self.clean.compared(unchanged));
        if unchanged && core.has_place(page, state.layer()) {
            core.count(Counter::CleanDrops, 1);
            return false;
        }
        // If it was taken back or discarded meanwhile, it is no victim any more, and still has its
        // copy.
        let given_up = page.cell().change(state, state.with_layer(layer).with_phase(Phase::Victim));
        if given_up {
            page.superpage.give_up_copy(state);
        }
        given_up
    }

    pub(super) fn collect(&mut self) {
        self.lane.poll(&mut self.done);
        self.settle_done();
    }

    pub(crate) fn settle_done(&mut self) {
        while let Some(completion) = self.done.pop() {
            self.acknowledge(completion.token, completion.result);
        }
    }

    fn acknowledge(&mut self, token: u64, result: Result<(), PageError>) {
        if let Some(blade) = self.in_place.take(token, result.is_ok()) {
            return self.note_answer(blade, result);
        }
        let tray = exactly(token >> 8);
        let slot = FrameSlot { tray, index: (token & 0xff) as u8 };
        self.core.frames.end_write(slot);
        self.note_answer(self.sent_to[usize::from(tray)], result);
        if result.is_ok() {
            self.core.count(Counter::PagesWritten, 1);
        } else {
            self.put_back(slot);
        }
        let left = &mut self.unacknowledged[usize::from(tray)];
        assert_ne!(*left, 0, "a page of tray {tray} is acknowledged that was not sent");
        *left -= 1;
        if *left == 0 {
            self.trays_in_flight -= 1;
            self.core.frames.push_clean(tray);
        }
    }

    fn note_answer(&mut self, blade: BladeIndex, result: Result<(), PageError>) {
        match result {
            Ok(()) if self.refusals.is_empty() => {}
            Ok(()) => {
                self.refusals.accept(blade);
            }
            Err(error) => self.note_refusal(blade, error),
        }
    }

    /// Moves a page that the blade refused back into the program, where it is safe.
    fn put_back(&mut self, slot: FrameSlot) {
        let Some(page) = self.core.frames.victim(slot) else {
            return;
        };
        let Some(state) = page.cell().claim(Phase::Victim, Phase::Fetching) else {
            return;
        };
        let (to, from) = (page.address(), self.core.frames.address(slot));
        let moved = move_pages(self.core, Mover::Evictor, to, from, 1, true);
        if moved.has_gone(0) {
            self.core.frames.moved_away(slot);
            page.cell().store(state.with_phase(Phase::Resident));
        } else {
            let copied = until_settled(self.core, Mover::Evictor, |_| {
                self.core.uffd.copy(to, from, PAGE_BYTES, true)
            });
            match copied.errno {
                None => {
                    self.core.frames.invalidate(slot);
                    page.cell().store(state.with_phase(Phase::Resident));
                }
                // A change comes first, or the mapping is gone and the thread that handles the
                // unmapping clears the state.
                Some(libc::ECANCELED | libc::ENOENT | libc::ESRCH) => {
                    self.core.frames.keep(slot);
                    page.cell().store(state);
                }
                Some(errno) => fail_closed(&format!(
                    "page {to:#x}, which the blade did not take, cannot be put back: {}",
                    std::io::Error::from_raw_os_error(errno)
                )),
            }
        }
        let _ = self.core.uffd.wake(to, PAGE_BYTES);
    }

    pub(super) fn wait_for_blade(&mut self, most_in_flight: usize) {
        while self.trays_in_flight > most_in_flight {
            self.lane.wait(&mut self.done);
            self.settle_done();
        }
    }

    pub(super) fn drain(&mut self) {
        self.wait_for_blade(0);
    }
}
