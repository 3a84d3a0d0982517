//! What is reserved of links and switches, and the search for a path.
//!
//! A path goes port by port: compute port, switch port in, switch port out, ..., memory port. Every
//! link on it must have the bandwidth wanted in both directions. In a packet switch any two ports
//! will do; in a circuit switch the two must be free or joined already. So a circuit that stands
//! carries more segments of the same two bricks, and one that ends at a packet switch carries
//! whatever goes there.
//!
//! The search runs from both ends and always expands the end with the smaller switch, so a spine
//! switch with thousands of ports is met, not expanded, and the cost does not grow with the rack.
//! It goes over switches: one is reached "open" (packet, or circuit through a free port). A
//! standing circuit is followed to its end at once. The path found visits a switch once, because
//! the search stops at the first switch that both ends have reached; so it never needs one port
//! twice.
//!
//! Known cost: racks whose uplinks are all taken are found out one by one, once per request. A
//! policy that prefers such racks (first-fit on a circuit network) pays for each of them.
//!
//! Complete: each end reaches everything that its constraints allow, and these depend only on two
//! consecutive ports, so if there is any path there is one that this search finds.

use crate::graph::{Graph, SwitchKind, Vertex};
use crate::ids::{CircuitId, MemoryId, PortId, SwitchId};

use super::grant::{Path, RateLimits, SwitchSetting};

const NONE: u32 = u32::MAX;

#[derive(Clone, PartialEq, Eq, Debug)]
struct PortState {
    owner: Vertex,
    /// The port at the cable's other end, or `NONE`.
    far: u32,
    link: u32,
    /// This port is the link's end `a`.
    is_a: bool,
    in_circuit_switch: bool,
    /// The port joined to this one in its circuit switch, or `NONE`.
    peer: u32,
    /// Segments over that circuit; of a brick's port: segments whose whole path is circuits.
    users: u32,
}

/// One end's search: which switches it has reached, and how.
#[derive(Clone, Debug, Default)]
struct Side {
    /// Per switch: the round in which it was reached.
    reached: Vec<u32>,
    /// Per switch: through which port it was reached.
    arrival: Vec<u32>,
    /// Per switch: the port where the last stretch to it began, a brick's or another switch's.
    origin: Vec<u32>,
    round: u32,
    queue: Vec<u32>,
    next: usize,
}

impl Side {
    fn new(switches: usize) -> Self {
        let none = vec![NONE; switches];
        Self { reached: vec![0; switches], arrival: none.clone(), origin: none, ..Self::default() }
    }

    fn begin(&mut self) {
        if self.round == u32::MAX {
            self.reached.fill(0);
            self.round = 0;
        }
        self.round += 1;
        self.queue.clear();
        self.next = 0;
    }

    fn has(&self, switch: u32) -> bool {
        self.reached[switch as usize] == self.round
    }

    fn reach(&mut self, switch: u32, origin: PortId, arrival: PortId) {
        let at = switch as usize;
        (self.reached[at], self.origin[at], self.arrival[at]) = (self.round, origin.0, arrival.0);
        self.queue.push(switch);
    }

    fn front(&self) -> Option<u32> {
        self.queue.get(self.next).copied()
    }
}

/// Reservations of links and switches.
#[derive(Clone, Debug)]
pub(super) struct Network {
    ports: Vec<PortState>,
    /// Per link: bytes per second left from a to b and from b to a.
    left: Vec<[u64; 2]>,
    /// Per switch: its ports that lead to other switches.
    trunks: Vec<Vec<PortId>>,
    /// Both kinds of switch exist, so a brick's circuit may end at a packet switch.
    pub(super) mixed: bool,
    forward: Side,
    backward: Side,
    /// Memory bricks that standing circuits join to the compute brick, each with the compute port.
    direct: Vec<(MemoryId, PortId)>,
    want: RateLimits,
}

/// What [`Network::connect`] found.
#[derive(Debug)]
pub(super) enum Connection {
    /// A path.
    Found(Path),
    /// None. True: no brick with the same cabling would fare better.
    None(bool),
}

