//! Walks a trace through the pager's memory.

use farpool_policy::reserve::{
    self, LEAST_MOVED_PAGES, Standing, low_mark_pages, margin_pages, wants_eviction,
};
use farpool_policy::{
    ChunkSweep, PrefetchKind, PrefetchWindow, Prefetcher, SweepPolicy, VictimKind,
};
use farpool_units::{at_most, exactly};

use super::Events;
use super::memory::{Memory, Phase};
use crate::load::References;

/// Threads whose first touches are tracked separately.
const PLACES: usize = 16;
/// After this many chunks in vain per chunk there is, nothing can be evicted.
const MOST_LAPS: usize = farpool_policy::sweep::HOT_LAPS as usize + 1;

/// With a share, local memory never falls below this, as in `farpool run`
/// (`farpool_run::PERCENT_FLOOR_BYTES`).
pub const SHARE_FLOOR_BYTES: u64 = 16 << 20;

/// `--local` of `farpool run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// A size, in pages.
    Pages(u64),
    /// A share of what the program has in use so far, near and far: it grows with the program. The
    /// trace has no frees, so that here it never falls.
    Share {
        /// In thousandths.
        permille: u32,
        /// Never less, in pages.
        least_pages: u64,
    },
}

impl Limit {
    /// Returns the limit in pages when this many are in use.
    #[must_use]
    pub fn pages(self, in_use: u64) -> u64 {
        match self {
            Limit::Pages(pages) => pages,
            Limit::Share { permille, least_pages } => {
                (in_use.saturating_mul(permille.into()) / 1000).max(least_pages)
            }
        }
    }
}

/// The settings of `farpool run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `--local`.
    pub limit: Limit,
    /// Pages that count against the limit and cannot be far: code and files, the pager's own
    /// memory.
    pub fixed_pages: u64,
    /// `--victims`.
    pub victims: VictimKind,
    /// `--prefetch`.
    pub prefetch: PrefetchKind,
    /// Unchanged pages that arrived in runs are recognised as unchanged; over `shm` that does not
    /// pay.
    pub remembers_runs: bool,
    /// For the random victim policy.
    pub seed: u64,
}

/// Counts the pager's events for this program.
#[must_use]
pub fn events(trace: &References, settings: &Settings) -> Events {
    let mut run = Run::new(trace, settings);
    for reference in &trace.references {
        run.refer(reference.page, usize::from(reference.thread), reference.access.is_write());
    }
    run.events
}

struct Run<'a> {
    trace: &'a References,
    memory: Memory,
    sweep: ChunkSweep,
    prefetcher: Box<dyn Prefetcher>,
    /// Where each thread's last run of first touches ended, and its length.
    zero_runs: [(u64, usize); PLACES],
    rule: Limit,
    /// All pages that cannot be far, and how many of them count against the limit.
    fixed_pages: u64,
    limit: i64,
    fixed: i64,
    low: i64,
    allowance: i64,
    is_active: bool,
    events: Events,
}

impl<'a> Run<'a> {
    fn new(trace: &'a References, settings: &Settings) -> Self {
        let mut run = Self {
            trace,
            memory: Memory::new(&trace.page_numbers, settings.remembers_runs),
            sweep: ChunkSweep::new(settings.victims, 0, settings.seed),
            prefetcher: settings.prefetch.build(),
            zero_runs: [(0, 0); PLACES],
            rule: settings.limit,
            fixed_pages: settings.fixed_pages,
            limit: 0,
            fixed: 0,
            low: 0,
            allowance: 0,
            is_active: false,
            events: Events::default(),
        };
        run.set_limit();
        run
    }

    /// Recomputes the limit from what the program has in use now.
    fn set_limit(&mut self) {
        // A limit above all memory means all of it.
        self.limit = at_most(self.rule.pages(self.memory.touched_pages() + self.fixed_pages));
        // Pages of files count for at most half of the limit.
        self.fixed = at_most::<i64, _>(self.fixed_pages).min(self.limit / 2);
        self.low = low_mark_pages(self.limit, 1);
    }

    fn refer(&mut self, page: u32, thread: usize, is_write: bool) {
        if self.memory.refer(page, is_write) {
            return;
        }
        if !self.is_active {
            self.memory.settle(page, false);
            self.set_limit();
            self.is_active = self.counted() >= self.limit - margin_pages(self.limit);
            if self.is_active {
                self.look();
            }
            return;
        }
        self.events.faults += 1;
        match self.memory.phase(page) {
            Phase::Untouched => self.zero_fill(page, thread),
            Phase::Victim => self.take_back(page),
            Phase::Far => self.fetch(page, thread),
            Phase::Resident => {}
        }
        // A page written while the program could not see it still counts as changed.
        self.memory.refer(page, is_write);
        if wants_eviction(self.allowance, self.low, signed(self.memory.free_frames())) {
            self.evict();
        }
    }

