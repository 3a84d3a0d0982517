//! Goes over chunks: those that the victim policy chooses, and those that the program does not need
//! soon.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use farpool_policy::SweepPolicy;

use crate::evict::evictor::Evictor;
use crate::evict::wanted::Wanted;
use crate::space::Superpage;
use crate::space::frames::TakenTray;
use crate::space::units::{CHUNK_BYTES, CHUNKS, NO_TRAY};
use crate::sys;

/// Chunks tried in vain before the evictor gives up for now: one lap at most.
const MAX_BARREN_CHUNKS: usize = 1 << 16;
/// Frames of retired pages are released above this number: few calls, and little strain on the
/// limit.
const RETIRED_FRAMES: i64 = 512;

impl Evictor {
    /// Moves out about `pages`. Returns how many were moved.
    pub(super) fn evict(&mut self, pages: i64) -> i64 {
        if self.are_refused() {
            return 0;
        }
        self.sweep.grow(self.core.space.count() * CHUNKS);
        self.round_began = Instant::now();
        let mut evicted = 0;
        let barren_limit = (self.core.space.count() * CHUNKS).min(MAX_BARREN_CHUNKS);
        let mut barren = 0;
        while evicted < pages && barren <= barren_limit {
            let Some(chunk) = self.sweep.next_chunk() else {
                break;
            };
            // Busy: the steward is at work, and must not be waited for while writes are under way.
            let Some(moved) = self.evict_chunk(chunk, Wanted::Chosen) else {
                break;
            };
            evicted += moved;
            self.core.crew.has_progressed(1);
            let passed_over = std::mem::take(&mut self.passed_over);
            barren = if moved > 0 { 0 } else { barren + 1 + passed_over };
            self.collect();
            if !self.refusals.is_empty() {
                // A blade that refused is on trial with the pages sent last.
                self.drain();
            } else if self.trays_in_flight >= self.trays_in_flight_limit {
                self.wait_for_blade(self.trays_in_flight_limit / 2);
            }
            if moved > 0 && self.core.budget.allowance() < 0 {
                break;
            }
        }
        evicted
    }

    /// Moves out everything that the program said it does not need soon. What it says meanwhile
    /// waits for the next time: the limit comes first.
    pub(super) fn evict_retired(&mut self) {
        for (start, end) in self.core.take_retired() {
            let mut at = start & !(CHUNK_BYTES - 1);
            while at < end {
                if let Some(page) = self.core.space.page(at) {
                    let number = page.superpage.id() as usize * CHUNKS + page.chunk();
                    self.empty_tray(page.superpage, page.chunk());
                    if self.core.leaving.load(SeqCst) {
                        return;
                    }
                    if self.evict_chunk(number, Wanted::All).is_none() {
                        // The steward is at work, and may wait for our writes.
                        self.drain();
                        sys::pause();
                        continue;
                    }
                    self.collect();
                    if self.trays_in_flight >= self.trays_in_flight_limit {
                        self.wait_for_blade(self.trays_in_flight_limit / 2);
                    }
                    self.release(self.core.frames.free() - RETIRED_FRAMES);
                    self.density.judge(&self.core.crew);
                }
                at += CHUNK_BYTES;
            }
        }
    }

    /// Releases the chunk's pages in the victim buffer: a chunk that has some is passed over.
    fn empty_tray(&mut self, superpage: &'static Superpage, chunk: usize) {
        if superpage.trays[chunk].load(SeqCst) == NO_TRAY {
            return;
        }
        self.drain();
        self.core.frames.take_tray_of(superpage, chunk, &mut self.taken);
        self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut self.taken);
        self.core.frames.retire_all();
    }

    /// Returns the oldest free frames, about `pages` of them, to the kernel. Returns how many
    /// frames it returned.
    pub(super) fn release(&mut self, pages: i64) -> i64 {
        let Some(least) = usize::try_from(pages).ok().filter(|least| *least > 0) else {
            return 0;
        };
        self.core.frames.take_trays(least, &mut self.taken);
        let released = self.taken.iter().map(TakenTray::pages).sum();
        self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut self.taken);
        released
    }
}
