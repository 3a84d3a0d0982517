//! When how much of far memory is verified ([`farpool_pool::Mover::verify`]), and what is said of
//! damage.
//!
//! All that is far is read once in the time that the run was given for it, evenly and behind what
//! the program asks for: the lane that verifies is at work for 1 % of the time at most. If that is
//! not enough, a pass takes longer.

use std::time::{Duration, Instant};

use farpool_pool::{
    Damage, DamageOutcome, Pool, SUPERPAGE_PAGES, VERIFY_LIMIT_PAGES, Verified, VerifyPoint,
};
use farpool_units::at_most;

/// Of the time, the lane that verifies rests this many times as long as it was at work: 1 %.
const REST_FACTOR: u32 = 99;
/// The same while there is something to look at that a read found damaged: 10 %.
const SUSPECT_REST_FACTOR: u32 = 9;
/// Steps are no closer than this, so that little far memory does not cost a wake-up each moment;
/// with much, steps are larger first.
const STEP_MIN: Duration = Duration::from_millis(100);
/// Pages of one step at least: 64 KiB, one request.
const STEP_PAGES: usize = 16;
/// Superpages that are named in one pass; more are only counted.
const TOLD_LIMIT: usize = 8;
/// How often a process without far memory looks whether it has some.
const IDLE_STEP: Duration = Duration::from_secs(10);

/// A pass over all far memory, again and again.
#[derive(Debug)]
pub struct Verification {
    every: Duration,
    from: VerifyPoint,
    begun: Instant,
    /// No step before this time.
    due: Instant,
    /// Nor one to look at what is suspected before this time.
    suspects_due: Instant,
    told: usize,
}

/// A step to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyStep {
    /// Where it begins.
    pub from: VerifyPoint,
    /// Pages that it verifies.
    pub limit: usize,
    /// Pages that there are.
    pages: u64,
}

impl Verification {
    /// The first pass begins at that time. `every` is not zero.
    pub fn new(every: Duration, begun: Instant) -> Self {
        let from = VerifyPoint::default();
        Verification { every, from, begun, due: begun, suspects_due: begun, told: 0 }
    }

    /// How long until the next step, if nothing is suspected.
    pub fn wait(&self, now: Instant) -> Duration {
        self.due.saturating_duration_since(now)
    }

    /// The step to be done now, if it is time. `pages` counts those that there are.
    pub fn next_step(
        &mut self,
        has_suspects: bool,
        now: Instant,
        pages: impl FnOnce() -> u64,
    ) -> Option<VerifyStep> {
        let is_due = now >= self.due || has_suspects && now >= self.suspects_due;
        if !is_due {
            return None;
        }
        let pages = pages();
        if pages == 0 {
            (self.begun, self.due) = (now, now + IDLE_STEP.min(self.every).max(STEP_MIN));
            return None;
        }
        Some(VerifyStep { from: self.from, limit: self.step_pages(pages), pages })
    }

    fn step_pages(&self, pages: u64) -> usize {
        let share = u128::from(pages) * STEP_MIN.as_nanos();
        let share: usize = at_most(share.div_ceil(self.every.as_nanos()));
        share.clamp(STEP_PAGES, VERIFY_LIMIT_PAGES)
    }

    /// Takes in what a step found, which took from one time to another. Returns the damage that is
    /// to be told, and whether there is more that is only counted.
    pub fn take<'a>(
        &mut self,
        verified: &'a Verified,
        step: VerifyStep,
        (begun, now): (Instant, Instant),
    ) -> (&'a [Damage], bool) {
        let took = now.saturating_duration_since(begun);
        let share_ns = self.every.as_nanos() * step.limit as u128 / u128::from(step.pages);
        let share = Duration::from_nanos(at_most(share_ns)).min(self.every);
        let wait = share.max(took * REST_FACTOR).max(STEP_MIN);
        self.suspects_due = now + (took * SUSPECT_REST_FACTOR).max(STEP_MIN);
        match verified.next {
            Some(next) => (self.from, self.due) = (next, now + wait),
            None => {
                self.due = (self.begun + self.every).max(now + wait);
                (self.from, self.begun) = (VerifyPoint::default(), self.due);
            }
        }
        let before = self.told;
        self.told = if verified.next.is_some() { before + verified.damages.len() } else { 0 };
        let left = TOLD_LIMIT.saturating_sub(before).min(verified.damages.len());
        let is_first_untold = before <= TOLD_LIMIT && left < verified.damages.len();
        (&verified.damages[..left], is_first_untold)
    }
}

/// Pages that may be verified at most: of all superpages, each copy.
pub fn pages_of(pool: &Pool) -> u64 {
    pool.superpages_in_all() * u64::from(SUPERPAGE_PAGES)
}

