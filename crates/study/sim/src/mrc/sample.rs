//! Some of the pages of a trace, and every reference to them.

use farpool_policy::Rng;

use crate::misses::{DensePages, MissError};

/// The share of the pages that is sampled: above 0, at most 1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Rate(f64);

/// A sample that cannot be taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The share is out of range.
    #[error("a sample of {0} of the pages: the share must be above 0 and at most 1")]
    Rate(f64),
    /// No page was sampled.
    #[error("none of {0} pages is in the sample; take a larger share")]
    Empty(usize),
    /// The miss counts of a miniature.
    #[error(transparent)]
    Misses(#[from] MissError),
}

impl Rate {
    /// A hundredth.
    pub const PERCENT: Self = Self(0.01);

    /// # Errors
    /// A share that is not above 0 and at most 1.
    pub fn new(share: f64) -> Result<Self, SampleError> {
        if share > 0.0 && share <= 1.0 { Ok(Self(share)) } else { Err(SampleError::Rate(share)) }
    }

    /// The share.
    #[must_use]
    pub fn share(self) -> f64 {
        self.0
    }
}

/// A trace to take samples of, and what is known of it without any.
#[derive(Debug, Clone, Copy)]
pub struct Population<'t> {
    pub(super) trace: DensePages<'t>,
    /// Pages that occur, each of which misses once, at its first touch.
    pub(super) occurring: usize,
}

impl<'t> Population<'t> {
    /// Counts the pages that occur, in one pass over the trace.
    #[must_use]
    pub fn new(trace: DensePages<'t>) -> Self {
        Self { trace, occurring: occurring(trace) }
    }

    /// A trace whose pages were numbered as they were first touched: all of them occur.
    #[must_use]
    pub fn numbered_by_first_touch(trace: DensePages<'t>) -> Self {
        Self { trace, occurring: trace.page_count }
    }

    /// The share of requests that are first touches: no policy at any size misses less.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn first_touch_ratio(&self) -> f64 {
        self.occurring as f64 / self.trace.pages.len().max(1) as f64
    }
}

fn occurring(trace: DensePages<'_>) -> usize {
    let mut seen = vec![0u64; trace.page_count.div_ceil(64)];
    for page in trace.pages {
        seen[*page as usize / 64] |= 1 << (page % 64);
    }
    seen.iter().map(|word| word.count_ones() as usize).sum()
}

/// The references to the sampled pages, which are renumbered.
#[derive(Debug)]
pub struct Sample {
    /// The sampled page of each remaining reference.
    pub pages: Vec<u32>,
    /// Sampled pages, whether they occur or not.
    pub page_count: usize,
    /// Sampled pages that occur.
    pub occurring: usize,
    /// The share of the occurring pages that is in the sample: near its rate, and known exactly.
    share: f64,
    /// Requests and occurring pages of the whole trace.
    requests: u64,
    first_touches: u64,
}

impl Sample {
    /// Chooses pages by a hash of their number and the seed, so that either all references to a
    /// page are in or none.
    ///
    /// `progress` is called about every million requests of the whole trace with their number.
    ///
    /// # Errors
    /// No page is chosen.
    pub fn new(
        of: &Population<'_>,
        rate: Rate,
        seed: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Self, SampleError> {
        let trace = of.trace;
        let below = threshold(rate);
        let key = Rng::new(seed).next_u64();
        // Kept as bits: they are read once per request and must stay in the cache.
        let mut chosen = vec![0u64; trace.page_count.div_ceil(64)];
        let mut count = 0;
        for page in 0..trace.page_count {
            let is_chosen = Rng::new(key ^ page as u64).next_u64() <= below;
            chosen[page / 64] |= u64::from(is_chosen) << (page % 64);
            count += usize::from(is_chosen);
        }
        let ranks = Ranks::new(&chosen);
        let mut pages = Vec::new();
        for block in trace.pages.chunks(1 << 20) {
            for page in block {
                let word = chosen[*page as usize / 64];
                if word >> (page % 64) & 1 == 1 {
                    pages.push(ranks.rank(word, *page));
                }
            }
            progress(block.len() as u64);
        }
        if pages.is_empty() {
            return Err(SampleError::Empty(trace.page_count));
        }
        let mut sample = Self {
            pages,
            page_count: count,
            occurring: 0,
            share: 1.0,
            requests: trace.pages.len() as u64,
            first_touches: of.occurring as u64,
        };
        sample.occurring = occurring(sample.as_trace());
        sample.share = share(sample.occurring, of.occurring);
        Ok(sample)
    }

    /// The sample as a trace.
    #[must_use]
    pub fn as_trace(&self) -> DensePages<'_> {
        DensePages { pages: &self.pages, page_count: self.page_count }
    }

    /// Returns the capacity among sampled pages that stands for `capacity` among all. Room for all
    /// pages is room for all sampled ones.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(super) fn scaled_down(&self, capacity: usize) -> usize {
        ((capacity as f64 * self.share).round() as usize).max(1)
    }

    /// Estimates the share of all requests that miss where `misses` of the sample's do.
    ///
    /// First touches are known; only the other misses are estimated. Requests that the sample has
    /// above or below its share count as hits (SHARDS-adj): they belong to the most frequent pages.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub(super) fn miss_ratio(&self, misses: u64) -> f64 {
        let requests = self.requests as f64;
        let again = misses.saturating_sub(self.occurring as u64) as f64 / self.share;
        ((self.first_touches as f64 + again) / requests).min(1.0)
    }

    /// Estimates the bytes that a sample takes if references are spread evenly over pages.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn memory_bytes(page_count: u64, requests: u64, rate: Rate) -> u64 {
        page_count / 4 + page_count / 16 + (requests as f64 * rate.0 * 8.0) as u64
    }
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn threshold(rate: Rate) -> u64 {
    // Saturates at a rate of 1, where every hash is below.
    (rate.0 * u64::MAX as f64) as u64
}

#[expect(clippy::cast_precision_loss, reason = "pages")]
fn share(part: usize, of: usize) -> f64 {
    part as f64 / of.max(1) as f64
}

/// The number of chosen pages before each word.
struct Ranks(Vec<u32>);

impl Ranks {
    fn new(chosen: &[u64]) -> Self {
        let mut before = 0;
        let ranks = chosen.iter().map(|word| {
            let rank = before;
            before += word.count_ones();
            rank
        });
        Self(ranks.collect())
    }

    fn rank(&self, word: u64, page: u32) -> u32 {
        let lower = word & ((1 << (page % 64)) - 1);
        self.0[page as usize / 64] + lower.count_ones()
    }
}
