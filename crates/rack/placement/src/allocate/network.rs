//! Reservations of links and switches, and the search for a path.
//!
//! A path goes link by link: compute port, switch port in, switch port out, ..., memory port. Every
//! link on it must have the bandwidth wanted in both directions. In a packet switch any two ports
//! can be used; in a circuit switch the two must be free or joined already. So a standing circuit
//! carries more segments of the same two bricks, and one that ends at a packet switch carries
//! everything that goes there.
//!
//! The search runs from both ends and always expands the end with the smaller switch, so a spine
//! switch with thousands of ports is met, not expanded, and the cost does not grow with the rack.
//! The search goes over switches: a switch is reached "open" (packet, or circuit through a free
//! port). A standing circuit is followed to its end at once. The path found visits a switch once,
//! because the search stops at the first switch that both ends have reached; so it never needs one
//! port twice.
//!
//! Memory accesses limit a large rack, so a link with both its ports is one cache line, and a port
//! is named by its link (see [`End`]): a step of a path costs one line, not three.
//!
//! Known cost: racks whose uplinks are all taken are discovered one by one, once per request. A
//! policy that prefers such racks (first-fit on a circuit network) pays for each of them.
//!
//! Complete: each end reaches everything that its constraints allow, and these depend only on two
//! consecutive ports, so if there is any path there is one that this search finds.

use smallvec::SmallVec;

use crate::graph::{Graph, SwitchKind, Vertex};
use crate::ids::{CircuitId, LinkId, MemoryId, PortId, SwitchId};

use super::grant::{Path, RateLimits, SwitchSetting};

const NONE: u32 = u32::MAX;

/// A port that has a cable, by its link: twice the link's number, plus one at its end b.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End(u32);

impl End {
    fn new(link: usize, at_b: bool) -> Self {
        // Each link has two of the at most 2^26 ports.
        Self(LinkId::at(link).0 * 2 + u32::from(at_b))
    }

    /// The port at the other end of the cable.
    fn far(self) -> Self {
        Self(self.0 ^ 1)
    }

    fn link(self) -> usize {
        (self.0 >> 1) as usize
    }

    /// 0 at the link's end a, 1 at b.
    fn side(self) -> usize {
        (self.0 & 1) as usize
    }
}

/// A path as the ports through which it leaves each vertex; four links lead over a spine.
pub(super) type Hops = SmallVec<[End; 4]>;
/// The ports of a brick that have a cable.
pub(super) type Ends = SmallVec<[End; 4]>;

/// A vertex in 32 bits: its kind in the upper two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Owner(u32);

impl Owner {
    const INDEX_BITS: u32 = 30;
    const CIRCUIT: u32 = 3;

    fn new(graph: &Graph, vertex: Vertex) -> Self {
        let (kind, index) = match vertex {
            Vertex::Compute(id) => (0, id.0),
            Vertex::Memory(id) => (1, id.0),
            Vertex::Switch(id) => match graph.switches()[id.index()].kind {
                SwitchKind::Packet => (2, id.0),
                SwitchKind::Circuit => (Self::CIRCUIT, id.0),
            },
        };
        assert!(index >> Self::INDEX_BITS == 0, "the builder bounds every list");
        Self(kind << Self::INDEX_BITS | index)
    }

    fn index(self) -> u32 {
        self.0 & ((1 << Self::INDEX_BITS) - 1)
    }

    fn is_circuit_switch(self) -> bool {
        self.0 >> Self::INDEX_BITS == Self::CIRCUIT
    }

    fn switch(self) -> Option<u32> {
        (self.0 >> Self::INDEX_BITS >= 2).then_some(self.index())
    }

    fn memory(self) -> Option<MemoryId> {
        (self.0 >> Self::INDEX_BITS == 1).then_some(MemoryId(self.index()))
    }
}

#[derive(Clone, Copy, Debug)]
struct EndState {
    port: PortId,
    owner: Owner,
    /// The end joined to this one in its circuit switch, or `NONE`.
    peer: u32,
    /// Segments over that circuit. For a brick's port: segments whose whole path is circuits.
    users: u32,
}

/// A link with both its ports, in a cache line of its own.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct LinkState {
    /// Bytes per second left from a to b and from b to a.
    left: [u64; 2],
    ends: [EndState; 2],
}

