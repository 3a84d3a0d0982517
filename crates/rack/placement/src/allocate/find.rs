//! The search for one request: the best brick by policy with a path to it, or why there is none.

use std::collections::HashMap;

use farpool_units::SUPERPAGE_BYTES;

use crate::graph::{Graph, Vertex};
use crate::ids::{MemoryId, SwitchId};

use super::bricks::{ComputeState, MemoryState};
use super::grant::{RackError, RateLimits, Request};
use super::network::{Connection, Hops, Network};
use super::tree::{Judge, Query, Tree};
use super::{Allocator, superpages_of};

/// What never changes about cabling, and the marks of the search under way.
///
/// A *cabling* is the set of switches that a memory brick's ports lead to. All bricks with the same
/// cabling are reached in the same way, so if no path leads to one, none leads to the others.
#[derive(Clone, Debug)]
pub(super) struct Scratch {
    /// Per cabling: how many switches it has.
    switch_counts: Vec<usize>,
    /// Per cabling: the round in which it was found to be out of reach.
    failed: Vec<u32>,
    round: u32,
    /// Per switch: ranges of the leaves of the index that are attached to it.
    leaves: Vec<Vec<(usize, usize)>>,
    /// Ranges of the leaves that the compute brick can reach, in order. None until all are known.
    within: Option<Vec<(usize, usize)>>,
}

/// The switches that a memory brick's ports lead to, each once.
fn switches_of(graph: &Graph, memory: MemoryId) -> Vec<SwitchId> {
    let ports = &graph.memories()[memory.index()].ports;
    let far = ports.iter().filter_map(|port| graph.far_end(*port));
    let mut switches: Vec<SwitchId> = far
        .filter_map(|far| match graph.ports()[far.index()].owner {
            Vertex::Switch(id) => Some(id),
            _ => None,
        })
        .collect();
    switches.sort_unstable();
    switches.dedup();
    switches
}

impl Scratch {
    /// Returns the scratch data and the cabling of every memory brick.
    pub(super) fn new(graph: &Graph) -> (Self, Vec<u32>) {
        let mut known: HashMap<Vec<SwitchId>, u32> = HashMap::new();
        let mut switch_counts = Vec::new();
        let mut cabling_of = Vec::new();
        for index in 0..graph.memories().len() {
            let switches = switches_of(graph, MemoryId::at(index));
            let count = switches.len();
            let cabling = *known.entry(switches).or_insert_with(|| {
                switch_counts.push(count);
                MemoryId::at(switch_counts.len() - 1).0
            });
            cabling_of.push(cabling);
        }
        let scratch = Self {
            failed: vec![0; switch_counts.len()],
            switch_counts,
            round: 0,
            leaves: vec![Vec::new(); graph.switches().len()],
            within: None,
        };
        (scratch, cabling_of)
    }

    /// Records which leaves are attached to which switch.
    pub(super) fn index_leaves(&mut self, graph: &Graph, tree: &Tree) {
        let mut pairs: Vec<(SwitchId, usize)> = Vec::new();
        for memory in (0..graph.memories().len()).map(MemoryId::at) {
            let leaf = tree.leaf(memory);
            pairs.extend(switches_of(graph, memory).into_iter().map(|switch| (switch, leaf)));
        }
        pairs.sort_unstable();
        for (switch, leaf) in pairs {
            let ranges = &mut self.leaves[switch.index()];
            match ranges.last_mut() {
                Some((_, end)) if *end == leaf => *end += 1,
                _ => ranges.push((leaf, leaf + 1)),
            }
        }
    }

    fn begin(&mut self) {
        if self.round == u32::MAX {
            self.failed.fill(0);
            self.round = 0;
        }
        self.round += 1;
        self.within = None;
    }
}

/// Finds a path to each brick that would win.
struct Finder<'a> {
    memories: &'a [MemoryState],
    network: &'a mut Network,
    scratch: &'a mut Scratch,
    /// The path to the brick accepted last.
    path: Option<Hops>,
}

impl Judge for Finder<'_> {
    fn accepts(&mut self, memory: MemoryId) -> bool {
        let state = &self.memories[memory.index()];
        let cabling = state.cabling as usize;
        match self.network.connect(memory, &state.ends, self.scratch.switch_counts[cabling]) {
            Connection::Found(path) => {
                self.path = Some(path);
                return true;
            }
            Connection::None(true) => self.scratch.failed[cabling] = self.scratch.round,
            Connection::None(false) => {}
        }
        // In a network with both kinds of switch a brick's standing circuit may lead further than
        // its cabling.
        let whole = self.network.exhausted() && !self.network.mixed;
        if whole && self.scratch.within.is_none() {
            let hanging = |switch: &u32| self.scratch.leaves[*switch as usize].iter().copied();
            let mut ranges: Vec<_> =
                self.network.switches_reached().iter().flat_map(hanging).collect();
            // Ranges may overlap where bricks are attached to several switches. They are merged
            // because the lookup needs both their starts and their ends in order.
            ranges.sort_unstable();
            ranges.dedup_by(|next, last| {
                let joins = next.0 <= last.1;
                if joins {
                    last.1 = last.1.max(next.1);
                }
                joins
            });
            self.scratch.within = Some(ranges);
        }
        false
    }

    fn cabling_may_do(&self, cabling: u32) -> bool {
        self.scratch.failed[cabling as usize] != self.scratch.round
    }

    fn leaves_may_do(&self, first: usize, end: usize) -> bool {
        let Some(within) = &self.scratch.within else { return true };
        let at = within.partition_point(|(_, range_end)| *range_end <= first);
        within.get(at).is_some_and(|(range_first, _)| *range_first < end)
    }
}

