//! When it is looked whether a sidecar has more rights than its program still has.
//!
//! Such a one is taken out, and the process gets another one.

use std::time::{Duration, Instant};

use crate::sidecars::Ward;

/// How often each process with a sidecar is looked at: so long may one keep what its program has
/// given up.
const LOOK_STEP: Duration = Duration::from_millis(250);

/// With many processes it is less often: at most 1/50 of a processor is taken for it.
const LOOK_PART: u32 = 50;

/// When to look the next time.
#[derive(Debug)]
pub struct Looks {
    next: Instant,
}

impl Looks {
    pub fn new() -> Looks {
        Looks { next: Instant::now() }
    }

    /// Looks at all of them, if it is time: who has to be taken out is told to leave.
    pub fn look(&mut self, wards: &mut [Ward]) {
        let began = Instant::now();
        if began < self.next {
            return;
        }
        wards.iter_mut().for_each(Ward::renew_if_excessive);
        self.next = Instant::now() + LOOK_STEP.max(began.elapsed() * LOOK_PART);
    }
}
