//! Grants against a plain model: what each may and does use, its clients, the epochs it admits.

use super::tests::after_restart;
use super::*;
use farpool_wire::{Grant, GrantKey, Hello, SuperpageNumber};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const CAPACITY: u32 = 16;
const GRANTS: u8 = 3;
const CLIENTS: u8 = 5;
const SPAN: u32 = 8;

fn limits() -> Limits {
    Limits {
        capacity_superpages: CAPACITY,
        quota_default_superpages: CAPACITY,
        quota_limit_superpages: CAPACITY,
        quota_stranger_superpages: 1,
        lease: Duration::from_millis(100),
        clients: 100,
        segments: 100,
        require_grants: true,
    }
}

fn table() -> Table<u32> {
    let mut table = Table::new(limits());
    table.record_changes();
    table
}

/// Each epoch of a grant has a key of its own, except that epochs 2 and 3 share one.
fn key(grant: u8, epoch: u64) -> GrantKey {
    let turn = if epoch == 3 { 2 } else { epoch };
    GrantKey(u128::from(grant) * 1000 + u128::from(turn) + 1)
}

fn id(grant: u8) -> GrantId {
    GrantId(u128::from(grant))
}

fn spec(grant: u8, epoch: u64, superpages: u32) -> GrantSpec {
    GrantSpec {
        id: id(grant),
        epoch,
        key: key(grant, epoch),
        bytes: u64::from(superpages) * SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    }
}

fn hello(who: u8, grant: Option<(u8, u64)>) -> Hello<'static> {
    let grant = grant.map(|(grant, epoch)| Grant { key: key(grant, epoch), epoch });
    Hello { grant, ..Hello::first(ClientId(u128::from(who)), "") }
}

#[derive(Clone, Debug)]
enum Step {
    Set(u8, u64, u32),
    Revoke(u8, u64),
    Connect(u8, Option<(u8, u64)>),
    Goodbye(u8),
    Allocate(u8, u32, u32),
    Free(u8, u32),
    Share(u8, u8),
    Capacity(u32),
    Scrub,
    Restart,
}

fn any_step() -> impl Strategy<Value = Step> {
    let (grant, epoch, who) = (0..GRANTS, 1..5u64, 0..CLIENTS);
    let shown = prop::option::weighted(0.9, (grant.clone(), epoch.clone()));
    prop_oneof![
        4 => (grant.clone(), epoch.clone(), 1..8u32).prop_map(|(g, e, n)| Step::Set(g, e, n)),
        1 => (grant, epoch).prop_map(|(g, e)| Step::Revoke(g, e)),
        6 => (who.clone(), shown).prop_map(|(c, shown)| Step::Connect(c, shown)),
        1 => who.clone().prop_map(Step::Goodbye),
        8 => (who.clone(), 0..SPAN, 1..4u32).prop_map(|(c, at, n)| Step::Allocate(c, at, n)),
        3 => (who.clone(), 0..SPAN).prop_map(|(c, at)| Step::Free(c, at)),
        2 => (who.clone(), who).prop_map(|(one, other)| Step::Share(one, other)),
        1 => (0..=CAPACITY).prop_map(Step::Capacity),
        2 => Just(Step::Scrub),
        1 => Just(Step::Restart),
    ]
}

#[derive(Clone, Debug, Default)]
struct ModelGrant {
    /// Epoch and superpages, while it exists.
    given: Option<(u64, u32)>,
    ended: u64,
    /// The epoch of the previous key, if that was another one.
    before: Option<u64>,
}

#[derive(Clone, Debug)]
struct ModelClient {
    number: ClientNumber,
    grant: u8,
    segment: SegmentId,
    superpages: Vec<u32>,
    /// A segment of its own that another client uses too.
    shared: Option<(SegmentToken, u32)>,
}

struct Pair {
    table: Table<u32>,
    grants: Vec<ModelGrant>,
    clients: BTreeMap<u8, ModelClient>,
    capacity: u32,
    scrubs: Vec<Scrub<u32>>,
    next_token: u128,
    /// What the changes of the table add up to.
    image: Image,
}

