//! Finds memory for pages to be moved out to: a superpage's memory on a blade that takes pages.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use farpool_board::Redundancy;
use farpool_pool::{BladeIndex, PageError, PoolError, SegmentHandle};

use crate::evict::evictor::{Evictor, FULL_RETRY};
use crate::space::Superpage;
use crate::space::page::MAX_LAYERS;
use crate::space::units::NO_TRAY;

impl Evictor {
    /// Whether no blade takes pages now. If that will last, no thread waits for free memory any
    /// more.
    pub(super) fn are_refused(&self) -> bool {
        let (pool, refusals, now) = (&self.core.pool, &self.refusals, Instant::now());
        let are_refused = !pool.usable_blades().any(|blade| refusals.may_send(blade, now));
        let is_lasting = pool.usable_blades().all(|blade| refusals.is_lasting(blade));
        self.core.refused.store(is_lasting, Relaxed);
        are_refused
    }

    /// Whether the superpage has memory on a blade to be moved out to, or gets some now. Pages
    /// whose blade is lost or takes none stay local: sending them there would only bring them back,
    /// over and over.
    pub(super) fn may_write(&mut self, superpage: &Superpage) -> bool {
        let layer = self.core.layers.current();
        if has_memory(superpage, layer) {
            let Some(segment) = self.core.layers.segment(layer) else { return false };
            return self.takes_pages(segment, superpage)
                || self.rehouse(segment, superpage) && self.takes_pages(segment, superpage);
        }
        if self.full_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        match self.allocate(superpage) {
            Ok(()) => true,
            Err(error) => {
                self.full_until = Some(Instant::now() + FULL_RETRY);
                self.core.report_full(&error);
                false
            }
        }
    }

    fn takes_pages(&self, segment: SegmentHandle, superpage: &Superpage) -> bool {
        let pool = &self.core.pool;
        let blade = pool.blade_of(segment, superpage.id()).filter(|blade| !pool.is_lost(*blade));
        blade.is_some_and(|blade| {
            self.refusals.is_empty() || self.refusals.may_send(blade, Instant::now())
        })
    }

    /// Gives a superpage whose blade is lost or takes no pages, and which has nothing there, memory
    /// on another blade. False: it stays as it is.
    #[cold]
    fn rehouse(&mut self, segment: SegmentHandle, superpage: &Superpage) -> bool {
        let (core, now) = (self.core, Instant::now());
        let in_buffer = superpage.trays.iter().any(|tray| tray.load(SeqCst) != NO_TRAY);
        if in_buffer
            || !superpage.is_empty()
            || self.rehouse_after.is_some_and(|after| now < after)
            || !core.pool.usable_blades().any(|blade| self.refusals.may_send(blade, now))
        {
            return false;
        }
        {
            let _changing = core.layers.changing.lock();
            let layer = core.layers.current();
            if core.gate.is_shut() || core.layers.segment(layer) != Some(segment) {
                return false;
            }
            // A lost blade frees nothing, and has nothing any more.
            let _ = core.pool.free_superpage(segment, superpage.id());
            if core.pool.blade_of(segment, superpage.id()).is_some() {
                self.rehouse_after = Some(now + FULL_RETRY);
                return false;
            }
            superpage.allocated.fetch_and(!(1 << layer), SeqCst);
        }
        match self.allocate(superpage) {
            Ok(()) => true,
            Err(error) => {
                self.rehouse_after = Some(now + FULL_RETRY);
                core.report_full(&error);
                false
            }
        }
    }

    /// Notes that a blade did not take a page.
    #[cold]
    pub(super) fn note_refusal(&mut self, blade: BladeIndex, error: PageError) {
        let (core, now) = (self.core, Instant::now());
        if self.refusals.may_send(blade, now) {
            core.pool.set_refusing(blade);
            // What is asked for in a lost blade's stead is enough, where its pages are to be had.
            let is_spared = core.settings.redundancy == Redundancy::Parity;
            if !(is_spared && core.pool.is_lost(blade)) {
                // Makes the rack find more memory for the run.
                core.board.header().full_reported.store(1, SeqCst);
            }
        }
        self.refusals.refuse(blade, now);
        let lost = core.pool.lost().into_iter().find(|lost| lost.blade == blade);
        match (error, lost) {
            (PageError::BladeLost(_), Some(lost)) => core
                .report_blade(blade, &format!("blade {} is lost: {}", lost.address, lost.reason)),
            _ => {
                let address = core.pool.describe(blade);
                core.report_blade(blade, &format!("blade {address} takes no pages: {error}"));
            }
        }
    }

    fn allocate(&mut self, superpage: &Superpage) -> Result<(), PoolError> {
        let _changing = self.core.layers.changing.lock();
        if self.core.gate.is_shut() {
            // A child must not inherit the mark of memory that only its parent has on the blade.
            return Ok(());
        }
        let layer = self.core.layers.current_or_new(&self.core.pool)?;
        if let Some(segment) = self.core.layers.segment(layer) {
            self.core.pool.allocate_superpage(segment, superpage.id())?;
            superpage.allocated.fetch_or(1 << layer, SeqCst);
            self.core.full.store(false, Relaxed);
        }
        Ok(())
    }
}

/// Whether a superpage has memory in a layer.
pub(super) fn has_memory(superpage: &Superpage, layer: usize) -> bool {
    layer < MAX_LAYERS && superpage.allocated.load(SeqCst) & (1 << layer) != 0
}
