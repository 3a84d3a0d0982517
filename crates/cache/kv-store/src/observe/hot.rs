//! The hottest keys: Space-Saving (Metwally et al., ICDT 2005) on a sample of the reads.
//!
//! A fixed number of counters. A key without one takes over the smallest and inherits its count, so
//! a key that gets a larger share of the reads than one counter's share always has a counter, and
//! no count is too small.

/// One of the hottest keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotKey {
    pub key: Vec<u8>,
    /// Upper bound of its reads among those sampled.
    pub reads: u64,
    /// The most by which `reads` may be too large.
    pub error: u64,
}

/// Counts the hottest keys.
#[derive(Debug)]
pub struct HotKeys {
    counters: Vec<(u64, HotKey)>,
    counters_max: usize,
    sample_every: u32,
    until_next: u32,
    sampled: u64,
}

impl HotKeys {
    /// Counts `counters_max` keys on every `sample_every`th read.
    #[must_use]
    pub fn new(counters_max: usize, sample_every: u32) -> Self {
        let sample_every = sample_every.max(1);
        Self {
            counters: Vec::new(),
            counters_max,
            sample_every,
            until_next: sample_every,
            sampled: 0,
        }
    }

    /// Notes a read.
    #[inline]
    pub fn read(&mut self, hash: u64, key: &[u8]) {
        self.until_next -= 1;
        if self.until_next == 0 {
            self.until_next = self.sample_every;
            self.count(hash, key);
        }
    }

    fn count(&mut self, hash: u64, key: &[u8]) {
        self.sampled += 1;
        if let Some((_, hot)) =
            self.counters.iter_mut().find(|(it, hot)| *it == hash && hot.key == key)
        {
            hot.reads += 1;
            return;
        }
        if self.counters.len() < self.counters_max {
            self.counters.push((hash, HotKey { key: key.to_vec(), reads: 1, error: 0 }));
            return;
        }
        if let Some((place, hot)) = self.counters.iter_mut().min_by_key(|(_, hot)| hot.reads) {
            *place = hash;
            *hot = HotKey { key: key.to_vec(), reads: hot.reads + 1, error: hot.reads };
        }
    }

    /// Reads sampled since the start or the last [`Self::halve`].
    #[must_use]
    pub const fn sampled(&self) -> u64 {
        self.sampled
    }

    /// Halves all counts, so that keys that are hot now come before those that were hot long ago.
    pub fn halve(&mut self) {
        self.sampled /= 2;
        for (_, hot) in &mut self.counters {
            hot.reads /= 2;
            hot.error /= 2;
        }
        self.counters.retain(|(_, hot)| hot.reads > 0);
    }

    /// The keys that are certainly hotter than chance, hottest first.
    #[must_use]
    pub fn hottest(&self, most: usize) -> Vec<HotKey> {
        let mut keys: Vec<HotKey> = self
            .counters
            .iter()
            .map(|(_, hot)| hot.clone())
            .filter(|hot| hot.reads > hot.error)
            .collect();
        keys.sort_by_key(|hot| std::cmp::Reverse(hot.reads - hot.error));
        keys.truncate(most);
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_keys_are_found_among_many() {
        let mut hot = HotKeys::new(64, 3);
        for number in 0u64..300_000 {
            let key = match number % 10 {
                0 | 1 => "first".to_owned(),
                2 => "second".to_owned(),
                _ => format!("cold{number}"),
            };
            hot.read(farpool_keyvault::owner::hash_key(key.as_bytes()), key.as_bytes());
        }
        let hottest = hot.hottest(2);
        assert_eq!(
            hottest.iter().map(|it| &it.key[..]).collect::<Vec<_>>(),
            [&b"first"[..], b"second"]
        );
        let (reads, error) = (hottest[0].reads, hottest[0].error);
        assert!(reads >= 20_000 && reads - error <= 20_000, "{reads} less {error} for 20,000");
        hot.halve();
        assert_eq!(hot.hottest(1)[0].key, b"first");
    }
}
