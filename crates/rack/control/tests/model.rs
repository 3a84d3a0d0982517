//! The model against a plain one: random commands, with agents that are slow, restart and repeat
//! themselves. After every step the invariants are checked one by one from the outside.

use std::collections::{BTreeMap, BTreeSet};

use farpool_api::{
    ClientId, ClientReport, ClientSegmentUse, ClientSpec, Key, MoveRequest, NodeAnswer,
    NodeGrantUse, NodeReport, NodeSpec, Policy, SegmentId, SegmentSpec, TenantSpec,
};
use farpool_control::model::{Command, Condition, Records, State, StoreOp};
use proptest::prelude::*;

const SUPERPAGE: u64 = 16 << 20;
const NODES: u8 = 4;

#[derive(Debug, Clone)]
enum Step {
    Join(u8, u64),
    Leave(u8),
    Drain(u8, bool),
    /// The agent reports what it has, and carries out the answer.
    Report(u8),
    /// The agent reports, and the answer is lost on the way.
    ReportInVain(u8),
    /// An old report comes again.
    Replay(u8),
    Lend(u8, u64),
    Resize(u8, u8, u64),
    /// The client asks for room, with a promise or without one.
    MakeRoom(u8, u64),
    Promise(u8, u64),
    /// A second daemon tries to take the name.
    Twin(u8),
    NewBlade(u8),
    Client(u8),
    EndClient(u8),
    /// The client reports everything it can as evacuated.
    Evacuated(u8),
    Put(u8, u8, u64),
    Delete(u8),
    Move(u8),
    Wait(u64),
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = 0..NODES;
    let step = prop_oneof![
        3 => (node.clone(), 0..6u64).prop_map(|(node, size)| Step::Join(node, size)),
        1 => node.clone().prop_map(Step::Leave),
        1 => (node.clone(), any::<bool>()).prop_map(|(node, on)| Step::Drain(node, on)),
        8 => node.clone().prop_map(Step::Report),
        2 => node.clone().prop_map(Step::ReportInVain),
        2 => node.clone().prop_map(Step::Replay),
        1 => (node.clone(), 0..6u64).prop_map(|(node, size)| Step::Lend(node, size)),
        1 => node.clone().prop_map(Step::Twin),
        1 => node.clone().prop_map(Step::NewBlade),
        2 => (0..3u8).prop_map(Step::Client),
        1 => (0..3u8).prop_map(Step::EndClient),
        4 => (0..3u8).prop_map(Step::Evacuated),
        6 => (0..12u8, 0..3u8, 1..4u64).prop_map(|(id, client, size)| Step::Put(id, client, size)),
        2 => (0..12u8).prop_map(Step::Delete),
        3 => (0..12u8, 0..3u8, 1..5u64).prop_map(|(id, client, size)| Step::Resize(id, client, size)),
        2 => (0..3u8, 1..5u64).prop_map(|(client, size)| Step::MakeRoom(client, size)),
        1 => (0..3u8, 0..5u64).prop_map(|(tenant, size)| Step::Promise(tenant, size)),
        3 => (0..12u8).prop_map(Step::Move),
        2 => prop_oneof![Just(100), Just(6_000), Just(31_000)].prop_map(Step::Wait),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..80)
}

/// The true state of an agent and its blade.
#[derive(Debug, Clone)]
struct Agent {
    donate: u64,
    lend: u64,
    blade_id: u64,
    sequence: u64,
    answer: NodeAnswer,
    last: Option<NodeReport>,
}

struct World {
    state: State,
    store: BTreeMap<String, Vec<u8>>,
    now_ms: u64,
    random: u128,
    agents: BTreeMap<u8, Agent>,
    client_sequence: u64,
    /// Every grant ever seen, by its key.
    keys: BTreeMap<Key, (SegmentId, u64)>,
    /// The highest epoch of each segment ever told to a client.
    epochs: BTreeMap<SegmentId, u64>,
}

fn name(node: u8) -> String {
    format!("n{node}")
}

fn segment(id: u8) -> SegmentId {
    SegmentId::from_u128(u128::from(id) + 1)
}

fn tenant(id: u8) -> String {
    format!("t{id}")
}

