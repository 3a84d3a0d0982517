//! A plain model of the rack: everything reserved, recomputed from the grants alone, and an
//! exhaustive search over all bricks and all paths.

use std::collections::HashMap;

use farpool_placement::{
    Allocator, Grant, Graph, MemoryId, PortId, RateLimits, Request, SwitchKind, Vertex,
};
use farpool_units::SUPERPAGE_BYTES;

/// What the grants that stand use, counted one by one.
#[derive(Debug)]
pub(crate) struct Plain<'a> {
    graph: &'a Graph,
    /// Per memory brick and superpage: whether it is taken.
    taken: Vec<Vec<bool>>,
    /// Per memory brick: bandwidth granted.
    served: Vec<RateLimits>,
    /// Per link: bytes per second from a to b and from b to a.
    carried: Vec<[u64; 2]>,
    /// Circuits: each port with the other.
    joined: HashMap<PortId, PortId>,
}

impl<'a> Plain<'a> {
    /// Counts all grants.
    ///
    /// # Panics
    /// If two grants conflict, or a limit is exceeded.
    pub(crate) fn of(rack: &'a Allocator) -> Self {
        let graph = rack.graph();
        let superpages = |bytes: u64| usize::try_from(bytes / SUPERPAGE_BYTES).unwrap();
        let mut plain = Self {
            graph,
            taken: graph
                .memories()
                .iter()
                .map(|m| vec![false; superpages(m.capacity_bytes)])
                .collect(),
            served: vec![RateLimits::default(); graph.memories().len()],
            carried: vec![[0; 2]; graph.links().len()],
            joined: HashMap::new(),
        };
        let mut addresses = Vec::new();
        for (request, grant, moving) in rack.grants() {
            assert_eq!(request.compute, grant.compute);
            assert_eq!(grant.length_bytes(), request.bytes.next_multiple_of(SUPERPAGE_BYTES));
            assert!(grant.entries.len() == 1 || request.may_split);
            let base = grant.entries[0].client_base_bytes;
            addresses.push((grant.compute, base, base + grant.length_bytes()));
            plain.add(&grant);
            if let Some(moving) = moving {
                assert!(moving.epoch > grant.epoch && moving.segment == grant.segment);
                assert_eq!(moving.entries[0].client_base_bytes, base);
                plain.add(&moving);
            }
        }
        addresses.sort_unstable();
        for pair in addresses.windows(2) {
            assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "addresses overlap");
        }
        plain.check_limits();
        plain
    }

    fn add(&mut self, grant: &Grant) {
        let taken = &mut self.taken[grant.memory.index()];
        for entry in &grant.entries {
            let first = usize::try_from(entry.brick_offset_bytes / SUPERPAGE_BYTES).unwrap();
            let count = usize::try_from(entry.length_bytes / SUPERPAGE_BYTES).unwrap();
            for superpage in &mut taken[first..first + count] {
                assert!(!std::mem::replace(superpage, true), "a superpage has two owners");
            }
        }
        assert_eq!(grant.client_limits, grant.blade_limits);
        let served = &mut self.served[grant.memory.index()];
        served.read_bytes_per_s += grant.blade_limits.read_bytes_per_s;
        served.write_bytes_per_s += grant.blade_limits.write_bytes_per_s;
        let ports = &grant.path.ports;
        let owner = |port: PortId| self.graph.ports()[port.index()].owner;
        assert_eq!(owner(ports[0]), Vertex::Compute(grant.compute));
        assert_eq!(owner(ports[ports.len() - 1]), Vertex::Memory(grant.memory));
        for ends in ports.chunks_exact(2) {
            assert_eq!(self.graph.far_end(ends[0]), Some(ends[1]), "the path leaves the cables");
            let link = self.graph.ports()[ends[0].index()].link.unwrap();
            let with = usize::from(self.graph.links()[link.index()].a != ends[0]);
            self.carried[link.index()][with] += grant.blade_limits.write_bytes_per_s;
            self.carried[link.index()][1 - with] += grant.blade_limits.read_bytes_per_s;
        }
        let mut circuits = 0;
        for (from, to) in grant.path.crossings() {
            assert_eq!(owner(from), owner(to), "the path jumps between switches");
            if self.is_circuit(from) {
                let setting = &grant.settings[circuits];
                assert_eq!((setting.from, setting.to), (from, to));
                circuits += 1;
                for (a, b) in [(from, to), (to, from)] {
                    assert_eq!(*self.joined.entry(a).or_insert(b), b, "a port in two circuits");
                }
            }
        }
        assert_eq!(circuits, grant.settings.len());
    }

    fn is_circuit(&self, port: PortId) -> bool {
        match self.graph.ports()[port.index()].owner {
            Vertex::Switch(id) => self.graph.switches()[id.index()].kind == SwitchKind::Circuit,
            _ => false,
        }
    }

    fn check_limits(&self) {
        for (brick, served) in self.graph.memories().iter().zip(&self.served) {
            assert!(served.read_bytes_per_s <= brick.read_limit_bytes_per_s);
            assert!(served.write_bytes_per_s <= brick.write_limit_bytes_per_s);
        }
        for (link, carried) in self.graph.links().iter().zip(&self.carried) {
            assert!(carried.iter().all(|rate| *rate <= link.bandwidth_bytes_per_s));
        }
    }

    /// Whether any brick over any path could serve the request, by trying all.
    pub(crate) fn could_serve(&self, request: &Request) -> bool {
        self.graph.memories().iter().enumerate().any(|(index, brick)| {
            let superpages = usize::try_from(request.bytes.div_ceil(SUPERPAGE_BYTES)).unwrap();
            let served = &self.served[index];
            let rates = request.rates;
            let runs = self.taken[index].split(|taken| *taken).map(<[bool]>::len);
            let room = if request.may_split { runs.sum() } else { runs.max().unwrap_or(0) };
            let memory = MemoryId(u32::try_from(index).unwrap());
            room >= superpages
                && served.read_bytes_per_s + rates.read_bytes_per_s <= brick.read_limit_bytes_per_s
                && served.write_bytes_per_s + rates.write_bytes_per_s
                    <= brick.write_limit_bytes_per_s
                && !request.avoid.contains(&brick.domain)
                && self.graph.computes()[request.compute.index()]
                    .ports
                    .iter()
                    .any(|out| self.leads(*out, memory, rates, &mut Vec::new()))
        })
    }

    /// Whether a path that leaves through `out` and uses none of `used` ends at the brick.
    fn leads(
        &self,
        out: PortId,
        memory: MemoryId,
        rates: RateLimits,
        used: &mut Vec<PortId>,
    ) -> bool {
        let Some(arrival) = self.graph.far_end(out) else { return false };
        let link = self.graph.ports()[out.index()].link.unwrap();
        let bandwidth = self.graph.links()[link.index()].bandwidth_bytes_per_s;
        let with = usize::from(self.graph.links()[link.index()].a != out);
        let carried = self.carried[link.index()];
        if carried[with] + rates.write_bytes_per_s > bandwidth
            || carried[1 - with] + rates.read_bytes_per_s > bandwidth
            || used.contains(&arrival)
        {
            return false;
        }
        let Vertex::Switch(switch) = self.graph.ports()[arrival.index()].owner else {
            return self.graph.ports()[arrival.index()].owner == Vertex::Memory(memory);
        };
        used.extend([out, arrival]);
        let onward = self.graph.switches()[switch.index()].ports.iter().any(|next| {
            let free = !used.contains(next);
            let joined = match (self.joined.get(&arrival), self.joined.get(next)) {
                (None, None) => true,
                (a, b) => a == Some(next) && b == Some(&arrival),
            };
            free && (joined || !self.is_circuit(*next)) && self.leads(*next, memory, rates, used)
        });
        used.truncate(used.len() - 2);
        onward
    }
}
