//! The steward's state, and how it keeps its lease.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

use crate::core::Core;
use crate::error::StartError;
use crate::life::fetcher::Fetcher;
use crate::life::process::Pager;
use crate::life::rest::{PIECE_BYTES, Rests};
use crate::space::order::Owed;

/// The steward's state about rests, besides the rests themselves.
#[derive(Debug)]
pub(super) struct RestWatch {
    pub(super) looked: Instant,
    pub(super) short_since: Option<Instant>,
    /// Ranges that were unregistered for a moment in which the program changed something.
    pub(super) disturbed: Vec<Range<usize>>,
    /// A buffer for ranges that were given up since the last check.
    pub(super) given_up: Vec<Range<usize>>,
    pub(super) threshold_bytes: usize,
}

impl RestWatch {
    pub(super) fn new() -> RestWatch {
        RestWatch {
            looked: Instant::now(),
            short_since: None,
            disturbed: Vec::new(),
            given_up: Vec::new(),
            threshold_bytes: PIECE_BYTES,
        }
    }
}

/// See [`crate::life::steward`].
#[derive(Debug)]
pub struct Steward {
    pub(super) pager: &'static Pager,
    pub(super) core: &'static Core,
    /// Its memory is also used for pages on their way from one place on the blades to another.
    pub(super) fetcher: Fetcher,
    lease_kept: Instant,
    /// Superpages that were empty when their memory could not be freed, and when that was last
    /// tried.
    pub(super) empty: RefCell<BTreeSet<u32>>,
    pub(super) emptied: Cell<Instant>,
    /// When the order to leave was first seen.
    pub(super) leaving_since: Option<Instant>,
    /// When it was last tried to thaw a frozen layer.
    pub(super) thawed: Instant,
    /// Second messages that are still expected of moves that were applied.
    pub(super) owed: Owed,
    /// Mappings that were found while the program changed something, and the layout's count of
    /// moves at that time: until pages have moved, they may be memory that is later known by
    /// another address.
    pub(super) unsure: Vec<(Range<usize>, u64)>,
    /// No standstill for this thread before this time.
    pub(super) no_standstill_before: Instant,
    /// It was reported that forks are refused.
    pub(super) refusal_said: bool,
    /// The program has moved memory (mremap).
    pub(super) has_moved: bool,
    pub(super) splits_said: bool,
    /// The memory that is unregistered for a while.
    pub(super) rests: Rests,
    pub(super) resting: RestWatch,
}

impl Steward {
    pub fn new(pager: &'static Pager, core: &'static Core) -> Result<Steward, StartError> {
        let fetcher = Fetcher::new(core.pool.lane()?)?;
        Ok(Steward {
            pager,
            core,
            fetcher,
            lease_kept: Instant::now(),
            empty: RefCell::default(),
            emptied: Cell::new(Instant::now()),
            leaving_since: None,
            owed: Owed::default(),
            unsure: Vec::new(),
            no_standstill_before: Instant::now(),
            thawed: Instant::now(),
            refusal_said: false,
            has_moved: false,
            splits_said: false,
            rests: Rests::default(),
            resting: RestWatch::new(),
        })
    }

    /// Reports to the blades now and then that this process is alive.
    pub(super) fn keep_lease(&mut self) {
        if self.lease_kept.elapsed() >= self.core.pool.lease() / 3 {
            self.core.pool.keep_alive();
            self.lease_kept = Instant::now();
        }
    }
}
