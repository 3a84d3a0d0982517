//! How the server responds to what its pool says; pure.
//!
//! A *grant* is what the server keeps for one segment of the pool at one epoch: a connection to its
//! blade, and a share for each shard. Invariants: a place that the pool names is taken once, and
//! never again after it was left; a segment that is no longer used is reported as left if the pool
//! asked for that, else released.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use farpool_api::placements::{Action, PlaceKey, Placements};
use farpool_api::{ClientSegment, ClientSegmentUse, Place, SegmentId, SegmentState};
use farpool_units::{SUPERPAGE_BYTES, exactly};

use farpool_kv_tier::far::GrantNumber;

/// The most segments at a time: a fragmented rack must not cost a connection from each thread to
/// each of a hundred segments.
const SEGMENTS_MAX: usize = 16;
/// How long after a failure the pool is asked again.
const RETRY: Duration = Duration::from_secs(1);
/// How long until memory that the pool had no room for is requested again.
const ASK_RETRY: Duration = Duration::from_secs(10);
/// Granted or requested memory takes a moment to arrive; this long passes before more is requested.
const ASK_PAUSE: Duration = Duration::from_secs(2);
/// A segment that must leave its node is given back if the pool has found no place for it within
/// this time: a cache does not keep a node from being drained. Nodes confirm a place in a fraction
/// of a second.
const SEEK_PATIENCE: Duration = Duration::from_secs(2);
/// How long a node whose blade was lost is not asked for memory. By then the pool knows of the
/// loss.
const SHUN: Duration = Duration::from_secs(30);
/// A deadline that moves closer by less than this counts as unchanged: the pool sends the time that
/// is left.
const HURRY_LEAST: Duration = Duration::from_millis(500);
/// How long a report waits for changes, and how long while memory moves.
const QUIET_WAIT: Duration = Duration::from_secs(1);
const BUSY_WAIT: Duration = Duration::from_millis(50);

/// The next question to the pool. One question is open at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    Join,
    Report { uses: Vec<ClientSegmentUse>, wait: Duration },
    Ask { bytes: u64, avoid: Vec<String> },
    Release(SegmentId),
}

/// The pool's answer. Errors are text for people.
#[derive(Debug)]
pub enum Answer {
    Joined(Result<(), String>),
    /// None: the pool does not know this server.
    Heard(Result<Option<Vec<ClientSegment>>, String>),
    /// The bytes granted.
    Granted(Result<u64, String>),
    /// Whether the pool took it back.
    Released(Result<bool, String>),
}

/// What to do with far memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Connect to this; then call [`Plan::taken`] or [`Plan::not_taken`].
    Take { key: PlaceKey, place: Box<Place> },
    /// Empty it within this time, if there is a limit; then call [`Plan::freed`].
    Empty { grant: GrantNumber, within: Option<Duration> },
    /// Its memory is gone: empty it at once; then call [`Plan::freed`].
    Drop { grant: GrantNumber },
}

/// The grants, and the last state that the pool reported.
#[derive(Debug)]
pub struct Plan {
    placements: Placements,
    segments: Vec<ClientSegment>,
    wanted_bytes: u64,
    is_joined: bool,
    /// Whether a question is unanswered.
    is_asking: bool,
    /// Earliest time of the next question.
    ask_at: Duration,
    /// Earliest time at which more memory is requested.
    more_at: Duration,
    asked_bytes: u64,
    /// Segments for which the pool seeks a place, and since when.
    sought: BTreeMap<SegmentId, Duration>,
    releases: VecDeque<SegmentId>,
    /// Earliest time at which the next release is tried.
    release_at: Duration,
    /// Segments to be released, until the pool no longer lists them.
    released: BTreeSet<SegmentId>,
    /// Segments that the pool refuses to take back, and when to use them again.
    retake_at: BTreeMap<SegmentId, Duration>,
    /// Unusable places of segments that are still being emptied elsewhere.
    unusable: BTreeSet<PlaceKey>,
    /// When grants that are being emptied have to be empty, if there is a limit.
    empty_by: BTreeMap<GrantNumber, Option<Duration>>,
    /// Grants that have been ordered to be dropped.
    dropped: BTreeSet<GrantNumber>,
    /// Nodes that are not asked for memory, and until when.
    shunned: BTreeMap<String, Duration>,
    /// The last messages about a pool that does not answer and about missing memory.
    said_away: Option<String>,
    said_short: Option<String>,
    to_say: Vec<String>,
}

