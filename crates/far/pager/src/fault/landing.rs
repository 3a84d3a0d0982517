//! Handles the blades' answers: pages are put into the program, or are lost.

use std::sync::atomic::Ordering::SeqCst;

use farpool_board::Counter;
use farpool_pool::PageError;
use farpool_units::{PAGE_BYTES, exactly};

use crate::core::{Mover, move_pages, until_settled};
use crate::fault::thread::{FaultThread, Flight, Frame};
use crate::space::Page;
use crate::space::frames::{FrameRun, FrameSlot};
use crate::space::moves::Moved;
use crate::space::page::{PageState, Phase};
use crate::sys;

impl FaultThread {
    /// Puts the pages that have arrived into the program.
    pub(super) fn land(&mut self) {
        self.lane.poll(&mut self.done);
        while let Some(completion) = self.done.pop() {
            let index: usize = exactly(completion.token);
            let Some(flight) = self.flights.get_mut(index).and_then(Option::take) else {
                continue;
            };
            self.free_flights.push(index);
            match completion.result {
                Ok(()) => self.landed.push(flight),
                Err(error) => self.lose(flight, error),
            }
        }
        if self.landed.is_empty() {
            return;
        }
        let mut landed = std::mem::take(&mut self.landed);
        landed.sort_unstable_by_key(|flight| (!flight.demand, flight.page.address()));
        let mut rest = &landed[..];
        while !rest.is_empty() {
            let count = self.place_run(rest);
            rest = &rest[count..];
        }
        landed.clear();
        self.landed = landed;
    }

    /// Places the first flight and the flights that follow it both in the program and in the
    /// buffer. Returns how many flights it placed.
    fn place_run(&mut self, flights: &[Flight]) -> usize {
        let first = flights[0];
        let slot = match first.frame {
            Frame::Slot(slot) => slot,
            Frame::Stage(index) => return self.copy_run(flights, index),
        };
        let mut count = 1;
        while let Some(next) = flights.get(count) {
            let neighbour = Frame::Slot(FrameRun { first: slot, count }.slot(count));
            let follows = next.page.address() == first.page.address() + count * PAGE_BYTES;
            if !follows || next.frame != neighbour {
                break;
            }
            count += 1;
        }
        self.record_arrivals(&flights[..count]);
        // Remembered first: in the program they can change at once.
        let remembered = self.core.copies.wants_run();
        if remembered {
            for flight in &flights[..count] {
                self.remember(flight.page, self.source(flight.frame));
            }
        }
        let moved = self.move_in(first.page, slot, count);
        for (offset, flight) in flights[..count].iter().enumerate() {
            let Frame::Slot(slot) = flight.frame else {
                continue;
            };
            if moved.has_gone(offset) {
                self.core.frames.moved_away(slot);
                self.arrive(flight.page, remembered);
            } else {
                self.place_copy(*flight);
            }
        }
        if self.core.gate.is_shut() {
            let _ = self.core.uffd.wake(first.page.address(), count * PAGE_BYTES);
        }
        count
    }

    /// Copies the first flight, from this stage page, and the flights that follow it both in the
    /// program and in the stage. Returns how many flights it copied.
    fn copy_run(&mut self, flights: &[Flight], stage: usize) -> usize {
        let first = flights[0];
        let follows = |(offset, flight): &(usize, &Flight)| {
            flight.page.address() == first.page.address() + offset * PAGE_BYTES
                && flight.frame == Frame::Stage(stage + offset)
        };
        let count = flights.iter().enumerate().take_while(follows).count();
        self.record_arrivals(&flights[..count]);
        if count == 1 {
            self.place_copy(first);
            return 1;
        }
        let remembered = self.core.copies.wants_run();
        if remembered {
            for flight in &flights[..count] {
                self.remember(flight.page, self.source(flight.frame));
            }
        }
        let (to, from, bytes) =
            (first.page.address(), self.source(first.frame), count * PAGE_BYTES);
        let copied = until_settled(self.core, Mover::FaultThread, |done| {
            self.core.uffd.copy(to + done, from + done, bytes - done, false)
        });
        let arrived = copied.done_bytes / PAGE_BYTES;
        for (offset, flight) in flights[..count].iter().enumerate() {
            if offset < arrived {
                self.free_stage.push(stage + offset);
                self.arrive(flight.page, remembered);
            } else {
                self.place_copy(*flight);
            }
        }
        // After the states are set: a woken thread may fork.
        let _ = self.core.uffd.wake(to, bytes);
        count
    }

