//! Where in the program's address space far pages can be, and their states: a flat table from
//! address to superpage to page.
//!
//! The program's addresses are tiled in superpages of 16 MiB. Each that ever held a far page has a
//! descriptor with a dense id, and the id is the superpage's number (SMA) in every segment of the
//! process: a far region maps linearly onto a segment, as in Lim's SMA and dReDBox's MemPort table,
//! and there is no page table of ours to walk.
//!
//! Invariants: a descriptor is never freed or moved; an id belongs to one address for good; a
//! forked child inherits table and ids by copy-on-write.

pub mod copies;
pub(crate) mod drain;
pub mod forget;
pub mod frames;
pub mod layout;
pub mod maps;
pub mod moves;
pub(crate) mod order;
pub mod page;
pub mod registry;
pub mod way;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use farpool_units::{PAGE_BYTES, exactly};

use crate::space::frames::bits;
use crate::space::page::{PageCell, PageState};
use crate::sys;

/// Bytes of a superpage, the blade's unit of allocation.
pub const SUPERPAGE_BYTES: usize = SUPERPAGE_PAGES * PAGE_BYTES;
/// Pages of a superpage.
pub const SUPERPAGE_PAGES: usize = farpool_units::PAGES_PER_SUPERPAGE as usize;
#[allow(clippy::cast_possible_truncation)] // It is 4096.
const SUPERPAGE_PAGES_U32: u32 = SUPERPAGE_PAGES as u32;
/// Pages of a chunk, the unit of eviction: one UFFDIO_MOVE, one machine word of page bits.
pub const CHUNK_PAGES: usize = 64;
/// Chunks of a superpage.
pub const CHUNKS: usize = SUPERPAGE_PAGES / CHUNK_PAGES;
/// User addresses have 47 bits; 57-bit addresses are only given to programs that ask for them, and
/// memory there stays local.
const ADDRESS_BITS: u32 = 47;
const TABLE_ENTRIES: usize = 1 << (ADDRESS_BITS - 24);
/// Far superpages of one process: 4 TiB. Memory beyond stays local.
pub const MAX_SUPERPAGES: usize = 1 << 18;
/// Descriptors mapped at a time.
const SLAB: usize = 16;
/// [`Superpage::trays`] of a chunk with no page in the victim buffer.
pub const NO_TRAY: u16 = u16::MAX;

/// The pages of one 16 MiB of the program's addresses. About 1.3 bytes a page.
#[repr(C)]
#[derive(Debug)]
pub struct Superpage {
    pub pages: [PageCell; SUPERPAGE_PAGES],
    /// Pages that were wanted back soon after they were moved out: spared once by second chance.
    pub hot: [AtomicU64; CHUNKS],
    /// Pages that came back since uses are counted.
    pub used: [AtomicU64; CHUNKS],
    /// For each chunk the tray of the victim buffer that holds pages of it.
    pub trays: [AtomicU16; CHUNKS],
    /// Pages in phase Far, and those being fetched from there.
    pub far_pages: AtomicU32,
    /// Pages of which a layer holds a copy though they are here.
    pub copies: AtomicU32,
    /// For each layer one bit: this superpage has memory there.
    pub allocated: AtomicU8,
    id: AtomicU32,
    base: AtomicU64,
}

impl Superpage {
    /// Its number in every segment.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// Whether no page needs the memory that this superpage has on a blade.
    pub fn is_empty(&self) -> bool {
        self.far_pages.load(Ordering::SeqCst) == 0 && self.copies.load(Ordering::SeqCst) == 0
    }

    /// Uses are counted anew from here.
    pub fn forget_uses(&self) {
        self.used.iter().for_each(|used| used.store(0, Ordering::Relaxed));
    }

    /// Pages that came back since uses are counted, and are out again.
    pub fn used_and_away(&self) -> u64 {
        let chunks = self.used.iter().zip(self.pages.chunks_exact(CHUNK_PAGES));
        let of_chunk = |(used, pages): (&AtomicU64, &[PageCell])| {
            let is_away = |index: &usize| pages[*index].load().phase().is_away();
            bits(used.load(Ordering::Relaxed)).filter(is_away).count() as u64
        };
        chunks.map(of_chunk).sum()
    }

