//! A lane together with the memory that it is lent: each page in flight has a buffer of its own,
//! which nobody else sees until its completion.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use farpool_pool::{Completion, Lane, PageError, PageRead, PageWrite, SegmentPage};
use farpool_units::PAGE_BYTES;

use crate::clock;

/// How often deadlines are checked.
const EXPIRY_STEP: Duration = Duration::from_millis(20);

#[derive(Debug)]
#[repr(C, align(4096))]
struct Buffer([u8; PAGE_BYTES]);

/// A page that has come back.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Which page.
    pub at: SegmentPage,
    /// Whether it was read or stored.
    pub result: Result<(), PageError>,
    /// Its bytes.
    pub bytes: Box<[u8; PAGE_BYTES]>,
}

/// A lane and its lent pages.
#[derive(Debug)]
pub(crate) struct LentLane {
    lane: Lane,
    lent: BTreeMap<u64, (SegmentPage, Box<Buffer>)>,
    done: Vec<Completion>,
    expired: Instant,
}

impl LentLane {
    /// A lane to which nothing is lent.
    #[must_use]
    pub(crate) fn new(lane: Lane) -> LentLane {
        LentLane { lane, lent: BTreeMap::new(), done: Vec::new(), expired: clock::now() }
    }

    /// Begins to read pages, each under a number that no other page in flight has.
    pub(crate) fn read(&mut self, pages: &[(SegmentPage, u64)]) {
        let mut reads = Vec::with_capacity(pages.len());
        for &(at, token) in pages {
            // Bytes that are no version of any page.
            let into = self.lend(at, token, [0xEE; PAGE_BYTES]);
            reads.push(PageRead { at, into, token });
        }
        // SAFETY: the buffers are boxed, and kept in `lent` until their completions; the lane is
        // dropped before them.
        unsafe { self.lane.read(&reads) }.expect("there is no error at present");
    }

    /// Begins to store pages, likewise.
    pub(crate) fn write(&mut self, pages: Vec<(SegmentPage, u64, [u8; PAGE_BYTES])>) {
        let mut writes = Vec::with_capacity(pages.len());
        for (at, token, bytes) in pages {
            let from = self.lend(at, token, bytes).cast_const();
            writes.push(PageWrite { at, from, token });
        }
        // SAFETY: as for reads.
        unsafe { self.lane.write(&writes) }.expect("there is no error at present");
    }

    fn lend(&mut self, at: SegmentPage, token: u64, bytes: [u8; PAGE_BYTES]) -> *mut u8 {
        let (_, buffer) = self.lent.entry(token).or_insert((at, Box::new(Buffer(bytes))));
        assert_eq!(buffer.0[0], bytes[0], "a number is used once");
        buffer.0.as_mut_ptr()
    }

    /// Pages in flight.
    #[must_use]
    pub(crate) fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }

    /// True if nothing is owed to the lane, in flight or not.
    #[must_use]
    pub(crate) fn is_idle(&self) -> bool {
        self.lane.is_idle()
    }

    /// Collects what has come back, without waiting.
    pub(crate) fn poll(&mut self, now: Instant) -> Vec<Ended> {
        self.lane.poll(&mut self.done);
        if now >= self.expired + EXPIRY_STEP {
            self.expired = now;
            self.lane.expire(now, &mut self.done);
        }
        self.collect()
    }

    /// The same, and waits until something is there or nothing is in flight.
    pub(crate) fn wait(&mut self) -> Vec<Ended> {
        self.lane.wait(&mut self.done);
        self.collect()
    }

    fn collect(&mut self) -> Vec<Ended> {
        let LentLane { lent, done, .. } = self;
        let back = done.drain(..).map(|Completion { token, result }| {
            let (at, buffer) = lent.remove(&token).expect("a page comes back once");
            Ended { at, result, bytes: Box::new(buffer.0) }
        });
        back.collect()
    }
}
