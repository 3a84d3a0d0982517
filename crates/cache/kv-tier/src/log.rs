//! The log of a tier: records in zones that are written once, in bulk, and reused in turn.
//!
//! Each shard has its own log; nothing blocks. Records gather in a zone in memory; a full zone is
//! written in one request and answers reads from memory until it is written. Before a zone is
//! reused it is read back, so that the index forgets its items and those that were hit get another
//! round. Below the log, the pool's blades or a flash device are a [`Medium`].
//!
//! Zones come and go at run time. One that has to leave is emptied ahead of its turn: items worth
//! keeping move to others, the rest is dropped as at any reuse. If there is no time for that, or
//! the memory is gone, the zone is *gone* at once, and its number is reused only when the index has
//! forgotten its items.
//!
//! Invariants: zones are used in the order of their numbers; a record's checksum includes the seal
//! of its zone's use and its offset there, so that neither data of an earlier use nor data from
//! elsewhere is ever taken for the record of a place; nothing is under way in a zone that is
//! absent, and no request starts in one that is gone.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

mod zones;

use farpool_disk::{Ended, Pages};
use farpool_kv_store::index::Place;
use farpool_kv_store::record::{self, Record};
use farpool_units::PAGE_BYTES;
use zones::Leave;
pub use zones::{Zone, ZoneState};

/// The fewest zones of a tier: some are always being written, read back or kept free.
pub const ZONES_MIN: usize = 16;
/// The most reads under way at a time; others wait their turn.
const READS_MAX: usize = 512;
/// The longest that storing waits for room.
const ROOM_WAIT: Duration = Duration::from_millis(50);
/// How long one check for room lasts while storing waits for it.
const ROOM_LOOK: Duration = Duration::from_micros(200);
/// After a wait in vain, storing does not wait for this long; items that leave memory are lost
/// meanwhile.
const STUCK_PAUSE: Duration = Duration::from_millis(200);
/// After this many failed zone writes in a row nothing more is written to the medium.
const LOST_IN_ROW_MAX: u32 = 8;
/// Pages of the buffers for most reads; longer reads get memory of their own.
const READ_PAGES: usize = 2;

/// Layout of a place: pages to read (0 = more than the hint can express), then the offset in units
/// of the medium's alignment.
const OFFSET_BITS: u32 = 34;
const HINT_MAX: usize = 63;

/// Where a log's zones are. Reads and writes lend it memory, which is returned on completion.
pub trait Medium {
    /// Pages of a zone: large enough that writing it is worth a request, small enough that losing
    /// it matters little.
    const ZONE_PAGES: usize;
    /// Records begin at multiples of this.
    const ALIGN_BYTES: usize;
    /// The longest record.
    const RECORD_BYTES_MAX: usize;
    /// Space that the medium needs at a zone's end: for the zone, and for each of its records.
    const TAIL_BYTES: usize;
    const TAIL_RECORD_BYTES: usize;
    /// Zones kept free in advance.
    const FREE_ZONES: usize = 4;
    /// The most zones being written at a time; at this limit no record is taken.
    const WRITING_MAX: usize = 4;

    fn zones(&self) -> usize;
    /// Starts a read of `count` pages of a zone, from `first`.
    fn start_read(&mut self, pages: Pages, at: (usize, usize), count: usize, token: u64);
    /// Starts a write of a whole zone.
    fn start_write(&mut self, pages: Pages, zone: usize, token: u64);
    /// The bytes being written under `token`.
    fn written(&self, token: u64) -> Option<&[u8]>;
    /// Takes completed requests. Never blocks. `now` is given from time to time, so that requests
    /// that take too long fail.
    fn poll(&mut self, now: Option<Instant>, ended: &mut Vec<Ended>);
    /// Sleeps until a request has completed, for at most `limit`.
    fn wait(&self, limit: Duration);

