//! Requests by prefix of the key: `user:17` and `user:18` both have the prefix `user`.
//!
//! As in memcached, a prefix ends before the first delimiter, and keys without one are not counted.
//! The number of prefixes is bounded: further ones beyond [`PREFIXES_MAX`] are counted together.

use std::collections::HashMap;

use super::TIMES;
use super::curve::MissCurve;

/// The most prefixes that a shard distinguishes: a few megabytes. Later ones are counted as
/// [`OTHERS`].
pub const PREFIXES_MAX: usize = 4096;
/// The name for the prefixes beyond the limit; no prefix can contain the space.
pub const OTHERS: &[u8] = b"(all other)";
/// Reads after which a prefix gets a curve.
const CURVE_READS_MIN: u64 = 1000;
/// The most prefixes of a shard that have a curve: about 17 KiB each.
const CURVES_MAX: usize = 64;
/// Keys that a prefix's curve follows.
const CURVE_KEYS: usize = 512;

/// Commands for a prefix, by their names in `stats detail dump`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct PrefixCounts {
    pub gets: u64,
    pub hits: u64,
    pub sets: u64,
    pub deletes: u64,
}

/// A shard's figures for one prefix.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixReport {
    pub prefix: Vec<u8>,
    pub counts: PrefixCounts,
    /// The reads that `miss_ratios` is based on.
    pub reads: u64,
    /// The miss ratio if each of [`TIMES`] the shard's memory held this prefix alone.
    pub miss_ratios: Option<[f64; TIMES.len()]>,
}

#[derive(Debug, Default)]
struct Prefix {
    counts: PrefixCounts,
    curve: Option<MissCurve>,
}

/// Counts by prefix.
#[derive(Debug)]
pub struct Prefixes {
    delimiter: u8,
    draws_curves: bool,
    curves: usize,
    known: HashMap<Box<[u8]>, Prefix>,
    others: Prefix,
}

impl Prefixes {
    /// Counts by the part of the key before `delimiter`. If `draws_curves`, also follows how much
    /// memory the busiest prefixes need.
    #[must_use]
    pub fn new(delimiter: u8, draws_curves: bool) -> Self {
        let (known, others) = (HashMap::new(), Prefix::default());
        Self { delimiter, draws_curves, curves: 0, known, others }
    }

    /// Resets the counts.
    pub fn reset(&mut self) {
        *self = Self::new(self.delimiter, self.draws_curves);
    }

    fn of(&mut self, key: &[u8]) -> Option<&mut Prefix> {
        let prefix = &key[..memchr::memchr(self.delimiter, key)?];
        if !self.known.contains_key(prefix) {
            if self.known.len() >= PREFIXES_MAX {
                return Some(&mut self.others);
            }
            self.known.insert(prefix.into(), Prefix::default());
        }
        self.known.get_mut(prefix)
    }

    /// Notes a read; `bytes` is the size of the item, if there is one.
    pub fn read(&mut self, hash: u64, key: &[u8], bytes: Option<u64>) {
        let may_draw = self.draws_curves && self.curves < CURVES_MAX;
        let Some(prefix) = self.of(key) else { return };
        prefix.counts.gets += 1;
        prefix.counts.hits += u64::from(bytes.is_some());
        if let Some(curve) = &mut prefix.curve {
            curve.read(hash, bytes.unwrap_or(0));
        } else if may_draw && prefix.counts.gets >= CURVE_READS_MIN {
            prefix.curve = Some(MissCurve::new(CURVE_KEYS));
            self.curves += 1;
        }
    }

    /// Notes that a key now has an item of this size.
    pub fn stored(&mut self, hash: u64, key: &[u8], bytes: u64) {
        if self.curves > 0
            && let Some(Prefix { curve: Some(curve), .. }) = self.of(key)
        {
            curve.resize(hash, bytes);
        }
    }

    /// Notes a storage command.
    pub fn set(&mut self, key: &[u8]) {
        if let Some(prefix) = self.of(key) {
            prefix.counts.sets += 1;
        }
    }

    /// Notes a delete command.
    pub fn delete(&mut self, key: &[u8]) {
        if let Some(prefix) = self.of(key) {
            prefix.counts.deletes += 1;
        }
    }

    /// All figures of a shard with this much memory.
    #[must_use]
    pub fn tell(&self, memory_bytes: u64) -> Vec<PrefixReport> {
        let others =
            (self.others.counts != PrefixCounts::default()).then_some((OTHERS, &self.others));
        let known = self.known.iter().map(|(prefix, it)| (&**prefix, it));
        known
            .chain(others)
            .map(|(prefix, it)| PrefixReport {
                prefix: prefix.to_vec(),
                counts: it.counts,
                reads: it.curve.as_ref().map_or(0, MissCurve::reads),
                miss_ratios: it.curve.as_ref().and_then(|curve| super::ratios(curve, memory_bytes)),
            })
            .collect()
    }
}

