//! When a silent connection is given up for another one: long before the deadline of its requests,
//! so that a flow that died without a word (a flushed connection table, a moved address) costs a
//! pause and not the blade.
//!
//! Pure: the time and the bytes that moved come from the caller. Every further attempt waits twice
//! as long as the last, and movement makes impatient again only step by step, so that a blade or a
//! network that is slow, and not dead, is not kept from its work by requests that are sent again
//! and again.

use std::time::{Duration, Instant};

/// Least silence after which another connection is tried; what a busy blade or a lost packet takes
/// is shorter.
const STALL_LEAST: Duration = Duration::from_millis(250);
/// A blade that never greeted quickly is given this many times as long to answer.
const GREETINGS: u32 = 8;
/// Whatever the greeting took, another connection is tried after this part of the deadline, so that
/// some attempts fit into it.
const DEADLINE_PARTS: u32 = 4;

/// Watches one connection, or one attempt to make it.
#[derive(Debug)]
pub(crate) struct StallWatch {
    /// The silence to bear while all is well.
    least: Duration,
    /// The silence to bear now.
    budget: Duration,
    /// When bytes were last seen to move, or it began to wait for them; None while nothing is
    /// waited for.
    since: Option<Instant>,
    /// The bytes that had moved by then.
    moved_bytes: u64,
}

impl StallWatch {
    pub(crate) fn new() -> Self {
        StallWatch { least: STALL_LEAST, budget: STALL_LEAST, since: None, moved_bytes: 0 }
    }

    /// A connection was made to a blade whose quickest greeting took so long; the connection's
    /// requests have this deadline.
    pub(crate) fn greeted(&mut self, quickest: Duration, deadline: Duration) {
        self.least = STALL_LEAST.max((quickest * GREETINGS).min(deadline / DEADLINE_PARTS));
        self.rest();
    }

    /// Nothing is waited for.
    pub(crate) fn rest(&mut self) {
        self.since = None;
        self.budget = self.least;
    }

    /// True if nothing has moved for as long as is borne. To be called every few milliseconds while
    /// an answer is waited for; `moved_bytes` have come or been acknowledged on this connection so
    /// far.
    pub(crate) fn is_stalled(&mut self, now: Instant, moved_bytes: u64) -> bool {
        let since = *self.since.get_or_insert(now);
        if moved_bytes != self.moved_bytes {
            self.moved_bytes = moved_bytes;
            self.since = Some(now);
            self.budget = (self.budget / 2).max(self.least);
            return false;
        }
        now.saturating_duration_since(since) >= self.budget
    }

    /// Another attempt begins: it is given twice as long as the last.
    pub(crate) fn tried(&mut self, now: Instant) {
        self.since = Some(now);
        self.budget = self.budget.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn silence_is_borne_twice_as_long_after_each_attempt_and_half_as_long_after_movement() {
        let (mut watch, start) = (StallWatch::new(), Instant::now());
        assert!(!watch.is_stalled(start, 0));
        assert!(!watch.is_stalled(start + after(249), 0));
        assert!(watch.is_stalled(start + after(250), 0));
        watch.tried(start + after(250));
        assert!(!watch.is_stalled(start + after(749), 0));
        assert!(watch.is_stalled(start + after(750), 0));
        watch.tried(start + after(750));
        assert!(!watch.is_stalled(start + after(1749), 7));
        assert!(!watch.is_stalled(start + after(2248), 7));
        assert!(watch.is_stalled(start + after(2249), 7));
        watch.rest();
        assert!(!watch.is_stalled(start + after(3000), 7));
        assert!(watch.is_stalled(start + after(3250), 7));
    }

    #[test]
    fn time_without_anything_to_wait_for_is_no_silence() {
        let (mut watch, start) = (StallWatch::new(), Instant::now());
        assert!(!watch.is_stalled(start, 5));
        watch.rest();
        assert!(!watch.is_stalled(start + after(60_000), 5));
        assert!(watch.is_stalled(start + after(60_250), 5));
    }

    #[test]
    fn a_slow_greeting_makes_patient_but_leaves_time_for_other_attempts() {
        let start = Instant::now();
        for (took_ms, stalls_ms) in [(1, 250), (100, 800), (5_000, 2_500)] {
            let mut watch = StallWatch::new();
            watch.greeted(after(took_ms), after(10_000));
            assert!(!watch.is_stalled(start, 0));
            assert!(!watch.is_stalled(start + after(stalls_ms - 1), 0), "{took_ms}");
            assert!(watch.is_stalled(start + after(stalls_ms), 0), "{took_ms}");
        }
    }
}
