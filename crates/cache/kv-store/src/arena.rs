//! The memory of a shard: segments that are filled from front to back and freed whole.
//!
//! Usual segments are adjacent in one mapping, so an item's place is its offset in it. An item that
//! is large compared with a segment has a mapping of its own, a *lone* segment; its memory returns
//! to the kernel when it is freed. Nothing is ever moved to make room between items, so shifting
//! sizes cannot fragment the memory.
//!
//! If clients may lease values, all of this is in one memory file that they map: usual segments
//! first, then an area for lone ones. That file is mostly holes; reading a hole makes the kernel
//! put a page there, so [`Arena::cut_strays`] releases pages that are not ours.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_units::{PAGE_BYTES, at_most, exactly};

use super::extents::Extents;
use super::index::Place;
use super::item::{ALIGN_BYTES, Header, ItemParts, ItemView};
use super::mapping::{Mapping, prefetch};

/// Cache lines that are loaded ahead of an item: a small one may begin near the end of its first
/// line and reach into its third. Waiting for one line takes as long as waiting for all of them.
const PREFETCH_LINES: usize = 3;
const LINE_BYTES: usize = 64;
/// The most segments, usual and lone together: what the 25 upper bits of a place can number.
pub const SEGMENTS_MAX: usize = 1 << 25;
/// The lower 15 bits of a place: the offset in the segment, in units of [`ALIGN_BYTES`].
const OFFSET_BITS: u32 = 15;
/// The largest usual segment.
pub const SEGMENT_BYTES_MAX: usize = ALIGN_BYTES << OFFSET_BITS;
/// The smallest usual segment: each TTL class keeps a few open, so a small shard has small ones.
pub const SEGMENT_BYTES_MIN: usize = 32 << 10;
/// A shard has at least this many usual segments while that keeps them above the smallest size.
const SEGMENTS_WANTED: usize = 256;
/// An item larger than this share of a segment gets its own mapping, to lose less at the ends of
/// segments.
const LONE_SHARE: usize = 4;
/// The unit in which the kernel counts the memory of a file.
const BLOCK_BYTES: usize = 512;
/// The area for lone segments in shared memory, as a multiple of that for usual ones: address space
/// for holes between them. If no hole is long enough, an item gets memory that is not shared, and
/// cannot be leased.
const LONE_AREA_TIMES: usize = 2;
/// Shared memory above the limit that is tolerated: the last huge page of the usual segments, and
/// what the index does not use.
const STRAY_BYTES_MAX: usize = 4 << 20;

/// The queue of S3-FIFO that a segment is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    Small,
    Main,
}

/// A segment of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SegmentId(u32);

impl SegmentId {
    /// The segment that holds `place`.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "25 of the 40 bits of a place")]
    pub const fn of(place: Place) -> Self {
        Self((place.bits() >> OFFSET_BITS) as u32)
    }

    const fn index(self) -> usize {
        self.0 as usize
    }

    /// The segment with this number, which must be below [`SEGMENTS_MAX`].
    fn numbered(number: usize) -> Self {
        Self(exactly(number))
    }
}

/// The state of one segment.
#[derive(Debug)]
pub struct Segment {
    /// Bytes filled from the front.
    pub used_bytes: usize,
    /// Bytes of items that the index still points to.
    pub live_bytes: usize,
    /// Items that the index still points to.
    pub live_items: u32,
    /// The CAS number to which those of the items are relative.
    pub first_cas: u64,
    /// When the first item was stored, in seconds of the server's clock.
    pub birth_s: u32,
    /// When the last of its items expires; `u32::MAX` if one never does.
    pub last_expiry_s: u32,
    pub queue: Queue,
    /// The class of its items: see [`super::ttl_class`].
    pub ttl_class: u8,
    /// Its neighbours in its queue: see [`super::queue`].
    pub older: Option<SegmentId>,
    pub newer: Option<SegmentId>,
    /// Filled, and in its queue.
    pub is_sealed: bool,
    /// Number of leases on values in it; while there are any, its bytes do not change. See
    /// [`super::lease`].
    pub leases: u32,
    /// Nothing else is left in it: it is freed when its leases end.
    pub is_held: bool,
    /// Memory of its own, for one large item.
    lone: Option<Lone>,
    in_use: bool,
}