impl Plan {
    /// Nothing is granted, and the pool has not been asked yet.
    pub fn new(wanted_bytes: u64) -> Self {
        Self {
            placements: Placements::new(1),
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

    /// Returns the next question, if one is due. `used_bytes` is the total that holds data.
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
        Some(Question::Report { uses: self.placements.report(used_bytes), wait })
    }

    /// Takes an answer. Returns what is to be done about it.
    pub fn take(&mut self, answer: Answer, now: Duration) -> Vec<Order> {
        self.is_asking = false;
        match answer {
            Answer::Joined(Ok(())) => self.is_joined = true,
            Answer::Heard(Ok(Some(segments))) => {
                self.said_away = None;
                return self.hear(segments, now);
            }
            Answer::Heard(Ok(None)) => {
                // The pool has taken back what it had granted.
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
                // Meanwhile reports go on: without them the lease would expire. Next time another
                // release is tried.
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
        let mut taking = BTreeSet::new();
        for action in self.placements.hear(segments) {
            match action {
                Action::Add { key, place } => {
                    if self.released.contains(&key.0) || self.unusable.contains(&key) {
                        continue;
                    }
                    if self.bytes_besides(key.0, &taking) >= self.wanted_bytes {
                        self.refuse(key);
                    } else {
                        taking.insert(key.0);
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
            if is_due
                && segment.state == SegmentState::Ready
                && self.placements.placement(key).is_none()
            {
                self.retake_at.remove(&segment.id);
                self.released.remove(&segment.id);
                orders.push(Order::Take { key, place: Box::new(segment.place) });
            }
        }
        self.sought.retain(|id, _| named.contains(id));
        if let Some(why) = self.placements.waits_for() {
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
        if let Some(placement) = self.placements.placement(key).filter(|it| !it.is_leaving) {
            let grant = GrantNumber(placement.entry as u64);
            self.placements.leaving(key);
            self.empty_by.insert(grant, within.map(|it| now + it));
            orders.push(Order::Empty { grant, within });
        }
    }

    /// The pool wants a grant that is being emptied back earlier than announced.
    fn hurry(&mut self, key: PlaceKey, within: Duration, now: Duration, orders: &mut Vec<Order>) {
        let Some(placement) = self.placements.placement(key).filter(|it| it.is_leaving) else {
            return;
        };
        let grant = GrantNumber(placement.entry as u64);
        let by = now + within;
        if let Some(before) = self.empty_by.get_mut(&grant)
            && before.is_none_or(|before| by + HURRY_LEAST < before)
        {
            *before = Some(by);
            orders.push(Order::Empty { grant, within: Some(within) });
        }
    }

    fn lose(&mut self, key: PlaceKey, orders: &mut Vec<Order>) {
        let Some(placement) = self.placements.placement(key) else { return };
        let grant = GrantNumber(placement.entry as u64);
        self.placements.leaving(key);
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

    /// Notes that the place is in use.
    pub fn taken(&mut self, key: PlaceKey, grant: GrantNumber) {
        self.placements.taken(key, exactly(grant.0), 0);
    }

    /// Notes that the place cannot be used. If another place of the segment is still being emptied,
    /// the segment is released after that.
    pub fn not_taken(&mut self, key: PlaceKey, node: &str, why: &str, now: Duration) {
        self.shunned.insert(node.to_owned(), now + SHUN);
        self.more_at = self.more_at.max(now + ASK_PAUSE);
        self.say_short(format!("far memory on node {node} cannot be used: {why}"));
        self.refuse(key);
    }

    /// Leaves a place to the pool that was not taken.
    fn refuse(&mut self, key: PlaceKey) {
        let has_other = self.segment_at_any(key.0).is_some_and(|it| {
            it.epoch != key.1 && self.placements.placement((it.id, it.epoch)).is_some()
        });
        if has_other {
            self.unusable.insert(key);
        } else {
            self.release(key.0);
        }
    }

    /// Notes that the connection to a grant's blade is lost.
    pub fn lost(&mut self, grant: GrantNumber, now: Duration) -> Vec<Order> {
        let mut orders = Vec::new();
        if let Some(key) = self.placements.key_of(exactly(grant.0)) {
            if let Some(node) = self.segment_at(key).map(|it| it.place.node.clone()) {
                self.shunned.insert(node, now + SHUN);
            }
            self.lose(key, &mut orders);
            self.release(key.0);
        }
        orders
    }

    /// Notes that nothing in a grant is used any more and its connection is closed.
    pub fn freed(&mut self, grant: GrantNumber) {
        let entry = exactly(grant.0);
        let key = self.placements.key_of(entry);
        self.placements.sweep(|it, _| it != entry);
        self.dropped.remove(&grant);
        self.empty_by.remove(&grant);
        let Some(key) = key else { return };
        // If the pool asked to have it left, it is reported; a place that was not asked back, or
        // that has no replacement, is of no further use.
        let is_usable = |it: &ClientSegment| {
            it.target.as_ref().is_some_and(|to| !self.unusable.contains(&(it.id, to.epoch)))
        };
        let is_reported = |it: &ClientSegment| it.leave || is_usable(it);
        if self.segment_at(key).is_some_and(|it| !is_reported(it)) {
            self.release(key.0);
        }
    }

    /// Whether any memory is being moved.
    pub fn is_moving(&self) -> bool {
        self.placements.is_moving()
    }

    /// Bytes that the pool has granted and has not asked back.
    pub fn granted_bytes(&self) -> u64 {
        self.stays().map(|it| it.place.bytes).sum()
    }

    fn stays(&self) -> impl Iterator<Item = &ClientSegment> {
        self.segments.iter().filter(|it| {
            let stays = match it.state {
                SegmentState::Pending | SegmentState::Ready => true,
                // While the pool seeks a place, more would be asked for than is wanted.
                SegmentState::Moving => {
                    it.target.is_some() || (!it.leave && self.is_used((it.id, it.epoch)))
                }
                SegmentState::Releasing | SegmentState::Lost => false,
            };
            stays && !self.released.contains(&it.id)
        })
    }

    /// Whether the place is in use and not being left.
    fn is_used(&self, key: PlaceKey) -> bool {
        self.placements.placement(key).is_some_and(|it| !it.is_leaving)
    }

    /// Bytes that are in use, or about to be taken, and stay, without those of one segment. Memory
    /// that was asked for may arrive after a place was found for what it was to replace: then one
    /// of the two is not needed.
    fn bytes_besides(&self, id: SegmentId, taking: &BTreeSet<SegmentId>) -> u64 {
        let is_used = |it: &&ClientSegment| {
            let target = it.target.as_ref().map(|target| target.epoch);
            let mut epochs = std::iter::once(it.epoch).chain(target);
            it.id != id
                && (taking.contains(&it.id) || epochs.any(|epoch| self.is_used((it.id, epoch))))
        };
        self.stays().filter(is_used).map(|it| it.place.bytes).sum()
    }

    fn missing_bytes(&self) -> Option<u64> {
        let bytes = self.wanted_bytes.saturating_sub(self.granted_bytes());
        (bytes >= SUPERPAGE_BYTES && self.segments.len() < SEGMENTS_MAX).then_some(bytes)
    }

    /// Takes the messages for people; each appears once.
    pub fn take_messages(&mut self) -> Vec<String> {
        std::mem::take(&mut self.to_say)
    }
}

/// Deals the superpages of a grant out to shards that already have `have` superpages each: the
/// shard with the least is next. Each gets consecutive ones, so that with several blades it has
/// some of each.
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
mod tests;
