//! Hands a guest's memory over to another host, or takes it; see [`crate::life::guest`].

use std::ops::Range;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use farpool_kernel::lock;
use farpool_pool::{Completion, PageWrite, Seals};
use farpool_units::PAGE_BYTES;

use crate::life::children::handover::{HandedLayer, HandedLayers, HandedPages, Handover};
use crate::life::fetcher::FETCHED_AT_ONCE;
use crate::life::guest::Handed;
use crate::life::steward::children::THAW_STEP;
use crate::life::steward::forgetting::advise;
use crate::life::steward::state::Steward;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES, SUPERPAGE_BYTES, SUPERPAGE_PAGES};
use crate::space::{Page, known_pages, moves};
use crate::sys;

/// How long a page may be on its way while nothing is moved: a request to a blade is over by then,
/// or the blade is lost.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// Layers that must stay free for the receiver's own: its present one, and those of two forks.
const OWN_LAYERS: usize = 3;

impl Steward {
    /// Writes what of the guest's memory is local to the blades, freezes all, and tells where it
    /// is. The guest must stand still; it may go on here afterwards as if nothing had been.
    pub(super) fn give_guest(&mut self) -> Result<(), i32> {
        let pager = self.pager;
        let handed = self.at_rest(|steward, range| {
            steward.thin_out_layers().map_err(|_| "its layers cannot be merged".to_owned())?;
            let bytes = range.len() as u64;
            let superpages = steward.store_guest(range)?;
            steward.freeze_layers().map_err(|error| error.to_string())?;
            // No receiver comes for what is not told.
            let layers = steward.handed_layers(&superpages);
            let layers = layers.inspect_err(|_| pager.inheritance.has_arrived())?;
            Ok(Handed { bytes, baton: None, pages: Handover { layers, superpages } })
        });
        handed.map(|handed| pager.guest.put(handed)).map_err(|reason| pager.guest.refuse(reason))
    }

    /// Makes the guest's memory that of another host: all of its pages are far from here on.
    pub(super) fn bind_guest(&mut self) -> Result<(), i32> {
        let pager = self.pager;
        let Some(handed) = pager.guest.take() else { return Err(libc::EINVAL) };
        let bound = self.at_rest(|steward, range| {
            if handed.bytes != range.len() as u64 {
                let (given, here) = (handed.bytes >> 20, range.len() >> 20);
                return Err(format!("it has {given} MiB, and {here} MiB are here: give as much"));
            }
            steward.clear_guest(&range)?;
            let numbers = steward.attach_layers(&handed.pages.layers)?;
            let adopted = steward.adopt_pages(&range, &handed.pages, &numbers);
            if adopted.is_err() {
                numbers.into_iter().flatten().for_each(|layer| steward.drop_layer(layer));
            }
            adopted
        });
        bound.map_err(|reason| pager.guest.refuse(reason))
    }

    /// Does something with the guest's memory while no fault is served, nothing is moved, and all
    /// that was moved out is on the blades.
    fn at_rest<T>(
        &mut self,
        act: impl FnOnce(&mut Steward, Range<usize>) -> Result<T, String>,
    ) -> Result<T, String> {
        let (core, pager) = (self.core, self.pager);
        let range = pager.guest.range().ok_or("this process has no guest's memory")?;
        // In this order; see `prepare_fork`.
        let registry = pager.lock_registry();
        core.gate.shut();
        core.note_sharing();
        self.empty_buffer();
        let done = {
            let _changing = lock(&core.layers.changing);
            act(self, range)
        };
        drop(registry);
        core.gate.open(&core.uffd);
        pager.requests.ring();
        done
    }

    // ---- the giver ---------------------------------------------------------------------------

    /// Writes the pages that are local, and tells where all of them are, by superpages.
    fn store_guest(&mut self, range: Range<usize>) -> Result<HandedPages, String> {
        let mut superpages = Vec::new();
        for base in range.clone().step_by(SUPERPAGE_BYTES) {
            let mut states = vec![PageState::UNTOUCHED; SUPERPAGE_PAGES];
            let end = range.end.min(base + SUPERPAGE_BYTES);
            for chunk in (base..end).step_by(CHUNK_BYTES) {
                let count = ((end - chunk) / PAGE_BYTES).min(CHUNK_PAGES);
                let first = (chunk - base) / PAGE_BYTES;
                self.store_chunk(chunk, &mut states[first..first + count])?;
            }
            superpages.push((base - range.start, Some(states)));
        }
        Ok(superpages)
    }

