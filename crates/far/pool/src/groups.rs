//! What a pool does with groups of superpages and their parity ([`crate::parity`]): their memory is
//! allocated, given back, and forgotten with a lost blade.

use std::sync::atomic::Ordering;

use crate::account::{Account, PartKey};
use crate::copies::is_apart;
use crate::map::Place;
use crate::parity::{Group, Strip};
use crate::pool::Ledger;
use crate::seals::Seals;
use crate::{BladeIndex, Pool, PoolError, Redundancy, SegmentHandle};

/// Whether there is memory where a superpage would be apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Room {
    /// No blade lies apart.
    Nowhere,
    /// Those that do gave none when they were last asked.
    Full,
    /// One of them may give some.
    Free,
}

impl Pool {
    /// Allocates a member of a group, and the group's parity with the first of them.
    pub(crate) fn allocate_member(
        &self,
        ledger: &mut Ledger,
        s: SegmentHandle,
        superpage: u32,
    ) -> Result<(), PoolError> {
        let member = Strip { strand: s, superpage };
        if let Some(place) = self.shared.place_of(member) {
            // It was given back and not yet taken out of the parity.
            self.segment(s).map().set(superpage, Some(Place { is_freed: false, ..place }));
            return Ok(());
        }
        let group = Group::of(member);
        let is_first = group.strips().all(|strip| self.shared.place_of(strip).is_none());
        let more = if is_first { 2 } else { 1 };
        ledger.check_quota(self.shared.config.quota_bytes, more)?;
        let place = self.allocate_strip(ledger, member)?;
        if let Some(seals) = self.segment(s).seals() {
            seals.begin(superpage);
        }
        self.publish(ledger, member, place);
        if is_first {
            if let Some(seals) = self.segment(s).seals() {
                seals.begin_parity(group.parity().superpage);
            }
            // Later its pages would have to be in it: the mover makes what is missing.
            if let Ok(place) = self.allocate_strip(ledger, group.parity()) {
                self.publish(ledger, group.parity(), place);
            }
        }
        if !self.shared.is_complete(group, &self.shared.neighbours()) {
            self.shared.spare.set(false);
        }
        Ok(())
    }

    fn publish(&self, ledger: &mut Ledger, strip: Strip, place: Place) {
        ledger.charge(strip.strand);
        let is_within = self.segment(strip.strand).map().set(strip.superpage, Some(place));
        assert!(is_within, "superpage {} lies in its segment", strip.superpage);
    }

