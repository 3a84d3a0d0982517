//! From which copy a page is read, and when another one is asked as well (Dean and Barroso, "The
//! Tail at Scale", 2013: hedged requests).
//!
//! A lane measures how long each blade takes to answer. It reads from the copy of the lowest number
//! unless that one's blade takes much longer than another's, or has owed an answer for much longer.
//! A read that is late, compared with others of the same blade, is asked of another copy too, and
//! whichever answers first counts. Such reads are bounded, so that overload does not make itself
//! worse.

use std::time::Duration;

/// A blade's answers that are later than this part of them are late: 95 %, as 19 of 20.
const LATE_ONE_IN: u32 = 20;
/// No read is late before this many times the shortest answer of its blade.
const LEAST_FACTOR: u32 = 4;
/// Nor before this: about what a wake-up costs on a busy machine.
const LEAST_WAIT: Duration = Duration::from_micros(500);
/// Every read is late after this, whatever its blade usually takes: far below the time after which
/// a silent blade is given up.
const MOST_WAIT: Duration = Duration::from_millis(50);
/// Another copy is read when its blade is expected to answer in less than this part of the time.
const NEARER_FACTOR: u32 = 2;
/// One read in so many goes to the copy of the lowest number all the same: a blade that was slow is
/// found to be fast again.
const PROBE_ONE_IN: u32 = 64;
/// One read more for so many: 2 %.
const HEDGE_ONE_IN: u32 = 50;
/// Most reads at once that are asked a second time, after a time without any: those that a lane has
/// on their way when a blade falls silent.
const HEDGE_BURST: u32 = 128;
/// Weight of one answer in the mean, as one in so many.
const MEAN_ONE_IN: u32 = 8;
/// The estimate of late answers is corrected by this part of itself at most.
const STEP_ONE_IN: u32 = 8;

/// How long one blade takes to answer one lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnswerTimes {
    /// A mean in which recent answers count more. None before the first answer.
    mean: Option<Duration>,
    shortest: Duration,
    /// What about [`LATE_ONE_IN`] answers exceeds.
    late: Duration,
}

impl AnswerTimes {
    /// Takes in one answer.
    pub(crate) fn answered(&mut self, after: Duration) {
        let Some(mean) = self.mean else {
            (self.mean, self.shortest, self.late) = (Some(after), after, after * 2);
            return;
        };
        self.mean = Some((mean * (MEAN_ONE_IN - 1) + after) / MEAN_ONE_IN);
        self.shortest = self.shortest.min(after);
        // Rises by 19 small steps for each that it falls, so it rests where 1 of 20 is above it.
        let step = (self.late / STEP_ONE_IN).max(Duration::from_nanos(u64::from(STEP_ONE_IN)));
        match after > self.late {
            true => self.late += step,
            false => self.late = self.late.saturating_sub(step / (LATE_ONE_IN - 1)),
        }
    }

    /// How long to wait for an answer before another copy is asked too.
    pub(crate) fn patience(&self) -> Duration {
        let least = LEAST_WAIT.max(self.shortest * LEAST_FACTOR);
        match self.mean {
            Some(_) => self.late.max(least).min(MOST_WAIT),
            None => MOST_WAIT,
        }
    }

    /// When an answer is expected, if the oldest read that was not answered waits for so long.
    pub(crate) fn expected(&self, oldest: Duration) -> Duration {
        // One that is not late says nothing.
        let owed = if oldest > self.patience() { oldest } else { Duration::ZERO };
        self.mean.unwrap_or_default().max(owed)
    }
}

/// Which of several copies to read, by what is expected of each, and how many reads go twice.
#[derive(Debug)]
pub(crate) struct Choice {
    reads: u32,
    /// Reads that may be asked a second time, in parts of one.
    allowed: u32,
}

impl Default for Choice {
    fn default() -> Self {
        Choice { reads: 0, allowed: HEDGE_BURST * HEDGE_ONE_IN }
    }
}

impl Choice {
    /// Counts a read, each of which allows a part of another one.
    pub(crate) fn count(&mut self) {
        self.reads = self.reads.wrapping_add(1);
        self.allowed = (self.allowed + 1).min(HEDGE_BURST * HEDGE_ONE_IN);
    }

    /// The position of the copy to be read. `None` if there is none.
    pub(crate) fn nearest(&self, expected: impl Iterator<Item = Duration>) -> Option<usize> {
        let probes = self.reads.is_multiple_of(PROBE_ONE_IN);
        let nearer = |best: (usize, Duration), this: (usize, Duration)| {
            let is_nearer = !probes && this.1 * NEARER_FACTOR < best.1;
            if is_nearer { this } else { best }
        };
        expected.enumerate().reduce(nearer).map(|(at, _)| at)
    }

    /// True if a late read may be asked of another copy now.
    pub(crate) fn may_hedge(&mut self) -> bool {
        let left = self.allowed.checked_sub(HEDGE_ONE_IN);
        self.allowed = left.unwrap_or(self.allowed);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn patience_is_what_one_answer_in_twenty_exceeds() {
        let mut times = AnswerTimes::default();
        assert_eq!(times.patience(), MOST_WAIT, "nothing is known");
        // Of 100 answers 90 take 1 ms, 8 take 4 ms, 2 take 30 ms: the last 5 % begin within the 8.
        let of = |number: u64| match number * 37 % 100 {
            0..90 => micros(1_000),
            90..98 => micros(4_000),
            _ => micros(30_000),
        };
        (0..20_000).for_each(|number| times.answered(of(number)));
        assert!((micros(3_000)..micros(9_000)).contains(&times.patience()), "{times:?}");
        (0..20_000).for_each(|_| times.answered(micros(20)));
        assert_eq!(times.patience(), LEAST_WAIT, "{times:?}");
        assert!(times.expected(Duration::ZERO) < micros(30));
        assert!(times.expected(micros(400)) < micros(30), "not late");
        assert_eq!(times.expected(micros(600)), micros(600));
    }

    #[test]
    fn a_copy_is_left_only_for_one_that_is_much_nearer() {
        let mut choice = Choice::default();
        let mut of = |expected: &[u64]| {
            choice.count();
            choice.nearest(expected.iter().map(|it| micros(*it)))
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[100, 60]), Some(0));
        assert_eq!(of(&[100, 40]), Some(1));
        assert_eq!(of(&[100, 40, 10]), Some(2));
        let first = (0..640).filter(|_| of(&[100, 40]) == Some(0)).count();
        assert_eq!(first, 10, "one read in 64 finds out whether it is still slow");
    }

    #[test]
    fn no_more_than_one_read_in_fifty_goes_twice() {
        let mut choice = Choice::default();
        let mut hedged = (0..1_000).filter(|_| choice.may_hedge()).count();
        assert_eq!(hedged, 128);
        for _ in 0..10_000 {
            choice.count();
            hedged += usize::from(choice.may_hedge());
        }
        assert_eq!(hedged, 128 + 200);
    }
}
