//! Miss ratios from several samples of the pages, with the error that the samples show.

use std::fmt;

use super::exact::LruCurve;
use super::sample::{Population, Rate, Sample, SampleError};
use crate::sweep::Progress;

/// Samples whose mean is the estimate. One sample of a Zipf trace errs about 2.5 times as much.
pub const SAMPLES: u64 = 5;

/// One policy's estimates at the sizes asked for, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The mean of the samples.
    pub miss_ratios: Vec<f64>,
    /// The standard deviation of one sample: of chance. It holds the true value nine times in ten.
    pub deviations: Vec<f64>,
    /// How much the mean of samples of half the size differs: of bias, where small caches behave
    /// otherwise than large ones. Of policies whose samples may be biased.
    pub drifts: Option<Vec<f64>>,
    /// Pages in the smallest sample.
    pub sampled_pages_min: usize,
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worst = |of: &[f64]| of.iter().copied().fold(0.0, f64::max);
        write!(
            f,
            "mean of {SAMPLES} samples of {} pages or more; their deviation is at most {:.4}",
            self.sampled_pages_min,
            worst(&self.deviations)
        )?;
        let Some(drifts) = &self.drifts else { return Ok(()) };
        write!(f, "; samples of half the size differ by at most {:.4}", worst(drifts))?;
        match self.is_biased() {
            true => f.write_str(", more than chance: small caches mislead on this trace"),
            false => Ok(()),
        }
    }
}

impl Estimate {
    /// Combines the miss ratios of samples, one list of sizes each, and those of samples of half
    /// the size; None of policies whose samples have no bias.
    pub(super) fn of(
        samples: &[Vec<f64>],
        halves: Option<&[Vec<f64>]>,
        sampled_pages_min: usize,
    ) -> Self {
        let sizes = 0..samples.first().map_or(0, Vec::len);
        let at = |of: &[Vec<f64>], size: usize| {
            moments(&of.iter().map(|sample| sample[size]).collect::<Vec<f64>>())
        };
        let (miss_ratios, deviations): (Vec<f64>, Vec<f64>) =
            sizes.clone().map(|size| at(samples, size)).unzip();
        let drift =
            |size: usize, halves: &[Vec<f64>]| (at(halves, size).0 - miss_ratios[size]).abs();
        let halves = halves.filter(|halves| !halves.is_empty());
        let drifts = halves.map(|halves| sizes.map(|size| drift(size, halves)).collect());
        Self { miss_ratios, deviations, drifts, sampled_pages_min }
    }

    /// The estimated error of each: the larger one of chance and bias.
    #[must_use]
    pub fn errors(&self) -> Vec<f64> {
        let drift = |size: usize| self.drifts.as_ref().map_or(0.0, |drifts| drifts[size]);
        (0..).zip(&self.deviations).map(|(size, deviation)| deviation.max(drift(size))).collect()
    }

    /// True if at some size bias shows beyond chance.
    fn is_biased(&self) -> bool {
        let mut drifts = self.drifts.iter().flatten().zip(&self.deviations);
        drifts.any(|(drift, deviation)| *drift > deviation.max(VISIBLE))
    }
}

/// A difference of miss ratios that a plot shows.
const VISIBLE: f64 = 0.01;

/// Estimates the miss ratios of LRU at these capacities, in pages; `progress` is called about every
/// million requests.
///
/// # Errors
/// No page is in a sample.
pub fn sampled_lru(
    of: &Population<'_>,
    capacities: &[usize],
    rate: Rate,
    progress: impl FnMut(Progress),
) -> Result<Estimate, SampleError> {
    let requests = of.trace.pages.len() as u64;
    let mut work = Work::new(SAMPLES * (requests + expected(requests, rate)), progress);
    let mut pages_min = usize::MAX;
    let mut samples = Vec::new();
    for seed in 0..SAMPLES {
        let sample = Sample::new(of, rate, seed, |requests| work.add(requests))?;
        pages_min = pages_min.min(sample.occurring);
        let curve = LruCurve::new(sample.as_trace(), |requests| work.add(requests as u64));
        let ratio =
            |&capacity: &usize| sample.miss_ratio(curve.misses(sample.scaled_down(capacity)));
        samples.push(capacities.iter().map(ratio).collect());
    }
    Ok(Estimate::of(&samples, None, pages_min))
}