/// The memory of a lone segment.
#[derive(Debug)]
enum Lone {
    Own(Mapping),
    /// A part of the arena's shared memory.
    Shared {
        at: usize,
        bytes: usize,
    },
}

impl Lone {
    fn len(&self) -> usize {
        match self {
            Self::Own(mapping) => mapping.len(),
            Self::Shared { bytes, .. } => *bytes,
        }
    }
}

/// The extra state of an arena that other processes may read.
#[derive(Debug)]
struct SharedMemory {
    /// The descriptor with which they map it.
    reader: OwnedFd,
    /// Free parts of the area for lone segments.
    lone: Extents,
}

/// All segments of a shard.
#[derive(Debug)]
pub struct Arena {
    memory: Mapping,
    shared: Option<SharedMemory>,
    segment_bytes: usize,
    segments: Vec<Segment>,
    usual: usize,
    /// Free usual segments that still have memory.
    free_usual: Vec<u32>,
    /// Free usual segments whose memory has been returned to the kernel. The lowest is reused
    /// first: the kernel gives huge pages, and neighbours share one.
    released_usual: BinaryHeap<Reverse<u32>>,
    free_lone: Vec<u32>,
    /// The first usual segment never used so far.
    untouched: usize,
    in_use_bytes: usize,
}

impl Arena {
    /// An arena for about `limit_bytes` that can grow to `reserve_bytes`; the caller decides how
    /// far it does. Other processes may read it if it `is_shared`. None if the kernel refuses even
    /// the address space of the limit.
    #[must_use]
    pub fn new(limit_bytes: usize, reserve_bytes: usize, is_shared: bool) -> Option<Self> {
        let segment_bytes = (limit_bytes / SEGMENTS_WANTED)
            .next_power_of_two()
            .clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
        // Half of the numbers are kept for lone segments.
        let number = |bytes: usize| bytes.div_ceil(segment_bytes).clamp(1, SEGMENTS_MAX / 2);
        let (usual, (mut memory, shared)) = [number(reserve_bytes), number(limit_bytes)]
            .into_iter()
            .find_map(|usual| Some((usual, take_memory(usual * segment_bytes, is_shared)?)))?;
        memory.wish_huge_pages(0..usual * segment_bytes);
        Some(Self {
            memory,
            shared,
            segment_bytes,
            segments: Vec::new(),
            usual,
            free_usual: Vec::new(),
            released_usual: BinaryHeap::new(),
            free_lone: Vec::new(),
            untouched: 0,
            in_use_bytes: 0,
        })
    }

    /// The size of a usual segment.
    #[must_use]
    pub const fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// Bytes of all segments in use, including lone ones.
    #[must_use]
    pub const fn in_use_bytes(&self) -> usize {
        self.in_use_bytes
    }

    /// The size of a new segment for an item of `footprint_bytes`.
    #[must_use]
    pub const fn segment_bytes_for(&self, footprint_bytes: usize) -> usize {
        if self.is_lone(footprint_bytes) {
            footprint_bytes.next_multiple_of(PAGE_BYTES)
        } else {
            self.segment_bytes
        }
    }

    /// Whether an item of this size gets a segment of its own.
    #[must_use]
    pub const fn is_lone(&self, footprint_bytes: usize) -> bool {
        footprint_bytes > self.segment_bytes / LONE_SHARE
    }

    /// Opens a segment for items like one of `footprint_bytes`. None if numbers or memory run out.
    pub fn open(&mut self, footprint_bytes: usize, segment: Segment) -> Option<SegmentId> {
        let is_lone = self.is_lone(footprint_bytes);
        let number = if is_lone { self.lone_number()? } else { self.usual_number()? };
        let lone = if is_lone {
            let lone = self.lone_memory(self.segment_bytes_for(footprint_bytes));
            if lone.is_none() {
                self.free_lone.push(exactly(number));
            }
            Some(lone?)
        } else {
            None
        };
        assert!(!self.segments[number].in_use, "a free number has no segment");
        assert!(is_lone == (number >= self.usual), "lone segments are numbered behind the usual");
        self.in_use_bytes += lone.as_ref().map_or(self.segment_bytes, Lone::len);
        self.segments[number] = Segment { lone, in_use: true, ..segment };
        Some(SegmentId::numbered(number))
    }

