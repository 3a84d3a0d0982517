//! How much can be stored with all copies, each on another failure domain; pure.

use farpool_wire::FailureDomain;

use super::Piece;
use crate::Place;
use crate::tenant::best_address;

/// What a place fails with: its domain at the controller, and what the client's own pool takes for
/// one, by its address.
fn domains_of(place: &Place) -> (&str, Option<FailureDomain>) {
    (place.failure_domain(), best_address(place).map(|address| address.failure_domain()))
}

/// The granted memory of one failure domain.
#[derive(Debug)]
struct Sized<'a> {
    bytes: u64,
    places: Vec<&'a Place>,
}

/// The granted memory on each failure domain.
#[derive(Debug)]
pub(super) struct Domains<'a> {
    copies: u8,
    all: Vec<Sized<'a>>,
}

impl<'a> Domains<'a> {
    pub(super) fn of(places: impl Iterator<Item = &'a Place>, copies: u8) -> Self {
        let mut all: Vec<Sized<'_>> = Vec::new();
        for place in places {
            let is_its = |domain: &mut Sized<'_>| {
                domain.places.iter().any(|it| Self::fail_together(it, place))
            };
            let mut merged = Sized { bytes: place.bytes, places: vec![place] };
            for domain in all.extract_if(.., is_its) {
                merged.bytes += domain.bytes;
                merged.places.extend(domain.places);
            }
            all.push(merged);
        }
        Domains { copies, all }
    }

    /// True if no copy of what one place has may lie on the other.
    pub(super) fn fail_together(one: &Place, other: &Place) -> bool {
        let ((name, host), (other_name, other_host)) = (domains_of(one), domains_of(other));
        name == other_name || host.is_some() && host == other_host
    }

    /// The most bytes of which every copy has a domain of its own.
    ///
    /// `x` bytes can be stored `k` times if the domains, each with `x` at most, have room for
    /// `k x`. Of those with more than `x` each takes one whole copy, so for any `j < k` the
    /// domains without the `j` largest must have room for the other `k - j`.
    pub(super) fn storable_bytes(&self) -> u64 {
        let mut sizes: Vec<u64> = self.all.iter().map(|domain| domain.bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let rest = |largest: u8| sizes.iter().skip(largest.into()).sum::<u64>();
        let limit = |largest: u8| rest(largest) / u64::from(self.copies - largest);
        let limits = (0..self.copies).map(limit);
        limits.min().unwrap_or(0)
    }

    /// A piece that brings the storable bytes nearer to `bytes`; None if they are there.
    pub(super) fn piece_for(&self, bytes: u64) -> Option<Piece> {
        let useful = |size: u64| size.min(bytes);
        let there: u64 = self.all.iter().map(|domain| useful(domain.bytes)).sum();
        let missing = bytes.saturating_mul(self.copies.into()).saturating_sub(there).min(bytes);
        if missing == 0 {
            return None;
        }
        let (mut avoid, mut avoid_first) = (Vec::new(), Vec::new());
        // One copy may lie anywhere.
        for domain in self.all.iter().filter(|_| self.copies > 1) {
            let list = if domain.bytes >= bytes { &mut avoid } else { &mut avoid_first };
            list.extend(domain.places.iter().map(|place| place.failure_domain().to_owned()));
        }
        for list in [&mut avoid, &mut avoid_first] {
            list.sort_unstable();
            list.dedup();
        }
        Some(Piece { bytes: missing, avoid, avoid_first })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn places(sizes: &[u64]) -> Vec<Place> {
        (0..).zip(sizes).map(|(at, bytes)| place(at, *bytes)).collect()
    }

    fn place(number: u64, bytes: u64) -> Place {
        Place {
            node: format!("n{number}"),
            domain: None,
            addresses: vec![format!("tcp://10.0.0.{number}:7070")],
            key: None,
            bytes,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
        }
    }

    /// Stores one unit after the other where most is left.
    fn stored(sizes: &[u64], copies: u8) -> u64 {
        let mut left = sizes.to_vec();
        for count in 0.. {
            left.sort_unstable_by(|a, b| b.cmp(a));
            let Some(places) = left.get_mut(..usize::from(copies)) else { return count };
            if places.contains(&0) {
                return count;
            }
            places.iter_mut().for_each(|left| *left -= 1);
        }
        unreachable!("every unit takes some")
    }

    proptest! {
        #[test]
        fn as_much_can_be_stored_as_storing_it_shows(
            sizes in prop::collection::vec(0u64..12, 0..7),
            copies in 1u8..4,
        ) {
            let places = places(&sizes);
            let storable = Domains::of(places.iter(), copies).storable_bytes();
            prop_assert_eq!(storable, stored(&sizes, copies));
        }

        /// Wherever the rack grants them, pieces add up to what was to be stored.
        #[test]
        fn pieces_lead_to_the_goal(
            mut sizes in prop::collection::vec(0u64..12, 0..5),
            copies in 1u8..4,
            goal in 1u64..30,
            choices in prop::collection::vec(0usize..8, 64),
        ) {
            sizes.resize(8, 0);
            let mut choices = choices.into_iter();
            while let Some(piece) = Domains::of(places(&sizes).iter(), copies).piece_for(goal) {
                let at = choices.next().expect("the pieces do not end");
                let name = format!("n{at}");
                if piece.avoid.contains(&name) {
                    continue;
                }
                prop_assert!(piece.bytes > 0 && piece.bytes <= goal);
                sizes[at] += piece.bytes;
            }
            let places = places(&sizes);
            prop_assert!(Domains::of(places.iter(), copies).storable_bytes() >= goal);
        }
    }

    #[test]
    fn nodes_of_one_domain_count_together() {
        let named = |number, name: &str| Place { domain: Some(name.into()), ..place(number, 5) };
        let places = [named(1, "left"), named(2, "left"), named(3, "right")];
        let domains = Domains::of(places.iter(), 2);
        assert_eq!(domains.storable_bytes(), 5);
        let piece = domains.piece_for(10).expect("more is needed");
        assert_eq!(
            (piece.bytes, piece.avoid, piece.avoid_first),
            (5, vec!["left".to_owned()], vec!["right".to_owned()])
        );
        let one_host = [place(1, 5), Place { node: "other".into(), ..place(1, 5) }];
        assert_eq!(Domains::of(one_host.iter(), 2).storable_bytes(), 0);
        // The third is of the first's host and of the second's domain: all fail together.
        let joint = Place { domain: Some("right".into()), ..place(1, 5) };
        let places = [named(1, "left"), named(2, "right"), joint];
        assert_eq!(Domains::of(places.iter(), 2).storable_bytes(), 0);
    }
}
