//! Groups of superpages with one superpage of parity, so that a blade's death costs none of them.
//!
//! [`GROUP_SUPERPAGES`] neighbours of a segment are a group: its members lie on as many failure
//! domains, and on one more lies their parity, page by page the exclusive or of what their blades
//! have. Pages stay whole on one blade, so a fault asks one blade as ever; what a lost blade had is
//! the exclusive or of the others (Carbink, OSDI 2022; there parity follows in the background,
//! here it is changed with the page, so that no page is ever without).
//!
//! A segment with parity is two segments inside, its *strands*: the second one has the parity of
//! the group of that number as its superpage.
//!
//! Pages of the same number in all superpages of a group are a *row*. Invariants:
//! - What a page adds to its row is what was last sealed there, or nothing while its seal says that
//!   nothing was written. Who changes a row, or reads a page by the others, holds its lock.
//! - A row whose parity may not be what its pages give is in doubt ([`crate::digests`]): whoever
//!   writes to it, or the mover, makes the parity from all members. A lost page is read by such a
//!   row all the same, as its seal says whether it is right.
//! - A superpage that the program gave back counts until its pages are taken out of the parity.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use farpool_units::exactly;

use crate::seals::Seals;
use crate::shared::{SegmentState, Shared};
use crate::types::blade_index;
use crate::{BladeIndex, MAX_BLADES, Redundancy, SUPERPAGE_PAGES, SegmentHandle, SegmentPage};

/// Superpages of a group, without their parity: 1.25 times the memory, on five failure domains.
pub(crate) const GROUP_SUPERPAGES: u32 = 4;
/// Failure domains that a group and its parity are on.
pub const PARITY_DOMAINS: usize = farpool_policy::redundancy::PARITY_DOMAINS as usize;
const _: () = assert!(GROUP_SUPERPAGES as usize + 1 == PARITY_DOMAINS);
/// Locks that all rows share, a byte each. Two rows that share one wait for each other.
const ROW_LOCKS: usize = 1 << 14;

/// A superpage of one strand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Strip {
    pub(crate) strand: SegmentHandle,
    pub(crate) superpage: u32,
}

impl Strip {
    /// True if it is the parity of a group.
    pub(crate) fn is_parity(self) -> bool {
        self.strand != self.strand.first()
    }
}

/// A group of superpages of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    segment: SegmentHandle,
    number: u32,
}

impl Group {
    /// The group that a superpage is a member of, or the parity of.
    pub(crate) fn of(strip: Strip) -> Group {
        let number = match strip.is_parity() {
            true => strip.superpage,
            false => strip.superpage / GROUP_SUPERPAGES,
        };
        Group { segment: strip.strand.first(), number }
    }

    /// Its members, whether or not they have memory.
    pub(crate) fn members(self) -> impl Iterator<Item = Strip> + Clone {
        let first = self.number * GROUP_SUPERPAGES;
        let strand = self.segment;
        (first..first + GROUP_SUPERPAGES).map(move |superpage| Strip { strand, superpage })
    }

    pub(crate) fn parity(self) -> Strip {
        Strip { strand: self.segment.parity(), superpage: self.number }
    }

    /// Members and parity.
    pub(crate) fn strips(self) -> impl Iterator<Item = Strip> + Clone {
        self.members().chain([self.parity()])
    }

    /// The row of this number, below [`SUPERPAGE_PAGES`].
    pub(crate) fn row(self, index: u32) -> Row {
        Row { group: self, index }
    }
}

/// Pages of the same number in the superpages of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) group: Group,
    index: u32,
}

impl Row {
    /// The row of a page of a member.
    pub(crate) fn of(at: SegmentPage) -> Row {
        let superpage = at.page / SUPERPAGE_PAGES;
        Group::of(Strip { strand: at.segment, superpage }).row(at.page % SUPERPAGE_PAGES)
    }

    /// The row's page in a superpage of the group.
    pub(crate) fn page_of(self, strip: Strip) -> SegmentPage {
        let page = strip.superpage * SUPERPAGE_PAGES + self.index;
        SegmentPage { segment: strip.strand, page }
    }

    /// The pages that were written, and so are in the parity; without one of them.
    pub(crate) fn written_without(
        self,
        seals: &Seals,
        without: Option<SegmentPage>,
    ) -> impl Iterator<Item = SegmentPage> + '_ {
        let pages = self.group.members().map(move |member| self.page_of(member));
        pages.filter(move |at| Some(*at) != without && seals.is_written(at.page))
    }

    /// True if the row's page in a superpage may be other than zero.
    pub(crate) fn is_written(self, strip: Strip, seals: &Seals) -> bool {
        match strip.is_parity() {
            true => self.written_without(seals, None).next().is_some(),
            false => seals.is_written(self.page_of(strip).page),
        }
    }

    fn lock_number(self) -> usize {
        // Neighbouring rows, which one request writes, have neighbouring locks.
        let rows = u64::from(self.group.number) * 7 + self.group.segment.index() as u64 * 131;
        let number = rows.wrapping_mul(u64::from(SUPERPAGE_PAGES) + 61) + u64::from(self.index);
        exactly(number % ROW_LOCKS as u64)
    }
}

