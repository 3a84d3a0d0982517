//! What the server does about what its pool says; pure.
//!
//! A *grant* is what the server keeps for one segment of the pool at one epoch: a way to its blade, and a share for each
//! shard. Invariants: a place that the pool names is taken once, and after it was left never again; a segment of which
//! nothing is used any more is reported as left if it was to be left, else released.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use farpool_api::seats::{Action, PlaceKey, Seats};
use farpool_api::{ClientSegment, ClientSegmentUse, Place, SegmentId, SegmentState};

use crate::tier::far::GrantNumber;

/// Segments at a time: a rack in pieces must not mean a connection for each thread to each of a hundred.
const SEGMENTS_MAX: usize = 16;
/// The unit in which blades give memory; less is not asked for.
const SUPERPAGE_BYTES: u64 = 16 << 20;
/// After a failure the pool is asked again so much later.
const RETRY: Duration = Duration::from_secs(1);
/// What the pool has no room for is asked for again so much later.
const ASK_RETRY: Duration = Duration::from_secs(10);
/// What was granted or wished for needs a moment until it is there; then more is asked for.
const ASK_PAUSE: Duration = Duration::from_secs(2);
/// A segment that must leave its node, and for which the pool has found no place for so long, is given back: a cache does not
/// keep a node from being drained. Nodes confirm a place in a part of a second.
const SEEK_PATIENCE: Duration = Duration::from_secs(2);
/// A node whose blade was lost is not asked for memory again for so long. By then the pool knows, too.
const SHUN: Duration = Duration::from_secs(30);
/// A deadline that comes nearer by less is the same: it is told as what is left of it.
const HURRY_LEAST: Duration = Duration::from_millis(500);
/// How long a report waits for news, and how long while something moves.
const QUIET_WAIT: Duration = Duration::from_secs(1);
const BUSY_WAIT: Duration = Duration::from_millis(50);

/// What is asked of the pool next; one question at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    Join,
    Report { uses: Vec<ClientSegmentUse>, wait: Duration },
    Ask { bytes: u64, avoid: Vec<String> },
    Release(SegmentId),
}

/// What came of it. Errors are for people.
#[derive(Debug)]
pub enum Answer {
    Joined(Result<(), String>),
    /// None: the pool does not know this server.
    Heard(Result<Option<Vec<ClientSegment>>, String>),
    /// How many bytes were granted.
    Granted(Result<u64, String>),
    /// Whether the pool took it back.
    Released(Result<bool, String>),
}

/// What to do with far memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Connect to this; then [`Plan::taken`] or [`Plan::not_taken`].
    Take { key: PlaceKey, place: Box<Place> },
    /// Empty it within this time, if there is a limit; then [`Plan::freed`].
    Empty { grant: GrantNumber, within: Option<Duration> },
    /// It is gone: likewise, at once.
    Drop { grant: GrantNumber },
}

/// The grants, and what the pool said last.
#[derive(Debug)]
pub struct Plan {
    seats: Seats,
    segments: Vec<ClientSegment>,
    wanted_bytes: u64,
    is_joined: bool,
    /// A question has no answer yet.
    is_asking: bool,
    /// Nothing is asked before.
    ask_at: Duration,
    /// No more memory is asked for before.
    more_at: Duration,
    asked_bytes: u64,
    /// Segments whose place is sought, since when.
    sought: BTreeMap<SegmentId, Duration>,
    releases: VecDeque<SegmentId>,
    /// None of them is tried before.
    release_at: Duration,
    /// Segments that are to be released, while the pool names them.
    released: BTreeSet<SegmentId>,
    /// Segments that the pool does not take back are used again then.
    retake_at: BTreeMap<SegmentId, Duration>,
    /// Places that cannot be used, of segments that are still emptied elsewhere.
    unusable: BTreeSet<PlaceKey>,
    /// When grants that are being emptied have to be empty, where there is a limit.
    empty_by: BTreeMap<GrantNumber, Option<Duration>>,
    /// Grants that were to be dropped.
    dropped: BTreeSet<GrantNumber>,
    /// Nodes that are not asked for memory until then.
    shunned: BTreeMap<String, Duration>,
    /// What was said last of a pool that does not answer, and of memory that is missing.
    said_away: Option<String>,
    said_short: Option<String>,
    to_say: Vec<String>,
}

