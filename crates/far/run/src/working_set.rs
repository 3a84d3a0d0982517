//! How much local memory would hold what a tree works on, while it has less.
//!
//! What is resident is in use, or was until the last lap of the evictor. Of what is not, the pages
//! that came back once are in use, too: the pagers mark each page that comes back, and count those
//! that are out again. Both together are the working set once the evictor has completed a lap and
//! hardly any page comes back for the first time.
//!
//! Before that lap nothing is reported: a program that moves from one task to another fetches as
//! much without lacking memory.

use std::time::Duration;

use farpool_units::at_most;

/// Time between two samples.
pub const SAMPLE_STEP: Duration = Duration::from_secs(1);
/// Fraction of its time that a process must lose to fetches to count as stalled.
const STALLED_PART: u32 = 4;
/// Fetches per second below which nothing counts as lost, whatever each takes.
const LEAST_FETCHES_PER_S: u64 = 200;
/// What a fetch costs besides the measured wait: the fault itself, and the eviction that makes room
/// (10 to 60 us).
const FETCH_COST: Duration = Duration::from_micros(50);
/// A working set is reported after this many samples in which a process is stalled: a program that
/// moves from one task to another is stalled for a moment, too.
const STALLED_SAMPLES: u32 = 3;
/// After this many others, the stall is over.
const CALM_SAMPLES: u32 = 3;
/// First returns in a hundred fetches, at most, for all of the working set to be known.
const KNOWN_PERCENT: u64 = 10;
/// The same for the rest to be estimated.
const SEEN_PERCENT: u64 = 20;
/// Uses are counted for at least the first of these; a guess is made after the second. With one
/// sample to begin with that is within 10 s of the first stall.
const SHORTEST_WINDOW: Duration = Duration::from_secs(2);
const GUESS_AFTER: Duration = Duration::from_secs(7);
/// Then uses are counted anew, so that the figure follows the program; a large working set takes
/// longer than that to come round.
const USUAL_WINDOW: Duration = Duration::from_secs(10);
const LONGEST_WINDOW: Duration = Duration::from_secs(600);

/// What the tree's pagers have counted until now. Numbers "since the run began" only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Since the run began.
    pub at: Duration,
    /// Pages that came from a blade since the run began, and of these the first returns.
    pub fetched_pages: u64,
    pub first_returns: u64,
    pub evicted_pages: u64,
    /// Pages in local memory, the victim buffer included, and those of them that can be moved out.
    pub local_pages: u64,
    pub movable_pages: u64,
    /// Pages that came back since uses are counted, and are out again.
    pub used_away_pages: u64,
    /// All pages that are out.
    pub away_pages: u64,
    pub limit_pages: u64,
    /// Some process loses much of its time to fetches.
    pub is_stalled: bool,
}

/// Local memory that holds what the tree works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    pub pages: u64,
    /// Not all of it has been seen yet.
    pub is_guess: bool,
}

/// What follows from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Uses are to be counted anew from here.
    pub begins_window: bool,
    /// A working set that does not fit and is to be reported: once in a run, and again when a guess
    /// has become known.
    pub tells: Option<WorkingSet>,
}

/// What one process did between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub elapsed: Duration,
    pub cpu: Duration,
    pub fetches: u64,
    pub fetch_wait: Duration,
}

/// See the module's description. Pure.
#[derive(Debug, Default)]
pub struct Estimator {
    window: Option<Window>,
    stalled_samples: u32,
    calm_samples: u32,
    told: Option<WorkingSet>,
    now: Option<WorkingSet>,
    largest: Option<WorkingSet>,
}

#[derive(Debug)]
struct Window {
    first: Sample,
    last: Sample,
}

impl Progress {
    /// True if a good part of the process's time went to fetches. One of many busy threads may wait
    /// without that.
    pub fn is_stalled(&self) -> bool {
        let fetches = at_most(self.fetches);
        let lost = self.fetch_wait.saturating_add(FETCH_COST.saturating_mul(fetches));
        let enough = u128::from(LEAST_FETCHES_PER_S) * self.elapsed.as_millis();
        u128::from(self.fetches) * 1000 >= enough
            && lost.saturating_mul(STALLED_PART) >= self.elapsed.max(self.cpu)
            && self.fetches > 0
    }
}

impl Estimator {
    /// The working set, while it does not fit.
    pub fn now(&self) -> Option<WorkingSet> {
        self.now
    }

    /// The largest that did not fit.
    pub fn largest(&self) -> Option<WorkingSet> {
        self.largest
    }

