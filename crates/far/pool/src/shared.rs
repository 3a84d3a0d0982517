//! State shared by the pool and its lanes: read by lanes without a lock, changed by the pool's
//! control operations under theirs.
//!
//! A lane looks up a page in three steps (segment's state, superpage's place, the blade's part of
//! the segment). What a lookup found stays valid until the lane leaves: before it is closed or
//! freed, the pool unpublishes it and waits for every lane to pass a point outside ([`LaneClock`]).
//! So a copy can never hit a descriptor number that means another file by now.
//!
//! Blades come and go in slots. A slot's generation tells lanes that their connection is to an
//! earlier blade; it changes only when nothing of any segment lies in the slot and nothing is in
//! flight there.

use std::os::fd::RawFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
use std::sync::{Arc, OnceLock, RwLock};

use farpool_fabric::{DescriptorSet, LinkPage, Session, Spare};
use farpool_kernel::{read_lock, write_lock};
use farpool_units::PAGES_PER_SUPERPAGE;
use farpool_wire::{FailureDomain, PageNumber, SegmentId};

use crate::copies::ALL_SEGMENTS;
use crate::damage::Suspects;
use crate::map::{Place, SuperpageMap};
use crate::moving::{MAX_RECORDS, Record, Side};
use crate::parity::RowLocks;
use crate::seals::Seals;
use crate::types::Strands;
use crate::types::{Access, PARTS_PER_BLADE};
use crate::{BladeIndex, MAX_BLADES, PageError, PoolConfig, SegmentHandle, SegmentPage};

/// Everything that lanes read.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: PoolConfig,
    pub(crate) descriptors: Arc<DescriptorSet>,
    /// Set while every superpage has all its copies, if it is to have several.
    pub(crate) spare: Spare,
    /// A superpage was given back that is still in the parity of its group.
    pub(crate) has_freed: AtomicBool,
    /// Copies that a lane could read and not open.
    pub(crate) suspects: Suspects,
    /// Reads that were asked of a second copy, since the first one was late.
    pub(crate) hedged_reads: AtomicU64,
    pub(crate) blades: [BladeSlot; MAX_BLADES],
    /// Of all copies; see [`crate::copies`].
    pub(crate) segments: [Segment; ALL_SEGMENTS],
    /// Of rows of parity; made when the first one is written.
    pub(crate) row_locks: OnceLock<RowLocks>,
    /// Superpages being moved; made when the first one moves.
    records: OnceLock<Box<[Record; MAX_RECORDS]>>,
    /// Raised to find out when everything in flight by then has ended.
    pub(crate) phase: AtomicU64,
}

/// A slot for a blade.
#[derive(Debug, Default)]
pub(crate) struct BladeSlot {
    /// Counts the blades that were here; 0 before the first.
    pub(crate) generation: AtomicU32,
    /// Its pages can no longer be reached.
    is_lost: AtomicBool,
    blade: RwLock<Option<Arc<Blade>>>,
}

