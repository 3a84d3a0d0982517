//! One program's pages and clocks while it runs through a design.

use std::collections::VecDeque;

use farpool_policy::{
    CacheVisitor, PageCache, PrefetchKind, PrefetchWindow, Prefetcher, VictimPolicy, victim::Fifo,
};
use farpool_trace::Access;
use farpool_units::at_most;

use super::channel::{Channel, Link};
use super::{Outcome, Program};
use crate::design::{CriticalBlock, Design, DesignError, LINE_BYTES, Placement, Unit, transfer_ps};
use crate::load::{Reference, References};

/// The page was used before.
const TOUCHED: u8 = 1;
/// The page is in local memory.
const LOCAL: u8 = 2;
/// The page changed since it was fetched, or was never far.
const CHANGED: u8 = 4;
/// The far side still has a valid copy.
const HAS_COPY: u8 = 8;
/// The page is local, but parts of it are still on their way.
const ARRIVING: u8 = 16;
/// The page is in the tier below the far one.
const BELOW: u8 = 32;

/// A page on its way: the requested line arrives first, then the others in order.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    page: u32,
    first_line: u8,
    first_ps: u64,
    line_ps: u64,
    last_ps: u64,
}

/// A cache behind a pointer, so that the policy is chosen at run time.
trait AnyCache: Send {
    fn access_any(&mut self, page: u32, left: &mut dyn FnMut(u32)) -> bool;
    fn resident(&self) -> usize;
}

impl<C: PageCache + Send> AnyCache for C {
    fn access_any(&mut self, page: u32, left: &mut dyn FnMut(u32)) -> bool {
        self.access(page, &mut |victim| left(victim))
    }

    fn resident(&self) -> usize {
        self.len()
    }
}

struct Boxed;

impl CacheVisitor for Boxed {
    type Output = Box<dyn AnyCache>;

    fn visit(self, cache: impl PageCache + Send + 'static) -> Self::Output {
        Box::new(cache)
    }
}

/// A running program.
pub(super) struct Running<'a> {
    trace: &'a References,
    next: usize,
    tick_ps: u64,
    overlap: u64,
    /// Each thread's clock.
    clocks_ps: Vec<u64>,
    /// When the last reference was issued.
    issued_ps: u64,
    cache: Box<dyn AnyCache>,
    capacity: usize,
    pages: Vec<u8>,
    link: Link,
    /// The link to the tier below, and that tier's device.
    link_below: Link,
    device_below: Channel,
    /// Pages being written out, with the time at which their frames are free; at most
    /// `free_frames`.
    leaving: VecDeque<(u32, u64)>,
    free_frames: usize,
    arriving: Vec<Arrival>,
    prefetcher: Option<Box<dyn Prefetcher>>,
    /// Far pages in order of arrival there, if there is a tier below.
    far_order: Option<(Fifo, usize)>,
    far_count: u64,
    /// References to each far page in this epoch, and the epoch's end.
    epoch_references: Vec<u32>,
    epoch_end_ps: u64,
    victims: Vec<u32>,
    outcome: Outcome,
}

impl<'a> Running<'a> {
    pub(super) fn new(design: &Design, program: &Program<'a>) -> Result<Self, DesignError> {
        let page_count = program.references.page_count();
        let (capacity, free_frames) = frames(design, program.local_pages, page_count)?;
        let prefetch =
            design.prefetch.as_deref().and_then(|name| name.parse::<PrefetchKind>().ok());
        let far_order = design.overflow.as_ref().map(|overflow| {
            let room = page_count as u64 * u64::from(overflow.far_permille) / 1000;
            (Fifo::new(page_count), at_most(room))
        });
        let migrated = if design.migration.is_some() { page_count } else { 0 };
        Ok(Self {
            trace: program.references,
            next: 0,
            tick_ps: program.tick_ps,
            overlap: u64::from(program.overlap.max(1)),
            clocks_ps: vec![0; program.references.thread_count],
            issued_ps: 0,
            cache: program.policy.visit(page_count.max(1), capacity, program.seed, Boxed),
            capacity,
            pages: vec![0; page_count],
            link: Link::default(),
            link_below: Link::default(),
            device_below: Channel::default(),
            leaving: VecDeque::new(),
            free_frames,
            arriving: Vec::new(),
            prefetcher: prefetch.map(PrefetchKind::build),
            far_order,
            far_count: 0,
            epoch_references: vec![0; migrated],
            epoch_end_ps: design.migration.map_or(u64::MAX, |migration| migration.epoch_ps),
            victims: Vec::new(),
            outcome: Outcome { resident_pages: capacity as u64, ..Outcome::default() },
        })
    }

