//! Makes the copies that superpages lack, since a blade was lost or none had room.
//!
//! What a lost blade had is forgotten first, so that all that is missing is missing alike. Frozen
//! memory belongs to several processes, which all lack the same: one of them copies, the others
//! attach what it made. They agree on the [`CopyDesk`], by the token of the part that is copied and
//! the number of the copy that is made of it.

use std::sync::atomic::Ordering;

use super::Mover;
use crate::account::PartKey;
use crate::copies::is_apart;
use crate::groups::Room;
use crate::map::Place;
use crate::parity::{Group, Strip};
use crate::pool::Ledger;
use crate::shared::SegmentState;
use crate::types::Strands;
use crate::{
    BladeIndex, CopyDesk, Errand, FrozenToken, MAX_BLADES, Pool, PoolError, Redundancy,
    SegmentHandle, Step,
};

/// A copy that a superpage lacks.
#[derive(Clone, Copy, Debug)]
struct Missing {
    copy: SegmentHandle,
    superpage: u32,
    /// Another copy, from which it is made.
    of: (SegmentHandle, Place),
}

impl Mover<'_> {
    /// Makes one copy of a superpage that has too few. [`Step::Empty`]: there is nothing to be
    /// done, or nothing that can be. Only once all copies are there, another blade that is silent
    /// is given up before the deadline.
    ///
    /// # Errors
    /// As for [`Mover::step`].
    pub fn complete_copies(&mut self, desk: &dyn CopyDesk) -> Result<Step, PoolError> {
        self.while_nothing_else_moves(|mover| {
            let pool = mover.pool;
            pool.ledger().free_rest();
            let lost = (0_u8..).map(BladeIndex).take(MAX_BLADES).filter(|at| pool.is_lost(*at));
            lost.for_each(|blade| pool.forget_copies_on(blade));
            if pool.shared.config.redundancy != Redundancy::Parity {
                return mover.make_missing(desk);
            }
            // By turns: a program that gives memory back all the time must not keep what a lost
            // blade had from being made.
            let is_their_turn = !std::mem::take(&mut mover.took_out_freed);
            if is_their_turn && mover.take_out_freed() {
                mover.took_out_freed = true;
                return Ok(Step::Moved);
            }
            match mover.make_missing(desk) {
                Ok(Step::Empty | Step::Waiting) | Err(PoolError::Full { .. })
                    if !is_their_turn && mover.take_out_freed() =>
                {
                    Ok(Step::Moved)
                }
                made => made,
            }
        })
    }

    /// Makes one copy of a superpage, of those that miss one.
    fn make_missing(&mut self, desk: &dyn CopyDesk) -> Result<Step, PoolError> {
        let pool = self.pool;
        let has_parity = pool.shared.config.redundancy == Redundancy::Parity;
        let (mut somebody_copies, mut full) = (false, None);
        for copy in SegmentHandle::every() {
            let Some(missing) = next_missing(pool, copy) else {
                self.publish_frozen(copy, desk)?;
                continue;
            };
            if pool.segment(copy).state() == SegmentState::Frozen {
                match self.ask_for_copy(desk, &missing) {
                    Errand::Copy => {}
                    Errand::Wait => {
                        somebody_copies = true;
                        continue;
                    }
                    Errand::Attach(made) => {
                        if self.attach_made(desk, &missing, &made) {
                            return Ok(Step::Moved);
                        }
                    }
                }
            }
            let at = pool.segment(copy).map().get(missing.superpage);
            match self.move_superpage(copy, missing.superpage, at) {
                // Another one, of a group that is not full, may find room.
                Err(error @ PoolError::Full { .. }) if has_parity => {
                    full.get_or_insert(error);
                }
                moved => return moved.map(|()| Step::Moved),
            }
        }
        if self.mend_groups() || self.part_strips() {
            return Ok(Step::Moved);
        }
        if let Some(error) = full {
            return Err(error);
        }
        pool.note_copies();
        Ok(if somebody_copies || pool.waits_to_free() { Step::Waiting } else { Step::Empty })
    }

    /// Takes out of the parity what was given back of one group. False: there is nothing.
    fn take_out_freed(&mut self) -> bool {
        let pool = self.pool;
        let is_writable = |s: &SegmentHandle| pool.segment(*s).state() == SegmentState::Writable;
        pool.shared.has_freed.store(false, Ordering::Release);
        for group in pool.live_segments().filter(is_writable).flat_map(|s| pool.shared.groups(s)) {
            let place = |strip: &Strip| pool.shared.place_of(*strip);
            let is_freed =
                |member: &Strip| place(member).is_some_and(|it| it.is_freed && it.record.is_none());
            if let Some(member) = group.members().find(is_freed) {
                pool.shared.has_freed.store(true, Ordering::Release); // there may be more
                if self.take_out(member) {
                    return true;
                }
            }
        }
        false
    }

    /// Makes the parity of rows that are in doubt, of the first group where it can.
    fn mend_groups(&mut self) -> bool {
        let pool = self.pool;
        if pool.shared.config.redundancy != Redundancy::Parity {
            return false;
        }
        let is_writable = |s: &SegmentHandle| pool.segment(*s).state() == SegmentState::Writable;
        let groups = pool.live_segments().filter(is_writable).flat_map(|s| pool.shared.groups(s));
        let in_doubt: Vec<Group> = groups.filter(|it| pool.shared.is_in_doubt(*it)).collect();
        in_doubt.into_iter().any(|group| self.mend_parity(group))
    }

    /// Moves one superpage that is not apart from the rest of its group, if there is a place that
    /// is.
    fn part_strips(&mut self) -> bool {
        let pool = self.pool;
        if pool.shared.config.redundancy != Redundancy::Parity {
            return false;
        }
        let is_writable = |s: &SegmentHandle| pool.segment(*s).state() == SegmentState::Writable;
        let neighbours = pool.shared.neighbours();
        for group in pool.live_segments().filter(is_writable).flat_map(|s| pool.shared.groups(s)) {
            if pool.shared.is_complete(group, &neighbours) {
                continue;
            }
            for strip in group.strips() {
                let Some(place) = pool.to_be_parted(strip) else { continue };
                if self.move_superpage(strip.strand, strip.superpage, Some(place)).is_ok() {
                    return true;
                }
            }
        }
        false
    }

    /// Decides who makes a frozen copy; who has begun goes on.
    fn ask_for_copy(&self, desk: &dyn CopyDesk, missing: &Missing) -> Errand {
        let mut ledger = self.pool.ledger();
        if ledger.is_copying(missing.copy) {
            return Errand::Copy;
        }
        let (of, at) = missing.of;
        let original = ledger.token_at(of, at);
        drop(ledger);
        original.map_or(Errand::Copy, |part| desk.ask(at.blade, name_of_copy(part, missing.copy)))
    }

    /// Attaches what another process made. If it is gone, the desk is told. False: it is of no use
    /// here, and this process makes its own.
    fn attach_made(&self, desk: &dyn CopyDesk, missing: &Missing, made: &FrozenToken) -> bool {
        let (pool, copy) = (self.pool, missing.copy);
        let map = pool.segment(copy).map();
        let mut ledger = pool.ledger();
        let (attached, places) = self.attach_parts_of(&mut ledger, copy, made);
        let is_elsewhere = |superpage: u32, place: &Place, ledger: &mut Ledger| {
            let domains = pool.domains_of_peers(Strip { strand: copy, superpage });
            ledger.account_of(place.blade).is_some_and(|account| is_apart(account, &domains))
        };
        // With a superpage that is elsewhere already it would be there twice.
        let is_useful = places.contains_key(&missing.superpage)
            && places.iter().all(|(sma, place)| {
                map.get(*sma).is_none_or(Place::is_nowhere)
                    && is_elsewhere(*sma, place, &mut ledger)
            });
        if is_useful {
            places.iter().for_each(|(sma, place)| _ = map.set(*sma, Some(*place)));
            return true;
        }
        ledger.detach_parts(attached);
        let (of, at) = missing.of;
        if let Some(part) = ledger.token_at(of, at).filter(|_| places.is_empty()) {
            desk.forget(name_of_copy(part, copy));
        }
        false
    }

    /// Freezes what was made of a frozen copy, and announces it to those who share the memory.
    fn publish_frozen(&self, copy: SegmentHandle, desk: &dyn CopyDesk) -> Result<(), PoolError> {
        let pool = self.pool;
        let mut ledger = pool.ledger();
        // What leaves a blade is published once all of it has left.
        if !ledger.is_copying(copy) || ledger.is_any_leaving() {
            return Ok(());
        }
        let made = ledger.freeze_filled(copy)?;
        let others: Vec<u128> = pool
            .strands(copy.first())
            .filter(|other| *other != copy)
            .flat_map(PartKey::all)
            .flat_map(|key| ledger.tokens_of(key))
            .collect();
        drop(ledger);
        others.into_iter().for_each(|of| desk.announce(name_of_copy(of, copy), &made));
        Ok(())
    }
}

