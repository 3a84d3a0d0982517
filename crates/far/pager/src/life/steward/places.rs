//! Moves single pages from one place on the blades to another.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use farpool_pool::{Completion, PageRead, PageWrite};

use crate::life::steward::state::Steward;
use crate::space::Page;
use crate::space::page::{PageState, Phase};

impl Steward {
    /// Writes the page in the fetcher's memory to `target`'s place in `layer` and makes it far
    /// there. `changing` must be locked, because the layer may get memory, and the caller must own
    /// `target`.
    pub(super) fn store_page(&mut self, target: Page, layer: usize) -> Result<(), i32> {
        let superpage = target.superpage;
        let segment = self.core.layers.segment(layer).ok_or(libc::EFAULT)?;
        if superpage.allocated.load(SeqCst) & (1 << layer) == 0 {
            self.core.pool.allocate_superpage(segment, superpage.id()).map_err(|_| libc::ENOMEM)?;
            superpage.allocated.fetch_or(1 << layer, SeqCst);
        }
        let at = self.core.place(target, layer).ok_or(libc::EFAULT)?;
        let write = PageWrite { at, from: self.fetcher.memory as *const u8, token: 0 };
        // SAFETY: the fetcher's memory is this thread's own memory, and nothing touches it before
        // `await_one`.
        unsafe { self.fetcher.lane.write(&[write]) }.map_err(|_| libc::EIO)?;
        self.await_one()?;
        superpage.far_pages.fetch_add(1, Relaxed);
        target.cell().store(PageState::UNTOUCHED.with_phase(Phase::Far).with_layer(layer));
        Ok(())
    }

    /// Reads one page into the fetcher's memory.
    pub(super) fn read_page(&mut self, read: PageRead) -> Result<(), i32> {
        // SAFETY: the fetcher's memory is this thread's own memory, and nothing touches it before
        // `await_one`.
        unsafe { self.fetcher.lane.read(&[read]) }.map_err(|_| libc::EIO)?;
        self.await_one()
    }

    fn await_one(&mut self) -> Result<(), i32> {
        self.fetcher.done.clear();
        while self.fetcher.done.is_empty() {
            self.fetcher.lane.wait(&mut self.fetcher.done);
        }
        let last = self.fetcher.done.pop();
        self.fetcher.failure = last.and_then(|Completion { result, .. }| result.err());
        self.fetcher.failure.as_ref().map_or(Ok(()), |_| Err(libc::EIO))
    }
}