    fn usual_number(&mut self) -> Option<usize> {
        let released = || self.released_usual.pop().map(|Reverse(number)| number);
        if let Some(number) = self.free_usual.pop().or_else(released) {
            return Some(number as usize);
        }
        if self.untouched == self.usual {
            return None;
        }
        self.untouched += 1;
        self.make_known(self.untouched);
        Some(self.untouched - 1)
    }

    fn lone_number(&mut self) -> Option<usize> {
        if let Some(number) = self.free_lone.pop() {
            return Some(number as usize);
        }
        let number = self.segments.len().max(self.usual);
        if number >= SEGMENTS_MAX {
            return None;
        }
        self.make_known(number + 1);
        Some(number)
    }

    fn lone_memory(&mut self, bytes: usize) -> Option<Lone> {
        match self.shared.as_mut().and_then(|shared| shared.lone.take(bytes)) {
            Some(at) => Some(Lone::Shared { at, bytes }),
            None => Mapping::zeroed(bytes).map(Lone::Own),
        }
    }

    fn make_known(&mut self, segments: usize) {
        while self.segments.len() < segments {
            self.segments.push(Segment::new(Queue::Small, 0, 0, 0));
        }
    }

    /// Frees a segment. A lone one returns its memory to the kernel.
    pub fn free(&mut self, id: SegmentId) {
        let segment = &mut self.segments[id.index()];
        assert!(segment.in_use, "a segment is freed once");
        assert!(segment.leases == 0, "what clients read stays");
        assert!(!segment.is_sealed, "a segment that is freed stands in no queue");
        segment.in_use = false;
        if let Some(lone) = segment.lone.take() {
            self.in_use_bytes -= lone.len();
            self.free_lone.push(id.0);
            if let (Lone::Shared { at, bytes }, Some(shared)) = (lone, &mut self.shared) {
                self.memory.release(at..at + bytes);
                shared.lone.give(at, bytes);
            }
        } else {
            self.in_use_bytes -= self.segment_bytes;
            self.free_usual.push(id.0);
        }
    }

    /// Bytes of free usual segments that still have memory.
    #[must_use]
    pub const fn idle_bytes(&self) -> usize {
        self.free_usual.len() * self.segment_bytes
    }

    /// Returns memory of free usual segments to the kernel until at most `idle_bytes_max` is left.
    /// Reusing a segment must not bring its neighbours' memory back, so huge pages are turned off.
    pub fn release_idle(&mut self, idle_bytes_max: usize) {
        if self.idle_bytes() > idle_bytes_max && self.released_usual.is_empty() {
            self.memory.forgo_huge_pages();
        }
        while self.idle_bytes() > idle_bytes_max
            && let Some(number) = self.free_usual.pop()
        {
            assert!(!self.segments[number as usize].in_use, "only free segments are released");
            let at = number as usize * self.segment_bytes;
            self.memory.release(at..at + self.segment_bytes);
            self.released_usual.push(Reverse(number));
        }
    }

    /// Releases pages that readers made the kernel put into holes, once they exceed what the limit
    /// leaves.
    pub fn cut_strays(&mut self, limit_bytes: usize) {
        let Some(shared) = &self.shared else { return };
        let Ok(status) = rustix::fs::fstat(&shared.reader) else { return };
        let there_bytes = at_most::<usize, _>(status.st_blocks).saturating_mul(BLOCK_BYTES);
        if there_bytes <= limit_bytes.max(self.in_use_bytes).saturating_add(STRAY_BYTES_MAX) {
            return;
        }
        self.memory.release(self.untouched * self.segment_bytes..self.usual * self.segment_bytes);
        for (at, bytes) in shared.lone.iter() {
            self.memory.release(at..at + bytes);
        }
        for &Reverse(number) in &self.released_usual {
            let at = number as usize * self.segment_bytes;
            self.memory.release(at..at + self.segment_bytes);
        }
        self.release_idle(0);
    }

    /// The descriptor with which other processes map this arena, and its size.
    #[must_use]
    pub fn readable_by_others(&self) -> Option<(BorrowedFd<'_>, usize)> {
        self.shared.as_ref().map(|shared| (shared.reader.as_fd(), self.memory.len()))
    }

