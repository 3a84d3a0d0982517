//! The ledger against a plain model: who has which grant, which went back, how much is wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use farpool_acms::{Class, Epoch, GrantId, GrantKey, Incarnation, NodeId};
use farpool_api::{
    ClientId, ClientReport, ClientSegmentUse, ClientSpec, SegmentId, SegmentSpec, SegmentState,
};
use farpool_peer::ledger::{
    Effect, GRANTS_IN_USE_MAX, HERE_PATIENCE, HerePlace, Ledger, LedgerError, Placement,
    Surroundings, WISH_PATIENCE, segment_of,
};
use proptest::prelude::*;

const SUPERPAGE: u64 = 16 << 20;
const LEASE_MS: u64 = 10_000;

fn client(number: u8) -> ClientId {
    ClientId::from_u128(u128::from(number) + 1)
}

fn spec(number: u8) -> ClientSpec {
    let name = format!("program {number}");
    ClientSpec { host: "b".into(), name, pid: 1, lease_ms: LEASE_MS, tenant: None }
}

fn grant(number: u32) -> GrantId {
    GrantId { server: NodeId(7), epoch: Epoch(3 << 32 | u64::from(number)) }
}

fn placement(bytes: u64) -> Placement {
    let blade = SocketAddr::from(([10, 0, 0, 7], 7070));
    Placement { blade: Some(blade), key: GrantKey(5), bytes }
}

fn here() -> HerePlace {
    HerePlace { node: "b".into(), addresses: vec!["unix:///blade".into()] }
}

/// A ledger, and a plain model of it.
struct World {
    ledger: Ledger,
    now: Duration,
    around: Surroundings,
    wishes: u128,
    grants: u32,
    sequences: BTreeMap<ClientId, u64>,
    /// The first program that had each grant.
    owners: BTreeMap<GrantId, ClientId>,
    /// Grants of others that the protocol has.
    standing: BTreeMap<GrantId, u64>,
    /// Grants on this node's blade.
    given_here: BTreeMap<GrantId, u64>,
    alive: BTreeMap<ClientId, Duration>,
    lost: BTreeSet<GrantId>,
}

impl World {
    fn new() -> Self {
        let around = Surroundings { class: Class::Neutral, here_limit_bytes: 0 };
        World {
            ledger: Ledger::new(Incarnation(9)),
            now: Duration::from_secs(1),
            around,
            wishes: 0,
            grants: 0,
            sequences: BTreeMap::new(),
            owners: BTreeMap::new(),
            standing: BTreeMap::new(),
            given_here: BTreeMap::new(),
            alive: BTreeMap::new(),
            lost: BTreeSet::new(),
        }
    }

    fn come(&mut self, number: u8) {
        let id = client(number);
        let is_new = self.ledger.put_client(id, spec(number), self.now).unwrap();
        assert_eq!(is_new, !self.alive.contains_key(&id));
        self.alive.insert(id, self.now);
        if is_new {
            self.sequences.remove(&id);
        }
        self.settle();
    }

    fn wish(&mut self, number: u8, bytes: u64) -> Result<(), LedgerError> {
        self.wishes += 1;
        let spec = SegmentSpec::of_client(client(number), bytes);
        let wished = self.ledger.wish(SegmentId::from_u128(self.wishes), &spec, self.now);
        self.settle();
        wished.map(drop)
    }

    fn lend(&mut self, bytes: u64) -> Option<ClientId> {
        self.grants += 1;
        let grant = grant(self.grants);
        self.standing.insert(grant, bytes);
        let owner = self.ledger.usable(grant, placement(bytes), self.now);
        if let Some(owner) = owner {
            self.owners.insert(grant, owner);
        }
        self.settle();
        assert_eq!(owner.is_some(), self.standing.contains_key(&grant), "with somebody, or back");
        owner
    }

    fn reclaim(&mut self, grant: GrantId) {
        self.ledger.move_out(grant, Some(self.now + Duration::from_secs(10)));
        self.settle();
    }

    fn lose(&mut self, grant: GrantId) {
        self.standing.remove(&grant);
        if self.ledger.lost(grant).is_some() {
            self.lost.insert(grant);
        }
        self.settle();
    }

    /// Sends one report. If `has_left`, it says that all grants to be left were left.
    fn report(&mut self, number: u8, has_left: bool) {
        let id = client(number);
        let Ok(answer) = self.ledger.answer(id, &here(), self.now) else { return };
        let sequence = self.sequences.entry(id).or_insert(0);
        *sequence += 1;
        let of = |segment: &farpool_api::ClientSegment| ClientSegmentUse {
            id: segment.id,
            used_bytes: segment.place.bytes / 2,
            epoch: segment.epoch,
            evacuated: has_left && segment.leave,
        };
        let segments = answer.segments.iter().map(of).collect();
        let report = ClientReport { sequence: *sequence, segments, ..ClientReport::default() };
        self.ledger.report(id, &report, self.now).unwrap();
        self.alive.insert(id, self.now);
        self.settle();
    }