fn client(id: u8) -> ClientId {
    ClientId::from_u128(u128::from(id) + 1)
}

/// A segment of a client, of so many superpages.
fn spec(owner: u8, size: u64) -> SegmentSpec {
    SegmentSpec {
        read_bytes_per_s: 1,
        write_bytes_per_s: 1,
        policy: Policy::Spread,
        may_split: true,
        ..SegmentSpec::of_client(client(owner), size * SUPERPAGE)
    }
}

impl World {
    fn new() -> Self {
        let (state, ops) = State::load(None, Records::default(), 0).unwrap();
        let mut world = Self {
            state,
            store: BTreeMap::new(),
            now_ms: 0,
            random: 1,
            agents: BTreeMap::new(),
            client_sequence: 0,
            keys: BTreeMap::new(),
            epochs: BTreeMap::new(),
        };
        world.store(ops);
        world
    }

    fn store(&mut self, ops: Vec<StoreOp>) {
        for op in ops {
            match op {
                StoreOp::Put(key, value) => drop(self.store.insert(key, value)),
                StoreOp::Delete(key) => drop(self.store.remove(&key)),
            }
        }
    }

    /// Applies a command. Returns whether it was accepted; a refusal must change nothing.
    fn apply(&mut self, command: Command) -> bool {
        let before = self.state.fingerprint();
        let random = &mut self.random;
        let mut next = || {
            *random += 1;
            *random
        };
        match self.state.apply(command.clone(), self.now_ms, &mut next) {
            Ok(applied) => {
                self.store(applied.ops);
                true
            }
            Err(problem) => {
                let after = self.state.fingerprint();
                assert!(
                    before == after,
                    "{command:?} was refused ({problem}) and changed something"
                );
                false
            }
        }
    }

    fn tick(&mut self) {
        for command in farpool_control::due(&self.state, self.now_ms) {
            self.apply(command);
        }
    }

    fn report(&mut self, node: u8) -> Option<NodeReport> {
        let agent = self.agents.get_mut(&node)?;
        agent.sequence += 1;
        let grants = agent.answer.grants.iter();
        let grants = grants.map(|grant| NodeGrantUse {
            segment: grant.segment,
            epoch: grant.epoch,
            bytes: Some(grant.bytes),
            used_bytes: 0,
            connections: 0,
        });
        let report = NodeReport {
            incarnation: 1,
            sequence: agent.sequence,
            blade_id: agent.blade_id,
            capacity_bytes: agent.donate * SUPERPAGE,
            lendable_bytes: agent.lend.min(agent.donate) * SUPERPAGE,
            grants: grants.collect(),
            known_version: agent.answer.version,
            ..NodeReport::default()
        };
        agent.last = Some(report.clone());
        Some(report)
    }

    /// Returns what the controller answers to a node, if it has registered.
    fn answer(&self, node: u8) -> Option<NodeAnswer> {
        let blade_id = self.agents.get(&node)?.blade_id;
        Some(self.state.node_answer(&name(node), 1, blade_id).unwrap())
    }