/// How many of `all` pages or requests a sample is expected to have.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(super) fn expected(all: u64, rate: Rate) -> u64 {
    (all as f64 * rate.share()).ceil() as u64
}

/// Progress over several passes, of which samples' lengths are only expected.
pub(super) struct Work<F> {
    now: Progress,
    progress: F,
}

impl<F: FnMut(Progress)> Work<F> {
    pub(super) fn new(requests_total: u64, progress: F) -> Self {
        Self { now: Progress { requests: 0, requests_total }, progress }
    }

    pub(super) fn add(&mut self, requests: u64) {
        self.now.requests += requests;
        self.now.requests_total = self.now.requests_total.max(self.now.requests);
        (self.progress)(self.now);
    }
}

/// Estimates the bytes that [`sampled_lru`] takes beside the trace: one sample at a time.
#[must_use]
pub fn sampled_lru_memory_bytes(page_count: u64, requests: u64, rate: Rate) -> u64 {
    let sampled = expected(page_count, rate);
    Sample::memory_bytes(page_count, requests, rate) + LruCurve::memory_bytes(sampled)
}

/// Returns the mean and the standard deviation of `values`.
#[expect(clippy::cast_precision_loss, reason = "a handful of samples")]
fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::misses::DensePages;
    use crate::synthetic::Synthetic;

    fn exact(trace: DensePages<'_>, sizes: &[usize]) -> Vec<f64> {
        let curve = LruCurve::new(trace, |_| {});
        #[expect(clippy::cast_precision_loss)]
        let ratio = |&size: &usize| curve.misses(size) as f64 / trace.pages.len() as f64;
        sizes.iter().map(ratio).collect()
    }

    #[test]
    fn all_pages_give_the_exact_curve() {
        let made = Synthetic::zipf(1 << 10, 20_000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let sizes: Vec<usize> = (1..1100).collect();
        let whole = Rate::new(1.0).unwrap();
        let told = sampled_lru(&Population::new(trace), &sizes, whole, |_| {}).unwrap();
        for (told, exact) in told.miss_ratios.iter().zip(exact(trace, &sizes)) {
            assert!((told - exact).abs() < 1e-12, "{told} {exact}");
        }
        assert!(told.errors().iter().all(|error| *error < 1e-12));
    }

    /// One sample of a hundredth errs by up to 0.1 at the worst size.
    #[test]
    fn the_mean_of_a_hundredth_of_the_pages_is_near_and_its_error_says_how_near() {
        let made = Synthetic::zipf(1 << 18, 1_500_000, 11);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let percents = [1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100];
        let of = Population::new(trace);
        let sizes = percents.map(|percent| of.occurring * percent / 100);
        let told = sampled_lru(&of, &sizes, Rate::new(0.01).unwrap(), |_| {}).unwrap();
        let exact = exact(trace, &sizes);
        let off: Vec<f64> =
            told.miss_ratios.iter().zip(&exact).map(|(told, exact)| (told - exact).abs()).collect();
        let mean = off.iter().sum::<f64>() / 16.0;
        assert!(mean <= 0.03, "{mean} {off:?}");
        let errors = told.errors();
        let covered = off.iter().zip(&errors).filter(|(off, error)| *off <= *error).count();
        assert!(covered >= 14, "{covered} of 16: {off:?} {errors:?}");
    }

    #[test]
    fn known_first_touches_are_never_contradicted() {
        let traces = [
            Synthetic::zipf(1 << 16, 400_000, 3),
            Synthetic::cycle(20_000, 300_000),
            Synthetic::mstress(40_000, 300_000, 5),
            Synthetic::scan_and_hot_set(30_000, 300_000, 5),
            Synthetic::phases(40_000, 300_000, 5),
            Synthetic::walk(30_000, 300_000, 5),
        ];
        for (at, made) in traces.iter().enumerate() {
            let of =
                Population::new(DensePages { pages: &made.pages, page_count: made.page_count });
            for rate in [0.01, 0.1, 0.5] {
                let sizes = [of.occurring / 20, of.occurring / 2, of.occurring, made.page_count];
                let told = sampled_lru(&of, &sizes, Rate::new(rate).unwrap(), |_| {}).unwrap();
                let first = of.first_touch_ratio();
                assert!(told.miss_ratios.iter().all(|it| *it >= first), "{at} {rate} {told:?}");
                assert!((told.miss_ratios[2] - first).abs() < 1e-9, "{at} {rate} {told:?}");
            }
        }
    }

    #[test]
    fn chance_and_bias_are_told_apart() {
        let samples = [vec![0.1, 0.5], vec![0.3, 0.5]];
        let alone = Estimate::of(&samples, None, 7);
        assert_eq!((alone.miss_ratios.as_slice(), &alone.drifts), (&[0.2, 0.5][..], &None));
        assert!((alone.deviations[0] - 0.02_f64.sqrt()).abs() < 1e-12, "{alone:?}");
        assert_eq!(alone.errors(), alone.deviations);
        assert!(alone.to_string().ends_with("deviation is at most 0.1414"), "{alone}");
        // Within chance at the first size, beyond it at the second.
        let halves = [vec![0.25, 0.7]];
        let biased = Estimate::of(&samples, Some(&halves), 7);
        assert_eq!(biased.deviations, alone.deviations);
        let drifts = biased.drifts.clone().unwrap();
        assert!((drifts[0] - 0.05).abs() < 1e-12 && (drifts[1] - 0.2).abs() < 1e-12, "{drifts:?}");
        assert_eq!(biased.errors(), [alone.deviations[0], drifts[1]]);
        let told = biased.to_string();
        assert!(told.contains("at most 0.1414; ") && told.contains("at most 0.2000, "), "{told}");
        assert!(told.contains("small caches mislead"), "{told}");
        let steady = Estimate::of(&samples, Some(&samples), 7);
        assert!(!steady.to_string().contains("mislead"), "{steady}");
    }

    #[test]
    fn long_work_says_how_far_it_is() {
        let made = Synthetic::zipf(1 << 10, 20_000, 3);
        let of = Population::new(DensePages { pages: &made.pages, page_count: made.page_count });
        let mut told: Vec<Progress> = Vec::new();
        sampled_lru(&of, &[10], Rate::new(0.1).unwrap(), |now| told.push(now)).unwrap();
        // A pass over the trace for each sample, and one over the sample.
        assert_eq!(told.len() as u64, 2 * SAMPLES);
        assert!(told.windows(2).all(|pair| pair[0].requests < pair[1].requests), "{told:?}");
        assert!(told.iter().all(|now| now.requests <= now.requests_total), "{told:?}");
        let last = told[told.len() - 1];
        assert!(last.requests * 10 >= last.requests_total * 9, "{last:?}");
    }

    #[test]
    fn what_cannot_be_sampled_is_refused() {
        for share in [0.0, -1.0, 1.1, f64::NAN] {
            assert!(matches!(Rate::new(share), Err(SampleError::Rate(_))), "{share}");
        }
        let of = Population::new(DensePages { pages: &[0, 1], page_count: 2 });
        let rate = Rate::new(1e-9).unwrap();
        assert_eq!(sampled_lru(&of, &[1], rate, |_| {}).unwrap_err(), SampleError::Empty(2));
    }
}