/// Joins the reports of all shards by prefix, busiest first.
#[must_use]
pub fn join<'a>(shards: impl Iterator<Item = &'a PrefixReport>) -> Vec<PrefixReport> {
    let mut parts: HashMap<&[u8], Vec<&PrefixReport>> = HashMap::new();
    for report in shards {
        parts.entry(&report.prefix).or_default().push(report);
    }
    let mut joined: Vec<PrefixReport> = parts
        .into_iter()
        .map(|(prefix, parts)| {
            let sum =
                |count: fn(&PrefixCounts) -> u64| parts.iter().map(|it| count(&it.counts)).sum();
            PrefixReport {
                prefix: prefix.to_vec(),
                counts: PrefixCounts {
                    gets: sum(|it| it.gets),
                    hits: sum(|it| it.hits),
                    sets: sum(|it| it.sets),
                    deletes: sum(|it| it.deletes),
                },
                reads: parts.iter().map(|it| it.reads).sum(),
                miss_ratios: super::join_ratios(
                    parts.iter().filter_map(|it| Some((it.reads, it.miss_ratios?))),
                ),
            }
        })
        .collect();
    let commands = |it: &PrefixReport| it.counts.gets + it.counts.sets + it.counts.deletes;
    joined.sort_by(|a, b| commands(b).cmp(&commands(a)).then_with(|| a.prefix.cmp(&b.prefix)));
    joined
}

#[cfg(test)]
mod tests {
    use farpool_keyvault::owner::hash_key;

    use super::*;

    fn counts(prefixes: &Prefixes, prefix: &[u8]) -> Option<PrefixCounts> {
        prefixes.tell(1 << 20).iter().find(|it| it.prefix == prefix).map(|it| it.counts)
    }

    #[test]
    fn commands_are_counted_by_what_stands_before_the_first_delimiter() {
        let mut prefixes = Prefixes::new(b':', false);
        prefixes.read(1, b"user:17:name", Some(100));
        prefixes.read(2, b"user:18", None);
        prefixes.read(3, b"no delimiter", Some(1));
        prefixes.set(b"user:18");
        prefixes.delete(b"page:1");
        let user = PrefixCounts { gets: 2, hits: 1, sets: 1, deletes: 0 };
        assert_eq!(counts(&prefixes, b"user"), Some(user));
        assert_eq!(counts(&prefixes, b"page").map(|it| it.deletes), Some(1));
        assert_eq!(prefixes.tell(1 << 20).len(), 2);
        prefixes.reset();
        assert_eq!(prefixes.tell(1 << 20), []);
    }

    #[test]
    fn prefixes_beyond_the_limit_are_counted_together() {
        let mut prefixes = Prefixes::new(b'/', false);
        for number in 0..PREFIXES_MAX + 10 {
            prefixes.set(format!("{number}/key").as_bytes());
        }
        assert_eq!(counts(&prefixes, OTHERS).map(|it| it.sets), Some(10));
        assert_eq!(prefixes.tell(1 << 20).len(), PREFIXES_MAX + 1);
    }

    /// Two prefixes read in cycles of different lengths: each curve falls where its own cycle fits.
    #[test]
    fn each_prefix_has_its_own_curve() {
        let mut prefixes = Prefixes::new(b':', true);
        for round in 0..40 {
            for number in 0..2000u32 {
                let mut read = |key: String| {
                    prefixes.read(hash_key(key.as_bytes()), key.as_bytes(), Some(1000));
                };
                read(format!("large:{number}"));
                if round % 2 == 0 && number < 500 {
                    read(format!("small:{number}"));
                }
            }
        }
        // 0.5 and 2 MB are needed; the ratios are for TIMES of 1 MB.
        let told = join(prefixes.tell(1_000_000).iter());
        let ratio = |prefix: &[u8], times: f64| {
            let at = TIMES.iter().position(|&it| (it - times).abs() < 1e-9).unwrap();
            told.iter().find(|it| it.prefix == prefix).unwrap().miss_ratios.unwrap()[at]
        };
        assert!(ratio(b"large", 1.0) > 0.9 && ratio(b"large", 4.0) < 0.2);
        assert!(ratio(b"small", 0.25) > 0.9 && ratio(b"small", 1.0) < 0.2);
        assert_eq!(told[0].prefix, b"large", "the busiest comes first");
    }
}
