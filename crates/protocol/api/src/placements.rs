//! How a client acts on the controller's answers; pure.
//!
//! A *placement* is the client's record of one segment at one epoch, such as an entry of a run's
//! table of blades: a segment that moves has two, of which the old one is being left. Invariants:
//! - every place that the controller names has a placement until all processes have left it;
//! - a place is reported as evacuated only after all processes have left its placement.
//!
//! Where nodes lend without a controller, or no node has room, a segment is not moved to a target
//! but has to be left for any other place ([`ClientSegment::leave`]), in the end the client's own.

use std::collections::{BTreeMap, BTreeSet};

use farpool_units::at_most;

use crate::{ClientSegment, ClientSegmentUse, Place, SegmentId, SegmentState};

/// Smallest segment to ask for: less is not worth a request.
const SEGMENT_MIN_BYTES: u64 = 512 << 20;
/// Most segments that a run asks for by itself; the other entries of the board are for moves.
const SEGMENTS_LIMIT: usize = 6;
/// More is asked for when less than this share of the granted memory is free.
const FREE_PART: u64 = 4;
/// More is also asked for below this much free: growth must not outrun the next answer.
const FREE_MIN_BYTES: u64 = 256 << 20;

/// A segment at an epoch.
pub type PlaceKey = (SegmentId, u64);

/// The client's record of a place, by its number; a reused number has another generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The number of the place.
    pub entry: usize,
    /// Which place of that number is meant.
    pub generation: u32,
    /// Whether the place is being left.
    pub is_leaving: bool,
}

/// An action for the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Enter this place; then call [`Placements::taken`].
    Add {
        /// The segment, and the epoch of its place.
        key: PlaceKey,
        /// Where its memory is.
        place: Box<Place>,
    },
    /// Have this place left; then call [`Placements::leaving`].
    Leave {
        /// The segment, and the epoch of its place.
        key: PlaceKey,
        /// The client's record of it.
        placement: Placement,
    },
}

/// The placements, and the controller's last answer.
#[derive(Debug, Default)]
pub struct Placements {
    placements: BTreeMap<PlaceKey, Placement>,
    /// Places that all processes have left.
    left: BTreeSet<PlaceKey>,
    segments: Vec<ClientSegment>,
}

impl Placements {
    /// Takes in the controller's answer. Returns the actions that it requires.
    pub fn hear(&mut self, segments: Vec<ClientSegment>) -> Vec<Action> {
        self.segments = segments;
        let named: BTreeSet<PlaceKey> = self.segments.iter().flat_map(named_by).collect();
        self.left.retain(|key| named.contains(key));
        let usable = self.segments.iter().filter(|it| is_usable(it.state));
        let mut actions = Vec::new();
        for segment in usable {
            let target = segment.target.as_ref();
            let target = target.map(|target| ((segment.id, target.epoch), &target.place));
            let here = ((segment.id, segment.epoch), &segment.place);
            let here = (!segment.leave).then_some(here);
            for (key, place) in here.into_iter().chain(target) {
                if !self.placements.contains_key(&key) && !self.left.contains(&key) {
                    actions.push(Action::Add { key, place: Box::new(place.clone()) });
                }
            }
        }
        for (key, placement) in &self.placements {
            let moves = |segment: &ClientSegment| {
                let moves = segment.target.is_some() || segment.leave;
                (segment.id, segment.epoch) == *key && moves
            };
            let is_to_leave = !named.contains(key) || self.segments.iter().any(moves);
            if is_to_leave && !placement.is_leaving {
                actions.push(Action::Leave { key: *key, placement: *placement });
            }
        }
        actions
    }

    /// Records that the place has a placement now.
    pub fn taken(&mut self, key: PlaceKey, entry: usize, generation: u32) {
        self.placements.insert(key, Placement { entry, generation, is_leaving: false });
        self.left.remove(&key);
    }

    /// Records that the place is being left.
    pub fn leaving(&mut self, key: PlaceKey) {
        if let Some(placement) = self.placements.get_mut(&key) {
            placement.is_leaving = true;
        }
    }

    /// Returns the placement of a place.
    pub fn placement(&self, key: PlaceKey) -> Option<Placement> {
        self.placements.get(&key).copied()
    }