impl Pool {
    /// Where a superpage is that is not apart from the rest of its group, if it could be: there is
    /// a blade, with room or without.
    fn to_be_parted(&self, strip: Strip) -> Option<Place> {
        let place = self.shared.place_of(strip).filter(|place| place.record.is_none())?;
        let domains = self.domains_of_peers(strip);
        let own = self.shared.domains(place.blade);
        let is_apart = !own.iter().any(|domain| domains.contains(domain));
        (!is_apart && self.room_apart(strip) > Room::Nowhere).then_some(place)
    }

    /// True if a group has superpages that lie together, or lacks one, and all blades where it
    /// would be apart are full.
    pub fn is_crowded(&self) -> bool {
        if self.shared.config.redundancy != Redundancy::Parity {
            return false;
        }
        let is_missing = |strip: Strip| {
            let place = self.shared.place_of(strip);
            let is_nowhere = place.is_none_or(Place::is_nowhere);
            // A member without a place has nothing.
            is_nowhere
                && (place.is_some() || strip.is_parity())
                && self.shared.is_recoverable(strip)
        };
        let lacks_room = |group: Group| {
            let may_part = self.segment(group.parity().strand.first()).state();
            let may_part = may_part == SegmentState::Writable;
            let mut strips = group.strips().filter(|strip| {
                is_missing(*strip) || may_part && self.to_be_parted(*strip).is_some()
            });
            strips.any(|strip| self.room_apart(strip) == Room::Full)
        };
        let neighbours = self.shared.neighbours();
        let groups = self.live_segments().flat_map(|s| self.shared.groups(s));
        let mut degraded = groups.filter(|group| !self.shared.is_complete(*group, &neighbours));
        degraded.any(lacks_room)
    }