    /// The offset of these bytes of the item at `place` in the memory that others map. None if they
    /// are not in it.
    #[must_use]
    pub fn shared_at(&self, place: Place, offset: usize) -> Option<usize> {
        self.shared.as_ref()?;
        let id = SegmentId::of(place);
        if id.index() < self.usual {
            return Some(self.usual_at(place) + offset);
        }
        match self.segments[id.index()].lone {
            Some(Lone::Shared { at, .. }) => Some(at + offset),
            _ => None,
        }
    }

    /// The memory that a segment occupies.
    #[must_use]
    pub fn taken_bytes(&self, id: SegmentId) -> usize {
        self.segment(id).lone.as_ref().map_or(self.segment_bytes, Lone::len)
    }

    #[must_use]
    pub fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.index()]
    }

    pub fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments[id.index()]
    }

    /// The segment with this number, modulo all ever opened, if it is in use. For sampling.
    #[must_use]
    pub fn sample(&self, number: usize) -> Option<SegmentId> {
        let number = number.checked_rem(self.segments.len())?;
        self.segments[number].in_use.then(|| SegmentId::numbered(number))
    }

    /// The first segment in use with at least this number, and its number.
    #[must_use]
    pub fn first_in_use(&self, from: usize) -> Option<(usize, SegmentId)> {
        let rest = self.segments.get(from..)?;
        let number = from + rest.iter().position(|segment| segment.in_use)?;
        Some((number, SegmentId::numbered(number)))
    }

    /// All segments in use.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let numbered = self.segments.iter().enumerate().filter(|(_, segment)| segment.in_use);
        numbered.map(|(number, segment)| (SegmentId::numbered(number), segment))
    }

    /// Bytes left in an open segment.
    #[must_use]
    pub fn room_bytes(&self, id: SegmentId) -> usize {
        self.taken_bytes(id) - self.segment(id).used_bytes
    }

    /// Writes an item at the end of a segment. The caller has checked that it fits.
    pub fn append(&mut self, id: SegmentId, header: Header, parts: &ItemParts<'_>) -> Place {
        let footprint = header.footprint_bytes();
        let offset = self.segment(id).used_bytes;
        parts.write(header, &mut self.bytes_mut(id)[offset..offset + footprint]);
        self.account(id, offset, footprint)
    }

    /// Copies an item from `from` to the end of segment `id`. `cas` and the time of the last access
    /// are rewritten, because they are relative to the segment.
    pub fn append_copy(&mut self, id: SegmentId, header: Header, from: Place) -> Place {
        let bytes = header.item_bytes();
        let offset = self.segment(id).used_bytes;
        // Usual segments are adjacent: an item that is too long would overwrite the next one.
        assert!(header.footprint_bytes() <= self.room_bytes(id), "a copy fits into its segment");
        if SegmentId::of(from).index() < self.usual && id.index() < self.usual {
            let start = self.usual_at(from);
            let to = id.index() * self.segment_bytes + offset;
            self.memory.copy_within(start..start + bytes, to);
        } else {
            let copy = self.item_bytes(from)[..bytes].to_vec();
            self.bytes_mut(id)[offset..offset + bytes].copy_from_slice(&copy);
        }
        header.write(&mut self.bytes_mut(id)[offset..]);
        self.account(id, offset, header.footprint_bytes())
    }

    fn account(&mut self, id: SegmentId, offset: usize, footprint: usize) -> Place {
        let segment = self.segment_mut(id);
        assert!(segment.in_use && !segment.is_sealed, "only open segments are filled");
        segment.used_bytes += footprint;
        segment.live_bytes += footprint;
        segment.live_items += 1;
        let bits = u64::from(id.0) << OFFSET_BITS | (offset / ALIGN_BYTES) as u64;
        Place::new(bits).expect("25 bits of segment, 15 of offset")
    }

    const fn usual_at(&self, place: Place) -> usize {
        let offset = (place.bits() & ((1 << OFFSET_BITS) - 1)) as usize * ALIGN_BYTES;
        SegmentId::of(place).index() * self.segment_bytes + offset
    }

    fn bytes_mut(&mut self, id: SegmentId) -> &mut [u8] {
        if id.index() < self.usual {
            let at = id.index() * self.segment_bytes;
            return &mut self.memory[at..at + self.segment_bytes];
        }
        match self.segments[id.index()].lone.as_mut().expect("a lone segment has its memory") {
            Lone::Own(mapping) => mapping,
            Lone::Shared { at, bytes } => &mut self.memory[*at..*at + *bytes],
        }
    }

    /// The bytes from an item's start to the end of its memory.
    #[inline]
    fn item_bytes(&self, place: Place) -> &[u8] {
        let id = SegmentId::of(place);
        if id.index() < self.usual {
            return &self.memory[self.usual_at(place)..];
        }
        match self.segments[id.index()].lone.as_ref().expect("a lone segment has its memory") {
            Lone::Own(mapping) => mapping,
            Lone::Shared { at, bytes } => &self.memory[*at..*at + *bytes],
        }
    }

    /// The item at `place`.
    #[inline]
    #[must_use]
    pub fn item(&self, place: Place) -> ItemView<'_> {
        ItemView::new(self.item_bytes(place))
    }

    /// The item's bytes, for changes in place.
    #[inline]
    pub fn item_mut(&mut self, place: Place) -> &mut [u8] {
        let id = SegmentId::of(place);
        if id.index() < self.usual {
            let at = self.usual_at(place);
            return &mut self.memory[at..];
        }
        self.bytes_mut(id)
    }

    /// Begins to load the item at `place`.
    #[inline]
    pub fn prefetch(&self, place: Place) {
        if SegmentId::of(place).index() < self.usual {
            let at = self.usual_at(place);
            for line in 0..PREFETCH_LINES {
                prefetch(&self.memory, at + line * LINE_BYTES);
            }
        }
    }

    /// The place of a segment's first item, if it has any.
    #[must_use]
    pub fn first(&self, id: SegmentId) -> Option<Place> {
        let place = Place::new(u64::from(id.0) << OFFSET_BITS)?;
        (self.segment(id).used_bytes > 0).then_some(place)
    }

    /// The place of the next item in the same segment.
    #[must_use]
    pub fn next(&self, place: Place) -> Option<Place> {
        let id = SegmentId::of(place);
        let step = self.item(place).header().footprint_bytes() / ALIGN_BYTES;
        let offset = (place.bits() & ((1 << OFFSET_BITS) - 1)) as usize + step;
        if offset * ALIGN_BYTES >= self.segment(id).used_bytes {
            return None;
        }
        Place::new(u64::from(id.0) << OFFSET_BITS | offset as u64)
    }
}

