//! Programs through a design, in time.
//!
//! Each thread has a clock. A reference is issued when its thread has computed up to it, but never
//! before the preceding reference of the trace was issued, so the order of the capture is kept.
//! Then the thread waits for the memory it needs. Several programs advance together, the earliest
//! first; each has its own link, all share the far tier's device.

mod channel;
mod program;

use farpool_policy::CacheKind;
use serde::Serialize;

use crate::design::{Design, DesignError};
use crate::load::References;
use channel::Channel;
use program::Running;

/// A program and its local memory.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// What it does.
    pub references: &'a References,
    /// Its local memory, in pages.
    pub local_pages: usize,
    /// Length of a tick of its clock.
    pub tick_ps: u64,
    /// References that may wait at the same time: stalls for lines are divided by it. 1 means that
    /// each one blocks, as in the thesis.
    pub overlap: u32,
    /// Which pages leave local memory first.
    pub policy: CacheKind,
    /// For random policies.
    pub seed: u64,
}

/// The result of one program. Times are summed over threads, except `time_ps`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// From the beginning to the end of its last thread.
    pub time_ps: u64,
    /// Computing.
    pub compute_ps: u64,
    /// Waiting for local memory.
    pub local_ps: u64,
    /// Waiting for the far tier.
    pub far_ps: u64,
    /// Waiting for the tier below it.
    pub overflow_ps: u64,
    /// Waiting for a free frame.
    pub frame_ps: u64,
    /// Waiting while pages were moved.
    pub migration_ps: u64,
    /// References that a thread waited for.
    pub references: u64,
    /// References that went to the far tier: page faults, or lines.
    pub far_references: u64,
    /// References that went to the tier below.
    pub overflow_references: u64,
    /// Pages prefetched.
    pub prefetched_pages: u64,
    /// Pages evicted from local memory.
    pub evicted_pages: u64,
    /// Evicted pages that were written.
    pub written_pages: u64,
    /// Pages that migration made local.
    pub migrated_pages: u64,
    /// Bytes sent to the program.
    pub fetched_bytes: u64,
    /// Bytes sent to the far tier.
    pub sent_bytes: u64,
    /// The most pages that were far at one time.
    pub far_pages_peak: u64,
    /// Pages of local memory that hold uncompressed pages: fewer than were given where it also
    /// holds compressed ones.
    pub resident_pages: u64,
}

/// Runs `programs` through `design`.
///
/// # Errors
/// The design cannot be simulated, or a program's local memory is too small for it.
pub fn simulate(design: &Design, programs: &[Program<'_>]) -> Result<Vec<Outcome>, DesignError> {
    design.check()?;
    let mut device = Channel::default();
    let mut running = programs
        .iter()
        .map(|program| Running::new(design, program))
        .collect::<Result<Vec<_>, _>>()?;
    if let [only] = running.as_mut_slice() {
        while only.step(design, &mut device) {}
    } else {
        while let Some(next) = running
            .iter_mut()
            .filter(|program| !program.is_finished())
            .min_by_key(|program| program.clock_ps())
        {
            next.step(design, &mut device);
        }
    }
    Ok(running.into_iter().map(Running::finish).collect())
}