    fn end(&mut self, number: u8) {
        self.ledger.end_client(client(number));
        self.alive.remove(&client(number));
        self.settle();
    }

    fn settle(&mut self) {
        let mut key = 0;
        let mut fresh = || {
            key += 1;
            GrantKey(key)
        };
        self.ledger.settle(self.around, self.now, &mut fresh);
        while let Some(effect) = self.ledger.poll_effect() {
            match effect {
                Effect::Evacuated(grant) => {
                    assert!(self.standing.remove(&grant).is_some(), "back once, and not if lost");
                }
                Effect::GiveHere { grant, bytes, .. } => {
                    assert!(bytes > 0 && bytes.is_multiple_of(SUPERPAGE));
                    assert!(self.given_here.insert(grant, bytes).is_none(), "a new epoch");
                    let given: u64 = self.given_here.values().sum();
                    assert!(given <= self.around.here_limit_bytes, "never above the limit");
                    assert_ne!(self.around.class, Class::Client, "a client has nothing to give");
                }
                Effect::EndHere(grant) => {
                    assert!(self.given_here.remove(&grant).is_some(), "ended once");
                }
                Effect::Silent(id) => {
                    let heard = self.alive.remove(&id).expect("it was there");
                    assert!(self.now - heard > Duration::from_millis(LEASE_MS));
                }
            }
        }
        self.check();
    }

    /// Compares the answers to each program with the effects so far.
    fn check(&mut self) {
        let mut seen = BTreeSet::new();
        let mut ready_elsewhere = 0;
        let mut far = 0;
        for id in self.alive.keys() {
            let answer = self.ledger.answer(*id, &here(), self.now).unwrap();
            for segment in &answer.segments {
                let grant = GrantId {
                    server: NodeId(u64::try_from(segment.id.0.as_u128() >> 64).unwrap()),
                    epoch: Epoch(segment.epoch),
                };
                assert_eq!(segment_of(grant), segment.id);
                assert!(seen.insert(grant), "one grant, one program");
                let first = *self.owners.entry(grant).or_insert(*id);
                assert_eq!(first, *id, "never another's than the first one's");
                let is_there =
                    self.standing.contains_key(&grant) || self.given_here.contains_key(&grant);
                assert_eq!(is_there, segment.state != SegmentState::Lost);
                assert_eq!(self.lost.contains(&grant), !is_there);
                let is_elsewhere = grant.server != NodeId::ANYONE;
                ready_elsewhere += match segment.state {
                    SegmentState::Ready if is_elsewhere => segment.place.bytes,
                    _ => 0,
                };
                far += if is_elsewhere { segment.place.bytes } else { 0 };
            }
            let ready = |it: &&farpool_api::ClientSegment| it.state == SegmentState::Ready;
            assert!(answer.segments.iter().filter(ready).count() <= GRANTS_IN_USE_MAX);
        }
        let unowned = self.standing.keys().chain(self.given_here.keys());
        assert!(unowned.into_iter().all(|grant| seen.contains(grant)), "none is forgotten");
        assert!(self.ledger.demand_bytes() >= ready_elsewhere, "what is used is wanted");
        assert_eq!(self.ledger.here_bytes(), self.given_here.values().sum::<u64>());
        assert!(self.ledger.far_bytes() <= far);
        assert_eq!(self.ledger.client_count(), self.alive.len());
    }

    fn segment_count(&self, number: u8, state: SegmentState) -> usize {
        let answer = self.ledger.answer(client(number), &here(), self.now).unwrap();
        answer.segments.iter().filter(|segment| segment.state == state).count()
    }