    fn act(&mut self, step: &Step) {
        match *step {
            Step::Join(node, donate) => self.join(node, donate),
            Step::Leave(node) => {
                if self.apply(Command::DeleteNode { name: name(node) }) {
                    self.agents.remove(&node);
                }
            }
            Step::Drain(node, draining) => {
                self.apply(Command::Drain { name: name(node), draining });
            }
            Step::Report(node) => self.reported(node, true),
            Step::ReportInVain(node) => self.reported(node, false),
            Step::Replay(node) => self.replay(node),
            Step::Lend(node, lend) => {
                if let Some(agent) = self.agents.get_mut(&node) {
                    agent.lend = lend;
                }
            }
            Step::Twin(node) => self.twin(node),
            Step::NewBlade(node) => self.new_blade(node),
            Step::Client(id) => {
                let spec = ClientSpec {
                    host: name(0),
                    name: "prog".into(),
                    pid: 1,
                    lease_ms: 60_000,
                    tenant: Some(tenant(id)),
                };
                self.apply(Command::PutClient { id: client(id), spec });
            }
            Step::EndClient(id) => {
                self.apply(Command::DeleteClient { id: client(id) });
            }
            Step::Evacuated(id) => self.evacuated(id),
            // A size for a segment that is there is another size for it.
            Step::Put(id, owner, size) | Step::Resize(id, owner, size) => {
                let (id, condition) = (segment(id), Condition::default());
                self.apply(Command::PutSegment { id, spec: spec(owner, size), condition });
            }
            Step::MakeRoom(id, size) => {
                let spec = spec(id, size);
                assert!(self.apply(Command::MakeRoom { id: segment(u8::MAX), spec }));
            }
            Step::Promise(id, size) => {
                let promised_bytes = size * SUPERPAGE;
                let spec = TenantSpec { promised_bytes, ..TenantSpec::default() };
                assert!(self.apply(Command::PutTenant { name: tenant(id), spec }));
            }
            Step::Delete(id) => {
                self.apply(Command::DeleteSegment {
                    id: segment(id),
                    condition: Condition::default(),
                });
            }
            Step::Move(id) => {
                let (id, wish) = (segment(id), MoveRequest::default());
                self.apply(Command::MoveSegment { id, wish, condition: Condition::default() });
            }
            Step::Wait(time_ms) => {
                self.now_ms += time_ms;
                self.tick();
            }
            Step::Restart => self.restart(),
        }
    }

    /// A node reports. The answer may be lost on its way.
    fn reported(&mut self, node: u8, is_answered: bool) {
        let Some(report) = self.report(node) else { return };
        assert!(self.apply(Command::NodeReport { name: name(node), report }));
        let answer = self.answer(node).unwrap();
        if let (true, Some(agent)) = (is_answered, self.agents.get_mut(&node)) {
            agent.answer = answer;
        }
    }

    fn replay(&mut self, node: u8) {
        let last = self.agents.get(&node).and_then(|agent| agent.last.clone());
        let Some(report) = last else { return };
        let before = self.state.fingerprint();
        self.apply(Command::NodeReport { name: name(node), report });
        assert_eq!(before, self.state.fingerprint(), "a replayed report changed something");
    }

    /// A node's blade starts anew, with no memory of its grants.
    fn new_blade(&mut self, node: u8) {
        if let Some(agent) = self.agents.get_mut(&node) {
            agent.blade_id += 1;
            agent.answer.grants.clear();
            agent.last = None;
            let donate = agent.donate;
            self.join(node, donate);
        }
    }

    fn join(&mut self, node: u8, donate: u64) {
        let blade_id = self.agents.get(&node).map_or(1, |agent| agent.blade_id);
        let addresses = vec![format!("tcp://{}:1", name(node))];
        let spec = NodeSpec::new(addresses, donate * SUPERPAGE, 1, blade_id);
        if !self.apply(Command::PutNode { name: name(node), spec }) {
            return;
        }
        let answer = NodeAnswer { version: 0, draining: false, grants: Vec::new() };
        let new = Agent { donate, lend: donate, blade_id, sequence: 0, answer, last: None };
        self.agents.entry(node).or_insert(new).donate = donate;
    }

    /// A second daemon registers, while a report of the first waits: what the first is answered is
    /// its own grants, or a refusal.
    fn twin(&mut self, node: u8) {
        let Some(report) = self.report(node) else { return };
        let blade_id = report.blade_id;
        let at = name(node);
        assert!(self.apply(Command::NodeReport { name: at.clone(), report }));
        let waits_for = self.state.node_answer(&at, 1, blade_id).unwrap();
        let spec = NodeSpec::new(vec!["tcp://twin:1".into()], SUPERPAGE, 99, 99);
        let taken = self.apply(Command::PutNode { name: at.clone(), spec });
        assert!(!taken, "a name was taken from a daemon that reports");
        assert_eq!(self.state.node_answer(&at, 1, blade_id).unwrap(), waits_for);
        let other = self.state.node_answer(&at, 99, 99);
        assert!(other.is_err(), "a daemon that has not registered was answered");
    }