    pub(super) fn is_finished(&self) -> bool {
        self.next == self.trace.references.len()
    }

    /// Returns the program's current time.
    pub(super) fn clock_ps(&self) -> u64 {
        self.issued_ps
    }

    pub(super) fn finish(mut self) -> Outcome {
        self.outcome.time_ps = self.clocks_ps.iter().copied().max().unwrap_or(0);
        self.outcome
    }

    /// Runs the next reference. False at the end.
    pub(super) fn step(&mut self, design: &Design, device: &mut Channel) -> bool {
        let Some(&reference) = self.trace.references.get(self.next) else { return false };
        self.next += 1;
        let thread = usize::from(reference.thread);
        let compute_ps = reference.ticks.saturating_mul(self.tick_ps);
        self.outcome.compute_ps += compute_ps;
        let now_ps = self.issued_ps.max(self.clocks_ps[thread] + compute_ps);
        self.issued_ps = now_ps;
        if now_ps >= self.epoch_end_ps {
            self.migrate(design, device, now_ps);
        }
        let now_ps = now_ps.max(self.clocks_ps[thread]);
        self.clocks_ps[thread] = match (reference.access, design.unit) {
            (Access::WriteBack, _) => self.write_back(design, device, reference, now_ps),
            (_, Unit::Page) => self.refer_to_page(design, device, reference, now_ps),
            (_, Unit::Line) => self.refer_to_line(design, device, reference, now_ps),
        };
        true
    }

    /// The processor's caches write back a changed line; no thread waits.
    fn write_back(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
    ) -> u64 {
        let page = &mut self.pages[reference.page as usize];
        if *page & LOCAL != 0 {
            *page |= CHANGED;
        } else if *page & TOUCHED != 0 {
            self.link.send(&design.far, device, now_ps, LINE_BYTES);
            self.outcome.sent_bytes += LINE_BYTES;
        }
        now_ps
    }

    fn refer_to_page(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
    ) -> u64 {
        self.outcome.references += 1;
        let page = reference.page;
        let state = self.pages[page as usize];
        let mut now_ps = now_ps;
        if !self.bring(design, device, page, now_ps) {
            now_ps = self.wait_for_frame(now_ps);
            if state & TOUCHED != 0 {
                now_ps = self.fault(design, device, reference, now_ps);
            }
            self.pages[page as usize] |= TOUCHED | LOCAL;
        } else if state & ARRIVING != 0 {
            now_ps = self.wait_for_line(reference, now_ps);
        }
        if reference.access.is_write() {
            self.pages[page as usize] |= CHANGED;
        }
        self.local_reference(design, now_ps)
    }

    fn local_reference(&mut self, design: &Design, now_ps: u64) -> u64 {
        let stall_ps = design.local_latency_ps / self.overlap;
        self.outcome.local_ps += stall_ps;
        now_ps + stall_ps
    }

    /// Makes `page` resident and evicts the victims. True if it was resident already.
    fn bring(&mut self, design: &Design, device: &mut Channel, page: u32, now_ps: u64) -> bool {
        let mut victims = std::mem::take(&mut self.victims);
        let was_resident = self.cache.access_any(page, &mut |victim| victims.push(victim));
        for victim in victims.drain(..) {
            self.evict(design, device, victim, now_ps);
        }
        self.victims = victims;
        was_resident
    }

