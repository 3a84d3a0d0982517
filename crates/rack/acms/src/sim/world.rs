//! Nodes, clock and events of a simulated cluster.
//!
//! Invariant: everything that happens follows from the seed and the calls; two runs with the same
//! ones are equal.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use farpool_units::exactly;

use crate::classify::{Class, MemoryUse};
use crate::config::Config;
use crate::harvest::lend_limit_bytes;
use crate::ids::{ClusterId, GrantId, Incarnation, NodeId, Peer};
use crate::membership::Member;
use crate::outbox::{Action, Output};
use crate::rng::Rng;
use crate::sim::{Ledger, Load, Network};

/// Shortest time that moving out of a grant takes, milliseconds; less if the setup allows less.
const EVACUATION_MS_MIN: u64 = 50;
/// Time between two observations of a node's memory.
const LOOK: Duration = Duration::from_secs(1);

/// An event.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// A datagram arrives.
    Deliver {
        /// Index of the receiver.
        to: usize,
        /// Index of the sender.
        from: usize,
        /// The datagram.
        bytes: Vec<u8>,
    },
    /// A node's timer fires.
    Wake(usize),
    /// A node observes its memory.
    Look(usize),
    /// A node's shell, in a given life, has moved out of a grant.
    Evacuated(usize, u32, GrantId),
}

/// An action, when it was requested and by which node. All notes together are the world's story.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Note {
    /// Time of the request.
    pub at: Duration,
    /// Index of the node.
    pub node: usize,
    /// The action.
    pub action: Action,
}

/// How a world begins.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Seed of everything.
    pub seed: u64,
    /// Each node's use.
    pub loads: Vec<Load>,
    /// The network.
    pub network: Network,
    /// Nodes know each other from the start, instead of joining through nodes 0 to 2.
    pub acquainted: bool,
    /// Longest time a shell takes to move out, milliseconds.
    pub evacuation_ms_max: u64,
    /// Share of evacuations, thousandths, that never end.
    pub stuck_permille: u64,
    /// Whether the story is kept.
    pub notes: bool,
}

struct SimNode {
    member: Option<Member>,
    life: u32,
    usage: Option<MemoryUse>,
    skew: i64,
    wake_at: Option<Duration>,
}

/// A simulated cluster.
pub struct World {
    setup: Setup,
    rng: Rng,
    now: Duration,
    count: u64,
    queue: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    nodes: Vec<SimNode>,
    adjust: Option<fn(&mut Config)>,
    /// The network, which may be changed at any time.
    pub network: Network,
    /// The ledger.
    pub ledger: Ledger,
    /// The story, if it is kept.
    pub notes: Vec<Note>,
    /// Class changes seen.
    pub class_changes: u64,
    /// Changes of the broadcasting side seen.
    pub side_changes: u64,
    /// Datagrams sent, by kind, and their bytes.
    pub kinds: BTreeMap<u8, (u64, u64)>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "World({} nodes at {:?})", self.nodes.len(), self.now)
    }
}

fn addr_of(index: usize) -> SocketAddr {
    let number: u32 = exactly(index);
    assert!(number <= 0x00FF_FFFF, "an address of 10.0.0.0/8 for every node");
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0A00_0000 | number)), 7070)
}

fn index_of(addr: SocketAddr) -> Option<usize> {
    match addr.ip() {
        IpAddr::V4(ip) => Some(exactly(u32::from(ip) & 0x00FF_FFFF)),
        IpAddr::V6(_) => None,
    }
}

/// The id of the node at `index`.
fn node_of(index: usize) -> NodeId {
    NodeId(index as u64 + 1)
}

