//! How much can be stored with all copies, or with parity, each part on another failure domain;
//! pure.

use farpool_policy::redundancy::PARITY_DOMAINS;
use farpool_wire::FailureDomain;

use super::Piece;
use crate::Place;
use crate::tenant::best_address;

/// What a place fails with: its domain at the controller, and what the client's own pool takes for
/// one, by its address.
fn domains_of(place: &Place) -> (&str, Option<FailureDomain>) {
    (place.failure_domain(), best_address(place).map(|address| address.failure_domain()))
}

/// In how many parts what is far is stored, each on another failure domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    domains: u8,
    /// Parts that have what is far, a share of it each; the others are made from them.
    members: u8,
}

impl Layout {
    /// Four parts and the parity of all four.
    pub(super) const PARITY: Layout =
        Layout { domains: PARITY_DOMAINS, members: PARITY_DOMAINS - 1 };

    /// So many parts that are alike.
    pub(super) fn copies(copies: u8) -> Self {
        assert!(copies > 0, "what is far has at least one copy");
        Layout { domains: copies, members: 1 }
    }

    /// True if a part can be had from the others.
    pub(super) fn is_apart(self) -> bool {
        self.domains > 1
    }

    /// The bytes of one part.
    fn part_bytes(self, far_bytes: u64) -> u64 {
        far_bytes.div_ceil(self.members.into())
    }

    /// The bytes of all parts.
    pub(super) fn stored_bytes(self, far_bytes: u64) -> u128 {
        u128::from(far_bytes) * u128::from(self.domains) / u128::from(self.members)
    }

    /// What is stored in so many bytes.
    pub(super) fn far_bytes(self, stored_bytes: u64) -> u64 {
        stored_bytes / u64::from(self.domains) * u64::from(self.members)
    }
}

/// The granted memory of one failure domain.
#[derive(Clone, Debug)]
struct Sized<'a> {
    bytes: u64,
    places: Vec<&'a Place>,
}

/// The granted memory on each failure domain.
#[derive(Debug)]
pub(super) struct Domains<'a> {
    layout: Layout,
    all: Vec<Sized<'a>>,
}

impl<'a> Domains<'a> {
    pub(super) fn of(places: impl Iterator<Item = &'a Place>, layout: Layout) -> Self {
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
        Domains { layout, all }
    }