impl Plan {
    /// Nothing is granted, and nobody was asked yet.
    pub fn new(wanted_bytes: u64) -> Self {
        Self {
            seats: Seats::default(),
            segments: Vec::new(),
            wanted_bytes,
            is_joined: false,
            is_asking: false,
            ask_at: Duration::ZERO,
            more_at: Duration::ZERO,
            asked_bytes: 0,
            sought: BTreeMap::new(),
            releases: VecDeque::new(),
            release_at: Duration::ZERO,
            released: BTreeSet::new(),
            retake_at: BTreeMap::new(),
            unusable: BTreeSet::new(),
            empty_by: BTreeMap::new(),
            dropped: BTreeSet::new(),
            shunned: BTreeMap::new(),
            said_away: None,
            said_short: None,
            to_say: Vec::new(),
        }
    }

    /// What to ask now. `used_bytes` is what holds data in all.
    pub fn question(&mut self, now: Duration, used_bytes: u64) -> Option<Question> {
        if self.is_asking || now < self.ask_at {
            return None;
        }
        self.is_asking = true;
        if !self.is_joined {
            return Some(Question::Join);
        }
        if let Some(id) = self.releases.front().filter(|_| now >= self.release_at) {
            return Some(Question::Release(*id));
        }
        if let Some(bytes) = self.missing_bytes().filter(|_| now >= self.more_at) {
            self.shunned.retain(|_, until| now < *until);
            self.asked_bytes = bytes;
            return Some(Question::Ask { bytes, avoid: self.shunned.keys().cloned().collect() });
        }
        let wait = if self.is_moving() { BUSY_WAIT } else { QUIET_WAIT };
        Some(Question::Report { uses: self.seats.report(used_bytes), wait })
    }

    /// Takes an answer; what is to be done about it.
    pub fn take(&mut self, answer: Answer, now: Duration) -> Vec<Order> {
        self.is_asking = false;
        match answer {
            Answer::Joined(Ok(())) => self.is_joined = true,
            Answer::Heard(Ok(Some(segments))) => {
                self.said_away = None;
                return self.hear(segments, now);
            }
            Answer::Heard(Ok(None)) => {
                // What it had granted is not ours any more.
                self.is_joined = false;
                return self.hear(Vec::new(), now);
            }
            Answer::Granted(Ok(bytes)) => {
                let is_all = bytes >= self.asked_bytes;
                self.more_at = if is_all { now + ASK_PAUSE } else { now + BUSY_WAIT };
            }
            Answer::Granted(Err(why)) => {
                self.more_at = now + ASK_RETRY;
                self.say_short(format!("no more far memory for now: {why}"));
            }
            Answer::Released(Ok(is_released)) => {
                let id = self.releases.pop_front();
                if let Some(id) = id.filter(|_| !is_released) {
                    self.retake_at.insert(id, now + SHUN);
                }
            }
            Answer::Released(Err(why)) => {
                // Meanwhile reports go on: without them the lease would end. The next time another is tried.
                self.release_at = now + RETRY;
                self.releases.rotate_left(1.min(self.releases.len()));
                self.say_away(&why);
            }
            Answer::Joined(Err(why)) | Answer::Heard(Err(why)) => {
                self.ask_at = now + RETRY;
                self.say_away(&why);
            }
        }
        Vec::new()
    }

    fn say_away(&mut self, why: &str) {
        let text = format!("{why}; the server goes on with the far memory it has");
        if self.said_away.as_ref() != Some(&text) {
            self.said_away = Some(text.clone());
            self.to_say.push(text);
        }
    }

