//! The memory of a shard: segments that are filled from front to back and given back whole.
//!
//! Usual segments lie one after the other in one mapping, so that an item's place is its offset in
//! it. An item that is large beside a segment has a mapping of its own, a *lone* segment; its memory
//! goes back to the kernel when it goes. Nothing is ever moved to make room between items, so
//! sizes that shift cannot break the memory into pieces nobody can use.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::index::Place;
use super::item::{ALIGN_BYTES, Header, ItemParts, ItemView};
use super::mapping::{Mapping, prefetch};

/// The most segments, usual and lone together: what the 25 upper bits of a place can number.
pub const SEGMENTS_MAX: usize = 1 << 25;
/// The lower 15 bits of a place: the offset in the segment, in units of [`ALIGN_BYTES`].
const OFFSET_BITS: u32 = 15;
/// The largest usual segment.
pub const SEGMENT_BYTES_MAX: usize = ALIGN_BYTES << OFFSET_BITS;
/// The smallest usual segment: TTL classes keep a few open, so a small shard has small ones.
pub const SEGMENT_BYTES_MIN: usize = 32 << 10;
/// A shard has at least this many usual segments while that keeps them above the smallest size.
const SEGMENTS_WANTED: usize = 256;
/// An item larger than this share of a segment gets its own mapping: less would be lost at the ends of segments.
const LONE_SHARE: usize = 4;
/// Lone segments take whole pages.
const PAGE_BYTES: usize = 4096;

/// Which of the two queues of S3-FIFO a segment stands in.
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
}

/// What is known of one segment.
#[derive(Debug)]
pub struct Segment {
    /// Bytes filled from the front.
    pub used_bytes: usize,
    /// Bytes of items that the index still points to.
    pub live_bytes: usize,
    /// Items that the index still points to.
    pub live_items: u32,
    /// The CAS number from which the items count.
    pub first_cas: u64,
    /// When the first item came, in seconds of the server's clock.
    pub birth_s: u32,
    /// No item expires later; `u32::MAX` when one never does.
    pub last_expiry_s: u32,
    pub queue: Queue,
    /// Which items go here: see [`super::ttl_class`].
    pub ttl_class: u8,
    /// Its neighbours in its queue: see [`super::queue`].
    pub older: Option<SegmentId>,
    pub newer: Option<SegmentId>,
    /// Filled; it stands in its queue.
    pub is_sealed: bool,
    /// A mapping of its own, for one large item.
    lone: Option<Mapping>,
    in_use: bool,
}

/// All segments of a shard.
#[derive(Debug)]
pub struct Arena {
    memory: Mapping,
    segment_bytes: usize,
    segments: Vec<Segment>,
    usual: usize,
    /// Free usual segments whose memory is still ours.
    free_usual: Vec<u32>,
    /// Those whose memory went back to the kernel. The first is used again first: the kernel gives huge pages, and
    /// neighbours share one.
    released_usual: BinaryHeap<Reverse<u32>>,
    free_lone: Vec<u32>,
    /// Usual segments never used so far begin here.
    untouched: usize,
    in_use_bytes: usize,
}