    /// Whether this many bytes may be written now.
    fn admits(&mut self, _bytes: usize) -> bool {
        true
    }
    /// Makes the records of one use of a zone different from those of every other use.
    fn seal_of(&self, _zone: usize, sequence: u32) -> u32 {
        sequence
    }
    /// A zone begins to be filled; its earlier content is gone.
    fn zone_opens(&mut self, _zone: usize, _sequence: u32) {}
    /// A zone is about to be written: the medium may write after the records.
    fn zone_closes(&mut self, _zone: usize, _used_bytes: usize, _bytes: &mut [u8]) {}
    /// A zone has been written.
    fn zone_sealed(&mut self, _zone: usize) {}
    /// No record of a zone is needed any more.
    fn zone_freed(&mut self, _zone: usize) {}
    /// The record that begins here must not be found again.
    fn forget(&mut self, _zone: usize, _offset: usize) {}
    /// Whether a zone's memory is lost for good.
    fn is_lost(&self, _zone: usize) -> bool {
        false
    }
}

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The record ends here in the buffer of records; it begins where the previous one ends.
    Found { end: usize },
    /// The zone was reused, or the bytes read are not those written.
    Gone,
    /// The medium could not read it.
    Failed,
}

/// Completed reads: their tokens and places, and the records found.
#[derive(Debug, Default)]
pub struct Outcomes {
    pub reads: Vec<(u64, Place, Outcome)>,
    pub records: Vec<u8>,
}

impl Outcomes {
    fn push(&mut self, token: u64, place: Place, record: Option<&[u8]>, otherwise: Outcome) {
        let outcome = record.map_or(otherwise, |bytes| {
            self.records.extend_from_slice(bytes);
            Outcome::Found { end: self.records.len() }
        });
        self.reads.push((token, place, outcome));
    }

    pub fn clear(&mut self) {
        self.reads.clear();
        self.records.clear();
    }
}

/// A log's counts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LogCounts {
    pub records_written: u64,
    pub bytes_written: u64,
    pub reads: u64,
    /// The most reads under way at a time so far.
    pub reads_at_once: u64,
    pub reads_failed: u64,
    /// Reads whose bytes were not those written, or whose zone had been reused.
    pub reads_gone: u64,
    /// Records that were refused because zones could not be written fast enough.
    pub refused: u64,
    /// Records refused by the limit on the write rate.
    pub over_budget: u64,
    /// Records that were hit and got another round.
    pub kept: u64,
    /// Records dropped with their zone.
    pub dropped: u64,
    pub zones_lost: u64,
    /// Records that moved to other zones because theirs had to leave.
    pub moved: u64,
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Read { place: Place, seal: u32, token: u64, skip_bytes: usize },
    Write { zone: usize },
    Reclaim { zone: usize },
}

/// A read that waits its turn or for its zone.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    place: Place,
    token: u64,
}

/// Decides what happens to the records of a zone that is reused.
pub trait Judge {
    /// Whether the index still points here and the record was hit: then it is appended again.
    fn keeps(&mut self, hash: u64, place: Place) -> bool;
    /// Whether the index still points here.
    fn knows(&mut self, hash: u64, place: Place) -> bool;
    /// The record was appended again.
    fn moved(&mut self, hash: u64, from: Place, to: Place);
    /// The record is dropped.
    fn dropped(&mut self, record: &Record<'_>, place: Place);
    /// The record is dropped because its zone has to leave.
    fn emptied(&mut self, record: &Record<'_>, place: Place) {
        self.dropped(record, place);
    }
}

/// One shard's log.
#[derive(Debug)]
pub struct Log<M> {
    medium: M,
    zones: Vec<Zone>,
    /// The zone being filled, if `buffer` is set; else the last one that was.
    open: usize,
    last_sequence: u32,
    buffer: Option<Pages>,
    spare: Vec<Pages>,
    read_buffers: Vec<Pages>,
    operations: HashMap<u64, Operation>,
    next_operation: u64,
    reading: usize,
    wanted: VecDeque<Wanted>,
    /// Reads that memory can answer, not yet handed out.
    at_hand: Vec<Wanted>,
    reclaimed: VecDeque<(usize, Pages, bool)>,
    /// Zones that have to leave and have not been read back yet.
    leaving: VecDeque<usize>,
    /// Number of zones that stay.
    usable: usize,
    /// Number of zones that are gone.
    gone: usize,
    ended: Vec<Ended>,
    outcomes: Outcomes,
    /// Until when storing does not wait for room, because the last wait was in vain.
    stuck_until: Option<Instant>,
    lost_in_row: u32,
    counts: LogCounts,
}

/// Zones of `zone_bytes` that places can name when records lie at multiples of `align_bytes`.
pub(crate) const fn zones_max(align_bytes: usize, zone_bytes: usize) -> usize {
    (align_bytes << OFFSET_BITS) / zone_bytes
}

impl<M: Medium> Log<M> {
    const ZONE_BYTES: usize = M::ZONE_PAGES * PAGE_BYTES;
    /// The most pages that a record spans.
    const RECORD_PAGES_MAX: usize = M::RECORD_BYTES_MAX.div_ceil(PAGE_BYTES) + 1;
    /// Zones that places can name. A medium with more is refused before a log is made of it.
    const ZONES_MAX: usize = zones_max(M::ALIGN_BYTES, Self::ZONE_BYTES);