    /// Takes in a sample.
    pub fn observe(&mut self, sample: &Sample) -> Seen {
        if sample.is_stalled {
            self.calm_samples = 0;
            self.stalled_samples = self.stalled_samples.saturating_add(1);
        } else {
            self.calm_samples = self.calm_samples.saturating_add(1);
        }
        if self.calm_samples >= CALM_SAMPLES {
            (self.window, self.now, self.stalled_samples) = (None, None, 0);
        }
        let Some(window) = &mut self.window else {
            return self.begin(sample);
        };
        let before = std::mem::replace(&mut window.last, *sample);
        let age = sample.at.saturating_sub(window.first.at);
        let has_lapped = sample.evicted_pages.saturating_sub(window.first.evicted_pages)
            >= window.first.movable_pages;
        if age < SHORTEST_WINDOW {
            return Seen::default();
        }
        let found = estimate(&before, sample).filter(|_| has_lapped);
        let found = found.filter(|found| !found.is_guess || age >= GUESS_AFTER);
        let mut seen = Seen::default();
        if let Some(found) = found {
            seen.tells = self.learn(found, sample.limit_pages);
        }
        let is_known = found.is_some_and(|found| !found.is_guess);
        if age >= (if is_known { USUAL_WINDOW } else { LONGEST_WINDOW }) {
            seen.begins_window = self.begin(sample).begins_window;
        }
        seen
    }

    fn begin(&mut self, sample: &Sample) -> Seen {
        self.window =
            (self.stalled_samples > 0).then_some(Window { first: *sample, last: *sample });
        Seen { begins_window: self.window.is_some(), tells: None }
    }

    fn learn(&mut self, found: WorkingSet, limit_pages: u64) -> Option<WorkingSet> {
        if found.pages <= limit_pages {
            self.now = None;
            return None;
        }
        self.now = Some(found);
        let replaces = |largest: WorkingSet| match (largest.is_guess, found.is_guess) {
            (true, false) => true,
            (false, true) => false,
            _ => found.pages >= largest.pages,
        };
        if self.largest.is_none_or(replaces) {
            self.largest = Some(found);
        }
        let is_news = self.told.is_none_or(|told| told.is_guess && !found.is_guess);
        if !is_news || self.stalled_samples < STALLED_SAMPLES {
            return None;
        }
        self.told = Some(found);
        self.told
    }
}

