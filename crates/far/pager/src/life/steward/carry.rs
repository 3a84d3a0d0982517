//! mremap: a mapping moves, and the pager's pages of it follow.
//!
//! Between unregistering the old range and registering the new one the program's threads see plain
//! memory. So the pages that are far or in the buffer are first claimed from the fault threads, at
//! both ends, and whatever gets mapped at their places meanwhile is dropped.

use farpool_pool::{PageError, PageRead};
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::core::{Mover, until_settled};
use crate::life::activation::{fail_unregistered, learn, register};
use crate::life::requests::Request;
use crate::life::steward::state::Steward;
use crate::space::page::{PageState, Phase};
use crate::space::registry::{Region, Registry};
use crate::space::{Page, known_pages, moves};
use crate::sys;

impl Steward {
    /// Moves a mapping: the kernel moves what is resident, with its rights and huge pages; pages
    /// that are far or in the buffer follow. The registry is locked, so nothing is moved out
    /// meanwhile.
    pub(super) fn carry(&mut self, registry: &mut Registry, carry: &Carry) -> Result<(), i32> {
        let held = self.hold(carry)?;
        let (old_bytes, flags) =
            (carry.end - carry.start, if carry.keeps { libc::MREMAP_DONTUNMAP } else { 0 });
        // The kernel moves several mappings at once, but with a userfaultfd it stops half way.
        let _ = self.core.uffd.unregister(carry.start, old_bytes);
        if let Err(errno) = sys::remap(carry.start, old_bytes, carry.bytes, flags, carry.to) {
            for part in registry.overlapping(carry.start, carry.end) {
                if !register(self.core, registry, part) && !held.is_empty() {
                    fail_unregistered(part.start);
                }
            }
            self.let_go(held);
            return Err(errno);
        }
        let end = carry.to + carry.bytes;
        let pinned =
            registry.overlapping(carry.start, carry.end).iter().any(|region| region.pinned);
        let unshared = registry.is_unshared(carry.start, carry.end);
        self.forget(carry.to, end);
        registry.remove(carry.to, end);
        let old = registry.remove(carry.start, carry.end);
        held.iter().for_each(|held| own(held.target));
        registry.add(carry.to, end);
        registry.pin(carry.to, end, pinned);
        registry.set_unshared(carry.to, end, unshared);
        let region = Region { start: carry.to, end, pinned, unshared, ..Region::default() };
        if !register(self.core, registry, region) && !held.is_empty() {
            fail_unregistered(carry.to);
        }
        for held in held {
            self.drop_stray(held.target);
            if self.carry_page(&held).is_err() {
                self.lose(held.target, self.fetcher.failure);
            }
            held.page.cell().store(PageState::UNTOUCHED);
            held.page.superpage.give_up_copy(held.state);
            let _ = self.core.uffd.wake(held.target.address(), PAGE_BYTES);
        }
        self.forget(carry.start, carry.end);
        for part in old.into_iter().filter(|_| carry.keeps) {
            registry.add(part.start, part.end);
            register(self.core, registry, part);
        }
        Ok(())
    }

    /// Claims all pages of the range that are not mapped in the program from the fault threads.
    /// Returns them with the states they had.
    fn hold(&self, carry: &Carry) -> Result<Vec<Held>, i32> {
        let mut held = Vec::new();
        let end = carry.start + carry.carried_bytes();
        for page in known_pages(self.core.space, carry.start, end) {
            loop {
                let state = page.cell().load();
                match state.phase() {
                    Phase::Untouched | Phase::Resident | Phase::Dropped => break,
                    Phase::Far | Phase::Victim | Phase::Lost => {
                        let target = carry.to + (page.address() - carry.start);
                        let Some(target) = self.core.space.page_or_new(target) else {
                            self.let_go(held);
                            return Err(libc::ENOMEM);
                        };
                        if page.cell().change(state, state.with_phase(Phase::Fetching)) {
                            held.push(Held { page, state, target });
                            break;
                        }
                    }
                    // Its owner releases it soon.
                    Phase::Fetching | Phase::Evicting => sys::pause(),
                }
            }
        }
        Ok(held)
    }