    /// A log over all zones of the medium, of which `zones` tells what is in them. None when there
    /// are too few.
    ///
    /// # Panics
    /// When there are more zones than places can name.
    pub fn new(medium: M, zones: Vec<Zone>) -> Option<Self> {
        assert!(zones.len() <= Self::ZONES_MAX, "places can name each of {} zones", zones.len());
        if zones.len() < ZONES_MIN {
            return None;
        }
        let mut log = Self::over(medium, zones);
        log.reclaim_ahead();
        Some(log)
    }

    /// A log without zones; add them with [`Self::add_zone`].
    pub fn growing(medium: M) -> Self {
        Self::over(medium, Vec::new())
    }

    fn over(medium: M, zones: Vec<Zone>) -> Self {
        let last = (0..zones.len())
            .filter(|&zone| zones[zone].state == ZoneState::Sealed)
            .max_by_key(|&zone| zones[zone].sequence);
        Self {
            medium,
            open: last.unwrap_or(zones.len().saturating_sub(1)),
            // Including zones that were not complete: the seals of their uses must not recur.
            last_sequence: zones.iter().map(|zone| zone.sequence).max().unwrap_or(0),
            usable: zones.len(),
            gone: 0,
            zones,
            buffer: None,
            spare: Vec::new(),
            read_buffers: Vec::new(),
            operations: HashMap::new(),
            next_operation: 0,
            reading: 0,
            wanted: VecDeque::new(),
            at_hand: Vec::new(),
            reclaimed: VecDeque::new(),
            leaving: VecDeque::new(),
            ended: Vec::new(),
            outcomes: Outcomes::default(),
            stuck_until: None,
            lost_in_row: 0,
            counts: LogCounts::default(),
        }
    }

    #[must_use]
    pub const fn counts(&self) -> &LogCounts {
        &self.counts
    }

    #[must_use]
    pub const fn medium(&self) -> &M {
        &self.medium
    }

    pub const fn medium_mut(&mut self) -> &mut M {
        &mut self.medium
    }

    /// The capacity of the tier.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        (self.usable * Self::ZONE_BYTES) as u64
    }

    /// Whether any zone stays.
    #[must_use]
    pub const fn has_zones(&self) -> bool {
        self.usable > 0
    }

    /// Whether writing has stopped because the medium failed too often. Reads go on.
    #[must_use]
    pub const fn is_broken(&self) -> bool {
        self.lost_in_row >= LOST_IN_ROW_MAX
    }

    fn seal(&self, zone: usize) -> u32 {
        self.medium.seal_of(zone, self.zones[zone].sequence)
    }

