//! The steward: the one thread that changes which memory is far, on behalf of the program.
//!
//! Before the limit is near it only watches the resident set, and everything is left to the kernel
//! ([`crate::life::watch`]). Then it registers what can be far ([`crate::life::activation`]), and from then on answers the
//! program's requests ([`crate::life::requests`]).

mod carry;
mod changes;
mod children;
mod inherited;
mod leaving;
mod resting;
mod takeover;

pub use inherited::settle_inherited;
pub use leaving::{Left, unregister_all};

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_pool::{Completion, PageRead, PageWrite};
use farpool_units::exactly;

use crate::abort::panic_if_asked;
use crate::core::Core;
use crate::core::forget::try_forget;
use crate::error::StartError;
use crate::life::activation::register;
use crate::life::fetcher::Fetcher;
use crate::life::requests::{Answer, Kind, Request};
use crate::life::rest::Rests;
use crate::pager::Pager;
use crate::space::order::Owed;
use crate::space::page::{MAX_LAYERS, PageState, Phase};
use crate::space::registry::{Region, Registry};
use crate::space::units::NO_TRAY;
use crate::space::{Page, Superpage, known_pages, known_superpages};
use crate::sys;
use carry::Carry;

/// When active there is nothing to watch; requests ring the bell.
const ACTIVE_STEP: Duration = Duration::from_secs(1);
/// Memory that could not be given back is tried again at most this often: each is a request to a blade.
const EMPTY_STEP: Duration = Duration::from_millis(100);

/// See the module's description.
#[derive(Debug)]
pub struct Steward {
    pager: &'static Pager,
    core: &'static Core,
    /// Its memory also takes pages on their way from one place of the blade to another.
    fetcher: Fetcher,
    lease_kept: Instant,
    /// Superpages that were empty when their memory could not be given back, and when that was last tried.
    empty: RefCell<BTreeSet<u32>>,
    emptied: Cell<Instant>,
    /// When the order to leave was first seen.
    leaving_since: Option<Instant>,
    /// When a frozen layer was last asked for again.
    thawed: Instant,
    /// What else is still to come of moves that were applied.
    owed: Owed,
    /// Mappings that were found while the program changed something, and what the layout's moves were then: until pages
    /// have moved, they may be what is known later by another name.
    unsure: Vec<(Range<usize>, u64)>,
    /// The program does not stand still for this thread before.
    no_standstill_before: Instant,
    /// It was said that forks are refused.
    refusal_said: bool,
    /// The program has moved memory (mremap).
    has_moved: bool,
    splits_said: bool,
    /// What is not registered for a while.
    rests: Rests,
    resting: resting::Watch,
}

impl Steward {
    pub fn new(pager: &'static Pager, core: &'static Core) -> Result<Steward, StartError> {
        let fetcher = Fetcher::new(core.pool.lane()?)?;
        Ok(Steward {
            pager,
            core,
            fetcher,
            lease_kept: Instant::now(),
            empty: RefCell::default(),
            emptied: Cell::new(Instant::now()),
            leaving_since: None,
            owed: Owed::default(),
            unsure: Vec::new(),
            no_standstill_before: Instant::now(),
            thawed: Instant::now(),
            refusal_said: false,
            has_moved: false,
            splits_said: false,
            rests: Rests::default(),
            resting: resting::Watch::new(),
        })
    }

    /// Serves requests until the process ends.
    pub fn serve(mut self) -> ! {
        let pager = self.pager;
        loop {
            let bell = pager.requests.bell();
            // Between the two ends of a fork nothing may change but what its thread asks for.
            let forking = Cell::new(self.core.gate.is_shut());
            pager.requests.serve(
                |kind| !forking.get() || kind == Kind::FinishFork,
                |request| {
                    let result = self.handle(request);
                    forking.set(self.core.gate.is_shut());
                    result
                },
            );
            pager.requests.wait(bell, ACTIVE_STEP);
            self.keep_lease();
            self.free_empty();
        }
    }

    /// Tells the blades now and then that this process lives.
    fn keep_lease(&mut self) {
        if self.lease_kept.elapsed() >= self.core.pool.lease() / 3 {
            self.core.pool.keep_alive();
            self.lease_kept = Instant::now();
        }
    }

    fn handle(&mut self, request: Request) -> Result<Answer, i32> {
        panic_if_asked();
        let pager = self.pager;
        match request.kind {
            Kind::PrepareFork => self.prepare_fork(exactly(request.start))?,
            Kind::FinishFork => {
                self.core.gate.open(&self.core.uffd);
                // Requests that came meanwhile have rung already.
                pager.requests.ring();
            }
            Kind::MayFork => self.may_fork()?,
            Kind::FindFar => {
                let registry = pager.registry.lock().map_err(|_| libc::EDEADLK)?;
                return Ok(registry.first_in(request.start, request.end).unwrap_or_default());
            }
            _ => self.change(request)?,
        }
        Ok(Answer::default())
    }