    /// Releases the pages where they are. Victims go back into the program: the evictor may have
    /// passed them over when it wrote their tray, so that their frames are the only copies.
    fn let_go(&self, held: Vec<Held>) {
        for Held { page, state, .. } in held {
            self.drop_stray(page);
            if state.phase() != Phase::Victim {
                page.cell().store(state);
            } else {
                if self.carry_victim(page, page).is_err() {
                    self.lose(page, None);
                }
                page.superpage.give_up_copy(state);
            }
            let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
        }
    }

    /// Drops what the kernel may have mapped, while it was not registered, at a page that is far or
    /// in the buffer.
    fn drop_stray(&self, page: Page) {
        let (start, end) = (page.address(), page.address() + PAGE_BYTES);
        if moves::first_occupied(&self.core.pagemap, start, end).is_some() {
            let _ = sys::advise(start, PAGE_BYTES, libc::MADV_DONTNEED);
        }
    }

    fn carry_page(&mut self, held: &Held) -> Result<(), i32> {
        self.fetcher.failure = None;
        match held.state.phase() {
            Phase::Far => {
                held.page.superpage.leave_blade();
                self.carry_far(held)
            }
            Phase::Victim => self.carry_victim(held.page, held.target),
            _ => Err(libc::EIO),
        }
    }

    /// Makes a page that the caller owns lost; `failure` is what its blade's answer was, if that is
    /// why.
    fn lose(&self, page: Page, failure: Option<PageError>) {
        page.cell().store(PageState::UNTOUCHED.with_phase(Phase::Lost));
        let why = failure.map(|error| format!(": {error}")).unwrap_or_default();
        self.core.poison(page, &format_args!("a page could not follow its mapping (mremap){why}"));
    }

    /// Copies a victim to `target`, which the caller owns.
    fn carry_victim(&self, page: Page, target: Page) -> Result<(), i32> {
        let Some((slot, _)) = self.core.frames.locate(page) else {
            return Err(libc::EFAULT);
        };
        let copied = self.copy_in(target, self.core.frames.address(slot));
        self.core.frames.invalidate(slot);
        copied
    }

    /// Makes a far page far at `target`, too; if no blade has memory for it, it goes into the
    /// program.
    fn carry_far(&mut self, held: &Held) -> Result<(), i32> {
        let from = self.core.place(held.page, held.state.layer()).ok_or(libc::EFAULT)?;
        self.read_page(PageRead { at: from, into: self.fetcher.memory as *mut u8, token: 0 })?;
        self.store_carried(held)
    }

    /// Makes the page in the fetcher's memory far at the target.
    fn store_carried(&mut self, held: &Held) -> Result<(), i32> {
        self.await_eviction(held.target);
        let core = self.core;
        let stored = {
            let _changing = core.layers.changing.lock();
            core.layers
                .current_or_new(&core.pool)
                .map_err(|_| libc::ENOMEM)
                .and_then(|layer| self.store_page(held.target, layer))
        };
        stored.or_else(|_| self.copy_in(held.target, self.fetcher.memory))
    }

    /// Follows a mapping that the kernel has already moved; what is resident has moved with it.
    /// Faults are served again as soon as the steward has claimed the pages that have not.
    pub(super) fn follow_move(&mut self, from: usize, to: usize, bytes: usize) {
        let carry = Carry { start: from, end: from + bytes, to, bytes, keeps: false };
        let pager = self.pager;
        let held = {
            let mut registry = pager.lock_registry();
            let Ok(held) = self.hold(&carry) else {
                fail_closed(&format!(
                    "far memory has moved to {to:#x}, beyond the table of superpages"
                ))
            };
            if !held.is_empty() && self.was_disturbed(to, to + bytes) {
                fail_closed(&format!(
                    "far memory has moved to {to:#x} just when that was not registered"
                ));
            }
            registry.remove(to, to + bytes);
            self.forget(to, to + bytes);
            held.iter().for_each(|held| own(held.target));
            for part in registry.remove(from, from + bytes) {
                let (start, end) = (part.start - from + to, part.end - from + to);
                let (pinned, protection) = (part.pinned, part.protection);
                registry.insert(Region { start, end, pinned, protection, ..Region::default() });
                learn(self.core, Region { start, end, ..part });
            }
            held
        };
        self.core.layout.has_applied();
        for held in &held {
            let carried = match held.state.phase() {
                Phase::Victim => self.carry_buffered(held),
                _ => self.carry_page(held),
            };
            if carried.is_err() {
                self.lose(held.target, self.fetcher.failure);
            }
            held.page.cell().store(PageState::UNTOUCHED);
            held.page.superpage.give_up_copy(held.state);
            // The old range may still be mapped (MREMAP_DONTUNMAP), and was claimed meanwhile.
            for address in [held.page.address(), held.target.address()] {
                let _ = self.core.uffd.wake(address, PAGE_BYTES);
            }
        }
        let _registry = pager.lock_registry();
        self.forget(from, from + bytes);
    }

