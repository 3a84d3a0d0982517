//! A superpage on its way from one blade to another, page by page, while the program goes on.
//!
//! Every page is in one of four states. *Old*: its bytes are where the superpage was. *Copying*:
//! the mover is copying it; it may be read at the old place and must not be written. *Copied*: its
//! bytes are at both places. *New*: its bytes are only where the superpage goes. A lane that writes
//! a page marks it new first and sends it to the new place, so that the mover leaves it alone.
//!
//! Invariants:
//! - Only old pages are copied, and by the first copy nothing that was in flight before the record
//!   was published is in flight any more.
//! - A page goes back from new to old only by a new write, after its new blade was lost
//!   ([`Record::turn_back`]).
//! - After turning back a copied page may be old again: it has not been written since.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};

use crate::SUPERPAGE_PAGES;
use crate::map::Place;
use crate::types::Access;

/// Superpages that can be on their way at once. The one mover moves one; the others are those whose
/// move ended with the loss of a blade, which stay half here and half there until their memory is
/// freed. When all are taken nothing more is moved.
pub(crate) const MAX_RECORDS: usize = 8;

const OLD: u8 = 0;
const COPYING: u8 = 1;
const COPIED: u8 = 2;
const NEW: u8 = 3;

/// Where a page is to be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Old,
    New,
    /// To be asked again soon: the mover is copying the page.
    Soon,
}

/// One superpage being moved.
#[derive(Debug)]
pub(crate) struct Record {
    /// Where it goes, as a word of [`Place`]; 0 while the record is free.
    target: AtomicU64,
    /// The new blade is lost: writes go to the old place again.
    turned: AtomicBool,
    /// There is no old place: a copy is made of another one.
    is_making: AtomicBool,
    pages: Box<[AtomicU8]>,
}

impl Record {
    pub(crate) fn new() -> Self {
        Record {
            target: AtomicU64::new(0),
            turned: AtomicBool::new(false),
            is_making: AtomicBool::new(false),
            pages: (0..SUPERPAGE_PAGES).map(|_| AtomicU8::new(OLD)).collect(),
        }
    }

    /// Prepares a free record, which must be published after this: of a superpage that moves, or of
    /// a copy that is made of another one.
    pub(crate) fn begin(&self, target: Place, is_making: bool) {
        assert!(self.is_free(), "a record is of one superpage");
        self.pages.iter().for_each(|page| page.store(OLD, Relaxed));
        self.turned.store(false, Relaxed);
        self.is_making.store(is_making, Relaxed);
        self.target.store(target.word(), Release);
    }

    /// Frees the record; no lane may be able to find it any more.
    pub(crate) fn end(&self) {
        let before = self.target.swap(0, AcqRel);
        assert_ne!(before, 0, "a record ends once");
    }

    /// True if what is old is at no place of this copy.
    pub(crate) fn is_making(&self) -> bool {
        self.is_making.load(Relaxed)
    }

    pub(crate) fn is_free(&self) -> bool {
        self.target.load(Acquire) == 0
    }

    pub(crate) fn target(&self) -> Option<Place> {
        Place::of_word(self.target.load(Acquire))
    }

    /// Where this page (its number in the superpage) is to be read, or is going to be written.
    pub(crate) fn side(&self, page: u32, access: Access) -> Side {
        let Some(state) = self.pages.get(page as usize) else {
            return Side::Old;
        };
        loop {
            let now = state.load(Acquire);
            match (now, access) {
                (OLD | COPYING, Access::Read) => return Side::Old,
                (_, Access::Read) => return Side::New,
                (COPYING, Access::Write) => return Side::Soon,
                (NEW, Access::Write) if !self.turned.load(Acquire) => return Side::New,
                (_, Access::Write) => {
                    let turned = self.turned.load(Acquire);
                    let (next, side) = if turned { (OLD, Side::Old) } else { (NEW, Side::New) };
                    if state.compare_exchange(now, next, AcqRel, Acquire).is_ok() {
                        return side;
                    }
                }
            }
        }
    }

    /// Marks up to `limit` old pages from `from` on as being copied. Calls `each` with their
    /// numbers and returns where to continue. Of a page for which `is_written` is false there is
    /// nothing to be copied: it is at the new place as much as at the old one.
    pub(crate) fn claim(
        &self,
        from: u32,
        limit: usize,
        is_written: impl Fn(u32) -> bool,
        mut each: impl FnMut(u32),
    ) -> u32 {
        let (mut page, mut claimed) = (from, 0);
        while page < SUPERPAGE_PAGES && claimed < limit {
            let state = &self.pages[page as usize];
            if state.compare_exchange(OLD, COPYING, AcqRel, Acquire).is_ok() {
                // A lane that writes it waits until it is known to be copied.
                match is_written(page) {
                    true => {
                        each(page);
                        claimed += 1;
                    }
                    false => self.arrived(page),
                }
            }
            page += 1;
        }
        page
    }

