//! Kernel calls that move or fill pages of the program.

use farpool_uffd::Outcome;
use farpool_units::PAGE_BYTES;

use crate::core::forget::give_up;
use crate::core::state::Core;
use crate::space::moves::{Moved, occupied, settle_moves};

/// The kinds of threads that move pages, see [`crate::space::layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// Reads the messages, and with them the changes that its calls have to wait for.
    FaultThread,
    Evictor,
    /// Applies changes. Only later changes than the one in hand concern it, and of these only what
    /// they do to the page at this address.
    Steward(usize),
}

/// Repeats a copy or a fill while the kernel says that the address space is changing. Not for
/// moves, whose count cannot be trusted: see [`crate::space::moves`].
pub fn until_settled(
    core: &Core,
    mover: Mover,
    mut operation: impl FnMut(usize) -> Outcome,
) -> Outcome {
    let mut done_bytes = 0;
    loop {
        let outcome = core.step(mover, || operation(done_bytes));
        done_bytes += outcome.done_bytes;
        if outcome.errno != Some(libc::EAGAIN) {
            return Outcome { done_bytes, errno: outcome.errno };
        }
        core.try_again(mover);
    }
}

impl Core {
    /// Reads the change that the kernel is waiting to report.
    pub fn take_in(&self) {
        self.layout.take_in(&self.uffd, |range| give_up(self, range));
    }

    /// One kernel call that moves or fills pages of the program.
    pub fn step(&self, mover: Mover, operation: impl FnOnce() -> Outcome) -> Outcome {
        match mover {
            Mover::FaultThread | Mover::Evictor => self.layout.step(operation),
            Mover::Steward(address) => self.layout.step_of_steward(address, operation),
        }
    }

    /// To be called before a retry of a call that the kernel refused with EAGAIN.
    pub fn try_again(&self, mover: Mover) {
        if mover == Mover::FaultThread {
            self.take_in();
        }
        rustix::thread::sched_yield();
    }
}

/// Moves `count` (at most [`crate::space::moves::MAX_PAGES`]) neighbouring pages of the caller's
/// from `from` to `to`, up to the first that cannot be moved. All source pages must be present.
/// `wakes`: threads that wait for a page that arrived are woken.
pub fn move_pages(
    core: &Core,
    mover: Mover,
    to: usize,
    from: usize,
    count: usize,
    wakes: bool,
) -> Moved {
    let uffd = &core.uffd;
    let mut is_counted = true;
    let moved = settle_moves(
        count,
        |done| {
            let at = done * PAGE_BYTES;
            let outcome = core.step(mover, || {
                uffd.move_pages(to + at, from + at, count * PAGE_BYTES - at, wakes, false)
            });
            is_counted &= outcome.errno.is_none();
            outcome
        },
        || core.try_again(mover),
        || occupied(&core.pagemap, from, count),
    );
    if wakes && !is_counted {
        // The kernel wakes only for the pages that it counts. This fails where the mapping is gone.
        let _ = uffd.wake(to, count * PAGE_BYTES);
    }
    moved
}
