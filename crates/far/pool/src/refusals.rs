//! Blades that are reachable but take no pages: full though they granted the memory, a store that
//! fails, a descriptor that cannot be written to.
//!
//! A refused page goes back into the program, from where it would be sent again at once, for ever.
//! So the blade is left alone for a while, longer after each further refusal, and then tried with
//! little.

use std::time::{Duration, Instant};

use crate::{BladeIndex, MAX_BLADES};

/// Which blades take no pages, and until when each is left alone.
#[derive(Clone, Debug)]
pub struct Refusals {
    blades: [Option<Refusal>; MAX_BLADES],
    first_pause: Duration,
    longest_pause: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Refusal {
    until: Instant,
    pause: Duration,
}

impl Default for Refusals {
    fn default() -> Self {
        Refusals::with_pauses(Refusals::FIRST_PAUSE, Refusals::LONGEST_PAUSE)
    }
}

impl Refusals {
    /// How long a blade is left alone after its first refusal.
    pub const FIRST_PAUSE: Duration = Duration::from_millis(500);
    /// The pause doubles up to this. A try costs some 300 us of a processor (64 pages out and
    /// back), and a repaired blade is used again within this time.
    pub const LONGEST_PAUSE: Duration = Duration::from_secs(16);

    /// No blade is known to refuse pages; with other pauses than usual.
    pub fn with_pauses(first_pause: Duration, longest_pause: Duration) -> Self {
        Refusals { blades: [None; MAX_BLADES], first_pause, longest_pause }
    }

    /// Whether no blade is known to refuse pages.
    pub fn is_empty(&self) -> bool {
        self.blades.iter().all(Option::is_none)
    }

    /// Notes that the blade has refused a page. Answers for pages that were sent before it was left
    /// alone add nothing.
    pub fn refuse(&mut self, blade: BladeIndex, now: Instant) {
        let Some(entry) = self.blades.get_mut(usize::from(blade.0)) else { return };
        let pause = match *entry {
            Some(refusal) if now < refusal.until => return,
            Some(refusal) => (refusal.pause * 2).min(self.longest_pause),
            None => self.first_pause,
        };
        *entry = Some(Refusal { until: now + pause, pause });
    }

    /// Notes that the blade has taken a page. False: it was not known to refuse any.
    pub fn accept(&mut self, blade: BladeIndex) -> bool {
        self.blades.get_mut(usize::from(blade.0)).is_some_and(|entry| entry.take().is_some())
    }

    /// Whether pages may be sent to the blade now.
    pub fn may_send(&self, blade: BladeIndex, now: Instant) -> bool {
        self.of(blade).is_none_or(|refusal| now >= refusal.until)
    }

    /// Whether the blade refused again when it was tried again, and so is unlikely to take anything
    /// soon.
    pub fn is_lasting(&self, blade: BladeIndex) -> bool {
        self.of(blade).is_some_and(|refusal| refusal.pause > self.first_pause)
    }

    fn of(&self, blade: BladeIndex) -> Option<Refusal> {
        self.blades.get(usize::from(blade.0)).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLADE: BladeIndex = BladeIndex(3);
    const FIRST_PAUSE: Duration = Refusals::FIRST_PAUSE;
    const LONGEST_PAUSE: Duration = Refusals::LONGEST_PAUSE;

    #[test]
    fn a_refused_page_is_not_sent_again_at_once_and_later_and_later() {
        let mut refusals = Refusals::default();
        let start = Instant::now();
        assert!(refusals.may_send(BLADE, start) && refusals.is_empty());
        refusals.refuse(BLADE, start);
        assert!(!refusals.may_send(BLADE, start) && !refusals.is_lasting(BLADE));
        assert!(refusals.may_send(BladeIndex(2), start), "others are not to blame");
        let tried = start + FIRST_PAUSE;
        assert!(refusals.may_send(BLADE, tried));
        refusals.refuse(BLADE, tried);
        assert!(!refusals.may_send(BLADE, tried + FIRST_PAUSE) && refusals.is_lasting(BLADE));
        assert!(refusals.may_send(BLADE, tried + 2 * FIRST_PAUSE));
        assert!(refusals.accept(BLADE) && !refusals.accept(BLADE));
        assert!(refusals.may_send(BLADE, start) && refusals.is_empty());
    }

    proptest! {
        /// However many answers come, and when, a blade that refuses everything is rarely tried.
        #[test]
        fn tries_are_few(steps in proptest::collection::vec(0_u64..200, 1..4000)) {
            let mut refusals = Refusals::default();
            let start = Instant::now();
            let (mut now, mut tries) = (start, 0_u32);
            for step in steps {
                now += Duration::from_millis(step);
                if refusals.may_send(BLADE, now) {
                    tries += 1;
                    (0..3).for_each(|_| refusals.refuse(BLADE, now));
                }
            }
            let seconds = (now - start).as_secs();
            prop_assert!(u64::from(tries) <= 6 + seconds / LONGEST_PAUSE.as_secs(), "{tries} in \
                {seconds} s");
        }
    }
}
