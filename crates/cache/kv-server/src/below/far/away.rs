//! Blades that the settings name and that were lost: each is asked again, ever less often.

use std::time::Duration;

use farpool_pool::Address;

/// How long after a loss a blade is asked again for the first time. The pause doubles with each
/// try in vain, up to [`PAUSE_MAX`]: a blade that comes back is used within that time, and one that
/// does not is asked for one connection in that time.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// A lost blade. Times are of the keeper's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Away {
    pub(super) address: Address,
    /// What it lent, and is asked for again.
    pub(super) superpages: u32,
    pub(super) since: Duration,
    pause: Duration,
    ask_at: Duration,
}

impl Away {
    pub(super) fn new(address: Address, superpages: u32, now: Duration) -> Self {
        Self { address, superpages, since: now, pause: PAUSE_MIN, ask_at: now + PAUSE_MIN }
    }

    pub(super) fn is_due(&self, now: Duration) -> bool {
        now >= self.ask_at
    }

    /// Notes that it was asked in vain.
    pub(super) fn asked_in_vain(&mut self, now: Duration) {
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        self.ask_at = now + self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blade_is_asked_ever_less_often_but_always_again() {
        let at = Duration::from_secs;
        let mut away = Away::new(Address::Unix("/blade".into()), 3, at(100));
        let mut asked = Vec::new();
        for second in 100..160 {
            if away.is_due(at(second)) {
                asked.push(second);
                away.asked_in_vain(at(second));
            }
        }
        assert_eq!(asked, [101, 103, 107, 115, 125, 135, 145, 155]);
        assert_eq!(away.since, at(100));
    }
}
