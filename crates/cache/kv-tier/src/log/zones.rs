//! The zones of a log: their turns, what happens to their records, and how zones come and go.

use std::collections::HashSet;

use super::{Judge, Log, Medium, Operation};
use farpool_disk::Pages;
use farpool_kv_store::index::Place;
use farpool_kv_store::record::{self, Record};

/// Zones that leave are emptied only while no more than this many are being written: moved records
/// need room, and new ones need it more.
const EMPTYING_WRITES_MAX: usize = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneState {
    /// There is no memory for the number, and the index does not point to it.
    Absent,
    Free,
    Open,
    Writing,
    Sealed,
    Reclaiming,
    /// The memory for the number is gone; the index may still point to it.
    Gone,
}

/// Whether a zone stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Stays,
    /// Its content is judged, then it is gone.
    Empties,
    /// It is gone as soon as no request is under way in it.
    Drops,
}

/// The log's state of one zone.
#[derive(Debug, Clone, Copy)]
pub struct Zone {
    pub state: ZoneState,
    /// The number of its use; larger for later uses.
    pub sequence: u32,
    pub used_bytes: usize,
    pub(super) records: usize,
    pub(super) leave: Leave,
    /// Its memory was lost, not given back.
    pub(super) is_lost: bool,
}

impl Zone {
    pub const FREE: Self = Self {
        state: ZoneState::Free,
        sequence: 0,
        used_bytes: 0,
        records: 0,
        leave: Leave::Stays,
        is_lost: false,
    };

    /// A zone written by an earlier process.
    #[must_use]
    pub const fn sealed(sequence: u32, used_bytes: usize) -> Self {
        Self { state: ZoneState::Sealed, sequence, used_bytes, ..Self::FREE }
    }

    fn is_usable(&self) -> bool {
        self.leave == Leave::Stays && !matches!(self.state, ZoneState::Absent | ZoneState::Gone)
    }
}

/// How the records of one zone are judged.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// The zone has to leave.
    leaves: bool,
    /// There is room for more than the records that were hit.
    has_plenty: bool,
}

impl<M: Medium> Log<M> {
    /// Adds a zone for new memory. Returns its number, or None if there are as many as places can
    /// name.
    pub fn add_zone(&mut self) -> Option<usize> {
        let zone = if self.usable + self.gone < self.zones.len() {
            self.zones.iter().position(|it| it.state == ZoneState::Absent)
        } else {
            None
        };
        let zone = zone.unwrap_or(self.zones.len());
        if zone >= Self::ZONES_MAX {
            return None;
        }
        if zone == self.zones.len() {
            self.zones.push(Zone::FREE);
        } else {
            self.zones[zone] = Zone::FREE;
        }
        self.usable += 1;
        assert!(self.usable + self.gone <= self.zones.len(), "each zone is counted once");
        // Earlier failures say nothing about new memory.
        (self.lost_in_row, self.stuck_until) = (0, None);
        Some(zone)
    }

    /// Begins to remove a zone: nothing more is stored there, and [`Self::empty_next`] will empty
    /// it.
    pub fn leave_zone(&mut self, zone: usize) {
        if !self.zones[zone].is_usable() {
            return;
        }
        self.zones[zone].leave = Leave::Empties;
        self.usable -= 1;
        match self.zones[zone].state {
            ZoneState::Free => self.go(zone),
            ZoneState::Open => {
                assert!(zone == self.open && self.buffer.is_some(), "an open zone has the buffer");
                // Its records are in memory.
                if let Some(buffer) = self.buffer.take() {
                    self.zones[zone].state = ZoneState::Reclaiming;
                    self.reclaimed.push_back((zone, buffer, true));
                }
            }
            ZoneState::Sealed => self.leaving.push_back(zone),
            _ => {}
        }
    }

    /// Removes a zone at once, with its content; `is_lost` says that its memory is gone already.
    pub fn drop_zone(&mut self, zone: usize, is_lost: bool) {
        let it = &mut self.zones[zone];
        if matches!(it.state, ZoneState::Absent | ZoneState::Gone) {
            return;
        }
        self.usable -= usize::from(it.leave == Leave::Stays);
        it.leave = Leave::Drops;
        it.is_lost |= is_lost;
        // It may never be emptied now, and the index forgets nothing while zones wait for that.
        self.leaving.retain(|&waits| waits != zone);
        let it = &mut self.zones[zone];
        match it.state {
            // Completed when the request under way has ended.
            ZoneState::Writing | ZoneState::Reclaiming => {}
            ZoneState::Open => {
                assert!(zone == self.open && self.buffer.is_some(), "an open zone has the buffer");
                self.spare.extend(self.buffer.take());
                self.go(zone);
            }
            _ => self.go(zone),
        }
    }