impl BladeSlot {
    /// Puts a blade into the slot, which must be empty.
    pub(crate) fn fill(&self, blade: Blade) {
        let mut slot = write_lock(&self.blade);
        assert!(slot.is_none(), "a blade comes into an empty slot");
        *slot = Some(Arc::new(blade));
        drop(slot);
        self.is_lost.store(false, Ordering::Release);
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Removes the blade.
    pub(crate) fn empty(&self) {
        *write_lock(&self.blade) = None;
    }

    pub(crate) fn get(&self) -> Option<Arc<Blade>> {
        read_lock(&self.blade).clone()
    }

    pub(crate) fn is_filled(&self) -> bool {
        read_lock(&self.blade).is_some()
    }

    /// See [`Shared::lose`].
    fn lose(&self, reason: &str) {
        if let Some(blade) = self.get() {
            blade.data_loss.get_or_init(|| reason.to_owned());
            self.is_lost.store(true, Ordering::Release);
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }
}

/// One blade as all threads see it.
#[derive(Debug)]
pub(crate) struct Blade {
    pub(crate) session: Arc<Session>,
    pub(crate) description: String,
    /// All that it fails with; nothing if only the client itself does.
    pub(crate) domains: Arc<[FailureDomain]>,
    /// Why its pages can no longer be reached.
    pub(crate) data_loss: OnceLock<String>,
    /// Why it takes no more control requests.
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
    /// None if its pages are stored as they are.
    seals: RwLock<Option<Arc<Seals>>>,
    parts: [[Part; PARTS_PER_BLADE]; MAX_BLADES],
}

/// The part of a segment that lies on one blade. Read only after a place on that blade was found.
#[derive(Debug, Default)]
struct Part {
    id: AtomicU64,
    file: AtomicI32,
}

impl Segment {
    pub(crate) fn new() -> Self {
        Segment {
            state: AtomicU8::new(SegmentState::Free as u8),
            map: OnceLock::new(),
            seals: RwLock::new(None),
            parts: Default::default(),
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

    pub(crate) fn seals(&self) -> Option<Arc<Seals>> {
        read_lock(&self.seals).clone()
    }

    pub(crate) fn set_seals(&self, seals: Option<Arc<Seals>>) {
        *write_lock(&self.seals) = seals;
    }

    /// Sets where on a blade the segment lies, before the first place on that blade is published.
    pub(crate) fn set_part(&self, blade: BladeIndex, part: u8, id: SegmentId, file: RawFd) {
        let of_blade = self.parts.get(usize::from(blade.0));
        if let Some(part) = of_blade.and_then(|parts| parts.get(usize::from(part))) {
            part.id.store(id.0, Ordering::Release);
            part.file.store(file, Ordering::Release);
        }
    }

    /// What a link needs to reach this page at that place.
    pub(crate) fn page_at(
        &self,
        place: Place,
        number: PageNumber,
        memory: *mut u8,
        token: u64,
    ) -> LinkPage {
        let part = &self.parts[usize::from(place.blade.0)][usize::from(place.part)];
        let first = u64::from(place.rmma) * u64::from(PAGES_PER_SUPERPAGE);
        LinkPage {
            segment: SegmentId(part.id.load(Ordering::Acquire)),
            page: number,
            file: part.file.load(Ordering::Acquire),
            file_page: first + u64::from(number.index_in_superpage()),
            memory,
            token,
        }
    }
}

/// The result of looking up a page.
#[derive(Debug)]
pub(crate) enum Found {
    At(BladeIndex, LinkPage),
    /// It is just being moved; to be looked up again.
    Soon,
    Not(PageError),
}

impl Shared {
    pub(crate) fn new(config: PoolConfig, descriptors: Arc<DescriptorSet>) -> Self {
        let spare = Spare::default();
        spare.set(config.redundancy.survives_a_blade());
        Shared {
            spare,
            suspects: Suspects::default(),
            hedged_reads: AtomicU64::new(0),
            has_freed: AtomicBool::new(false),
            config,
            descriptors,
            blades: std::array::from_fn(|_| BladeSlot::default()),
            segments: std::array::from_fn(|_| Segment::new()),
            row_locks: OnceLock::new(),
            records: OnceLock::new(),
            phase: AtomicU64::new(0),
        }
    }

    /// Marks the blade's pages as out of reach; the first reason counts.
    pub(crate) fn lose(&self, blade: usize, reason: &str) {
        self.blades[blade].lose(reason);
        self.spare.set(false);
        let survives = self.config.redundancy.survives_a_blade();
        if let Some(known) = self.blades[blade].get().filter(|_| survives) {
            known.session.met.give_up();
        }
    }

    /// True if the blade's pages can no longer be reached.
    pub(crate) fn is_lost(&self, blade: BladeIndex) -> bool {
        self.blades.get(usize::from(blade.0)).is_none_or(BladeSlot::is_lost)
    }

    /// All that a blade fails with.
    pub(crate) fn domains(&self, blade: BladeIndex) -> Arc<[FailureDomain]> {
        let known = self.blades.get(usize::from(blade.0)).and_then(BladeSlot::get);
        known.map_or_else(|| Arc::new([]) as Arc<[_]>, |known| Arc::clone(&known.domains))
    }

    /// The segments inside that a segment is made of: its copies, or it and its parity.
    pub(crate) fn strands(&self, s: SegmentHandle) -> impl Iterator<Item = SegmentHandle> + use<> {
        (0..self.config.redundancy.strands()).map(move |nth| s.copy(nth))
    }

    /// The copies of a segment.
    pub(crate) fn copies(&self, s: SegmentHandle) -> impl Iterator<Item = SegmentHandle> + use<> {
        (0..self.config.redundancy.copies()).map(move |nth| s.copy(nth))
    }

    pub(crate) fn records(&self) -> &[Record; MAX_RECORDS] {
        self.records.get_or_init(|| Box::new(std::array::from_fn(|_| Record::new())))
    }

    /// Finds the page on its blade.
    pub(crate) fn find(
        &self,
        at: SegmentPage,
        access: Access,
        memory: *mut u8,
        token: u64,
    ) -> Found {
        let Some(segment) = self.segments.get(at.segment.index()) else {
            return Found::Not(PageError::NotAllocated);
        };
        match (segment.state(), access) {
            (SegmentState::Free, _) => return Found::Not(PageError::NotAllocated),
            (SegmentState::Frozen, Access::Write) => return Found::Not(PageError::Frozen),
            _ => {}
        }
        let number = PageNumber(at.page);
        let Some(mut place) = segment.map().get(number.superpage().0) else {
            return Found::Not(PageError::NotAllocated);
        };
        if let Some(record) = place.record {
            let record = &self.records()[usize::from(record)];
            match record.side(number.index_in_superpage(), access) {
                // Another copy has it.
                Side::Old if record.is_making() => return Found::Not(PageError::NotAllocated),
                Side::Old => {}
                Side::New => place = record.target().unwrap_or(place),
                Side::Soon => return Found::Soon,
            }
        }
        if self.is_lost(place.blade) {
            return Found::Not(PageError::BladeLost(place.blade));
        }
        Found::At(place.blade, segment.page_at(place, number, memory, token))
    }
}

/// Counts a lane's visits to the shared tables: odd while it is inside. Also holds the counts of
/// pages that the lane requested; written by the lane alone.
#[derive(Debug, Default)]
pub(crate) struct LaneClock {
    visits: AtomicU64,
    moved: [Moved; MAX_BLADES],
    /// Pages given to links and not yet seen to be done; written before the visit ends.
    in_flight: AtomicUsize,
    /// The last phase before which nothing is in flight any more.
    settled: AtomicU64,
}

/// Pages that a lane requested from one blade.
#[derive(Debug, Default)]
struct Moved {
    read: AtomicU64,
    written: AtomicU64,
}

/// A visit under way.
#[derive(Debug)]
pub(crate) struct Visit<'a>(&'a LaneClock);

impl LaneClock {
    /// Begins a visit; what is looked up stays valid until it ends.
    pub(crate) fn visit(&self) -> Visit<'_> {
        let before = self.visits.fetch_add(1, Ordering::SeqCst);
        assert!(before.is_multiple_of(2), "a lane is inside once");
        Visit(self)
    }

    /// Counts pages; called by the lane only.
    pub(crate) fn count(&self, blade: usize, access: Access, pages: usize) {
        let moved = &self.moved[blade];
        let counter = match access {
            Access::Read => &moved.read,
            Access::Write => &moved.written,
        };
        let all = counter.load(Ordering::Relaxed).wrapping_add(pages as u64);
        counter.store(all, Ordering::Relaxed);
    }

    /// Pages read from and written to the blade so far.
    pub(crate) fn moved(&self, blade: usize) -> (u64, u64) {
        let moved = &self.moved[blade];
        (moved.read.load(Ordering::Relaxed), moved.written.load(Ordering::Relaxed))
    }

    /// Sets how many pages are in flight; called by the lane only.
    pub(crate) fn set_in_flight(&self, pages: usize) {
        self.in_flight.store(pages, Ordering::Release);
    }

    /// Records that nothing from before the phase is in flight; called by the lane only.
    pub(crate) fn set_settled(&self, phase: u64) {
        self.settled.store(phase, Ordering::Release);
    }

    /// True if everything that was in flight before the phase began has ended.
    pub(crate) fn is_settled(&self, phase: u64) -> bool {
        fence(Ordering::SeqCst);
        if self.settled.load(Ordering::Acquire) >= phase {
            return true;
        }
        let is_outside = self.visits.load(Ordering::SeqCst).is_multiple_of(2);
        is_outside && self.in_flight.load(Ordering::Acquire) == 0
    }

    /// Pages requested so far, on all blades.
    pub(crate) fn moved_in_all(&self) -> u64 {
        (0..MAX_BLADES)
            .map(|blade| self.moved(blade))
            .fold(0, |all, (read, written)| all.wrapping_add(read).wrapping_add(written))
    }

    /// Waits until the lane is outside or has been. To be called after unpublishing. A visit lasts
    /// as long as a copy or a non-blocking send, so spinning with yields is enough.
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