    /// Appends a record (without its checksum). None if it is too long or there is no room now.
    pub fn append(&mut self, bytes: &[u8]) -> Option<Place> {
        let footprint = bytes.len().next_multiple_of(M::ALIGN_BYTES);
        if bytes.len() > M::RECORD_BYTES_MAX || !self.has_room(footprint) {
            return None;
        }
        let seal = self.seal(self.open);
        let zone = &mut self.zones[self.open];
        assert!(zone.state == ZoneState::Open, "records go into the open zone");
        let offset = zone.used_bytes;
        let buffer = &mut self.buffer.as_mut()?.bytes_mut()[offset..offset + footprint];
        let (record, gap) = buffer.split_at_mut(bytes.len());
        record.copy_from_slice(bytes);
        gap.fill(0);
        record::seal(record, seal, offset);
        zone.used_bytes += footprint;
        zone.records += 1;
        self.counts.records_written += 1;
        self.counts.bytes_written += footprint as u64;
        Self::place_of(self.open, offset, bytes.len())
    }

    /// As [`Self::append`], but waits a moment for zones being written, so that storing faster than
    /// the medium accepts slows the client down instead of losing items. A medium that hangs is
    /// waited for only once in a while; a budget is not waited for.
    pub fn append_or_wait(&mut self, bytes: &[u8], judge: &mut dyn Judge) -> Option<Place> {
        if self.is_broken() || bytes.len() > M::RECORD_BYTES_MAX {
            self.counts.refused += 1;
            return None;
        }
        if !self.medium.admits(bytes.len()) {
            self.counts.over_budget += 1;
            return None;
        }
        if let Some(place) = self.append(bytes) {
            return Some(place);
        }
        let start = Instant::now();
        let may_wait = self.stuck_until.is_none_or(|until| start >= until);
        while may_wait && start.elapsed() < ROOM_WAIT {
            self.medium.wait(ROOM_LOOK);
            self.poll(None, judge);
            if let Some(place) = self.append(bytes) {
                return Some(place);
            }
        }
        if may_wait {
            self.stuck_until = Some(start + STUCK_PAUSE);
        }
        self.counts.refused += 1;
        None
    }

    /// Ensures that the open zone has room, by closing it and opening the next if necessary.
    fn has_room(&mut self, footprint: usize) -> bool {
        let Some(&Zone { used_bytes, records, .. }) = self.zones.get(self.open) else {
            return false;
        };
        let tail = M::TAIL_BYTES + (records + 1) * M::TAIL_RECORD_BYTES;
        if self.buffer.is_some() && used_bytes + footprint + tail <= Self::ZONE_BYTES {
            return true;
        }
        let Some(next) = self.next_usable(self.open) else { return false };
        if self.zones[next].state != ZoneState::Free || self.writing() >= M::WRITING_MAX {
            self.reclaim_ahead();
            return false;
        }
        let Some(fresh) = self.spare.pop().or_else(|| Pages::new(M::ZONE_PAGES)) else {
            return false;
        };
        self.close();
        assert!(self.zones[next].leave == Leave::Stays, "a zone that leaves is not filled");
        self.buffer = Some(fresh);
        self.open = next;
        self.last_sequence = self.last_sequence.wrapping_add(1);
        let sequence = self.last_sequence;
        self.zones[next] = Zone { state: ZoneState::Open, sequence, ..Zone::FREE };
        self.medium.zone_opens(next, sequence);
        self.reclaim_ahead();
        true
    }

    fn writing(&self) -> usize {
        self.operations.values().filter(|it| matches!(it, Operation::Write { .. })).count()
    }

    /// Starts to write the open zone, if there is one.
    pub fn close(&mut self) {
        let Some(mut full) = self.buffer.take() else { return };
        let zone = self.open;
        assert!(self.zones[zone].state == ZoneState::Open, "the zone that has the buffer is open");
        let used_bytes = self.zones[zone].used_bytes;
        // Clears data of earlier uses after the last record.
        full.bytes_mut()[used_bytes..].fill(0);
        self.medium.zone_closes(zone, used_bytes, full.bytes_mut());
        self.zones[zone].state = ZoneState::Writing;
        let operation = self.number(Operation::Write { zone });
        self.medium.start_write(full, zone, operation);
    }

    fn number(&mut self, operation: Operation) -> u64 {
        self.next_operation += 1;
        let before = self.operations.insert(self.next_operation, operation);
        assert!(before.is_none(), "each operation has a number of its own");
        self.next_operation
    }