/// Reserves memory for usual segments and, if shared, for lone ones after them.
fn take_memory(usual_bytes: usize, is_shared: bool) -> Option<(Mapping, Option<SharedMemory>)> {
    if !is_shared {
        return Some((Mapping::zeroed(usual_bytes)?, None));
    }
    let all_bytes = usual_bytes.checked_mul(1 + LONE_AREA_TIMES)?;
    let (mut memory, reader) = Mapping::readable_by_others(all_bytes).ok()?;
    memory.refuse_huge_pages(usual_bytes..all_bytes);
    let lone = Extents::new(usual_bytes, all_bytes);
    Some((memory, Some(SharedMemory { reader, lone })))
}

impl Segment {
    /// An empty segment.
    #[must_use]
    pub const fn new(queue: Queue, ttl_class: u8, first_cas: u64, birth_s: u32) -> Self {
        Self {
            used_bytes: 0,
            live_bytes: 0,
            live_items: 0,
            first_cas,
            birth_s,
            last_expiry_s: 0,
            queue,
            ttl_class,
            older: None,
            newer: None,
            is_sealed: false,
            leases: 0,
            is_held: false,
            lone: None,
            in_use: false,
        }
    }

    /// Whether it holds one large item in memory of its own.
    #[must_use]
    pub const fn is_lone(&self) -> bool {
        self.lone.is_some()
    }

    /// Bytes of items that the index no longer points to.
    #[must_use]
    pub const fn dead_bytes(&self) -> usize {
        self.used_bytes - self.live_bytes
    }

    /// Notes that one live item has died.
    pub(super) fn died(&mut self, footprint: usize) {
        assert!(
            self.live_items > 0 && self.live_bytes >= footprint,
            "an item that dies was live in its segment"
        );
        self.live_bytes -= footprint;
        self.live_items -= 1;
    }

    /// Whether all its items have expired.
    #[must_use]
    pub const fn is_expired(&self, now_s: u32) -> bool {
        self.last_expiry_s <= now_s && self.used_bytes > 0
    }
}
