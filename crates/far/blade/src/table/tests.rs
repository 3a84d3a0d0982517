//! The table against a plain model that recomputes everything from scratch.

use super::client::ROOT;
use super::*;
use farpool_units::PAGES_PER_SUPERPAGE;
use farpool_wire::{Extent, Hello, PageNumber, Purpose, SuperpageNumber};
use proptest::prelude::*;
use std::collections::BTreeSet;

const CAPACITY: u32 = 12;
const QUOTA: u32 = 8;
const LEASE: Duration = Duration::from_millis(100);
const CLIENTS: usize = 4;
const SEGMENTS: usize = 5;

fn limits() -> Limits {
    Limits {
        capacity_superpages: CAPACITY,
        quota_default_superpages: QUOTA,
        quota_limit_superpages: QUOTA,
        quota_stranger_superpages: 1,
        lease: LEASE,
        clients: 3,
        segments: SEGMENTS,
        require_grants: false,
    }
}

fn hello(who: usize) -> Hello<'static> {
    Hello::first(ClientId(who as u128), "")
}

#[derive(Clone, Debug)]
enum Step {
    Connect(usize),
    Disconnect(usize),
    Goodbye(usize),
    Pass(u64),
    Create(usize, u32),
    Allocate(usize, usize, u32, u32),
    Free(usize, usize, u32, u32),
    Freeze(usize, usize),
    Thaw(usize, usize),
    Attach(usize, usize),
    Detach(usize, usize),
    Touch(usize, usize, u32, bool),
    Hold(usize, usize),
    Release,
    Scrub,
    Restart,
}

fn any_step() -> impl Strategy<Value = Step> {
    // Above the number of clients: one of the segment's users, see `Pair::aim`.
    let (who, which) = (0..CLIENTS, 0..SEGMENTS);
    let pair = (0..4 * CLIENTS, which.clone());
    let range = (0..4 * CLIENTS, which, 0..10u32, 1..5u32);
    prop_oneof![
        3 => who.clone().prop_map(Step::Connect),
        1 => who.clone().prop_map(Step::Disconnect),
        1 => who.clone().prop_map(Step::Goodbye),
        1 => (1..80u64).prop_map(Step::Pass),
        3 => (who, 1..10u32).prop_map(|(c, span)| Step::Create(c, span)),
        6 => range.clone().prop_map(|(c, s, first, count)| Step::Allocate(c, s, first, count)),
        3 => range.clone().prop_map(|(c, s, first, count)| Step::Free(c, s, first, count)),
        2 => pair.clone().prop_map(|(c, s)| Step::Freeze(c, s)),
        2 => pair.clone().prop_map(|(c, s)| Step::Thaw(c, s)),
        3 => pair.clone().prop_map(|(c, s)| Step::Attach(c, s)),
        2 => pair.clone().prop_map(|(c, s)| Step::Detach(c, s)),
        4 => (pair.clone(), 0..10u32, any::<bool>())
            .prop_map(|((c, s), sma, write)| Step::Touch(c, s, sma, write)),
        1 => pair.prop_map(|(c, s)| Step::Hold(c, s)),
        1 => Just(Step::Release),
        2 => Just(Step::Scrub),
        1 => Just(Step::Restart),
    ]
}

/// What the model knows of a segment.
#[derive(Clone, Debug, Default)]
struct ModelSegment {
    span: u32,
    frozen: bool,
    uses: BTreeMap<u64, u32>,
    charged: u64,
    smas: BTreeSet<u32>,
    /// RMMA superpages waiting to be zeroed.
    dirty: BTreeSet<u32>,
    is_held: bool,
}

#[derive(Debug, Default)]
struct ModelClient {
    number: u64,
    connections: u32,
    lease_end: Option<Duration>,
}

/// Table and model side by side.
struct Pair {
    table: Table<u32>,
    now: Duration,
    clients: BTreeMap<usize, ModelClient>,
    /// By the number in the token; `ids` maps it to the table's name.
    segments: BTreeMap<usize, ModelSegment>,
    ids: BTreeMap<usize, SegmentId>,
    scrubs: Vec<Scrub<u32>>,
    held: Option<WriteGuard>,
    /// What the changes of the table add up to.
    image: Image,
}

type Outcome = Result<(), ErrorCode>;