const _: () = assert!(size_of::<LinkState>() == 64, "a link is one cache line");

impl LinkState {
    /// Whether the link carries `want` when requests travel outwards through `out` (towards
    /// memory) or, `backwards`, inwards.
    fn carries(&self, out: End, want: RateLimits, backwards: bool) -> bool {
        // Index 0 is from a to b. Writes travel with the requests, reads against them.
        let with = out.side() ^ usize::from(backwards);
        self.left[with] >= want.write_bytes_per_s && self.left[1 - with] >= want.read_bytes_per_s
    }
}

/// One end's search: which switches it has reached, and how.
#[derive(Clone, Debug, Default)]
struct Side {
    /// Per switch: the round in which it was reached, and the end where the last stretch to it
    /// began, a brick's or another switch's.
    reached: Vec<(u32, End)>,
    round: u32,
    queue: Vec<u32>,
    next: usize,
}

impl Side {
    fn new(switches: usize) -> Self {
        Self { reached: vec![(0, End(NONE)); switches], ..Self::default() }
    }

    fn begin(&mut self) {
        if self.round == u32::MAX {
            self.reached.fill((0, End(NONE)));
            self.round = 0;
        }
        self.round += 1;
        self.queue.clear();
        self.next = 0;
    }

    fn has(&self, switch: u32) -> bool {
        self.reached[switch as usize].0 == self.round
    }

    fn reach(&mut self, switch: u32, origin: End) {
        self.reached[switch as usize] = (self.round, origin);
        self.queue.push(switch);
    }

    fn front(&self) -> Option<u32> {
        self.queue.get(self.next).copied()
    }
}

/// Reservations of links and switches.
#[derive(Clone, Debug)]
pub(super) struct Network {
    links: Vec<LinkState>,
    /// Per port: its end, or `NONE` without a cable.
    end_of: Vec<u32>,
    /// Per switch: its ends that lead to other switches.
    trunks: Vec<Vec<End>>,
    /// Both kinds of switch exist, so a brick's circuit may end at a packet switch.
    pub(super) mixed: bool,
    forward: Side,
    backward: Side,
    /// Memory bricks that standing circuits join to the compute brick, each with the compute port.
    direct: Vec<(MemoryId, End)>,
    want: RateLimits,
}

/// What [`Network::connect`] found.
#[derive(Debug)]
pub(super) enum Connection {
    /// A path.
    Found(Hops),
    /// No path. True if no brick with the same cabling has one either.
    None(bool),
}

impl Network {
    pub(super) fn new(graph: &Graph) -> Self {
        let end = |port: PortId| {
            let owner = Owner::new(graph, graph.ports()[port.index()].owner);
            EndState { port, owner, peer: NONE, users: 0 }
        };
        let state = |link: &crate::Link| LinkState {
            left: [link.bandwidth_bytes_per_s; 2],
            ends: [end(link.a), end(link.b)],
        };
        let mut network = Self {
            links: graph.links().iter().map(state).collect(),
            end_of: vec![NONE; graph.ports().len()],
            trunks: Vec::new(),
            mixed: false,
            forward: Side::new(graph.switches().len()),
            backward: Side::new(graph.switches().len()),
            direct: Vec::new(),
            want: RateLimits::default(),
        };
        for (index, link) in graph.links().iter().enumerate() {
            network.end_of[link.a.index()] = End::new(index, false).0;
            network.end_of[link.b.index()] = End::new(index, true).0;
        }
        let switches = graph.switches();
        let trunks = |switch: &crate::Switch| {
            let ends = network.ends(&switch.ports);
            let to_switch = |end: &End| network.at(end.far()).owner.switch().is_some();
            ends.into_iter().filter(to_switch).collect::<Vec<_>>()
        };
        let trunks = switches.iter().map(trunks).collect();
        let circuits = switches.iter().filter(|switch| switch.kind == SwitchKind::Circuit).count();
        Self { trunks, mixed: circuits > 0 && circuits < switches.len(), ..network }
    }

    /// Those of `ports` that have a cable.
    pub(super) fn ends(&self, ports: &[PortId]) -> Ends {
        let ends = ports.iter().map(|port| End(self.end_of[port.index()]));
        ends.filter(|end| end.0 != NONE).collect()
    }

