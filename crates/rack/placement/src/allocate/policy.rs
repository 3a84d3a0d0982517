//! Which of the bricks that could serve a request is chosen.
//!
//! A policy is a score of three numbers, lowest first, compared in order. The index (see `tree`)
//! keeps for every group of bricks a lower bound of its members' scores, so the best brick is found
//! without visiting all of them.

use std::fmt;
use std::str::FromStr;

/// How a memory brick is chosen among those that can serve a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PlacementPolicy {
    /// The first in the order of the topology.
    FirstFit,
    /// Bricks that have power before those that must be switched on; among equals the one with the
    /// least free memory (in steps of an eighth), so that others stay empty.
    Pack,
    /// The failure domain where the compute brick has the fewest segments; in it, the least loaded
    /// brick.
    Spread,
    /// Same tray, then same rack, then elsewhere; among equals, the brick with the lowest latency
    /// behind its switch.
    Nearest,
    /// The brick with the lowest load: the largest of the shares taken of its memory, of its read
    /// and of its write bandwidth, and of the load it reports.
    LeastLoaded,
}

/// Every policy with its name.
const NAMES: [(PlacementPolicy, &str); 5] = [
    (PlacementPolicy::FirstFit, "first-fit"),
    (PlacementPolicy::Pack, "pack"),
    (PlacementPolicy::Spread, "spread"),
    (PlacementPolicy::Nearest, "nearest"),
    (PlacementPolicy::LeastLoaded, "least-loaded"),
];

/// A policy name that does not exist.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "there is no placement policy named \"{0}\"; choose one of: first-fit, pack, spread, nearest, \
     least-loaded"
)]
pub struct UnknownPlacementPolicy(pub String);

impl PlacementPolicy {
    /// All policies.
    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.iter().map(|(policy, _)| *policy)
    }
}

impl FromStr for PlacementPolicy {
    type Err = UnknownPlacementPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(policy, _)| *policy).ok_or_else(|| UnknownPlacementPolicy(text.to_owned()))
    }
}

impl fmt::Display for PlacementPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = NAMES.iter().find(|(policy, _)| policy == self);
        f.write_str(named.map_or("", |(_, name)| name))
    }
}

/// Lower is better; the last number is the brick's place in the topology, so scores never tie.
pub(super) type Score = (u32, u32, u32);

/// The size class of `superpages`: exact below 16, then steps of an eighth, so that a set of
/// classes is one 128-bit word.
pub(super) fn size_class(superpages: u32) -> u32 {
    if superpages < 16 {
        return superpages;
    }
    let octave = superpages.ilog2();
    let eighth = (superpages >> (octave - 3)) & 7;
    (16 + (octave - 4) * 8 + eighth).min(127)
}

/// The smallest class of `set` that is not below `class`.
pub(super) fn lowest_class(set: u128, class: u32) -> Option<u32> {
    let left = set & (u128::MAX << class);
    (left != 0).then(|| left.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for policy in PlacementPolicy::all() {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert!("best".parse::<PlacementPolicy>().unwrap_err().to_string().contains("nearest"));
    }

    #[test]
    fn size_classes_grow_with_the_size() {
        let classes: Vec<u32> = (0..100_000).map(size_class).collect();
        assert!(classes.is_sorted());
        assert_eq!(
            (size_class(15), size_class(16), size_class(17), size_class(18)),
            (15, 16, 16, 17)
        );
        assert_eq!(size_class(u32::MAX), 127);
        assert_eq!(lowest_class(1 << 3 | 1 << 9, 4), Some(9));
        assert_eq!(lowest_class(1 << 3, 4), None);
    }
}