    fn hear(&mut self, segments: Vec<ClientSegment>, now: Duration) -> Vec<Order> {
        let named: BTreeSet<SegmentId> = segments.iter().map(|it| it.id).collect();
        self.released.retain(|id| named.contains(id));
        self.unusable.retain(|key| named.contains(&key.0));
        self.retake_at.retain(|id, _| named.contains(id));
        let before_bytes = self.granted_bytes();
        self.segments.clone_from(&segments);
        if self.granted_bytes() > before_bytes {
            self.said_short = None;
        }
        let mut orders = Vec::new();
        for action in self.seats.hear(segments) {
            match action {
                Action::Add { key, place } => {
                    if !self.released.contains(&key.0) && !self.unusable.contains(&key) {
                        orders.push(Order::Take { key, place });
                    }
                }
                Action::Leave { key, .. } => match self.segment_at(key) {
                    Some(segment) => {
                        let within = segment.deadline_ms.map(Duration::from_millis);
                        self.leave(key, within, now, &mut orders);
                    }
                    None => self.lose(key, &mut orders),
                },
            }
        }
        for segment in self.segments.clone() {
            let key = (segment.id, segment.epoch);
            let is_sought =
                segment.state == SegmentState::Moving && segment.target.is_none() && !segment.leave;
            if segment.state == SegmentState::Lost {
                self.lose(key, &mut orders);
                self.release(segment.id);
            } else if is_sought {
                let since = *self.sought.entry(segment.id).or_insert(now);
                if now >= since + SEEK_PATIENCE {
                    let within = segment.deadline_ms.map(Duration::from_millis);
                    self.leave(key, within, now, &mut orders);
                }
            } else {
                self.sought.remove(&segment.id);
            }
            if let Some(deadline_ms) = segment.deadline_ms {
                self.hurry(key, Duration::from_millis(deadline_ms), now, &mut orders);
            }
            let is_due = self.retake_at.get(&segment.id).is_some_and(|at| now >= *at);
            if is_due && segment.state == SegmentState::Ready && self.seats.seat(key).is_none() {
                self.retake_at.remove(&segment.id);
                self.released.remove(&segment.id);
                orders.push(Order::Take { key, place: Box::new(segment.place) });
            }
        }
        self.sought.retain(|id, _| named.contains(id));
        if let Some(why) = self.seats.waits_for() {
            self.say_short(format!("far memory is granted and waited for: {why}"));
        }
        orders
    }

    fn say_short(&mut self, text: String) {
        if self.said_short.as_ref() != Some(&text) {
            self.said_short = Some(text.clone());
            self.to_say.push(text);
        }
    }

    fn segment_at(&self, (id, epoch): PlaceKey) -> Option<&ClientSegment> {
        self.segments.iter().find(|it| it.id == id && it.epoch == epoch)
    }

    fn segment_at_any(&self, id: SegmentId) -> Option<&ClientSegment> {
        self.segments.iter().find(|it| it.id == id)
    }

    fn leave(
        &mut self,
        key: PlaceKey,
        within: Option<Duration>,
        now: Duration,
        orders: &mut Vec<Order>,
    ) {
        if let Some(seat) = self.seats.seat(key).filter(|it| !it.is_leaving) {
            let grant = GrantNumber(seat.entry as u64);
            self.seats.leaving(key);
            self.empty_by.insert(grant, within.map(|it| now + it));
            orders.push(Order::Empty { grant, within });
        }
    }

    /// The pool needs what is being emptied earlier than it has said.
    fn hurry(&mut self, key: PlaceKey, within: Duration, now: Duration, orders: &mut Vec<Order>) {
        let Some(seat) = self.seats.seat(key).filter(|it| it.is_leaving) else { return };
        let grant = GrantNumber(seat.entry as u64);
        let by = now + within;
        if let Some(before) = self.empty_by.get_mut(&grant)
            && before.is_none_or(|before| by + HURRY_LEAST < before)
        {
            *before = Some(by);
            orders.push(Order::Empty { grant, within: Some(within) });
        }
    }

    fn lose(&mut self, key: PlaceKey, orders: &mut Vec<Order>) {
        let Some(seat) = self.seats.seat(key) else { return };
        let grant = GrantNumber(seat.entry as u64);
        self.seats.leaving(key);
        self.empty_by.remove(&grant);
        if self.dropped.insert(grant) {
            orders.push(Order::Drop { grant });
        }
    }

    fn release(&mut self, id: SegmentId) {
        if self.released.insert(id) {
            self.releases.push_back(id);
        }
    }

    /// The place is used from now on.
    pub fn taken(&mut self, key: PlaceKey, grant: GrantNumber) {
        self.seats.taken(key, usize::try_from(grant.0).unwrap_or(usize::MAX), 0);
    }