    /// Returns the place whose placement has this number.
    pub fn key_of(&self, entry: usize) -> Option<PlaceKey> {
        self.placements.iter().find(|(_, placement)| placement.entry == entry).map(|(key, _)| *key)
    }

    /// Drops the placements that the board no longer has; `has` tells that of an entry and its
    /// generation.
    pub fn sweep(&mut self, has: impl Fn(usize, u32) -> bool) {
        let left = &mut self.left;
        self.placements.retain(|key, placement| {
            let is_there = has(placement.entry, placement.generation);
            if !is_there {
                left.insert(*key);
            }
            is_there
        });
    }

    /// True if anything is moving.
    pub fn is_moving(&self) -> bool {
        self.placements.values().any(|placement| placement.is_leaving)
            || self.segments.iter().any(|segment| segment.target.is_some())
    }

    /// Returns what keeps granted memory from being used, in words; None if nothing is reported to.
    pub fn waits_for(&self) -> Option<String> {
        let all: BTreeSet<&str> =
            self.segments.iter().flat_map(|it| &it.waits_for).map(String::as_str).collect();
        (!all.is_empty()).then(|| all.into_iter().collect::<Vec<_>>().join("; "))
    }

    /// Returns the bytes of the places being left.
    pub fn leaving_bytes(&self) -> u64 {
        let is_left = |it: &&ClientSegment| {
            self.placements.get(&(it.id, it.epoch)).is_some_and(|placement| placement.is_leaving)
        };
        self.segments.iter().filter(is_left).map(|it| it.place.bytes).sum()
    }

    /// Returns the granted bytes that can be used now.
    pub fn granted_bytes(&self) -> u64 {
        self.bytes_where(is_usable)
    }

    fn bytes_where(&self, counts: impl Fn(SegmentState) -> bool) -> u64 {
        self.segments.iter().filter(|it| counts(it.state)).map(|it| it.place.bytes).sum()
    }

    /// True if all far memory fits in segments that stay, with a reserve.
    pub fn has_room_for(&self, far_bytes: u64) -> bool {
        let stays = |it: &&ClientSegment| {
            is_usable(it.state)
                && self
                    .placements
                    .get(&(it.id, it.epoch))
                    .is_some_and(|placement| !placement.is_leaving)
        };
        let bytes: u64 = self.segments.iter().filter(stays).map(|it| it.place.bytes).sum();
        !self.is_moving() && bytes > far_bytes.saturating_add(far_bytes / FREE_PART)
    }

    /// Returns the segments whose memory is lost.
    pub fn lost(&self) -> impl Iterator<Item = &ClientSegment> {
        self.segments.iter().filter(|it| it.state == SegmentState::Lost)
    }

    /// Builds the report on each segment, each with its share of `far_bytes`.
    pub fn report(&self, far_bytes: u64) -> Vec<ClientSegmentUse> {
        let granted = u128::from(self.granted_bytes().max(1));
        let share = |bytes: u64| {
            let share = u128::from(far_bytes) * u128::from(bytes) / granted;
            at_most::<u64, _>(share).min(bytes)
        };
        let uses = self.segments.iter().map(|segment| {
            let target = segment.target.as_ref().filter(|target| {
                let has_moved = self.left.contains(&(segment.id, segment.epoch));
                has_moved && self.placements.contains_key(&(segment.id, target.epoch))
            });
            let has_left =
                segment.leave && !self.placements.contains_key(&(segment.id, segment.epoch));
            ClientSegmentUse {
                id: segment.id,
                used_bytes: if has_left { 0 } else { share(segment.place.bytes) },
                epoch: target.map_or(segment.epoch, |target| target.epoch),
                evacuated: target.is_some() || has_left,
            }
        });
        uses.collect()
    }

    /// Returns the size of a segment to ask for now, if any.
    pub fn wanted_bytes(&self, far_bytes: u64, is_full: bool, quota_bytes: u64) -> Option<u64> {
        // Segments that only wait for their node or a circuit count: after a restart of the
        // controller, for example, all do.
        let granted = self.bytes_where(|state| state == SegmentState::Pending || is_usable(state));
        let room = quota_bytes.saturating_sub(granted);
        let reserve = (granted / FREE_PART).max(FREE_MIN_BYTES);
        let is_short = is_full || far_bytes.saturating_add(reserve) > granted;
        let may_ask = self.segments.len() < SEGMENTS_LIMIT && !self.is_moving() && room > 0;
        (is_short && may_ask).then(|| granted.max(SEGMENT_MIN_BYTES).min(room))
    }
}

