//! Which extents of one segment are worth a huge page. Pure: what exists is an argument.

use std::collections::BTreeMap;

/// What a huge page spans: 2 MiB, the processor's second page size.
pub(super) const EXTENT_BYTES: u64 = 2 << 20;
/// Pages of 4 KiB in it.
pub(super) const EXTENT_PAGES: u16 = 512;
/// Pages of an extent that must exist. A huge page fills the holes, so with more than half of them a
/// segment never takes twice the memory it took.
const FILLED_PAGES: u16 = EXTENT_PAGES / 2 + 1;
/// Attempts at an extent that stays busy: whoever holds its pages three looks long holds them on.
const TRIES_LIMIT: u8 = 3;

/// What became of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// It is huge.
    Huge,
    /// Its pages, or huge pages, cannot be had just now.
    Busy,
    /// The kernel does not want to.
    Refused,
}

/// What the blade itself did to an extent that the kernel does not tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hole {
    /// Its owner discarded pages of it.
    Discarded,
    /// It was freed; what comes next is another's.
    Freed,
}

/// What is known of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Known {
    is_huge: bool,
    has_holes: bool,
    /// Pages that existed at the last attempt.
    pages: u16,
    tries: u8,
}

/// What is known of a segment's extents.
#[derive(Debug, Default)]
pub(super) struct Plan(BTreeMap<u32, Known>);

impl Plan {
    /// Whether there is nothing to be found out about it.
    pub(super) fn is_huge(&self, extent: u32) -> bool {
        self.0.get(&extent).is_some_and(|known| known.is_huge)
    }

    /// Whether to try, now that so many of its pages exist.
    pub(super) fn is_worth(&self, extent: u32, pages: u16) -> bool {
        let known = self.0.get(&extent).copied().unwrap_or_default();
        // Its owner said what is not needed: a huge page would bring it back.
        let wanted = if known.has_holes { EXTENT_PAGES } else { FILLED_PAGES };
        let is_new = known.tries == 0 || known.pages != pages;
        !known.is_huge && pages >= wanted && (is_new || known.tries < TRIES_LIMIT)
    }

    /// Takes note of an attempt. Returns whether another one is worth while though nothing changes.
    pub(super) fn tried(&mut self, extent: u32, pages: u16, outcome: Outcome) -> bool {
        let known = self.0.entry(extent).or_default();
        let before = if known.pages == pages { known.tries } else { 0 };
        known.pages = pages;
        known.is_huge = outcome == Outcome::Huge;
        known.tries = if outcome == Outcome::Busy { before + 1 } else { TRIES_LIMIT };
        outcome == Outcome::Busy && known.tries < TRIES_LIMIT
    }

    /// Takes note of a hole that was, or is about to be, punched.
    pub(super) fn punched(&mut self, extent: u32, hole: Hole) {
        match hole {
            Hole::Freed => drop(self.0.remove(&extent)),
            Hole::Discarded => {
                self.0.insert(extent, Known { has_holes: true, ..Known::default() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_extent_never_doubles() {
        let plan = Plan::default();
        assert!(!plan.is_worth(0, 0) && !plan.is_worth(0, EXTENT_PAGES / 2));
        let first = (0..=EXTENT_PAGES).find(|pages| plan.is_worth(0, *pages)).unwrap();
        assert!(EXTENT_PAGES < 2 * first);
    }

    #[test]
    fn what_is_huge_is_left_alone_until_it_is_freed() {
        let mut plan = Plan::default();
        assert!(!plan.tried(7, 400, Outcome::Huge));
        assert!(plan.is_huge(7) && !plan.is_worth(7, EXTENT_PAGES));
        plan.punched(7, Hole::Freed);
        assert!(!plan.is_huge(7) && plan.is_worth(7, 400));
    }

    #[test]
    fn what_was_discarded_comes_back_only_by_its_owner() {
        let mut plan = Plan::default();
        plan.tried(0, EXTENT_PAGES, Outcome::Huge);
        plan.punched(0, Hole::Discarded);
        assert!(!plan.is_huge(0) && !plan.is_worth(0, EXTENT_PAGES - 1));
        assert!(plan.is_worth(0, EXTENT_PAGES));
    }

    #[test]
    fn what_failed_is_tried_again_when_it_changed() {
        let mut plan = Plan::default();
        assert!(!plan.tried(0, 300, Outcome::Refused));
        assert!(!plan.is_worth(0, 300) && plan.is_worth(0, 301));
        for attempt in 1..=TRIES_LIMIT {
            assert!(plan.is_worth(0, 301));
            assert_eq!(plan.tried(0, 301, Outcome::Busy), attempt < TRIES_LIMIT);
        }
        assert!(!plan.is_worth(0, 301) && plan.is_worth(0, 302));
    }
}
