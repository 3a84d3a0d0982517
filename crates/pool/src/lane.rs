//! One pager thread's way to the blades.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_fabric::{Link, LinkPage, PageDone, PageFault};
use farpool_wire::ErrorCode;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::shared::{Access, LaneClock, Shared};
use crate::{BladeIndex, Completion, MAX_BLADES, PageError, PageRead, PageWrite, PoolError};

/// Longest time `wait` sleeps before it looks at the deadlines again.
const WAIT_STEP: Duration = Duration::from_millis(20);
/// Completions a lane holds without allocating.
const DONE_CAPACITY: usize = 1024;

/// One pager thread's way to the blades: its own connections, no locks.
#[derive(Debug)]
pub struct Lane {
    shared: Arc<Shared>,
    clock: Arc<LaneClock>,
    /// One per blade, in the blades' order.
    links: Vec<Box<dyn Link>>,
    /// Pages of the current call, by blade.
    batches: Vec<Vec<LinkPage>>,
    /// Blades of the current call in the order of their first page.
    order: Vec<usize>,
    /// Pages that found no blade.
    failed: Vec<Completion>,
    scratch: Vec<PageDone>,
}

impl Lane {
    pub(crate) fn new(
        shared: Arc<Shared>,
        clock: Arc<LaneClock>,
        links: Vec<Box<dyn Link>>,
    ) -> Lane {
        let blades = links.len();
        Lane {
            shared,
            clock,
            links,
            batches: (0..blades).map(|_| Vec::with_capacity(DONE_CAPACITY)).collect(),
            order: Vec::with_capacity(blades),
            failed: Vec::with_capacity(DONE_CAPACITY),
            scratch: Vec::with_capacity(DONE_CAPACITY),
        }
    }

    /// Sends the reads; the order is the priority (demand page first). Consecutive pages of one
    /// segment travel as one extent, all pages of one segment on one blade in one request. Every read
    /// ends in one completion. A page must not be read and written at once: what is in flight overtakes.
    ///
    /// # Safety
    /// Each [`PageRead::into`] points to 4096 bytes that stay mapped and writable, and that nothing else
    /// reads or writes, until the page's completion has been handed out (or the lane is dropped).
    ///
    /// # Errors
    /// None at present; a page that cannot be read says so in its completion.
    pub unsafe fn read(&mut self, reads: &[PageRead]) -> Result<(), PoolError> {
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        for read in reads {
            let found = self.shared.find(read.at, Access::Read, read.into, read.token);
            self.sort_in(found, read.token);
        }
        for &blade in &self.order {
            // SAFETY: the caller lends each page's memory for writing until its completion; files
            // found during this visit stay open until it ends.
            unsafe { self.links[blade].read(&self.batches[blade]) };
            clock.count(blade, Access::Read, self.batches[blade].len());
        }
        drop(visit);
        self.clear_batches();
        Ok(())
    }

    /// Stores the pages, likewise.
    ///
    /// # Safety
    /// Each [`PageWrite::from`] points to 4096 bytes that stay mapped and readable, and that nothing
    /// writes, until the page's completion has been handed out (or the lane is dropped).
    ///
    /// # Errors
    /// None at present; a page that cannot be stored says so in its completion.
    pub unsafe fn write(&mut self, writes: &[PageWrite]) -> Result<(), PoolError> {
        let clock = Arc::clone(&self.clock);
        let visit = clock.visit();
        for write in writes {
            let from = write.from.cast_mut();
            let found = self.shared.find(write.at, Access::Write, from, write.token);
            self.sort_in(found, write.token);
        }
        for &blade in &self.order {
            // SAFETY: the caller lends each page's memory for reading until its completion; files as
            // for `read`.
            unsafe { self.links[blade].write(&self.batches[blade]) };
            clock.count(blade, Access::Write, self.batches[blade].len());
        }
        drop(visit);
        self.clear_batches();
        Ok(())
    }

    fn sort_in(&mut self, found: Result<(BladeIndex, LinkPage), PageError>, token: u64) {
        match found {
            Ok((blade, page)) => {
                let blade = usize::from(blade.0);
                if self.batches[blade].is_empty() {
                    self.order.push(blade);
                }
                self.batches[blade].push(page);
            }
            Err(error) => self.failed.push(Completion { token, result: Err(error) }),
        }
    }