    /// Copies a frame that cannot be moved (read-only memory, a page of our own).
    fn place_copy(&mut self, flight: Flight) {
        let source = self.source(flight.frame);
        let address = flight.page.address();
        // While a thread forks, the state must be set before the faulting thread is woken.
        let wakes = !self.core.gate.is_shut();
        let outcome = until_settled(self.core, Mover::FaultThread, |_| {
            self.core.uffd.copy(address, source, PAGE_BYTES, wakes)
        });
        // A page that was present already is not the page that was fetched.
        let remembered = outcome.errno.is_none() && self.core.copies.wants();
        if remembered {
            self.remember(flight.page, source);
        }
        match flight.frame {
            Frame::Slot(slot) => {
                self.core.budget.overdraw(1);
                self.core.frames.give_back(slot);
            }
            Frame::Stage(index) => self.free_stage.push(index),
        }
        if matches!(outcome.errno, None | Some(libc::EEXIST)) {
            self.arrive(flight.page, remembered);
        } else {
            // The mapping is gone, and the thread that handles the unmapping clears the state; or a
            // change comes first.
            self.unfetch(flight.page);
        }
        if outcome.errno.is_some() || !wakes {
            self.wake(flight.page);
        }
    }

    /// Where the bytes of a fetched page are.
    fn source(&self, frame: Frame) -> usize {
        match frame {
            Frame::Slot(slot) => self.core.frames.address(slot),
            Frame::Stage(index) => self.stage + index * PAGE_BYTES,
        }
    }

    /// Remembers a fetched page by the bytes at `source`, which are still this thread's.
    fn remember(&self, page: Page, source: usize) {
        // SAFETY: a frame or stage page that a flight of this thread holds; no other thread writes
        // to it.
        self.core.copies.remember(page, unsafe { &*(source as *const [u8; PAGE_BYTES]) });
    }

    /// Notes that the page is in the program. `remembered`: the copy in its layer is known.
    fn arrive(&self, page: Page, remembered: bool) {
        if remembered {
            page.superpage.copies.fetch_add(1, SeqCst);
        }
        if page.mark_used() {
            self.core.count(Counter::FirstReturns, 1);
        }
        self.leave_blade(
            page,
            page.cell().load().with_phase(Phase::Resident).with_copy(remembered),
        );
    }

    /// Sets the state of a fetched page, which is then no longer far. It is counted only now: while
    /// the count is not 0, the blade's memory stays.
    fn leave_blade(&self, page: Page, state: PageState) {
        page.cell().store(state);
        page.superpage.leave_blade();
    }

    /// Records the latency of fetches right before the page is mapped: the woken thread may take
    /// this CPU at once, and the time after that is its own.
    fn record_arrivals(&self, flights: &[Flight]) {
        for flight in flights.iter().filter(|flight| flight.demand) {
            self.record(flight.started, true);
        }
    }

    pub(super) fn unfetch(&self, page: Page) {
        let cell = page.cell();
        cell.store(cell.load().with_phase(Phase::Far));
    }

    fn lose(&mut self, flight: Flight, error: PageError) {
        match flight.frame {
            Frame::Slot(slot) => self.core.frames.give_back(slot),
            Frame::Stage(index) => self.free_stage.push(index),
        }
        if !flight.demand {
            // No thread has asked for it yet; it is retried when one does.
            self.unfetch(flight.page);
            return self.wake(flight.page);
        }
        self.leave_blade(flight.page, PageState::UNTOUCHED.with_phase(Phase::Lost));
        self.core.poison(flight.page, &error);
    }

    pub(super) fn fail_reads(&mut self, error: &dyn std::fmt::Display) {
        for read in std::mem::take(&mut self.reads) {
            let index: usize = exactly(read.token);
            let Some(flight) = self.flights.get_mut(index).and_then(Option::take) else {
                continue;
            };
            self.free_flights.push(index);
            sys::say(&format!("a fetch could not be sent: {error}"));
            self.lose(flight, PageError::NotAllocated);
        }
    }

    /// Moves frames into the program. Wakes its threads, except while a thread forks: the states
    /// must be set first then.
    pub(super) fn move_in(&self, page: Page, slot: FrameSlot, count: usize) -> Moved {
        let (to, from) = (page.address(), self.core.frames.address(slot));
        let wakes = !self.core.gate.is_shut();
        move_pages(self.core, Mover::FaultThread, to, from, count, wakes)
    }
}
