//! The miss ratio at every size of memory, live: reuse distances of a sample of the keys.
//!
//! SHARDS (Waldspurger et al., FAST 2015): keys whose hash is below a threshold are followed. Among
//! them, the bytes of the different keys read since a key's last read, divided by the share of keys
//! that is followed, give the memory that an LRU cache needs to still hold the key. The number of
//! followed keys is bounded: when there are too many, the threshold is lowered, keys above it are
//! dropped, and earlier counts are scaled down. Farpool evicts by S3-FIFO, which mostly does better
//! than LRU: the curve shows the size of the working set, not this server's exact hit ratio.

use std::collections::HashMap;

/// The hash space that the threshold divides: 24 bits of the hash that neither shard nor bucket use
/// alone.
const SPACE: u32 = 1 << 24;
/// Steps of the curve per doubling of the size.
const STEPS: usize = 4;
/// Log2 of the smallest size of the curve: 64 KiB.
const SIZE_MIN_LOG2: u32 = 16;
/// Number of doublings that the curve spans: up to 64 TiB.
const DOUBLINGS: usize = 30;
const BUCKETS: usize = STEPS * DOUBLINGS;

#[derive(Debug, Clone, Copy)]
struct Followed {
    /// Its slot on the time line.
    slot: usize,
    bytes: u64,
}

/// One point of a curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub memory_bytes: u64,
    /// The share of the reads that an LRU cache of this size would have missed.
    pub miss_ratio: f64,
}

/// Follows a sample of keys and draws their curve.
#[derive(Debug)]
pub struct MissCurve {
    keys_max: usize,
    threshold: u32,
    followed: HashMap<u64, Followed>,
    /// The key of each slot, newest last; 0 = the slot is free.
    line: Vec<u64>,
    /// Bytes of each slot's key, summed as a Fenwick tree.
    sums: Vec<u64>,
    /// Reads by distance, in sampled units.
    reads: Vec<f64>,
    cold: f64,
    /// All reads, including those of keys that are not followed.
    all: u64,
}

impl MissCurve {
    /// Follows at most about `keys_max` keys, at 30 bytes or more each.
    #[must_use]
    pub fn new(keys_max: usize) -> Self {
        let slots = keys_max.max(16) * 4;
        Self {
            keys_max: keys_max.max(16),
            threshold: SPACE,
            followed: HashMap::new(),
            line: Vec::new(),
            sums: vec![0; slots + 1],
            reads: vec![0.0; BUCKETS + 1],
            cold: 0.0,
            all: 0,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "24 bits are left")]
    const fn sample_of(hash: u64) -> u32 {
        // The middle bits: the lower ones choose the shard, the upper ones the bucket.
        ((hash >> 20) & (SPACE as u64 - 1)) as u32
    }

    /// Whether a key with this hash is followed.
    #[inline]
    #[must_use]
    pub const fn follows(&self, hash: u64) -> bool {
        Self::sample_of(hash) < self.threshold
    }

    /// The share of all keys that are followed.
    #[must_use]
    pub fn rate(&self) -> f64 {
        f64::from(self.threshold) / f64::from(SPACE)
    }

    /// Notes that a key was read; `bytes` is the size of its item, or 0 if there is none.
    pub fn read(&mut self, hash: u64, bytes: u64) {
        self.all += 1;
        if !self.follows(hash) {
            return;
        }
        match self.followed.get(&hash).copied() {
            Some(old) => {
                let newer = self.sum(self.line.len()) - self.sum(old.slot + 1);
                let distance = (newer + bytes) as f64 / self.rate();
                self.reads[bucket_of(distance)] += 1.0;
                self.forget(hash, old);
            }
            None => self.cold += 1.0,
        }
        self.follow(hash, bytes);
        while self.followed.len() > self.keys_max {
            self.lower_threshold();
        }
    }

    /// Notes that a key's item changed its size, or is gone (0).
    pub fn resize(&mut self, hash: u64, bytes: u64) {
        if let Some(old) = self.followed.get(&hash).copied() {
            self.add(old.slot, bytes.wrapping_sub(old.bytes));
            self.followed.insert(hash, Followed { bytes, ..old });
        }
    }

    fn follow(&mut self, hash: u64, bytes: u64) {
        if self.line.len() + 1 == self.sums.len() {
            self.close_ranks();
        }
        let slot = self.line.len();
        self.line.push(hash);
        self.add(slot, bytes);
        self.followed.insert(hash, Followed { slot, bytes });
    }

    fn forget(&mut self, hash: u64, old: Followed) {
        self.add(old.slot, 0u64.wrapping_sub(old.bytes));
        self.line[old.slot] = 0;
        self.followed.remove(&hash);
    }

    /// Lowers the threshold by an eighth, and drops the keys above it.
    fn lower_threshold(&mut self) {
        let before = self.threshold;
        self.threshold -= (self.threshold / 8).max(1);
        let gone: Vec<(u64, Followed)> = self
            .followed
            .iter()
            .filter(|&(&hash, _)| !self.follows(hash))
            .map(|(&hash, &it)| (hash, it))
            .collect();
        gone.into_iter().for_each(|(hash, it)| self.forget(hash, it));
        let scale = f64::from(self.threshold) / f64::from(before);
        self.reads.iter_mut().for_each(|reads| *reads *= scale);
        self.cold *= scale;
    }