    /// True if no two parts of the same may lie on both places.
    pub(super) fn fail_together(one: &Place, other: &Place) -> bool {
        let ((name, host), (other_name, other_host)) = (domains_of(one), domains_of(other));
        name == other_name || host.is_some() && host == other_host
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// The most bytes of which every part has a domain of its own.
    ///
    /// `k` parts of `x` bytes can be stored if the domains, each with `x` at most, have room for
    /// `k x`. Of those with more than `x` each takes one whole part, so for any `j < k` the domains
    /// without the `j` largest must have room for the other `k - j`.
    pub(super) fn storable_bytes(&self) -> u64 {
        let mut sizes: Vec<u64> = self.all.iter().map(|domain| domain.bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let parts = self.layout.domains;
        let rest = |largest: u8| sizes.iter().skip(largest.into()).sum::<u64>();
        let limit = |largest: u8| rest(largest) / u64::from(parts - largest);
        let part_bytes = (0..parts).map(limit).min().unwrap_or(0);
        part_bytes.saturating_mul(self.layout.members.into())
    }

    /// A piece that brings the storable bytes nearer to `bytes`; None if they are there, or no
    /// piece of a further domain would do that.
    pub(super) fn piece_for(&self, bytes: u64) -> Option<Piece> {
        let bytes = self.layout.part_bytes(bytes);
        let useful = |size: u64| size.min(bytes);
        let there: u64 = self.all.iter().map(|domain| useful(domain.bytes)).sum();
        let parts = u64::from(self.layout.domains);
        let missing = bytes.saturating_mul(parts).saturating_sub(there).min(bytes);
        if missing == 0 {
            return None;
        }
        let (mut avoid, mut avoid_first) = (Vec::new(), Vec::new());
        // Of two copies one may lie anywhere. So many parts that few pieces are left beside them
        // lie on a domain each, where they grow.
        let is_in_groups = self.layout.members > 1;
        for domain in self.all.iter().filter(|_| self.layout.is_apart()) {
            let is_avoided = is_in_groups || domain.bytes >= bytes;
            let list = if is_avoided { &mut avoid } else { &mut avoid_first };
            list.extend(domain.places.iter().map(|place| place.failure_domain().to_owned()));
        }
        for list in [&mut avoid, &mut avoid_first] {
            list.sort_unstable();
            list.dedup();
        }
        Some(Piece { bytes: missing, avoid, avoid_first })
    }

    /// The place to grow next, and by how much, on the way to `bytes`: of the smallest domain that
    /// can grow. None: growing these does not add to what can be stored.
    pub(super) fn place_to_grow(
        &self,
        bytes: u64,
        can_grow: impl Fn(&Place) -> bool,
    ) -> Option<(&'a Place, u64)> {
        let bytes = self.layout.part_bytes(bytes);
        let place_in = |domain: &Sized<'a>| {
            let mut places = domain.places.iter().copied();
            places.find(|place| can_grow(place)).filter(|_| domain.bytes < bytes)
        };
        let mut grown = Domains { layout: self.layout, all: self.all.clone() };
        let growing = grown.all.iter_mut().filter(|domain| place_in(domain).is_some());
        growing.for_each(|domain| domain.bytes = bytes);
        if grown.storable_bytes() <= self.storable_bytes() {
            return None;
        }
        let growing = self.all.iter().filter_map(|it| Some((it.bytes, place_in(it)?)));
        let (has_bytes, place) = growing.min_by_key(|(has_bytes, _)| *has_bytes)?;
        Some((place, bytes - has_bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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

    fn layout_of(parts: u8) -> Layout {
        if parts == Layout::PARITY.domains { Layout::PARITY } else { Layout::copies(parts) }
    }

    /// Stores one unit after the other where most is left.
    fn stored(sizes: &[u64], parts: u8) -> u64 {
        let mut left = sizes.to_vec();
        for count in 0.. {
            left.sort_unstable_by(|a, b| b.cmp(a));
            let Some(places) = left.get_mut(..usize::from(parts)) else { return count };
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
            sizes in prop::collection::vec(0u64..12, 0..8),
            parts in prop::sample::select(vec![1, 2, 3, 5]),
        ) {
            let (places, layout) = (places(&sizes), layout_of(parts));
            let storable = Domains::of(places.iter(), layout).storable_bytes();
            prop_assert_eq!(storable, stored(&sizes, parts) * u64::from(layout.members));
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
            let layout = Layout::copies(copies);
            while let Some(piece) = Domains::of(places(&sizes).iter(), layout).piece_for(goal) {
                let at = choices.next().expect("the pieces do not end");
                let name = format!("n{at}");
                if piece.avoid.contains(&name) {
                    continue;
                }
                prop_assert!(piece.bytes > 0 && piece.bytes <= goal);
                sizes[at] += piece.bytes;
            }
            let places = places(&sizes);
            prop_assert!(Domains::of(places.iter(), layout).storable_bytes() >= goal);
        }

        /// What is granted on hosts with so much room comes to as much as there is to be had, and
        /// to no more on any host than a part.
        #[test]
        fn groups_grow_to_the_goal_or_to_what_the_hosts_have(
            rooms in prop::collection::vec(0u64..12, 6),
            begun in prop::collection::vec(0u64..12, 6),
            goal in 1u64..40,
            first in 0usize..6,
        ) {
            let begun = begun.iter().zip(&rooms).map(|(has, room)| *has.min(room));
            let mut sizes: Vec<u64> = begun.collect();
            let part = Layout::PARITY.part_bytes(goal);
            let most: Vec<u64> = rooms.iter().map(|room| *room.min(&part)).collect();
            let at_most: Vec<u64> = sizes.iter().map(|size| *size.max(&part)).collect();
            let mut refused = BTreeSet::new();
            let mut steps = 0;
            loop {
                steps += 1;
                prop_assert!(steps < 100, "{sizes:?} of {rooms:?}");
                let granted: Vec<Place> = places(&sizes);
                let granted: Vec<Place> = granted.into_iter().filter(|it| it.bytes > 0).collect();
                let domains = Domains::of(granted.iter(), Layout::PARITY);
                if domains.storable_bytes() >= goal {
                    break;
                }
                let number = |place: &Place| place.node[1..].parse::<usize>().expect("a number");
                let next = domains.place_to_grow(goal, |it| !refused.contains(&number(it)));
                if let Some((place, more)) = next {
                    prop_assert!(more > 0);
                    let (at, left) = (number(place), rooms[number(place)] - place.bytes);
                    match (0..).map(|half| more >> half).find(|it| *it <= left) {
                        Some(0) | None => _ = refused.insert(at),
                        Some(more) => sizes[at] += more,
                    }
                    continue;
                }
                let piece = domains.piece_for(goal).expect("the goal is not reached");
                let others = (0..6).map(|it| (it + first) % 6);
                let mut others = others.filter(|at| !piece.avoid.contains(&format!("n{at}")));
                let Some(at) = others.find(|at| rooms[*at] > 0) else { break };
                prop_assert_eq!(sizes[at], 0, "on a host that has none");
                sizes[at] = piece.bytes.min(rooms[at]);
            }
            prop_assert!(sizes.iter().zip(&at_most).all(|(size, most)| size <= most));
            let to_be_had: Vec<u64> = sizes.iter().zip(&most).map(|it| *it.0.max(it.1)).collect();
            let best = stored(&to_be_had, 5).min(part);
            prop_assert!(stored(&sizes, 5) >= best, "{sizes:?} of {rooms:?}, for {goal}");
        }
    }

    #[test]
    fn nodes_of_one_domain_count_together() {
        let named = |number, name: &str| Place { domain: Some(name.into()), ..place(number, 5) };
        let places = [named(1, "left"), named(2, "left"), named(3, "right")];
        let copies = Layout::copies(2);
        let domains = Domains::of(places.iter(), copies);
        assert_eq!(domains.storable_bytes(), 5);
        let piece = domains.piece_for(10).expect("more is needed");
        assert_eq!(
            (piece.bytes, piece.avoid, piece.avoid_first),
            (5, vec!["left".to_owned()], vec!["right".to_owned()])
        );
        let one_host = [place(1, 5), Place { node: "other".into(), ..place(1, 5) }];
        assert_eq!(Domains::of(one_host.iter(), copies).storable_bytes(), 0);
        // The third is of the first's host and of the second's domain: all fail together.
        let joint = Place { domain: Some("right".into()), ..place(1, 5) };
        let places = [named(1, "left"), named(2, "right"), joint];
        assert_eq!(Domains::of(places.iter(), copies).storable_bytes(), 0);
    }
}
