//! The keys whose items are being read from a lower tier, with the requests that wait for them.
//!
//! Invariant: requests wait behind others on the same key, never on another key, even if both have
//! one hash: the answer to one would be the value of the other.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Parked;
use crate::mail::mailbox::Origin;
use farpool_kv_store::index::ItemAt;
use farpool_kv_store::key::HashedKey;

/// A request that has waited this long for a lower tier is answered as a miss. A medium that fails
/// reports it earlier.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct ParkedRequest {
    pub(super) origin: Origin,
    pub(super) what: Parked,
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) key: Vec<u8>,
    /// Where its item is being read. The result of an earlier, abandoned read is ignored.
    pub(super) reading: Option<ItemAt>,
    /// Places whose items turned out to belong to another key.
    pub(super) tried: Vec<ItemAt>,
    pub(super) requests: Vec<ParkedRequest>,
    /// When it was first seen waiting.
    since: Option<Instant>,
}

/// All keys that are waited for, by hash.
#[derive(Debug, Default)]
pub(super) struct WaitingKeys(HashMap<u64, Vec<Waiting>>);

impl WaitingKeys {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains(&self, HashedKey { key, hash }: HashedKey<'_>) -> bool {
        self.0.get(&hash).is_some_and(|same| same.iter().any(|it| it.key == key))
    }

    /// What waits for this key; nothing yet if it is new.
    pub(super) fn get_or_insert(&mut self, HashedKey { key, hash }: HashedKey<'_>) -> &mut Waiting {
        let same = self.0.entry(hash).or_default();
        let at = same.iter().position(|it| it.key == key).unwrap_or_else(|| {
            same.push(Waiting {
                key: key.to_vec(),
                reading: None,
                tried: Vec::new(),
                requests: Vec::new(),
                since: None,
            });
            same.len() - 1
        });
        &mut same[at]
    }

    /// Takes one that waits for the item here. A record from an abandoned read may be out of date;
    /// its requests were answered long ago.
    pub(super) fn take_reading(&mut self, hash: u64, at: ItemAt) -> Option<Waiting> {
        let same = self.0.get_mut(&hash)?;
        let found = same.iter().position(|it| it.reading == Some(at))?;
        let waiting = same.swap_remove(found);
        if same.is_empty() {
            self.0.remove(&hash);
        }
        Some(waiting)
    }

    pub(super) fn put_back(&mut self, hash: u64, waiting: Waiting) {
        self.0.entry(hash).or_default().push(waiting);
    }

    /// Takes those that have waited too long.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<(u64, Waiting)> {
        let mut late = Vec::new();
        self.0.retain(|&hash, same| {
            let is_late = |it: &mut Waiting| now - *it.since.get_or_insert(now) > PATIENCE;
            late.extend(same.extract_if(.., is_late).map(|it| (hash, it)));
            !same.is_empty()
        });
        late
    }
}

/// Whether a request reads and changes nothing.
pub(super) const fn is_plain(request: &ParkedRequest) -> bool {
    match request.what {
        Parked::GetKey(read) => read.flags.touch.is_none(),
        Parked::Part { .. } => true,
        Parked::Binary { is_plain_read } => is_plain_read,
        Parked::Request | Parked::KeyVault { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_kv_store::index::{Place, Tier};

    #[test]
    fn keys_with_one_hash_wait_apart() {
        let mut waiting = WaitingKeys::default();
        let [one, other] = [&b"one"[..], b"other"].map(|key| HashedKey { key, hash: 7 });
        let at = |place| {
            let place = Place::new(place).expect("a small number");
            ItemAt { tier: Tier::Flash, place }
        };
        waiting.get_or_insert(one).reading = Some(at(1));
        assert!(waiting.contains(one) && !waiting.contains(other));
        waiting.get_or_insert(other).reading = Some(at(2));
        assert_eq!(waiting.get_or_insert(one).reading, Some(at(1)));
        let taken = waiting.take_reading(7, at(2)).expect("it waits");
        assert_eq!(taken.key, b"other");
        assert!(waiting.contains(one) && !waiting.contains(other));
        waiting.put_back(7, taken);
        let now = Instant::now();
        assert!(waiting.take_late(now).is_empty(), "they are seen for the first time");
        let late = waiting.take_late(now + PATIENCE + Duration::from_millis(1));
        assert_eq!((late.len(), waiting.is_empty()), (2, true));
    }
}
