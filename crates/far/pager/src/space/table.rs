//! The table from addresses to superpages.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use farpool_units::{PAGE_BYTES, exactly};

use crate::space::superpage::{Page, Superpage};
use crate::space::units::{MAX_SUPERPAGES, NO_TRAY, SUPERPAGE_BYTES, SUPERPAGE_PAGES};
use crate::sys;

/// The table.
#[derive(Debug)]
pub struct Space {
    by_address: &'static [AtomicPtr<Superpage>],
    by_id: &'static [AtomicPtr<Superpage>],
    count: AtomicU32,
    spare: Mutex<Vec<&'static Superpage>>,
    /// The memory that has the first ids, in order; see [`Space::number_first`].
    first: OnceLock<Range<usize>>,
}

impl Space {
    /// Reserves the table: 66 MiB of addresses, of which only touched pages take memory.
    pub fn new() -> Result<Space, std::io::Error> {
        Ok(Space {
            by_address: pointer_table(TABLE_ENTRIES)?,
            by_id: pointer_table(MAX_SUPERPAGES)?,
            count: AtomicU32::new(0),
            spare: Mutex::new(Vec::with_capacity(SLAB)),
            first: OnceLock::new(),
        })
    }

    /// Keeps the first `superpages` ids for a range that is told later. False: some are taken.
    pub fn reserve(&self, superpages: usize) -> bool {
        let Ok(_alone) = self.spare.lock() else { return false };
        let is_free = self.count() == 0 && superpages <= MAX_SUPERPAGES;
        if is_free {
            self.count.store(exactly(superpages), Ordering::Release);
        }
        is_free
    }

    /// Gives the reserved ids to the superpages of this range, in the order of their addresses:
    /// wherever it lies in another process, they have the same ids there. False: another range has
    /// them.
    pub fn number_first(&self, range: Range<usize>) -> bool {
        self.first.set(range).is_ok()
    }

    /// All ids are below it.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) as usize
    }

    /// The superpage of an id. None if it was never far.
    pub fn by_id(&self, id: usize) -> Option<&'static Superpage> {
        descriptor(self.by_id.get(id)?)
    }

    /// The superpage at an address, if it was ever far.
    pub fn find(&self, address: usize) -> Option<&'static Superpage> {
        descriptor(self.by_address.get(address / SUPERPAGE_BYTES)?)
    }

    /// The page at an address, if its superpage was ever far.
    pub fn page(&self, address: usize) -> Option<Page> {
        let superpage = self.find(address)?;
        Some(Page { superpage, index: address % SUPERPAGE_BYTES / PAGE_BYTES })
    }

    /// As [`Space::page`], but adds the superpage if it is unknown. None when the table is full.
    pub fn page_or_new(&self, address: usize) -> Option<Page> {
        if let Some(page) = self.page(address) {
            return Some(page);
        }
        self.add(address & !(SUPERPAGE_BYTES - 1))?;
        self.page(address)
    }

    fn add(&self, base: usize) -> Option<()> {
        let entry = self.by_address.get(base / SUPERPAGE_BYTES)?;
        assert!(base.is_multiple_of(SUPERPAGE_BYTES), "{base:#x} is the start of no superpage");
        let mut spare = self.spare.lock().ok()?;
        if descriptor(entry).is_some() {
            return Some(());
        }
        let of_first = self.first.get().filter(|first| first.contains(&base));
        let id = match of_first {
            Some(first) => (base - first.start) / SUPERPAGE_BYTES,
            None => self.count(),
        };
        let by_id = self.by_id.get(id)?;
        assert!(descriptor(by_id).is_none(), "superpage {id} is at two addresses");
        if spare.is_empty() {
            grow(&mut spare)?;
        }
        let superpage = spare.pop()?;
        superpage.id.store(exactly(id), Ordering::Relaxed);
        superpage.base.store(base as u64, Ordering::Relaxed);
        superpage.trays.iter().for_each(|tray| tray.store(NO_TRAY, Ordering::Relaxed));
        let pointer = std::ptr::from_ref(superpage).cast_mut();
        by_id.store(pointer, Ordering::Release);
        entry.store(pointer, Ordering::Release);
        if of_first.is_none() {
            self.count.store(exactly(id + 1), Ordering::Release);
        }
        Some(())
    }
}

/// The pages of a range whose superpages are known, in order.
pub fn known_pages(space: &Space, start: usize, end: usize) -> impl Iterator<Item = Page> + '_ {
    known_superpages(space, start, end).flat_map(move |superpage| {
        let first = start.saturating_sub(superpage.base()) / PAGE_BYTES;
        let last = (end - superpage.base()).div_ceil(PAGE_BYTES).min(SUPERPAGE_PAGES);
        (first..last).map(move |index| Page { superpage, index })
    })
}

/// The known superpages that a range touches, in order.
pub fn known_superpages(
    space: &Space,
    start: usize,
    end: usize,
) -> impl Iterator<Item = &'static Superpage> + '_ {
    let first = start / SUPERPAGE_BYTES;
    let last = end.div_ceil(SUPERPAGE_BYTES);
    (first..last).filter_map(move |number| space.find(number * SUPERPAGE_BYTES))
}