    /// Allocates memory apart from the rest of the group, or apart from its members at least, or
    /// somewhere: the mover moves it, once there is a better place.
    fn allocate_strip(&self, ledger: &mut Ledger, strip: Strip) -> Result<Place, PoolError> {
        let members = Group::of(strip).members().filter(|peer| *peer != strip);
        let of_members = self.domains_of(members);
        let (mut apart, mut failed) =
            (vec![self.domains_of_peers(strip), of_members, vec![]], None);
        apart.dedup();
        for domains in apart {
            let Strip { strand, superpage } = strip;
            let part_on = |account: &Account| is_apart(account, &domains).then_some(0);
            match self.allocate_somewhere(ledger, strand, superpage, part_on) {
                Ok(place) => return Ok(place),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.expect("somewhere is a place to look for"))
    }

    /// Gives a member's memory back: at once if it is the last one, else once the
    /// [mover](crate::Mover::complete_copies) has taken it out of the parity.
    pub(crate) fn free_member(
        &self,
        ledger: &mut Ledger,
        s: SegmentHandle,
        superpage: u32,
    ) -> Result<(), PoolError> {
        let member = Strip { strand: s, superpage };
        let Some(place) = self.shared.place_of(member).filter(|place| !place.is_freed) else {
            return Ok(());
        };
        let group = Group::of(member);
        let is_used = |other: Strip| self.shared.place_of(other).is_some_and(|it| !it.is_freed);
        if group.members().any(|other| other != member && is_used(other)) {
            self.segment(s).map().set(superpage, Some(Place { is_freed: true, ..place }));
            if let Some(seals) = self.segment(s).seals() {
                seals.give_back(superpage);
            }
            self.shared.has_freed.store(true, Ordering::Release);
            return Ok(());
        }
        let strips: Vec<_> = group
            .strips()
            .filter_map(|strip| Some((strip, self.shared.place_of(strip)?)))
            .collect();
        for (strip, _) in &strips {
            self.segment(strip.strand).map().set(strip.superpage, None);
        }
        ledger.wait_for_lanes();
        for (strip, place) in strips {
            if let Some(seals) = self.segment(s).seals().filter(|_| strip.strand == s) {
                seals.begin(strip.superpage);
            }
            self.free_strip(ledger, strip, place);
        }
        Ok(())
    }

    /// Frees, now or later, a place that is unpublished.
    pub(crate) fn free_strip(&self, ledger: &mut Ledger, strip: Strip, place: Place) {
        if let Some(record) = place.record {
            self.shared.records()[usize::from(record)].end();
        }
        if !place.is_nowhere() {
            ledger.uncharge_if_charged(strip.strand);
            ledger.free_soon(strip.strand, strip.superpage, place);
        }
    }

    /// Superpages in groups that are not complete.
    pub(crate) fn degraded_members(&self) -> u64 {
        let neighbours = self.shared.neighbours();
        let groups = self.live_segments().flat_map(|s| self.shared.groups(s));
        let degraded = groups.filter(|group| !self.shared.is_complete(*group, &neighbours));
        let members = |group: Group| {
            let is_there = |strip: &Strip| self.shared.place_of(*strip).is_some();
            group.members().filter(is_there).count() as u64
        };
        degraded.map(members).sum()
    }

    /// True if the superpage would be lost with the blade, or is.
    pub(crate) fn is_member_only_on(&self, member: Strip, blade: BladeIndex) -> bool {
        let Some(place) = self.shared.place_of(member) else { return false };
        let is_on = |strip: Strip| {
            self.shared.place_of(strip).is_some_and(|place| self.is_on(place, blade))
        };
        let mut others = Group::of(member).strips().filter(|strip| *strip != member);
        self.is_on(place, blade) && (!self.shared.is_spare(member) || others.any(is_on))
    }

    /// Forgets what of a segment's groups was on a lost blade and can be had from the rest of them.
    pub(crate) fn forget_strips_on(&self, ledger: &mut Ledger, s: SegmentHandle, lost: BladeIndex) {
        let strips: Vec<Strip> =
            self.shared.groups(s).into_iter().flat_map(Group::strips).collect();
        let mut forgotten = Vec::new();
        for strip in strips {
            let Some(place) = self.shared.place_of(strip) else { continue };
            if place.blade != lost || place.record.is_some() {
                continue;
            }
            if strip.is_parity() || self.shared.is_recoverable(strip) {
                let is_freed = place.is_freed;
                let nowhere = Some(Place { is_freed, ..Place::nowhere() });
                let at = if strip.is_parity() { None } else { nowhere };
                self.segment(strip.strand).map().set(strip.superpage, at);
                forgotten.push(strip);
            }
        }
        if forgotten.is_empty() {
            return;
        }
        ledger.wait_for_lanes();
        forgotten.iter().for_each(|strip| ledger.uncharge_if_charged(strip.strand));
        let Some(account) = ledger.account_of(lost) else { return };
        for strand in self.strands(s) {
            let is_used = |key: PartKey| {
                let mut places = self.segment(strand).map().iter().map(|(_, place)| place);
                places.any(|it| self.is_on(it, lost) && PartKey::of(strand, it.part) == key)
            };
            // There is nobody to be told.
            PartKey::all(strand)
                .filter(|key| !is_used(*key))
                .for_each(|key| drop(account.detach(key)));
        }
    }

    /// Where the parity is that has what is written to a superpage, should its own blade be lost.
    pub(crate) fn parity_of(&self, s: SegmentHandle, superpage: u32) -> Option<Place> {
        if self.shared.config.redundancy != Redundancy::Parity || !self.has_place(s, superpage) {
            return None;
        }
        let parity = Group::of(Strip { strand: s, superpage }).parity();
        self.shared.place_of(parity)
    }

    /// What there is for a superpage of a group apart from the rest of it.
    pub(crate) fn room_apart(&self, strip: Strip) -> Room {
        let domains = self.domains_of_peers(strip);
        let ledger = self.ledger();
        let apart = (0..).map(BladeIndex).zip(&ledger.accounts).filter_map(|(blade, account)| {
            let is_it = |account: &&Account| {
                is_apart(account, &domains) && !account.is_leaving && !account.is_given_up()
            };
            account.as_ref().filter(is_it).filter(|_| !self.is_lost(blade))
        });
        let rooms = apart.map(|it| if it.is_full { Room::Full } else { Room::Free });
        rooms.max().unwrap_or(Room::Nowhere)
    }

    /// Gives a place to what others wrote and no blade has, but the rest of its group does.
    pub(crate) fn note_recoverable(&self, s: SegmentHandle, seals: &Seals) {
        for superpage in seals.written_superpages() {
            let member = Strip { strand: s, superpage };
            if self.shared.place_of(member).is_none() && self.shared.is_recoverable(member) {
                self.segment(s).map().set(superpage, Some(Place::nowhere()));
            }
        }
    }
}

impl Ledger {
    /// One superpage less counts, if it did: what is attached never was charged, nor what was
    /// copied while it was frozen.
    pub(crate) fn uncharge_if_charged(&mut self, strand: SegmentHandle) {
        if self.charged_superpages[strand.index()] > 0 {
            self.uncharge(strand);
        }
    }
}
