//! Layers of far memory: they are frozen for a child, and dropped when there are too many.

use std::sync::atomic::Ordering::SeqCst;

use farpool_pool::PageRead;

use crate::error::StartError;
use crate::life::inheritance::Layer;
use crate::life::steward::state::Steward;
use crate::space::page::{MAX_LAYERS, Phase};
use crate::space::{Page, Superpage};

impl Steward {
    /// Freezes the current layer and keeps the tokens of all layers where the child finds them.
    pub(super) fn freeze_layers(&mut self) -> Result<(), StartError> {
        let mut layers = [const { None }; MAX_LAYERS];
        // Until the child is expected nothing that it will attach may be dropped.
        let still = self.core.pool.hold_still();
        for layer in self.core.layers.live() {
            let Some(segment) = self.core.layers.segment(layer) else {
                continue;
            };
            let token = self.core.pool.freeze_still(&still, segment)?;
            layers[layer] = Some(Layer { token, seals: self.core.pool.seals(segment) });
        }
        self.core.layers.set_current(MAX_LAYERS);
        self.pager.inheritance.set(layers);
        Ok(self.pager.inheritance.expect_child()?)
    }

    /// Keeps two layers free (the next current one of parent and child): drops layers without
    /// pages, then merges the smallest ones into the current one.
    pub(super) fn thin_out_layers(&mut self) -> Result<(), i32> {
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
                // It was counted there already; a page that could not be stored stays counted.
                superpage.leave_blade();
            }
        }
        self.drop_layer(layer);
        Ok(())
    }

    pub(super) fn drop_layer(&self, layer: usize) {
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

/// Gives up all copies in a layer that is dropped. Nothing is under way.
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