    /// Starts to read a record; it will be among the outcomes, with `token`.
    pub fn read(&mut self, place: Place, token: u64) {
        self.counts.reads += 1;
        self.wanted.push_back(Wanted { place, token });
        self.start_reads();
    }

    fn start_reads(&mut self) {
        while self.reading < READS_MAX {
            let Some(Wanted { place, token }) = self.wanted.pop_front() else { return };
            let (zone, offset, hint) = Self::parts_of(place);
            let state = self.zones.get(zone).map_or(ZoneState::Free, |zone| zone.state);
            if !matches!(state, ZoneState::Sealed | ZoneState::Reclaiming) {
                self.at_hand.push(Wanted { place, token });
                continue;
            }
            let first = offset / PAGE_BYTES;
            // A record ends at the end of its zone's used part at the latest, and has at most the
            // longest record's length.
            let end =
                self.zones[zone].used_bytes.div_ceil(PAGE_BYTES).clamp(first + 1, M::ZONE_PAGES);
            let left = (end - first).min(Self::RECORD_PAGES_MAX);
            let count = if hint == 0 { left } else { hint.min(M::ZONE_PAGES - first) };
            let buffer = if count <= READ_PAGES { self.read_buffers.pop() } else { None };
            let Some(pages) = buffer.or_else(|| Pages::new(count.max(READ_PAGES))) else {
                self.at_hand.push(Wanted { place, token });
                continue;
            };
            let (seal, skip_bytes) = (self.seal(zone), offset % PAGE_BYTES);
            let operation = self.number(Operation::Read { place, seal, token, skip_bytes });
            self.medium.start_read(pages, (zone, first), count, operation);
            self.reading += 1;
            self.counts.reads_at_once = self.counts.reads_at_once.max(self.reading as u64);
        }
    }

    /// Marks the record here as never to be found again, even by a later process.
    pub fn forget(&mut self, place: Place) {
        let (zone, offset, _) = Self::parts_of(place);
        if zone < self.zones.len() {
            self.medium.forget(zone, offset);
        }
    }