/// What is said of damage.
pub fn tell(damage: &Damage, pool: &Pool) -> String {
    let Damage { blade, segment, page, pages, outcome } = *damage;
    let outcome = match outcome {
        DamageOutcome::Replaced => "this copy is given up, and made anew from another one",
        DamageOutcome::Kept => {
            "they are read from another copy; this one stays, since the memory is shared with \
             another process or no other copy is whole"
        }
        DamageOutcome::Lost => {
            "there is no other copy (--redundancy 2), and touching them stops the program with \
             SIGBUS"
        }
    };
    format!(
        "blade {} has not what was stored there: {pages} pages of 16 MiB, the first is page {page} \
         of segment {segment}; {outcome}. Look for faults of that host's memory.",
        pool.describe(blade),
    )
}

#[cfg(test)]
mod tests {
    use farpool_pool::BladeIndex;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);
    const MS: Duration = Duration::from_millis(1);
    const GIB_PAGES: u64 = 1 << 18;

    fn next() -> Verified {
        Verified { next: Some(VerifyPoint::default()), ..Verified::default() }
    }

    #[test]
    fn steps_grow_with_what_is_far_and_not_beyond_the_limit() {
        let pace = Verification::new(DAY, Instant::now());
        let step = |pages| pace.step_pages(pages);
        assert_eq!([step(0), step(4096), step(1 << 20)], [16, 16, 16]);
        assert_eq!(step(30_000_000), 35, "117 GB");
        assert_eq!(step(1 << 40), VERIFY_LIMIT_PAGES);
    }

    /// The first pass begins once there is something, and every pass takes its time.
    #[test]
    fn all_that_is_far_is_read_once_in_the_time() {
        let mut now = Instant::now();
        let mut pace = Verification::new(DAY, now + MS);
        assert_eq!(pace.next_step(true, now, || panic!("nobody counts")), None, "not yet");
        now += MS;
        for _ in 0..100 {
            assert_eq!(pace.next_step(false, now, || 0), None);
            assert!(pace.wait(now) <= IDLE_STEP);
            now += IDLE_STEP;
        }
        for _ in 0..3 {
            let begun = now;
            let mut left = GIB_PAGES;
            while left > 0 {
                let step = pace.next_step(false, now, || GIB_PAGES).expect("it is time");
                left = left.saturating_sub(step.limit as u64);
                pace.take(&next(), step, (now, now + MS));
                now += MS;
                let wait = pace.wait(now);
                assert!(wait >= MS * REST_FACTOR, "{wait:?}");
                now += wait;
            }
            let took = now - begun;
            assert!(took > DAY - DAY / 100 && took < DAY + DAY / 100, "{took:?}");
            let step = pace.next_step(false, now, || GIB_PAGES).expect("it is time");
            pace.take(&Verified::default(), step, (now, now));
            now += pace.wait(now);
        }
    }

    #[test]
    fn whatever_the_time_the_lane_rests() {
        for every in [MS, Duration::from_secs(1), DAY * 100_000] {
            for pages in [1, GIB_PAGES, 1 << 50] {
                let now = Instant::now();
                let mut pace = Verification::new(every, now);
                let step = pace.next_step(false, now, || pages).expect("it is time");
                for verified in [next(), Verified::default()] {
                    pace.take(&verified, step, (now, now + 10 * MS));
                    assert!(pace.wait(now + 10 * MS) >= 990 * MS, "{every:?} {pages}");
                }
                let soon = pace.next_step(true, now + 50 * MS, || pages);
                assert_eq!(soon, None, "what is suspected waits, too");
            }
        }
    }

    #[test]
    fn eight_are_told_in_one_pass() {
        let now = Instant::now();
        let mut pace = Verification::new(DAY, now);
        let step = pace.next_step(false, now, || 1).expect("it is time");
        let outcome = DamageOutcome::Kept;
        let damage = Damage { blade: BladeIndex(1), segment: 0, page: 9, pages: 3, outcome };
        let mut told = |count: usize| {
            let verified = Verified { damages: vec![damage; count], ..next() };
            let (all, is_more) = pace.take(&verified, step, (now, now));
            (all.len(), is_more)
        };
        assert_eq!([told(3), told(5), told(0)], [(3, false), (5, false), (0, false)]);
        assert_eq!([told(2), told(1)], [(0, true), (0, false)]);
        pace.take(&Verified::default(), step, (now, now));
        let verified = Verified { damages: vec![damage; 9], ..next() };
        let (all, is_more) = pace.take(&verified, step, (now, now));
        assert_eq!((all.len(), is_more), (8, true));
    }
}
