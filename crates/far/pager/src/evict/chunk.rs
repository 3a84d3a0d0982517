//! Moves the pages of one chunk out.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use farpool_board::Counter;
use farpool_policy::{Choice, SweepPolicy};

use crate::evict::aside::Moved;
use crate::evict::claim::claim;
use crate::evict::evictor::Evictor;
use crate::evict::exits::{self, Tails};
use crate::evict::room::has_memory;
use crate::evict::wanted::{Own, Tried, Wanted};
use crate::space::Superpage;
use crate::space::frames::Zone;
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, CHUNKS, NO_TRAY};
use crate::space::way::{Way, next_way};

/// The longest wait for a change of the address space at a time; the steward wakes the waiter.
const STEWARD_WAIT: Duration = Duration::from_millis(1);

/// A chunk that is being moved out, and where to.
#[derive(Clone, Copy, Debug)]
struct Target {
    number: usize,
    superpage: &'static Superpage,
    tray: u16,
    layer: usize,
}

/// What became of the pages of a chunk.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// Pages that were written from where they are.
    written: i64,
    /// Pages that are in the tray, one bit each.
    moved: u64,
    /// The kernel refused to move any.
    are_all_refused: bool,
}

impl Evictor {
    /// Moves the wanted pages of a chunk out. Returns how many were moved; None: not now.
    pub(super) fn evict_chunk(&mut self, number: usize, wanted: Wanted) -> Option<i64> {
        let before = self.move_own()?;
        let moved = match self.try_chunk(number, wanted)? {
            Tried::Moved(pages) => pages,
            Tried::Shared(own) => {
                self.make_own(own.number, own.shared);
                self.own = Some(own);
                self.move_own()?
            }
        };
        Some(before + moved)
    }

    /// As [`Evictor::evict_chunk`], but pages that other processes also map may stay.
    pub(super) fn try_chunk(&mut self, number: usize, wanted: Wanted) -> Option<Tried> {
        loop {
            let tried = self.try_known_chunk(number, wanted)?;
            let Some(tail) = self.unseen_tail.take() else { return Some(tried) };
            let Some(is_descriptor) = exits::look(self.core, &tail) else {
                // The map of resident pages is out of date.
                self.map.forget(number % CHUNKS);
                return Some(tried);
            };
            let mut registry = self.core.registry.try_lock().ok()?;
            registry.see_tail(tail.end, is_descriptor, Instant::now());
        }
    }

    /// As [`Evictor::try_chunk`], once the ends of the chunk's mappings have been checked. If one
    /// has not, it is left in `unseen_tail`.
    fn try_known_chunk(&mut self, number: usize, wanted: Wanted) -> Option<Tried> {
        const NOTHING: Option<Tried> = Some(Tried::Moved(0));
        let core = self.core;
        let superpage = core.space.by_id(number / CHUNKS)?;
        let chunk = number % CHUNKS;
        if wanted == Wanted::Chosen && self.stubborn.is_passed_over(number, self.round_began) {
            return NOTHING;
        }
        if superpage.trays[chunk].load(SeqCst) != NO_TRAY || !self.may_write(superpage) {
            return NOTHING;
        }
        if core.layout.is_behind() {
            // The steward wants the lock, and would hardly get it from a thread that takes it over
            // and over.
            core.layout.wait_for_steward(STEWARD_WAIT);
            return None;
        }
        let registry = core.registry.try_lock().ok()?;
        // A pager that leaves the program checks under this lock that no page is away.
        if core.gate.is_shut() || core.leaving.load(SeqCst) {
            return None;
        }
        // A fork since `may_write` has begun a new layer. From here on none can begin before the
        // tray is written: it waits for the lock, and then for the tray.
        let layer = core.layers.current();
        if !has_memory(superpage, layer) {
            return NOTHING;
        }
        let movable = self.movable(&registry, superpage, number, wanted);
        let Some((zone, resident)) = movable else { return NOTHING };
        let tray = core.frames.take_empty(zone)?;
        self.clear_poison(tray);
        let take = self.choose(number, superpage, resident, wanted);
        let may_share = wanted.may_be_shared() && core.shares.load(SeqCst) && core.layout.follows();
        let shared = if may_share { self.shared_pages(number, take) } else { 0 };
        if take == 0 || shared != 0 {
            core.frames.return_empty(tray);
            return Some(Tried::of(Own { number, take, shared }));
        }
        let target = Target { number, superpage, tray, layer };
        let taken = self.take_pages(&registry, target, take, resident, wanted);
        drop(registry);
        Some(self.conclude(target, wanted, &taken))
    }