impl Pair {
    fn used(&self, grant: u8) -> u32 {
        let of_grant = self.clients.values().filter(|client| client.grant == grant);
        of_grant.map(|c| count_u32(c.superpages.len()) + c.shared.map_or(0, |(_, n)| n)).sum()
    }

    fn scrubbing(&self) -> u32 {
        self.scrubs.iter().map(|scrub| scrub.part.superpages()).sum()
    }

    fn set(&mut self, grant: u8, epoch: u64, superpages: u32) {
        let model = &mut self.grants[usize::from(grant)];
        let given_epoch = model.given.map_or(0, |(epoch, _)| epoch);
        let expected = if model.ended >= epoch && model.ended > 0 {
            Err(GrantError::Stale { epoch: model.ended })
        } else if given_epoch > epoch {
            Err(GrantError::Stale { epoch: given_epoch })
        } else {
            Ok(())
        };
        let set = self.table.set_grant(&spec(grant, epoch, superpages), Duration::ZERO);
        assert_eq!(set, expected);
        if set.is_ok() {
            if given_epoch > 0 && key(grant, given_epoch) != key(grant, epoch) {
                model.before = Some(given_epoch);
            }
            model.given = Some((epoch, superpages));
        }
    }

    fn revoke(&mut self, grant: u8, epoch: u64) {
        let used = self.used(grant);
        let model = &mut self.grants[usize::from(grant)];
        let known = model.given.map_or(0, |(epoch, _)| epoch).max(model.ended);
        let check = self.table.check_end_grant(id(grant), epoch);
        if known > epoch {
            assert_eq!(check, Err(GrantError::Stale { epoch: known }));
            return;
        }
        assert_eq!(check, Ok(()));
        *model = ModelGrant { given: None, ended: epoch, before: None };
        self.table.close_grant(id(grant));
        let (clients, scrubs) = self.table.end_grant(id(grant), epoch);
        let before = self.clients.len();
        self.clients.retain(|_, client| client.grant != grant);
        assert_eq!(clients as usize, before - self.clients.len());
        let freed: u32 = scrubs.iter().map(|scrub| scrub.part.superpages()).sum();
        assert_eq!(freed, used, "exactly what its clients had");
        self.scrubs.extend(scrubs);
    }

    fn expect_connect(&self, who: u8, shown: Option<(u8, u64)>) -> Result<(), Refused> {
        let not_granted = Err(Refused::new(ErrorCode::NotGranted, 0));
        let Some((grant, epoch)) = shown else {
            return not_granted;
        };
        let model = &self.grants[usize::from(grant)];
        let Some((current, _)) = model.given else {
            return not_granted;
        };
        let shown_key = key(grant, epoch);
        let is_current = shown_key == key(grant, current);
        let is_before = model.before.is_some_and(|before| key(grant, before) == shown_key);
        match () {
            () if !is_current && !is_before => not_granted,
            () if !is_current || epoch < current => {
                Err(Refused::new(ErrorCode::StaleEpoch, current))
            }
            () if epoch > current => not_granted,
            () if self.clients.get(&who).is_some_and(|client| client.grant != grant) => not_granted,
            () => Ok(()),
        }
    }

    fn connect(&mut self, who: u8, shown: Option<(u8, u64)>) {
        let expected = self.expect_connect(who, shown);
        let connected = self.table.connect(&hello(who, shown), Origin::User(0));
        assert_eq!(connected.as_ref().map(drop).map_err(|refused| *refused), expected);
        let (Ok(connected), Some((grant, epoch))) = (connected, shown) else {
            return;
        };
        let pass = connected.grant.unwrap();
        assert_eq!((pass.id, pass.epoch), (id(grant), epoch));
        assert_eq!(self.table.recheck_grant(&pass), Ok(()));
        if !self.clients.contains_key(&who) {
            let number = connected.number;
            let token = self.token();
            let segment = self.table.create_segment(number, SPAN, token, |n| n).unwrap();
            let client =
                ModelClient { number, grant, segment, superpages: Vec::new(), shared: None };
            self.clients.insert(who, client);
        }
    }

