//! Copies of superpages on several failure domains, so that a blade's death costs none of them.
//!
//! A segment with `n` copies is `n` segments inside: the copies share keys, versions and tags, so
//! that the same sealed bytes lie on all of them, and each has places of its own, which move,
//! freeze and are given up like those of any segment. A page is written to all copies whose blade
//! lives, and read from one: a copy that is not what was stored is found out by its seal, and the
//! next one is read.
//!
//! Invariants:
//! - No two copies of a superpage lie on one failure domain.
//! - An acknowledged write is on every copy whose blade is not lost; a lost blade does not come
//!   back.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use farpool_fabric::CallError;
use farpool_units::exactly;
use farpool_wire::FailureDomain;

use crate::account::{Account, PartKey};
use crate::map::Place;
use crate::parity::Strip;
use crate::pool::Ledger;
use crate::shared::SegmentState;
use crate::{BladeIndex, MAX_SEGMENTS, Pool, PoolError, Redundancy, SegmentHandle};

/// Most copies of a superpage.
pub const COPIES_LIMIT: usize = farpool_policy::redundancy::COPIES_LIMIT as usize;
/// The segments of all copies.
pub(crate) const ALL_SEGMENTS: usize = MAX_SEGMENTS * COPIES_LIMIT;

impl SegmentHandle {
    /// The segment that a copy is of: the first copy.
    pub(crate) fn first(self) -> SegmentHandle {
        SegmentHandle(exactly(self.index() % MAX_SEGMENTS))
    }

    /// Which copy it is.
    pub(crate) fn nth(self) -> usize {
        self.index() / MAX_SEGMENTS
    }

    /// The same segment's copy of this number.
    pub(crate) fn copy(self, nth: usize) -> SegmentHandle {
        assert!(nth < COPIES_LIMIT, "copy {nth}");
        SegmentHandle(exactly(self.first().index() + nth * MAX_SEGMENTS))
    }

    /// All segments of all copies.
    pub(crate) fn every() -> impl Iterator<Item = SegmentHandle> {
        (0..ALL_SEGMENTS).map(|index| SegmentHandle(exactly(index)))
    }
}

const _: () = assert!(ALL_SEGMENTS <= u8::MAX as usize);

impl Pool {
    /// The segments inside that a segment is made of.
    pub(crate) fn strands(&self, s: SegmentHandle) -> impl Iterator<Item = SegmentHandle> + use<> {
        self.shared.strands(s)
    }

    /// The copies of a segment.
    pub(crate) fn copies(&self, s: SegmentHandle) -> impl Iterator<Item = SegmentHandle> + use<> {
        self.shared.copies(s)
    }

    /// False if a superpage may have fewer copies than it should have. Lock-free.
    pub fn has_all_copies(&self) -> bool {
        let survives = self.shared.config.redundancy.survives_a_blade();
        !survives || (self.shared.spare.is_set() && !self.shared.has_freed.load(Ordering::Acquire))
    }

    /// Reads so far that were asked of a second copy, since the first one was late. Lock-free.
    pub fn hedged_reads(&self) -> u64 {
        self.shared.hedged_reads.load(Ordering::Relaxed)
    }

    /// Permits to give a silent blade up early, if all copies are there.
    pub(crate) fn note_copies(&self) {
        // Superpages get their memory under this lock.
        let _ledger = self.ledger();
        let survives = self.shared.config.redundancy.survives_a_blade();
        let has_all = || survives && self.degraded_superpages() == 0;
        if has_all() {
            self.shared.spare.set(true);
            // A blade may have been lost in between, which then takes the permission back, or did.
            if !has_all() {
                self.shared.spare.set(false);
            }
        }
    }

