//! Makes the copies that superpages lack, since a blade was lost or none had room.
//!
//! What a lost blade had is forgotten first, so that all that is missing is missing alike. Frozen
//! memory belongs to several processes, which all lack the same: one of them copies, the others
//! attach what it made. They agree on the [`CopyDesk`], by the token of the part that is copied and
//! the number of the copy that is made of it.

use super::Mover;
use crate::account::PartKey;
use crate::copies::is_apart;
use crate::map::Place;
use crate::shared::SegmentState;
use crate::{
    BladeIndex, CopyDesk, Errand, FrozenToken, MAX_BLADES, Pool, PoolError, SegmentHandle, Step,
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
            let mut somebody_copies = false;
            for copy in SegmentHandle::every() {
                let Some(missing) = next_missing(pool, copy) else {
                    mover.publish_frozen(copy, desk)?;
                    continue;
                };
                if pool.segment(copy).state() == SegmentState::Frozen {
                    match mover.ask_for_copy(desk, &missing) {
                        Errand::Copy => {}
                        Errand::Wait => {
                            somebody_copies = true;
                            continue;
                        }
                        Errand::Attach(made) => {
                            if mover.attach_made(desk, &missing, &made) {
                                return Ok(Step::Moved);
                            }
                        }
                    }
                }
                mover.move_superpage(copy, missing.superpage, None)?;
                return Ok(Step::Moved);
            }
            pool.note_copies();
            Ok(if somebody_copies || pool.waits_to_free() { Step::Waiting } else { Step::Empty })
        })
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
        let is_elsewhere = |sma: u32, place: &Place, ledger: &mut _| {
            let domains = pool.domains_of_others(ledger, copy, sma);
            ledger.account_of(place.blade).is_some_and(|account| is_apart(account, &domains))
        };
        // With a superpage that is elsewhere already it would be there twice.
        let is_useful = places.contains_key(&missing.superpage)
            && places.iter().all(|(sma, place)| {
                map.get(*sma).is_none() && is_elsewhere(*sma, place, &mut *ledger)
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
            .copies(copy.first())
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
    /// True if a copy can be made once the memory where it was before is freed.
    fn waits_to_free(&self) -> bool {
        let unfreed = self.ledger().unfreed.clone();
        let is_missing = |copy: SegmentHandle, superpage| {
            self.segment(copy).map().get(superpage).is_none()
                && self.other_copy(copy, superpage).is_some()
        };
        unfreed.into_iter().any(|(copy, superpage, _)| is_missing(copy, superpage))
    }
}

/// What the processes that share a part call the copy of this number that is made of it.
fn name_of_copy(part: u128, copy: SegmentHandle) -> u128 {
    part.wrapping_add(1 + copy.nth() as u128)
}

/// The first superpage of which this copy has no place, and another one is whole.
fn next_missing(pool: &Pool, copy: SegmentHandle) -> Option<Missing> {
    if copy.nth() >= usize::from(pool.shared.config.copies)
        || pool.segment(copy).state() == SegmentState::Free
    {
        return None;
    }
    pool.superpages_of(copy.first()).find_map(|superpage| {
        // Where a damaged copy was, the blade may not have freed it yet.
        let is_missing = pool.segment(copy).map().get(superpage).is_none()
            && !pool.ledger().is_unfreed(copy, superpage);
        let of = pool.other_copy(copy, superpage).filter(|_| is_missing)?;
        Some(Missing { copy, superpage, of })
    })
}