/// The table of the next process: of what was kept, as text.
pub(super) fn after_restart(kept: &Image, limits: Limits) -> Table<u32> {
    let mut image = Image::default();
    for row in kept.rows() {
        let text = serde_json::to_string(&row).unwrap();
        image.apply(serde_json::from_str(&text).unwrap()).unwrap();
    }
    let make = |segment: &SegmentImage| Ok::<_, ImageError>(segment.row.limit_rmma);
    let mut table = Table::restore(limits, &image, make).unwrap();
    table.record_changes();
    table
}

impl Pair {
    fn new() -> Pair {
        let mut table = Table::new(limits());
        table.record_changes();
        Pair {
            image: table.image(),
            table,
            now: Duration::ZERO,
            clients: BTreeMap::new(),
            segments: BTreeMap::new(),
            ids: BTreeMap::new(),
            scrubs: Vec::new(),
            held: None,
        }
    }

    /// Turns the step's random numbers into an existing segment, if there is one, and usually one
    /// of its users.
    fn aim(&self, mut step: Step) -> Step {
        if let Step::Allocate(who, which, ..)
        | Step::Free(who, which, ..)
        | Step::Freeze(who, which)
        | Step::Thaw(who, which)
        | Step::Attach(who, which)
        | Step::Detach(who, which)
        | Step::Touch(who, which, ..)
        | Step::Hold(who, which) = &mut step
        {
            let existing = self.segments.iter().nth(*which % self.segments.len().max(1));
            if let Some((key, segment)) = existing {
                *which = *key;
                let number = segment.uses.keys().nth(*who % segment.uses.len()).unwrap();
                let user = self.clients.iter().find(|(_, client)| client.number == *number);
                if *who >= CLIENTS {
                    *who = *user.unwrap().0;
                }
            }
            *who %= CLIENTS;
        }
        step
    }

    fn number(&self, who: usize) -> ClientNumber {
        ClientNumber(self.clients.get(&who).map_or(999, |client| client.number))
    }

    fn id(&self, which: usize) -> SegmentId {
        self.ids.get(&which).copied().unwrap_or(SegmentId(999))
    }

    /// The segment, if this client uses it.
    fn used_by(&self, who: usize, which: usize) -> Result<&ModelSegment, ErrorCode> {
        let number = self.number(who).0;
        self.segments
            .get(&which)
            .filter(|segment| segment.uses.contains_key(&number))
            .ok_or(ErrorCode::UnknownSegment)
    }

    fn used_superpages(&self) -> u32 {
        let live: usize = self.segments.values().map(|s| s.smas.len()).sum();
        let dirty = self.scrubs.iter().map(|scrub| match &scrub.part {
            ScrubPart::Whole { superpages } => *superpages,
            ScrubPart::Superpages { rmmas, .. } => count_u32(rmmas.len()),
        });
        count_u32(live) + dirty.sum::<u32>()
    }

    fn charged_to(&self, number: u64) -> u32 {
        let theirs = self.segments.values().filter(|segment| segment.charged == number);
        theirs.map(|segment| count_u32(segment.smas.len())).sum()
    }

    fn end_uses(&mut self, number: u64) {
        for which in self.segments.keys().copied().collect::<Vec<_>>() {
            self.end_use(number, which);
        }
    }

    fn end_use(&mut self, number: u64, which: usize) {
        let Some(segment) = self.segments.get_mut(&which) else {
            return;
        };
        segment.uses.remove(&number);
        match segment.uses.keys().next() {
            None => {
                self.segments.remove(&which);
                self.ids.remove(&which);
            }
            Some(heir) if segment.charged == number => segment.charged = *heir,
            Some(_) => {}
        }
    }