    fn clear_batches(&mut self) {
        for blade in self.order.drain(..) {
            self.batches[blade].clear();
        }
    }

    /// Appends what is complete; never blocks.
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.failed);
        for blade in 0..self.links.len() {
            if self.links[blade].in_flight() > 0 {
                self.links[blade].poll(&mut self.scratch);
                self.hand_out(blade, done);
            }
        }
    }

    /// Appends what is complete and blocks until there is something, or nothing is in flight.
    pub fn wait(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        done.append(&mut self.failed);
        while done.len() == before && self.in_flight() > 0 {
            match self.only_busy_link() {
                Some(blade) => {
                    self.links[blade].wait(&mut self.scratch);
                    self.hand_out(blade, done);
                }
                None => {
                    self.poll(done);
                    if done.len() == before {
                        self.sleep();
                    }
                }
            }
            if done.len() == before {
                self.expire(Instant::now(), done);
            }
        }
    }

    fn only_busy_link(&self) -> Option<usize> {
        let mut busy = (0..self.links.len()).filter(|&blade| self.links[blade].in_flight() > 0);
        busy.next().filter(|_| busy.next().is_none())
    }

    /// Sleeps until a descriptor is readable or it is time to look at the deadlines.
    fn sleep(&self) {
        let nanoseconds = i64::from(WAIT_STEP.subsec_nanos());
        let step = Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let Some(first) = self.descriptors().next() else {
            let _ = rustix::thread::nanosleep(&step);
            return;
        };
        let mut set: [PollFd<'_>; MAX_BLADES] =
            std::array::from_fn(|_| PollFd::from_borrowed_fd(first, PollFlags::IN));
        let mut count = 0;
        for (place, descriptor) in set.iter_mut().zip(self.descriptors()) {
            *place = PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
            count += 1;
        }
        // An interrupted or failed sleep only means that the caller looks again earlier.
        let _ = rustix::event::poll(&mut set[..count], Some(&step));
    }

    /// Turns requests older than the deadline into errors, retries what is broken; cheap, to be called
    /// every few ms while something is in flight.
    pub fn expire(&mut self, now: Instant, done: &mut Vec<Completion>) {
        done.append(&mut self.failed);
        for blade in 0..self.links.len() {
            if self.links[blade].in_flight() > 0 {
                self.links[blade].expire(now, &mut self.scratch);
                self.hand_out(blade, done);
            }
        }
    }

    /// Pages submitted and not yet handed out as completions.
    pub fn in_flight(&self) -> usize {
        self.failed.len() + self.links.iter().map(|link| link.in_flight()).sum::<usize>()
    }

    /// What to poll for readability together with userfaultfd; nothing for shm, nor for a blade that
    /// has nothing to answer. The set changes, so ask again before every poll.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().filter_map(|link| link.descriptor())
    }

    /// Hands out what lies in the scratch list and remembers a link's end.
    fn hand_out(&mut self, blade: usize, done: &mut Vec<Completion>) {
        if let Some(reason) = self.links[blade].loss() {
            self.shared.blades[blade].data_loss.get_or_init(|| reason.to_owned());
        }
        let index = BladeIndex(u8::try_from(blade).unwrap_or(u8::MAX));
        done.extend(self.scratch.drain(..).map(|page| Completion {
            token: page.token,
            result: page.result.map_err(|fault| page_error(fault, index)),
        }));
    }
}

fn page_error(fault: PageFault, blade: BladeIndex) -> PageError {
    match fault {
        PageFault::Lost => PageError::BladeLost(blade),
        PageFault::Deadline => PageError::Deadline,
        PageFault::Corrupt => PageError::Corrupt,
        PageFault::Refused(ErrorCode::NotAllocated) => PageError::NotAllocated,
        PageFault::Refused(ErrorCode::Frozen) => PageError::Frozen,
        PageFault::Refused(code) => PageError::Refused(code.number()),
        PageFault::Failed(_) => PageError::Refused(ErrorCode::Backing.number()),
    }
}
