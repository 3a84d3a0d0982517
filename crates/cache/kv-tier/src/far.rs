//! Far memory as a medium: zones in blade memory that is granted piece by piece and read by pages.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_pool::{Completion, Lane, Pool, SUPERPAGE_PAGES, SegmentHandle, SegmentPage};
use farpool_units::PAGE_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::log::{Log, Medium};
use super::staging::Lent;
use farpool_disk::Ended;
use farpool_disk::Pages;

/// Names one piece of granted memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantNumber(pub u64);

/// One shard's part of a piece of granted memory.
#[derive(Debug)]
pub struct Share {
    pub grant: GrantNumber,
    pub pool: Arc<Pool>,
    pub lane: Lane,
    pub segment: SegmentHandle,
    /// The shard's part of the segment's superpages; all are allocated.
    pub superpages: Vec<u32>,
}

#[derive(Debug)]
struct Held {
    share: Share,
    zones: Vec<usize>,
    /// Reads and writes under way.
    under_way: usize,
}

/// The position of a zone.
#[derive(Debug, Clone, Copy)]
struct Seat {
    grant: GrantNumber,
    first_page: u32,
}

/// One shard's zones on blades.
#[derive(Debug, Default)]
pub struct FarMemory {
    held: Vec<Held>,
    /// By zone number.
    seats: Vec<Option<Seat>>,
    lent: HashMap<u64, (GrantNumber, Lent)>,
    done: Vec<Completion>,
    /// Requests on memory that is gone.
    refused: Vec<Ended>,
}

/// One shard's far memory.
pub type Far = Log<FarMemory>;

impl Far {
    /// Takes a share of granted memory.
    pub fn take_share(&mut self, share: Share) {
        let zones_each = SUPERPAGE_PAGES / ZONE_PAGES_U32;
        let grant = share.grant;
        assert!(
            self.medium().held.iter().all(|it| it.share.grant != grant),
            "a share of a grant is taken once"
        );
        let mut zones = Vec::new();
        let pages = share.superpages.iter().flat_map(|superpage| {
            (0..zones_each).map(move |n| superpage * SUPERPAGE_PAGES + n * ZONE_PAGES_U32)
        });
        for first_page in pages {
            let Some(zone) = self.add_zone() else { break };
            let seats = &mut self.medium_mut().seats;
            seats.resize(seats.len().max(zone + 1), None);
            seats[zone] = Some(Seat { grant, first_page });
            zones.push(zone);
        }
        self.medium_mut().held.push(Held { share, zones, under_way: 0 });
    }

    /// Begins to give a share back: its zones are emptied one after the other.
    pub fn leave_share(&mut self, grant: GrantNumber) {
        for zone in self.medium().zones_of(grant) {
            self.leave_zone(zone);
        }
    }

    /// Gives a share up at once, or as lost.
    pub fn drop_share(&mut self, grant: GrantNumber, is_lost: bool) {
        for zone in self.medium().zones_of(grant) {
            self.drop_zone(zone, is_lost);
        }
    }

    /// Gives up the zones of a share whose blades are lost.
    pub fn drop_lost(&mut self, grant: GrantNumber) {
        for zone in self.medium().zones_of(grant) {
            if self.medium().is_lost(zone) {
                self.drop_zone(zone, true);
            }
        }
    }

    /// Closes the connection of a share if it holds nothing and nothing is under way. False while
    /// there is something; true also if the share is closed already.
    pub fn end_share(&mut self, grant: GrantNumber) -> bool {
        let held = &self.medium().held;
        let Some(at) = held.iter().position(|it| it.share.grant == grant) else { return true };
        // The numbers of forgotten zones may belong to another share by now.
        let has_left = || self.medium().zones_of(grant).into_iter().all(|zone| self.has_gone(zone));
        if held[at].under_way > 0 || !has_left() {
            return false;
        }
        self.medium_mut().held.swap_remove(at);
        true
    }
}

const ZONE_PAGES_U32: u32 = 512;
const _: () = assert!(super::staging::WHOLE_PAGES == ZONE_PAGES_U32 as usize);

impl FarMemory {
    fn zones_of(&self, grant: GrantNumber) -> Vec<usize> {
        let held = self.held.iter().find(|it| it.share.grant == grant);
        let is_there = |zone: &usize| self.seats[*zone].is_some_and(|it| it.grant == grant);
        held.map(|it| it.zones.iter().copied().filter(is_there).collect()).unwrap_or_default()
    }

    fn held_mut(&mut self, grant: GrantNumber) -> Option<&mut Held> {
        self.held.iter_mut().find(|it| it.share.grant == grant)
    }