/// Accepts every brick, so that a search checks only whether one fits.
struct Anything;

impl Judge for Anything {
    fn accepts(&mut self, _: MemoryId) -> bool {
        true
    }

    fn cabling_may_do(&self, _: u32) -> bool {
        true
    }

    fn leaves_may_do(&self, _: usize, _: usize) -> bool {
        true
    }
}

/// A request and the conditions under which a search tries to meet it.
struct Wish<'a> {
    request: &'a Request,
    superpages: u32,
    except: Option<MemoryId>,
    rates: RateLimits,
}

impl<'a> Wish<'a> {
    fn query(&self, computes: &'a [ComputeState]) -> Query<'a> {
        let compute = &computes[self.request.compute.index()];
        Query {
            superpages: self.superpages,
            may_split: self.request.may_split,
            read: self.rates.read_bytes_per_s,
            write: self.rates.write_bytes_per_s,
            policy: self.request.policy,
            avoid: &self.request.avoid,
            except: self.except,
            rack: compute.rack,
            tray: compute.tray,
            counts: &compute.per_domain,
        }
    }
}

impl Allocator {
    /// Returns the request's size in superpages. Errors if the request is wrong whatever is
    /// reserved.
    pub(super) fn check(&self, request: &Request) -> Result<u32, RackError> {
        if request.compute.index() >= self.computes.len() {
            return Err(RackError::UnknownCompute(request.compute));
        }
        let is_unknown = |domain: &&crate::DomainId| domain.index() >= self.graph.domains().len();
        if let Some(domain) = request.avoid.iter().find(is_unknown) {
            return Err(RackError::UnknownDomain(*domain));
        }
        let bytes = request.bytes;
        if bytes == 0 {
            return Err(RackError::ZeroBytes);
        }
        if request.rates.read_bytes_per_s == 0 || request.rates.write_bytes_per_s == 0 {
            return Err(RackError::ZeroBandwidth);
        }
        if bytes > self.pool_bytes {
            return Err(RackError::LargerThanPool { bytes, pool_bytes: self.pool_bytes });
        }
        if bytes > self.largest_brick_bytes {
            let brick_bytes = self.largest_brick_bytes;
            return Err(RackError::LargerThanAnyBrick { bytes, brick_bytes });
        }
        Ok(superpages_of(bytes))
    }

    /// Returns the best brick for the request, other than `except`, and the path to it.
    pub(super) fn find(
        &mut self,
        request: &Request,
        superpages: u32,
        except: Option<MemoryId>,
    ) -> Result<(MemoryId, Hops), RackError> {
        let found = self.best(request, superpages, except, request.rates);
        found.ok_or_else(|| self.refusal(request, superpages, except))
    }

    fn best(
        &mut self,
        request: &Request,
        superpages: u32,
        except: Option<MemoryId>,
        rates: RateLimits,
    ) -> Option<(MemoryId, Hops)> {
        self.network.begin(&self.computes[request.compute.index()].ends, rates);
        self.scratch.begin();
        let wish = Wish { request, superpages, except, rates };
        let query = wish.query(&self.computes);
        let scored = self.network.direct().iter().filter_map(|(id, _)| {
            let state = &self.memories[id.index()];
            let score = self.tree.score_of(state.leaf as usize, &state.values(), &query);
            score.map(|score| (score, *id))
        });
        let nearby = scored.min();
        let mut finder = Finder {
            memories: &self.memories,
            network: &mut self.network,
            scratch: &mut self.scratch,
            path: None,
        };
        let found = match finder.network.switches_reached().is_empty() {
            true => nearby,
            false => self.tree.search(&query, &mut finder, nearby),
        };
        let (_, memory) = found?;
        if found == nearby {
            let accepted = finder.accepts(memory);
            assert!(accepted, "a circuit that stands leads to its end");
        }
        finder.path.map(|path| (memory, path))
    }

    /// Returns why nothing was found: searches again with fewer requirements at each step.
    fn refusal(
        &mut self,
        request: &Request,
        superpages: u32,
        except: Option<MemoryId>,
    ) -> RackError {
        let no_capacity = RackError::NoCapacity { bytes: u64::from(superpages) * SUPERPAGE_BYTES };
        let root = self.tree.root();
        let (anywhere, open) = match request.may_split {
            true => (root.any_total, root.total_superpages),
            false => (root.any_largest, root.largest_superpages),
        };
        if anywhere < superpages {
            return no_capacity;
        }
        if self.best(request, superpages, except, RateLimits::default()).is_some() {
            return RackError::NoBandwidth;
        }
        if self.network.switches_reached().is_empty() {
            return RackError::NoPort("the compute brick's are all taken or not connected");
        }
        if open < superpages {
            return RackError::NoPort("those of all memory bricks with that much free are taken");
        }
        let wish = Wish { request, superpages, except, rates: RateLimits::default() };
        let query = wish.query(&self.computes);
        match self.tree.search(&query, &mut Anything, None) {
            None => no_capacity,
            Some(_) => RackError::NoCircuit,
        }
    }
}
