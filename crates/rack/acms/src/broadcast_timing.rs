//! When a node broadcasts: stable offers less and less often, requests until they are served
//! (ACMS, section 4.3).
//!
//! Invariants: a node broadcasts at most one offer and at most one request per
//! [`BROADCAST_PERIOD`],
//! however often it is served in between; the period of an offer that did not change notably
//! doubles each time, up to [`BROADCAST_PERIOD_MAX`].

use std::time::Duration;

use farpool_units::{SUPERPAGE_BYTES, at_most};

use crate::limits::{ATTEMPT_MAX, BROADCAST_PERIOD, BROADCAST_PERIOD_MAX, NOTABLE_PART, TICK};
use crate::rng::Rng;

/// First wait after an attempt to ask known servers failed; it doubles to [`ASK_WAIT_MAX`].
const ASK_WAIT: Duration = TICK;
/// Attempts at the first wait before it doubles: each attempt corrects two known offers, so clients
/// in a rush find what is left by trying.
const QUICK_ASKS: u32 = 16;
/// Longest wait between two attempts while memory is short everywhere.
const ASK_WAIT_MAX: Duration = Duration::from_secs(4);
/// Broadcast attempts at the base period before the period doubles.
const EAGER_ATTEMPTS: u8 = 3;

/// Times a server's offers.
#[derive(Debug)]
pub(crate) struct OfferClock {
    said_bytes: u64,
    said_at: Option<Duration>,
    period: Duration,
    pub(crate) seq: u32,
}

impl OfferClock {
    pub(crate) fn new() -> Self {
        Self { said_bytes: 0, said_at: None, period: BROADCAST_PERIOD, seq: 0 }
    }

    /// Returns the period of the offer if `free_bytes` has to be broadcast now.
    pub(crate) fn poll(&mut self, free_bytes: u64, now: Duration) -> Option<Duration> {
        let free_bytes = if free_bytes < SUPERPAGE_BYTES { 0 } else { free_bytes };
        if free_bytes == 0 && self.said_bytes == 0 {
            return None;
        }
        let moved = free_bytes.abs_diff(self.said_bytes);
        let notable = moved > self.said_bytes / NOTABLE_PART || free_bytes == 0;
        let since = self.said_at.map(|at| now.saturating_sub(at));
        if notable {
            self.period = BROADCAST_PERIOD;
        }
        if since.is_some_and(|since| since < self.period) {
            return None;
        }
        if !notable {
            self.period = (self.period * 2).min(BROADCAST_PERIOD_MAX);
        }
        self.said_bytes = free_bytes;
        self.said_at = Some(now);
        self.seq = self.seq.saturating_add(1);
        Some(self.period)
    }
}

/// Times a client's requests.
#[derive(Debug)]
pub(crate) struct AskClock {
    ask_at: Duration,
    fails: u32,
    broadcast_at: Option<Duration>,
    /// When a request was broadcast last; being served does not forget it.
    said_at: Option<Duration>,
    attempt: u8,
    /// A broadcast request may still be on its way.
    pub(crate) is_out: bool,
}

impl AskClock {
    pub(crate) fn new() -> Self {
        Self {
            ask_at: Duration::ZERO,
            fails: 0,
            broadcast_at: None,
            said_at: None,
            attempt: 0,
            is_out: false,
        }
    }

    /// Notes that everything wanted has been granted.
    pub(crate) fn served(&mut self) {
        (self.fails, self.attempt, self.broadcast_at) = (0, 0, None);
        self.ask_at = Duration::ZERO;
    }

    /// Whether known servers may be asked now.
    pub(crate) fn may_ask(&mut self, now: Duration) -> bool {
        now >= self.ask_at
    }

    /// Notes that servers were asked. After repeated failures the next attempt is later, with a
    /// random part so that clients that were refused together do not ask again together.
    pub(crate) fn asked(&mut self, now: Duration, rng: &mut Rng) {
        let wait =
            (ASK_WAIT * (1 << self.fails.saturating_sub(QUICK_ASKS).min(8))).min(ASK_WAIT_MAX);
        let half: u64 = at_most(wait.as_millis() / 2);
        self.ask_at = now + Duration::from_millis(half + rng.below(half + 1));
        self.fails = self.fails.saturating_add(1);
    }

    /// Returns the attempt and period of the request to broadcast now, if one is due. Where servers
    /// broadcast, `patience` gives their offers time to arrive first.
    pub(crate) fn poll_broadcast(
        &mut self,
        patience: Duration,
        now: Duration,
    ) -> Option<(u8, Duration)> {
        let again = self.said_at.map_or(Duration::ZERO, |said| said + BROADCAST_PERIOD);
        let at = *self.broadcast_at.get_or_insert((now + patience).max(again));
        if now < at {
            return None;
        }
        let attempt = self.attempt;
        let doublings = u32::from(attempt.saturating_sub(EAGER_ATTEMPTS).min(ATTEMPT_MAX));
        let period = (BROADCAST_PERIOD * (1 << doublings)).min(BROADCAST_PERIOD_MAX);
        self.broadcast_at = Some(now + period);
        self.said_at = Some(now);
        self.attempt = attempt.saturating_add(1).min(ATTEMPT_MAX);
        self.is_out = true;
        Some((attempt, period))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_broadcast_once_a_period_however_often_it_is_served() {
        let mut clock = AskClock::new();
        let mut said = Vec::new();
        for tick in 0..100 {
            let now = TICK * tick;
            if clock.poll_broadcast(Duration::ZERO, now).is_some() {
                said.push(now);
                // Served at once, and short again at the next tick.
                clock.served();
            }
        }
        assert_eq!(said.first(), Some(&Duration::ZERO));
        assert!(said.len() >= 9, "{said:?}");
        for pair in said.windows(2) {
            assert!(pair[1] - pair[0] >= BROADCAST_PERIOD, "{said:?}");
        }
    }
}