    fn at(&self, end: End) -> &EndState {
        &self.links[end.link()].ends[end.side()]
    }

    fn at_mut(&mut self, end: End) -> &mut EndState {
        &mut self.links[end.link()].ends[end.side()]
    }

    /// The end joined to `arrival` by a standing circuit.
    fn joined(&self, arrival: End) -> Option<End> {
        let state = self.at(arrival);
        (state.owner.is_circuit_switch() && state.peer != NONE).then_some(End(state.peer))
    }

    /// Leaves through `out` and follows standing circuits. Returns the end where the last link
    /// arrives, or None if a link does not have the bandwidth.
    fn follow(&self, mut out: End, want: RateLimits, backwards: bool) -> Option<End> {
        loop {
            if !self.links[out.link()].carries(out, want, backwards) {
                return None;
            }
            match self.joined(out.far()) {
                Some(next) => out = next,
                None => return Some(out.far()),
            }
        }
    }

    /// Begins searches from a compute brick with these ports.
    pub(super) fn begin(&mut self, compute_ends: &[End], want: RateLimits) {
        self.want = want;
        self.forward.begin();
        self.direct.clear();
        for out in compute_ends {
            let Some(arrival) = self.follow(*out, want, false) else { continue };
            let owner = self.at(arrival).owner;
            if let Some(memory) = owner.memory() {
                self.direct.push((memory, *out));
            } else if let Some(switch) = owner.switch()
                && !self.forward.has(switch)
            {
                self.forward.reach(switch, *out);
            }
        }
    }

    /// Memory bricks joined to the compute brick by standing circuits that have the bandwidth left.
    pub(super) fn direct(&self) -> &[(MemoryId, End)] {
        &self.direct
    }

    /// Whether everything that the compute brick can reach is known.
    pub(super) fn exhausted(&self) -> bool {
        self.forward.front().is_none()
    }

    /// The switches the compute brick reaches; all of them once the search is exhausted.
    pub(super) fn switches_reached(&self) -> &[u32] {
        &self.forward.queue
    }

    /// Finds a path from the compute brick given to [`begin`](Self::begin) to a memory brick with
    /// these ports on `switch_count` switches.
    pub(super) fn connect(
        &mut self,
        memory: MemoryId,
        ends: &[End],
        switch_count: usize,
    ) -> Connection {
        if let Some((_, out)) = self.direct.iter().find(|(id, _)| *id == memory) {
            let mut hops = Hops::new();
            self.push_stretch(*out, &mut hops);
            return Connection::Found(hops);
        }
        self.backward.begin();
        for out in ends {
            let Some(arrival) = self.follow(*out, self.want, true) else { continue };
            let Some(switch) = self.at(arrival).owner.switch() else { continue };
            if self.backward.has(switch) {
                continue;
            }
            self.backward.reach(switch, *out);
            if self.forward.has(switch) {
                return Connection::Found(self.path_over(switch));
            }
        }
        let same_for_all = !self.mixed && self.backward.queue.len() == switch_count;
        while let (Some(ahead), Some(behind)) = (self.forward.front(), self.backward.front()) {
            let ahead_degree = self.trunks[ahead as usize].len();
            let from_memory = self.trunks[behind as usize].len() <= ahead_degree;
            if let Some(met) = self.expand(from_memory) {
                return Connection::Found(self.path_over(met));
            }
        }
        Connection::None(same_for_all)
    }

    /// Expands the next switch of one side. Returns the switch where the sides met, or None.
    fn expand(&mut self, from_memory: bool) -> Option<u32> {
        let side = if from_memory { &mut self.backward } else { &mut self.forward };
        let switch = side.front()?;
        side.next += 1;
        let mut met = None;
        for index in 0..self.trunks[switch as usize].len() {
            let out = self.trunks[switch as usize][index];
            if self.at(out).peer != NONE {
                continue; // A standing circuit leads only to its own end.
            }
            let Some(arrival) = self.follow(out, self.want, from_memory) else { continue };
            let Some(next) = self.at(arrival).owner.switch() else { continue };
            let (side, other) = if from_memory {
                (&mut self.backward, &self.forward)
            } else {
                (&mut self.forward, &self.backward)
            };
            if side.has(next) {
                continue;
            }
            side.reach(next, out);
            if other.has(next) {
                // The compute brick's side serves further searches of this request: expand all of
                // it.
                met = Some(next);
                if from_memory {
                    break;
                }
            }
        }
        met
    }

