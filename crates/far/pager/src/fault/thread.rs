//! A fault thread's state: its claims, requests and flights, and its own pages.

use std::time::Instant;

use farpool_policy::PrefetchWindow;
use farpool_policy::reserve::MAX_ZERO_RUN;
use farpool_pool::{Completion, Lane, PageRead};
use farpool_units::PAGE_BYTES;

use crate::core::Core;
use crate::space::Page;
use crate::space::frames::FrameSlot;
use crate::sys;
use crate::sys::Stamp;

/// Requests that one thread can have under way at a time; at the limit it finishes those first.
const MAX_FLIGHTS: usize = 512;
/// A thread's own pages for fetches while there is no free frame; beyond these, faults wait.
const STAGE_PAGES: usize = 64;

/// See [`crate::fault`].
#[derive(Debug)]
pub struct FaultThread {
    pub(super) core: &'static Core,
    pub(super) lane: Lane,
    pub(super) window: PrefetchWindow,
    /// Capacity for [`MAX_FLIGHTS`] is reserved, and takes memory when it is used.
    pub(super) flights: Vec<Option<Flight>>,
    pub(super) free_flights: Vec<usize>,
    pub(super) claimed: Vec<Page>,
    pub(super) reads: Vec<PageRead>,
    pub(super) done: Vec<Completion>,
    pub(super) landed: Vec<Flight>,
    pub(super) stage: usize,
    pub(super) free_stage: Vec<usize>,
    /// How many pages of the stage, from its beginning, may take memory.
    pub(super) stage_used: usize,
    pub(super) zeros: usize,
    /// Which pages of the run of first touches that is being filled were in phase Dropped.
    pub(super) dropped: u64,
    /// Times this thread has entered the gate and not left it.
    pub(super) passes: u32,
    /// When deadlines were last checked.
    pub(super) expired: Instant,
}

/// Where an arriving page is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// A frame of the buffer; it is moved into the program.
    Slot(FrameSlot),
    /// A page of this thread's own; it is copied into a new frame.
    Stage(usize),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) page: Page,
    pub(super) frame: Frame,
    pub(super) demand: bool,
    pub(super) started: Stamp,
}

impl FaultThread {
    pub fn new(core: &'static Core, lane: Lane) -> Result<Self, std::io::Error> {
        let bytes = (STAGE_PAGES + MAX_ZERO_RUN) * PAGE_BYTES;
        let stage = sys::map_local_without_children(bytes)?;
        Ok(FaultThread {
            core,
            lane,
            window: PrefetchWindow::EMPTY,
            flights: Vec::with_capacity(MAX_FLIGHTS),
            free_flights: Vec::with_capacity(MAX_FLIGHTS),
            claimed: Vec::with_capacity(MAX_FLIGHTS),
            reads: Vec::with_capacity(MAX_FLIGHTS),
            done: Vec::with_capacity(MAX_FLIGHTS),
            landed: Vec::with_capacity(MAX_FLIGHTS),
            stage,
            free_stage: (0..STAGE_PAGES).rev().collect(),
            stage_used: 0,
            zeros: stage + STAGE_PAGES * PAGE_BYTES,
            dropped: 0,
            passes: 0,
            expired: Instant::now(),
        })
    }

    /// How many more flights there is a place for.
    pub(super) fn places(&self) -> usize {
        self.free_flights.len() + MAX_FLIGHTS - self.flights.len()
    }

    /// A place for a flight; None if all are taken.
    pub(super) fn place(&mut self) -> Option<usize> {
        let new = self.flights.len();
        self.free_flights.pop().or_else(|| {
            (new < MAX_FLIGHTS).then(|| {
                self.flights.push(None);
                new
            })
        })
    }

    pub(super) fn stage_page(&mut self) -> usize {
        if self.free_stage.len() == STAGE_PAGES {
            // In order, so that a run is copied with one call.
            self.free_stage.sort_unstable_by_key(|index| std::cmp::Reverse(*index));
        }
        loop {
            if let Some(index) = self.free_stage.pop() {
                self.stage_used = self.stage_used.max(index + 1);
                return index;
            }
            self.lane.wait(&mut self.done);
            self.land();
        }
    }

    /// Frees the stage's memory, which counts against the limit in each process. Nothing may be in
    /// flight.
    pub(super) fn release_stage(&mut self) {
        assert_eq!(self.free_stage.len(), STAGE_PAGES, "a page of the stage is in flight");
        // If the program has locked it, it stays, and is written over.
        let _ = sys::release(self.stage, std::mem::take(&mut self.stage_used) * PAGE_BYTES);
    }

    pub(super) fn wake(&self, page: Page) {
        let _ = self.core.uffd.wake(page.address(), PAGE_BYTES);
    }

    pub(super) fn record(&self, started: Stamp, fetched: bool) {
        let Some(latency_ns) = started.elapsed_ns() else { return };
        let slot = self.core.slot;
        let histogram = if fetched { &slot.fetch_latency } else { &slot.other_latency };
        histogram.record(latency_ns);
    }
}
