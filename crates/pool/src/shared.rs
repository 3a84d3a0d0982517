//! What the pool and its lanes have in common: read by lanes without a lock, changed by the pool's control
//! operations under theirs.
//!
//! A lane looks up a page in three steps (segment's state, superpage's place, the blade's part of the
//! segment). What a lookup found stays valid until the lane leaves: before anything found that way is
//! closed or given back, the pool unpublishes it and waits for every lane to pass a point outside
//! ([`LaneClock`]). So a copy can never hit a descriptor number that means another file by now.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use farpool_fabric::{DescriptorSet, LinkPage, Session};
use farpool_wire::{PAGES_PER_SUPERPAGE, PageNumber, SegmentId};

use crate::map::SuperpageMap;
use crate::{BladeIndex, MAX_BLADES, MAX_SEGMENTS, PageError, PoolConfig, SegmentPage};

/// Everything lanes look at.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: PoolConfig,
    pub(crate) descriptors: Arc<DescriptorSet>,
    pub(crate) blades: Vec<Blade>,
    pub(crate) segments: [Segment; MAX_SEGMENTS],
}

/// One blade as all threads see it.
#[derive(Debug)]
pub(crate) struct Blade {
    pub(crate) session: Arc<Session>,
    pub(crate) description: String,
    /// Why its pages cannot be reached any more.
    pub(crate) data_loss: OnceLock<String>,
    /// Why it takes no control requests any more.
    pub(crate) control_loss: OnceLock<String>,
}

/// What may be done with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SegmentState {
    /// The handle names nothing.
    Free = 0,
    Writable = 1,
    Frozen = 2,
}

/// One segment as lanes see it.
#[derive(Debug)]
pub(crate) struct Segment {
    state: AtomicU8,
    map: OnceLock<SuperpageMap>,
    parts: [Part; MAX_BLADES],
}

/// The part of a segment that lies on one blade. Read only after a place on that blade was found.
#[derive(Debug, Default)]
struct Part {
    id: AtomicU64,
    file: AtomicI32,
}

/// Whether a page is looked up to be read or to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl Segment {
    pub(crate) fn new() -> Self {
        Segment {
            state: AtomicU8::new(SegmentState::Free as u8),
            map: OnceLock::new(),
            parts: std::array::from_fn(|_| Part::default()),
        }
    }

    pub(crate) fn state(&self) -> SegmentState {
        match self.state.load(Ordering::Acquire) {
            1 => SegmentState::Writable,
            2 => SegmentState::Frozen,
            _ => SegmentState::Free,
        }
    }

    pub(crate) fn set_state(&self, state: SegmentState) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub(crate) fn map(&self) -> &SuperpageMap {
        self.map.get_or_init(SuperpageMap::new)
    }

    /// Says where on a blade the segment lies, before the first place on that blade is published.
    pub(crate) fn set_part(&self, blade: BladeIndex, id: SegmentId, file: RawFd) {
        if let Some(part) = self.parts.get(usize::from(blade.0)) {
            part.id.store(id.0, Ordering::Release);
            part.file.store(file, Ordering::Release);
        }
    }

    /// Finds the page: the blade, and what the link to it needs.
    fn find(
        &self,
        page: u32,
        access: Access,
        memory: *mut u8,
        token: u64,
    ) -> Result<(BladeIndex, LinkPage), PageError> {
        match (self.state(), access) {
            (SegmentState::Free, _) => return Err(PageError::NotAllocated),
            (SegmentState::Frozen, Access::Write) => return Err(PageError::Frozen),
            _ => {}
        }
        let number = PageNumber(page);
        let place = self.map().get(number.superpage().0).ok_or(PageError::NotAllocated)?;
        let part = &self.parts[usize::from(place.blade.0) % MAX_BLADES];
        let first = u64::from(place.rmma) * u64::from(PAGES_PER_SUPERPAGE);
        let page = LinkPage {
            segment: SegmentId(part.id.load(Ordering::Acquire)),
            page: number,
            file: part.file.load(Ordering::Acquire),
            file_page: first + u64::from(number.index_in_superpage()),
            memory,
            token,
        };
        Ok((place.blade, page))
    }
}

impl Shared {
    /// Finds the page on its blade.
    pub(crate) fn find(
        &self,
        at: SegmentPage,
        access: Access,
        memory: *mut u8,
        token: u64,
    ) -> Result<(BladeIndex, LinkPage), PageError> {
        let segment = self.segments.get(at.segment.index()).ok_or(PageError::NotAllocated)?;
        let (blade, page) = segment.find(at.page, access, memory, token)?;
        match self.blades.get(usize::from(blade.0)) {
            Some(known) if known.data_loss.get().is_none() => Ok((blade, page)),
            _ => Err(PageError::BladeLost(blade)),
        }
    }
}

/// Counts a lane's visits to the shared tables: odd while it is inside. Beside it, what the lane asked
/// to move; written by the lane alone.
#[derive(Debug, Default)]
pub(crate) struct LaneClock {
    visits: AtomicU64,
    moved: [Moved; MAX_BLADES],
}

/// Pages that a lane asked one blade for.
#[derive(Debug, Default)]
struct Moved {
    read: AtomicU64,
    written: AtomicU64,
}

/// A visit under way.
#[derive(Debug)]
pub(crate) struct Visit<'a>(&'a LaneClock);

impl LaneClock {
    /// Enters; what is looked up until the visit ends stays valid that long.
    pub(crate) fn visit(&self) -> Visit<'_> {
        self.visits.fetch_add(1, Ordering::SeqCst);
        Visit(self)
    }

    /// Counts pages; called by the lane only.
    pub(crate) fn count(&self, blade: usize, access: Access, pages: usize) {
        let moved = &self.moved[blade % MAX_BLADES];
        let counter = match access {
            Access::Read => &moved.read,
            Access::Write => &moved.written,
        };
        let all = counter.load(Ordering::Relaxed).wrapping_add(pages as u64);
        counter.store(all, Ordering::Relaxed);
    }

    /// Pages read from and written to the blade so far.
    pub(crate) fn moved(&self, blade: usize) -> (u64, u64) {
        let moved = &self.moved[blade % MAX_BLADES];
        (moved.read.load(Ordering::Relaxed), moved.written.load(Ordering::Relaxed))
    }

    /// Waits until the lane is outside or has been. To be called after unpublishing. A visit lasts as long
    /// as a copy or a non-blocking send, so spinning politely is enough.
    pub(crate) fn wait_until_outside(&self) {
        fence(Ordering::SeqCst);
        let seen = self.visits.load(Ordering::SeqCst);
        while seen % 2 == 1 && self.visits.load(Ordering::SeqCst) == seen {
            rustix::thread::sched_yield();
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.0.visits.fetch_add(1, Ordering::SeqCst);
    }
}