impl SegmentHandle {
    /// The strand that has a segment's parity.
    pub(crate) fn parity(self) -> SegmentHandle {
        self.copy(1)
    }
}

/// Of each blade those that fail with it, as bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neighbours([u8; MAX_BLADES]);

impl Neighbours {
    /// True if no two of these blades fail together.
    fn are_apart(&self, blades: impl Iterator<Item = BladeIndex>) -> bool {
        let mut taken = 0;
        let mut masks = blades.map(|blade| self.0.get(usize::from(blade.0)).map(|it| (blade, *it)));
        masks.all(|known| {
            let Some((blade, mask)) = known else { return false };
            let is_free = taken & 1 << blade.0 == 0;
            taken |= mask;
            is_free
        })
    }
}

/// The locks of rows, held while what is read or written of them is on its way.
#[derive(Debug)]
pub(crate) struct RowLocks(Box<[AtomicU8]>);

const HELD: u8 = 1;
/// The mover waits for the row, and gets it before any lane does.
const WANTED: u8 = 2;

/// Holds a row.
#[derive(Debug)]
pub(crate) struct RowLock {
    shared: Arc<Shared>,
    number: usize,
}

impl RowLocks {
    pub(crate) fn new() -> Self {
        RowLocks((0..ROW_LOCKS).map(|_| AtomicU8::new(0)).collect())
    }
}

impl Drop for RowLock {
    fn drop(&mut self) {
        if let Some(locks) = self.shared.row_locks.get() {
            locks.0[self.number].fetch_and(!HELD, Release);
        }
    }
}

impl Shared {
    /// Takes the lock of a row, unless somebody has it, who may wait for a blade.
    pub(crate) fn try_lock(self: &Arc<Self>, row: Row) -> Option<RowLock> {
        let number = row.lock_number();
        let lock = &self.row_locks.get_or_init(RowLocks::new).0[number];
        let taken = lock.compare_exchange(0, HELD, AcqRel, Acquire);
        taken.is_ok().then(|| RowLock { shared: Arc::clone(self), number })
    }

    /// The same for the mover, of which there is one: if the row is held it is kept for the mover,
    /// which has to try again until it has it.
    pub(crate) fn try_lock_first(self: &Arc<Self>, row: Row) -> Option<RowLock> {
        let number = row.lock_number();
        let lock = &self.row_locks.get_or_init(RowLocks::new).0[number];
        let taken = lock.fetch_update(AcqRel, Acquire, |state| {
            Some(if state & HELD == 0 { HELD } else { state | WANTED })
        });
        let was_held = taken.is_ok_and(|before| before & HELD != 0);
        (!was_held).then(|| RowLock { shared: Arc::clone(self), number })
    }

    /// The superpages that this one is stored apart from: its other copies, or its group.
    pub(crate) fn peers(&self, of: Strip) -> Vec<Strip> {
        match self.config.redundancy {
            Redundancy::Copies(_) => self
                .copies(of.strand)
                .map(|strand| Strip { strand, ..of })
                .filter(|peer| *peer != of)
                .collect(),
            Redundancy::Parity => Group::of(of).strips().filter(|peer| *peer != of).collect(),
        }
    }

    /// True if a superpage's pages can be read from its own place.
    pub(crate) fn is_whole(&self, strip: Strip) -> bool {
        let Some(place) = self.place_of(strip) else { return false };
        let record = place.record.map(|it| &self.records()[usize::from(it)]);
        let is_there = record.is_none_or(|record| !record.is_making());
        is_there && !self.is_lost(place.blade)
    }

    /// True if all members of a group that have memory are whole, but for one.
    pub(crate) fn are_members_whole(&self, group: Group, but: Strip) -> bool {
        let mut members = group.members().filter(|member| *member != but);
        members.all(|member| self.place_of(member).is_none() || self.is_whole(member))
    }

    /// True if what a superpage has can be had from the rest of its group, but for rows in doubt.
    pub(crate) fn is_recoverable(&self, strip: Strip) -> bool {
        let is_had = |peer: &Strip| match self.place_of(*peer) {
            None => !peer.is_parity(),
            Some(_) => self.is_whole(*peer),
        };
        Group::of(strip).strips().filter(|peer| *peer != strip).all(|peer| is_had(&peer))
    }