impl Network {
    pub(super) fn new(graph: &Graph) -> Self {
        let in_circuit = |owner| {
            matches!(owner, Vertex::Switch(id)
                if graph.switches()[SwitchId::index(id)].kind == SwitchKind::Circuit)
        };
        let state = |(index, port): (usize, &crate::Port)| {
            let link = port.link.map(|link| (link, &graph.links()[link.index()]));
            let far = graph.far_end(PortId::at(index));
            PortState {
                owner: port.owner,
                far: far.map_or(NONE, |far| far.0),
                link: link.map_or(NONE, |(id, _)| id.0),
                is_a: link.is_some_and(|(_, link)| link.a.index() == index),
                in_circuit_switch: in_circuit(port.owner),
                peer: NONE,
                users: 0,
            }
        };
        let to_switch = |port: &PortId| {
            let far = graph.far_end(*port).map(|far| graph.ports()[far.index()].owner);
            matches!(far, Some(Vertex::Switch(_)))
        };
        let trunks = |switch: &crate::Switch| {
            switch.ports.iter().copied().filter(to_switch).collect::<Vec<_>>()
        };
        let switches = graph.switches();
        let circuits = switches.iter().filter(|switch| switch.kind == SwitchKind::Circuit).count();
        Self {
            ports: graph.ports().iter().enumerate().map(state).collect(),
            left: graph.links().iter().map(|link| [link.bandwidth_bytes_per_s; 2]).collect(),
            trunks: switches.iter().map(trunks).collect(),
            mixed: circuits > 0 && circuits < switches.len(),
            forward: Side::new(switches.len()),
            backward: Side::new(switches.len()),
            direct: Vec::new(),
            want: RateLimits::default(),
        }
    }

    /// Whether the link behind `out` carries `want` when requests travel outwards through `out`
    /// (towards memory) or, `backwards`, inwards.
    fn carries(&self, out: &PortState, want: RateLimits, backwards: bool) -> bool {
        let left = self.left[out.link as usize];
        // Index 0 is from a to b. Writes travel with the requests, reads against them.
        let with = usize::from(out.is_a == backwards);
        left[with] >= want.write_bytes_per_s && left[1 - with] >= want.read_bytes_per_s
    }

    /// Leaves through `out` and follows standing circuits; the port where that ends.
    fn follow(&self, mut out: PortId, want: RateLimits, backwards: bool) -> Option<PortId> {
        loop {
            let port = &self.ports[out.index()];
            if port.far == NONE || !self.carries(port, want, backwards) {
                return None;
            }
            let arrival = &self.ports[port.far as usize];
            if !arrival.in_circuit_switch || arrival.peer == NONE {
                return Some(PortId(port.far));
            }
            out = PortId(arrival.peer);
        }
    }

    /// Begins searches from a compute brick with these ports.
    pub(super) fn begin(&mut self, compute_ports: &[PortId], want: RateLimits) {
        self.want = want;
        self.forward.begin();
        self.direct.clear();
        for out in compute_ports {
            let Some(arrival) = self.follow(*out, want, false) else { continue };
            match self.ports[arrival.index()].owner {
                Vertex::Memory(id) => self.direct.push((id, *out)),
                Vertex::Switch(id) if !self.forward.has(id.0) => {
                    self.forward.reach(id.0, *out, arrival);
                }
                _ => {}
            }
        }
    }

    /// Bricks joined to the compute brick by circuits that stand and have the bandwidth left.
    pub(super) fn direct(&self) -> &[(MemoryId, PortId)] {
        &self.direct
    }

    /// Everything the compute brick can reach is known.
    pub(super) fn exhausted(&self) -> bool {
        self.forward.front().is_none()
    }

    /// The switches the compute brick reaches; all of them once the search is exhausted.
    pub(super) fn switches_reached(&self) -> &[u32] {
        &self.forward.queue
    }