/// The working set: local memory, and what comes back again and again. Pages of the latter that
/// have not come back yet are fetched as often as the others. None if hardly any were fetched, or
/// too many for the first time.
fn estimate(before: &Sample, sample: &Sample) -> Option<WorkingSet> {
    let fetched = sample.fetched_pages.saturating_sub(before.fetched_pages);
    let first = sample.first_returns.saturating_sub(before.first_returns);
    if fetched < LEAST_FETCHES_PER_S || first * 100 > fetched * SEEN_PERCENT {
        return None;
    }
    let away_pages = sample.used_away_pages * fetched / (fetched - first);
    let pages = sample.local_pages + away_pages.min(sample.away_pages);
    Some(WorkingSet { pages, is_guess: first * 100 > fetched * KNOWN_PERCENT })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// In what order a program uses its pages.
    #[derive(Clone, Copy, Debug)]
    enum Walk {
        Random,
        Cyclic,
    }

    type Told = (Vec<(WorkingSet, u64)>, Option<WorkingSet>);

    /// A pager with `local` pages that evicts in order of arrival, under a program of `pages`, of
    /// which it uses `used`.
    struct Model {
        is_here: Vec<bool>,
        has_come_back: Vec<bool>,
        queue: VecDeque<usize>,
        used: usize,
        at: usize,
        seed: u64,
        sample: Sample,
        fixed_pages: u64,
    }

    impl Model {
        fn new(pages: usize, used: usize, local: usize, fixed_pages: u64) -> Model {
            // It was filled in order, so the last pages are here.
            let is_here: Vec<bool> = (0..pages).map(|page| page + local >= pages).collect();
            let queue = (pages.saturating_sub(local)..pages).collect();
            let limit_pages = local as u64 + fixed_pages;
            let movable_pages = local.min(pages) as u64;
            let sample = Sample {
                local_pages: movable_pages + fixed_pages,
                movable_pages,
                away_pages: pages.saturating_sub(local) as u64,
                limit_pages,
                ..Sample::default()
            };
            Model {
                is_here,
                has_come_back: vec![false; pages],
                queue,
                used,
                at: 0,
                seed: 9,
                sample,
                fixed_pages,
            }
        }

        fn next(&mut self, walk: Walk) -> usize {
            self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            self.at = match walk {
                Walk::Random => farpool_units::exactly::<usize, _>(self.seed >> 33) % self.used,
                Walk::Cyclic => (self.at + 1) % self.used,
            };
            self.at
        }

        /// One second in which up to `fetches` pages are fetched.
        fn second(&mut self, walk: Walk, fetches: u64) -> Sample {
            let before = self.sample.fetched_pages;
            for _ in 0..fetches * 50 {
                let page = self.next(walk);
                if !self.is_here[page] {
                    self.fetch(page);
                }
                if self.sample.fetched_pages - before == fetches {
                    break;
                }
            }
            let away = |page: &usize| self.has_come_back[*page] && !self.is_here[*page];
            self.sample.used_away_pages = (0..self.is_here.len()).filter(away).count() as u64;
            self.sample.at += SAMPLE_STEP;
            self.sample.is_stalled = self.sample.fetched_pages > before;
            self.sample
        }

        fn fetch(&mut self, page: usize) {
            let victim = self.queue.pop_front().expect("local memory");
            self.is_here[victim] = false;
            self.is_here[page] = true;
            self.queue.push_back(page);
            self.sample.fetched_pages += 1;
            self.sample.evicted_pages += 1;
            let is_first = !std::mem::replace(&mut self.has_come_back[page], true);
            self.sample.first_returns += u64::from(is_first);
        }

        fn forget_uses(&mut self) {
            self.has_come_back.fill(false);
        }

        /// Runs for `seconds`. Returns what was reported and after how many seconds, and the
        /// largest working set at the end.
        fn run(&mut self, walk: Walk, fetches: u64, seconds: u64) -> Told {
            let mut estimator = Estimator::default();
            let mut told = Vec::new();
            for second in 1..=seconds {
                let sample = self.second(walk, fetches);
                let seen = estimator.observe(&sample);
                if seen.begins_window {
                    self.forget_uses();
                }
                told.extend(seen.tells.map(|set| (set, second)));
            }
            (told, estimator.largest())
        }

        fn needs(&self) -> u64 {
            self.used as u64 + self.fixed_pages
        }
    }

    fn walks() -> impl Strategy<Value = Walk> {
        prop_oneof![Just(Walk::Random), Just(Walk::Cyclic)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The program is told what holds it, within a quarter, and within 10 s if all of it can be
        /// fetched in these.
        #[test]
        fn a_working_set_that_does_not_fit_is_found(
            walk in walks(), used in 2_000_usize..12_000, percent in 20_usize..85, idle in 0_usize..8_000,
            fixed_pages in 0_u64..500, fetches in 500_u64..12_000,
        ) {
            let mut model = Model::new(used + idle, used, used * percent / 100, fixed_pages);
            let (limit_pages, needs) = (model.sample.limit_pages, model.needs());
            let (told, largest) = model.run(walk, fetches, 120);
            let (first, second) = told.first().expect("it is told");
            let round = needs / fetches;
            prop_assert!(*second <= 10 + (2 * round).saturating_sub(6), "{first:?} after {second} \
                s");
            prop_assert!(told.len() <= 2 && first.pages > limit_pages, "{told:?}");
            prop_assert!(first.pages.abs_diff(needs) * 4 <= needs, "{first:?} of {needs}");
            let largest = largest.expect("it is told");
            prop_assert!(!largest.is_guess && largest.pages.abs_diff(needs) * 4 <= needs, "{largest:?} of {needs}");
        }

        /// Nothing is ever reported of a program that fits, even when it moves to other pages.
        #[test]
        fn a_program_that_fits_is_not_told(
            walk in walks(), used in 1_000_usize..9_000, idle in 0_usize..9_000, fetches in 300_u64..6_000,
        ) {
            let mut model = Model::new(used + idle, used, used + used / 16, 10);
            prop_assert_eq!(model.run(walk, fetches, 60), (Vec::new(), None));
        }
    }

    #[test]
    fn after_a_calm_time_nothing_is_known_and_the_largest_is_kept() {
        let mut model = Model::new(4_000, 4_000, 2_000, 0);
        let mut estimator = Estimator::default();
        while estimator.now().is_none() {
            let sample = model.second(Walk::Random, 4_000);
            if estimator.observe(&sample).begins_window {
                model.forget_uses();
            }
        }
        let largest = estimator.largest();
        for _ in 0..CALM_SAMPLES {
            model.sample.at += SAMPLE_STEP;
            estimator.observe(&Sample { is_stalled: false, ..model.sample });
        }
        assert_eq!((estimator.now(), estimator.largest()), (None, largest));
    }

    #[test]
    fn who_waits_a_quarter_of_his_time_is_stalled() {
        let second = Duration::from_secs(1);
        let progress = |fetches, wait_ms, cpu_ms| Progress {
            elapsed: second,
            cpu: Duration::from_millis(cpu_ms),
            fetches,
            fetch_wait: Duration::from_millis(wait_ms),
        };
        assert!(progress(3_000, 150, 900).is_stalled());
        assert!(!progress(3_000, 150, 8_000).is_stalled(), "one of many threads");
        assert!(!progress(100, 900, 20).is_stalled(), "hardly any fetches");
        assert!(!Progress::default().is_stalled());
    }
}