    /// The copies of a superpage that have memory, and where.
    pub(crate) fn places(
        &self,
        s: SegmentHandle,
        sma: u32,
    ) -> impl Iterator<Item = (SegmentHandle, Place)> + '_ {
        let of = move |copy| Some((copy, self.segment(copy).map().get(sma)?));
        self.copies(s).filter_map(of).filter(|(_, place)| !place.is_freed)
    }

    /// True if the superpage has memory somewhere.
    pub(crate) fn has_place(&self, s: SegmentHandle, sma: u32) -> bool {
        self.places(s, sma).next().is_some()
    }

    /// Another copy of the superpage that is whole and on a blade that is not lost.
    pub(crate) fn other_copy(
        &self,
        copy: SegmentHandle,
        sma: u32,
    ) -> Option<(SegmentHandle, Place)> {
        let is_whole = |place: Place| place.record.is_none() && !self.is_lost(place.blade);
        self.places(copy, sma).find(|(other, place)| *other != copy && is_whole(*place))
    }

    /// True if all pages are at this place, or on their way from it, and can be reached.
    fn is_whole(&self, place: Place) -> bool {
        let record = place.record.map(|it| &self.shared.records()[usize::from(it)]);
        !self.is_lost(place.blade) && record.is_none_or(|record| !record.is_making())
    }

    /// True if the superpage would be lost with the blade, or is.
    fn is_only_on(&self, s: SegmentHandle, sma: u32, blade: BladeIndex) -> bool {
        if self.shared.config.redundancy == Redundancy::Parity {
            return self.is_member_only_on(Strip { strand: s, superpage: sma }, blade);
        }
        let (mut is_there, mut is_elsewhere) = (false, false);
        for (_, place) in self.places(s, sma) {
            match self.is_on(place, blade) {
                true => is_there = true,
                false => is_elsewhere |= self.is_whole(place),
            }
        }
        is_there && !is_elsewhere
    }

    /// Superpages of live segments that would be lost with the blade, or are: without a copy on
    /// another one that lives.
    pub fn superpages_only_on(&self, blade: BladeIndex) -> u64 {
        self.live_segments().map(|s| self.superpages_of_only_on(s, blade)).sum()
    }

    /// The same of one segment.
    pub(crate) fn superpages_of_only_on(&self, s: SegmentHandle, blade: BladeIndex) -> u64 {
        self.superpages_of(s).filter(|sma| self.is_only_on(s, *sma, blade)).count() as u64
    }

    pub(crate) fn live_segments(&self) -> impl Iterator<Item = SegmentHandle> {
        let all = (0..MAX_SEGMENTS).filter_map(SegmentHandle::from_index);
        all.filter(|s| self.segment(*s).state() != SegmentState::Free)
    }

    /// Superpages of live segments that have fewer copies on blades that live than they should
    /// have.
    pub fn degraded_superpages(&self) -> u64 {
        let wanted = match self.shared.config.redundancy {
            Redundancy::NONE => return 0,
            Redundancy::Copies(copies) => copies,
            Redundancy::Parity => return self.degraded_members(),
        };
        let is_degraded = |s: SegmentHandle, sma: u32| {
            let whole = self.places(s, sma).filter(|(_, place)| self.is_whole(*place));
            whole.count() < usize::from(wanted)
        };
        let of = |s| self.superpages_of(s).filter(|sma| is_degraded(s, *sma)).count() as u64;
        self.live_segments().map(of).sum()
    }

    /// The superpages of a segment that have memory somewhere.
    pub fn superpages_of(&self, s: SegmentHandle) -> impl Iterator<Item = u32> {
        let all = self.copies(s).flat_map(|copy| {
            let places = self.segment(copy).map().iter();
            places.filter(|(_, place)| !place.is_freed).map(|(sma, _)| sma).collect::<Vec<_>>()
        });
        all.collect::<BTreeSet<u32>>().into_iter()
    }

    /// Forgets the copies on a lost blade that are whole elsewhere: they are to be made anew.
    pub(crate) fn forget_copies_on(&self, lost: BladeIndex) {
        let mut ledger = self.ledger();
        if self.shared.config.redundancy == Redundancy::Parity {
            return self.live_segments().for_each(|s| self.forget_strips_on(&mut ledger, s, lost));
        }
        let live = |copy: &SegmentHandle| self.segment(*copy).state() != SegmentState::Free;
        for copy in SegmentHandle::every().filter(live) {
            self.forget_places(&mut ledger, copy, |sma, place| {
                place.blade == lost
                    && place.record.is_none()
                    && self.other_copy(copy, sma).is_some()
            });
            let is_used = |key: PartKey| {
                let mut places = self.segment(copy).map().iter().map(|(_, place)| place);
                places.any(|it| it.blade == lost && PartKey::of(copy, it.part) == key)
            };
            if let Some(account) = ledger.account_of(lost) {
                let unused = PartKey::all(copy).filter(|key| !is_used(*key));
                // There is nobody to be told.
                unused.for_each(|key| drop(account.detach(key)));
            }
        }
    }

    /// Forgets places of a copy whose blade is lost.
    pub(crate) fn forget_places(
        &self,
        ledger: &mut Ledger,
        copy: SegmentHandle,
        is_gone: impl Fn(u32, Place) -> bool,
    ) {
        let map = self.segment(copy).map();
        let gone: Vec<_> = map.iter().filter(|(sma, place)| is_gone(*sma, *place)).collect();
        if gone.is_empty() {
            return;
        }
        gone.iter().for_each(|(sma, _)| _ = map.set(*sma, None));
        ledger.wait_for_lanes();
        for (_, place) in gone {
            if let Some(record) = place.record {
                self.shared.records()[usize::from(record)].end();
            }
            ledger.uncharge_if_charged(copy);
        }
    }

    /// Allocates as many copies as there is room for on different domains, and one at least: what
    /// is missing is [made later](crate::Mover::complete_copies).
    pub(crate) fn allocate_copies(
        &self,
        ledger: &mut Ledger,
        s: SegmentHandle,
        sma: u32,
    ) -> Result<Vec<(SegmentHandle, Place)>, PoolError> {
        let (mut places, mut domains, mut failed) = (Vec::new(), Vec::new(), None);
        for copy in self.copies(s) {
            let part_on = |account: &Account| is_apart(account, &domains).then_some(0);
            match self.allocate_somewhere(ledger, copy, sma, part_on) {
                Ok(place) => {
                    places.push((copy, place));
                    domains.extend(self.shared.domains(place.blade).iter().cloned());
                }
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
        if failed.is_some() {
            self.shared.spare.set(false);
        }
        match failed {
            Some(error) if places.is_empty() => Err(error),
            _ => Ok(places),
        }
    }

    /// Frees a copy that is unpublished, and publishes it again if its blade refuses.
    pub(crate) fn free_copy(
        &self,
        ledger: &mut Ledger,
        copy: SegmentHandle,
        sma: u32,
        place: Place,
    ) -> Result<(), CallError> {
        if let Some(record) = place.record {
            // Half here and half there since a blade was lost; the other half goes with its blade.
            self.shared.records()[usize::from(record)].end();
        }
        let Some(account) = ledger.account_of(place.blade) else {
            return Ok(());
        };
        let freed = account.free(PartKey::of(copy, place.part), sma);
        self.note_loss(usize::from(place.blade.0), account);
        if matches!(freed, Err(CallError::Refused { .. })) && place.record.is_none() {
            // If it were forgotten here, it could be allocated a second time, perhaps on another
            // blade.
            self.segment(copy).map().set(sma, Some(place));
        } else {
            ledger.uncharge(copy);
        }
        freed
    }

    /// The domains that these superpages lie on, as far as they are not lost.
    pub(crate) fn domains_of(&self, strips: impl IntoIterator<Item = Strip>) -> Vec<FailureDomain> {
        let places = strips.into_iter().filter_map(|strip| self.shared.place_of(strip));
        let blades = places.flat_map(|place| {
            let record = place.record.map(|it| &self.shared.records()[usize::from(it)]);
            let target = record.and_then(|record| record.target()).map(|target| target.blade);
            let alive = Some(place.blade).filter(|blade| !self.is_lost(*blade));
            [alive, target]
        });
        blades.flatten().flat_map(|blade| self.shared.domains(blade).to_vec()).collect()
    }

    /// The domains that a superpage must not lie on, as what it is stored apart from does.
    pub(crate) fn domains_of_peers(&self, strip: Strip) -> Vec<FailureDomain> {
        self.domains_of(self.shared.peers(strip))
    }
}

/// True if a copy may lie on the blade of this account.
pub(crate) fn is_apart(account: &Account, domains: &[FailureDomain]) -> bool {
    !account.domains.iter().any(|domain| domains.contains(domain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_copy_has_a_segment_of_its_own() {
        let all: BTreeSet<_> = SegmentHandle::every().collect();
        assert_eq!(all.len(), ALL_SEGMENTS);
        for segment in (0..MAX_SEGMENTS).filter_map(SegmentHandle::from_index) {
            for nth in 0..COPIES_LIMIT {
                let copy = segment.copy(nth);
                assert_eq!((copy.first(), copy.nth(), copy.copy(0)), (segment, nth, segment));
                assert!(all.contains(&copy));
            }
        }
    }
}