    /// The same for the pages from `start` on, as many as there are states, at most a chunk.
    fn store_chunk(&mut self, start: usize, states: &mut [PageState]) -> Result<(), String> {
        let core = self.core;
        let there = moves::occupied(&core.pagemap, start, states.len());
        let full = || "it has more superpages than a process can have".to_owned();
        let mut stored = Vec::new();
        for (index, handed) in states.iter_mut().enumerate() {
            let page = core.space.page_or_new(start + index * PAGE_BYTES).ok_or_else(full)?;
            let state = settled_state(page)?;
            match state.phase() {
                Phase::Far => *handed = far(state),
                Phase::Lost => {
                    let address = page.address();
                    return Err(format!("page {address:#x} of it is lost, and it cannot go on"));
                }
                // What is not there reads as zeros, here and on the other host.
                _ if there & (1 << index) == 0 => {}
                _ => {
                    let at = self.fetcher.address(stored.len());
                    sys::copy_page(page.address(), at);
                    // SAFETY: memory of this thread alone.
                    let bytes = unsafe { &*(at as *const [u8; PAGE_BYTES]) };
                    if state.has_copy()
                        && core.has_place(page, state.layer())
                        && core.copies.matches(page, bytes)
                    {
                        *handed = far(state);
                    } else if bytes.iter().any(|byte| *byte != 0) {
                        stored.push((index, page));
                    }
                }
            }
        }
        let layer = self.store_pages(&stored)?;
        for (index, _) in stored {
            states[index] = PageState::UNTOUCHED.with_layer(layer).with_phase(Phase::Far);
        }
        Ok(())
    }

    /// Writes pages, which are in the fetcher's memory in this order, to the current layer, which
    /// is returned. They stay local, with a copy there.
    fn store_pages(&mut self, pages: &[(usize, Page)]) -> Result<usize, String> {
        let core = self.core;
        let Some((_, first)) = pages.first() else { return Ok(0) };
        assert!(pages.len() <= FETCHED_AT_ONCE, "{} pages at once", pages.len());
        let layer = core.layers.current_or_new(&core.pool).map_err(|error| error.to_string())?;
        let segment = core.layers.segment(layer).ok_or("the current layer is gone")?;
        let superpage = first.superpage;
        if superpage.allocated.load(SeqCst) & (1 << layer) == 0 {
            let allocated = core.pool.allocate_superpage(segment, superpage.id());
            allocated.map_err(|error| error.to_string())?;
            superpage.allocated.fetch_or(1 << layer, SeqCst);
        }
        let mut writes = Vec::with_capacity(pages.len());
        for (number, (_, page)) in pages.iter().enumerate() {
            assert!(std::ptr::eq(page.superpage, superpage), "pages of one superpage");
            let state = page.cell().load();
            // Before anything is written to the copy's place.
            if state.has_copy() && page.cell().change(state, state.with_copy(false)) {
                superpage.give_up_copy(state);
            }
            let at = core.place(*page, layer).ok_or("the current layer is gone")?;
            let from = self.fetcher.address(number) as *const u8;
            writes.push(PageWrite { at, from, token: number as u64 });
        }
        self.write_all(&writes)?;
        for (number, (_, page)) in pages.iter().enumerate() {
            // SAFETY: memory of this thread alone.
            let bytes = unsafe { &*(self.fetcher.address(number) as *const [u8; PAGE_BYTES]) };
            core.copies.remember(*page, bytes);
            let local = PageState::UNTOUCHED.with_layer(layer).with_phase(Phase::Resident);
            if page.cell().change(page.cell().load(), local.with_copy(true)) {
                superpage.copies.fetch_add(1, SeqCst);
            }
        }
        Ok(layer)
    }

