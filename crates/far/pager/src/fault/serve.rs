//! The life of a fault, from its message to the answer: the loops of the first thread and of the
//! other members of the crowd.

use farpool_board::{Counter, Fault};
use farpool_kernel::monotonic_ns;
use farpool_uffd::{Event, Message};
use farpool_units::PAGE_BYTES;

use crate::abort::{fail_closed, panic_if_asked};
use crate::fault::thread::FaultThread;
use crate::shared::crew::{Follow, MEMBER_STEP, Watch};
use crate::space::page::Phase;
use crate::sys::{self, Stamp};

/// Messages read at a time.
const MESSAGES: usize = 8;

impl FaultThread {
    /// Serves faults until the process ends, alone or with the crowd.
    pub fn run_first(mut self, cpu: usize) -> ! {
        self.core.crew.be_first();
        let mut messages = [Message::default(); MESSAGES];
        let mut follow = Follow::new();
        let mut waited = false;
        let mut crowded = false;
        loop {
            let crowd = !self.core.crew.is_solo();
            if crowd && !crowded {
                sys::pin_to(cpu);
            }
            crowded = crowd;
            match self.read_messages(&mut messages) {
                0 => {
                    self.core.crew.begin_round(self.lane.in_flight() > 0);
                    self.wait_for_anything(None);
                    waited = true;
                }
                count => {
                    self.core.crew.begin_round(true);
                    let thread = messages[0].event().thread;
                    self.serve_all(&messages[..count]);
                    self.core.crew.advance(&mut follow, count, thread, waited);
                    waited = false;
                }
            }
        }
    }

    /// Serves faults on one CPU whenever the crowd is wanted. `watches`: until then this thread
    /// watches the first thread.
    pub fn follow(mut self, cpu: usize, watches: bool) -> ! {
        sys::pin_to(cpu);
        let mut messages = [Message::default(); MESSAGES];
        let mut watch = Watch::new();
        loop {
            if self.lane.is_idle() {
                if self.core.crew.is_solo() {
                    self.release_stage();
                }
                if watches {
                    self.core.crew.watch(&mut watch, &self.core.uffd);
                    sys::pin_to(cpu);
                }
                self.core.crew.wait_for_crowd();
            }
            match self.read_messages(&mut messages) {
                0 => self.wait_for_anything(Some(MEMBER_STEP)),
                count => self.serve_all(&messages[..count]),
            }
        }
    }

    fn serve_all(&mut self, messages: &[Message]) {
        panic_if_asked();
        for message in messages {
            self.await_changes();
            self.take(message.event());
        }
        self.check_deadlines();
        self.land();
        self.leave_when_idle();
    }

    pub(super) fn take(&mut self, event: Event) {
        let Some(address) = event.page_address else {
            return;
        };
        if self.core.frames.contains(address) {
            return self.note_touched_frame(address, event.thread);
        }
        if !self.core.gate.enter(event.thread, address) {
            return;
        }
        self.passes += 1;
        self.core.count(Counter::Faults, 1);
        if self.core.board.fault_log().is_on() {
            self.note(event, address);
        }
        self.serve(event, address);
        if self.core.gate.is_shut() {
            // The forking thread must find everything settled when it resumes.
            while self.lane.in_flight() > 0 {
                self.lane.wait(&mut self.done);
                self.land();
            }
        }
        self.leave_when_idle();
        self.core.budget.kick_if_low(self.core.frames.free());
    }

    /// A missing frame is touched only by the kernel, for a program that locks all its memory. The
    /// evictor deals with that.
    #[cold]
    fn note_touched_frame(&self, address: usize, thread: u32) {
        let frames = &self.core.frames;
        let is_locked = sys::locked_bytes().is_some_and(|bytes| bytes > 0);
        if frames.recycles() || !is_locked {
            fail_closed(&format!(
                "a frame of the victim buffer is missing at {address:#x}, touched by thread \
                 {thread}: {}",
                frames.describe(address)
            ));
        }
        if frames.note_touched(address) {
            self.core.budget.kick();
        }
    }

    /// Logs the fault for a capture of the run's faults.
    #[cold]
    fn note(&self, event: Event, address: usize) {
        self.core.board.fault_log().write(Fault {
            page_number: (address / PAGE_BYTES) as u64,
            is_write: event.is_write,
            time_ns: monotonic_ns(),
            pid: self.core.slot.pid.load(std::sync::atomic::Ordering::Relaxed),
            thread: event.thread,
        });
    }

    /// Leaves the gate, unless something is still in flight.
    pub(super) fn leave_when_idle(&mut self) {
        if self.lane.in_flight() == 0 && self.done.is_empty() {
            for _ in 0..std::mem::take(&mut self.passes) {
                self.core.gate.leave();
            }
        }
    }

    fn serve(&mut self, event: Event, address: usize) {
        let started = Stamp::now();
        let Some(page) = self.core.space.page_or_new(address) else {
            fail_closed(&format!("address {address:#x} is far but beyond the table of superpages"));
        };
        loop {
            let state = page.cell().load();
            let served = match state.phase() {
                Phase::Untouched | Phase::Resident | Phase::Dropped if event.is_protected => {
                    self.unprotect(page)
                }
                Phase::Untouched | Phase::Dropped => self.zero_fill(page, event),
                Phase::Resident => self.refill(page),
                Phase::Victim => self.take_back(page),
                Phase::Far => match page.cell().claim(Phase::Far, Phase::Fetching) {
                    Some(_) => {
                        self.fetch(page, event.thread, started);
                        return;
                    }
                    None => false,
                },
                // The thread that fetches it wakes all that wait for it.
                Phase::Fetching => return,
                Phase::Lost => {
                    let _ = self.core.uffd.poison(address, PAGE_BYTES);
                    self.wake(page);
                    true
                }
                Phase::Evicting if self.core.crew.is_evictor(event.thread) => {
                    self.answer_evictor(page);
                    true
                }
                Phase::Evicting => {
                    rustix::thread::sched_yield();
                    false
                }
            };
            if served {
                self.record(started, false);
                return;
            }
        }
    }
}