    fn expect(&self, step: &Step) -> Outcome {
        match *step {
            Step::Connect(who) => {
                let is_full = !self.clients.contains_key(&who) && self.clients.len() == 3;
                if is_full { Err(ErrorCode::TooMany) } else { Ok(()) }
            }
            Step::Create(who, _) => {
                if !self.clients.contains_key(&who) {
                    return Err(ErrorCode::NotPermitted);
                }
                if self.segments.len() == SEGMENTS { Err(ErrorCode::TooMany) } else { Ok(()) }
            }
            Step::Allocate(who, which, first, count) => {
                self.expect_allocate(who, which, first..first + count)
            }
            Step::Free(who, which, first, count) => {
                let segment = self.used_by(who, which)?;
                let mut range = first..first + count;
                match () {
                    () if segment.frozen => Err(ErrorCode::Frozen),
                    () if range.end > segment.span => Err(ErrorCode::OutOfRange),
                    () if range.any(|sma| !segment.smas.contains(&sma)) => {
                        Err(ErrorCode::NotAllocated)
                    }
                    () if segment.is_held => Err(ErrorCode::InUse),
                    () => Ok(()),
                }
            }
            Step::Freeze(who, which) => match self.used_by(who, which)? {
                segment if segment.frozen => Err(ErrorCode::Frozen),
                segment if segment.is_held => Err(ErrorCode::InUse),
                _ => Ok(()),
            },
            Step::Thaw(who, which) => match self.used_by(who, which)? {
                segment if !segment.frozen => Err(ErrorCode::NotFrozen),
                segment if segment.uses.values().sum::<u32>() != 1 => Err(ErrorCode::InUse),
                _ => Ok(()),
            },
            Step::Attach(who, which) => {
                if !self.clients.contains_key(&who) {
                    return Err(ErrorCode::NotPermitted);
                }
                match self.segments.get(&which) {
                    None => Err(ErrorCode::UnknownSegment),
                    Some(segment) if !segment.frozen => Err(ErrorCode::NotFrozen),
                    Some(_) => Ok(()),
                }
            }
            Step::Detach(who, which) => self.used_by(who, which).map(drop),
            Step::Touch(who, which, sma, write) => match self.used_by(who, which)? {
                segment if write && segment.frozen => Err(ErrorCode::Frozen),
                segment if !segment.smas.contains(&sma) => Err(ErrorCode::NotAllocated),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn expect_allocate(
        &self,
        who: usize,
        which: usize,
        mut range: std::ops::Range<u32>,
    ) -> Outcome {
        let segment = self.used_by(who, which)?;
        let count = range.end - range.start;
        if segment.frozen {
            return Err(ErrorCode::Frozen);
        }
        if range.end > segment.span {
            return Err(ErrorCode::OutOfRange);
        }
        if range.any(|sma| segment.smas.contains(&sma)) {
            return Err(ErrorCode::AlreadyAllocated);
        }
        if self.used_superpages() + count > CAPACITY {
            return Err(ErrorCode::BladeFull);
        }
        if self.charged_to(self.number(who).0) + count > QUOTA {
            return Err(ErrorCode::QuotaExceeded);
        }
        let held = count_u32(segment.smas.len() + segment.dirty.len());
        if held + count > segment.span.min(QUOTA) { Err(ErrorCode::BladeFull) } else { Ok(()) }
    }

    /// Carries out the step in the table.
    fn take(&mut self, step: &Step) -> Outcome {
        let refused = |refused: Refused| refused.code;
        match *step {
            Step::Connect(who) => {
                let connected =
                    self.table.connect(&hello(who), Origin::User(0)).map_err(refused)?;
                let client = self.clients.entry(who).or_default();
                client.number = connected.number.0;
                client.connections += 1;
                client.lease_end = None;
            }
            Step::Disconnect(who) => self.disconnect(who),
            Step::Goodbye(who) => self.end_client(who),
            Step::Pass(millis) => self.pass(millis),
            Step::Create(who, span) => self.create(who, span).map_err(refused)?,
            Step::Allocate(who, which, first, count) => {
                self.allocate(who, which, first, count).map_err(refused)?;
            }
            Step::Free(who, which, first, count) => {
                self.free(who, which, first, count).map_err(refused)?;
            }
            Step::Freeze(who, which) => {
                self.table.freeze(self.number(who), self.id(which)).map_err(refused)?;
                self.segments.get_mut(&which).unwrap().frozen = true;
            }
            Step::Thaw(who, which) => {
                self.table.thaw(self.number(who), self.id(which), |_| false).map_err(refused)?;
                self.segments.get_mut(&which).unwrap().frozen = false;
            }
            Step::Attach(who, which) => self.attach(who, which).map_err(refused)?,
            Step::Detach(who, which) => self.detach(who, which).map_err(refused)?,
            Step::Touch(who, which, sma, write) => {
                let access = if write { Access::Write } else { Access::Read };
                self.touch(who, which, sma, access).map_err(refused)?;
            }
            Step::Hold(who, which) => self.hold(who, which),
            Step::Release => {
                self.held = None;
                self.segments.values_mut().for_each(|segment| segment.is_held = false);
            }
            Step::Scrub => {
                if !self.scrubs.is_empty() {
                    self.end_scrub();
                }
            }
            Step::Restart => self.restart(),
        }
        Ok(())
    }

    /// The blade's process ends, and another one goes on with what was kept.
    fn restart(&mut self) {
        self.table = after_restart(&self.image, limits());
        self.now = Duration::ZERO;
        for client in self.clients.values_mut() {
            (client.connections, client.lease_end) = (0, Some(LEASE));
        }
        for segment in self.segments.values_mut() {
            (segment.is_held, segment.dirty) = (false, BTreeSet::new());
        }
        self.scrubs.clear();
        self.held = None;
    }

    fn disconnect(&mut self, who: usize) {
        let Some(client) = self.clients.get_mut(&who) else { return };
        if client.connections > 0 {
            self.table.disconnect(ClientNumber(client.number), self.now);
            client.connections -= 1;
            if client.connections == 0 {
                client.lease_end = Some(self.now + LEASE);
            }
        }
    }

    fn end_client(&mut self, who: usize) {
        self.scrubs.extend(self.table.end_client(self.number(who)));
        if let Some(client) = self.clients.remove(&who) {
            self.end_uses(client.number);
        }
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        self.scrubs.extend(self.table.expire(self.now));
        let over = |client: &ModelClient| client.lease_end.is_some_and(|end| end <= self.now);
        let ended: Vec<_> =
            self.clients.iter().filter(|(_, c)| over(c)).map(|(who, _)| *who).collect();
        for who in ended {
            let number = self.number(who).0;
            self.clients.remove(&who);
            self.end_uses(number);
        }
    }

    fn free(&mut self, who: usize, which: usize, first: u32, count: u32) -> Result<(), Refused> {
        let (number, id) = (self.number(who), self.id(which));
        let scrub = self.table.free(number, id, SuperpageNumber(first), count)?;
        let ScrubPart::Superpages { rmmas, .. } = &scrub.part else { panic!() };
        assert_eq!(rmmas.len(), count as usize);
        let segment = self.segments.get_mut(&which).unwrap();
        (first..first + count).for_each(|sma| assert!(segment.smas.remove(&sma)));
        segment.dirty.extend(rmmas);
        self.scrubs.push(scrub);
        Ok(())
    }

    fn attach(&mut self, who: usize, which: usize) -> Result<(), Refused> {
        let (number, token) = (self.number(who), SegmentToken(which as u128));
        let view = self.table.attach(number, token)?;
        assert_eq!(view.segment, self.id(which));
        let uses = &mut self.segments.get_mut(&which).unwrap().uses;
        *uses.entry(number.0).or_default() += 1;
        Ok(())
    }

    fn detach(&mut self, who: usize, which: usize) -> Result<(), Refused> {
        let number = self.number(who);
        let scrub = self.table.detach(number, self.id(which))?;
        self.scrubs.extend(scrub);
        let uses = &mut self.segments.get_mut(&which).unwrap().uses;
        *uses.get_mut(&number.0).unwrap() -= 1;
        if uses[&number.0] == 0 {
            self.end_use(number.0, which);
        }
        Ok(())
    }

    fn create(&mut self, who: usize, span: u32) -> Result<(), Refused> {
        let which = (0..=SEGMENTS).find(|which| !self.segments.contains_key(which)).unwrap();
        let (number, token) = (self.number(who), SegmentToken(which as u128));
        let mut limit = 0;
        let make = |superpages| {
            limit = superpages;
            superpages
        };
        let id = self.table.create_segment(number, span, token, make)?;
        assert_eq!(limit, span.min(QUOTA));
        let uses = BTreeMap::from([(number.0, 1)]);
        let segment = ModelSegment { span, uses, charged: number.0, ..Default::default() };
        self.segments.insert(which, segment);
        self.ids.insert(which, id);
        Ok(())
    }

    fn allocate(
        &mut self,
        who: usize,
        which: usize,
        first: u32,
        count: u32,
    ) -> Result<(), Refused> {
        let (number, id) = (self.number(who), self.id(which));
        let mut pairs = Vec::new();
        let sma = SuperpageNumber(first);
        let limit = self.table.allocate(number, id, sma, count, &mut pairs)?;
        let segment = self.segments.get_mut(&which).unwrap();
        assert!(pairs.iter().map(|pair| pair.sma().0).eq(first..first + count));
        for pair in pairs {
            assert!(pair.rmma().0 < limit, "within the segment's memory");
            assert!(!segment.dirty.contains(&pair.rmma().0), "zeroed before it is given out");
            segment.smas.insert(pair.sma().0);
        }
        Ok(())
    }

    /// Touches the last page of a superpage and the first of the next, unless only one is asked
    /// for.
    fn touch(&mut self, who: usize, which: usize, sma: u32, access: Access) -> Result<(), Refused> {
        let (number, id) = (self.number(who), self.id(which));
        let page = PageNumber(sma * PAGES_PER_SUPERPAGE + PAGES_PER_SUPERPAGE - 2);
        let mut runs = Vec::new();
        let extents = [Extent::page(page), Extent::page(PageNumber(page.0 + 1))];
        let permit = self.table.access(number, id, &extents, access, &mut runs)?;
        assert_eq!(permit.guard.is_some(), access == Access::Write);
        assert_eq!(runs.len(), 1, "neighbours are joined");
        assert_eq!((runs[0].offset_bytes, runs[0].bytes), (4094 * 4096, 2 * 4096));
        Ok(())
    }

    /// Begins a write to some superpage, if there is one, and leaves it unfinished.
    fn hold(&mut self, who: usize, which: usize) {
        let (number, id) = (self.number(who), self.id(which));
        let Some(sma) = self.segments.get(&which).and_then(|s| s.smas.first().copied()) else {
            return;
        };
        let extents = [Extent::page(PageNumber(sma * PAGES_PER_SUPERPAGE))];
        let permit = self.table.access(number, id, &extents, Access::Write, &mut Vec::new());
        if let Ok(permit) = permit {
            self.held = permit.guard;
            self.segments.values_mut().for_each(|segment| segment.is_held = false);
            self.segments.get_mut(&which).unwrap().is_held = true;
        }
    }

    fn end_scrub(&mut self) {
        let scrub = self.scrubs.remove(0);
        if let ScrubPart::Superpages { segment, rmmas } = &scrub.part
            && let Some((which, _)) = self.ids.iter().find(|(_, id)| *id == segment)
        {
            let segment = self.segments.get_mut(which).unwrap();
            rmmas.iter().for_each(|rmma| assert!(segment.dirty.remove(rmma)));
        }
        self.table.scrubbed(scrub.part);
    }

    fn check(&self) {
        let sizes = self.table.sizes();
        assert_eq!(sizes.used_superpages, self.used_superpages());
        assert!(sizes.used_superpages <= CAPACITY);
        assert_eq!((sizes.clients, sizes.segments), (self.clients.len(), self.segments.len()));
        for view in self.table.clients(0, self.now) {
            assert_eq!(view.used_superpages, self.charged_to(view.number.0));
            let uses = |s: &&ModelSegment| s.uses.contains_key(&view.number.0);
            assert_eq!(view.segments, count_u32(self.segments.values().filter(uses).count()));
        }
        for (which, segment) in &self.segments {
            let user = ClientNumber(*segment.uses.keys().next().unwrap());
            let mut pairs = Vec::new();
            self.table.list(user, self.ids[which], 0, 100, &mut pairs).unwrap();
            assert!(pairs.iter().map(|pair| pair.sma().0).eq(segment.smas.iter().copied()));
            let rmmas: BTreeSet<_> = pairs.iter().map(|pair| pair.rmma().0).collect();
            assert_eq!(rmmas.len(), pairs.len(), "no superpage of memory is used twice");
            assert!(rmmas.is_disjoint(&segment.dirty));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_table_does_what_the_model_says(steps in prop::collection::vec(any_step(), 1..300)) {
        let mut pair = Pair::new();
        for step in steps {
            let step = pair.aim(step);
            let expected = pair.expect(&step);
            prop_assert_eq!(pair.take(&step), expected, "{:?}", step);
            for row in pair.table.take_changes() {
                prop_assert_eq!(pair.image.apply(row), Ok(()));
            }
            prop_assert_eq!(&pair.image, &pair.table.image(), "{:?}", step);
            pair.check();
        }
    }
}

#[test]
fn a_lease_runs_only_without_connections_and_to_its_very_end() {
    let mut table: Table<u32> = Table::new(limits());
    let client = table.connect(&hello(1), Origin::User(0)).unwrap().number;
    table.create_segment(client, 4, SegmentToken(1), |superpages| superpages).unwrap();
    assert!(table.expire(Duration::from_secs(3600)).is_empty(), "connected for ever");
    let closed = Duration::from_secs(4000);
    table.disconnect(client, closed);
    assert!(table.expire(closed + LEASE - Duration::from_nanos(1)).is_empty());
    assert_eq!(table.connect(&hello(1), Origin::User(0)).unwrap().number, client, "back in time");
    assert!(table.expire(closed + LEASE * 10).is_empty());
    table.disconnect(client, closed + LEASE * 10);
    assert_eq!(table.expire(closed + LEASE * 11).len(), 1);
    assert_eq!(table.sizes().leases_expired, 1);
    assert_ne!(
        table.connect(&hello(1), Origin::User(0)).unwrap().number,
        client,
        "a new client of the old id"
    );
}

#[test]
fn a_stranger_has_its_share_and_who_is_of_this_host_has_more() {
    let limits = Limits { quota_stranger_superpages: 2, ..limits() };
    let mut table: Table<u32> = Table::new(limits);
    let mut quota_of = |who, wanted: u32, origin| {
        let quota_wanted_bytes = u64::from(wanted) * SUPERPAGE_BYTES;
        let hello = Hello { quota_wanted_bytes, ..hello(who) };
        table.connect(&hello, origin).unwrap().quota_bytes / SUPERPAGE_BYTES
    };
    assert_eq!(quota_of(1, 0, Origin::Network), 2);
    assert_eq!(quota_of(2, 5, Origin::Loopback), 5);
    assert_eq!(quota_of(3, 0, Origin::User(7)), u64::from(QUOTA));
    assert_eq!(quota_of(1, 9, Origin::Loopback), 2, "it is what it was when it began");
}

#[test]
fn a_client_is_its_users_once_one_uses_it() {
    let mut table: Table<u32> = Table::new(limits());
    let keeper = Hello { purpose: Purpose::Keeper, ..hello(1) };
    let mut connect = |hello: &Hello<'_>, origin| {
        table.connect(hello, origin).map(drop).map_err(|refused| refused.code)
    };
    let refused = Err(ErrorCode::NotPermitted);
    assert_eq!(connect(&keeper, Origin::User(ROOT)), Ok(()), "a keeper does not make it root's");
    assert_eq!(connect(&hello(1), Origin::User(7)), Ok(()));
    for origin in [Origin::User(8), Origin::Loopback, Origin::Network] {
        assert_eq!(connect(&hello(1), origin.clone()), refused, "{origin:?}");
        assert_eq!(connect(&keeper, origin.clone()), refused, "{origin:?}");
    }
    assert_eq!(connect(&hello(1), Origin::User(7)), Ok(()));
    assert_eq!(connect(&hello(1), Origin::User(ROOT)), Ok(()));
    assert_eq!(connect(&keeper, Origin::User(ROOT)), Ok(()));
    // One over TCP is bound to nobody: it is not known who asks.
    assert_eq!(connect(&hello(2), Origin::Network), Ok(()));
    assert_eq!(connect(&hello(2), Origin::Loopback), Ok(()));
}

/// The client may write to the segment's other superpages while none is found for the new ones.
#[test]
fn an_allocation_without_memory_is_undone_under_a_write() {
    let mut table: Table<u32> = Table::new(limits());
    let client = table.connect(&hello(1), Origin::User(0)).unwrap().number;
    let id = table.create_segment(client, 4, SegmentToken(1), |count| count).unwrap();
    let allocate = |table: &mut Table<u32>, first, count| {
        table.allocate(client, id, SuperpageNumber(first), count, &mut Vec::new()).unwrap();
    };
    allocate(&mut table, 0, 1);
    let extents = [Extent::page(PageNumber(0))];
    let write = table.access(client, id, &extents, Access::Write, &mut Vec::new()).unwrap();
    allocate(&mut table, 1, 2);
    let in_use = table.free(client, id, SuperpageNumber(1), 2).map(drop);
    assert_eq!(in_use.unwrap_err().code, ErrorCode::InUse);
    let scrub = table.undo_allocate(client, id, SuperpageNumber(1), 2).unwrap();
    table.scrubbed(scrub.part);
    assert_eq!(table.sizes().used_superpages, 1);
    allocate(&mut table, 1, 2);
    drop(write);
}