    /// The pages of a chunk that could be moved out now, and the zone of the buffer to move them
    /// through. None: there are none, or something else has to be done first.
    fn movable(
        &mut self,
        registry: &Registry,
        superpage: &Superpage,
        number: usize,
        wanted: Wanted,
    ) -> Option<(Zone, u64)> {
        let (core, chunk) = (self.core, number % CHUNKS);
        let mut resident = self.map.resident(core, registry, superpage, chunk);
        if resident == 0 {
            if wanted == Wanted::Chosen {
                // In a sparse address space hardly anything else would be checked.
                self.passed_over = self.map.empty_after(chunk);
                self.sweep.pass_over(self.passed_over);
            }
            return None;
        }
        let start = superpage.base() + chunk * CHUNK_BYTES;
        if core.layout.follows() {
            match exits::tails(registry, start, resident, Instant::now()) {
                Tails::Known(held) => resident &= !held,
                Tails::Unknown(tail) => {
                    self.unseen_tail = Some(tail);
                    return None;
                }
            }
        }
        let (way, resident) =
            next_way(registry, start, resident, |protection| core.way(protection));
        match way {
            Way::Move(zone) if wanted != Wanted::Still => Some((zone, resident)),
            Way::Standstill if wanted == Wanted::Still => Some((Zone::ReadWrite, resident)),
            Way::Standstill => {
                let pages = self.choose(number, superpage, resident, wanted);
                self.aside.put(number, u64::from(pages.count_ones()));
                None
            }
            _ => None,
        }
    }

    /// Steps 1 to 3 of an eviction, see [`crate::evict`]. Of the pages that can be moved
    /// (`resident`) it moves `take`.
    fn take_pages(
        &mut self,
        registry: &Registry,
        target: Target,
        take: u64,
        resident: u64,
        wanted: Wanted,
    ) -> Taken {
        let Target { number, superpage, tray, layer } = target;
        let (core, chunk) = (self.core, number % CHUNKS);
        let start = superpage.base() + chunk * CHUNK_BYTES;
        let loans = (wanted == Wanted::Still).then(|| self.lend(registry, start, take));
        if loans.is_some() {
            self.make_own_at_standstill(number, start, take);
        }
        let mut claim = claim(superpage, chunk, take, resident);
        let written = self.write_shared(superpage, chunk, layer, &mut claim);
        core.filling.store(tray, SeqCst);
        let refused = self.move_out(superpage, chunk, tray, &claim);
        let moved = self.settle(superpage, chunk, tray, layer, &claim);
        core.filling.store(NO_TRAY, SeqCst);
        if let Some(loans) = loans {
            self.give_rights_back(loans);
        }
        Taken { written, moved, are_all_refused: refused == claim.taken() }
    }

    /// Records the outcome for a chunk, and has the moved pages written. The registry is not
    /// locked.
    fn conclude(&mut self, target: Target, wanted: Wanted, taken: &Taken) -> Tried {
        let Target { number, superpage, tray, layer } = target;
        let (core, moved) = (self.core, taken.moved);
        let busy = self.take_busy(number);
        if moved == 0 && busy != 0 && wanted.may_be_shared() {
            core.frames.return_empty(tray);
            return Tried::Shared(Own { number, take: busy, shared: busy });
        }
        self.map.forget(number % CHUNKS);
        if moved == 0 {
            core.frames.return_empty(tray);
            // Busy pages can be made the process's own.
            if busy == 0 && taken.are_all_refused {
                self.stubborn.note(number, self.round_began);
            }
            self.make_own(number, busy);
            return Tried::Moved(taken.written);
        }
        self.stubborn.forget(number);
        core.count(Counter::Evictions, u64::from(moved.count_ones()));
        core.count(Counter::EvictedChunks, 1);
        self.density.add(moved);
        let count = i64::from(moved.count_ones());
        if wanted == Wanted::Still {
            self.aside.keep(Moved { superpage, tray, layer });
            return Tried::Moved(count);
        }
        self.write(superpage, tray, layer);
        self.make_own(number, busy);
        Tried::Moved(taken.written + count)
    }

    /// The pages of a chunk to move out.
    fn choose(
        &mut self,
        number: usize,
        superpage: &Superpage,
        resident: u64,
        wanted: Wanted,
    ) -> u64 {
        let hot = &superpage.hot[number % CHUNKS];
        let choice = match wanted {
            Wanted::Chosen => self.sweep.choose(number, resident, hot.load(Relaxed)),
            Wanted::All | Wanted::Still => Choice { take: resident, clear_hot: resident },
            Wanted::These(pages) => Choice { take: pages & resident, clear_hot: 0 },
        };
        hot.fetch_and(!choice.clear_hot, Relaxed);
        choice.take
    }
}
