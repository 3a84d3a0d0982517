//! What a forked child does with the states it inherits, before its memory is registered.
//!
//! The kernel copies the address space, including the table of states, one mapping after the other;
//! what is already copied no longer changes until the end. When fork is called the gate is shut, no
//! request is under way, and only faults of the forking thread are served, which waits for its own
//! faults. But a message of it may be stale: read by a fault thread that was then preempted, while
//! another one served the page. Served in the middle of a fork, it leaves states that are not of
//! the same moment as the page table. The page table decides then: a page arrives before its
//! mapping is copied, or after all of them.

use std::sync::atomic::Ordering::SeqCst;

use farpool_uffd::{PageRange, category};
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::Core;
use crate::space::page::{PageState, Phase};
use crate::space::registry::Region;
use crate::space::{Page, Space, known_pages, moves};
use crate::{Pager, sys};

/// Makes the states agree with the page table.
pub fn settle_inherited(pager: &Pager, core: &Core) {
    let mut registry = pager.lock_registry();
    for region in registry.take_unshared() {
        known_pages(core.space, region.start, region.end)
            .for_each(|page| page.cell().store(PageState::UNTOUCHED));
    }
    settle(core.space, |page| is_present(core, page));
    registry.iter().for_each(|region| drop_strays(core, region));
}

fn is_present(core: &Core, page: Page) -> bool {
    let start = page.address();
    moves::first_occupied(&core.pagemap, start, start + PAGE_BYTES).is_some()
}

/// Drops pages that are far and present. Until the child's handler runs nothing is registered, and
/// glibc clears the thread-specific data of the parent's other threads: where that lies in far
/// memory, a page of zeros now hides the neighbours' contents.
fn drop_strays(core: &Core, region: Region) {
    let mut ranges = [PageRange::default(); 64];
    let mut from = region.start;
    while from < region.end {
        let found = core.pagemap.scan(from, region.end, category::OCCUPIED, &mut ranges);
        let (found, walked) = match found {
            Ok((found, walked)) if walked > from => (found, walked),
            Ok(_) => fail_closed(&format!("the page map ends at {from:#x}")),
            Err(error) => fail_closed(&format!("the page map cannot be read: {error}")),
        };
        for range in found {
            known_pages(core.space, range.first(), range.last())
                .filter(|page| page.cell().load().phase() == Phase::Far)
                .for_each(drop_page);
        }
        from = walked;
    }
}

fn drop_page(page: Page) {
    if let Err(error) = sys::advise(page.address(), PAGE_BYTES, libc::MADV_DONTNEED) {
        fail_closed(&format!("page {:#x} cannot be dropped: {error}", page.address()));
    }
}

/// Ends the phase Fetching, whose owners are not in this process: a page that had not arrived is
/// far again if it was far; any other is the program's (a missing one of those reads as zeros, as
/// before). Recounts far pages and copies.
fn settle(space: &Space, is_present: impl Fn(Page) -> bool) {
    for superpage in (0..space.count()).filter_map(|id| space.by_id(id)) {
        let (mut far_pages, mut copies) = (0, 0);
        for index in 0..superpage.pages.len() {
            let page = Page { superpage, index };
            let mut state = page.cell().load();
            if state.phase() == Phase::Fetching {
                let is_far = state.was_far() && !is_present(page);
                state = state.with_phase(if is_far { Phase::Far } else { Phase::Resident });
                page.cell().store(state);
            }
            far_pages += u32::from(state.phase() == Phase::Far);
            copies += u32::from(state.has_copy());
        }
        // Only differing counts are written: the memory is shared with the parent.
        for (counter, counted) in [(&superpage.far_pages, far_pages), (&superpage.copies, copies)] {
            if counter.load(SeqCst) != counted {
                counter.store(counted, SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_on_its_way_is_where_the_page_table_has_it() {
        let space = Space::new().expect("space");
        let far = PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(2);
        let resident = far.with_phase(Phase::Resident);
        let page =
            |number: usize| space.page_or_new((1 << 30) + number * PAGE_BYTES).expect("page");
        let before = [
            far,
            far.with_phase(Phase::Fetching),
            far.with_phase(Phase::Fetching),
            PageState::UNTOUCHED.with_phase(Phase::Fetching),
            resident.with_phase(Phase::Fetching),
            PageState::UNTOUCHED,
            resident.with_copy(true),
        ];
        for (number, state) in before.into_iter().enumerate() {
            page(number).cell().store(state);
        }
        page(0).superpage.far_pages.store(7, SeqCst);
        let arrived = page(2).address();
        settle(&space, |page| page.address() == arrived);
        let zeros = PageState::UNTOUCHED.with_phase(Phase::Resident);
        let after: Vec<PageState> = (0..before.len()).map(|n| page(n).cell().load()).collect();
        let untouched = PageState::UNTOUCHED;
        assert_eq!(after, [far, far, resident, zeros, resident, untouched, before[6]]);
        let superpage = page(0).superpage;
        assert_eq!((superpage.far_pages.load(SeqCst), superpage.copies.load(SeqCst)), (2, 1));
    }
}
