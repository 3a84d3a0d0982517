//! A superpage that is moved, or made again, and what it is made of.

use std::sync::Arc;

use crate::map::Place;
use crate::moving::Record;
use crate::parity::{Group, Strip};
use crate::seals::Seals;
use crate::shared::Segment;
use crate::{Pool, Redundancy, SUPERPAGE_PAGES, SegmentHandle};

/// A superpage to be moved.
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    pub(super) handle: SegmentHandle,
    pub(super) segment: &'a Segment,
    pub(super) superpage: u32,
    /// Where it was, perhaps on a lost blade. None: it was nowhere.
    pub(super) old: Option<Place>,
    pub(super) source: Source<'a>,
    pub(super) new: Place,
    pub(super) record: &'a Record,
    /// Which pages were ever written; None if all may have been.
    pub(super) seals: Option<Arc<Seals>>,
}

impl Job<'_> {
    /// The superpage, where it is of a group.
    pub(super) fn strip(&self) -> Strip {
        Strip { strand: self.handle, superpage: self.superpage }
    }

    /// True if a page may be other than zero.
    pub(super) fn is_written(&self, pool: &Pool, page: u32) -> bool {
        let Some(seals) = &self.seals else { return true };
        match pool.shared.config.redundancy {
            Redundancy::Parity => Group::of(self.strip()).row(page).is_written(self.strip(), seals),
            Redundancy::Copies(_) => seals.is_written(self.superpage * SUPERPAGE_PAGES + page),
        }
    }
}

/// Where the pages of a superpage are copied from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    /// Its old place, or another copy.
    Place(&'a Segment, Place),
    /// The rest of its group.
    Group(Group),
}

impl<'a> Source<'a> {
    pub(super) fn of(pool: &'a Pool, strip: Strip, old: Option<Place>) -> Option<Source<'a>> {
        let at = |strand: SegmentHandle, place| Source::Place(pool.segment(strand), place);
        let own = old.filter(|old| !old.is_nowhere()).map(|old| at(strip.strand, old));
        let is_alive = old.is_some_and(|old| !pool.is_lost(old.blade));
        if is_alive {
            return own;
        }
        // Without another source what is lost is asked for in vain, and the error says so.
        let other = match pool.shared.config.redundancy {
            Redundancy::Copies(_) => pool
                .other_copy(strip.strand, strip.superpage)
                .map(|(strand, place)| at(strand, place)),
            Redundancy::Parity => {
                let is_had = pool.shared.is_recoverable(strip);
                is_had.then(|| Source::Group(Group::of(strip)))
            }
        };
        other.or(own)
    }

    pub(super) fn is_other_than(&self, old: Option<Place>) -> bool {
        match self {
            Source::Place(_, place) => old != Some(*place),
            Source::Group(_) => true,
        }
    }

    /// True if it still has everything.
    pub(super) fn is_alive(&self, pool: &Pool, strip: Strip) -> bool {
        match self {
            Source::Place(_, place) => !pool.is_lost(place.blade),
            Source::Group(_) => pool.shared.is_recoverable(strip),
        }
    }

    pub(super) fn describe(&self, pool: &Pool) -> String {
        match self {
            Source::Place(_, place) => pool.describe(place.blade),
            Source::Group(_) => "(made of the rest of its group)".into(),
        }
    }
}