    fn evict(&mut self, design: &Design, device: &mut Channel, page: u32, now_ps: u64) {
        let state = &mut self.pages[page as usize];
        let is_written = !design.keeps_copies || *state & (CHANGED | HAS_COPY) != HAS_COPY;
        if *state & ARRIVING != 0 {
            self.arriving.retain(|arrival| arrival.page != page);
        }
        *state = TOUCHED | HAS_COPY;
        self.outcome.evicted_pages += 1;
        self.far_count += 1;
        self.outcome.far_pages_peak = self.outcome.far_pages_peak.max(self.far_count);
        if is_written {
            let bytes = self.trace.page_bytes;
            let free_ps = self.link.send(&design.far, device, now_ps, bytes);
            self.leaving.push_back((page, free_ps));
            self.outcome.written_pages += 1;
            self.outcome.sent_bytes += bytes;
        }
        self.overflow(design, page, now_ps);
    }

    /// Marks `page` as far; pages that exceed the far tier's capacity go one tier down.
    fn overflow(&mut self, design: &Design, page: u32, now_ps: u64) {
        let Some(overflow) = &design.overflow else { return };
        let Some((order, room)) = &mut self.far_order else { return };
        order.insert(page);
        while order.len() > *room
            && let Some(oldest) = order.victim()
        {
            self.pages[oldest as usize] |= BELOW;
            let bytes = self.trace.page_bytes;
            self.link_below.send(&overflow.tier, &mut self.device_below, now_ps, bytes);
        }
    }

    /// Waits until fewer pages than the reserve are being written out. Returns when a frame is
    /// free.
    fn wait_for_frame(&mut self, now_ps: u64) -> u64 {
        while self.leaving.front().is_some_and(|(_, free_ps)| *free_ps <= now_ps) {
            self.leaving.pop_front();
        }
        let mut free_ps = now_ps;
        while self.leaving.len() > self.free_frames
            && let Some((_, frame_ps)) = self.leaving.pop_front()
        {
            free_ps = free_ps.max(frame_ps);
        }
        self.outcome.frame_ps += free_ps - now_ps;
        free_ps
    }

    /// Fetches a page that is not local, and prefetches others.
    fn fault(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
    ) -> u64 {
        let page = reference.page;
        // A page still being written out must have left before it can be fetched.
        let left_ps = self.leaving.iter().find(|(leaving, _)| *leaving == page).map(|(_, ps)| *ps);
        let asked_ps = now_ps.max(left_ps.unwrap_or(0));
        let is_below = self.pages[page as usize] & BELOW != 0;
        let wait_ps = match design.critical_block.filter(|_| !is_below) {
            Some(critical) => self.fetch_line_first(design, device, reference, asked_ps, critical),
            None => self.fetch(design, device, page, asked_ps),
        };
        let stalled_ps = wait_ps - now_ps;
        if is_below {
            self.outcome.overflow_ps += stalled_ps;
            self.outcome.overflow_references += 1;
        } else {
            self.outcome.far_ps += stalled_ps;
            self.outcome.far_references += 1;
        }
        self.prefetch(design, device, reference, now_ps);
        wait_ps
    }

    /// Fetches one page from its tier. Returns when it has arrived.
    fn fetch(&mut self, design: &Design, device: &mut Channel, page: u32, now_ps: u64) -> u64 {
        let is_below = self.leave_far(page);
        let bytes = self.trace.page_bytes;
        match &design.overflow {
            Some(overflow) if is_below => {
                self.link_below.fetch(&overflow.tier, &mut self.device_below, now_ps, bytes)
            }
            _ => self.link.fetch(&design.far, device, now_ps, bytes),
        }
    }

