//! Farpool's own pager on a trace: which faults a program will have under `farpool run --local`,
//! and what they will cost on a machine where the costs were measured.
//!
//! The decisions are the pager's own code: its sweep over chunks, its prefetcher, its reserve, its
//! judgement of unchanged pages (`farpool-policy`). Here stands only what they act on: which page
//! is where. What is not modelled: that the evictor works beside the program (here it works between
//! two references), mappings (every page of the trace counts as one that may be far), processes
//! that fork.
//!
//! * `memory` holds pages, chunks and the victim buffer;
//! * `run` walks a trace through it and counts [`Events`];
//! * [`costs`] turns events into time, and finds the costs from measured runs; [`MeasuredCosts`] is
//!   their file;
//! * [`prediction`] puts both together and shows the answer.

pub mod costs;
pub mod prediction;

mod measured;
mod memory;
mod run;

pub use costs::{Costs, Probe};
pub use measured::{CostsError, MeasuredCosts};
pub use memory::memory_bytes;
pub use prediction::{Prediction, Question, predict};
pub use run::{Settings, events};

use serde::{Deserialize, Serialize};

/// What the pager did. The names are those of `farpool run --stats`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Page faults.
    pub faults: u64,
    /// Of these: first touches.
    pub zero_fills: u64,
    /// Pages they were answered with.
    pub pages_zeroed: u64,
    /// Of the faults: pages taken back from the victim buffer.
    pub victim_hits: u64,
    /// Of the faults: pages fetched from a blade.
    pub demand_fetches: u64,
    /// Pages fetched ahead.
    pub prefetches: u64,
    /// Pages moved out.
    pub evictions: u64,
    /// Chunks they were moved out of.
    pub evicted_chunks: u64,
    /// Of the pages moved out: written to a blade.
    pub pages_written: u64,
    /// Of the pages moved out: not written, for they had not changed.
    pub clean_drops: u64,
}
