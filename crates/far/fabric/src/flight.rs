//! The requests of one stream link: waiting for a credit, flying, or done.
//!
//! A request is a run of pages of one segment. It flies from the moment its first byte may be sent
//! until its answer is verified; answers usually arrive in the order of sending, but need not.
//! Reads overtake waiting writes, since a thread is stalled until a read is answered. A client that
//! keeps to a rate has requests wait for that too, which does not count towards the deadline.
//! Buffers of finished requests are reused, so a warm link allocates nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use farpool_kernel::{Time, monotonic_ns};
use farpool_policy::{RateLimit, WaitNs};
use farpool_units::{PAGE_BYTES, exactly};
use farpool_wire::{
    ErrorCode, Extent, Opcode, PagesChecksum, Request, RequestId, SegmentId, WireError,
};

use crate::limits::ClientLimits;
use crate::link::{LinkPage, PageDone, PageFault};
use crate::sys::Vector;

/// Most pages of one request (1 MiB), below the protocol's limit so that one long request does not
/// keep the others waiting.
pub(crate) const REQUEST_LIMIT_PAGES: usize = 256;
/// How often a request may be answered by damaged or impossible frames, each ending the connection,
/// before it fails: once is bad luck, three times is a broken peer.
const DAMAGE_LIMIT: u8 = 3;

/// Longest time before a request that is held back is checked again, in nanoseconds: the limit may
/// have been raised meanwhile, by another process.
const ASK_AGAIN_NS: u64 = 100_000_000;

/// One request.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) id: RequestId,
    pub(crate) opcode: Opcode,
    segment: SegmentId,
    pub(crate) pages: Vec<LinkPage>,
    /// The encoded head, kept while it is being sent.
    head: Vec<u8>,
    /// When it was submitted or, within limits, first sent; later by the time that the limits held
    /// it back since.
    submitted: Instant,
    /// When its connection was lost, until it is sent again.
    grounded: Option<Instant>,
    /// Its number in the order of submission.
    sequence: u64,
    /// The limit that it was charged by, and when it may be sent by that.
    charged: Option<(RateLimit, u64)>,
    damaged: u8,
    /// Position in the stream after its last byte.
    pub(crate) end_bytes: u64,
}

/// All requests of one link.
#[derive(Debug)]
pub(crate) struct Flight {
    waiting_reads: VecDeque<Slot>,
    waiting_writes: VecDeque<Slot>,
    pub(crate) flying: VecDeque<Slot>,
    limits: Option<Arc<ClientLimits>>,
    /// Nobody waits for the answers.
    pub(crate) is_background: bool,
    time: Time,
    /// When reads, and when writes, were last held back by the limits.
    held: [Option<Instant>; 2],
    /// When the first request that is held back now may be sent; 0 if none is.
    resumes_ns: u64,
    spare: Vec<Slot>,
    pub(crate) done: Vec<PageDone>,
    extents: Vec<Extent>,
    next_id: u64,
    /// Requests submitted so far.
    pub(crate) submitted: u64,
    /// Bytes of the stream in all requests made so far.
    stream_bytes: u64,
    pages: usize,
    pub(crate) credits: u16,
    pub(crate) request_limit_pages: usize,
}

impl Flight {
    pub(crate) fn new(limits: Option<Arc<ClientLimits>>, time: Time) -> Self {
        Flight {
            waiting_reads: VecDeque::new(),
            waiting_writes: VecDeque::new(),
            flying: VecDeque::new(),
            limits,
            is_background: false,
            time,
            held: [None; 2],
            resumes_ns: 0,
            spare: Vec::new(),
            done: Vec::new(),
            extents: Vec::with_capacity(REQUEST_LIMIT_PAGES),
            next_id: 1,
            submitted: 0,
            stream_bytes: 0,
            pages: 0,
            credits: 1,
            request_limit_pages: 1,
        }
    }

    /// Pages given and not yet handed out.
    pub(crate) fn pages(&self) -> usize {
        self.pages + self.done.len()
    }

    /// True if a request is waiting or flying.
    pub(crate) fn is_busy(&self) -> bool {
        self.pages > 0
    }