pub(crate) fn descriptor(entry: &AtomicPtr<Superpage>) -> Option<&'static Superpage> {
    // SAFETY: an entry is null or points to a descriptor of a slab, which is initialised before it
    // is published, lives for ever, and consists of atomics.
    unsafe { entry.load(Ordering::Acquire).as_ref() }
}

fn pointer_table(entries: usize) -> Result<&'static [AtomicPtr<Superpage>], std::io::Error> {
    let base = sys::map_local(entries * size_of::<AtomicPtr<Superpage>>())?;
    // SAFETY: the mapping is fresh, zeroed (null pointers), page-aligned and never unmapped.
    Ok(unsafe { std::slice::from_raw_parts(base as *const AtomicPtr<Superpage>, entries) })
}

fn grow(spare: &mut Vec<&'static Superpage>) -> Option<()> {
    let base = sys::map_local(SLAB * size_of::<Superpage>()).ok()?;
    for index in (0..SLAB).rev() {
        let pointer = (base + index * size_of::<Superpage>()) as *const Superpage;
        // SAFETY: inside the fresh mapping, aligned (the size is a multiple of the alignment),
        // zeroed, which is a valid Superpage, and never unmapped.
        spare.push(unsafe { &*pointer });
    }
    Some(())
}

/// User addresses have 47 bits; 57-bit addresses are given only to programs that ask for them, and
/// memory there stays local.
const ADDRESS_BITS: u32 = 47;

const TABLE_ENTRIES: usize = 1 << (ADDRESS_BITS - 24);

/// Descriptors mapped at a time.
const SLAB: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::page::{PageState, Phase};

    #[test]
    fn addresses_and_ids_lead_to_the_same_page() {
        let space = Space::new().expect("space");
        let address = 0x7f12_3456_7000;
        assert!(space.page(address).is_none());
        let page = space.page_or_new(address).expect("new");
        assert_eq!(page.address(), address);
        page.cell().store(PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(2));
        let other = space.page_or_new(0x1000).expect("new");
        assert_eq!((page.superpage.id(), other.superpage.id(), space.count()), (0, 1, 2));
        let again = space.by_id(0).expect("known");
        assert_eq!(again.pages[page.index].load().layer(), 2);
        assert_eq!(other.segment_page(), 4096 + 1);
    }

    #[test]
    fn reserved_ids_are_those_of_the_range_wherever_it_lies() {
        let space = Space::new().expect("space");
        assert!(space.reserve(3) && space.count() == 3 && space.by_id(1).is_none());
        let id = |number: usize| {
            space.page_or_new(number * SUPERPAGE_BYTES).expect("new").superpage.id()
        };
        assert_eq!(id(70), 3, "others come after it");
        assert!(space.number_first(50 * SUPERPAGE_BYTES..53 * SUPERPAGE_BYTES));
        assert!(!space.number_first(60 * SUPERPAGE_BYTES..63 * SUPERPAGE_BYTES));
        assert_eq!((id(52), id(50), id(53), id(51)), (2, 0, 4, 1));
        assert_eq!(space.count(), 5);
        assert!(!space.reserve(1), "ids are taken");
    }

    #[test]
    fn pages_that_came_back_and_left_again_are_counted() {
        let space = Space::new().expect("space");
        let page_at = |number| space.page_or_new(number * PAGE_BYTES).expect("new");
        for (number, phase) in [(4096, Phase::Far), (4097, Phase::Victim), (4200, Phase::Resident)]
        {
            let page = page_at(number);
            page.cell().store(PageState::UNTOUCHED.with_phase(phase));
            assert!(page.mark_used() && !page.mark_used());
        }
        // It never came back.
        page_at(4300).cell().store(PageState::UNTOUCHED.with_phase(Phase::Far));
        let superpage = page_at(4096).superpage;
        assert_eq!(superpage.used_and_away(), 2);
        superpage.forget_uses();
        assert_eq!(superpage.used_and_away(), 0);
    }

    #[test]
    fn ranges_visit_known_pages_only() {
        let space = Space::new().expect("space");
        space.page_or_new(SUPERPAGE_BYTES).expect("new");
        space.page_or_new(3 * SUPERPAGE_BYTES).expect("new");
        let start = 2 * SUPERPAGE_BYTES - 2 * PAGE_BYTES;
        let end = 3 * SUPERPAGE_BYTES + PAGE_BYTES;
        let pages: Vec<usize> =
            known_pages(&space, start, end).map(|page| page.address() / PAGE_BYTES).collect();
        assert_eq!(pages, vec![2 * 4096 - 2, 2 * 4096 - 1, 3 * 4096]);
    }

    #[test]
    fn addresses_beyond_the_table_stay_local() {
        let space = Space::new().expect("space");
        assert!(space.page_or_new(1 << 50).is_none());
    }

    #[test]
    fn the_table_costs_under_two_bytes_a_page() {
        assert!(size_of::<Superpage>() < 2 * SUPERPAGE_PAGES);
    }
}