    fn evacuated(&mut self, id: u8) {
        let Ok(told) = self.state.client_answer(client(id), self.now_ms) else { return };
        let moving = told.segments.iter().filter_map(|segment| {
            let target = segment.target.as_ref().map(|target| target.epoch);
            let epoch = target.or_else(|| segment.leave.then_some(segment.epoch))?;
            let id = segment.id;
            Some(ClientSegmentUse { id, used_bytes: 0, epoch, evacuated: true })
        });
        let segments = moving.collect();
        self.client_sequence += 1;
        let report =
            ClientReport { sequence: self.client_sequence, segments, ..ClientReport::default() };
        self.apply(Command::ClientReport { id: client(id), report: report.clone() });
        let before = self.state.fingerprint();
        self.apply(Command::ClientReport { id: client(id), report });
        assert_eq!(before, self.state.fingerprint(), "a replayed report changed something");
    }

    /// Restarts the controller: only the store survives.
    fn restart(&mut self) {
        let pairs: Vec<_> = self.store.clone().into_iter().collect();
        let records = Records::read(&pairs).unwrap();
        let mut now = self.state.records();
        now.segments.sort_by_key(|segment| segment.id);
        let mut stored = records.clone();
        stored.segments.sort_by_key(|segment| segment.id);
        assert_eq!(stored, now, "the store is not what the state says");
        let (state, ops) = State::load(None, records, self.now_ms).unwrap();
        self.state = state;
        self.store(ops);
        // The sequence of reports is observation: the first report after a start counts.
        self.agents.values_mut().for_each(|agent| agent.last = None);
    }

    /// Checks what must hold at every moment.
    fn check(&mut self) {
        let mut of_nodes = BTreeSet::new();
        for node in 0..NODES {
            let Some(answer) = self.answer(node) else { continue };
            let bytes: u64 = answer.grants.iter().map(|grant| grant.bytes).sum();
            assert!(bytes <= self.agents[&node].donate * SUPERPAGE, "more granted than donated");
            for grant in answer.grants {
                let owner = (grant.segment, grant.epoch);
                let first = *self.keys.entry(grant.key).or_insert(owner);
                assert_eq!(first, owner, "a key was used twice");
                assert!(of_nodes.insert((name(node), grant.segment, grant.epoch, grant.key)));
            }
        }
        let mut of_clients = BTreeSet::new();
        for id in 0..3 {
            let Ok(told) = self.state.client_answer(client(id), self.now_ms) else { continue };
            for segment in told.segments {
                let highest = self.epochs.entry(segment.id).or_default();
                assert!(segment.epoch >= *highest, "an epoch went back");
                *highest = segment.epoch;
                use farpool_api::SegmentState::{Lost, Releasing};
                if matches!(segment.state, Lost | Releasing) {
                    continue;
                }
                let target = segment.target.map(|target| (target.place, target.epoch));
                for (place, epoch) in [(segment.place, segment.epoch)].into_iter().chain(target) {
                    let key = place.key.unwrap();
                    assert!(of_clients.insert((place.node, segment.id, epoch, key)));
                }
            }
        }
        let missing: Vec<_> = of_clients.difference(&of_nodes).collect();
        assert!(missing.is_empty(), "a client was told of what no node has: {missing:?}");
        // Only targets that are not confirmed may be grants that a node has and no client knows.
        assert!(of_nodes.len() <= 2 * of_clients.len());
    }

    /// Checks that everything ends that must end once agents and clients do their part.
    fn calm_down(&mut self) {
        for node in 0..NODES {
            if let Some(agent) = self.agents.get_mut(&node) {
                agent.lend = agent.donate;
            }
        }
        for id in 0..3 {
            self.apply(Command::DeleteClient { id: client(id) });
        }
        for _ in 0..3 {
            for node in 0..NODES {
                self.act(&Step::Report(node));
            }
            self.now_ms += 100;
            self.tick();
        }
        assert!(self.state.segment_page(None, None, self.now_ms).segments.is_empty());
        for node in self.state.node_list(self.now_ms).nodes {
            assert_eq!((node.granted_bytes, node.segments), (0, 0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn whatever_happens_nothing_has_two_owners_and_all_comes_to_rest(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.act(step);
            world.check();
        }
        world.restart();
        world.check();
        world.calm_down();
    }
}