    fn serve(&mut self, class: Class, limit: u64) {
        self.around = Surroundings { class, here_limit_bytes: limit };
        self.settle();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Come(u8),
    Wish(u8, u64),
    Lend(u64),
    Reclaim(usize),
    Lose(usize),
    Report(u8, bool),
    End(u8),
    Wait(u64),
    Around(u8, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let superpages = 1_u64..12;
    prop_oneof![
        2 => (0_u8..4).prop_map(Step::Come),
        3 => (0_u8..4, superpages.clone()).prop_map(|(who, n)| Step::Wish(who, n * SUPERPAGE - 5)),
        4 => superpages.prop_map(|n| Step::Lend(n * SUPERPAGE)),
        2 => (0_usize..8).prop_map(Step::Reclaim),
        1 => (0_usize..8).prop_map(Step::Lose),
        4 => (0_u8..4, any::<bool>()).prop_map(|(who, left)| Step::Report(who, left)),
        1 => (0_u8..4).prop_map(Step::End),
        2 => (0_u64..4_000).prop_map(Step::Wait),
        2 => (0_u8..3, 0_u64..64).prop_map(|(class, n)| Step::Around(class, n * SUPERPAGE)),
    ]
}

proptest! {
    #[test]
    fn no_grant_is_shared_forgotten_or_given_back_twice(
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Come(who) => world.come(who),
                Step::Wish(who, bytes) => drop(world.wish(who, bytes)),
                Step::Lend(bytes) => drop(world.lend(bytes)),
                Step::Reclaim(at) => {
                    let grant = world.standing.keys().nth(at).copied();
                    grant.into_iter().for_each(|grant| world.reclaim(grant));
                }
                Step::Lose(at) => {
                    let grant = world.standing.keys().nth(at).copied();
                    grant.into_iter().for_each(|grant| world.lose(grant));
                }
                Step::Report(who, has_left) => world.report(who, has_left),
                Step::End(who) => world.end(who),
                Step::Wait(ms) => {
                    world.now += Duration::from_millis(ms);
                    world.settle();
                }
                Step::Around(class, limit) => {
                    let class = [Class::Server, Class::Neutral, Class::Client][usize::from(class)];
                    // Grants here never exceed the limit at the time they were made.
                    let limit = limit.max(world.given_here.values().sum());
                    world.serve(class, limit);
                }
            }
        }
        (0..4).for_each(|who| world.end(who));
        prop_assert!(world.standing.is_empty() && world.given_here.is_empty());
        prop_assert_eq!(world.ledger.demand_bytes(), 0);
    }
}

#[test]
fn a_wish_becomes_demand_and_a_grant_goes_whole_to_who_misses_most() {
    let mut world = World::new();
    world.come(0);
    world.come(1);
    world.wish(0, 4 * SUPERPAGE).unwrap();
    world.wish(1, 6 * SUPERPAGE - 1).unwrap();
    assert_eq!(world.ledger.demand_bytes(), 10 * SUPERPAGE);
    assert_eq!(world.lend(8 * SUPERPAGE), Some(client(1)), "whole, though it wants 6");
    assert_eq!(world.ledger.demand_bytes(), 12 * SUPERPAGE, "the other still wants 4");
    assert_eq!(world.lend(4 * SUPERPAGE), Some(client(0)));
    assert_eq!(world.lend(SUPERPAGE), None, "nobody misses anything");
}

#[test]
fn the_same_wish_counts_once_and_an_open_one_is_not_doubled() {
    let mut world = World::new();
    world.come(0);
    let (id, spec) = (SegmentId::from_u128(99), SegmentSpec::of_client(client(0), SUPERPAGE));
    assert!(world.ledger.wish(id, &spec, world.now).unwrap().is_new);
    assert!(!world.ledger.wish(id, &spec, world.now).unwrap().is_new);
    let other = SegmentSpec::of_client(client(0), 2 * SUPERPAGE);
    let changed = world.ledger.wish(id, &other, world.now);
    assert!(matches!(changed, Err(LedgerError::Changed(_))));
    world.wish(0, SUPERPAGE).unwrap();
    assert_eq!(world.ledger.demand_bytes(), SUPERPAGE, "asked again, because nothing came yet");
    world.lend(SUPERPAGE);
    world.wish(0, SUPERPAGE).unwrap();
    assert_eq!(world.ledger.demand_bytes(), 2 * SUPERPAGE, "on top of what it has");
}

#[test]
fn a_wish_after_one_that_waited_in_vain_is_refused_and_the_demand_stays() {
    let mut world = World::new();
    world.come(0);
    world.wish(0, SUPERPAGE).unwrap();
    world.now += WISH_PATIENCE;
    assert!(matches!(world.wish(0, SUPERPAGE), Err(LedgerError::NoRoom { .. })));
    assert_eq!(world.ledger.demand_bytes(), SUPERPAGE);
    assert_eq!(world.lend(SUPERPAGE), Some(client(0)));
    world.wish(0, SUPERPAGE).unwrap();
}

#[test]
fn what_is_reclaimed_is_wanted_again_at_once_and_goes_back_when_it_was_left() {
    let mut world = World::new();
    world.come(0);
    world.wish(0, 4 * SUPERPAGE).unwrap();
    world.lend(4 * SUPERPAGE);
    let first = grant(1);
    world.reclaim(first);
    assert_eq!(world.ledger.demand_bytes(), 4 * SUPERPAGE);
    world.lend(4 * SUPERPAGE);
    world.report(0, false);
    assert!(world.standing.contains_key(&first), "it has not been left yet");
    world.report(0, true);
    assert!(!world.standing.contains_key(&first));
    assert_eq!(world.segment_count(0, SegmentState::Ready), 1);
}