    /// Adds the pages as requests.
    pub(crate) fn submit(&mut self, opcode: Opcode, pages: &[LinkPage]) {
        let submitted = self.time.now();
        self.pages += pages.len();
        for same in pages.chunk_by(|a, b| a.segment == b.segment) {
            for pages in same.chunks(self.request_limit_pages) {
                let mut slot = self.spare.pop().unwrap_or_else(|| Slot::new(submitted));
                slot.opcode = opcode;
                slot.segment = pages[0].segment;
                slot.submitted = submitted;
                slot.grounded = None;
                slot.sequence = self.submitted;
                self.submitted += 1;
                slot.charged = None;
                slot.damaged = 0;
                slot.pages.extend_from_slice(pages);
                self.queue_of(opcode).push_back(slot);
            }
        }
    }

    fn queue_of(&mut self, opcode: Opcode) -> &mut VecDeque<Slot> {
        if opcode == Opcode::Read { &mut self.waiting_reads } else { &mut self.waiting_writes }
    }

    /// Puts the next waiting requests on the wire as far as credits and the vector's room allow.
    pub(crate) fn launch(&mut self, output: &mut Vector, room_parts: usize) {
        self.resumes_ns = 0;
        while self.flying.len() < usize::from(self.credits.max(1)) && output.parts() < room_parts {
            let next = match self.limits {
                None => self.waiting_reads.pop_front().or_else(|| self.waiting_writes.pop_front()),
                Some(_) => self.next_within_limits(),
            };
            let Some(mut slot) = next else {
                return;
            };
            slot.id = RequestId(self.next_id);
            self.next_id += 1;
            if slot.encode(&mut self.extents, self.is_background).is_err() {
                // Our own limits keep requests within the protocol's, so this is not caused by a
                // blade.
                self.finish(slot, Err(PageFault::Refused(ErrorCode::BadFrame)));
                continue;
            }
            output.push_const(slot.head.as_ptr(), slot.head.len());
            self.stream_bytes += slot.head.len() as u64;
            if slot.opcode == Opcode::Write {
                slot.pages.iter().for_each(|page| output.push_const(page.memory, PAGE_BYTES));
                self.stream_bytes += (slot.pages.len() * PAGE_BYTES) as u64;
            }
            slot.end_bytes = self.stream_bytes;
            self.flying.push_back(slot);
        }
    }

    /// The next request that may be sent by now: a read, unless all reads must wait.
    fn next_within_limits(&mut self) -> Option<Slot> {
        let meters = self.limits.as_deref()?.meters();
        let now_ns = monotonic_ns();
        let queues = [&mut self.waiting_reads, &mut self.waiting_writes];
        let meters = [&meters.read, &meters.write];
        for ((queue, meter), held) in queues.into_iter().zip(meters).zip(&mut self.held) {
            let Some(slot) = queue.front_mut() else { continue };
            let passes_ns = match meter.limit() {
                None => 0,
                Some(limit) => slot.passes_ns(now_ns, &limit, |bytes| {
                    meter.bucket().charge(bytes, now_ns, &limit)
                }),
            };
            if passes_ns <= now_ns {
                slot.leave(self.time.now(), *held);
                return queue.pop_front();
            }
            *held = Some(self.time.now());
            let earlier = if self.resumes_ns == 0 { u64::MAX } else { self.resumes_ns };
            self.resumes_ns = earlier.min(passes_ns).min(now_ns.saturating_add(ASK_AGAIN_NS));
        }
        None
    }

    /// When to check again the first request that the limits hold back, if there is one to wait
    /// for.
    pub(crate) fn resumes_ns(&self) -> Option<u64> {
        (self.resumes_ns > 0).then_some(self.resumes_ns)
    }

    /// Ends the flying request at index `at`.
    pub(crate) fn land(&mut self, at: usize, result: Result<(), PageFault>) {
        if let Some(slot) = self.flying.remove(at) {
            self.finish(slot, result);
        }
    }

    fn finish(&mut self, mut slot: Slot, result: Result<(), PageFault>) {
        self.pages -= slot.pages.len();
        self.done.extend(slot.pages.iter().map(|page| PageDone { token: page.token, result }));
        slot.pages.clear();
        self.spare.push(slot);
    }

    /// Handles a lost connection: flying requests wait again, in the old order. `damaged` says that
    /// it ended by impossible bytes, which a request survives only a few times.
    pub(crate) fn ground(&mut self, damaged: bool) {
        self.stream_bytes = 0;
        let now = self.time.now();
        while let Some(mut slot) = self.flying.pop_back() {
            slot.grounded = Some(now);
            slot.damaged += u8::from(damaged);
            slot.charged = None;
            if slot.damaged >= DAMAGE_LIMIT {
                self.finish(slot, Err(PageFault::Corrupt));
            } else {
                self.queue_of(slot.opcode).push_front(slot);
            }
        }
    }