    /// Fetches one page, the faulting line first. Returns when that line has arrived; the rest
    /// follows line by line while the program goes on.
    fn fetch_line_first(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
        critical: CriticalBlock,
    ) -> u64 {
        let page = reference.page;
        self.leave_far(page);
        let (far, bytes) = (&design.far, self.trace.page_bytes);
        let (first_ps, last_ps) = self.link.fetch_line_first(far, device, now_ps, bytes);
        // The design gives the first line's latency; time spent in queues is added to it.
        let late_ps = first_ps.saturating_sub(now_ps + far.idle_fetch_ps(LINE_BYTES));
        let first_ps = (now_ps + critical.first_ps + late_ps).min(last_ps);
        if !critical.others_wait {
            return first_ps;
        }
        let line_ps = transfer_ps(LINE_BYTES, far.link_bytes_per_s);
        let first_line = reference.line;
        self.expect(Arrival { page, first_line, first_ps, line_ps, last_ps });
        first_ps
    }

    /// Begins to fetch a page. True if it comes from the tier below.
    fn leave_far(&mut self, page: u32) -> bool {
        self.outcome.fetched_bytes += self.trace.page_bytes;
        assert!(self.far_count > 0, "a page that comes back was far");
        self.far_count -= 1;
        if let Some((order, _)) = &mut self.far_order {
            order.remove(page);
        }
        let state = &mut self.pages[page as usize];
        let is_below = *state & BELOW != 0;
        *state = (*state & !BELOW) | TOUCHED | LOCAL;
        is_below
    }

    fn prefetch(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
    ) {
        let Some(prefetcher) = &mut self.prefetcher else { return };
        let page_number = self.trace.page_numbers[reference.page as usize];
        let mut window = PrefetchWindow::EMPTY;
        prefetcher.on_fault(reference.thread.into(), page_number, &mut window);
        // Prefetch may fill at most half of local memory.
        let room = self.capacity / 2;
        for page_number in window.pages().take(room) {
            let Some(page) = self.trace.dense(page_number) else { break };
            if self.pages[page as usize] & (TOUCHED | LOCAL) != TOUCHED {
                continue;
            }
            self.bring(design, device, page, now_ps);
            let last_ps = self.fetch(design, device, page, now_ps);
            let arrival = Arrival { page, first_line: 0, first_ps: last_ps, line_ps: 0, last_ps };
            self.expect(arrival);
            self.outcome.prefetched_pages += 1;
        }
    }

    /// Records a page on its way, and drops arrivals that are complete.
    fn expect(&mut self, arrival: Arrival) {
        self.arriving.retain(|earlier| earlier.last_ps > self.issued_ps);
        self.pages[arrival.page as usize] |= ARRIVING;
        self.arriving.push(arrival);
    }

    /// Waits for a line of a page that is only partly local.
    fn wait_for_line(&mut self, reference: Reference, now_ps: u64) -> u64 {
        let Some(at) = self.arriving.iter().position(|arrival| arrival.page == reference.page)
        else {
            self.pages[reference.page as usize] &= !ARRIVING;
            return now_ps;
        };
        let arrival = self.arriving[at];
        if now_ps >= arrival.last_ps {
            self.arriving.swap_remove(at);
            self.pages[reference.page as usize] &= !ARRIVING;
            return now_ps;
        }
        let lines =
            u64::from(reference.line.wrapping_sub(arrival.first_line)) % self.lines_in_page();
        let there_ps =
            (arrival.first_ps + lines * arrival.line_ps).min(arrival.last_ps).max(now_ps);
        self.outcome.far_ps += there_ps - now_ps;
        there_ps
    }

    fn lines_in_page(&self) -> u64 {
        (self.trace.page_bytes / LINE_BYTES).max(1)
    }