    /// Appends all hops from `out` to where the standing circuits behind it end.
    fn push_stretch(&self, mut out: End, hops: &mut Hops) {
        loop {
            hops.push(out);
            match self.joined(out.far()) {
                Some(next) => out = next,
                None => return,
            }
        }
    }

    /// The origins of the stretches from a brick to `switch`, the brick's own first.
    fn origins(&self, side: &Side, mut switch: u32) -> Ends {
        let mut origins = Ends::new();
        loop {
            let (_, origin) = side.reached[switch as usize];
            origins.push(origin);
            match self.at(origin).owner.switch() {
                Some(before) => switch = before,
                None => break,
            }
        }
        origins.reverse();
        origins
    }

    fn path_over(&self, met: u32) -> Hops {
        let mut hops = Hops::new();
        for out in self.origins(&self.forward, met) {
            self.push_stretch(out, &mut hops);
        }
        let middle = hops.len();
        for out in self.origins(&self.backward, met) {
            self.push_stretch(out, &mut hops);
        }
        // The part found from the memory's side is walked the other way.
        let behind = &mut hops[middle..];
        behind.reverse();
        behind.iter_mut().for_each(|hop| *hop = hop.far());
        hops
    }

    /// Returns the hops of a path if all of it could be reserved as given: its cables exist and
    /// have the bandwidth, and its ports are free or joined as the path says.
    pub(super) fn admits(&self, path: &Path, want: RateLimits) -> Option<Hops> {
        let ports = &path.ports;
        let mut seen = ports.clone();
        seen.sort_unstable();
        seen.dedup();
        if seen.len() != ports.len() || ports.len() < 4 || !ports.len().is_multiple_of(2) {
            return None;
        }
        let end = |port: &PortId| self.end_of.get(port.index()).filter(|end| **end != NONE);
        let hop = |ends: &[PortId]| {
            let (out, arrival) = (End(*end(&ends[0])?), End(*end(&ends[1])?));
            let carries = self.links[out.link()].carries(out, want, false);
            (out.far() == arrival && carries).then_some(out)
        };
        let hops = ports.chunks_exact(2).map(hop).collect::<Option<Hops>>()?;
        let joins = |(arrival, out): (End, End)| {
            let (from, to) = (self.at(arrival), self.at(out));
            let free = from.peer == NONE && to.peer == NONE;
            from.owner == to.owner
                && from.owner.switch().is_some()
                && (!from.owner.is_circuit_switch() || free || from.peer == out.0)
        };
        let joined = crossings(&hops).all(joins);
        joined.then_some(hops)
    }

    fn is_all_circuits(&self, hops: &[End]) -> bool {
        crossings(hops).all(|(arrival, _)| self.at(arrival).owner.is_circuit_switch())
    }

    /// Reserves a path that [`connect`](Self::connect) found or [`admits`](Self::admits) admitted.
    pub(super) fn reserve(&mut self, hops: &[End], want: RateLimits) {
        for hop in hops {
            let left = &mut self.links[hop.link()].left;
            let (there, back) = (left[hop.side()], left[1 - hop.side()]);
            let is_there = want.write_bytes_per_s <= there && want.read_bytes_per_s <= back;
            assert!(is_there, "a link is promised more than it carries");
            left[hop.side()] -= want.write_bytes_per_s;
            left[1 - hop.side()] -= want.read_bytes_per_s;
        }
        for (arrival, out) in crossings(hops) {
            if self.at(arrival).owner.is_circuit_switch() {
                for (end, peer) in [(arrival, out), (out, arrival)] {
                    let end = self.at_mut(end);
                    assert!(end.peer == NONE || end.peer == peer.0, "a port joins one circuit");
                    end.peer = peer.0;
                    end.users += 1;
                }
            }
        }
        if self.is_all_circuits(hops) {
            for end in outer_ends(hops) {
                self.at_mut(end).users += 1;
            }
        }
    }

