//! The clock by which nodes and clients become late: it counts only time in which the controller
//! could have heard from them.
//!
//! A store that stalls holds up every answer, and with it the next report; a process that was
//! stopped reads none. By an ordinary clock all nodes would be late and all leases over as soon as
//! it goes on, through no fault of theirs: others could take their names, and segments would be
//! lost. Pure: it is told the time.

/// How long a commit may take before the clock stands still: far above a commit's usual
/// milliseconds, far below [`crate::model::NODE_LATE_MS`].
pub(crate) const STALL_MS: u64 = 1_000;
/// The most that counts of the time between two looks: the reconciler looks five times a second.
pub(crate) const STEP_LIMIT_MS: u64 = 1_000;

/// A clock that stands still while the controller cannot hear.
#[derive(Clone, Debug)]
pub(crate) struct ListeningClock {
    shown_ms: u64,
    /// When it was looked at last, by the ordinary clock.
    looked_ms: u64,
    /// The batches that were durable when the store last finished one or had none to write.
    durable: u64,
    /// When that was seen.
    since_ms: u64,
}

impl ListeningClock {
    /// A clock that shows `now_ms` of the ordinary clock.
    pub(crate) const fn new(now_ms: u64) -> Self {
        Self { shown_ms: now_ms, looked_ms: now_ms, durable: 0, since_ms: now_ms }
    }

    /// Goes on to `now_ms` of the ordinary clock, with `durable` of `queued` batches in the store.
    /// Returns the time that it shows.
    pub(crate) fn look(&mut self, now_ms: u64, durable: u64, queued: u64) -> u64 {
        let is_waiting = durable < queued && durable == self.durable;
        let counts_until_ms = match (is_waiting, self.is_stalled()) {
            (true, _) => now_ms.min(self.since_ms + STALL_MS),
            // It is not known when in this time the store went on.
            (false, true) => self.looked_ms,
            (false, false) => now_ms,
        };
        let counted_ms = counts_until_ms.saturating_sub(self.looked_ms);
        self.shown_ms += counted_ms.min(STEP_LIMIT_MS);
        self.looked_ms = self.looked_ms.max(now_ms);
        if !is_waiting {
            (self.durable, self.since_ms) = (durable, self.looked_ms);
        }
        self.shown_ms
    }

    /// Whether the store had something to write and finished nothing for [`STALL_MS`], at the last
    /// look.
    pub(crate) const fn is_stalled(&self) -> bool {
        self.looked_ms >= self.since_ms + STALL_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_with_the_ordinary_clock_while_all_is_well() {
        let mut clock = ListeningClock::new(50);
        for now_ms in (50..20_000).step_by(200) {
            let batch = now_ms / 400; // each takes one look
            assert_eq!(clock.look(now_ms, batch, batch + 1), now_ms);
            assert!(!clock.is_stalled());
        }
    }

    #[test]
    fn it_stands_still_while_the_store_stalls() {
        let mut clock = ListeningClock::new(0);
        assert_eq!(clock.look(100, 7, 7), 100);
        for now_ms in (200..60_000).step_by(200) {
            assert_eq!(clock.look(now_ms, 7, 9), now_ms.min(100 + STALL_MS));
            assert_eq!(clock.is_stalled(), now_ms >= 100 + STALL_MS);
        }
        assert_eq!(clock.look(60_000, 8, 9), 1_100, "it went on at some time since");
        assert!(!clock.is_stalled());
        assert_eq!(clock.look(60_200, 9, 9), 1_300);
    }

    #[test]
    fn a_store_that_is_slow_lets_a_part_of_the_time_count() {
        let mut clock = ListeningClock::new(0);
        let mut shown_ms = 0;
        for commit in 0..10 {
            for look in 1..=15 {
                shown_ms = clock.look(commit * 3_000 + look * 200, commit, commit + 1);
            }
        }
        assert!((10_000..=12_000).contains(&shown_ms), "{shown_ms} of 30,000 ms");
    }

    #[test]
    fn a_time_in_which_it_did_not_run_hardly_counts() {
        let mut clock = ListeningClock::new(0);
        assert_eq!(clock.look(200, 0, 0), 200);
        assert_eq!(clock.look(40_200, 0, 0), 200 + STEP_LIMIT_MS);
        assert_eq!(clock.look(40_400, 0, 0), 400 + STEP_LIMIT_MS);
        // A look that was begun earlier and comes later.
        assert_eq!(clock.look(40_300, 0, 0), 400 + STEP_LIMIT_MS);
    }
}
