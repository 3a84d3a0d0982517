//! Ids from names, and a number for each life of the daemon.

use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use farpool_acms::{ClusterId, Incarnation, NodeId};
use twox_hash::XxHash3_64;

/// Returns the id of a cluster.
#[must_use]
pub fn cluster_id(name: &str) -> ClusterId {
    ClusterId(XxHash3_64::oneshot(name.as_bytes()))
}

/// Returns the id of a node. Among 1,000,000 names, two ids are equal by chance in one of
/// 37,000,000 clusters.
#[must_use]
pub fn node_id(name: &str) -> NodeId {
    // 0 stands for "anyone".
    NodeId(XxHash3_64::oneshot(name.as_bytes()).max(1))
}

/// Returns the number of this life: the seconds of the wall clock, but more than the last number in
/// the file.
pub(crate) fn next_incarnation(file: Option<&Path>) -> io::Result<Incarnation> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
    // A clamped number would be the same again in the next life.
    let late = |_| io::Error::other("the clock is past the year 2106");
    let clock = u32::try_from(seconds).map_err(late)?.max(1);
    let Some(file) = file else { return Ok(Incarnation(clock)) };
    let life = later(clock, last_life(file)?)?;
    store(file, life)?;
    Ok(Incarnation(life))
}

fn later(clock: u32, last: Option<u32>) -> io::Result<u32> {
    let over = || io::Error::other("the last life has the highest number there is");
    match last {
        Some(last) if last >= clock => last.checked_add(1).ok_or_else(over),
        _ => Ok(clock),
    }
}

fn last_life(file: &Path) -> io::Result<Option<u32>> {
    match std::fs::read_to_string(file) {
        Ok(text) => {
            text.trim().parse().map(Some).map_err(|_| {
                io::Error::new(io::ErrorKind::InvalidData, "it does not hold one number")
            })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Stores the number. The file has either the old or the new number whenever the machine stops.
fn store(file: &Path, life: u32) -> io::Result<()> {
    let beside = file.with_extension("new");
    let mut new = std::fs::File::create(&beside)?;
    writeln!(new, "{life}")?;
    new.sync_all()?;
    std::fs::rename(&beside, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_life_has_a_larger_number_also_when_the_clock_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("life");
        let first = next_incarnation(Some(&file)).unwrap();
        assert!(next_incarnation(Some(&file)).unwrap() > first);
        std::fs::write(&file, "4000000000\n").unwrap();
        assert_eq!(next_incarnation(Some(&file)).unwrap(), Incarnation(4_000_000_001));
        std::fs::write(&file, format!("{}\n", u32::MAX)).unwrap();
        assert!(next_incarnation(Some(&file)).is_err());
        std::fs::write(&file, "a few\n").unwrap();
        assert!(next_incarnation(Some(&file)).is_err(), "what is not understood is not replaced");
    }

    #[test]
    fn names_differ_and_none_is_anyone() {
        assert_ne!(node_id("a"), node_id("b"));
        assert_ne!(node_id(""), NodeId::ANYONE);
        assert_eq!(cluster_id("rack 7"), cluster_id("rack 7"));
    }
}
