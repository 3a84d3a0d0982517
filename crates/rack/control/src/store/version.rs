//! The version of what a store holds, and the way up from each older one. Pure.
//!
//! Invariants:
//! - A store of a version that this program does not know is refused: it would lose what it cannot
//!   read.
//! - An upgrade is one batch of operations, so a crash leaves the old version or the new one.
//! - Each version's step knows the one before it only; a store of any older version takes them all.

use farpool_units::at_most;
use serde::{Deserialize, Serialize};

use super::{StoreError, StoreOp};

/// The version that this program writes: 1 had neither a version nor events (Farpool 0.2), 2 has
/// both.
pub const STORE_VERSION: u64 = 2;
/// The key of the version.
pub const VERSION_KEY: &str = "version";

/// A key and its value.
pub type Pair = (String, Vec<u8>);

#[derive(Serialize, Deserialize)]
struct VersionRecord {
    store: u64,
}

/// Returns the record of the present version.
#[must_use]
pub fn present() -> Pair {
    // Plain data with string keys, which always serialises.
    let value = serde_json::to_vec(&VersionRecord { store: STORE_VERSION }).unwrap_or_default();
    (VERSION_KEY.to_owned(), value)
}

/// Returns the version of a store with this content; None if it is empty.
///
/// # Errors
/// Its version is damaged.
pub fn version_of(pairs: &[Pair]) -> Result<Option<u64>, StoreError> {
    match pairs.iter().find(|(key, _)| key == VERSION_KEY) {
        Some((_, value)) => match serde_json::from_slice::<VersionRecord>(value) {
            Ok(record) => Ok(Some(record.store)),
            Err(error) => Err(StoreError::Io(format!("its version is damaged: {error}"))),
        },
        None if pairs.is_empty() => Ok(None),
        None => Ok(Some(1)),
    }
}

/// Brings the content of a store up to [`STORE_VERSION`]. Returns the operations that do the same
/// to the store; none if there is nothing to do.
///
/// # Errors
/// The version is damaged, or newer than this program.
pub fn upgrade(pairs: &mut Vec<Pair>) -> Result<Vec<StoreOp>, StoreError> {
    let mut ops = Vec::new();
    let from = version_of(pairs)?;
    if let Some(found) = from.filter(|found| *found > STORE_VERSION || *found == 0) {
        return Err(StoreError::Version { found, known: STORE_VERSION });
    }
    for version in from.unwrap_or(1) + 1..=STORE_VERSION {
        match version {
            // Events are optional, so nothing but the version itself is new.
            2 => put(pairs, &mut ops, VERSION_KEY, &VersionRecord { store: 2 }),
            _ => return Err(StoreError::Version { found: version, known: STORE_VERSION }),
        }
    }
    Ok(ops)
}

fn put(pairs: &mut Vec<Pair>, ops: &mut Vec<StoreOp>, key: &str, value: &impl Serialize) {
    // Plain data with string keys, which always serialises.
    let value = serde_json::to_vec(value).unwrap_or_default();
    pairs.retain(|(other, _)| other != key);
    pairs.push((key.to_owned(), value.clone()));
    ops.push(StoreOp::Put(key.to_owned(), value));
}

/// Returns a store's content with all counters far above what they are: a store that is restored
/// from a backup must not give numbers again that were given after the backup.
///
/// # Errors
/// The counters are damaged.
pub(super) fn with_counters_raised(mut pairs: Vec<Pair>) -> Result<Vec<Pair>, StoreError> {
    /// More lives, and more numbers and epochs, than a controller has between two backups.
    const LIVES: u64 = 1 << 10;
    const NUMBERS: u64 = 1 << 40;
    let Some((_, value)) = pairs.iter_mut().find(|(key, _)| key == "meta") else {
        return Ok(pairs);
    };
    let damaged = |error: serde_json::Error| StoreError::Io(format!("its counters: {error}"));
    let mut meta: crate::model::record::MetaRecord =
        serde_json::from_slice(value).map_err(damaged)?;
    let raised = |count: u64, by: u64| at_most::<u64, _>(u128::from(count) + u128::from(by));
    meta.life = raised(meta.life, LIVES);
    meta.number_ceiling = raised(meta.number_ceiling, NUMBERS);
    meta.epoch_ceiling = raised(meta.epoch_ceiling, NUMBERS);
    *value = serde_json::to_vec(&meta).map_err(damaged)?;
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(key: &str, value: &str) -> Pair {
        (key.to_owned(), value.as_bytes().to_vec())
    }

    #[test]
    fn every_older_version_comes_up_to_the_present_one_and_stays() {
        let meta = r#"{"life":3,"number_ceiling":1024,"epoch_ceiling":2048}"#;
        for mut pairs in [vec![], vec![pair("meta", meta)]] {
            let before = pairs.len();
            let ops = upgrade(&mut pairs).unwrap();
            assert_eq!((ops.len(), pairs.len()), (1, before + 1));
            assert_eq!(version_of(&pairs).unwrap(), Some(STORE_VERSION));
            assert!(upgrade(&mut pairs).unwrap().is_empty());
        }
    }

    #[test]
    fn a_version_of_the_future_is_refused() {
        for wrong in [r#"{"store":3}"#, r#"{"store":0}"#, "{}", "x"] {
            let mut pairs = vec![pair(VERSION_KEY, wrong)];
            assert!(upgrade(&mut pairs).is_err(), "{wrong}");
        }
    }

    #[test]
    fn counters_are_raised_beyond_what_may_have_been_given() {
        let meta = r#"{"life":3,"number_ceiling":1024,"epoch_ceiling":2048}"#;
        let raised = with_counters_raised(vec![pair("meta", meta), pair("node/n", "{}")]).unwrap();
        let meta: crate::model::record::MetaRecord = serde_json::from_slice(&raised[0].1).unwrap();
        assert!(meta.life > 1000 && meta.number_ceiling > 1 << 40 && meta.epoch_ceiling > 1 << 40);
        assert_eq!(raised[1], pair("node/n", "{}"));
        assert!(with_counters_raised(vec![pair("meta", "x")]).is_err());
    }
}