    /// True if all that a superpage has can be had from the rest of its group.
    pub(crate) fn is_spare(&self, strip: Strip) -> bool {
        self.is_recoverable(strip) && !self.is_in_doubt(Group::of(strip))
    }

    /// True if a row of the group is in doubt.
    pub(crate) fn is_in_doubt(&self, group: Group) -> bool {
        let seals = self.segments[group.segment.index()].seals();
        seals.is_some_and(|seals| seals.doubtful_parity(group.number).next().is_some())
    }

    /// True if each superpage of a group lies on another failure domain, and is whole, and no row
    /// is in doubt.
    pub(crate) fn is_complete(&self, group: Group, neighbours: &Neighbours) -> bool {
        let is_whole = |strip: &Strip| self.place_of(*strip).is_none() || self.is_whole(*strip);
        let places = || group.strips().filter_map(|strip| self.place_of(strip));
        self.place_of(group.parity()).is_some()
            && group.strips().all(|strip| is_whole(&strip))
            && !self.is_in_doubt(group)
            && neighbours.are_apart(places().map(|place| place.blade))
    }

    /// Which blades fail together.
    pub(crate) fn neighbours(&self) -> Neighbours {
        let domains: Vec<_> = (0..MAX_BLADES).map(|at| self.domains(blade_index(at))).collect();
        // One without any fails only with the client, and takes all of a group.
        let meets = |one: usize, other: usize| {
            domains[one].iter().any(|domain| domains[other].contains(domain))
        };
        let mask = |one| (0..MAX_BLADES).filter(|other| meets(one, *other)).map(|it| 1 << it).sum();
        Neighbours(std::array::from_fn(mask))
    }

    /// Groups of a segment that have a member with memory.
    pub(crate) fn groups(&self, s: SegmentHandle) -> Vec<Group> {
        let segment = &self.segments[s.index()];
        if segment.state() == SegmentState::Free {
            return Vec::new();
        }
        let members = segment.map().iter().map(|(superpage, _)| Strip { strand: s, superpage });
        let mut groups: Vec<Group> = members.map(Group::of).collect();
        groups.dedup();
        groups
    }

    /// True if the strand has the parity of its segment.
    pub(crate) fn is_parity(&self, strand: SegmentHandle) -> bool {
        self.config.redundancy == Redundancy::Parity && strand.nth() > 0
    }

    /// Notes that a row's parity may not be what its members give. The caller holds the row.
    pub(crate) fn doubt(&self, row: Row) {
        let parity = row.page_of(row.group.parity());
        if let Some(seals) = self.segments[parity.segment.first().index()].seals() {
            seals.doubt_parity(parity.page);
        }
        self.spare.set(false);
    }

    pub(crate) fn place_of(&self, strip: Strip) -> Option<crate::map::Place> {
        self.segments[strip.strand.index()].map().get(strip.superpage)
    }
}

/// Adds a page to a sum: the exclusive or.
pub(crate) fn add(sum: &mut [u8; farpool_units::PAGE_BYTES], page: &[u8]) {
    sum.iter_mut().zip(page).for_each(|(sum, byte)| *sum ^= byte);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blades_are_apart_if_no_two_fail_together() {
        // The first and the third share a domain.
        let neighbours = Neighbours([0b101, 0b10, 0b101, 0b1000, 1 << 4, 1 << 5, 1 << 6, 1 << 7]);
        let are_apart =
            |blades: &[u8]| neighbours.are_apart(blades.iter().copied().map(BladeIndex));
        assert!(are_apart(&[]) && are_apart(&[0, 1, 3, 4, 7]) && are_apart(&[2, 1]));
        assert!(!are_apart(&[0, 1, 2]) && !are_apart(&[3, 4, 3]) && !are_apart(&[2, 0]));
        assert!(!are_apart(&[1, u8::MAX]), "what is nowhere");
    }

    #[test]
    fn a_group_is_of_neighbours_and_their_parity() {
        let segment = SegmentHandle(3);
        let of = |superpage| Group::of(Strip { strand: segment, superpage });
        assert_eq!(of(4), of(7));
        assert_ne!(of(3), of(4));
        for strip in of(5).strips() {
            assert_eq!(Group::of(strip), of(5), "{strip:?}");
        }
        assert_eq!(of(5).parity(), Strip { strand: segment.copy(1), superpage: 1 });
        let at = SegmentPage { segment, page: 5 * SUPERPAGE_PAGES + 17 };
        let row = Row::of(at);
        let pages: Vec<u32> = row.group.strips().map(|strip| row.page_of(strip).page).collect();
        assert_eq!(pages, [4, 5, 6, 7, 1].map(|superpage| superpage * SUPERPAGE_PAGES + 17));
    }
}
