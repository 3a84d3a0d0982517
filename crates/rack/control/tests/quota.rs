//! Quotas against a plain model: sizes that are no whole superpages, segments that shrink and grow
//! again before their node has let go, and the limit that is changed meanwhile.

use std::collections::BTreeMap;

use farpool_api::{
    ClientId, ClientSpec, NodeAnswer, NodeGrantUse, NodeReport, NodeSpec, SegmentId, SegmentSpec,
    TenantSpec,
};
use farpool_control::model::{Command, Condition, Records, State};
use proptest::prelude::*;

const SUPERPAGE: u64 = 16 << 20;
/// Superpages of the only node: more than any sequence of steps takes.
const PLENTY: u64 = 10_000;
const TENANT: &str = "t";

#[derive(Debug, Clone)]
enum Step {
    /// Creates a segment, or gives it this size in bytes.
    Put(u8, u64),
    Delete(u8),
    Quota(Option<u64>),
    /// The node carries out what it was told, and reports it.
    Settle,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![
        (1..6u64).prop_map(|count| count * SUPERPAGE),
        (1..6u64).prop_map(|count| count * SUPERPAGE + 1),
        1..5 * SUPERPAGE,
    ];
    let step = prop_oneof![
        8 => (0..6u8, bytes.clone()).prop_map(|(id, bytes)| Step::Put(id, bytes)),
        2 => (0..6u8).prop_map(Step::Delete),
        2 => proptest::option::of(bytes.prop_map(|bytes| bytes * 3)).prop_map(Step::Quota),
        3 => Just(Step::Settle),
    ];
    proptest::collection::vec(step, 1..40)
}

/// What a segment has: superpages that are reserved, of which it may use some.
#[derive(Debug, Clone, Copy)]
struct Has {
    reserved: u64,
    size: u64,
}

/// The plain model: a quota counts whole superpages that are reserved.
#[derive(Debug, Default)]
struct Plain {
    quota: Option<u64>,
    segments: BTreeMap<u8, Has>,
    /// Deleted, and not let go of by the node: their ids are taken.
    going: Vec<u8>,
}

impl Plain {
    fn reserved(&self) -> u64 {
        self.segments.values().map(|has| has.reserved).sum()
    }

    /// Puts a segment. Returns whether that is allowed.
    fn put(&mut self, id: u8, bytes: u64) -> bool {
        let size = bytes.div_ceil(SUPERPAGE);
        if self.going.contains(&id) {
            return false;
        }
        let before = self.segments.get(&id).map_or(0, |has| has.reserved);
        let more = size.saturating_sub(before);
        let whole = |quota: u64| quota / SUPERPAGE;
        if more > 0 && self.quota.is_some_and(|quota| self.reserved() + more > whole(quota)) {
            return false;
        }
        self.segments.insert(id, Has { reserved: before.max(size), size });
        true
    }
}

struct World {
    state: State,
    random: u128,
    sequence: u64,
    answer: NodeAnswer,
}

fn segment(id: u8) -> SegmentId {
    SegmentId::from_u128(u128::from(id) + 1)
}

impl World {
    fn new() -> Self {
        let (state, _) = State::load(None, Records::default(), 0).unwrap();
        let answer = NodeAnswer { version: 0, draining: false, grants: Vec::new() };
        let mut world = Self { state, random: 1, sequence: 0, answer };
        let spec = NodeSpec::new(vec!["tcp://n:1".into()], PLENTY * SUPERPAGE, 1, 1);
        assert!(world.apply(Command::PutNode { name: "n".into(), spec }));
        let spec = ClientSpec {
            host: "n".into(),
            name: "prog".into(),
            pid: 1,
            lease_ms: 60_000,
            tenant: Some(TENANT.into()),
        };
        assert!(world.apply(Command::PutClient { id: ClientId::from_u128(1), spec }));
        world
    }

    fn apply(&mut self, command: Command) -> bool {
        let mut next = || {
            self.random += 1;
            self.random
        };
        self.state.apply(command, 0, &mut next).is_ok()
    }

    /// The node reports what it was told last, twice: then both know.
    fn settle(&mut self) {
        for _ in 0..3 {
            self.sequence += 1;
            let grants = self.answer.grants.iter();
            let grants = grants.map(|grant| NodeGrantUse {
                segment: grant.segment,
                epoch: grant.epoch,
                bytes: Some(grant.bytes),
                used_bytes: 0,
                connections: 0,
            });
            let report = NodeReport {
                incarnation: 1,
                sequence: self.sequence,
                blade_id: 1,
                capacity_bytes: PLENTY * SUPERPAGE,
                lendable_bytes: PLENTY * SUPERPAGE,
                grants: grants.collect(),
                known_version: self.answer.version,
                ..NodeReport::default()
            };
            assert!(self.apply(Command::NodeReport { name: "n".into(), report }));
            self.answer = self.state.node_answer("n", 1, 1).unwrap();
        }
    }

    fn put(&mut self, id: u8, bytes: u64) -> bool {
        let spec = SegmentSpec {
            read_bytes_per_s: 1,
            write_bytes_per_s: 1,
            may_split: true,
            ..SegmentSpec::of_client(ClientId::from_u128(1), bytes)
        };
        let (id, condition) = (segment(id), Condition::default());
        self.apply(Command::PutSegment { id, spec, condition })
    }

    fn granted(&self) -> u64 {
        self.state.tenant(TENANT).map_or(0, |tenant| tenant.granted_bytes)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_quota_counts_every_superpage_that_is_reserved(steps in steps()) {
        let (mut world, mut plain) = (World::new(), Plain::default());
        for step in steps {
            match step {
                Step::Put(id, bytes) => {
                    let allowed = plain.put(id, bytes);
                    prop_assert_eq!(world.put(id, bytes), allowed, "{} bytes for {}", bytes, id);
                }
                Step::Delete(id) => {
                    let there = plain.segments.remove(&id).is_some();
                    let (is_going, condition) = (plain.going.contains(&id), Condition::default());
                    let command = Command::DeleteSegment { id: segment(id), condition };
                    let deleted = world.apply(command);
                    prop_assert_eq!(deleted, there || is_going);
                    plain.going.extend(there.then_some(id));
                }
                Step::Quota(quota_bytes) => {
                    let spec = TenantSpec { quota_bytes, ..TenantSpec::default() };
                    let is_set = world.apply(Command::PutTenant { name: TENANT.into(), spec });
                    prop_assert!(is_set);
                    plain.quota = quota_bytes;
                }
                Step::Settle => {
                    world.settle();
                    plain.going.clear();
                    plain.segments.values_mut().for_each(|has| has.reserved = has.size);
                }
            }
            prop_assert_eq!(world.granted(), plain.reserved() * SUPERPAGE);
        }
    }
}
