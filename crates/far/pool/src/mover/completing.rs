//! Makes the copies that superpages lack, since a blade was lost or none had room.

use super::{Mover, next_on};
use crate::shared::SegmentState;
use crate::{BladeIndex, CopyDesk, MAX_BLADES, Pool, PoolError, SegmentHandle, Step};

impl Mover<'_> {
    /// Makes one copy of a superpage that has too few: its blade was lost, or none had room for it.
    /// [`Step::Empty`]: there is nothing to be done, or nothing that can be. Only once all copies
    /// are there, another blade that is silent is given up before the deadline.
    ///
    /// # Errors
    /// As for [`Mover::step`].
    pub fn complete_copies(
        &mut self,
        desk: &dyn CopyDesk,
        may_detach: impl Fn() -> bool,
    ) -> Result<Step, PoolError> {
        self.while_nothing_else_moves(|mover| {
            let pool = mover.pool;
            let lost = (0_u8..).map(BladeIndex).take(MAX_BLADES).filter(|at| pool.is_lost(*at));
            let lost: Vec<BladeIndex> = lost.collect();
            lost.iter().for_each(|blade| pool.forget_copies_on(*blade));
            // What is frozen is made again by one of those who share it.
            for lost in lost {
                if !mover.has_frozen_on(lost) {
                    continue;
                }
                match mover.step_held(lost, desk, &may_detach) {
                    // What has no other copy stays where it is lost.
                    Ok(Step::Empty) | Err(PoolError::InUse { .. }) => {}
                    step => return step,
                }
            }
            match SegmentHandle::every().find_map(|copy| next_missing(pool, copy)) {
                Some((copy, superpage)) => {
                    mover.move_superpage(copy, superpage, None)?;
                    Ok(Step::Moved)
                }
                None => {
                    pool.note_copies();
                    Ok(Step::Empty)
                }
            }
        })
    }

    /// True if frozen copies are to be made of what is on a lost blade, or a part of one is made.
    fn has_frozen_on(&self, lost: BladeIndex) -> bool {
        let pool = self.pool;
        let ledger = pool.ledger();
        SegmentHandle::every()
            .any(|copy| ledger.is_copying(copy) || next_on(pool, copy, lost).is_some())
    }
}

/// The segment's first superpage of which this copy has no place, and another one is whole. Frozen
/// copies that are missing stay so.
fn next_missing(pool: &Pool, copy: SegmentHandle) -> Option<(SegmentHandle, u32)> {
    if copy.nth() >= usize::from(pool.shared.config.copies)
        || pool.segment(copy).state() != SegmentState::Writable
    {
        return None;
    }
    let is_missing = |sma: &u32| {
        pool.segment(copy).map().get(*sma).is_none() && pool.other_copy(copy, *sma).is_some()
    };
    pool.superpages_of(copy.first()).find(is_missing).map(|sma| (copy, sma))
}
