//! How a fault thread waits: for messages, for answers of blades, for the steward.

use std::time::{Duration, Instant};

use farpool_board::Redundancy;
use farpool_uffd::Message;

use crate::abort::fail_closed;
use crate::core::EXPIRY_STEP;
use crate::core::forget::give_up;
use crate::fault::thread::FaultThread;

/// How long the first thread, in Solo, polls for a blade's answer before it sleeps: about a round
/// trip on a rack.
const ANSWER_SPIN: Duration = Duration::from_micros(50);
/// The memory of a thread's own pages is freed when there was no fault for this long.
const STAGE_REST: Duration = Duration::from_millis(100);
/// The time between two checks whether the steward has applied a change; the steward wakes this
/// thread when it has.
const STEWARD_WAIT: Duration = Duration::from_millis(1);

impl FaultThread {
    /// Reads the waiting messages. Returns how many; 0 if there are none.
    pub(super) fn read_messages(&mut self, messages: &mut [Message]) -> usize {
        let core = self.core;
        match core.layout.read(&core.uffd, messages, |range| give_up(core, range)) {
            Ok(count) => count,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => 0,
                _ => fail_closed(&format!("userfaultfd cannot be read: {error}")),
            },
        }
    }

    /// Sleeps until there is a fault, an answer of a blade, or a deadline to check, at most for
    /// `most`; then handles the blades' answers.
    pub(super) fn wait_for_anything(&mut self, most: Option<Duration>) {
        use rustix::event::{PollFd, PollFlags, Timespec};
        let uffd = &self.core.uffd;
        let mut fds: [PollFd<'_>; 1 + farpool_pool::MAX_BLADES] =
            std::array::from_fn(|_| PollFd::new(uffd, PollFlags::IN));
        let busy = !self.lane.is_idle();
        let mut count = 1;
        if busy {
            for (entry, fd) in fds[1..].iter_mut().zip(self.lane.descriptors()) {
                *entry = PollFd::from_borrowed_fd(fd, PollFlags::IN);
                count += 1;
            }
        }
        let most = if busy { Some(most.unwrap_or(EXPIRY_STEP).min(EXPIRY_STEP)) } else { most };
        let late = if busy { self.until_late() } else { None };
        let most = late.into_iter().chain(most).min();
        let is_staged = !busy && self.stage_used > 0;
        let most = if is_staged { Some(most.unwrap_or(STAGE_REST).min(STAGE_REST)) } else { most };
        let timeout = most.and_then(|most| Timespec::try_from(most).ok());
        if !(busy && self.core.crew.is_solo() && is_soon_ready(&mut fds[..count])) {
            let ready = rustix::event::poll(&mut fds[..count], timeout.as_ref());
            if is_staged && ready == Ok(0) {
                self.release_stage();
            }
        }
        self.check_deadlines();
        if busy {
            self.land();
            self.leave_when_idle();
        }
    }

    /// How long until a page is asked of another copy. The clock is not read if there is one copy.
    fn until_late(&self) -> Option<Duration> {
        let redundancy = self.core.settings.redundancy;
        let has_copies = matches!(redundancy, Redundancy::Copies(copies) if copies > 1);
        has_copies.then(|| self.lane.until_late(Instant::now())).flatten()
    }

    /// Checks the deadlines of requests in flight when it is time, however many faults there are.
    pub(super) fn check_deadlines(&mut self) {
        // Reading the clock is a system call in a sidecar, and this is done at every fault.
        if self.lane.is_idle() {
            return;
        }
        let now = Instant::now();
        if now >= self.expired + EXPIRY_STEP {
            self.expired = now;
            self.lane.expire(now, &mut self.done);
        }
    }

    /// Waits until the steward has applied the program's changes, so that a fault after a change is
    /// served by the state after it. Pages that arrive meanwhile are far again, see
    /// [`crate::space::layout`].
    pub(super) fn await_changes(&mut self) {
        while self.core.layout.is_behind() {
            if self.lane.in_flight() > 0 {
                self.lane.wait(&mut self.done);
                self.land();
            } else {
                self.core.layout.wait_for_steward(STEWARD_WAIT);
                // The steward may wait for a change that no thread has read yet.
                self.core.take_in();
            }
        }
    }
}

/// Polls for [`ANSWER_SPIN`] whether one of the descriptors is ready. Under SCHED_IDLE that takes
/// the CPU from no other thread, and saves the wake-up of a CPU that has gone to sleep.
fn is_soon_ready(fds: &mut [rustix::event::PollFd<'_>]) -> bool {
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let until = Instant::now() + ANSWER_SPIN;
    while rustix::event::poll(fds, Some(&zero)).is_ok_and(|ready| ready == 0) {
        if Instant::now() >= until {
            return false;
        }
        std::hint::spin_loop();
    }
    true
}