    /// A path from the compute brick given to [`begin`](Self::begin) to a memory brick with these
    /// ports on `switch_count` switches.
    pub(super) fn connect(
        &mut self,
        memory: MemoryId,
        ports: &[PortId],
        switch_count: usize,
    ) -> Connection {
        if let Some((_, out)) = self.direct.iter().find(|(id, _)| *id == memory) {
            let mut path = Vec::with_capacity(4);
            self.push_stretch(*out, &mut path);
            return Connection::Found(Path { ports: path });
        }
        self.backward.begin();
        for out in ports {
            let Some(arrival) = self.follow(*out, self.want, true) else { continue };
            let Vertex::Switch(id) = self.ports[arrival.index()].owner else { continue };
            if self.backward.has(id.0) {
                continue;
            }
            self.backward.reach(id.0, *out, arrival);
            if self.forward.has(id.0) {
                return Connection::Found(self.path_over(id.0));
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

    /// Expands the next switch of one side; the switch where the sides met.
    fn expand(&mut self, from_memory: bool) -> Option<u32> {
        let side = if from_memory { &mut self.backward } else { &mut self.forward };
        let switch = side.front()?;
        side.next += 1;
        let mut met = None;
        for index in 0..self.trunks[switch as usize].len() {
            let out = self.trunks[switch as usize][index];
            if self.ports[out.index()].peer != NONE {
                continue; // A circuit stands here; it leads only where it leads.
            }
            let Some(arrival) = self.follow(out, self.want, from_memory) else { continue };
            let Vertex::Switch(next) = self.ports[arrival.index()].owner else { continue };
            let (side, other) = if from_memory {
                (&mut self.backward, &self.forward)
            } else {
                (&mut self.forward, &self.backward)
            };
            if side.has(next.0) {
                continue;
            }
            side.reach(next.0, out, arrival);
            if other.has(next.0) {
                // The client's side serves further searches of this request: expand it wholly.
                met = Some(next.0);
                if from_memory {
                    break;
                }
            }
        }
        met
    }

    /// All ports from `out` to where the standing circuits behind it end.
    fn push_stretch(&self, mut out: PortId, path: &mut Vec<PortId>) {
        loop {
            let far = self.ports[out.index()].far;
            path.extend([out, PortId(far)]);
            let arrival = &self.ports[far as usize];
            if !arrival.in_circuit_switch || arrival.peer == NONE {
                return;
            }
            out = PortId(arrival.peer);
        }
    }

    /// The origins of the stretches from a brick to `switch`, the brick's own first.
    fn origins(&self, side: &Side, mut switch: u32) -> Vec<PortId> {
        let mut origins = Vec::with_capacity(2);
        loop {
            let origin = PortId(side.origin[switch as usize]);
            origins.push(origin);
            match self.ports[origin.index()].owner {
                Vertex::Switch(id) => switch = id.0,
                _ => break,
            }
        }
        origins.reverse();
        origins
    }

    fn path_over(&self, met: u32) -> Path {
        let mut ports = Vec::with_capacity(8);
        for out in self.origins(&self.forward, met) {
            self.push_stretch(out, &mut ports);
        }
        let middle = ports.len();
        for out in self.origins(&self.backward, met) {
            self.push_stretch(out, &mut ports);
        }
        ports[middle..].reverse();
        Path { ports }
    }

    /// Whether everything on the path could be reserved as it is: cables where it says, bandwidth,
    /// ports free or joined as it says.
    pub(super) fn admits(&self, path: &Path, want: RateLimits) -> bool {
        let ports = &path.ports;
        let known = ports.iter().all(|port| port.index() < self.ports.len());
        let mut seen = ports.clone();
        seen.sort_unstable();
        seen.dedup();
        if !known || seen.len() != ports.len() || ports.len() < 4 || !ports.len().is_multiple_of(2)
        {
            return false;
        }
        let cabled = ports.chunks_exact(2).all(|ends| {
            let out = &self.ports[ends[0].index()];
            out.far == ends[1].0 && self.carries(out, want, false)
        });
        cabled
            && path.crossings().all(|(a, b)| {
                let (from, to) = (&self.ports[a.index()], &self.ports[b.index()]);
                let free = from.peer == NONE && to.peer == NONE;
                from.owner == to.owner
                    && matches!(from.owner, Vertex::Switch(_))
                    && (!from.in_circuit_switch || free || from.peer == b.0)
            })
    }

    fn is_all_circuits(&self, path: &Path) -> bool {
        path.crossings().all(|(port, _)| self.ports[port.index()].in_circuit_switch)
    }

    /// Reserves a path that [`connect`](Self::connect) found or [`admits`](Self::admits) admitted.
    pub(super) fn reserve(&mut self, path: &Path, want: RateLimits) {
        for ends in path.ports.chunks_exact(2) {
            let with = usize::from(!self.ports[ends[0].index()].is_a);
            let left = &mut self.left[self.ports[ends[0].index()].link as usize];
            left[with] -= want.write_bytes_per_s;
            left[1 - with] -= want.read_bytes_per_s;
        }
        for (a, b) in path.crossings() {
            if self.ports[a.index()].in_circuit_switch {
                for (port, peer) in [(a, b), (b, a)] {
                    let port = &mut self.ports[port.index()];
                    assert!(port.peer == NONE || port.peer == peer.0, "a port joins one circuit");
                    port.peer = peer.0;
                    port.users += 1;
                }
            }
        }
        if self.is_all_circuits(path) {
            for port in path.ends() {
                self.ports[port.index()].users += 1;
            }
        }
    }

    /// Undoes [`reserve`](Self::reserve).
    pub(super) fn release(&mut self, path: &Path, want: RateLimits) {
        if self.is_all_circuits(path) {
            for port in path.ends() {
                self.ports[port.index()].users -= 1;
            }
        }
        for (a, b) in path.crossings() {
            if self.ports[a.index()].in_circuit_switch {
                for port in [a, b] {
                    let port = &mut self.ports[port.index()];
                    port.users -= 1;
                    if port.users == 0 {
                        port.peer = NONE;
                    }
                }
            }
        }
        for ends in path.ports.chunks_exact(2) {
            let with = usize::from(!self.ports[ends[0].index()].is_a);
            let left = &mut self.left[self.ports[ends[0].index()].link as usize];
            left[with] += want.write_bytes_per_s;
            left[1 - with] += want.read_bytes_per_s;
        }
    }

    /// The most a newcomer could read and write through any one of a memory brick's ports; none
    /// when circuits to somebody else have them all.
    pub(super) fn port_room(&self, ports: &[PortId]) -> Option<(u64, u64)> {
        let open = ports.iter().map(|port| &self.ports[port.index()]);
        let open = open.filter(|port| port.far != NONE && port.users == 0);
        open.fold(None, |best: Option<(u64, u64)>, port| {
            let left = self.left[port.link as usize];
            let (read, write) = best.unwrap_or((0, 0));
            let out = usize::from(!port.is_a);
            Some((read.max(left[out]), write.max(left[1 - out])))
        })
    }

    /// How the circuit switches on the path are set.
    pub(super) fn settings(&self, path: &Path) -> Vec<SwitchSetting> {
        let set = path.crossings().filter_map(|(from, to)| {
            let port = &self.ports[from.index()];
            let Vertex::Switch(switch) = port.owner else { return None };
            let circuit = CircuitId(from.0.min(to.0));
            port.in_circuit_switch.then_some(SwitchSetting { switch, circuit, from, to })
        });
        set.collect()
    }

    /// Circuits that stand, each once, with the number of segments over it.
    pub(super) fn circuits(&self) -> impl Iterator<Item = (SwitchSetting, u32)> + '_ {
        self.ports.iter().enumerate().filter_map(|(index, port)| {
            let Vertex::Switch(switch) = port.owner else { return None };
            let from = PortId::at(index);
            let to = PortId(port.peer);
            let stands = port.peer != NONE && from < to;
            let circuit = CircuitId(from.0);
            stands.then_some((SwitchSetting { switch, circuit, from, to }, port.users))
        })
    }

    /// Bandwidth left on every link, from a to b and from b to a.
    pub(super) fn left(&self) -> &[[u64; 2]] {
        &self.left
    }

    /// Users and peers of every port, for comparisons.
    pub(super) fn port_use(&self) -> Vec<(u32, u32)> {
        self.ports.iter().map(|port| (port.peer, port.users)).collect()
    }
}