impl Arena {
    /// An arena for about `limit_bytes` that can grow to `reserve_bytes`; how far it does is the
    /// caller's decision. None when the kernel refuses even the address space of the limit.
    #[must_use]
    pub fn new(limit_bytes: usize, reserve_bytes: usize) -> Option<Self> {
        let segment_bytes = (limit_bytes / SEGMENTS_WANTED)
            .next_power_of_two()
            .clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
        // Half of the numbers stay for lone segments.
        let number = |bytes: usize| bytes.div_ceil(segment_bytes).clamp(1, SEGMENTS_MAX / 2);
        let (usual, mut memory) = [number(reserve_bytes), number(limit_bytes)]
            .into_iter()
            .find_map(|usual| Some((usual, Mapping::zeroed(usual * segment_bytes)?)))?;
        memory.wish_huge_pages();
        Some(Self {
            memory,
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

    /// Bytes of all segments that are in use, lone ones included.
    #[must_use]
    pub const fn in_use_bytes(&self) -> usize {
        self.in_use_bytes
    }

    /// What a new segment for an item of `footprint_bytes` takes.
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

    /// Opens a segment for items like one of `footprint_bytes`. None when numbers or memory run out.
    pub fn open(&mut self, footprint_bytes: usize, segment: Segment) -> Option<SegmentId> {
        let lone = if self.is_lone(footprint_bytes) {
            Some(Mapping::zeroed(self.segment_bytes_for(footprint_bytes))?)
        } else {
            None
        };
        let number = if lone.is_some() { self.lone_number()? } else { self.usual_number()? };
        self.in_use_bytes += lone.as_ref().map_or(self.segment_bytes, |lone| lone.len());
        self.segments[number] = Segment { lone, in_use: true, ..segment };
        Some(SegmentId(u32::try_from(number).expect("below SEGMENTS_MAX")))
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

    fn make_known(&mut self, segments: usize) {
        while self.segments.len() < segments {
            self.segments.push(Segment::new(Queue::Small, 0, 0, 0));
        }
    }

    /// Gives a segment back. A lone one returns its memory to the kernel.
    pub fn free(&mut self, id: SegmentId) {
        let segment = &mut self.segments[id.index()];
        assert!(segment.in_use, "a segment is freed once");
        segment.in_use = false;
        if let Some(lone) = segment.lone.take() {
            self.in_use_bytes -= lone.len();
            self.free_lone.push(id.0);
        } else {
            self.in_use_bytes -= self.segment_bytes;
            self.free_usual.push(id.0);
        }
    }

    /// Returns the memory of free usual segments to the kernel, until no more than `most_bytes` is ours: otherwise
    /// large items, which have memory of their own, would come on top of it.
    pub fn release_beyond(&mut self, most_bytes: usize) {
        while self.resident_bytes() > most_bytes {
            let Some(number) = self.free_usual.pop() else { return };
            let at = number as usize * self.segment_bytes;
            self.memory.release(at..at + self.segment_bytes);
            self.released_usual.push(Reverse(number));
        }
    }

    /// Bytes of segments whose memory is ours, in use or not.
    #[must_use]
    pub const fn resident_bytes(&self) -> usize {
        self.in_use_bytes + self.free_usual.len() * self.segment_bytes
    }

    #[must_use]
    pub fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.index()]
    }

    pub fn segment_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.segments[id.index()]
    }

    /// The segment with this number, counted modulo all ever opened, if it is in use: for sampling.
    #[must_use]
    pub fn sample(&self, number: usize) -> Option<SegmentId> {
        let number = number.checked_rem(self.segments.len())?;
        self.segments[number].in_use.then(|| SegmentId(u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// The first segment in use from this number on, and its number.
    #[must_use]
    pub fn first_in_use(&self, from: usize) -> Option<(usize, SegmentId)> {
        let rest = self.segments.get(from..)?;
        let number = from + rest.iter().position(|segment| segment.in_use)?;
        Some((number, SegmentId(u32::try_from(number).unwrap_or(u32::MAX))))
    }

    /// All segments in use.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentId, &Segment)> {
        let numbered = self.segments.iter().enumerate().filter(|(_, segment)| segment.in_use);
        numbered.map(|(number, segment)| {
            (SegmentId(u32::try_from(number).unwrap_or(u32::MAX)), segment)
        })
    }

    /// Bytes that still fit into an open segment.
    #[must_use]
    pub fn room_bytes(&self, id: SegmentId) -> usize {
        let segment = self.segment(id);
        segment.lone.as_ref().map_or(self.segment_bytes, |lone| lone.len()) - segment.used_bytes
    }

    /// Writes an item behind what the segment holds. The caller has checked that it fits.
    pub fn append(&mut self, id: SegmentId, header: Header, parts: &ItemParts<'_>) -> Place {
        let footprint = header.footprint_bytes();
        let offset = self.segment(id).used_bytes;
        parts.write(header, &mut self.bytes_mut(id)[offset..offset + footprint]);
        self.account(id, offset, footprint)
    }

    /// Copies an item as it is from `from` to the end of segment `id`; `cas` and the time of the
    /// last access are rewritten, because they count from the segment.
    pub fn append_copy(&mut self, id: SegmentId, header: Header, from: Place) -> Place {
        let bytes = header.item_bytes();
        let offset = self.segment(id).used_bytes;
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
        self.segments[id.index()].lone.as_deref_mut().expect("a lone segment has its mapping")
    }

    /// The bytes from an item's start to the end of its memory.
    #[inline]
    fn item_bytes(&self, place: Place) -> &[u8] {
        let id = SegmentId::of(place);
        if id.index() < self.usual {
            return &self.memory[self.usual_at(place)..];
        }
        self.segments[id.index()].lone.as_deref().expect("a lone segment has its mapping")
    }

    /// The item at `place`.
    #[inline]
    #[must_use]
    pub fn item(&self, place: Place) -> ItemView<'_> {
        ItemView::new(self.item_bytes(place))
    }

    /// The item's bytes, to be changed in place.
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
            prefetch(&self.memory, at);
            prefetch(&self.memory, at + 64);
        }
    }

    /// The place of the first item of a segment, if it has any.
    #[must_use]
    pub fn first(&self, id: SegmentId) -> Option<Place> {
        let place = Place::new(u64::from(id.0) << OFFSET_BITS)?;
        (self.segment(id).used_bytes > 0).then_some(place)
    }

    /// The place of the item behind `place` in the same segment.
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
            lone: None,
            in_use: false,
        }
    }

    /// Whether it holds one large item in memory of its own.
    #[must_use]
    pub const fn is_lone(&self) -> bool {
        self.lone.is_some()
    }

    /// Bytes of items that nothing points to any more.
    #[must_use]
    pub const fn dead_bytes(&self) -> usize {
        self.used_bytes - self.live_bytes
    }

    /// Whether every item of it has expired.
    #[must_use]
    pub const fn is_expired(&self, now_s: u32) -> bool {
        self.last_expiry_s <= now_s && self.used_bytes > 0
    }
}
