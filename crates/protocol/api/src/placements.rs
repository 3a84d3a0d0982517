//! How a client acts on the controller's answers; pure.
//!
//! A *placement* is the client's record of one segment at one epoch, such as an entry of a run's
//! table of blades: a segment that moves has two, of which the old one is being left. Invariants:
//! - every place that the controller names has a placement until all processes have left it;
//! - a place is reported as evacuated only after all processes have left its placement.
//!
//! Where nodes lend without a controller, or no node has room, a segment is not moved to a target
//! but has to be left for any other place ([`ClientSegment::leave`]), in the end the client's own.

mod domains;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use farpool_units::at_most;

use crate::{ClientSegment, ClientSegmentUse, Place, SegmentId, SegmentState};
use domains::{Domains, Layout};

/// Smallest segment to ask for: less is not worth a request.
const SEGMENT_MIN_BYTES: u64 = 512 << 20;
/// Most segments that a run asks for by itself; the other entries of the board are for moves, and
/// for places whose blades are away.
const SEGMENTS_LIMIT: usize = 6;
/// Most entries; more are not asked for.
pub const ENTRIES_LIMIT: usize = 8;
/// More is asked for when less than this share of the granted memory is free.
const FREE_PART: u64 = 4;
/// More is also asked for below this much free: growth must not outrun the next answer.
const FREE_MIN_BYTES: u64 = 256 << 20;

/// A place whose blade cannot be reached for this long is replaced: a blade that was only restarted
/// is there again by then.
const AWAY_PATIENCE: Duration = Duration::from_secs(1);
/// A place that was granted and did not become usable for this long is given back: its node may
/// have died just before.
const NEVER_READY_LIMIT: Duration = Duration::from_secs(5);
/// A place that no process has used for this long because its blade is away is given back: a
/// controller takes as long to believe that a node is lost.
const UNUSED_LIMIT: Duration = Duration::from_secs(30);

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

/// Which processes use a place. Those whose blade is lost leave it, and what they had there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// All that may.
    All,
    /// Some only.
    Some,
    /// None of them.
    Nobody,
}

/// What is to be asked for next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Need {
    /// That a segment has more bytes, where it is.
    Larger {
        /// The segment.
        id: SegmentId,
        /// How much more than it has.
        more_bytes: u64,
    },
    /// A further segment.
    Piece(Piece),
}

/// Memory to ask for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its size.
    pub bytes: u64,
    /// Failure domains where it would be of no use, or that cannot be reached.
    pub avoid: Vec<String>,
    /// More domains, where it would be of some.
    pub avoid_first: Vec<String>,
}

/// The placements, and the controller's last answer.
#[derive(Debug)]
pub struct Placements {
    /// How what is far is stored.
    layout: Layout,
    placements: BTreeMap<PlaceKey, Placement>,
    /// Places that all processes have left.
    left: BTreeSet<PlaceKey>,
    /// Places that not all processes use, or that are not usable yet, and since when.
    away: BTreeMap<PlaceKey, Instant>,
    /// Places that no process uses, and since when.
    unused: BTreeMap<PlaceKey, Instant>,
    /// Those among the first that are to be replaced.
    gone: BTreeSet<PlaceKey>,
    segments: Vec<ClientSegment>,
}

impl Placements {
    /// Starts without placements, for so many copies of what is far.
    #[must_use]
    pub fn new(copies: u8) -> Self {
        Placements::with_layout(Layout::copies(copies))
    }

    /// Starts without placements, for groups of four with parity.
    #[must_use]
    pub fn with_parity() -> Self {
        Placements::with_layout(Layout::PARITY)
    }

    fn with_layout(layout: Layout) -> Self {
        Placements {
            layout,
            placements: BTreeMap::new(),
            left: BTreeSet::new(),
            away: BTreeMap::new(),
            unused: BTreeMap::new(),
            gone: BTreeSet::new(),
            segments: Vec::new(),
        }
    }

    /// True if what one failure domain has can be had from others.
    pub fn are_apart(&self) -> bool {
        self.layout.is_apart()
    }

