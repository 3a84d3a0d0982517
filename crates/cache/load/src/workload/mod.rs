//! The generated requests: pure functions of a seed.
//!
//! A key is a number; its length, its value's length and its lifetime are functions of that number,
//! so that a reader of a value knows what it must be.

pub mod popularity;
pub mod sizes;
pub mod twitter;

use farpool_policy::Rng;
use popularity::{Popularity, Ranks};
use sizes::Sizes;

/// A key's number in the workload's key set, from 0; keys with higher numbers are requested once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyNumber(pub u64);

/// The operation of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Get,
    Set,
    Delete,
}

/// One operation on one key, as drawn by the workload's generator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    pub operation: Operation,
    pub key: KeyNumber,
}

/// Shares of operations; the rest are reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    pub set: f64,
    pub delete: f64,
}

/// The most keys in one read (a multi-get): memcached's own limit is the length of a line.
pub const MULTI_GET_MAX: usize = 1000;

/// The parameters of a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    pub keys: u64,
    pub popularity: Popularity,
    pub mix: Mix,
    /// Share of the draws that request a key that never recurs.
    pub one_hit: f64,
    pub key_bytes: Sizes,
    pub value_bytes: Sizes,
    /// Lifetimes in seconds (0 = for ever) and their shares; empty = for ever.
    pub lifetimes_s: Vec<(u32, f64)>,
    /// Number of keys in one read.
    pub multi_get: usize,
    /// Whether a read that misses is followed by a store, as with a cache in front of a database.
    pub look_aside: bool,
}

/// Why a workload cannot be created.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    #[error(
        "{0:?} is no workload; there are uniform, zipf, zipf:ALPHA, friendfeed, microblog and \
         twitter:cluster1 to twitter:cluster54"
    )]
    Unknown(String),
    #[error("{0}")]
    Twitter(#[from] twitter::TwitterError),
}

/// The load of the thesis's social networks is mostly reads: 30 for each store, as in Facebook's
/// largest pool (Atikoglu et al., SIGMETRICS 2012, ETC).
const SOCIAL_SET_SHARE: f64 = 1.0 / 31.0;
/// Keys of a FriendFeed read. The thesis (4.4.2) says multi-get but gives no number; 24 is the mean
/// at Facebook (Nishtala et al., NSDI 2013, 3.1).
const FRIENDFEED_KEYS: usize = 24;
/// Mean size of a formatted message, the thesis's "approximately 1KB" (4.4.2); the spread is ours.
const MESSAGE_BYTES: f64 = 1024.0;
const MESSAGE_SIGMA: f64 = 0.5;
/// Popularity of messages: the figures of CloudSuite's Zipf-like sample are not public; YCSB's 0.99
/// stands for it.
const ZIPF_ALPHA: f64 = 0.99;

impl Workload {
    /// A workload by name, over `keys` keys.
    pub fn named(name: &str, keys: u64) -> Result<Self, WorkloadError> {
        let plain = Self {
            keys: keys.max(1),
            popularity: Popularity::Uniform,
            mix: Mix { set: 0.0, delete: 0.0 },
            one_hit: 0.0,
            key_bytes: Sizes::Fixed(12),
            value_bytes: Sizes::Fixed(64),
            lifetimes_s: Vec::new(),
            multi_get: 1,
            look_aside: false,
        };
        let social = Self {
            popularity: Popularity::Zipf(ZIPF_ALPHA),
            mix: Mix { set: SOCIAL_SET_SHARE, delete: 0.0 },
            key_bytes: Sizes::Fixed(24),
            value_bytes: Sizes::LogNormal { mean: MESSAGE_BYTES, sigma: MESSAGE_SIGMA },
            look_aside: true,
            ..plain.clone()
        };
        let unknown = || WorkloadError::Unknown(name.to_owned());
        match name.split_once(':').unwrap_or((name, "")) {
            ("uniform", "") => Ok(plain),
            ("zipf", "") => Ok(Self { popularity: Popularity::Zipf(ZIPF_ALPHA), ..plain }),
            ("zipf", alpha) => {
                let alpha = alpha.parse().ok().filter(|alpha| popularity::is_alpha(*alpha));
                let popularity = Popularity::Zipf(alpha.ok_or_else(unknown)?);
                Ok(Self { popularity, ..plain })
            }
            ("microblog", "") => Ok(social),
            ("friendfeed", "") => Ok(Self { multi_get: FRIENDFEED_KEYS, ..social }),
            ("twitter", cluster) => {
                let number = cluster.strip_prefix("cluster").and_then(|it| it.parse().ok());
                Ok(twitter::cluster(number.ok_or_else(unknown)?)?.workload(plain))
            }
            _ => Err(unknown()),
        }
    }