    /// Renumbers the slots, without the free ones.
    fn close_ranks(&mut self) {
        let live: Vec<u64> =
            self.line.iter().copied().filter(|hash| self.followed.contains_key(hash)).collect();
        self.sums.fill(0);
        self.line.clear();
        for hash in live {
            let slot = self.line.len();
            self.line.push(hash);
            let it = self.followed.get_mut(&hash).map(|it| {
                it.slot = slot;
                it.bytes
            });
            self.add(slot, it.unwrap_or(0));
        }
    }

    fn add(&mut self, slot: usize, bytes: u64) {
        let mut at = slot + 1;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at].wrapping_add(bytes);
            at += at & at.wrapping_neg();
        }
    }

    /// Sum of the bytes of the first `slots` slots.
    fn sum(&self, slots: usize) -> u64 {
        let mut at = slots;
        let mut sum = 0u64;
        while at > 0 {
            sum = sum.wrapping_add(self.sums[at]);
            at -= at & at.wrapping_neg();
        }
        sum
    }

    /// Number of reads that the curve is based on.
    #[must_use]
    pub const fn reads(&self) -> u64 {
        self.all
    }

    /// The miss ratio with this much memory. None before anything was read.
    ///
    /// The number of sampled reads differs from what the sampling rate predicts, depending on
    /// whether a hot key is followed. The difference is taken for reads of hot keys, which any
    /// memory holds (SHARDS-adj).
    #[must_use]
    pub fn miss_ratio(&self, memory_bytes: u64) -> Option<f64> {
        let sampled = self.reads.iter().sum::<f64>() + self.cold;
        let expected = self.all as f64 * self.rate();
        // A bucket counts as held once the memory reaches its upper end.
        let held: f64 = (0..BUCKETS)
            .take_while(|&at| size_of(at) <= memory_bytes)
            .map(|at| self.reads[at])
            .sum();
        let held = held + expected - sampled;
        (expected > 0.0).then(|| (1.0 - held / expected).clamp(0.0, 1.0))
    }

    /// The whole curve, up to where it stops falling.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        let last = self.reads.iter().rposition(|&reads| reads > 0.0).unwrap_or(0).min(BUCKETS - 1);
        let sizes = (0..=last).map(size_of);
        sizes
            .filter_map(|memory_bytes| {
                Some(Point { memory_bytes, miss_ratio: self.miss_ratio(memory_bytes)? })
            })
            .collect()
    }
}

/// The size at the upper end of a bucket.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "from 2^16 to below 2^46"
)]
fn size_of(bucket: usize) -> u64 {
    let exponent = f64::from(SIZE_MIN_LOG2) + bucket as f64 / STEPS as f64;
    exponent.exp2() as u64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and bounded behind it"
)]
fn bucket_of(distance_bytes: f64) -> usize {
    let steps = (distance_bytes.max(1.0).log2() - f64::from(SIZE_MIN_LOG2)) * STEPS as f64;
    (steps.ceil().max(0.0) as usize).min(BUCKETS)
}

#[cfg(test)]
mod tests {
    use farpool_keyvault::owner::hash_key;

    use super::*;

    fn hash(key: u64) -> u64 {
        hash_key(&key.to_le_bytes())
    }

    /// Reads in a cycle: an LRU cache hits all of it or nothing.
    #[test]
    fn a_circle_needs_all_of_its_memory() {
        let mut curve = MissCurve::new(1 << 20);
        for _ in 0..5 {
            (0..10_000).for_each(|key| curve.read(hash(key), 1000));
        }
        assert!((curve.rate() - 1.0).abs() < 1e-9);
        assert!(curve.miss_ratio(8_000_000).unwrap() > 0.99);
        assert!(curve.miss_ratio(12_000_000).unwrap() < 0.21, "only the first round misses");
        assert_eq!(curve.reads(), 50_000);
    }

    /// Skewed reads: the sample's curve against the true one, made by following every key.
    #[test]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "keys below 200,000"
    )]
    fn a_sample_of_a_few_thousand_keys_draws_the_curve_of_all() {
        let mut state = 1u64;
        let mut draw = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
            (200_000f64.powf(uniform)) as u64
        };
        let (mut exact, mut sampled) = (MissCurve::new(1 << 20), MissCurve::new(4096));
        for _ in 0..2_000_000 {
            let key = draw();
            let bytes = 100 + key % 900;
            exact.read(hash(key), bytes);
            sampled.read(hash(key), bytes);
        }
        assert!(sampled.rate() < 0.05 && sampled.followed.len() <= 4096);
        for memory_bytes in [1u64 << 20, 4 << 20, 16 << 20, 64 << 20] {
            let (true_ratio, estimate) = (
                exact.miss_ratio(memory_bytes).unwrap(),
                sampled.miss_ratio(memory_bytes).unwrap(),
            );
            assert!(
                (true_ratio - estimate).abs() < 0.03,
                "{memory_bytes}: {estimate:.3} instead of {true_ratio:.3}"
            );
        }
    }

    #[test]
    fn sizes_that_change_count_as_they_are() {
        let mut curve = MissCurve::new(1000);
        for _ in 0..3 {
            (0..100).for_each(|key| curve.read(hash(key), 10_000));
        }
        (0..100).for_each(|key| curve.resize(hash(key), 0));
        curve.read(hash(0), 10);
        // No other key is between its reads any more.
        assert!(curve.reads[0] >= 1.0);
    }
}
