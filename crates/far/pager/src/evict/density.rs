//! Decides by the length of the runs that the evictor finds on which CPU it should work: see
//! [`crate::shared::crew`].

use crate::shared::crew::Crew;

/// With runs of at least [`DENSE_RUN`] pages the evictor works on another CPU, with runs shorter
/// than [`SPARSE_RUN`] on the first fault thread's: an interrupt costs as much as about ten pages.
/// Judged every [`DENSITY_SAMPLE`] pages.
const DENSE_RUN: u32 = 16;
const SPARSE_RUN: u32 = 8;
const DENSITY_SAMPLE: u32 = 512;

/// How many pages the kernel could move at a time recently.
#[derive(Debug, Default)]
pub(crate) struct Density {
    pages: u32,
    runs: u32,
}

impl Density {
    pub(crate) fn add(&mut self, moved: u64) {
        self.pages += moved.count_ones();
        self.runs += (moved & !(moved << 1)).count_ones();
    }

    /// Sets where the evictor should work, once it has seen enough.
    pub(crate) fn judge(&mut self, crew: &Crew) {
        if self.pages < DENSITY_SAMPLE {
            return;
        }
        let pages_a_run = self.pages / self.runs.max(1);
        if pages_a_run >= DENSE_RUN {
            crew.set_evictor_apart(true);
        } else if pages_a_run < SPARSE_RUN {
            crew.set_evictor_apart(false);
        }
        *self = Density::default();
    }
}
