//! What operators want to know of the keys: which are hot, and what more memory would buy.
//!
//! All of it works on samples, so that asking costs next to nothing. Pure.

pub mod curve;
pub mod hot;

use curve::MissCurve;
use hot::{HotKey, HotKeys};

/// Keys that the curve of a shard follows.
const CURVE_KEYS: usize = 8192;
/// Counters for hot keys of a shard.
const HOT_COUNTERS: usize = 64;
/// Every so manieth read is looked at for hot keys.
const HOT_SAMPLE_EVERY: u32 = 61;
/// Hot keys that a shard reports.
const HOT_REPORTED: usize = 20;
/// After so many sampled reads half of what was counted is forgotten.
const HOT_MEMORY: u64 = 100_000;
/// The sizes that are told, in times of the memory that there is.
pub const TIMES: [f64; 9] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// Watches the reads of one shard.
#[derive(Debug)]
pub struct Observer {
    curve: MissCurve,
    hot: HotKeys,
}

/// What an observer tells of its shard.
#[derive(Debug, Default, Clone)]
pub struct Observed {
    pub reads: u64,
    /// The miss ratio at each of [`TIMES`] the shard's memory, if anything was read.
    pub miss_ratios: Option<[f64; TIMES.len()]>,
    pub hot: Vec<HotKey>,
    /// Reads among which the hot keys were counted.
    pub sampled: u64,
}

impl Default for Observer {
    fn default() -> Self {
        Self {
            curve: MissCurve::new(CURVE_KEYS),
            hot: HotKeys::new(HOT_COUNTERS, HOT_SAMPLE_EVERY),
        }
    }
}

impl Observer {
    /// Notes a read; `bytes` is what the item takes, 0 where there is none.
    #[inline]
    pub fn read(&mut self, hash: u64, key: &[u8], bytes: u64) {
        self.curve.read(hash, bytes);
        self.hot.read(hash, key);
    }

    /// Notes that a key has an item of this size now: what a miss was followed by.
    #[inline]
    pub fn stored(&mut self, hash: u64, bytes: u64) {
        if self.curve.follows(hash) {
            self.curve.resize(hash, bytes);
        }
    }

    /// What was seen so far.
    pub fn tell(&mut self, memory_bytes: u64) -> Observed {
        if self.hot.sampled() > HOT_MEMORY {
            self.hot.halve();
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "some times a size of memory"
        )]
        let at = |times: f64| (memory_bytes as f64 * times) as u64;
        Observed {
            reads: self.curve.reads(),
            miss_ratios: self
                .curve
                .miss_ratio(0)
                .map(|_| TIMES.map(|times| self.curve.miss_ratio(at(times)).unwrap_or(1.0))),
            hot: self.hot.hottest(HOT_REPORTED),
            sampled: self.hot.sampled(),
        }
    }
}

/// The expected miss ratios of all shards together: each weighs as much as it is read.
#[must_use]
pub fn join_ratios<'a>(shards: impl Iterator<Item = &'a Observed>) -> Option<[f64; TIMES.len()]> {
    let mut sums = [0.0; TIMES.len()];
    let mut reads = 0.0;
    for shard in shards {
        if let Some(ratios) = shard.miss_ratios {
            reads += shard.reads as f64;
            sums.iter_mut().zip(ratios).for_each(|(sum, ratio)| *sum += ratio * shard.reads as f64);
        }
    }
    (reads > 0.0).then(|| sums.map(|sum| sum / reads))
}