    /// Length of a key, in bytes.
    #[must_use]
    pub fn key_bytes(&self, key: KeyNumber) -> usize {
        self.key_bytes.of(mix(key.0, 1)).clamp(KEY_BYTES_MIN, KEY_BYTES_MAX)
    }

    /// Length of a key's value, in bytes.
    #[must_use]
    pub fn value_bytes(&self, key: KeyNumber) -> usize {
        self.value_bytes.of(mix(key.0, 2)).clamp(1, VALUE_BYTES_MAX)
    }

    /// Lifetime with which a key is stored, in seconds; 0 = for ever.
    #[must_use]
    pub fn lifetime_s(&self, key: KeyNumber) -> u32 {
        let mut left = unit(mix(key.0, 3));
        for &(seconds, share) in &self.lifetimes_s {
            if left < share {
                return seconds;
            }
            left -= share;
        }
        self.lifetimes_s.first().map_or(0, |it| it.0)
    }
}

/// Shorter keys cannot distinguish numbers below 2^35.
pub const KEY_BYTES_MIN: usize = 8;
/// memcached's longest key.
pub const KEY_BYTES_MAX: usize = 250;
/// memcached's largest item by default, less its overhead beside the value.
pub const VALUE_BYTES_MAX: usize = (1 << 20) - 512;

/// Well-mixed bits of a number; `of` distinguishes different uses.
#[must_use]
pub const fn mix(number: u64, of: u64) -> u64 {
    let mut z = number.wrapping_add(of.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in 0..1, with 53 bits.
#[expect(clippy::cast_precision_loss, reason = "53 bits fit exactly")]
pub(crate) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws operations and keys. The same seed gives the same draws.
#[derive(Debug, Clone)]
pub struct Generator {
    ranks: Ranks,
    mix: Mix,
    one_hit: f64,
    rng: Rng,
    /// The next key that never recurs.
    fresh: u64,
    fresh_step: u64,
}

impl Generator {
    /// One of `generators` that share a load: keys that never recur belong to one generator only.
    #[must_use]
    pub fn new(workload: &Workload, seed: u64, (number, generators): (u64, u64)) -> Self {
        Self {
            ranks: Ranks::new(workload.popularity, workload.keys),
            mix: workload.mix,
            one_hit: workload.one_hit,
            rng: Rng::new(mix(seed, number + 7)),
            fresh: workload.keys + number,
            fresh_step: generators.max(1),
        }
    }

    /// Draws the next operation and its key.
    #[inline]
    pub fn draw(&mut self) -> Draw {
        let share = unit(self.rng.next_u64());
        let operation = if share < self.mix.set {
            Operation::Set
        } else if share < self.mix.set + self.mix.delete {
            Operation::Delete
        } else {
            Operation::Get
        };
        Draw { operation, key: self.key() }
    }

    /// Draws only a key, for the further keys of a multi-get.
    #[inline]
    pub fn key(&mut self) -> KeyNumber {
        if self.one_hit > 0.0 && unit(self.rng.next_u64()) < self.one_hit {
            let key = KeyNumber(self.fresh);
            self.fresh += self.fresh_step;
            return key;
        }
        KeyNumber(self.ranks.draw(&mut self.rng))
    }
}