    fn token(&mut self) -> SegmentToken {
        self.next_token += 1;
        SegmentToken(self.next_token)
    }

    fn allocate(&mut self, who: u8, first: u32, count: u32) {
        let Some(client) = self.clients.get(&who) else {
            return;
        };
        let range = first..(first + count).min(SPAN);
        let count = range.end - range.start;
        if range.clone().any(|sma| client.superpages.contains(&sma)) {
            return;
        }
        let used_by_all = (0..GRANTS).map(|grant| self.used(grant)).sum::<u32>();
        let (_, quota) = self.grants[usize::from(client.grant)].given.unwrap();
        let fits_blade = used_by_all + self.scrubbing() + count <= self.capacity;
        let fits_grant = self.used(client.grant) + count <= quota;
        let first = SuperpageNumber(first);
        let (number, segment) = (client.number, client.segment);
        let allocated = self.table.allocate(number, segment, first, count, &mut Vec::new());
        match allocated {
            Ok(_) => {
                assert!(fits_blade && fits_grant, "more than is granted, or than there is");
                self.clients.get_mut(&who).unwrap().superpages.extend(range);
            }
            Err(Refused { code: ErrorCode::QuotaExceeded, detail }) => {
                assert!(fits_blade && !fits_grant);
                assert_eq!(detail, u64::from(quota) * SUPERPAGE_BYTES);
            }
            // The segment's own memory may be waiting to be zeroed too.
            Err(refused) => assert_eq!(refused.code, ErrorCode::BladeFull),
        }
    }

    fn free(&mut self, who: u8, sma: u32) {
        let Some(client) = self.clients.get_mut(&who) else {
            return;
        };
        if let Some(at) = client.superpages.iter().position(|had| *had == sma) {
            client.superpages.remove(at);
            let first = SuperpageNumber(sma);
            let scrub = self.table.free(client.number, client.segment, first, 1).unwrap();
            self.scrubs.push(scrub);
        }
    }

    /// One client freezes a segment of its own, the other attaches: only under the same grant.
    fn share(&mut self, one: u8, other: u8) {
        let (Some(giver), Some(taker)) = (self.clients.get(&one), self.clients.get(&other)) else {
            return;
        };
        if giver.shared.is_some() || one == other {
            return;
        }
        let (giver, taker) = (giver.clone(), taker.clone());
        let token = self.token();
        let segment = self.table.create_segment(giver.number, 1, token, |n| n).unwrap();
        let allocated =
            self.table.allocate(giver.number, segment, SuperpageNumber(0), 1, &mut Vec::new());
        self.table.freeze(giver.number, segment).unwrap();
        let attached = self.table.attach(taker.number, token);
        let superpages = u32::from(allocated.is_ok());
        if giver.grant != taker.grant {
            assert_eq!(attached, Err(Refused::new(ErrorCode::UnknownSegment, 0)));
        } else {
            attached.unwrap();
            // Once its maker detaches, it is charged to the other client.
            assert!(self.table.detach(giver.number, segment).unwrap().is_none());
            self.scrubs.extend(self.table.detach(taker.number, segment).unwrap());
            return;
        }
        self.clients.get_mut(&one).unwrap().shared = Some((token, superpages));
    }

    /// The blade's process ends, and another one goes on with what was kept.
    fn restart(&mut self) {
        let specs = self.table.grant_specs();
        self.table = after_restart(&self.image, limits());
        self.table.set_capacity(self.capacity);
        assert_eq!(self.table.grant_specs(), specs);
        self.scrubs.clear();
    }