    /// Starts the request `begin` at a page of a zone.
    fn start(
        &mut self,
        pages: Pages,
        (zone, page): (usize, usize),
        token: u64,
        begin: impl FnOnce(Pages, &mut Lane, SegmentPage) -> Lent,
    ) {
        let seat = self.seats.get(zone).copied().flatten();
        let held = seat.and_then(|seat| Some((seat, self.held_mut(seat.grant)?)));
        let Some((seat, held)) = held else {
            self.refused.push(Ended { token, pages, is_ok: false });
            return;
        };
        let page = seat.first_page + u32::try_from(page).expect("a zone has few pages");
        let at = SegmentPage { segment: held.share.segment, page };
        held.under_way += 1;
        let lent = begin(pages, &mut held.share.lane, at);
        let before = self.lent.insert(token, (seat.grant, lent));
        assert!(before.is_none(), "a token names one request");
    }

    /// Descriptors to wait for while requests are under way. The set changes.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.held.iter().flat_map(|it| it.share.lane.descriptors())
    }

    /// Continues a request that the lane has completed, and takes its memory back once all of it
    /// has been transferred.
    fn settle(&mut self, token: u64, ended: &mut Vec<Ended>) {
        let Some((grant, lent)) = self.lent.get_mut(&token) else { return };
        let Some(held) = self.held.iter_mut().find(|it| it.share.grant == *grant) else { return };
        if !lent.is_done() {
            lent.go_on(&mut held.share.lane, token);
        }
        if lent.is_done()
            && let Some((_, lent)) = self.lent.remove(&token)
        {
            assert!(held.under_way > 0, "what ends was under way");
            held.under_way -= 1;
            let (pages, is_ok) = lent.give_back();
            ended.push(Ended { token, pages, is_ok });
        }
    }
}

impl Medium for FarMemory {
    /// As on flash, so that items of any usual size fit; zones are transferred in shorter pieces.
    const ZONE_PAGES: usize = ZONE_PAGES_U32 as usize;
    const ALIGN_BYTES: usize = farpool_kv_store::record::ALIGN_BYTES;
    /// memcached's largest item by default, plus the record's overhead.
    const RECORD_BYTES_MAX: usize = (1 << 20) + (4 << 10);
    const TAIL_BYTES: usize = 0;
    const TAIL_RECORD_BYTES: usize = 0;
    /// A superpage has eight zones, and a small share should not spend them on free ones; each is a
    /// buffer, too.
    const FREE_ZONES: usize = 2;
    const WRITING_MAX: usize = 2;

    fn zones(&self) -> usize {
        self.seats.len()
    }

    fn start_read(&mut self, pages: Pages, at: (usize, usize), count: usize, token: u64) {
        let read = |pages, lane: &mut Lane, at| Lent::read(pages, lane, at, count, token);
        self.start(pages, at, token, read);
    }

    fn start_write(&mut self, pages: Pages, zone: usize, token: u64) {
        let write =
            |pages, lane: &mut Lane, at| Lent::write(pages, lane, at, Self::ZONE_PAGES, token);
        self.start(pages, (zone, 0), token, write);
    }

    fn written(&self, token: u64) -> Option<&[u8]> {
        self.lent.get(&token).map(|(_, lent)| lent.written())
    }

    fn poll(&mut self, now: Option<Instant>, ended: &mut Vec<Ended>) {
        ended.append(&mut self.refused);
        let mut done = std::mem::take(&mut self.done);
        for held in &mut self.held {
            held.share.lane.poll(&mut done);
            if let Some(now) = now {
                held.share.lane.expire(now, &mut done);
            }
        }
        for completion in done.drain(..) {
            if let Some((_, lent)) = self.lent.get_mut(&completion.token) {
                lent.complete(completion.result.is_ok());
            }
            self.settle(completion.token, ended);
        }
        self.done = done;
        // Requests that the lane refused at once have no completions.
        if now.is_some() {
            let refused: Vec<u64> =
                self.lent.iter().filter(|(_, it)| it.1.is_done()).map(|it| *it.0).collect();
            for token in refused {
                self.settle(token, ended);
            }
        }
    }

    fn wait(&self, limit: Duration) {
        let mut fds: smallvec::SmallVec<[PollFd<'_>; 8]> =
            self.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        // Interrupted or not, completions are checked.
        let _ = rustix::event::poll(&mut fds, Timespec::try_from(limit).ok().as_ref());
    }

    fn is_lost(&self, zone: usize) -> bool {
        let seat = self.seats.get(zone).copied().flatten();
        let held = seat.and_then(|seat| {
            Some((seat, self.held.iter().find(|it| it.share.grant == seat.grant)?))
        });
        held.is_none_or(|(seat, held)| {
            let Share { pool, segment, .. } = &held.share;
            !pool.can_store(*segment, seat.first_page / SUPERPAGE_PAGES)
        })
    }
}

const _: () = assert!(
    SUPERPAGE_PAGES.is_multiple_of(ZONE_PAGES_U32) && FarMemory::ZONE_PAGES * PAGE_BYTES == 2 << 20,
    "a superpage is made of whole zones"
);