    /// The same of one page. True if it is in the mover's hands now.
    pub(crate) fn claim_one(&self, page: u32, is_written: impl Fn(u32) -> bool) -> bool {
        let state = &self.pages[page as usize];
        if state.compare_exchange(OLD, COPYING, AcqRel, Acquire).is_err() {
            return false;
        }
        let is_to_be_copied = is_written(page);
        if !is_to_be_copied {
            self.arrived(page);
        }
        is_to_be_copied
    }

    /// Records that the page was copied.
    pub(crate) fn arrived(&self, page: u32) {
        let before = self.pages[page as usize].swap(COPIED, AcqRel);
        assert_eq!(before, COPYING, "page {page} was in the mover's hands");
    }

    /// Records that the page could not be copied.
    pub(crate) fn let_go(&self, page: u32) {
        let before = self.pages[page as usize].swap(OLD, AcqRel);
        assert_eq!(before, COPYING, "page {page} was in the mover's hands");
    }

    /// The new blade failed: writes from now on go to the old place.
    pub(crate) fn turn_back(&self) {
        self.turned.store(true, Release);
    }

    /// Makes copied pages old again; called after turning back, once no lane can still think
    /// otherwise. True if all pages are old, so that the record is no longer needed. Pages that are
    /// only at the new place share its fate.
    pub(crate) fn restore(&self) -> bool {
        for page in &self.pages {
            let _written_meanwhile = page.compare_exchange(COPIED, OLD, AcqRel, Acquire);
        }
        self.pages.iter().all(|page| page.load(Acquire) == OLD)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::BladeIndex;

    fn begun() -> Record {
        let record = Record::new();
        record.begin(Place::at(BladeIndex(3), 1, 9), false);
        record
    }

    #[test]
    fn pages_are_read_where_they_are_and_written_where_they_go() {
        let record = begun();
        assert_eq!(record.side(5, Access::Read), Side::Old);
        assert_eq!(record.side(5, Access::Write), Side::New);
        assert_eq!(record.side(5, Access::Read), Side::New);
        let mut claimed = Vec::new();
        assert_eq!(record.claim(4, 2, |_| true, |page| claimed.push(page)), 7);
        assert_eq!(claimed, [4, 6], "what was written meanwhile is not copied");
        assert_eq!(record.side(4, Access::Read), Side::Old);
        assert_eq!(record.side(4, Access::Write), Side::Soon);
        record.arrived(4);
        assert_eq!(record.side(4, Access::Write), Side::New);
        record.let_go(6);
        assert_eq!(record.side(6, Access::Read), Side::Old);
    }

    #[test]
    fn a_page_that_was_never_written_is_at_both_places() {
        let record = begun();
        let mut claimed = Vec::new();
        let next = record.claim(0, 2, |page| page % 3 == 1, |page| claimed.push(page));
        assert_eq!((next, claimed), (5, vec![1, 4]));
        assert_eq!(record.side(0, Access::Read), Side::New);
        assert_eq!(record.side(1, Access::Read), Side::Old);
        record.turn_back();
        record.restore();
        assert_eq!(record.side(0, Access::Read), Side::Old);
    }

    #[test]
    fn after_turning_back_only_new_writes_bring_pages_back() {
        let record = begun();
        assert_eq!(record.side(1, Access::Write), Side::New);
        record.turn_back();
        assert_eq!(record.side(1, Access::Read), Side::New, "the old bytes would be wrong");
        assert_eq!(record.side(2, Access::Write), Side::Old);
        assert_eq!(record.side(1, Access::Write), Side::Old);
        assert_eq!(record.side(1, Access::Read), Side::Old);
    }

    #[test]
    fn what_was_only_copied_is_as_before_after_turning_back() {
        let record = begun();
        record.claim(0, 3, |_| true, |_| {});
        (0..3).for_each(|page| record.arrived(page));
        assert_eq!(record.side(1, Access::Write), Side::New);
        record.turn_back();
        assert!(!record.restore(), "page 1 has bytes that the old place lacks");
        assert_eq!(record.side(0, Access::Read), Side::Old);
        assert_eq!(record.side(1, Access::Read), Side::New);
        assert_eq!(record.side(1, Access::Write), Side::Old);
        assert!(record.restore());
    }

    #[test]
    fn a_page_is_either_copied_or_written_by_a_lane_first() {
        let record = begun();
        let written = AtomicU32::new(0);
        let copied = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for page in 0..SUPERPAGE_PAGES {
                        let read = record.side(page, Access::Read);
                        if read == Side::Old && record.side(page, Access::Write) == Side::New {
                            written.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
            scope.spawn(|| {
                let mut from = 0;
                while from < SUPERPAGE_PAGES {
                    let mut pages = Vec::new();
                    from = record.claim(from, 64, |_| true, |page| pages.push(page));
                    for page in pages {
                        assert_eq!(record.side(page, Access::Write), Side::Soon);
                        record.arrived(page);
                        copied.fetch_add(1, Relaxed);
                    }
                }
            });
        });
        assert!(copied.load(Relaxed) <= SUPERPAGE_PAGES);
        let all_new = (0..SUPERPAGE_PAGES).all(|page| record.side(page, Access::Read) == Side::New);
        assert!(all_new, "every page was copied or written");
    }
}