    fn write_all(&mut self, writes: &[PageWrite]) -> Result<(), String> {
        self.fetcher.done.clear();
        // SAFETY: the fetcher's memory is this thread's own, and nothing touches it before all
        // writes have completed.
        unsafe { self.fetcher.lane.write(writes) }.map_err(|error| error.to_string())?;
        let (mut completed, mut failure) = (0, None);
        while completed < writes.len() {
            if self.fetcher.done.is_empty() {
                self.fetcher.lane.wait(&mut self.fetcher.done);
            }
            for Completion { result, .. } in self.fetcher.done.drain(..) {
                completed += 1;
                failure = result.err().or(failure);
            }
        }
        let said = |error| format!("a page of it cannot be written to a blade: {error}");
        failure.map_or(Ok(()), |error| Err(said(error)))
    }

    /// What opens the layers that these pages are in, for another process.
    fn handed_layers(&self, superpages: &HandedPages) -> Result<HandedLayers, String> {
        let core = self.core;
        let mut layers: HandedLayers = [const { None }; MAX_LAYERS];
        let still = core.pool.hold_still();
        for layer in core.layers.live() {
            let Some(segment) = core.layers.segment(layer) else { continue };
            let pages = || pages_in(superpages, layer);
            if pages().next().is_none() {
                continue;
            }
            let token = core.pool.freeze_still(&still, segment);
            let token = Box::new(token.map_err(|error| error.to_string())?);
            let seals = core.pool.export_seals(segment, pages());
            layers[layer] = Some(HandedLayer { token, seals });
        }
        Ok(layers)
    }

    // ---- the receiver ------------------------------------------------------------------------

