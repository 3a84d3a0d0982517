//! What a guest of Firecracker's still lacks, and what each of its faults gets. Pure.
//!
//! Invariants:
//! - a page of the image is owed until it is in the guest or the guest has dropped it; only while
//!   it is owed may the image's bytes be put there;
//! - a page that is not owed reads as zeros when it is missing: the image has none, or the guest
//!   had it and has dropped it since.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::page_set::PageSet;
use crate::wire::firecracker::Layout;

/// What a fault needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// This page of the image is to be fetched.
    Fetch(u32),
    /// It is being fetched already.
    Nothing,
    /// This page is to be filled with zeros.
    Zero(u32),
}

/// What is to be put where a page was fetched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    Copy {
        address: usize,
    },
    Zero {
        address: usize,
    },
    /// The guest has dropped it, and nobody waits for it.
    Nothing,
}

/// One guest: its regions, and what it lacks.
#[derive(Debug)]
pub(crate) struct Guest {
    layout: Layout,
    owed: PageSet,
    /// Pages under way, and whether a thread waits for them.
    fetching: BTreeMap<u32, bool>,
    /// Pages before it were begun to be fetched beforehand.
    cursor: u32,
}

impl Guest {
    /// A guest that lacks all pages of the image.
    pub(crate) fn new(layout: Layout, present: &PageSet) -> Guest {
        let mut owed = PageSet::none_of(present.end());
        for region in layout.regions() {
            let end = region.first_page + region.pages;
            let mut next = present.first_from(region.first_page);
            while let Some(page) = next.filter(|page| *page < end) {
                owed.add(page);
                next = present.first_from(page + 1);
            }
        }
        Guest { layout, owed, fetching: BTreeMap::new(), cursor: 0 }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Pages of the image that it lacks.
    pub(crate) fn owed_pages(&self) -> u32 {
        self.owed.count()
    }

    /// True once nothing of the image is missing or under way.
    pub(crate) fn is_whole(&self) -> bool {
        self.owed.count() == 0 && self.fetching.is_empty()
    }

    /// A thread waits for the page at this address. None if it lies in no region.
    pub(crate) fn fault(&mut self, address: usize) -> Option<Need> {
        let page = self.layout.page_at(address)?;
        if let Some(is_awaited) = self.fetching.get_mut(&page) {
            *is_awaited = true;
            return Some(Need::Nothing);
        }
        if !self.owed.has(page) {
            return Some(Need::Zero(page));
        }
        self.fetching.insert(page, true);
        Some(Need::Fetch(page))
    }

    /// The guest drops a range of addresses.
    pub(crate) fn removed(&mut self, start: usize, end: usize) {
        let Guest { layout, owed, .. } = self;
        for (first, count) in layout.runs(start, end) {
            (first..first + count).for_each(|page| {
                owed.remove(page);
            });
        }
    }

    /// The next page to fetch before anybody asks; it counts as under way.
    pub(crate) fn next_beforehand(&mut self) -> Option<u32> {
        loop {
            let page = self.owed.first_from(self.cursor)?;
            self.cursor = page + 1;
            if let Entry::Vacant(place) = self.fetching.entry(page) {
                place.insert(false);
                return Some(page);
            }
        }
    }

    /// What is to be put where a page was fetched for, by what has happened until now.
    pub(crate) fn fill(&self, page: u32) -> Fill {
        let is_awaited = self.fetching.get(&page).copied().unwrap_or(true);
        match self.layout.address_of(page) {
            Some(address) if self.owed.has(page) => Fill::Copy { address },
            Some(address) if is_awaited => Fill::Zero { address },
            _ => Fill::Nothing,
        }
    }

    /// The page is there, or nobody needs it.
    pub(crate) fn filled(&mut self, page: u32) {
        self.owed.remove(page);
        self.fetching.remove(&page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::firecracker::Mapping;

    const START: usize = 0x10_0000;

    /// Eight pages, of which the image has the even ones.
    fn guest() -> Guest {
        let mapping = Mapping {
            base_host_virt_addr: START as u64,
            size: 8 * 4096,
            offset: 0,
            page_size: Some(4096),
            page_size_kib: None,
        };
        let mut present = PageSet::none_of(10);
        (0..10).step_by(2).for_each(|page| present.add(page));
        Guest::new(Layout::check(&[mapping], 10 * 4096).expect("right"), &present)
    }

    fn at(page: usize) -> usize {
        START + page * 4096
    }

    #[test]
    fn a_page_is_fetched_once_and_then_there() {
        let mut guest = guest();
        assert_eq!(guest.owed_pages(), 4);
        assert_eq!(guest.fault(at(2)), Some(Need::Fetch(2)));
        assert_eq!(guest.fault(at(2) + 8), Some(Need::Nothing));
        assert_eq!(guest.fill(2), Fill::Copy { address: at(2) });
        guest.filled(2);
        assert_eq!(guest.fault(at(2)), Some(Need::Zero(2)));
        assert_eq!(guest.fault(at(3)), Some(Need::Zero(3)));
        assert_eq!((guest.fault(at(8)), guest.fault(0)), (None, None));
    }

    #[test]
    fn what_the_guest_dropped_is_zero_also_if_it_was_under_way() {
        let mut guest = guest();
        assert_eq!(guest.fault(at(4)), Some(Need::Fetch(4)));
        guest.removed(at(3), at(7));
        assert_eq!(guest.fill(4), Fill::Zero { address: at(4) });
        guest.filled(4);
        assert_eq!(guest.fault(at(6)), Some(Need::Zero(6)));
        assert_eq!(guest.owed_pages(), 2);
    }

    #[test]
    fn all_is_fetched_beforehand_once() {
        let mut guest = guest();
        assert_eq!(guest.fault(at(2)), Some(Need::Fetch(2)));
        assert_eq!(guest.next_beforehand(), Some(0));
        assert_eq!(guest.next_beforehand(), Some(4));
        guest.removed(at(4), at(5));
        assert_eq!(guest.fill(4), Fill::Nothing);
        assert_eq!(guest.fault(at(4)), Some(Need::Nothing));
        assert_eq!(guest.fill(4), Fill::Zero { address: at(4) });
        assert_eq!((guest.next_beforehand(), guest.next_beforehand()), (Some(6), None));
        [0, 2, 4].into_iter().for_each(|page| guest.filled(page));
        assert!(!guest.is_whole());
        guest.filled(6);
        assert!(guest.is_whole());
    }
}
