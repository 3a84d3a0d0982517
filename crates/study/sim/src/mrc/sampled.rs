//! Miss ratios from several samples of the pages, with the error that the samples show.

use std::fmt;

use super::exact::LruCurve;
use super::sample::{Population, Rate, Sample, SampleError};

/// Samples whose mean is the estimate. One sample of a Zipf trace errs about 2.5 times as much.
pub const SAMPLES: u64 = 5;

/// One policy's estimates at the sizes asked for, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The mean of the samples.
    pub miss_ratios: Vec<f64>,
    /// The estimated error of each: the standard deviation of a sample, which holds the true value
    /// nine times in ten, or how much samples of half the size differ if that is more. A small
    /// cache
    /// that behaves otherwise than a large one shows in the latter.
    pub errors: Vec<f64>,
    /// Pages in the smallest sample.
    pub sampled_pages_min: usize,
    /// The mean of samples of half the size, of policies whose samples may be biased.
    biased: bool,
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worst = self.errors.iter().copied().fold(0.0, f64::max);
        write!(
            f,
            "mean of {SAMPLES} samples of {} pages or more; their deviation is at most {worst:.4}",
            self.sampled_pages_min
        )?;
        match self.biased {
            true => f.write_str(
                "; smaller samples differ by more than that: small caches mislead on this trace",
            ),
            false => Ok(()),
        }
    }
}

impl Estimate {
    /// Combines the miss ratios of samples, one list of sizes each, and those of samples of half
    /// the
    /// size.
    pub(super) fn of(samples: &[Vec<f64>], halves: &[Vec<f64>], sampled_pages_min: usize) -> Self {
        let sizes = samples.first().map_or(0, Vec::len);
        let at = |of: &[Vec<f64>], size: usize| -> Vec<f64> {
            of.iter().map(|sample| sample[size]).collect()
        };
        let mut biased = false;
        let (mut miss_ratios, mut errors) = (Vec::new(), Vec::new());
        for size in 0..sizes {
            let (mean, deviation) = moments(&at(samples, size));
            let drift = match halves {
                [] => 0.0,
                _ => (moments(&at(halves, size)).0 - mean).abs(),
            };
            biased |= drift > deviation.max(VISIBLE);
            miss_ratios.push(mean);
            errors.push(deviation.max(drift));
        }
        Self { miss_ratios, errors, sampled_pages_min, biased }
    }
}

/// A difference of miss ratios that a plot shows.
const VISIBLE: f64 = 0.01;

/// Estimates the miss ratios of LRU at these capacities, in pages.
///
/// # Errors
/// No page is in a sample.
pub fn sampled_lru(
    of: &Population<'_>,
    capacities: &[usize],
    rate: Rate,
) -> Result<Estimate, SampleError> {
    let mut pages_min = usize::MAX;
    let mut samples = Vec::new();
    for seed in 0..SAMPLES {
        let sample = Sample::new(of, rate, seed)?;
        pages_min = pages_min.min(sample.occurring);
        let curve = LruCurve::new(sample.as_trace(), |_| {});
        let ratio =
            |&capacity: &usize| sample.miss_ratio(curve.misses(sample.scaled_down(capacity)));
        samples.push(capacities.iter().map(ratio).collect());
    }
    Ok(Estimate::of(&samples, &[], pages_min))
}

/// Estimates the bytes that [`sampled_lru`] takes beside the trace: one sample at a time.
#[must_use]
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn sampled_lru_memory_bytes(page_count: u64, requests: u64, rate: Rate) -> u64 {
    let sampled = (page_count as f64 * rate.share()).ceil() as u64;
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
        let told = sampled_lru(&Population::new(trace), &sizes, whole).unwrap();
        for (told, exact) in told.miss_ratios.iter().zip(exact(trace, &sizes)) {
            assert!((told - exact).abs() < 1e-12, "{told} {exact}");
        }
        assert!(told.errors.iter().all(|error| *error < 1e-12));
    }

    /// One sample of a hundredth errs by up to 0.1 at the worst size.
    #[test]
    fn the_mean_of_a_hundredth_of_the_pages_is_near_and_its_error_says_how_near() {
        let made = Synthetic::zipf(1 << 18, 1_500_000, 11);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let percents = [1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100];
        let of = Population::new(trace);
        let sizes = percents.map(|percent| of.occurring * percent / 100);
        let told = sampled_lru(&of, &sizes, Rate::new(0.01).unwrap()).unwrap();
        let exact = exact(trace, &sizes);
        let off: Vec<f64> =
            told.miss_ratios.iter().zip(&exact).map(|(told, exact)| (told - exact).abs()).collect();
        let mean = off.iter().sum::<f64>() / 16.0;
        assert!(mean <= 0.03, "{mean} {off:?}");
        let covered = off.iter().zip(&told.errors).filter(|(off, error)| *off <= *error).count();
        assert!(covered >= 14, "{covered} of 16: {off:?} {:?}", told.errors);
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
                let told = sampled_lru(&of, &sizes, Rate::new(rate).unwrap()).unwrap();
                let first = of.first_touch_ratio();
                assert!(told.miss_ratios.iter().all(|it| *it >= first), "{at} {rate} {told:?}");
                assert!((told.miss_ratios[2] - first).abs() < 1e-9, "{at} {rate} {told:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_sampled_is_refused() {
        for share in [0.0, -1.0, 1.1, f64::NAN] {
            assert!(matches!(Rate::new(share), Err(SampleError::Rate(_))), "{share}");
        }
        let of = Population::new(DensePages { pages: &[0, 1], page_count: 2 });
        let rate = Rate::new(1e-9).unwrap();
        assert_eq!(sampled_lru(&of, &[1], rate).unwrap_err(), SampleError::Empty(2));
    }
}