    /// Begins to empty the next zone that has to leave, unless other work is in the way.
    pub fn empty_next(&mut self) {
        while let Some(&zone) = self.leaving.front() {
            let it = &self.zones[zone];
            if it.state != ZoneState::Sealed || it.leave != Leave::Empties {
                self.leaving.pop_front();
                continue;
            }
            let empties = |it: &Operation| match it {
                Operation::Reclaim { zone } => self.zones[*zone].leave != Leave::Stays,
                _ => false,
            };
            let is_busy = self.operations.values().any(empties)
                || self.writing() > EMPTYING_WRITES_MAX
                || !self.reclaimed.is_empty();
            if is_busy || !self.start_reclaim(zone) {
                return;
            }
            self.leaving.pop_front();
        }
    }

    /// The zone of a place, if it waits to be emptied.
    #[must_use]
    pub fn leaving_at(&self, place: Place) -> Option<usize> {
        let (zone, ..) = Self::parts_of(place);
        let waits = |it: &&Zone| it.leave == Leave::Empties && it.state == ZoneState::Sealed;
        self.zones.get(zone).filter(waits).map(|_| zone)
    }

    /// Orders zones that wait to be emptied by their worth, highest first: those not emptied in
    /// time are dropped.
    pub fn order_leaving(&mut self, worth: impl Fn(usize) -> u64) {
        self.leaving.make_contiguous().sort_by_key(|&zone| std::cmp::Reverse(worth(zone)));
    }

    /// Whether so many zones are being written that nothing should be added without need.
    #[must_use]
    pub fn is_backed_up(&self) -> bool {
        self.writing() > EMPTYING_WRITES_MAX
    }

    /// Whether a zone is no longer used, except by requests under way.
    #[must_use]
    pub fn has_gone(&self, zone: usize) -> bool {
        matches!(self.zones[zone].state, ZoneState::Absent | ZoneState::Gone)
    }

    /// The zones that the index has to forget before their numbers are reused, once all leaving
    /// zones have been emptied. Zones with requests under way are not included: their numbers
    /// cannot be reused before these have ended, and until then one walk over the index would
    /// follow another in vain.
    #[must_use]
    pub fn to_forget(&self) -> Vec<usize> {
        if self.gone == 0 || !self.leaving.is_empty() {
            return Vec::new();
        }
        let used = self.zones_under_way();
        let is_free = |it: &usize| self.zones[*it].state == ZoneState::Gone && !used.contains(it);
        (0..self.zones.len()).filter(is_free).collect()
    }

    /// The zones with requests under way.
    fn zones_under_way(&self) -> HashSet<usize> {
        let zone = |it: &Operation| match *it {
            Operation::Read { place, .. } => Self::parts_of(place).0,
            Operation::Write { zone } | Operation::Reclaim { zone } => zone,
        };
        self.operations.values().map(zone).collect()
    }

    /// Whether a place is in a zone that is gone; if so, whether the zone was lost.
    #[must_use]
    pub fn gone_at(&self, place: Place) -> Option<bool> {
        let (zone, ..) = Self::parts_of(place);
        self.zones.get(zone).filter(|it| it.state == ZoneState::Gone).map(|it| it.is_lost)
    }

    /// Notes that the index no longer points to these zones.
    pub fn forgotten(&mut self, zones: &[usize]) {
        // Late completions of a number's earlier use must not be taken for those of the next.
        let used = self.zones_under_way();
        for &zone in zones {
            if self.zones[zone].state == ZoneState::Gone && !used.contains(&zone) {
                assert!(self.gone > 0, "a zone that is gone was counted");
                self.zones[zone] = Zone { state: ZoneState::Absent, ..Zone::FREE };
                self.gone -= 1;
            }
        }
        if self.usable == 0 {
            self.spare.clear();
        }
    }