    /// Changes what is far.
    fn change(&mut self, request: Request) -> Result<(), i32> {
        let pager = self.pager;
        let (start, end) = (request.start, request.end);
        let mut registry = pager.registry.lock().map_err(|_| libc::EDEADLK)?;
        match request.kind {
            Kind::Add => {
                registry.remove(start, end);
                self.forget(start, end);
                registry.add(start, end);
                let unshared =
                    request.extra != 0 && registry.is_unshared(request.extra - 1, request.extra);
                registry.set_unshared(start, end, unshared);
                let region = Region { start, end, unshared, ..Region::default() };
                register(self.core, &mut registry, region);
            }
            Kind::Remove => {
                if !registry.remove(start, end).is_empty() {
                    self.forget(start, end);
                }
            }
            Kind::Discard if request.extra == libc::MADV_FREE as usize => {
                return self.free(&registry, start, end);
            }
            Kind::Discard => {
                for part in registry.overlapping(start, end) {
                    self.forget(part.start, part.end);
                }
                return advise(start, end, exactly(request.extra));
            }
            Kind::Pin => registry.pin(start, end, true),
            Kind::Unpin => registry.pin(start, end, false),
            Kind::Unshare => registry.set_unshared(start, end, request.extra != 0),
            Kind::Retire => self.core.retire(start, end),
            Kind::Carry => return self.carry(&mut registry, &Carry::new(&request)),
            Kind::PrepareFork | Kind::FinishFork | Kind::FindFar | Kind::MayFork => {}
        }
        Ok(())
    }

    /// MADV_FREE: what can be far is discarded at once. Pages the kernel may drop at any time must not come into the
    /// victim buffer, from which it would drop them too. Goes on after an error, as the kernel does.
    fn free(&self, registry: &Registry, start: usize, end: usize) -> Result<(), i32> {
        let (mut from, mut result) = (start, Ok(()));
        for part in registry.overlapping(start, end) {
            if from < part.start {
                result = result.and(advise(from, part.start, libc::MADV_FREE));
            }
            self.forget(part.start, part.end);
            result = result.and(advise(part.start, part.end, libc::MADV_DONTNEED));
            from = part.end;
        }
        if from < end {
            result = result.and(advise(from, end, libc::MADV_FREE));
        }
        result
    }

    /// Forgets what the pager holds of a range: its pages read as zeros from now on, unless they are
    /// resident. The registry must be locked, so that nothing is moved out meanwhile.
    fn forget(&self, start: usize, end: usize) {
        self.forget_as(start, end, PageState::UNTOUCHED);
    }

    /// As [`Steward::forget`]; pages that may be there come into the state `there`.
    fn forget_as(&self, start: usize, end: usize, there: PageState) {
        for page in known_pages(self.core.space, start, end) {
            self.forget_page(page, there);
        }
        for superpage in known_superpages(self.core.space, start, end) {
            superpage.hot.iter().for_each(|hot| hot.store(0, Relaxed));
            self.free_if_empty(superpage);
        }
    }

    fn forget_page(&self, page: Page, there: PageState) {
        while !try_forget(self.core, page, there) {
            if matches!(page.cell().load().phase(), Phase::Fetching | Phase::Evicting) {
                // Whoever owns it lets it go soon.
                sys::pause();
            }
        }
    }

    /// Gives a superpage's memory back to the blade when none of its pages is there any more; later, if it cannot be
    /// done now. The registry must be locked.
    fn free_if_empty(&self, superpage: &'static Superpage) {
        // The evictor may be about to get memory for it.
        let Ok(_changing) = self.core.layers.changing.lock() else { return };
        let current = self.core.layers.current();
        // Frozen layers are immutable; they go as a whole.
        let is_there =
            current < MAX_LAYERS && superpage.allocated.load(SeqCst) & (1 << current) != 0;
        if !is_there || !superpage.is_empty() {
            return;
        }
        let Some(segment) = self.core.layers.segment(current) else {
            return;
        };
        let in_buffer = superpage.trays.iter().any(|tray| tray.load(SeqCst) != NO_TRAY);
        superpage.allocated.fetch_and(!(1 << current), SeqCst);
        // The blade refuses while any page of the segment is being written. A lost one has nothing any more.
        let is_kept = || {
            self.core.pool.free_superpage(segment, superpage.id()).is_err()
                && self.core.pool.blade_of(segment, superpage.id()).is_some()
        };
        if in_buffer || is_kept() {
            superpage.allocated.fetch_or(1 << current, SeqCst);
            self.empty.borrow_mut().insert(superpage.id());
        }
    }