    /// What can be far if so much is stored in all.
    pub fn far_bytes_of(&self, stored_bytes: u64) -> u64 {
        self.layout.far_bytes(stored_bytes)
    }

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
            let here = (place_key(segment), &segment.place);
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
                place_key(segment) == *key && (moves || self.is_over(segment))
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

    /// True if the segment has no memory any more, and what it had can be had from elsewhere.
    fn is_over(&self, segment: &ClientSegment) -> bool {
        let is_over = matches!(segment.state, SegmentState::Lost | SegmentState::Releasing);
        self.are_apart() && is_over
    }

    /// Takes in which processes use each place, by the numbers of their placements. Without copies
    /// nothing replaces a place.
    pub fn look(&mut self, now: Instant, reach: impl Fn(usize) -> Reach) {
        if !self.are_apart() {
            return;
        }
        let since = |map: &BTreeMap<PlaceKey, Instant>, key| map.get(&key).copied().unwrap_or(now);
        let placed = |is_it: fn(Reach) -> bool| {
            let all = self.placements.iter();
            let all = all.filter(move |(_, placement)| !placement.is_leaving);
            all.filter(|(_, it)| is_it(reach(it.entry))).map(|(key, _)| *key).collect::<Vec<_>>()
        };
        let (away, unused) = (placed(|it| it != Reach::All), placed(|it| it == Reach::Nobody));
        let pending = self.segments.iter().filter(|it| it.state == SegmentState::Pending);
        // After a restart of the controller those with data wait for their nodes, too.
        let pending = pending.map(place_key).filter(|key| !self.placements.contains_key(key));
        let away = away.into_iter().chain(pending);
        self.away = away.map(|key| (key, since(&self.away, key))).collect();
        self.unused = unused.into_iter().map(|key| (key, since(&self.unused, key))).collect();
        let gone = self.away.iter().filter(|(_, since)| is_over_for(**since, now, AWAY_PATIENCE));
        self.gone = gone.map(|(key, _)| *key).collect();
    }

    /// Returns the segments to be given back: their memory is lost, or nobody has used it for long
    /// because its blade is away, or it never became usable.
    pub fn to_release(&self, now: Instant) -> Vec<SegmentId> {
        let is_in = |map: &BTreeMap<PlaceKey, Instant>, segment: &ClientSegment, limit| {
            map.get(&place_key(segment)).is_some_and(|since| is_over_for(*since, now, limit))
        };
        let is_useless = |segment: &&ClientSegment| match segment.state {
            SegmentState::Lost => true,
            SegmentState::Releasing => false,
            // Its node may have died just before it was granted.
            SegmentState::Pending if !self.placements.contains_key(&place_key(segment)) => {
                is_in(&self.away, segment, NEVER_READY_LIMIT)
            }
            _ => is_in(&self.unused, segment, UNUSED_LIMIT),
        };
        let useless = self.segments.iter().filter(|_| self.are_apart()).filter(is_useless);
        useless.map(|segment| segment.id).collect()
    }

    /// True if anything is moving.
    pub fn is_moving(&self) -> bool {
        let mut leaving = self.placements.iter().filter(|(_, placement)| placement.is_leaving);
        leaving.any(|(key, _)| self.has_data(*key))
            || self.segments.iter().any(|segment| segment.target.is_some())
    }