    /// Marks a zone as gone; no request starts there any more.
    pub(super) fn go(&mut self, zone: usize) {
        let it = &mut self.zones[zone];
        assert!(!matches!(it.state, ZoneState::Absent | ZoneState::Gone), "a zone goes once");
        self.usable -= usize::from(it.leave == Leave::Stays);
        it.leave = Leave::Drops;
        it.used_bytes = 0;
        it.state = ZoneState::Gone;
        self.gone += 1;
    }

    /// Marks a zone as gone because its memory was lost.
    pub(super) fn lose(&mut self, zone: usize) {
        self.zones[zone].is_lost = true;
        self.go(zone);
    }

    /// Whether there is room for more than the records that were hit.
    fn has_plenty(&self) -> bool {
        let is_free = |it: &&Zone| it.state == ZoneState::Free && it.is_usable();
        self.zones.iter().filter(is_free).count() > M::FREE_ZONES + M::WRITING_MAX
    }

    /// The next zone in turn after this one.
    pub(super) fn next_usable(&self, zone: usize) -> Option<usize> {
        let zones = self.zones.len();
        (1..=zones).map(|ahead| (zone + ahead) % zones).find(|&zone| self.zones[zone].is_usable())
    }

    /// Begins to read back the oldest zones if too few are free.
    pub(super) fn reclaim_ahead(&mut self) {
        let mut zone = self.open;
        for _ in 0..M::FREE_ZONES {
            let Some(next) = self.next_usable(zone) else { return };
            zone = next;
            let state = self.zones[zone].state;
            match state {
                ZoneState::Sealed if !self.start_reclaim(zone) => return,
                ZoneState::Open | ZoneState::Writing => return,
                _ => {}
            }
        }
    }

    /// Begins to read a whole zone. False if there is no memory for it.
    fn start_reclaim(&mut self, zone: usize) -> bool {
        let Some(pages) = self.spare.pop().or_else(|| Pages::new(M::ZONE_PAGES)) else {
            return false;
        };
        assert!(self.zones[zone].state == ZoneState::Sealed, "what is read back was written");
        self.zones[zone].state = ZoneState::Reclaiming;
        let operation = self.number(Operation::Reclaim { zone });
        self.medium.start_read(pages, (zone, 0), M::ZONE_PAGES, operation);
        true
    }

    /// Judges every record of a zone, then frees it.
    pub(super) fn reuse(&mut self, zone: usize, pages: &Pages, is_ok: bool, judge: &mut dyn Judge) {
        assert!(self.zones[zone].state == ZoneState::Reclaiming, "a zone is judged once");
        if self.zones[zone].leave == Leave::Drops {
            return self.go(zone);
        }
        if !is_ok && (self.zones[zone].leave != Leave::Stays || self.medium.is_lost(zone)) {
            return self.lose(zone);
        }
        let seal = self.seal(zone);
        let used = self.zones[zone].used_bytes;
        let round =
            Round { leaves: self.zones[zone].leave != Leave::Stays, has_plenty: self.has_plenty() };
        let mut offset = 0;
        while offset < used && is_ok {
            let Some(length) = record::length(&pages.bytes()[offset..]) else { break };
            let whole = pages
                .bytes()
                .get(offset..offset + length)
                .and_then(|bytes| record::read(bytes, seal, offset));
            if let (Some(record), Some(place)) = (whole, Self::place_of(zone, offset, length)) {
                self.judge_record(&record, place, round, judge);
            }
            offset += length.next_multiple_of(M::ALIGN_BYTES);
        }
        self.medium.zone_freed(zone);
        if round.leaves {
            return self.go(zone);
        }
        self.zones[zone].used_bytes = 0;
        self.zones[zone].state = ZoneState::Free;
    }

    fn judge_record(
        &mut self,
        record: &Record<'_>,
        place: Place,
        round: Round,
        judge: &mut dyn Judge,
    ) {
        let stays = judge.keeps(record.hash, place)
            || round.leaves && round.has_plenty && judge.knows(record.hash, place);
        if stays
            && self.medium.admits(record.bytes.len())
            && let Some(to) = self.append(record.bytes)
        {
            self.counts.moved += u64::from(round.leaves);
            self.counts.kept += u64::from(!round.leaves);
            judge.moved(record.hash, place, to);
        } else if round.leaves {
            judge.emptied(record, place);
        } else {
            self.counts.dropped += 1;
            judge.dropped(record, place);
        }
    }
}