impl World {
    /// Starts all nodes.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self::with(setup, None)
    }

    /// Starts all nodes with adjusted settings.
    #[must_use]
    pub fn with(setup: Setup, adjust: Option<fn(&mut Config)>) -> Self {
        let mut world = Self {
            rng: Rng::new(setup.seed),
            now: Duration::from_secs(1),
            count: 0,
            queue: BinaryHeap::new(),
            nodes: Vec::new(),
            adjust,
            network: setup.network.clone(),
            ledger: Ledger::new(setup.seed),
            notes: Vec::new(),
            class_changes: 0,
            side_changes: 0,
            kinds: BTreeMap::new(),
            setup,
        };
        for index in 0..world.setup.loads.len() {
            let node = SimNode { member: None, life: 0, usage: None, skew: 0, wake_at: None };
            world.nodes.push(node);
            world.start(index);
            let phase = Duration::from_micros(world.rng.below(1_000_000));
            world.push(world.now + phase, Event::Look(index));
        }
        world
    }

    /// The world's time.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Number of nodes, dead ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no node.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns a node, or None if it is dead.
    #[must_use]
    pub fn member(&self, index: usize) -> Option<&Member> {
        self.nodes[index].member.as_ref()
    }

    /// Number of living nodes of a class.
    #[must_use]
    pub fn count(&self, class: Class) -> usize {
        let members = self.nodes.iter().filter_map(|node| node.member.as_ref());
        members.filter(|member| member.class() == class).count()
    }

    /// Returns a node's load, which may be changed.
    pub fn load(&mut self, index: usize) -> &mut Load {
        &mut self.setup.loads[index]
    }

    fn push(&mut self, at: Duration, event: Event) {
        self.count += 1;
        self.queue.push(Reverse((at, self.count, event)));
    }

    /// Starts a node in a new life.
    pub fn start(&mut self, index: usize) {
        self.nodes[index].life += 1;
        let life = Incarnation(self.nodes[index].life);
        let mut config = Config::new(ClusterId(7), node_of(index), life, addr_of(index));
        for part in config.seed.chunks_exact_mut(8) {
            part.copy_from_slice(&self.rng.bits().to_le_bytes());
        }
        if let Some(adjust) = self.adjust {
            adjust(&mut config);
        }
        let local = self.local(index);
        let mut member = match Member::new(config, local) {
            Ok(member) => member,
            Err(error) => panic!("the simulation's settings: {error}"),
        };
        if self.setup.acquainted && self.nodes[index].life == 1 {
            let peer = |index: usize| Peer {
                node: node_of(index),
                incarnation: Incarnation(1),
                addr: addr_of(index),
            };
            let others = (0..self.setup.loads.len()).filter(|other| *other != index);
            member.know(&others.map(peer).collect::<Vec<_>>(), local);
        } else {
            let contacts = (0..self.setup.loads.len().min(3)).filter(|other| *other != index);
            member.join(contacts.map(addr_of).collect());
        }
        self.nodes[index].member = Some(member);
        self.nodes[index].usage = None;
        self.nodes[index].wake_at = None;
        self.after(index);
    }

    /// Kills a node's process.
    pub fn crash(&mut self, index: usize) {
        self.nodes[index].member = None;
        self.ledger.crashed(node_of(index));
    }

    /// Whether a node lives.
    #[must_use]
    pub fn is_alive(&self, index: usize) -> bool {
        self.nodes[index].member.is_some()
    }

    /// Makes a node's clock jump.
    pub fn skew(&mut self, index: usize, by_ms: i64) {
        self.ledger.even_clocks = false;
        self.nodes[index].skew += by_ms;
    }

    fn local(&self, index: usize) -> Duration {
        let skew = self.nodes[index].skew;
        let by = Duration::from_millis(skew.unsigned_abs());
        if skew < 0 { self.now.saturating_sub(by) } else { self.now + by }
    }

    /// Runs for `time`.
    pub fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(Reverse((at, _, _))) = self.queue.peek()
            && *at <= end
        {
            let Some(Reverse((at, _, event))) = self.queue.pop() else { break };
            self.now = self.now.max(at);
            self.step(event);
        }
        self.now = end;
    }

    fn step(&mut self, event: Event) {
        let index = match &event {
            Event::Deliver { to, .. } => *to,
            Event::Wake(index) | Event::Look(index) | Event::Evacuated(index, ..) => *index,
        };
        let local = self.local(index);
        if let Event::Look(_) = event {
            self.push(self.now + LOOK, Event::Look(index));
        }
        let node = &mut self.nodes[index];
        let Some(member) = &mut node.member else { return };
        match event {
            Event::Deliver { from, bytes, .. } => {
                // Damaged datagrams are refused and counted; nothing else may happen.
                let _ = member.on_datagram(addr_of(from), &bytes, local);
            }
            Event::Wake(_) => {
                if node.wake_at != Some(self.now) {
                    return;
                }
                node.wake_at = None;
                member.on_tick(local);
            }
            Event::Look(_) => {
                let usage = self.setup.loads[index].at(self.now, &mut self.rng);
                node.usage = Some(usage);
                member.on_usage(usage, local);
            }
            Event::Evacuated(_, life, grant) => {
                if node.life != life || !member.in_use().any(|(used, _)| used == grant) {
                    return;
                }
                self.ledger.unused(node_of(index), grant);
                member.on_evacuated(grant, local);
            }
        }
        self.after(index);
    }

    /// Takes a node's outputs, checks it, and sets its timer.
    fn after(&mut self, index: usize) {
        while let Some(output) = self.nodes[index].member.as_mut().and_then(Member::poll_output) {
            match output {
                Output::Send { to, bytes } => self.send(index, to, &bytes),
                Output::Act(action) => self.act(index, action),
            }
        }
        self.check(index);
        let skew = self.nodes[index].skew;
        let node = &mut self.nodes[index];
        let Some(member) = &node.member else { return };
        let by = Duration::from_millis(skew.unsigned_abs());
        let wake = member.next_wakeup();
        let at = if skew < 0 { wake.saturating_add(by) } else { wake.saturating_sub(by) };
        let at = at.max(self.now + Duration::from_millis(1));
        if node.wake_at.is_none_or(|set| at < set) {
            node.wake_at = Some(at);
            self.push(at, Event::Wake(index));
        }
    }

    fn send(&mut self, from: usize, to: SocketAddr, bytes: &[u8]) {
        let kind = self.kinds.entry(bytes[5]).or_default();
        kind.0 += 1;
        kind.1 += bytes.len() as u64;
        let Some(to) = index_of(to).filter(|to| *to < self.nodes.len()) else { return };
        for (delay, damaged) in self.network.deliveries(from, to, &mut self.rng) {
            let mut bytes = bytes.to_vec();
            if damaged {
                let at = self.rng.index(bytes.len());
                bytes[at] ^= 1 << self.rng.below(8);
            }
            self.push(self.now + delay, Event::Deliver { to, from, bytes });
        }
    }

    fn limit(&self, index: usize) -> u64 {
        let node = &self.nodes[index];
        match (&node.member, &node.usage) {
            (Some(member), Some(usage)) => {
                lend_limit_bytes(&member.config().thresholds, member.class(), usage)
            }
            _ => 0,
        }
    }

    fn act(&mut self, index: usize, action: Action) {
        if self.setup.notes {
            self.notes.push(Note { at: self.now, node: index, action: action.clone() });
        }
        let own = node_of(index);
        match action {
            Action::GrantMade { grant, client, bytes, key } => {
                let reclaiming = self.member(index).map_or(0, Member::reclaiming_bytes);
                let limit = self.limit(index) + reclaiming;
                self.ledger.made(grant, (client.node, bytes, key), limit, self.now);
            }
            Action::GrantUsable { grant, key, bytes, .. } => {
                self.ledger.usable(own, grant, (bytes, key), self.now);
            }
            Action::Revoke { grant, reason } => self.ledger.revoked(grant, reason, self.now),
            Action::GrantLost { grant } => self.ledger.unused(own, grant),
            Action::MoveOut { grant, .. } => self.move_out(index, grant),
            Action::ClassChanged { .. } => self.class_changes += 1,
            Action::SideChanged { .. } => self.side_changes += 1,
            Action::PeerUp(_) | Action::PeerDown(_) => {}
        }
    }

    fn move_out(&mut self, index: usize, grant: GrantId) {
        if self.rng.below(1000) < self.setup.stuck_permille {
            return;
        }
        let most = self.setup.evacuation_ms_max;
        let least = EVACUATION_MS_MIN.min(most);
        let takes = Duration::from_millis(least + self.rng.below(most - least + 1));
        let life = self.nodes[index].life;
        self.push(self.now + takes, Event::Evacuated(index, life, grant));
    }

    fn check(&mut self, index: usize) {
        let limit = self.limit(index);
        let Some(member) = &self.nodes[index].member else { return };
        let deadline = Duration::from_millis(u64::from(member.config().reclaim_deadline_ms));
        let lacks =
            member.class() == Class::Client && member.usable_bytes() < member.wanted_bytes();
        self.ledger.look(node_of(index), limit, deadline, self.now);
        self.ledger.look_client(node_of(index), !lacks, self.now);
    }
}