    /// True if a copy can be made once the memory where it was before is freed.
    fn waits_to_free(&self) -> bool {
        let unfreed = self.ledger().unfreed.clone();
        let is_missing = |copy: SegmentHandle, superpage| {
            let place = self.segment(copy).map().get(superpage);
            place.is_none_or(Place::is_nowhere) && source_of(self, copy, superpage).is_some()
        };
        unfreed.into_iter().any(|(copy, superpage, _)| is_missing(copy, superpage))
    }
}

/// What the processes that share a part call the copy of this number that is made of it.
fn name_of_copy(part: u128, copy: SegmentHandle) -> u128 {
    part.wrapping_add(1 + copy.nth() as u128)
}

/// A superpage of which this strand has no place, and which can be made of others: with parity one
/// for which there is room, or may be, if there is one.
fn next_missing(pool: &Pool, copy: SegmentHandle) -> Option<Missing> {
    if copy.nth() >= pool.shared.config.redundancy.strands()
        || pool.segment(copy).state() == SegmentState::Free
    {
        return None;
    }
    let superpages: Vec<u32> = match pool.shared.is_parity(copy) {
        true => pool.shared.groups(copy.first()).iter().map(|it| it.parity().superpage).collect(),
        false => pool.superpages_of(copy.first()).collect(),
    };
    let mut missing = superpages.into_iter().filter_map(|superpage| {
        // Where a damaged copy was, the blade may not have freed it yet.
        let is_missing = pool.segment(copy).map().get(superpage).is_none_or(Place::is_nowhere)
            && !pool.ledger().is_unfreed(copy, superpage);
        let of = source_of(pool, copy, superpage).filter(|_| is_missing)?;
        Some(Missing { copy, superpage, of })
    });
    if pool.shared.config.redundancy != Redundancy::Parity {
        return missing.next();
    }
    let mut best: Option<(Room, Missing)> = None;
    for missing in missing {
        let room = pool.room_apart(Strip { strand: copy, superpage: missing.superpage });
        if best.is_none_or(|(of_best, _)| room > of_best) {
            best = Some((room, missing));
        }
        if room == Room::Free {
            break;
        }
    }
    best.map(|(_, missing)| missing)
}

/// What a superpage that has no place can be made of: another copy, or what stands for its group.
fn source_of(pool: &Pool, copy: SegmentHandle, superpage: u32) -> Option<(SegmentHandle, Place)> {
    if let Redundancy::Copies(_) = pool.shared.config.redundancy {
        return pool.other_copy(copy, superpage);
    }
    let strip = Strip { strand: copy, superpage };
    let group = Group::of(strip);
    let is_had = pool.shared.is_recoverable(strip);
    let mut others = group.strips().filter(|other| *other != strip && is_had);
    // For all who share the memory the same one, if it is frozen.
    let parity = others.clone().find(|other| *other == group.parity());
    let of = parity.or_else(|| others.find(|other| pool.shared.is_whole(*other)))?;
    Some((of.strand, pool.shared.place_of(of)?))
}