    fn check(&mut self) {
        for row in self.table.take_changes() {
            self.image.apply(row).unwrap();
        }
        assert_eq!(self.image, self.table.image());
        for stat in self.table.grants() {
            let grant = u8::try_from(stat.id.0).unwrap();
            let (epoch, superpages) = self.grants[usize::from(grant)].given.unwrap();
            assert_eq!(stat.epoch, epoch);
            assert_eq!(stat.granted_bytes, u64::from(superpages) * SUPERPAGE_BYTES);
            assert_eq!(stat.used_bytes, u64::from(self.used(grant)) * SUPERPAGE_BYTES);
            let clients = self.clients.values().filter(|client| client.grant == grant).count();
            assert_eq!(stat.clients as usize, clients);
        }
        let given = self.grants.iter().filter(|grant| grant.given.is_some()).count();
        assert_eq!(self.table.grants().len(), given);
        let used: u32 = (0..GRANTS).map(|grant| self.used(grant)).sum();
        assert_eq!(self.table.sizes().used_superpages, used + self.scrubbing());
        assert_eq!(self.table.sizes().clients, self.clients.len());
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Set(grant, epoch, superpages) => self.set(grant, epoch, superpages),
            Step::Revoke(grant, epoch) => self.revoke(grant, epoch),
            Step::Connect(who, shown) => self.connect(who, shown),
            Step::Goodbye(who) => {
                if let Some(client) = self.clients.remove(&who) {
                    self.scrubs.extend(self.table.end_client(client.number));
                }
            }
            Step::Allocate(who, first, count) => self.allocate(who, first, count),
            Step::Free(who, sma) => self.free(who, sma),
            Step::Share(one, other) => self.share(one, other),
            Step::Capacity(superpages) => {
                self.table.set_capacity(superpages);
                self.capacity = superpages;
            }
            Step::Scrub => {
                self.scrubs.drain(..).for_each(|scrub| self.table.scrubbed(scrub.part));
            }
            Step::Restart => self.restart(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn grants_do_what_the_model_says(steps in prop::collection::vec(any_step(), 1..200)) {
        let table = table();
        let mut pair = Pair {
            image: table.image(),
            table,
            grants: vec![ModelGrant::default(); usize::from(GRANTS)],
            clients: BTreeMap::new(),
            capacity: CAPACITY,
            scrubs: Vec::new(),
            next_token: 0,
        };
        for step in steps {
            pair.take(&step);
            pair.check();
        }
    }
}

#[test]
fn orders_that_cannot_be_change_nothing() {
    let mut table = table();
    let now = Duration::ZERO;
    table.set_grant(&spec(0, 1, 4), now).unwrap();
    let no_key = GrantSpec { key: GrantKey(0), ..spec(1, 1, 4) };
    assert_eq!(table.set_grant(&no_key, now), Err(GrantError::NoKey));
    let taken = GrantSpec { key: key(0, 1), ..spec(1, 1, 4) };
    assert_eq!(table.set_grant(&taken, now), Err(GrantError::KeyTaken));
    let changed = GrantSpec { key: key(0, 2), ..spec(0, 1, 4) };
    assert_eq!(table.set_grant(&changed, now), Err(GrantError::KeyChanged));
    assert_eq!(table.grants().len(), 1);
}

#[test]
fn who_is_on_the_way_in_while_a_grant_changes_is_found_out() {
    let mut table = table();
    let now = Duration::ZERO;
    table.set_grant(&spec(0, 1, 4), now).unwrap();
    let pass = table.connect(&hello(1, Some((0, 1))), Origin::User(0)).unwrap().grant.unwrap();
    assert_eq!(pass.traffic.read.limit(), None, "no limit was given");
    let limited = GrantSpec { read_bytes_per_s: 5 << 20, ..spec(0, 1, 4) };
    table.set_grant(&limited, now).unwrap();
    assert_eq!(pass.traffic.read.limit().unwrap().bytes_per_s, 5 << 20, "the same traffic");
    assert_eq!(pass.traffic.rates_version.load(Ordering::Relaxed), 2);
    table.set_grant(&spec(0, 2, 4), now).unwrap();
    assert_eq!(table.recheck_grant(&pass), Err(Refused::new(ErrorCode::StaleEpoch, 2)));
    table.close_grant(id(0));
    assert_eq!(table.recheck_grant(&pass), Err(Refused::new(ErrorCode::NotGranted, 0)));
}
