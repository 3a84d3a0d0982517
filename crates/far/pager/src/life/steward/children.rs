//! The steward at a fork: records what is far, freezes it, and has the child served
//! ([`crate::life::children`]).
//!
//! The change is not applied yet, so nothing moves: the page states are those of the fork. A child
//! that execs, as most do, needs nothing: it gets a moment for that.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;
use crate::life::attached::Attached;
use crate::life::children::child::{Child, Inheritance};
use crate::life::children::remains::Remains;
use crate::life::children::server::Blades;
use crate::life::steward::state::Steward;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::space::{Page, Superpage, birth, maps};
use crate::sys;

/// Layers that stay free for pages that are moved out after a fork; one of a child's own needs
/// another.
const SPARE_LAYERS: usize = 2;
/// How often it is tried to thaw a frozen layer that no child shares any more: each try is a
/// request to the blades.
pub(super) const THAW_STEP: Duration = Duration::from_secs(1);

impl Steward {
    /// Makes a child get the pages that are far now.
    pub(super) fn share_with_child(&mut self, attached: &'static Attached, uffd: OwnedFd) {
        let number = birth::number_of(uffd.as_raw_fd());
        let mut child = Child::new(number, uffd, Inheritance::default());
        let needs_pages = child.may_need_pages() && {
            self.core.note_sharing();
            child.inherit(self.take_down());
            !child.remains().is_empty()
        };
        if !needs_pages {
            return self.let_child_go(attached, child);
        }
        match self.freeze_for_child() {
            Ok(()) => {
                if let Err(error) = attached.serve_child(child) {
                    fail_closed(&format!("a child cannot be given its pages: {error}"));
                }
            }
            Err(reason) => {
                sys::say(&format!("a child gets all its far memory at once: {reason}"));
                self.finish(attached, child);
            }
        }
    }

    /// Gives a child, and the children that it has meanwhile, all pages that they lack. Nothing
    /// moves before that is done.
    fn finish(&mut self, attached: &'static Attached, child: Child) {
        let mut unfinished = vec![child];
        while let Some(mut child) = unfinished.pop() {
            child.finish(&mut Blades { core: self.core, fetcher: &mut self.fetcher });
            for (number, uffd, inherited) in child.take_born() {
                self.core.layout.expects_child();
                unfinished.push(Child::new(number, uffd, inherited));
            }
            self.let_child_go(attached, child);
        }
    }

    fn let_child_go(&self, attached: &'static Attached, child: Child) {
        let number = child.number;
        drop(child);
        attached.child_is_settled(number);
        self.core.layout.has_settled_child();
    }

    /// Records what is far now. Pages in the buffer are on the blades, too, once no write is under
    /// way.
    fn take_down(&self) -> Inheritance {
        // Nothing is moved out while the lock is held.
        let registry = self.pager.lock_registry();
        while !self.core.frames.is_at_rest() {
            self.core.budget.kick();
            sys::pause();
        }
        let (mut remains, mut local) = (Remains::default(), BTreeMap::new());
        for id in 0..self.core.space.count() {
            let Some(superpage) = self.core.space.by_id(id) else { continue };
            let states: Vec<PageState> = (0..superpage.pages.len())
                .map(|index| self.state_for_child(Page { superpage, index }, &mut local))
                .collect();
            remains.add(superpage.base(), states.into_iter());
        }
        drop(registry);
        if !remains.is_empty() {
            // The kernel leaves such memory empty in a child, and registered.
            match sys::read_file("/proc/self/smaps") {
                Ok(details) => maps::wiped_on_fork(&details)
                    .into_iter()
                    .for_each(|(start, end)| remains.remove(start, end)),
                Err(error) => fail_closed(&format!("/proc/self/smaps: {error}")),
            }
        }
        Inheritance { remains, local: Arc::new(local) }
    }

    /// The state of a page as a child has it: Far if the child lacks the page. Pages that no blade
    /// has are copied to `local`.
    fn state_for_child(
        &self,
        page: Page,
        local: &mut BTreeMap<usize, Box<[u8; PAGE_BYTES]>>,
    ) -> PageState {
        loop {
            let state = page.cell().load();
            match state.phase() {
                Phase::Far | Phase::Lost => return state,
                Phase::Victim => {
                    let Some((slot, _)) = self.core.frames.locate(page) else { continue };
                    let far = state.with_copy(false).with_phase(Phase::Far);
                    if !self.core.frames.is_kept(slot) {
                        return far;
                    }
                    if page.cell().claim(Phase::Victim, Phase::Fetching).is_some() {
                        // Its frame is its only copy, and remains so.
                        let mut copy = Box::new([0; PAGE_BYTES]);
                        let into = copy.as_mut_ptr() as usize;
                        sys::copy_page(self.core.frames.address(slot), into);
                        page.cell().store(state);
                        let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
                        local.insert(page.address(), copy);
                        return far;
                    }
                }
                // Its owner releases it soon.
                Phase::Fetching | Phase::Evicting => sys::pause(),
                Phase::Untouched | Phase::Resident | Phase::Dropped => return PageState::UNTOUCHED,
            }
        }
    }

    /// Freezes what is far, for as long as a child may need it.
    fn freeze_for_child(&mut self) -> Result<(), String> {
        let core = self.core;
        let _changing = core.layers.changing.lock();
        if self.pager.inheritance.is_settled() {
            self.drop_unused_layers();
        }
        let live = core.layers.live().count();
        if live > MAX_LAYERS - SPARE_LAYERS {
            return Err(format!("{live} forks share far memory with children that live"));
        }
        self.freeze_layers().map_err(|error| error.to_string())
    }

    /// Drops layers that hold neither a page nor a page's copy. No child may be about to attach
    /// any.
    fn drop_unused_layers(&self) {
        let mut used = 1_u32 << self.core.layers.current();
        for superpage in (0..self.core.space.count()).filter_map(|id| self.core.space.by_id(id)) {
            if superpage.allocated.load(SeqCst) != 0 {
                used |= used_layers(superpage);
            }
        }
        let unused: Vec<usize> =
            self.core.layers.live().filter(|layer| used & (1 << layer) == 0).collect();
        unused.into_iter().for_each(|layer| self.drop_layer(layer));
    }

    /// Makes a frozen layer that no child shares any more writable again, so that the number of
    /// layers does not grow with every fork.
    pub(super) fn thaw_unshared(&mut self) {
        let core = self.core;
        let wants_one = core.layers.current() == MAX_LAYERS && core.layers.live().next().is_some();
        if !wants_one || self.thawed.elapsed() < THAW_STEP || core.layout.owes_children() {
            return;
        }
        self.thawed = Instant::now();
        let Ok(_changing) = core.layers.changing.lock() else { return };
        if core.layers.current() != MAX_LAYERS || !self.pager.inheritance.is_settled() {
            return;
        }
        let thaws = |layer: &usize| {
            let segment = core.layers.segment(*layer);
            segment.is_some_and(|segment| matches!(core.pool.thaw(segment), Ok(true)))
        };
        if let Some(layer) = core.layers.live().find(thaws) {
            core.layers.set_current(layer);
        }
    }
}

/// The layers, one bit each, that hold pages of a superpage or copies of them.
fn used_layers(superpage: &Superpage) -> u32 {
    let states = superpage.pages.iter().map(crate::space::page::PageCell::load);
    let used = states.filter(|state| {
        let lies_there =
            matches!(state.phase(), Phase::Far | Phase::Fetching | Phase::Evicting | Phase::Victim);
        lies_there || state.has_copy()
    });
    used.fold(0, |layers, state| layers | 1 << state.layer())
}