    /// The place cannot be used. If another of the segment is still being emptied, the segment is released after that.
    pub fn not_taken(&mut self, key: PlaceKey, node: &str, why: &str, now: Duration) {
        self.shunned.insert(node.to_owned(), now + SHUN);
        self.more_at = self.more_at.max(now + ASK_PAUSE);
        self.say_short(format!("far memory on node {node} cannot be used: {why}"));
        let has_other = self
            .segment_at_any(key.0)
            .is_some_and(|it| it.epoch != key.1 && self.seats.seat((it.id, it.epoch)).is_some());
        if has_other {
            self.unusable.insert(key);
        } else {
            self.release(key.0);
        }
    }

    /// The way to a grant's blade is lost.
    pub fn lost(&mut self, grant: GrantNumber, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        if let Some(key) = self.seats.key_of(usize::try_from(grant.0).unwrap_or(usize::MAX)) {
            if let Some(node) = self.segment_at(key).map(|it| it.place.node.clone()) {
                self.shunned.insert(node, now + SHUN);
            }
            self.lose(key, &mut orders);
            self.release(key.0);
        }
        orders
    }

    /// Nothing of a grant is used any more, and the way to it is closed.
    pub fn freed(&mut self, grant: GrantNumber) {
        let entry = usize::try_from(grant.0).unwrap_or(usize::MAX);
        let key = self.seats.key_of(entry);
        self.seats.sweep(|it, _| it != entry);
        self.dropped.remove(&grant);
        self.empty_by.remove(&grant);
        let Some(key) = key else { return };
        // Who asked to have it left is told so; a place that nobody asked back, or for which there is no other, is
        // of no use any more.
        let is_usable = |it: &ClientSegment| {
            it.target.as_ref().is_some_and(|to| !self.unusable.contains(&(it.id, to.epoch)))
        };
        let is_reported = |it: &ClientSegment| it.leave || is_usable(it);
        if self.segment_at(key).is_some_and(|it| !is_reported(it)) {
            self.release(key.0);
        }
    }

    /// Whether anything is on its way.
    pub fn is_moving(&self) -> bool {
        self.seats.is_moving()
    }

    /// What the pool has granted and has not asked back.
    pub fn granted_bytes(&self) -> u64 {
        self.stays().map(|it| it.place.bytes).sum()
    }

    fn stays(&self) -> impl Iterator<Item = &ClientSegment> {
        self.segments.iter().filter(|it| {
            let stays = match it.state {
                SegmentState::Pending | SegmentState::Ready => true,
                SegmentState::Moving => it.target.is_some(),
                SegmentState::Releasing | SegmentState::Lost => false,
            };
            stays && !self.released.contains(&it.id)
        })
    }

    fn missing_bytes(&self) -> Option<u64> {
        let bytes = self.wanted_bytes.saturating_sub(self.granted_bytes());
        (bytes >= SUPERPAGE_BYTES && self.segments.len() < SEGMENTS_MAX).then_some(bytes)
    }

    /// What people should know, each thing once.
    pub fn take_messages(&mut self) -> Vec<String> {
        std::mem::take(&mut self.to_say)
    }
}

