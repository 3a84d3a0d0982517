//! Requests a far page, and the pages that the prefetcher expects next.

use farpool_board::Counter;
use farpool_policy::reserve::LEAST_MOVED_PAGES;
use farpool_pool::PageRead;
use farpool_units::{PAGE_BYTES, at_most};

use crate::abort::fail_closed;
use crate::fault::thread::{FaultThread, Flight, Frame};
use crate::space::Page;
use crate::space::page::Phase;
use crate::sys::Stamp;

impl FaultThread {
    /// Requests a page that the caller has claimed, and the pages that the prefetcher expects next.
    pub(super) fn fetch(&mut self, page: Page, thread: u32, started: Stamp) {
        while self.places() < 1 + farpool_policy::MAX_PREFETCH_PAGES as usize {
            self.lane.wait(&mut self.done);
            self.land();
        }
        self.claimed.clear();
        self.claimed.push(page);
        if !self.core.gate.is_shut() {
            self.core.streams.expect(thread, page.address(), &mut self.window);
            self.claim_window();
        }
        self.assign_frames(started);
        self.core.count(Counter::DemandFetches, 1);
        self.core.count(Counter::Prefetches, (self.reads.len().max(1) - 1) as u64);
        if self.reads.is_empty() {
            return;
        }
        // SAFETY: each target is a frame that this thread has taken for the page and releases only
        // in `land`, after the completion.
        if let Err(error) = unsafe { self.lane.read(&self.reads) } {
            self.fail_reads(&error);
        }
        self.reads.clear();
        self.land();
    }

    fn claim_window(&mut self) {
        for number in self.window.pages() {
            // A prediction may lie beyond all addresses.
            let Some(address) = at_most::<usize, _>(number).checked_mul(PAGE_BYTES) else {
                break;
            };
            let Some(page) = self.core.space.page(address) else {
                continue;
            };
            if page.cell().claim(Phase::Far, Phase::Fetching).is_some() {
                self.claimed.push(page);
            }
        }
    }

    /// Gives each claimed page a frame, neighbouring ones where possible. Prefetches that get none
    /// are dropped. Fills `reads`.
    fn assign_frames(&mut self, started: Stamp) {
        let mut next = 0;
        let is_copied = self.claimed.len() < LEAST_MOVED_PAGES || !self.core.frames.recycles();
        let copied = if is_copied { self.claimed.len() } else { 0 };
        while next < copied && !self.free_stage.is_empty() && self.spend(1, next == 0) {
            let stage = self.stage_page();
            self.depart(next, Frame::Stage(stage), started);
            next += 1;
        }
        while next < self.claimed.len() {
            let wanted = self.claimed.len() - next;
            if let Some(run) = self.frame_run(wanted) {
                for offset in 0..run.count {
                    self.depart(next + offset, Frame::Slot(run.slot(offset)), started);
                }
                next += run.count;
                continue;
            }
            if next > 0 {
                break;
            }
            match self.frame(true) {
                Some(slot) => self.depart(0, Frame::Slot(slot), started),
                None => {
                    let stage = self.stage_page();
                    self.depart(0, Frame::Stage(stage), started);
                }
            }
            next = 1;
        }
        let dropped = &self.claimed[next.min(self.claimed.len())..];
        dropped.iter().for_each(|page| self.unfetch(*page));
        // Their threads may have been told to wait for the fetch.
        for run in dropped.chunk_by(|a, b| a.address() + PAGE_BYTES == b.address()) {
            let _ = self.core.uffd.wake(run[0].address(), run.len() * PAGE_BYTES);
        }
    }

    fn depart(&mut self, claimed: usize, frame: Frame, started: Stamp) {
        let page = self.claimed[claimed];
        let state = page.cell().load();
        let Some(at) = self.core.place(page, state.layer()) else {
            fail_closed(&format!(
                "page {:#x} is in layer {} which is gone",
                page.address(),
                state.layer()
            ));
        };
        let Some(flight) = self.place() else {
            fail_closed("more pages requested than there are places for");
        };
        let into = match frame {
            Frame::Slot(slot) => self.core.frames.address(slot),
            Frame::Stage(index) => self.stage + index * PAGE_BYTES,
        };
        assert!(self.flights[flight].is_none(), "a flight has its place alone");
        self.flights[flight] = Some(Flight { page, frame, demand: claimed == 0, started });
        self.reads.push(PageRead { at, into: into as *mut u8, token: flight as u64 });
    }
}