    /// Tries again to give back the memory of superpages that were empty.
    fn free_empty(&self) {
        let is_due = self.emptied.get().elapsed() >= EMPTY_STEP;
        if self.empty.borrow().is_empty() || !is_due || self.core.gate.is_shut() {
            return;
        }
        self.emptied.set(Instant::now());
        let Ok(_registry) = self.pager.registry.lock() else { return };
        for id in self.empty.take() {
            if let Some(superpage) = self.core.space.by_id(id as usize) {
                self.free_if_empty(superpage);
            }
        }
    }

    /// Writes the page in the fetcher's memory to `target`'s place in `layer` and makes it far there. `changing` must be
    /// locked, for the layer may get memory, and `target` must be the caller's.
    fn store_page(&mut self, target: Page, layer: usize) -> Result<(), i32> {
        let superpage = target.superpage;
        let segment = self.core.layers.segment(layer).ok_or(libc::EFAULT)?;
        if superpage.allocated.load(SeqCst) & (1 << layer) == 0 {
            self.core.pool.allocate_superpage(segment, superpage.id()).map_err(|_| libc::ENOMEM)?;
            superpage.allocated.fetch_or(1 << layer, SeqCst);
        }
        let at = self.core.place(target, layer).ok_or(libc::EFAULT)?;
        let write = PageWrite { at, from: self.fetcher.memory as *const u8, token: 0 };
        // SAFETY: the fetcher's memory is this thread's own memory, and nothing touches it before `await_one`.
        unsafe { self.fetcher.lane.write(&[write]) }.map_err(|_| libc::EIO)?;
        self.await_one()?;
        superpage.far_pages.fetch_add(1, Relaxed);
        target.cell().store(PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(layer));
        Ok(())
    }

    /// Reads one page; its target lies in the fetcher's memory.
    fn read_page(&mut self, read: PageRead) -> Result<(), i32> {
        // SAFETY: the fetcher's memory is this thread's own memory, and nothing touches it before `await_one`.
        unsafe { self.fetcher.lane.read(&[read]) }.map_err(|_| libc::EIO)?;
        self.await_one()
    }

    fn await_one(&mut self) -> Result<(), i32> {
        self.fetcher.done.clear();
        while self.fetcher.done.is_empty() {
            self.fetcher.lane.wait(&mut self.fetcher.done);
        }
        match self.fetcher.done.first() {
            Some(Completion { result: Ok(()), .. }) => Ok(()),
            _ => Err(libc::EIO),
        }
    }

    // ---- fork ------------------------------------------------------------------------------------

    /// Whether a fork could share what is far. If a blade cannot share any more, first everything is given up there of
    /// which no page is needed.
    fn may_fork(&mut self) -> Result<(), i32> {
        if self.core.pool.may_share().is_ok() {
            return Ok(());
        }
        {
            let _registry = self.pager.registry.lock().map_err(|_| libc::EDEADLK)?;
            self.core.gate.shut();
            self.empty_buffer();
            let thinned = {
                let _changing = self.core.layers.changing.lock();
                self.thin_out_layers()
            };
            let all = (0..self.core.space.count()).filter_map(|id| self.core.space.by_id(id));
            all.for_each(|superpage| self.free_if_empty(superpage));
            self.core.gate.open(&self.core.uffd);
            thinned?;
        }
        self.core.pool.may_share().map_err(|error| {
            if !std::mem::replace(&mut self.refusal_said, true) {
                sys::say(&format!(
                    "fork fails with ENOMEM from now on, for far memory cannot be shared with a child: {error}"
                ));
            }
            libc::ENOMEM
        })
    }

    /// Brings everything to rest so that the child's copy of the address space and of the states is of
    /// one moment: only the forking thread's faults are served, nothing is evicted, the victim
    /// buffer is empty, and what is far is in frozen layers.
    fn prepare_fork(&mut self, thread: u32) -> Result<(), i32> {
        // First the lock, then the gate: the evictor, which reads pages of the program where they are while it has the
        // lock, may have a fault of its own.
        let _registry = self.pager.registry.lock().map_err(|_| libc::EDEADLK)?;
        self.core.gate.shut();
        self.core.note_fork();
        self.empty_buffer();
        let result = {
            let _changing = self.core.layers.changing.lock();
            self.freeze()
        };
        match result {
            Ok(()) => self.core.gate.admit(thread, &self.core.uffd),
            Err(_) => self.core.gate.open(&self.core.uffd),
        }
        result
    }