    fn refer_to_line(
        &mut self,
        design: &Design,
        device: &mut Channel,
        reference: Reference,
        now_ps: u64,
    ) -> u64 {
        self.outcome.references += 1;
        let page = reference.page;
        let state = self.pages[page as usize];
        let is_new = state & TOUCHED == 0;
        if is_new && design.placement == Placement::Far && self.cache.resident() == self.capacity {
            self.pages[page as usize] |= TOUCHED;
            self.far_count += 1;
            self.outcome.far_pages_peak = self.outcome.far_pages_peak.max(self.far_count);
        } else if is_new || state & LOCAL != 0 {
            self.bring(design, device, page, now_ps);
            self.pages[page as usize] |= TOUCHED | LOCAL | CHANGED;
            return self.local_reference(design, now_ps);
        }
        if let Some(count) = self.epoch_references.get_mut(page as usize) {
            *count += 1;
        }
        let last_ps = self.link.fetch(&design.far, device, now_ps, LINE_BYTES);
        let stall_ps = (last_ps - now_ps) / self.overlap;
        self.outcome.far_ps += stall_ps;
        self.outcome.far_references += 1;
        self.outcome.fetched_bytes += LINE_BYTES;
        now_ps + stall_ps
    }

    /// Ends an epoch: the most used far pages become local, and the policy's victims go far.
    fn migrate(&mut self, design: &Design, device: &mut Channel, now_ps: u64) {
        let Some(migration) = design.migration else { return };
        let mut wanted: Vec<(u32, u32)> = (0..)
            .zip(&self.epoch_references)
            .filter(|(_, count)| **count >= migration.min_references)
            .map(|(page, &count)| (count, page))
            .collect();
        wanted.sort_unstable_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        // No more than the link can carry both ways in an epoch, nor than half of local memory.
        let page_ps = transfer_ps(self.trace.page_bytes, design.far.link_bytes_per_s).max(1);
        let most: usize = at_most(migration.epoch_ps / page_ps);
        wanted.truncate(most.min(self.capacity / 2));
        for &(_, page) in &wanted {
            self.bring(design, device, page, now_ps);
            self.fetch(design, device, page, now_ps);
            self.pages[page as usize] |= CHANGED;
        }
        let moved = wanted.len() as u64;
        self.outcome.migrated_pages += moved;
        let stall_ps = moved * migration.page_ps;
        self.outcome.migration_ps += stall_ps;
        for clock_ps in &mut self.clocks_ps {
            *clock_ps = (*clock_ps).max(now_ps + stall_ps);
        }
        self.epoch_references.fill(0);
        while self.epoch_end_ps <= now_ps {
            self.epoch_end_ps = self.epoch_end_ps.saturating_add(migration.epoch_ps);
        }
    }
}

/// Splits `local_pages` into pages that can be resident and frames kept free.
fn frames(
    design: &Design,
    local_pages: usize,
    page_count: usize,
) -> Result<(usize, usize), DesignError> {
    let error = |reason| Err(DesignError { design: design.name.clone(), reason });
    if local_pages == 0 {
        return error("no local memory at all".to_owned());
    }
    if local_pages >= page_count {
        return Ok((local_pages, 0));
    }
    let mut pages = local_pages;
    if let Some(ratio) = design.compression_permille {
        // The other pages lie compressed in the same memory: r + (n - r) / ratio = local.
        let (ratio, count) = (ratio as usize, page_count * 1000);
        let resident = (local_pages * ratio).saturating_sub(count) / (ratio - 1000);
        if resident == 0 {
            let needed = count.div_ceil(ratio);
            let reason = format!(
                "{page_count} pages compressed by {}.{:03} take {needed} pages; local memory has \
                 {local_pages}",
                ratio / 1000,
                ratio % 1000
            );
            return error(reason);
        }
        pages = resident;
    }
    // A small memory keeps a small reserve.
    let free_frames = (design.free_frames as usize).min(pages / SMALLEST_RESERVE_PART);
    Ok((pages - free_frames, free_frames))
}

/// The reserve of free frames is at most one part in this many of local memory.
const SMALLEST_RESERVE_PART: usize = 16;