/// Returns what a run asks for at its start: all of its quota, or a first part.
pub fn first_bytes(quota_bytes: Option<u64>, local_bytes: u64) -> u64 {
    quota_bytes.unwrap_or_else(|| local_bytes.saturating_mul(2).max(SEGMENT_MIN_BYTES))
}

fn is_usable(state: SegmentState) -> bool {
    matches!(state, SegmentState::Ready | SegmentState::Moving)
}

fn named_by(segment: &ClientSegment) -> impl Iterator<Item = PlaceKey> {
    let target = segment.target.as_ref().map(|target| (segment.id, target.epoch));
    std::iter::once((segment.id, segment.epoch)).chain(target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, Target};

    fn place(bytes: u64) -> Place {
        Place {
            node: "n".into(),
            addresses: vec!["tcp://10.0.0.1:7070".into()],
            key: Some(Key(7)),
            bytes,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
        }
    }

    fn segment(id: u128, epoch: u64, state: SegmentState) -> ClientSegment {
        let (id, place) = (SegmentId::from_u128(id), place(1 << 30));
        let (target, waits_for) = (None, Vec::new());
        ClientSegment {
            id,
            epoch,
            state,
            place,
            target,
            waits_for,
            leave: false,
            deadline_ms: None,
        }
    }

    fn moving(id: u128, epoch: u64, to: u64) -> ClientSegment {
        let target = Some(Target { epoch: to, place: place(1 << 30) });
        ClientSegment { target, ..segment(id, epoch, SegmentState::Moving) }
    }

    fn to_be_left(id: u128, epoch: u64) -> ClientSegment {
        let deadline_ms = Some(9_000);
        ClientSegment { leave: true, deadline_ms, ..segment(id, epoch, SegmentState::Moving) }
    }

    fn added(actions: &[Action]) -> Vec<u64> {
        let keys = actions.iter().filter_map(|action| match action {
            Action::Add { key, .. } => Some(key.1),
            Action::Leave { .. } => None,
        });
        keys.collect()
    }

    #[test]
    fn a_segment_moves_from_seat_to_seat_and_is_reported_when_it_has() {
        let mut placements = Placements::default();
        let pending = segment(1, 5, SegmentState::Pending);
        assert_eq!(placements.hear(vec![pending]), [], "not usable yet");
        assert_eq!(added(&placements.hear(vec![segment(1, 5, SegmentState::Ready)])), [5]);
        let key = (SegmentId::from_u128(1), 5);
        placements.taken(key, 0, 1);
        assert_eq!(placements.hear(vec![segment(1, 5, SegmentState::Ready)]), []);
        let actions = placements.hear(vec![moving(1, 5, 6)]);
        assert_eq!((added(&actions), actions.len()), (vec![6], 2), "and the old one is left");
        placements.taken((key.0, 6), 1, 1);
        placements.leaving(key);
        assert_eq!(placements.hear(vec![moving(1, 5, 6)]), []);
        assert!(!placements.report(0)[0].evacuated, "somebody may still be there");
        placements.sweep(|entry, _| entry != 0);
        let told = &placements.report(0)[0];
        assert_eq!((told.evacuated, told.epoch), (true, 6));
        assert_eq!(
            placements.hear(vec![moving(1, 5, 6)]),
            [],
            "what was left is not entered again"
        );
        assert_eq!(placements.hear(vec![segment(1, 6, SegmentState::Ready)]), []);
        assert!(!placements.is_moving());
    }

    #[test]
    fn a_place_without_a_target_is_left_for_any_other_and_reported_when_it_is() {
        let mut placements = Placements::default();
        let ready = |id| segment(id, 5, SegmentState::Ready);
        assert_eq!(added(&placements.hear(vec![ready(1), ready(2)])), [5, 5]);
        let key = |id| (SegmentId::from_u128(id), 5);
        placements.taken(key(1), 0, 1);
        placements.taken(key(2), 1, 1);
        let actions = placements.hear(vec![to_be_left(1, 5), ready(2)]);
        let placement = Placement { entry: 0, generation: 1, is_leaving: false };
        assert_eq!(actions, [Action::Leave { key: key(1), placement }]);
        placements.leaving(key(1));
        assert!(placements.is_moving());
        assert_eq!(placements.wanted_bytes(4 << 30, true, u64::MAX), None, "first the move");
        assert!(!placements.report(0)[0].evacuated, "somebody may still be there");
        placements.sweep(|entry, _| entry != 0);
        let told = placements.report(1 << 30);
        assert_eq!((told[0].evacuated, told[0].epoch, told[0].used_bytes), (true, 5, 0));
        assert_eq!((told[1].evacuated, told[1].epoch), (false, 5));
        assert_eq!(placements.hear(vec![to_be_left(1, 5), ready(2)]), [], "not entered again");
        assert_eq!(placements.hear(vec![ready(2), ready(3)]).len(), 1, "and others still are");
    }

    #[test]
    fn a_place_heard_of_only_when_it_shall_be_left_is_never_entered() {
        let mut placements = Placements::default();
        assert_eq!(placements.hear(vec![to_be_left(1, 5)]), []);
        assert!(placements.report(0)[0].evacuated);
    }

    #[test]
    fn a_controller_that_still_seeks_a_target_has_nothing_left() {
        let mut placements = Placements::default();
        placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
        placements.taken((SegmentId::from_u128(1), 5), 0, 1);
        assert_eq!(placements.hear(vec![segment(1, 5, SegmentState::Moving)]), []);
        assert!(!placements.report(0)[0].evacuated);
    }

    #[test]
    fn what_the_controller_no_longer_names_is_left() {
        let mut placements = Placements::default();
        placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
        let key = (SegmentId::from_u128(1), 5);
        placements.taken(key, 3, 2);
        let placement = Placement { entry: 3, generation: 2, is_leaving: false };
        assert_eq!(placements.hear(Vec::new()), [Action::Leave { key, placement }]);
    }

    #[test]
    fn more_is_asked_for_before_what_there_is_runs_out_and_never_beyond_the_quota() {
        let mut placements = Placements::default();
        assert_eq!(placements.wanted_bytes(0, false, 100 << 20), Some(100 << 20));
        placements.hear(vec![segment(1, 5, SegmentState::Ready)]);
        let gib = 1 << 30;
        assert_eq!(placements.wanted_bytes(100 << 20, false, u64::MAX), None);
        assert_eq!(placements.wanted_bytes(900 << 20, false, u64::MAX), Some(gib));
        assert_eq!(placements.wanted_bytes(0, true, gib + (64 << 20)), Some(64 << 20));
        assert_eq!(placements.wanted_bytes(gib, true, gib), None);
        placements.hear(vec![moving(1, 5, 6)]);
        assert_eq!(placements.wanted_bytes(gib, true, u64::MAX), None, "first the move");
    }

    #[test]
    fn memory_that_is_only_waited_for_is_not_asked_for_again() {
        let mut placements = Placements::default();
        let quota = 1 << 30;
        let why = |node: &str| vec![format!("node {node} has not confirmed it")];
        let pending = |id, node| ClientSegment {
            waits_for: why(node),
            ..segment(id, 5, SegmentState::Pending)
        };
        assert_eq!(placements.waits_for(), None);
        placements.hear(vec![pending(1, "C"), pending(2, "D"), pending(3, "C")]);
        assert_eq!(placements.wanted_bytes(100 << 20, false, quota), None);
        assert_eq!(placements.wanted_bytes(0, true, u64::MAX), Some(3 << 30), "but more may be");
        let told = "node C has not confirmed it; node D has not confirmed it";
        assert_eq!(placements.waits_for().as_deref(), Some(told));
        placements.hear(vec![segment(1, 5, SegmentState::Lost)]);
        assert_eq!(
            placements.wanted_bytes(0, false, quota),
            Some(SEGMENT_MIN_BYTES),
            "what is lost does not come"
        );
    }

    #[test]
    fn shares_of_what_is_far_add_up_to_it() {
        let mut placements = Placements::default();
        let all: Vec<_> = (1..=3).map(|id| segment(id, 5, SegmentState::Ready)).collect();
        placements.hear(all);
        let sum: u64 = placements.report(300 << 20).iter().map(|it| it.used_bytes).sum();
        assert_eq!(sum, 300 << 20);
        assert!(placements.report(u64::MAX).iter().all(|it| it.used_bytes == 1 << 30));
    }
}