    /// Waits until the evictor has written all it moved out, and lets all victims become far.
    fn empty_buffer(&self) {
        let mut taken = Vec::new();
        loop {
            self.core.frames.take_trays(usize::MAX, &mut taken);
            self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut taken);
            if self.core.frames.is_empty() {
                return;
            }
            self.core.budget.kick();
            sys::pause();
        }
    }

    /// Freezes the current layer once there is room for a new one in parent and child.
    fn freeze(&mut self) -> Result<(), i32> {
        self.thin_out_layers()?;
        self.freeze_layers().map_err(|error| {
            sys::say(&format!("fork is refused, for far memory cannot be shared: {error}"));
            libc::ENOMEM
        })
    }

    /// Freezes the current layer and keeps the tokens of all layers where the child finds them.
    fn freeze_layers(&mut self) -> Result<(), StartError> {
        let mut tokens = [None; MAX_LAYERS];
        // Until the child is expected nothing that it will attach may be given up.
        let still = self.core.pool.hold_still();
        for layer in self.core.layers.live() {
            let Some(segment) = self.core.layers.segment(layer) else {
                continue;
            };
            tokens[layer] = Some(self.core.pool.freeze_still(&still, segment)?);
        }
        self.core.layers.set_current(MAX_LAYERS);
        self.pager.inheritance.set(tokens);
        Ok(self.pager.inheritance.expect_child()?)
    }

    /// Keeps two layers free (the next current one of parent and child): gives up layers that nothing
    /// is in any more, then carries the smallest ones into the current one.
    fn thin_out_layers(&mut self) -> Result<(), i32> {
        loop {
            let mut pages = [0_usize; MAX_LAYERS];
            let count = self.core.space.count();
            for id in 0..count {
                let Some(superpage) = self.core.space.by_id(id) else {
                    continue;
                };
                if superpage.far_pages.load(SeqCst) == 0 {
                    continue;
                }
                let states = superpage.pages.iter().map(crate::space::page::PageCell::load);
                for state in states.filter(|state| state.phase() == Phase::Far) {
                    pages[state.layer()] += 1;
                }
            }
            let current = self.core.layers.current();
            let live: Vec<usize> = self.core.layers.live().collect();
            // A child of an earlier fork may be about to attach any of them.
            if !self.pager.inheritance.is_settled() {
                if live.len() <= MAX_LAYERS - 2 {
                    return Ok(());
                }
                self.pager.inheritance.settle();
            }
            for layer in live.iter().filter(|layer| pages[**layer] == 0 && **layer != current) {
                self.drop_layer(*layer);
            }
            let left: Vec<usize> = self.core.layers.live().collect();
            if left.len() <= MAX_LAYERS - 2 {
                return Ok(());
            }
            let into =
                self.core.layers.current_or_new(&self.core.pool).map_err(|_| libc::ENOMEM)?;
            let smallest =
                left.into_iter().filter(|layer| *layer != into).min_by_key(|l| pages[*l]);
            self.merge_layer(smallest.ok_or(libc::ENOMEM)?, into)?;
        }
    }

    fn merge_layer(&mut self, layer: usize, into: usize) -> Result<(), i32> {
        for id in 0..self.core.space.count() {
            let Some(superpage) = self.core.space.by_id(id) else {
                continue;
            };
            for index in 0..superpage.pages.len() {
                let page = Page { superpage, index };
                let state = page.cell().load();
                if state.phase() != Phase::Far || state.layer() != layer {
                    continue;
                }
                let from = self.core.place(page, layer).ok_or(libc::EFAULT)?;
                self.read_page(PageRead {
                    at: from,
                    into: self.fetcher.memory as *mut u8,
                    token: 0,
                })?;
                self.store_page(page, into)?;
                // It was counted there already; a page that could not be stored stays so.
                superpage.leave_blade();
            }
        }
        self.drop_layer(layer);
        Ok(())
    }

    fn drop_layer(&self, layer: usize) {
        let Some(segment) = self.core.layers.segment(layer) else {
            return;
        };
        for id in 0..self.core.space.count() {
            if let Some(superpage) = self.core.space.by_id(id) {
                superpage.allocated.fetch_and(!(1 << layer), SeqCst);
                give_up_copies(superpage, layer);
            }
        }
        self.core.layers.set(layer, None);
        let _ = self.core.pool.detach(segment);
    }
}

/// The layer goes: no page may count on its copy there. Nothing is on its way.
fn give_up_copies(superpage: &Superpage, layer: usize) {
    if superpage.copies.load(SeqCst) == 0 {
        return;
    }
    for cell in &superpage.pages {
        let state = cell.load();
        if state.has_copy() && state.layer() == layer && cell.change(state, state.with_copy(false))
        {
            superpage.give_up_copy(state);
        }
    }
}

/// madvise on the program's behalf; the error is an errno.
fn advise(start: usize, end: usize, advice: i32) -> Result<(), i32> {
    sys::advise(start, end - start, advice)
        .map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
}