    /// False if what the place had is only had from elsewhere.
    fn has_data(&self, key: PlaceKey) -> bool {
        let segment = self.segments.iter().find(|segment| segment.id == key.0);
        !self.are_apart()
            || !self.gone.contains(&key) && segment.is_some_and(|segment| !self.is_over(segment))
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
            self.placements.get(&place_key(it)).is_some_and(|placement| placement.is_leaving)
        };
        self.segments.iter().filter(is_left).map(|it| it.place.bytes).sum()
    }

    /// Returns the granted bytes that can be used now.
    pub fn granted_bytes(&self) -> u64 {
        self.segments.iter().filter(|it| is_usable(it.state)).map(|it| it.place.bytes).sum()
    }

    /// The sizes of the failure domains of segments that count.
    fn domains(&self, counts: impl Fn(&ClientSegment) -> bool) -> Domains<'_> {
        let is_there =
            |segment: &ClientSegment| !named_by(segment).any(|it| self.gone.contains(&it));
        let all = self.segments.iter().filter(|segment| is_there(segment) && counts(segment));
        Domains::of(all.map(|segment| &segment.place), self.layout)
    }

    /// The domains of all segments that can be used, or will be: after a restart of the controller,
    /// for example, all wait for their nodes.
    fn expected(&self) -> Domains<'_> {
        self.domains(|it| it.state == SegmentState::Pending || is_usable(it.state))
    }

    /// True if all far memory fits in segments that stay, with a reserve.
    pub fn has_room_for(&self, far_bytes: u64) -> bool {
        let bytes = self.domains(|it| self.stays(it)).storable_bytes();
        !self.is_moving() && bytes > far_bytes.saturating_add(far_bytes / FREE_PART)
    }

    /// Returns the segments whose memory is lost.
    pub fn lost(&self) -> impl Iterator<Item = &ClientSegment> {
        self.segments.iter().filter(|it| it.state == SegmentState::Lost)
    }

    /// Builds the report on each segment, each with its share of `far_bytes`.
    pub fn report(&self, far_bytes: u64) -> Vec<ClientSegmentUse> {
        let granted = u128::from(self.granted_bytes().max(1));
        let stored_bytes = self.layout.stored_bytes(far_bytes);
        let share = |bytes: u64| {
            let share = stored_bytes * u128::from(bytes) / granted;
            at_most::<u64, _>(share).min(bytes)
        };
        let uses = self.segments.iter().map(|segment| {
            let target = segment.target.as_ref().filter(|target| {
                let has_moved = self.left.contains(&place_key(segment));
                has_moved && self.placements.contains_key(&(segment.id, target.epoch))
            });
            let has_left = segment.leave && !self.placements.contains_key(&place_key(segment));
            ClientSegmentUse {
                id: segment.id,
                used_bytes: if has_left { 0 } else { share(segment.place.bytes) },
                epoch: target.map_or(segment.epoch, |target| target.epoch),
                evacuated: target.is_some() || has_left,
            }
        });
        uses.collect()
    }

    /// Returns the memory to ask for now, if any, so that all of `far_bytes` has its copies.
    pub fn wanted(&self, far_bytes: u64, is_full: bool, quota_bytes: u64) -> Option<Piece> {
        let goal = self.goal(far_bytes, is_full, quota_bytes)?;
        self.has_entry().then(|| self.piece_for(goal)).flatten()
    }

    /// Returns how much is to be storable with all copies or parity, if that is more than there is.
    pub fn goal(&self, far_bytes: u64, is_full: bool, quota_bytes: u64) -> Option<u64> {
        let granted = self.expected().storable_bytes();
        let room = self.far_bytes_of(quota_bytes).saturating_sub(granted);
        let reserve = (granted / FREE_PART).max(FREE_MIN_BYTES);
        let is_short = is_full || far_bytes.saturating_add(reserve) > granted;
        // First the move, unless copies wait for what is asked for.
        let may_ask = (!self.is_moving() || !self.gone.is_empty()) && room > 0;
        // With copies, what the program has may be more than has room; then it is to have the share
        // that is free, too.
        let reserve = reserve.max(far_bytes / (FREE_PART - 1));
        let missing = far_bytes.saturating_add(reserve).saturating_sub(granted);
        let more = granted.max(SEGMENT_MIN_BYTES);
        let more = if self.are_apart() { more.max(missing) } else { more };
        (is_short && may_ask).then(|| granted.saturating_add(more.min(room)))
    }

    /// Returns what to ask for next, so that in the end `bytes` can be stored with parity; None if
    /// they can. Segments grow where they are, except for those that were refused more.
    pub fn need_for(&self, bytes: u64, refused: &BTreeSet<SegmentId>) -> Option<Need> {
        let domains = self.expected();
        if domains.storable_bytes() >= bytes {
            return None;
        }
        let segment_at = |place: &Place| self.segments.iter().find(|it| it.place == *place);
        let can_grow = |place: &Place| {
            let segment = segment_at(place).filter(|it| it.state == SegmentState::Ready);
            let used =
                segment.filter(|it| self.stays(it) && !self.away.contains_key(&place_key(it)));
            used.is_some_and(|it| !refused.contains(&it.id))
        };
        let larger = domains.place_to_grow(bytes, can_grow).and_then(|(place, more_bytes)| {
            Some(Need::Larger { id: segment_at(place)?.id, more_bytes })
        });
        larger.or_else(|| self.piece_for(bytes).map(Need::Piece))
    }

    /// True if it is used, and not to be left.
    fn stays(&self, segment: &ClientSegment) -> bool {
        let placement = self.placements.get(&place_key(segment));
        is_usable(segment.state)
            && segment.target.is_none()
            && placement.is_some_and(|placement| !placement.is_leaving)
    }

    /// The failure domains that have memory for this program, now or soon.
    pub fn domain_count(&self) -> usize {
        self.expected().count()
    }

    /// True if anything can be stored with all copies or parity, now or once all grants are usable.
    pub fn will_store(&self) -> bool {
        self.expected().storable_bytes() > 0
    }

    /// True if anything can be stored with all copies or parity now.
    pub fn can_store(&self) -> bool {
        let has_placement = |it: &ClientSegment| self.placements.contains_key(&place_key(it));
        self.domains(|it| is_usable(it.state) && has_placement(it)).storable_bytes() > 0
    }

    /// Returns the memory to ask for next, so that in the end `bytes` can be stored with all copies
    /// or parity; None if they can.
    pub fn piece_for(&self, bytes: u64) -> Option<Piece> {
        let mut piece = self.expected().piece_for(bytes)?;
        let gone = self.segments.iter().filter(|segment| self.gone.contains(&place_key(segment)));
        let gone = gone.map(|segment| segment.place.failure_domain().to_owned());
        piece.avoid.extend(gone);
        Some(piece)
    }

    /// True if there is an entry for one more segment.
    pub fn has_entry(&self) -> bool {
        let will = self.segments.iter().filter(|segment| !self.is_over(segment)).map(place_key);
        let all: BTreeSet<_> = self.placements.keys().copied().chain(will).collect();
        let there = all.iter().filter(|key| !self.gone.contains(key));
        there.count() < SEGMENTS_LIMIT && all.len() < ENTRIES_LIMIT
    }

    /// True if a place that was granted for this piece is of use: it is on another failure domain
    /// than those to be avoided, as the client sees them.
    pub fn is_of_use(&self, place: &Place, piece: &Piece) -> bool {
        let is_avoided =
            |it: &&ClientSegment| piece.avoid.iter().any(|name| name == it.place.failure_domain());
        let mut avoided = self.segments.iter().filter(is_avoided);
        !avoided.any(|it| Domains::fail_together(&it.place, place))
    }
}

fn is_over_for(since: Instant, now: Instant, time: Duration) -> bool {
    now.saturating_duration_since(since) >= time
}

/// Returns what a run asks for at its start: all of its quota, or a first part.
pub fn first_bytes(quota_bytes: Option<u64>, local_bytes: u64) -> u64 {
    quota_bytes.unwrap_or_else(|| local_bytes.saturating_mul(2).max(SEGMENT_MIN_BYTES))
}

fn is_usable(state: SegmentState) -> bool {
    matches!(state, SegmentState::Ready | SegmentState::Moving)
}

fn place_key(segment: &ClientSegment) -> PlaceKey {
    (segment.id, segment.epoch)
}

fn named_by(segment: &ClientSegment) -> impl Iterator<Item = PlaceKey> {
    let target = segment.target.as_ref().map(|target| (segment.id, target.epoch));
    std::iter::once(place_key(segment)).chain(target)
}

#[cfg(test)]
mod tests;