#[test]
fn the_silent_lose_their_grants_after_their_lease() {
    let mut world = World::new();
    world.come(0);
    world.wish(0, SUPERPAGE).unwrap();
    world.lend(SUPERPAGE);
    world.now += Duration::from_millis(LEASE_MS);
    world.settle();
    assert_eq!(world.standing.len(), 1);
    world.now += Duration::from_millis(1);
    world.settle();
    assert!(world.standing.is_empty() && world.alive.is_empty());
}

#[test]
fn a_server_gives_its_programs_its_own_memory_as_far_as_it_goes() {
    let mut world = World::new();
    world.serve(Class::Server, 10 * SUPERPAGE);
    world.come(0);
    world.come(1);
    world.wish(0, 8 * SUPERPAGE).unwrap();
    assert_eq!(world.ledger.here_bytes(), 8 * SUPERPAGE);
    assert_eq!(world.ledger.demand_bytes(), 0);
    world.wish(1, 8 * SUPERPAGE).unwrap();
    assert_eq!(world.ledger.here_bytes(), 8 * SUPERPAGE, "2 superpages are no piece worth a place");
    world.serve(Class::Server, 12 * SUPERPAGE);
    assert_eq!(world.ledger.here_bytes(), 12 * SUPERPAGE);
    assert_eq!(world.ledger.demand_bytes(), 4 * SUPERPAGE, "the rest is wanted, once it may");
}

#[test]
fn a_node_that_became_a_client_leaves_its_own_memory_when_others_took_over() {
    let mut world = World::new();
    world.serve(Class::Server, 10 * SUPERPAGE);
    world.come(0);
    world.wish(0, 8 * SUPERPAGE).unwrap();
    world.serve(Class::Client, 10 * SUPERPAGE);
    assert_eq!(world.ledger.demand_bytes(), 8 * SUPERPAGE, "wanted from others now");
    assert_eq!(world.segment_count(0, SegmentState::Moving), 0, "and kept until it comes");
    world.lend(4 * SUPERPAGE);
    assert_eq!(world.segment_count(0, SegmentState::Moving), 0);
    world.lend(4 * SUPERPAGE);
    assert_eq!(world.segment_count(0, SegmentState::Moving), 1);
    world.report(0, true);
    assert_eq!(world.ledger.here_bytes(), 0);
}

#[test]
fn a_neutral_node_asks_others_first_and_then_gives_its_own() {
    let mut world = World::new();
    world.serve(Class::Neutral, 10 * SUPERPAGE);
    world.come(0);
    world.wish(0, 8 * SUPERPAGE).unwrap();
    assert_eq!((world.ledger.here_bytes(), world.ledger.demand_bytes()), (0, 8 * SUPERPAGE));
    world.now += HERE_PATIENCE;
    world.settle();
    assert_eq!((world.ledger.here_bytes(), world.ledger.demand_bytes()), (8 * SUPERPAGE, 0));
}

#[test]
fn bad_requests_change_nothing() {
    let mut world = World::new();
    let of = |bytes| SegmentSpec::of_client(client(0), bytes);
    let wish = |world: &mut World, spec: &SegmentSpec| {
        world.ledger.wish(SegmentId::from_u128(1), spec, world.now)
    };
    assert!(matches!(wish(&mut world, &of(1)), Err(LedgerError::NoSuchClient(_))));
    world.come(0);
    for bytes in [0, u64::MAX] {
        assert!(matches!(wish(&mut world, &of(bytes)), Err(LedgerError::Size { .. })));
    }
    let nobody = SegmentSpec { client: None, host: Some("b".into()), ..of(1) };
    assert!(matches!(wish(&mut world, &nobody), Err(LedgerError::NoClient)));
    let apart = SegmentSpec { apart: true, ..of(1) };
    assert!(matches!(wish(&mut world, &apart), Err(LedgerError::Apart)));
    for bad in [
        ClientSpec { name: String::new(), ..spec(1) },
        ClientSpec { host: "h".repeat(257), ..spec(1) },
        ClientSpec { lease_ms: 999, ..spec(1) },
    ] {
        assert!(world.ledger.put_client(client(1), bad, world.now).is_err());
    }
    let report = ClientReport { sequence: 1, ..ClientReport::default() };
    assert!(world.ledger.report(client(1), &report, world.now).is_err());
    assert_eq!(world.ledger.demand_bytes(), 0);
}