    /// Undoes [`reserve`](Self::reserve).
    pub(super) fn release(&mut self, hops: &[End], want: RateLimits) {
        if self.is_all_circuits(hops) {
            for end in outer_ends(hops) {
                self.at_mut(end).users -= 1;
            }
        }
        for (arrival, out) in crossings(hops) {
            if self.at(arrival).owner.is_circuit_switch() {
                for (end, peer) in [(arrival, out), (out, arrival)] {
                    let end = self.at_mut(end);
                    assert!(end.users > 0 && end.peer == peer.0, "the circuit stands");
                    end.users -= 1;
                    if end.users == 0 {
                        end.peer = NONE;
                    }
                }
            }
        }
        for hop in hops {
            let left = &mut self.links[hop.link()].left;
            left[hop.side()] += want.write_bytes_per_s;
            left[1 - hop.side()] += want.read_bytes_per_s;
        }
    }

    /// Returns the most that another compute brick could read and write through any one of a memory
    /// brick's ports. Returns None if circuits have taken all ports.
    pub(super) fn port_room(&self, ends: &[End]) -> Option<(u64, u64)> {
        let open = ends.iter().filter(|end| self.at(**end).users == 0);
        open.fold(None, |best: Option<(u64, u64)>, end| {
            let left = self.links[end.link()].left;
            let (read, write) = best.unwrap_or((0, 0));
            Some((read.max(left[end.side()]), write.max(left[1 - end.side()])))
        })
    }

    /// The path as ports.
    pub(super) fn path(&self, hops: &[End]) -> Path {
        let ports = hops.iter().flat_map(|hop| [self.at(*hop).port, self.at(hop.far()).port]);
        let mut path = Path { ports: Vec::with_capacity(2 * hops.len()) };
        path.ports.extend(ports);
        path
    }

    /// How the circuit switches on the path are set.
    pub(super) fn settings(&self, hops: &[End]) -> Vec<SwitchSetting> {
        let set = crossings(hops).filter_map(|(arrival, out)| {
            let from = self.at(arrival);
            let switch = from.owner.is_circuit_switch().then_some(SwitchId(from.owner.index()))?;
            Some(setting(switch, from.port, self.at(out).port))
        });
        set.collect()
    }

    /// Standing circuits, each once, with the number of segments over it.
    pub(super) fn circuits(&self) -> impl Iterator<Item = (SwitchSetting, u32)> + '_ {
        self.port_states().filter_map(|(from, state)| {
            let state = state?;
            let switch = SwitchId(state.owner.switch()?);
            let to = (state.peer != NONE).then(|| self.at(End(state.peer)).port)?;
            (from < to).then(|| (setting(switch, from, to), state.users))
        })
    }

    fn port_states(&self) -> impl Iterator<Item = (PortId, Option<&EndState>)> + '_ {
        self.end_of.iter().enumerate().map(|(index, end)| {
            let state = (*end != NONE).then(|| self.at(End(*end)));
            (PortId::at(index), state)
        })
    }

    /// Bandwidth left on a link, from a to b and from b to a.
    pub(super) fn left(&self, link: LinkId) -> Option<[u64; 2]> {
        self.links.get(link.index()).map(|link| link.left)
    }

    /// Bandwidth left on every link, for comparisons.
    pub(super) fn all_left(&self) -> Vec<[u64; 2]> {
        self.links.iter().map(|link| link.left).collect()
    }

    /// Users and peers of every port, for comparisons.
    pub(super) fn port_use(&self) -> Vec<(u32, u32)> {
        let used = self.port_states().map(|(_, state)| state.map(|it| (it.peer, it.users)));
        used.map(|used| used.unwrap_or((NONE, 0))).collect()
    }
}

/// Per switch on the path: the end where the path comes in and the one where it leaves.
fn crossings(hops: &[End]) -> impl Iterator<Item = (End, End)> + '_ {
    hops.windows(2).map(|pair| (pair[0].far(), pair[1]))
}

/// The compute brick's and the memory brick's end.
fn outer_ends(hops: &[End]) -> [End; 2] {
    [hops[0], hops[hops.len() - 1].far()]
}

/// How a circuit switch joins two ports.
pub(super) fn setting(switch: SwitchId, from: PortId, to: PortId) -> SwitchSetting {
    SwitchSetting { switch, circuit: CircuitId(from.0.min(to.0)), from, to }
}