/// Deals the superpages of a grant out to shards, of which each has so many already: who has least is next. Each gets
/// some that follow each other, so that on several blades it has some of each.
pub fn deal(superpages: u32, have: &[u64]) -> Vec<Vec<u32>> {
    let mut counts = vec![0u32; have.len()];
    for _ in 0..superpages {
        if let Some(next) = (0..have.len()).min_by_key(|&it| have[it] + u64::from(counts[it])) {
            counts[next] += 1;
        }
    }
    let mut first = 0;
    let run = |count: u32| {
        first += count;
        (first - count..first).collect()
    };
    counts.into_iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use farpool_api::{Key, Target};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn place(node: &str) -> Place {
        Place {
            node: node.into(),
            addresses: vec!["tcp://10.0.0.1:7070".into()],
            key: Some(Key(7)),
            bytes: GIB,
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
        }
    }

    fn segment(id: u128, epoch: u64, state: SegmentState) -> ClientSegment {
        ClientSegment {
            id: SegmentId::from_u128(id),
            epoch,
            state,
            place: place("n"),
            target: None,
            waits_for: Vec::new(),
            leave: false,
            deadline_ms: None,
        }
    }

    fn key(id: u128, epoch: u64) -> PlaceKey {
        (SegmentId::from_u128(id), epoch)
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn heard(plan: &mut Plan, segments: Vec<ClientSegment>, now: Duration) -> Vec<Order> {
        plan.take(Answer::Heard(Ok(Some(segments))), now)
    }

    /// A plan that has joined and has been granted one segment of all it wants, as grant 0.
    fn with_one() -> Plan {
        let mut plan = Plan::new(GIB);
        assert_eq!(plan.question(at(0), 0), Some(Question::Join));
        assert_eq!(plan.question(at(0), 0), None, "one question at a time");
        plan.take(Answer::Joined(Ok(())), at(0));
        let ask = plan.question(at(0), 0);
        assert_eq!(ask, Some(Question::Ask { bytes: GIB, avoid: Vec::new() }));
        plan.take(Answer::Granted(Ok(GIB)), at(0));
        assert_eq!(plan.granted_bytes(), 0, "what counts is what the pool names");
        assert!(matches!(plan.question(at(0), 0), Some(Question::Report { .. })));
        let orders = heard(&mut plan, vec![segment(1, 5, SegmentState::Ready)], at(1));
        assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(1, 5)));
        plan.taken(key(1, 5), GrantNumber(0));
        assert_eq!(plan.granted_bytes(), GIB);
        plan
    }

    fn uses(plan: &mut Plan, now: Duration) -> Vec<ClientSegmentUse> {
        match plan.question(now, GIB) {
            Some(Question::Report { uses, .. }) => uses,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_moved_segment_is_taken_anew_and_the_old_place_is_reported_when_it_is_empty() {
        let mut plan = with_one();
        let target = Some(Target { epoch: 6, place: place("m") });
        let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
        let orders = heard(&mut plan, vec![moving.clone()], at(2));
        assert!(matches!(&orders[0], Order::Take { key: it, .. } if *it == key(1, 6)));
        assert_eq!(orders[1..], [Order::Empty { grant: GrantNumber(0), within: None }]);
        plan.taken(key(1, 6), GrantNumber(1));
        assert!(!uses(&mut plan, at(2))[0].evacuated);
        assert_eq!(heard(&mut plan, vec![moving.clone()], at(3)), [], "it is told once");
        plan.freed(GrantNumber(0));
        let told = &uses(&mut plan, at(3))[0];
        assert_eq!((told.evacuated, told.epoch), (true, 6));
        assert_eq!(heard(&mut plan, vec![segment(1, 6, SegmentState::Ready)], at(4)), []);
        assert!(matches!(plan.question(at(9), 0), Some(Question::Report { .. })), "all is there");
    }

    #[test]
    fn what_a_donor_needs_is_emptied_before_its_deadline_and_asked_for_elsewhere() {
        let mut plan = with_one();
        let (leave, deadline_ms) = (true, Some(9_000));
        let left = ClientSegment { leave, deadline_ms, ..segment(1, 5, SegmentState::Moving) };
        let within = Some(Duration::from_secs(9));
        let orders = heard(&mut plan, vec![left.clone()], at(2));
        assert_eq!(orders, [Order::Empty { grant: GrantNumber(0), within }]);
        assert_eq!(plan.granted_bytes(), 0);
        assert!(matches!(plan.question(at(3), 0), Some(Question::Ask { bytes: GIB, .. })));
        plan.take(Answer::Granted(Err("no room".into())), at(3));
        assert_eq!(plan.take_messages().len(), 1);
        assert!(!uses(&mut plan, at(4))[0].evacuated);
        assert_eq!(heard(&mut plan, vec![left.clone()], at(4)), []);
        plan.freed(GrantNumber(0));
        let told = &uses(&mut plan, at(5))[0];
        assert_eq!((told.evacuated, told.epoch, told.used_bytes), (true, 5, 0));
        assert_eq!(heard(&mut plan, Vec::new(), at(6)), []);
        assert!(matches!(plan.question(at(6), 0), Some(Question::Report { .. })), "not so soon");
        heard(&mut plan, Vec::new(), at(13));
        assert!(matches!(plan.question(at(14), 0), Some(Question::Ask { .. })));
        plan.take(Answer::Granted(Err("no room".into())), at(14));
        assert!(plan.take_messages().is_empty(), "it was said");
    }

    #[test]
    fn a_drain_without_another_place_does_not_wait_for_a_cache() {
        let mut plan = with_one();
        let moving = segment(1, 5, SegmentState::Moving);
        assert_eq!(heard(&mut plan, vec![moving.clone()], at(2)), [], "a place may be found");
        let orders = heard(&mut plan, vec![moving.clone()], at(5));
        assert_eq!(orders, [Order::Empty { grant: GrantNumber(0), within: None }]);
        plan.freed(GrantNumber(0));
        let release = plan.question(at(6), 0);
        assert_eq!(release, Some(Question::Release(SegmentId::from_u128(1))));
        plan.take(Answer::Released(Err("nobody answers".into())), at(6));
        assert!(
            !matches!(plan.question(at(6), 0), Some(Question::Release(_))),
            "the lease goes on"
        );
        plan.take(Answer::Granted(Err("no room".into())), at(6));
        assert_eq!(plan.question(at(8), 0), release, "it must be said");
        plan.take(Answer::Released(Ok(true)), at(8));
        let ready = segment(1, 5, SegmentState::Ready);
        assert_eq!(heard(&mut plan, vec![ready], at(9)), [], "given up is given up");
    }

    #[test]
    fn a_lost_blade_is_given_up_and_its_node_not_asked_again_for_a_while() {
        let mut plan = with_one();
        let grant = GrantNumber(0);
        assert_eq!(plan.lost(grant, at(2)), [Order::Drop { grant }]);
        assert_eq!(plan.question(at(2), 0), Some(Question::Release(SegmentId::from_u128(1))));
        plan.take(Answer::Released(Ok(true)), at(2));
        plan.freed(grant);
        let avoid = vec!["n".to_owned()];
        assert_eq!(plan.question(at(3), 0), Some(Question::Ask { bytes: GIB, avoid }));
        plan.take(Answer::Granted(Err("no room".into())), at(3));
        heard(&mut plan, Vec::new(), at(4));
        let ask = plan.question(at(40), 0);
        assert_eq!(ask, Some(Question::Ask { bytes: GIB, avoid: Vec::new() }));
    }

    #[test]
    fn what_the_pool_does_not_take_back_is_used_again() {
        let mut plan = with_one();
        let ready = || vec![segment(1, 5, SegmentState::Ready)];
        plan.lost(GrantNumber(0), at(2));
        assert!(matches!(plan.question(at(2), 0), Some(Question::Release(_))));
        plan.take(Answer::Released(Ok(false)), at(2));
        plan.freed(GrantNumber(0));
        assert_eq!(heard(&mut plan, ready(), at(3)), [], "its blade was just lost");
        let orders = heard(&mut plan, ready(), at(40));
        assert!(matches!(&orders[..], [Order::Take { key: it, .. }] if *it == key(1, 5)));
        plan.taken(key(1, 5), GrantNumber(1));
        assert_eq!(heard(&mut plan, ready(), at(41)), []);
        let left = ClientSegment { leave: true, ..segment(1, 5, SegmentState::Moving) };
        let orders = heard(&mut plan, vec![left], at(42));
        assert_eq!(orders, [Order::Empty { grant: GrantNumber(1), within: None }]);
        plan.freed(GrantNumber(1));
        assert!(plan.seats.report(0)[0].evacuated);
    }

    #[test]
    fn a_place_that_is_used_again_is_not_reported_as_left() {
        let mut plan = with_one();
        plan.lost(GrantNumber(0), at(2));
        plan.question(at(2), 0);
        plan.take(Answer::Released(Ok(false)), at(2));
        plan.freed(GrantNumber(0));
        let ready = || vec![segment(1, 5, SegmentState::Ready)];
        heard(&mut plan, ready(), at(3));
        assert_eq!(heard(&mut plan, ready(), at(40)).len(), 1);
        plan.taken(key(1, 5), GrantNumber(1));
        let target = Some(Target { epoch: 6, place: place("m") });
        let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
        heard(&mut plan, vec![moving], at(41));
        plan.taken(key(1, 6), GrantNumber(2));
        assert!(!plan.seats.report(0)[0].evacuated, "it is full of items");
        plan.freed(GrantNumber(1));
        assert!(plan.seats.report(0)[0].evacuated);
    }

    #[test]
    fn what_the_pool_calls_lost_or_names_no_more_is_dropped_at_once() {
        let grant = GrantNumber(0);
        let mut plan = with_one();
        let lost = segment(1, 5, SegmentState::Lost);
        assert_eq!(heard(&mut plan, vec![lost.clone()], at(2)), [Order::Drop { grant }]);
        assert_eq!(heard(&mut plan, vec![lost], at(2)), []);
        assert!(matches!(plan.question(at(2), 0), Some(Question::Release(_))));
        let mut plan = with_one();
        assert_eq!(heard(&mut plan, Vec::new(), at(2)), [Order::Drop { grant }]);
        // A pool that has forgotten the server: likewise, and it joins anew.
        let mut plan = with_one();
        assert_eq!(plan.take(Answer::Heard(Ok(None)), at(2)), [Order::Drop { grant }]);
        assert_eq!(plan.question(at(2), 0), Some(Question::Join));
    }

    #[test]
    fn a_pool_that_does_not_answer_changes_nothing_and_is_told_of_once() {
        let mut plan = with_one();
        for second in 2..6 {
            assert!(plan.question(at(2 * second), 0).is_some());
            assert_eq!(plan.take(Answer::Heard(Err("away".into())), at(2 * second)), []);
            assert_eq!(plan.question(at(2 * second), 0), None, "not at once");
            assert_eq!(plan.take_messages().len(), usize::from(second == 2));
        }
        heard(&mut plan, vec![segment(1, 5, SegmentState::Pending)], at(20));
        assert_eq!(plan.granted_bytes(), GIB, "a controller that has started again");
        plan.take(Answer::Heard(Err("away".into())), at(21));
        assert_eq!(plan.take_messages().len(), 1, "another time");
    }

    #[test]
    fn a_place_that_cannot_be_used_is_given_up() {
        let mut plan = Plan::new(GIB);
        plan.take(Answer::Joined(Ok(())), at(0));
        let ready = || vec![segment(1, 5, SegmentState::Ready)];
        assert_eq!(heard(&mut plan, ready(), at(1)).len(), 1);
        plan.not_taken(key(1, 5), "n", "it is on another host", at(1));
        assert_eq!(plan.take_messages().len(), 1);
        assert!(matches!(plan.question(at(1), 0), Some(Question::Release(_))));
        assert_eq!(heard(&mut plan, ready(), at(2)), []);
    }

    #[test]
    fn a_deadline_that_comes_nearer_is_ordered_again() {
        let mut plan = with_one();
        let moving = segment(1, 5, SegmentState::Moving);
        heard(&mut plan, vec![moving.clone()], at(2));
        let grant = GrantNumber(0);
        let orders = heard(&mut plan, vec![moving], at(5));
        assert_eq!(orders, [Order::Empty { grant, within: None }]);
        let by = |deadline_ms| ClientSegment {
            leave: true,
            deadline_ms: Some(deadline_ms),
            ..segment(1, 5, SegmentState::Moving)
        };
        let orders = heard(&mut plan, vec![by(9_000)], at(6));
        assert_eq!(orders, [Order::Empty { grant, within: Some(at(9)) }]);
        assert_eq!(heard(&mut plan, vec![by(8_000)], at(7)), [], "the same moment");
        let orders = heard(&mut plan, vec![by(3_000)], at(8));
        assert_eq!(orders, [Order::Empty { grant, within: Some(at(3)) }]);
    }

    #[test]
    fn a_target_that_cannot_be_used_does_not_end_the_old_place_early() {
        let mut plan = with_one();
        let target = Some(Target { epoch: 6, place: place("m") });
        let moving = ClientSegment { target, ..segment(1, 5, SegmentState::Moving) };
        assert_eq!(heard(&mut plan, vec![moving.clone()], at(2)).len(), 2);
        plan.not_taken(key(1, 6), "m", "it is on another host", at(2));
        assert!(!matches!(plan.question(at(2), 0), Some(Question::Release(_))), "it is emptied");
        assert_eq!(heard(&mut plan, vec![moving], at(3)), [], "it is not tried again");
        plan.freed(GrantNumber(0));
        assert!(matches!(plan.question(at(4), 0), Some(Question::Release(_))));
    }

    #[test]
    fn superpages_are_dealt_out_so_that_all_have_about_the_same() {
        assert_eq!(deal(5, &[0, 0]), [vec![0, 1, 2], vec![3, 4]]);
        assert_eq!(deal(3, &[4, 1, 2]), [vec![], vec![0, 1], vec![2]]);
        assert_eq!(deal(0, &[0, 0]), [vec![], Vec::<u32>::new()]);
    }
}