    /// A page whose state was `state` has given up its copy, if it had one.
    pub fn give_up_copy(&self, state: PageState) {
        if state.has_copy() {
            let before = self.copies.fetch_sub(1, Ordering::SeqCst);
            assert_ne!(before, 0, "a copy is given up once");
        }
    }

    /// A page that was far, or was being fetched from there, is so no longer. It was counted before
    /// anybody could see it as far; with too low a count the blade's memory would be given back
    /// while pages are there.
    pub fn leave_blade(&self) {
        let before = self.far_pages.fetch_sub(1, Ordering::SeqCst);
        assert_ne!(before, 0, "a page leaves its blade once");
    }

    /// Address of its first page in the program.
    pub fn base(&self) -> usize {
        exactly(self.base.load(Ordering::Relaxed))
    }
}

/// One page of the program.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub superpage: &'static Superpage,
    pub index: usize,
}

impl Page {
    pub fn address(self) -> usize {
        self.superpage.base() + self.index * PAGE_BYTES
    }

    pub fn cell(self) -> &'static PageCell {
        &self.superpage.pages[self.index]
    }

    pub fn chunk(self) -> usize {
        self.index / CHUNK_PAGES
    }

    /// The page's bit in its chunk's words.
    pub fn bit(self) -> u64 {
        1 << (self.index % CHUNK_PAGES)
    }

    /// Notes that the page came back to the program; says whether it is the first time since uses are counted.
    pub fn mark_used(self) -> bool {
        let before = self.superpage.used[self.chunk()].fetch_or(self.bit(), Ordering::Relaxed);
        before & self.bit() == 0
    }

    /// Its number in every segment.
    pub fn segment_page(self) -> u32 {
        self.superpage.id() * SUPERPAGE_PAGES_U32 + exactly::<u32, _>(self.index)
    }
}

/// The table.
#[derive(Debug)]
pub struct Space {
    by_address: &'static [AtomicPtr<Superpage>],
    by_id: &'static [AtomicPtr<Superpage>],
    count: AtomicU32,
    spare: Mutex<Vec<&'static Superpage>>,
}

impl Space {
    /// Reserves the table: 66 MiB of addresses, of which only touched pages take memory.
    pub fn new() -> Result<Space, std::io::Error> {
        Ok(Space {
            by_address: pointer_table(TABLE_ENTRIES)?,
            by_id: pointer_table(MAX_SUPERPAGES)?,
            count: AtomicU32::new(0),
            spare: Mutex::new(Vec::with_capacity(SLAB)),
        })
    }

    /// Superpages known so far; ids are below it.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) as usize
    }

    /// The superpage of an id below [`Space::count`].
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

    /// As [`Space::page`], making the superpage known. None when the table is full.
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
        let id = self.count();
        let by_id = self.by_id.get(id)?;
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
        self.count.store(exactly(id + 1), Ordering::Release);
        Some(())
    }
}

/// The pages of a range that are in the chunk at `start`, one bit each.
pub fn chunk_bits(range: &Range<usize>, start: usize) -> u64 {
    let page = |address: usize| (address.saturating_sub(start) / PAGE_BYTES).min(CHUNK_PAGES);
    (page(range.start)..page(range.end)).fold(0, |bits, page| bits | 1 << page)
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

fn descriptor(entry: &AtomicPtr<Superpage>) -> Option<&'static Superpage> {
    // SAFETY: an entry is null or points to a descriptor of a slab, which is initialised before it is
    // published, lives for ever, and consists of atomics.
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
        // SAFETY: inside the fresh mapping, aligned (the size is a multiple of the alignment), zeroed,
        // which is a valid Superpage, and never unmapped.
        spare.push(unsafe { &*pointer });
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::page::Phase;

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
