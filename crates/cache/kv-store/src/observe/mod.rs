//! What operators want to know about the keys: which are hot, and what more memory would gain.
//!
//! All of it works on samples, so that observing costs next to nothing. Pure.

pub mod curve;
pub mod hot;
pub mod journal;
pub mod prefix;

use curve::MissCurve;
use hot::{HotKey, HotKeys};
use prefix::{PrefixReport, Prefixes};

use crate::quota::QuotaReport;

/// Keys that a shard's curve follows.
const CURVE_KEYS: usize = 8192;
/// Counters for a shard's hot keys.
const HOT_COUNTERS: usize = 64;
/// One read in this many is sampled for hot keys.
const HOT_SAMPLE_EVERY: u32 = 61;
/// Hot keys that a shard reports.
const HOT_REPORTED: usize = 20;
/// After this many sampled reads the counts are halved.
const HOT_MEMORY: u64 = 100_000;
/// The sizes that are reported, as multiples of the present memory.
pub const TIMES: [f64; 9] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// Samples the reads of one shard.
#[derive(Debug)]
struct Sample {
    curve: MissCurve,
    hot: HotKeys,
}

/// Observes the requests to one shard.
#[derive(Debug, Default)]
pub struct Observer {
    sample: Option<Sample>,
    prefixes: Option<Prefixes>,
    /// Prefixes are kept, but counting is paused.
    prefixes_rest: bool,
}

/// What an observer reports about its shard.
#[derive(Debug, Default, Clone)]
pub struct Observed {
    pub reads: u64,
    /// The miss ratio at each of [`TIMES`] the shard's memory, if anything was read.
    pub miss_ratios: Option<[f64; TIMES.len()]>,
    pub hot: Vec<HotKey>,
    /// Number of reads among which the hot keys were counted.
    pub sampled: u64,
    pub prefixes: Vec<PrefixReport>,
    /// The state of the store's quotas.
    pub quotas: Vec<QuotaReport>,
}

impl Observer {
    /// An observer that samples the reads.
    #[must_use]
    pub fn sampling() -> Self {
        let curve = MissCurve::new(CURVE_KEYS);
        let hot = HotKeys::new(HOT_COUNTERS, HOT_SAMPLE_EVERY);
        Self { sample: Some(Sample { curve, hot }), ..Self::default() }
    }

    /// Starts or resumes counting by prefix.
    pub fn count_prefixes(&mut self, delimiter: u8) {
        let draws_curves = self.sample.is_some();
        self.prefixes.get_or_insert_with(|| Prefixes::new(delimiter, draws_curves));
        self.prefixes_rest = false;
    }

    /// Pauses counting by prefix; the counts stay.
    pub const fn rest_prefixes(&mut self) {
        self.prefixes_rest = true;
    }

    /// Resets the counts by prefix.
    pub fn reset(&mut self) {
        self.prefixes.iter_mut().for_each(Prefixes::reset);
    }

    fn counted_prefixes(&mut self) -> Option<&mut Prefixes> {
        self.prefixes.as_mut().filter(|_| !self.prefixes_rest)
    }

    /// Notes a read; `bytes` is the size of the item, if there is one.
    pub fn read(&mut self, hash: u64, key: &[u8], bytes: Option<u64>) {
        if let Some(sample) = &mut self.sample {
            sample.curve.read(hash, bytes.unwrap_or(0));
            sample.hot.read(hash, key);
        }
        if let Some(prefixes) = self.counted_prefixes() {
            prefixes.read(hash, key, bytes);
        }
    }

    /// Notes that a key now has an item of this size, as after a miss.
    pub fn stored(&mut self, hash: u64, key: &[u8], bytes: u64) {
        if let Some(Sample { curve, .. }) = &mut self.sample
            && curve.follows(hash)
        {
            curve.resize(hash, bytes);
        }
        if let Some(prefixes) = self.counted_prefixes() {
            prefixes.stored(hash, key, bytes);
        }
    }

    /// Notes a storage command, whatever its result.
    pub fn set(&mut self, key: &[u8]) {
        if let Some(prefixes) = self.counted_prefixes() {
            prefixes.set(key);
        }
    }

    /// Notes a delete command, whether the key was there or not.
    pub fn delete(&mut self, key: &[u8]) {
        if let Some(prefixes) = self.counted_prefixes() {
            prefixes.delete(key);
        }
    }

    /// Returns what was observed so far; `memory_bytes` is the shard's memory.
    pub fn tell(&mut self, memory_bytes: u64) -> Observed {
        let prefixes = self.prefixes.as_ref().map(|it| it.tell(memory_bytes)).unwrap_or_default();
        let Some(Sample { curve, hot }) = &mut self.sample else {
            return Observed { prefixes, ..Observed::default() };
        };
        if hot.sampled() > HOT_MEMORY {
            hot.halve();
        }
        Observed {
            reads: curve.reads(),
            miss_ratios: ratios(curve, memory_bytes),
            hot: hot.hottest(HOT_REPORTED),
            sampled: hot.sampled(),
            prefixes,
            ..Observed::default()
        }
    }
}

/// The miss ratio at each of [`TIMES`] this much memory, if anything was read.
fn ratios(curve: &MissCurve, memory_bytes: u64) -> Option<[f64; TIMES.len()]> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "some times a size of memory"
    )]
    let at = |times: f64| (memory_bytes as f64 * times) as u64;
    curve.miss_ratio(0)?;
    Some(TIMES.map(|times| curve.miss_ratio(at(times)).unwrap_or(1.0)))
}

/// The expected miss ratios of all shards together, weighted by their reads.
#[must_use]
pub fn join_ratios(
    shards: impl Iterator<Item = (u64, [f64; TIMES.len()])>,
) -> Option<[f64; TIMES.len()]> {
    let mut sums = [0.0; TIMES.len()];
    let mut all = 0.0;
    for (reads, ratios) in shards {
        all += reads as f64;
        sums.iter_mut().zip(ratios).for_each(|(sum, ratio)| *sum += ratio * reads as f64);
    }
    (all > 0.0).then(|| sums.map(|sum| sum / all))
}