    /// Returns the pages that count against the limit: fixed ones, the program's, and those in the
    /// buffer.
    fn counted(&self) -> i64 {
        self.fixed + signed(self.memory.resident_pages() + self.memory.free_frames())
    }

    /// Zeroes pages for a first touch; consecutive first touches get runs that double.
    fn zero_fill(&mut self, page: u32, thread: usize) {
        let number = self.trace.page_numbers[page as usize];
        let (end, length) = self.zero_runs[thread % PLACES];
        let wanted = reserve::zero_run_pages((end == number).then_some(length));
        let mut run = 0;
        for next in number..number + wanted as u64 {
            let Some(dense) = self.trace.dense(next) else { break };
            if self.memory.phase(dense) != Phase::Untouched {
                break;
            }
            self.spend_or_take();
            self.memory.settle(dense, false);
            self.announce(dense);
            run += 1;
        }
        self.zero_runs[thread % PLACES] = (number + run as u64, run);
        self.events.zero_fills += 1;
        self.events.pages_zeroed += run as u64;
    }

    fn take_back(&mut self, page: u32) {
        self.memory.take_back(page);
        self.events.victim_hits += 1;
        if self.sweep.needs_events()
            && let Some(chunk) = self.memory.chunk_number(page)
        {
            self.sweep.on_take_back(chunk);
        }
    }

    fn fetch(&mut self, page: u32, thread: usize) {
        let mut window = PrefetchWindow::EMPTY;
        let number = self.trace.page_numbers[page as usize];
        self.prefetcher.on_fault(exactly(thread), number, &mut window);
        let far = |number| {
            self.trace.dense(number).filter(|dense| self.memory.phase(*dense) == Phase::Far)
        };
        let mut claimed: Vec<u32> = vec![page];
        claimed.extend(window.pages().filter_map(far).filter(|ahead| *ahead != page));
        let is_moved = claimed.len() >= LEAST_MOVED_PAGES;
        let mut frames = 0;
        let mut fetched = 0;
        for (at, ahead) in claimed.iter().copied().enumerate() {
            if is_moved && frames == 0 {
                frames = self.memory.take_frames((claimed.len() - at) as u64);
            }
            if frames > 0 {
                frames -= 1;
            } else if fetched == 0 || (!is_moved && self.allowance > 0) {
                self.spend_or_take();
            } else {
                break;
            }
            self.memory.settle(ahead, is_moved);
            self.announce(ahead);
            fetched += 1;
        }
        self.events.demand_fetches += 1;
        self.events.prefetches += fetched - 1;
    }

    /// Pays for one new page: from the allowance, which the evictor refills if needed, else with a
    /// frame.
    fn spend_or_take(&mut self) {
        if self.allowance <= 0 {
            self.evict();
        }
        if self.allowance > 0 || self.memory.take_frames(1) == 0 {
            self.allowance -= 1;
        }
    }

    fn announce(&mut self, page: u32) {
        if self.sweep.needs_events()
            && let Some(chunk) = self.memory.chunk_number(page)
        {
            self.sweep.grow(self.memory.chunk_count());
            self.sweep.on_fetch(chunk);
        }
    }

    /// Recounts the pages and asks the policy what the evictor has to do.
    fn look(&mut self) -> reserve::Work {
        self.set_limit();
        let mine = signed(self.memory.resident_pages());
        let standing = Standing {
            headroom_pages: self.limit - self.counted(),
            active_processes: 1,
            evictable_pages: mine,
            mine_pages: mine,
            free_frames: signed(self.memory.free_frames()),
        };
        let (allowance, work) = reserve::decide(self.low, &standing);
        self.allowance = allowance;
        work
    }

    /// Runs the evictor until there is nothing left to do.
    fn evict(&mut self) {
        loop {
            let work = self.look();
            let moved = self.move_out(work.evict_pages);
            let released = self.memory.release(work.release_pages.max(0).unsigned_abs());
            if moved == 0 && released == 0 {
                return;
            }
        }
    }

    fn move_out(&mut self, pages: i64) -> u64 {
        self.sweep.grow(self.memory.chunk_count());
        let (wanted, mut moved) = (pages.max(0).unsigned_abs(), 0);
        let mut barren = 0;
        while moved < wanted && barren <= self.memory.chunk_count() * MOST_LAPS {
            let Some(chunk) = self.sweep.next_chunk() else { break };
            let now = self.memory.evict_chunk(chunk, &mut self.sweep, &mut self.events);
            moved += now;
            barren = if now > 0 { 0 } else { barren + 1 };
        }
        moved
    }
}

fn signed(pages: u64) -> i64 {
    exactly(pages)
}
