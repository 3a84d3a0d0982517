//! Traces made by a seeded generator: the same numbers on any machine.
//!
//! Tests and benchmarks of the simulator run on them; each stands for a behaviour that tells
//! policies apart.

use farpool_policy::Rng;
use farpool_units::exactly;

/// A trace of dense pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Synthetic {
    /// The page of each request.
    pub pages: Vec<u32>,
    /// Pages are `0..page_count`.
    pub page_count: usize,
}

/// Odd, so that multiplication by it scatters the ranks of a power of two of pages one to one.
const SCATTER: u32 = 0x9E37_79B1;

impl Synthetic {
    fn draw(page_count: u32, requests: usize, mut page: impl FnMut(usize) -> u32) -> Self {
        let pages = (0..requests).map(&mut page).collect();
        Self { pages, page_count: page_count as usize }
    }

    /// Zipf with exponent 1: the page of rank r is referenced in proportion to 1 / r. Ranks are
    /// scattered over the pages, of which there must be a power of two.
    ///
    /// # Panics
    /// The number of pages is not a power of two.
    #[must_use]
    pub fn zipf(page_count: u32, requests: usize, seed: u64) -> Self {
        assert!(page_count.is_power_of_two(), "ranks are scattered over a power of two of pages");
        let mut total = 0.0;
        let mut sums = Vec::with_capacity(page_count as usize);
        for rank in 1..=page_count {
            total += 1.0 / f64::from(rank);
            sums.push(total);
        }
        let index = RankIndex::new(&sums, total);
        let mut rng = Rng::new(seed);
        Self::draw(page_count, requests, |_| {
            let rank = index.rank(&sums, unit(&mut rng) * total);
            rank.wrapping_mul(SCATTER) & (page_count - 1)
        })
    }

    /// mstress of HPL-2011-31: nine of ten references go to the hot tenth of the pages.
    ///
    /// # Panics
    /// Fewer than ten pages.
    #[must_use]
    pub fn mstress(page_count: u32, requests: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let hot = page_count / 10;
        Self::draw(page_count, requests, |_| {
            let is_hot = unit(&mut rng) < 0.9;
            let drawn = rng.next_u64();
            if is_hot { modulo(drawn, hot) } else { hot + modulo(drawn, page_count - hot) }
        })
    }

    /// Cycles over all pages.
    #[must_use]
    pub fn cycle(page_count: u32, requests: usize) -> Self {
        let mut next = 0;
        Self::draw(page_count, requests, |_| {
            let page = next;
            next = (next + 1) % page_count;
            page
        })
    }

    /// Every other reference continues a scan over all pages; the rest stay in a hot eighth.
    #[must_use]
    pub fn scan_and_hot_set(page_count: u32, requests: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut scan = 0;
        Self::draw(page_count, requests, |at| {
            if at % 2 == 0 {
                scan = (scan + 1) % page_count;
                scan
            } else {
                rng.below(page_count / 8)
            }
        })
    }

    /// Ten phases, each with a working set of an eighth of the pages that overlaps the previous one
    /// by half.
    #[must_use]
    pub fn phases(page_count: u32, requests: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let set = page_count / 8;
        let phase_requests = (requests / 10).max(1);
        let mut first = 0;
        Self::draw(page_count, requests, |at| {
            if at % phase_requests == 0 {
                first = (first + set / 2) % page_count;
            }
            // The smaller of two draws, so that the pages of a set differ in popularity.
            (first + rng.below(set).min(rng.below(set))) % page_count
        })
    }

    /// A walk: each reference lies a little before or behind the previous one, sometimes far away.
    #[must_use]
    pub fn walk(page_count: u32, requests: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut at = page_count / 2;
        Self::draw(page_count, requests, |_| {
            if rng.below(500) == 0 {
                at = rng.below(page_count);
            }
            at = (at + page_count + rng.below(65) - 32) % page_count;
            at
        })
    }

    /// A third of the references go to pages that never recur, the others to a Zipf of the first
    /// `page_count` pages, a power of two.
    ///
    /// # Panics
    /// As [`Synthetic::zipf`]; pages beyond 2^32.
    #[must_use]
    pub fn one_time_visitors(page_count: u32, requests: usize, seed: u64) -> Self {
        let mut made = Self::zipf(page_count, requests, seed);
        let mut fresh = page_count;
        for page in made.pages.iter_mut().step_by(3) {
            *page = fresh;
            fresh = fresh.checked_add(1).expect("fewer than 2^32 pages");
        }
        made.page_count = fresh as usize;
        made
    }
}

/// A number in 0..1, of 53 bits.
#[expect(clippy::cast_precision_loss, reason = "53 bits fit exactly")]
fn unit(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

fn modulo(drawn: u64, bound: u32) -> u32 {
    exactly(drawn % u64::from(bound))
}

/// Where a search in the sums of weights begins: a table of equal steps of the sum.
#[derive(Debug)]
struct RankIndex {
    starts: Vec<u32>,
    per_sum: f64,
}

impl RankIndex {
    #[expect(clippy::cast_precision_loss, reason = "a table has far fewer than 2^53 entries")]
    fn new(sums: &[f64], total: f64) -> Self {
        let steps = sums.len() + 1;
        let per_sum = (steps - 1) as f64 / total;
        let mut starts = Vec::with_capacity(steps + 1);
        let mut rank = 0u32;
        for step in 0..=steps {
            let bound = step as f64 / per_sum;
            while (rank as usize) < sums.len() - 1 && sums[rank as usize] <= bound {
                rank += 1;
            }
            starts.push(rank);
        }
        Self { starts, per_sum }
    }

    /// Returns the first rank, from 0, whose sum is above `drawn`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "drawn is in range"
    )]
    fn rank(&self, sums: &[f64], drawn: f64) -> u32 {
        let step = (drawn * self.per_sum) as usize;
        // One step back, since the product may have been rounded up.
        let low = self.starts[step.saturating_sub(1)] as usize;
        let high = self.starts[(step + 2).min(self.starts.len() - 1)] as usize + 1;
        let found = low + sums[low..high].partition_point(|sum| *sum <= drawn);
        exactly(found.min(sums.len() - 1))
    }
}