    /// Whether any request is under way or any outcome to be handed out.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.operations.is_empty()
            || !self.wanted.is_empty()
            || !self.leaving.is_empty()
            || self.gone > 0
            || self.has_at_hand()
    }

    /// Whether zones are still being written.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.writing() > 0
    }

    /// Whether [`Self::poll`] has work to do without waiting for the medium.
    #[must_use]
    pub fn has_at_hand(&self) -> bool {
        !self.at_hand.is_empty() || !self.reclaimed.is_empty() || !self.outcomes.reads.is_empty()
    }

    /// Takes the completed reads. Put back with [`Self::return_outcomes`].
    pub fn take_outcomes(&mut self) -> Outcomes {
        std::mem::take(&mut self.outcomes)
    }

    /// Keeps the memory for the next outcomes, unless there are some already.
    pub fn return_outcomes(&mut self, mut outcomes: Outcomes) {
        if self.outcomes.reads.is_empty() {
            outcomes.clear();
            self.outcomes = outcomes;
        }
    }

    /// Takes completed requests: completed reads become outcomes, records of zones being reused go
    /// to `judge`. Never blocks. `now` is given from time to time, so that requests that take too
    /// long fail.
    pub fn poll(&mut self, now: Option<Instant>, judge: &mut dyn Judge) {
        let mut ended = std::mem::take(&mut self.ended);
        self.medium.poll(now, &mut ended);
        for it in ended.drain(..) {
            self.complete(it);
        }
        self.ended = ended;
        for wanted in std::mem::take(&mut self.at_hand) {
            self.answer_at_hand(wanted);
        }
        while let Some((zone, pages, is_ok)) = self.reclaimed.pop_front() {
            self.reuse(zone, &pages, is_ok, judge);
            self.spare.push(pages);
        }
        self.start_reads();
    }

    fn complete(&mut self, Ended { token, pages, is_ok }: Ended) {
        match self.operations.remove(&token) {
            Some(Operation::Read { place, seal, token, skip_bytes }) => {
                assert!(self.reading > 0, "a read that ends was counted");
                self.reading -= 1;
                let (_, offset, _) = Self::parts_of(place);
                let record = record::read(&pages.bytes()[skip_bytes..], seal, offset);
                let record = record.filter(|_| is_ok);
                let otherwise = if is_ok { Outcome::Gone } else { Outcome::Failed };
                self.counts.reads_failed += u64::from(!is_ok);
                self.counts.reads_gone += u64::from(is_ok && record.is_none());
                self.outcomes.push(token, place, record.map(|it| it.bytes), otherwise);
                if pages.bytes().len() == READ_PAGES * PAGE_BYTES {
                    self.read_buffers.push(pages);
                }
            }
            Some(Operation::Write { zone }) => self.complete_write(zone, pages, is_ok),
            Some(Operation::Reclaim { zone }) => self.reclaimed.push_back((zone, pages, is_ok)),
            None => {}
        }
    }

    fn complete_write(&mut self, zone: usize, pages: Pages, is_ok: bool) {
        assert!(
            self.zones[zone].state == ZoneState::Writing,
            "nothing else becomes of a zone while it is on its way"
        );
        // A zone whose write failed is reused in its turn; until then its reads fail.
        self.zones[zone].state = ZoneState::Sealed;
        if is_ok {
            self.medium.zone_sealed(zone);
            self.lost_in_row = 0;
        } else {
            self.counts.zones_lost += 1;
        }
        match self.zones[zone].leave {
            // Its content is still in memory.
            Leave::Empties => {
                self.zones[zone].state = ZoneState::Reclaiming;
                return self.reclaimed.push_back((zone, pages, true));
            }
            Leave::Drops => self.go(zone),
            Leave::Stays if is_ok => {}
            Leave::Stays if self.medium.is_lost(zone) => self.lose(zone),
            Leave::Stays => self.lost_in_row += 1,
        }
        self.spare.push(pages);
        self.reclaim_ahead();
    }

    /// Answers a read from memory: its zone is open or being written.
    fn answer_at_hand(&mut self, Wanted { place, token }: Wanted) {
        let (zone, offset, _) = Self::parts_of(place);
        let seal = self.zones.get(zone).map_or(0, |it| self.medium.seal_of(zone, it.sequence));
        let Self { zones, buffer, operations, medium, outcomes, .. } = self;
        let memory = match zones.get(zone).map(|zone| zone.state) {
            Some(ZoneState::Open) => buffer.as_ref().map(Pages::bytes),
            Some(ZoneState::Writing) => operations.iter().find_map(|(&token, it)| match it {
                Operation::Write { zone: written } if *written == zone => medium.written(token),
                _ => None,
            }),
            _ => None,
        };
        let record = memory.and_then(|bytes| record::read(bytes.get(offset..)?, seal, offset));
        if let Some(record) = record {
            outcomes.push(token, place, Some(record.bytes), Outcome::Gone);
        } else if self.zones.get(zone).is_some_and(|zone| zone.state == ZoneState::Sealed) {
            // The zone was written in the meantime.
            self.wanted.push_back(Wanted { place, token });
        } else {
            self.counts.reads_gone += 1;
            self.outcomes.push(token, place, None, Outcome::Gone);
        }
    }

    /// The place of a record. None if it is beyond what a place can name.
    #[must_use]
    pub fn place_of(zone: usize, offset: usize, bytes: usize) -> Option<Place> {
        let pages = (offset % PAGE_BYTES + bytes).div_ceil(PAGE_BYTES);
        let hint = if pages <= HINT_MAX { pages as u64 } else { 0 };
        let unit = (zone * Self::ZONE_BYTES + offset) as u64 / M::ALIGN_BYTES as u64;
        Place::new(hint << OFFSET_BITS | unit)
    }

    /// Zone, offset in it, and how many pages to read (0 = to its end).
    const fn parts_of(place: Place) -> (usize, usize, usize) {
        let hint = (place.bits() >> OFFSET_BITS) as usize;
        let at = (place.bits() & ((1 << OFFSET_BITS) - 1)) as usize * M::ALIGN_BYTES;
        (at / Self::ZONE_BYTES, at % Self::ZONE_BYTES, hint)
    }
}
