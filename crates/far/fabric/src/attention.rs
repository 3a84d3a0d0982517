//! Whether a deadline may be held against the blade: a process that was stopped, or got no
//! processor for a while, has not listened, and a blade on the same busy or suspended machine could
//! not speak.
//!
//! Pure: the time comes from the caller.

use std::time::{Duration, Instant};

/// A longer time between two looks is a standstill: looks are a few milliseconds apart, tens of
/// them on a busy machine.
const STANDSTILL: Duration = Duration::from_millis(500);
/// Time that the blade has after a standstill: for another connection, and what the first one lost.
const GRACE: Duration = Duration::from_secs(2);
/// Standstills without an answer in between that are allowed for. A blade that is dead is given up
/// this many graces later at most, however often the program is stopped.
const GRACE_LIMIT: u32 = 5;

/// Watches how often its owner looks for answers.
#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// The last look; None while nothing is waited for.
    looked: Option<Instant>,
    /// Deadlines do not count before this time.
    fair_from: Option<Instant>,
    /// Standstills since the last answer.
    graces: u32,
}

impl Attention {
    /// Something is waited for from now on.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.looked = Some(now);
        self.fair_from = None;
    }

    /// An answer has arrived.
    pub(crate) fn answered(&mut self) {
        self.graces = 0;
    }

    /// Its owner looks for answers. True if deadlines count.
    pub(crate) fn look(&mut self, now: Instant) -> bool {
        let before = self.looked.replace(now).unwrap_or(now);
        let stood_still = now.saturating_duration_since(before) > STANDSTILL;
        if stood_still && self.graces < GRACE_LIMIT {
            self.graces += 1;
            self.fair_from = Some(now + GRACE);
        }
        self.fair_from.is_none_or(|from| now >= from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_do_not_count_for_a_while_after_a_standstill() {
        let (mut attention, start) = (Attention::default(), Instant::now());
        attention.begin(start);
        assert!(attention.look(start + STANDSTILL));
        let woken = start + STANDSTILL * 3;
        assert!(!attention.look(woken));
        assert!(!attention.look(woken + STANDSTILL));
        let looks = (1..=4).map(|nth| woken + STANDSTILL * nth);
        assert!(looks.map(|now| attention.look(now)).last() == Some(true), "the grace is over");
    }

    #[test]
    fn waiting_for_nothing_is_no_standstill() {
        let (mut attention, start) = (Attention::default(), Instant::now());
        assert!(attention.look(start), "nothing was waited for before");
        attention.begin(start + STANDSTILL * 9);
        assert!(attention.look(start + STANDSTILL * 10));
    }

    #[test]
    fn a_program_that_is_stopped_again_and_again_gives_a_dead_blade_up() {
        let (mut attention, mut now) = (Attention::default(), Instant::now());
        attention.begin(now);
        let mut step = |attention: &mut Attention| {
            now += STANDSTILL * 2;
            attention.look(now)
        };
        assert!((0..GRACE_LIMIT).all(|_| !step(&mut attention)));
        assert!((0..3).any(|_| step(&mut attention)), "the last grace has ended");
        attention.answered();
        assert!(!step(&mut attention), "it spoke: all begins anew");
    }
}