    /// When the oldest request was submitted, or could first have been sent within the limits.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        let flying = self.flying.iter().map(|slot| slot.submitted).min();
        let fronts = [self.waiting_reads.front(), self.waiting_writes.front()];
        let since = |(front, held): (Option<&Slot>, Option<Instant>)| {
            front.map(|slot| held.map_or(slot.submitted, |held| held.max(slot.submitted)))
        };
        fronts.into_iter().zip(self.held).filter_map(since).chain(flying).min()
    }

    /// True if all of the first `count` requests have ended.
    pub(crate) fn is_finished_before(&self, count: u64) -> bool {
        let waiting = [self.waiting_reads.front(), self.waiting_writes.front()];
        // Flying requests are in the order of sending, in which reads overtake writes: all are
        // checked.
        waiting.into_iter().flatten().chain(&self.flying).all(|slot| slot.sequence >= count)
    }

    /// Ends every request.
    pub(crate) fn fail_all(&mut self, fault: PageFault) {
        self.ground(false);
        while let Some(slot) =
            self.waiting_reads.pop_front().or_else(|| self.waiting_writes.pop_front())
        {
            self.finish(slot, Err(fault));
        }
    }
}

impl Slot {
    fn new(submitted: Instant) -> Self {
        Slot {
            id: RequestId(0),
            opcode: Opcode::Read,
            segment: SegmentId(0),
            pages: Vec::with_capacity(REQUEST_LIMIT_PAGES),
            head: Vec::with_capacity(64),
            submitted,
            grounded: None,
            sequence: 0,
            charged: None,
            damaged: 0,
            end_bytes: 0,
        }
    }

    /// It is sent, within limits that last held requests of its kind back at this time. Its
    /// deadline begins when it is first sent, and goes on where it is sent again, or a blade that
    /// greets and never answers would not be lost.
    fn leave(&mut self, now: Instant, held: Option<Instant>) {
        match self.grounded.take() {
            None => self.submitted = now,
            Some(grounded) if held.is_some_and(|held| held >= grounded) => {
                self.submitted += now.saturating_duration_since(grounded);
            }
            Some(_) => {}
        }
    }

    /// When it may be sent. Charged once, and again if the limit has changed meanwhile.
    fn passes_ns(
        &mut self,
        now_ns: u64,
        limit: &RateLimit,
        charge: impl FnOnce(u64) -> WaitNs,
    ) -> u64 {
        match self.charged {
            Some((by, passes_ns)) if by == *limit => passes_ns,
            _ => {
                let WaitNs(wait_ns) = charge((self.pages.len() * PAGE_BYTES) as u64);
                let passes_ns = now_ns.saturating_add(wait_ns);
                self.charged = Some((*limit, passes_ns));
                passes_ns
            }
        }
    }

    /// Bytes of the pages in the answer.
    pub(crate) fn answer_pages(&self) -> usize {
        if self.opcode == Opcode::Read { self.pages.len() } else { 0 }
    }

    fn encode(&mut self, extents: &mut Vec<Extent>, is_background: bool) -> Result<(), WireError> {
        extents.clear();
        for run in self.pages.chunk_by(|a, b| a.page.0.checked_add(1) == Some(b.page.0)) {
            extents.push(Extent::new(run[0].page, exactly(run.len())));
        }
        self.head.clear();
        let segment = self.segment;
        let (request, checksum) = match self.opcode {
            Opcode::Read => (Request::Read { segment, extents }, 0),
            _ => (Request::Write { segment, extents }, checksum_of(&self.pages)),
        };
        match is_background {
            true => request.encode_in_background(self.id, checksum, &mut self.head),
            false => request.encode(self.id, checksum, &mut self.head),
        }
    }

    /// The checksum over the answer's pages, received in place.
    pub(crate) fn answer_checksum(&self) -> u32 {
        checksum_of(&self.pages[..self.answer_pages()])
    }

    /// Copies the answer's pages, which are in `bytes`, to their places.
    pub(crate) fn fill(&self, bytes: &[u8]) {
        for (page, bytes) in self.pages.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
            // SAFETY: the page's memory is lent to the link for writing until its completion.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), page.memory, PAGE_BYTES) };
        }
    }
}

fn checksum_of(pages: &[LinkPage]) -> u32 {
    let mut sum = PagesChecksum::new();
    for page in pages {
        // SAFETY: the page's memory is lent to the link, readable, until its completion.
        sum.update(unsafe { std::slice::from_raw_parts(page.memory, PAGE_BYTES) });
    }
    sum.value()
}