    /// As [`Steward::carry_victim`], through the blade, so that no change of the address space can
    /// come between.
    fn carry_buffered(&mut self, held: &Held) -> Result<(), i32> {
        self.fetcher.failure = None;
        let Some((slot, _)) = self.core.frames.locate(held.page) else {
            return Err(libc::EFAULT);
        };
        sys::copy_page(self.core.frames.address(slot), self.fetcher.memory);
        let stored = self.store_carried(held);
        self.core.frames.invalidate(slot);
        stored
    }

    /// Copies the page at `source` into the program, to `target`, which the caller owns.
    fn copy_in(&self, target: Page, source: usize) -> Result<(), i32> {
        let address = target.address();
        let copied = until_settled(self.core, Mover::Steward(address), |_| {
            self.core.uffd.copy(address, source, PAGE_BYTES, false)
        });
        copied.errno.map_or(Ok(()), Err)?;
        self.core.budget.overdraw(1);
        target.cell().store(PageState::UNTOUCHED.with_phase(Phase::Resident));
        Ok(())
    }

    /// Waits until the evictor's write of the page's earlier content is over: it travels on another
    /// connection and could arrive after this thread's.
    fn await_eviction(&self, page: Page) {
        while self.core.frames.is_being_written(page) {
            self.core.budget.kick();
            sys::pause();
        }
    }
}

/// A mapping that moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Carry {
    start: usize,
    end: usize,
    to: usize,
    /// Length of the new range.
    bytes: usize,
    /// The old range stays mapped, empty.
    keeps: bool,
}

impl Carry {
    pub(super) fn new(request: &Request) -> Carry {
        let Request { start, end, extra, more, .. } = *request;
        Carry { start, end, to: extra, bytes: more & !1, keeps: more & 1 != 0 }
    }

    fn carried_bytes(&self) -> usize {
        self.bytes.min(self.end - self.start)
    }
}

/// A page that is not mapped in the program and has to follow its mapping.
#[derive(Clone, Copy, Debug)]
struct Held {
    page: Page,
    /// The state before it was held.
    state: PageState,
    target: Page,
}

/// Claims a page that was just forgotten from the fault threads: a run of first touches that began
/// in the mapping below may have claimed it for a moment, and then sets its state.
fn own(page: Page) {
    loop {
        let state = page.cell().load();
        match state.phase() {
            Phase::Untouched | Phase::Resident | Phase::Dropped => {
                if page.cell().change(state, state.with_phase(Phase::Fetching)) {
                    return;
                }
            }
            Phase::Fetching => sys::pause(),
            phase => fail_closed(&format!(
                "page {:#x} is {phase:?} though its mapping is new",
                page.address()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Space;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;

    /// A fault thread claims the page for a run of first touches and releases it again, all the
    /// while.
    #[test]
    fn a_run_of_first_touches_does_not_overwrite_a_page_that_arrives() {
        let space: &'static Space = Box::leak(Box::new(Space::new().expect("space")));
        let page = space.page_or_new(1 << 30).expect("page");
        let over: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
        let toucher = std::thread::spawn(move || {
            while !over.load(SeqCst) {
                if page.cell().claim(Phase::Untouched, Phase::Fetching).is_some() {
                    std::thread::yield_now();
                    page.cell().store(PageState::UNTOUCHED);
                }
            }
        });
        let far = PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(3);
        for _ in 0..2_000 {
            own(page);
            page.cell().store(far);
            std::thread::yield_now();
            assert_eq!(page.cell().load(), far);
            page.cell().store(PageState::UNTOUCHED);
        }
        over.store(true, SeqCst);
        toucher.join().expect("toucher");
    }
}
