//! Farpool's own pager on a trace: the faults that a program will have under `farpool run --local`,
//! and their cost on a machine where costs were measured.
//!
//! The decisions are the pager's own code: its sweep over chunks, its prefetcher, its reserve, its
//! judgement of unchanged pages (`farpool-policy`). Only the state that they act on is modelled
//! here: which page is where. Not modelled: that the evictor works beside the program (here it
//! works between two references), mappings (every page of the trace counts as one that may be far),
//! and processes that fork.
//!
//! * `memory` holds pages, chunks and the victim buffer;
//! * `run` walks a trace through it and counts [`Events`];
//! * [`costs`] turns events into time and fits the costs to measured runs; [`MeasuredCosts`] is
//!   their file;
//! * [`prediction`] combines both into the answer.

pub mod costs;
pub mod prediction;

mod measured;
mod memory;
mod run;

pub use costs::{Costs, Probe};
pub use measured::{CostsError, FIT_ERROR_MAX_PERMILLE, Fit, Load, MeasuredCosts};
pub use memory::memory_bytes;
pub use prediction::{Prediction, Question, predict};
pub use run::{Limit, SHARE_FLOOR_BYTES, Settings, events};

use serde::{Deserialize, Serialize};

/// The pager's events. The names are those of `farpool run --stats`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Page faults.
    pub faults: u64,
    /// Faults that were first touches.
    pub zero_fills: u64,
    /// Pages that first touches zeroed.
    pub pages_zeroed: u64,
    /// Faults whose page was taken back from the victim buffer.
    pub victim_hits: u64,
    /// Faults whose page was fetched from a blade.
    pub demand_fetches: u64,
    /// Pages prefetched.
    pub prefetches: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Chunks that pages were evicted from.
    pub evicted_chunks: u64,
    /// Evicted pages that were written to a blade.
    pub pages_written: u64,
    /// Evicted pages that were not written, since they had not changed.
    pub clean_drops: u64,
}
