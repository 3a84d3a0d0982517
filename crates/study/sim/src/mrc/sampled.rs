//! The curve of LRU from a sample of the pages.

use std::fmt;

use super::exact::LruCurve;
use super::sample::{Rate, Sample, SampleError};
use crate::misses::DensePages;

/// Number of sizes, equally spaced up to the largest, at which curves of several seeds are
/// compared.
const COMPARED_SIZES: usize = 64;

/// The curve of the sampled pages, read at sizes scaled down.
#[derive(Debug, Clone)]
pub struct SampledCurve {
    curve: LruCurve,
    rate: Rate,
    /// Pages in the sample.
    pub sampled_pages: usize,
    /// References in the sample.
    pub sampled_requests: u64,
    requests_expected: f64,
}

/// The estimated error of a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Confidence {
    /// Samples taken.
    pub seeds: usize,
    /// Pages in the smallest of them.
    pub sampled_pages_min: usize,
    /// The largest standard deviation of their miss ratios, over all sizes.
    pub deviation_max: f64,
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples of {} pages or more; at no size is the standard deviation of their miss \
             ratios above {:.4}",
            self.seeds, self.sampled_pages_min, self.deviation_max
        )
    }
}

impl SampledCurve {
    /// Samples `trace` and computes the curve of the sample.
    ///
    /// # Errors
    /// No page is in the sample.
    pub fn new(trace: DensePages<'_>, rate: Rate, seed: u64) -> Result<Self, SampleError> {
        let sample = Sample::new(trace, rate, seed)?;
        Ok(Self {
            curve: LruCurve::new(sample.as_trace(), |_| {}),
            rate,
            sampled_pages: sample.page_count,
            sampled_requests: sample.pages.len() as u64,
            requests_expected: sample.requests_expected(),
        })
    }

    /// Estimates the share of requests that miss at a capacity of `capacity` pages.
    ///
    /// Requests that the sample has above or below its share count as hits at the least distance
    /// (SHARDS-adj): they belong to the most frequent pages.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn miss_ratio(&self, capacity: usize) -> f64 {
        if capacity == 0 {
            return 1.0;
        }
        let scaled = scaled_down(capacity, self.rate).max(1);
        (self.curve.misses(scaled) as f64 / self.requests_expected).min(1.0)
    }

    /// Takes `seeds` samples and measures how far their curves deviate from each other. Returns the
    /// first with the deviation.
    ///
    /// # Errors
    /// Fewer than two seeds; a sample without a page.
    pub fn with_confidence(
        trace: DensePages<'_>,
        rate: Rate,
        seeds: usize,
    ) -> Result<(Self, Confidence), SampleError> {
        if seeds < 2 {
            return Err(SampleError::Seeds);
        }
        let curves = (0..seeds as u64)
            .map(|seed| Self::new(trace, rate, seed))
            .collect::<Result<Vec<_>, _>>()?;
        let deviation_max = (1..=COMPARED_SIZES)
            .map(|step| {
                let capacity = (trace.page_count * step / COMPARED_SIZES).max(1);
                deviation(curves.iter().map(|curve| curve.miss_ratio(capacity)))
            })
            .fold(0.0, f64::max);
        let sampled_pages_min = curves.iter().map(|curve| curve.sampled_pages).min().unwrap_or(0);
        let first = curves.into_iter().next().ok_or(SampleError::Seeds)?;
        Ok((first, Confidence { seeds, sampled_pages_min, deviation_max }))
    }

    /// Estimates the bytes that a sampled curve takes beside the trace.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn memory_bytes(page_count: u64, requests: u64, rate: Rate) -> u64 {
        let sampled = (page_count as f64 * rate.share()).ceil() as u64;
        Sample::memory_bytes(page_count, requests, rate) + LruCurve::memory_bytes(sampled)
    }
}

/// Returns the capacity among sampled pages that stands for `capacity` among all.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(super) fn scaled_down(capacity: usize, rate: Rate) -> usize {
    (capacity as f64 * rate.share()).round() as usize
}

/// Returns the standard deviation of `values`.
#[expect(clippy::cast_precision_loss, reason = "a handful of seeds")]
fn deviation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (values.map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Synthetic;

    #[test]
    fn all_pages_give_the_exact_curve() {
        let made = Synthetic::zipf(1 << 10, 20_000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let exact = LruCurve::new(trace, |_| {});
        let sampled = SampledCurve::new(trace, Rate::new(1.0).unwrap(), 5).unwrap();
        for capacity in 1..1100 {
            #[expect(clippy::cast_precision_loss)]
            let ratio = exact.misses(capacity) as f64 / 20_000.0;
            assert!((sampled.miss_ratio(capacity) - ratio).abs() < 1e-12, "{capacity}");
        }
    }

    #[test]
    fn a_tenth_of_the_pages_comes_within_what_it_says() {
        let made = Synthetic::zipf(1 << 16, 400_000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let exact = LruCurve::new(trace, |_| {});
        let rate = Rate::new(0.1).unwrap();
        let (curve, confidence) = SampledCurve::with_confidence(trace, rate, 5).unwrap();
        assert!(confidence.sampled_pages_min > 6000, "{confidence}");
        // Where about a hundred pages of a Zipf of 2^16 fit, the references of the others in a
        // tenth of the pages deviate by sqrt(0.9 / 0.1 / 100) / ln(2^16).
        assert!(confidence.deviation_max < 0.03, "{confidence}");
        for capacity in [655, 6553, 20_000, 50_000] {
            #[expect(clippy::cast_precision_loss)]
            let ratio = exact.misses(capacity) as f64 / 400_000.0;
            let apart = (curve.miss_ratio(capacity) - ratio).abs();
            assert!(apart <= 4.0 * confidence.deviation_max, "{capacity}: {apart} {confidence}");
        }
    }

    #[test]
    fn what_cannot_be_sampled_is_refused() {
        for share in [0.0, -1.0, 1.1, f64::NAN] {
            assert!(matches!(Rate::new(share), Err(SampleError::Rate(_))), "{share}");
        }
        let trace = DensePages { pages: &[0, 1], page_count: 2 };
        let rate = Rate::new(1e-9).unwrap();
        assert_eq!(SampledCurve::new(trace, rate, 1).unwrap_err(), SampleError::Empty(2));
        assert_eq!(SampledCurve::with_confidence(trace, rate, 1).unwrap_err(), SampleError::Seeds);
    }
}
