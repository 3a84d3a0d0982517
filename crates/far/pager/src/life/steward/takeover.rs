//! The steward of a forked child begins: the child's mappings tell which of the pages that its
//! parent's pager handed over it still has.
//!
//! A page is the child's only if its mapping was registered with the userfaultfd that came with the
//! fork: memory that the parent kept from its children (MADV_DONTFORK) is not there, and the
//! child's later mappings may lie at the same addresses. So before new mappings are registered one
//! far page of each is brought in, which the kernel refuses where the mapping is not registered.

use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::Mover;
use crate::life::activation::{learn, register};
use crate::life::attached::Attached;
use crate::life::steward::state::Steward;
use crate::space::maps::Eligible;
use crate::space::page::Phase;
use crate::space::units::SUPERPAGE_BYTES;
use crate::space::way::Way;
use crate::space::{Page, known_pages};

impl Steward {
    /// Fills the registry, registers new mappings, and forgets far pages that the child does not
    /// have. Faults are served already; nothing is moved out yet.
    pub(crate) fn adopt_mappings(&mut self, attached: &'static Attached) {
        let mappings = self.settled_mappings(attached);
        for superpage in (0..self.core.space.count()).filter_map(|id| self.core.space.by_id(id)) {
            let base = superpage.base();
            for (start, end) in gaps(&mappings, base, base + SUPERPAGE_BYTES) {
                self.forget_mapping(start, end);
            }
        }
        for mapping in mappings {
            let has_far = self.has_far(&mapping) && self.is_inherited(attached, &mapping);
            let is_large = mapping.end - mapping.start >= attached.threshold_bytes();
            if has_far || (self.core.is_movable(mapping.protection) && is_large) {
                let mut registry = self.pager.lock_registry();
                let region = mapping.region(self.core.way(mapping.protection) == Way::Nowhere);
                registry.insert(region);
                if has_far {
                    // Registered since the fork; if it was unmapped meanwhile, it could not be
                    // registered again.
                    learn(self.core, region);
                } else {
                    register(self.core, &mut registry, region);
                }
            }
        }
    }

    /// All mappings, at a moment at which the page states reflect every change of them: while one
    /// is not read the kernel refuses to fill pages, and says so before anything else.
    fn settled_mappings(&mut self, attached: &'static Attached) -> Vec<Eligible> {
        loop {
            self.apply_all(attached);
            if !self.is_quiet() {
                std::thread::yield_now();
                continue;
            }
            let mappings = attached.eligible_from(0).unwrap_or_else(|error| {
                fail_closed(&format!("the list of a child's mappings cannot be read: {error}"))
            });
            if self.is_quiet() {
                return mappings;
            }
        }
    }

    fn is_quiet(&self) -> bool {
        if self.core.uffd.is_changing() {
            self.core.take_in();
            return false;
        }
        !self.core.layout.is_behind()
    }

    fn forget_mapping(&self, start: usize, end: usize) {
        let _registry = self.pager.lock_registry();
        self.forget(start, end);
    }

    fn has_far(&self, mapping: &Eligible) -> bool {
        known_pages(self.core.space, mapping.start, mapping.end).any(is_away)
    }

    /// Whether the mapping has been there since the fork. If not, its pages are new.
    fn is_inherited(&mut self, attached: &'static Attached, mapping: &Eligible) -> bool {
        loop {
            self.apply_all(attached);
            let core = self.core;
            let mut pages = known_pages(core.space, mapping.start, mapping.end);
            let Some(page) = pages.find(|page| is_away(*page)) else { return true };
            // The page is being fetched for a fault, its own or that of a page before it.
            let Some(state) = page.cell().claim(Phase::Far, Phase::Fetching) else {
                std::thread::yield_now();
                continue;
            };
            let wake = || core.uffd.wake(page.address(), PAGE_BYTES);
            let place = core.place(page, state.layer());
            if self.fetcher.fetch([place].into_iter()) == 0 {
                page.cell().store(state);
                let _ = wake();
                // A thread that touches it finds that out, too.
                return true;
            }
            let copied = core.step(Mover::Evictor, || {
                core.uffd.copy(page.address(), self.fetcher.memory, PAGE_BYTES, true)
            });
            match copied.errno {
                None | Some(libc::EEXIST) => {
                    page.cell().store(state.with_phase(Phase::Resident));
                    page.superpage.leave_blade();
                    core.budget.overdraw(1);
                    // A page that was present already has woken no thread, and a thread that
                    // touched it since the claim was told to wait for it.
                    let _ = wake();
                    return true;
                }
                // A mapping that is being moved is not found until the kernel says EAGAIN.
                Some(libc::ENOENT) if core.layout.is_at_rest(&core.uffd) => {
                    page.cell().store(state);
                    let _ = wake();
                    self.forget_mapping(mapping.start, mapping.end);
                    return false;
                }
                Some(libc::ENOENT | libc::EAGAIN | libc::ECANCELED) => {
                    page.cell().store(state);
                    let _ = wake();
                    core.take_in();
                    std::thread::yield_now();
                }
                Some(errno) => fail_closed(&format!(
                    "a child does not get its page {:#x}: {}",
                    page.address(),
                    std::io::Error::from_raw_os_error(errno)
                )),
            }
        }
    }
}

/// Whether a page's contents are only on the blades.
fn is_away(page: Page) -> bool {
    matches!(page.cell().load().phase(), Phase::Far)
}

/// The parts of a range that no mapping of a list, in order, covers.
fn gaps(mappings: &[Eligible], start: usize, end: usize) -> Vec<(usize, usize)> {
    let first = mappings.partition_point(|mapping| mapping.end <= start);
    let (mut from, mut gaps) = (start, Vec::new());
    for mapping in mappings[first..].iter().take_while(|mapping| mapping.start < end) {
        if mapping.start > from {
            gaps.push((from, mapping.start));
        }
        from = mapping.end;
    }
    if from < end {
        gaps.push((from, end));
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Protection;

    #[test]
    fn gaps_are_what_is_not_mapped() {
        let mapping = |start, end| Eligible { start, end, protection: Protection::READ_WRITE };
        let mappings = [mapping(0x1000, 0x3000), mapping(0x3000, 0x4000), mapping(0x8000, 0x9000)];
        assert_eq!(gaps(&mappings, 0, 0xa000), [(0, 0x1000), (0x4000, 0x8000), (0x9000, 0xa000)]);
        assert_eq!(gaps(&mappings, 0x2000, 0x8000), [(0x4000, 0x8000)]);
        assert_eq!(gaps(&mappings, 0x5000, 0x6000), [(0x5000, 0x6000)]);
        assert!(gaps(&mappings, 0x1000, 0x4000).is_empty());
    }
}