    /// Makes sure that nothing is where the pages come. The monitor may have read them meanwhile.
    fn clear_guest(&self, range: &Range<usize>) -> Result<(), String> {
        let used = || "the guest's memory was written here before it came".to_owned();
        for page in known_pages(self.core.space, range.start, range.end) {
            let state = page.cell().load();
            if !matches!(state.phase(), Phase::Untouched | Phase::Resident | Phase::Dropped) {
                return Err(used());
            }
        }
        let mut from = range.start;
        while let Some(at) = moves::first_occupied(&self.core.pagemap, from, range.end) {
            sys::copy_page(at, self.fetcher.memory);
            // SAFETY: memory of this thread alone.
            let bytes = unsafe { &*(self.fetcher.memory as *const [u8; PAGE_BYTES]) };
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(used());
            }
            from = at + PAGE_BYTES;
        }
        for page in known_pages(self.core.space, range.start, range.end) {
            self.forget_page(page, PageState::UNTOUCHED);
        }
        advise(range.start, range.end, libc::MADV_DONTNEED)
            .map_err(|errno| std::io::Error::from_raw_os_error(errno).to_string())
    }

    /// Attaches the giver's layers. Returns the number that each has here, by its number there.
    fn attach_layers(&self, layers: &HandedLayers) -> Result<[Option<usize>; MAX_LAYERS], String> {
        let core = self.core;
        let wanted = layers.iter().flatten().count();
        if core.layers.live().count() + wanted + OWN_LAYERS > MAX_LAYERS + 1 {
            return Err(format!("its memory is in {wanted} layers, too many for this process"));
        }
        let mut numbers = [None; MAX_LAYERS];
        for (there, layer) in layers.iter().enumerate() {
            let Some(HandedLayer { token, seals }) = layer else { continue };
            match self.attach_layer(token, seals.as_deref()) {
                Ok(here) => numbers[there] = Some(here),
                Err(reason) => {
                    numbers.into_iter().flatten().for_each(|layer| self.drop_layer(layer));
                    return Err(reason);
                }
            }
        }
        Ok(numbers)
    }

    fn attach_layer(
        &self,
        token: &farpool_pool::FrozenToken,
        seals: Option<&[u8]>,
    ) -> Result<usize, String> {
        let core = self.core;
        let unreadable = || "what opens its pages cannot be read".to_owned();
        let seals = seals.map(|bytes| Seals::import(bytes).ok_or_else(unreadable)).transpose()?;
        let attached = core.pool.translate(token).and_then(|token| core.pool.attach(&token, seals));
        let segment = attached.map_err(|error| error.to_string())?;
        let free = (0..MAX_LAYERS).find(|layer| core.layers.segment(*layer).is_none());
        let free = free.ok_or("this process has no free layer")?;
        core.layers.set(free, Some(segment));
        Ok(free)
    }

    /// Makes the pages far, all or none of them.
    fn adopt_pages(
        &self,
        range: &Range<usize>,
        pages: &Handover,
        numbers: &[Option<usize>; MAX_LAYERS],
    ) -> Result<(), String> {
        let core = self.core;
        let mut adopted = Vec::new();
        for (offset, states) in &pages.superpages {
            for (index, state) in states.iter().flatten().enumerate() {
                if *state == PageState::UNTOUCHED {
                    continue;
                }
                let address = range.start + offset + index * PAGE_BYTES;
                let page = core.space.page_or_new(address).filter(|_| range.contains(&address));
                let here = numbers[state.layer()].filter(|_| state.phase() == Phase::Far);
                let placed = page.zip(here).filter(|(page, layer)| core.has_place(*page, *layer));
                adopted.push(placed.ok_or_else(|| {
                    format!("its page at {:#x} is on no blade", offset + index * PAGE_BYTES)
                })?);
            }
        }
        for (page, layer) in adopted {
            page.superpage.far_pages.fetch_add(1, SeqCst);
            page.superpage.allocated.fetch_or(1 << layer, SeqCst);
            page.cell().store(PageState::UNTOUCHED.with_layer(layer).with_phase(Phase::Far));
        }
        Ok(())
    }

    /// Makes the largest layer of a guest's memory writable again, once the other host has left
    /// it, and frees what only that one had there.
    pub(super) fn thaw_guest(&mut self) {
        let core = self.core;
        let current = core.layers.current();
        if self.pager.guest.range().is_none()
            || core.layers.live().all(|layer| layer == current)
            || self.thawed.elapsed() < THAW_STEP
            || core.gate.is_shut()
        {
            return;
        }
        self.thawed = Instant::now();
        let Some(largest) = self.largest_layer().filter(|layer| *layer != current) else { return };
        let _registry = self.pager.lock_registry();
        let _changing = lock(&core.layers.changing);
        let Some(segment) = core.layers.segment(largest) else { return };
        // It is tried again where a blade does not answer.
        if !self.pager.inheritance.is_settled() || !matches!(core.pool.thaw(segment), Ok(true)) {
            return;
        }
        core.layers.set_current(largest);
        let all: Vec<u32> = core.pool.superpages_of(segment).collect();
        for sma in all {
            let ours = core
                .space
                .by_id(sma as usize)
                .is_some_and(|superpage| superpage.allocated.load(SeqCst) & (1 << largest) != 0);
            if !ours {
                // A blade that refuses keeps it until the layer is dropped.
                let _ = core.pool.free_superpage(segment, sma);
            }
        }
    }

    /// The layer with the most far pages of the guest.
    fn largest_layer(&self) -> Option<usize> {
        let range = self.pager.guest.range()?;
        let mut pages = [0_usize; MAX_LAYERS];
        for page in known_pages(self.core.space, range.start, range.end) {
            let state = page.cell().load();
            if state.phase() == Phase::Far {
                pages[state.layer()] += 1;
            }
        }
        (0..MAX_LAYERS).filter(|layer| pages[*layer] > 0).max_by_key(|layer| pages[*layer])
    }
}

/// The state of a far page for another process.
fn far(state: PageState) -> PageState {
    PageState::UNTOUCHED.with_layer(state.layer()).with_phase(Phase::Far)
}

/// The state of a page once no thread has it in hand.
fn settled_state(page: Page) -> Result<PageState, String> {
    let until = Instant::now() + SETTLE_TIME;
    loop {
        let state = page.cell().load();
        if !matches!(state.phase(), Phase::Fetching | Phase::Evicting | Phase::Victim) {
            return Ok(state);
        }
        if Instant::now() > until {
            return Err(format!("page {:#x} of it is on its way for too long", page.address()));
        }
        sys::pause();
    }
}

/// The numbers of the pages that lie in a layer.
fn pages_in(superpages: &HandedPages, layer: usize) -> impl Iterator<Item = u32> + '_ {
    let is_in = move |state: PageState| state.phase() == Phase::Far && state.layer() == layer;
    superpages.iter().flat_map(move |(offset, states)| {
        let states = states.iter().flatten().enumerate();
        let first = offset / PAGE_BYTES;
        states
            .filter(move |(_, state)| is_in(**state))
            .map(move |(index, _)| farpool_units::exactly(first + index))
    })
}
