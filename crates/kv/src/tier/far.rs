//! Far memory as a medium: zones on the pool's blades, read by pages.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use farpool_pool::{Completion, Lane, SegmentHandle, SegmentPage};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::log::{Ended, Log, Medium, Zone};
use super::pages::{PAGE_BYTES, Pages};
use super::staging::Lent;

/// One shard's zones in the pool.
#[derive(Debug)]
pub struct FarMemory {
    lane: Lane,
    segment: SegmentHandle,
    first_page: u32,
    zones: usize,
    lent: HashMap<u64, Lent>,
    done: Vec<Completion>,
}

/// One shard's far memory.
pub type Far = Log<FarMemory>;

impl FarMemory {
    /// The pages `first_page ..` of a segment, `pages` of them, all allocated. None when there are too few.
    #[must_use]
    pub fn log(lane: Lane, segment: SegmentHandle, first_page: u32, pages: u32) -> Option<Far> {
        let zones = pages as usize / Self::ZONE_PAGES;
        let (lent, done) = (HashMap::new(), Vec::new());
        let memory = Self { lane, segment, first_page, zones, lent, done };
        Log::new(memory, vec![Zone::FREE; zones])
    }

    fn page(&self, zone: usize, page: usize) -> SegmentPage {
        let offset = u32::try_from(zone * Self::ZONE_PAGES + page)
            .expect("a shard's pages are numbered in 32 bits");
        SegmentPage { segment: self.segment, page: self.first_page + offset }
    }

    /// What to wait for while something is under way. The set changes.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.lane.descriptors()
    }

    /// Takes back memory for which no completion will come.
    fn settle(&mut self, token: u64, ended: &mut Vec<Ended>) {
        if self.lent.get(&token).is_some_and(Lent::is_done)
            && let Some(lent) = self.lent.remove(&token)
        {
            let (pages, is_ok) = lent.give_back();
            ended.push(Ended { token, pages, is_ok });
        }
    }
}

impl Medium for FarMemory {
    const ZONE_PAGES: usize = 64;
    const ALIGN_BYTES: usize = super::record::ALIGN_BYTES;
    /// Beyond, too much of a zone would stay empty behind it.
    const RECORD_BYTES_MAX: usize = Self::ZONE_PAGES * PAGE_BYTES / 2;
    const TAIL_BYTES: usize = 0;
    const TAIL_RECORD_BYTES: usize = 0;

    fn zones(&self) -> usize {
        self.zones
    }

    fn start_read(&mut self, pages: Pages, at: (usize, usize), count: usize, token: u64) {
        let at = self.page(at.0, at.1);
        let lent = Lent::read(pages, &mut self.lane, at, count, token);
        self.lent.insert(token, lent);
    }

    fn start_write(&mut self, pages: Pages, zone: usize, token: u64) {
        let at = self.page(zone, 0);
        let lent = Lent::write(pages, &mut self.lane, at, Self::ZONE_PAGES, token);
        self.lent.insert(token, lent);
    }

    fn written(&self, token: u64) -> Option<&[u8]> {
        self.lent.get(&token).map(Lent::written)
    }

    fn poll(&mut self, now: Option<Instant>, ended: &mut Vec<Ended>) {
        let mut done = std::mem::take(&mut self.done);
        self.lane.poll(&mut done);
        if let Some(now) = now {
            self.lane.expire(now, &mut done);
        }
        for completion in done.drain(..) {
            if let Some(lent) = self.lent.get_mut(&completion.token) {
                lent.complete(completion.result.is_ok());
            }
            self.settle(completion.token, ended);
        }
        self.done = done;
        // What the lane refused at once has no completions.
        if now.is_some() {
            let refused: Vec<u64> =
                self.lent.iter().filter(|(_, it)| it.is_done()).map(|it| *it.0).collect();
            for token in refused {
                self.settle(token, ended);
            }
        }
    }

    fn wait(&self, limit: Duration) {
        let mut fds: smallvec::SmallVec<[PollFd<'_>; 8]> =
            self.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Interrupted or not, what has come is looked at.
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(limit).ok().as_ref());
    }
}
