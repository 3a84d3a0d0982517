//! When to check whether a sidecar has more rights than its program still has.
//!
//! Such a sidecar is taken out, and the process gets another one.

use std::time::{Duration, Instant};

use crate::sidecars::Ward;

/// How often each process with a sidecar is checked. A sidecar may keep what its program has given
/// up for this long.
const LOOK_STEP: Duration = Duration::from_millis(250);

/// With many processes the checks are rarer: they take at most 1/50 of a processor.
const LOOK_PART: u32 = 50;

/// The time of the next check.
#[derive(Debug)]
pub struct Looks {
    next: Instant,
}

impl Looks {
    pub fn new() -> Looks {
        Looks { next: Instant::now() }
    }

    /// Checks all of them, if it is time, and tells those with too many rights to leave.
    pub fn look(&mut self, wards: &mut [Ward]) {
        let began = Instant::now();
        if began < self.next {
            return;
        }
        wards.iter_mut().for_each(Ward::renew_if_excessive);
        self.next = Instant::now() + LOOK_STEP.max(began.elapsed() * LOOK_PART);
    }
}
