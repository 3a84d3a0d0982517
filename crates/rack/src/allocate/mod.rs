//! Who gets what: allocation, release, moves, and what stands.
//!
//! [`Allocator::allocate`] takes a brick by policy from the index (`tree`), a path from the network
//! (`network`), pieces of memory (`extents`), and reserves all of it or nothing. A [`Grant`] says
//! everything that was reserved for it, so release reads it back from there, and a controller that
//! lost its memory gives its stored grants to [`Allocator::adopt`].

mod adopt;
mod extents;
mod find;
mod grant;
mod moves;
mod network;
mod policy;
mod state;
mod tree;

use std::collections::HashMap;

use crate::graph::{Graph, PowerState};
use crate::ids::{ComputeId, Epoch, MemoryId, RequestId, SegmentId};
use crate::{DomainId, SUPERPAGE_BYTES};

use extents::Extents;
use find::Scratch;
use network::Network;
use tree::{Best, Tree};

pub use grant::{Grant, MemPortEntry, Path, RackError, RateLimits, Request, SwitchSetting};
pub use policy::{PlacementPolicy, UnknownPlacementPolicy};
pub use state::Snapshot;

/// Where a compute brick's window of far addresses begins: above any local memory of today.
pub const FAR_BASE_BYTES: u64 = 1 << 44;
/// Superpages of that window (16 TiB); a compute brick that uses them all is refused more.
pub const FAR_WINDOW_SUPERPAGES: u32 = 1 << 20;

/// What is reserved of a memory brick.
#[derive(Clone, PartialEq, Eq, Debug)]
struct MemoryState {
    free: Extents,
    left: RateLimits,
    segments: u32,
    observed_permille: u32,
    draining: bool,
    /// What the brick's server lends at most now; its capacity unless it says less.
    lendable_superpages: u32,
}

/// What a compute brick uses.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ComputeState {
    addresses: Extents,
    /// Segments per failure domain of their brick, sorted; domains without any left out.
    per_domain: Vec<(DomainId, u32)>,
}

/// A request that was granted.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Standing {
    request: Request,
    grant: Grant,
    /// Where the segment is being moved to.
    moving: Option<Box<Grant>>,
}

/// The rack's reservations. Methods either succeed or change nothing.
#[derive(Clone, Debug)]
pub struct Allocator {
    graph: Graph,
    network: Network,
    tree: Tree,
    scratch: Scratch,
    memories: Vec<MemoryState>,
    computes: Vec<ComputeState>,
    /// Boxed, so that the table of ids stays small enough to be quick with a million of them.
    standing: HashMap<RequestId, Box<Standing>>,
    pool_bytes: u64,
    largest_brick_bytes: u64,
    next_segment: u64,
    next_epoch: u64,
}

/// Whole superpages that hold `bytes`; the caller has bounded them by a brick's capacity.
fn superpages_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(SUPERPAGE_BYTES)).expect("no brick has 2^31 superpages")
}

impl Allocator {
    /// All of `graph` free.
    #[must_use]
    pub fn new(graph: Graph) -> Self {
        let network = Network::new(&graph);
        let (scratch, cabling) = Scratch::new(&graph);
        let memory = |brick: &crate::MemoryBrick| MemoryState {
            free: Extents::new(superpages_of(brick.capacity_bytes)),
            left: RateLimits {
                read_bytes_per_s: brick.read_limit_bytes_per_s,
                write_bytes_per_s: brick.write_limit_bytes_per_s,
            },
            segments: 0,
            observed_permille: u32::from(brick.load_permille),
            draining: false,
            lendable_superpages: superpages_of(brick.capacity_bytes),
        };
        let compute = |_: &crate::ComputeBrick| ComputeState {
            addresses: Extents::new(FAR_WINDOW_SUPERPAGES),
            per_domain: Vec::new(),
        };
        let capacities = || graph.memories().iter().map(|brick| brick.capacity_bytes);
        let mut rack = Self {
            pool_bytes: capacities().fold(0, u64::saturating_add),
            largest_brick_bytes: capacities().max().unwrap_or(0),
            memories: graph.memories().iter().map(memory).collect(),
            computes: graph.computes().iter().map(compute).collect(),
            tree: Tree::new(&graph, &cabling),
            graph,
            network,
            scratch,
            standing: HashMap::new(),
            next_segment: 1,
            next_epoch: 1,
        };
        rack.scratch.index_leaves(&rack.graph, &rack.tree);
        for index in 0..rack.memories.len() {
            rack.refresh(MemoryId::at(index));
        }
        rack
    }

    /// What it allocates from.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Grants the request, or returns the grant it has already.
    ///
    /// # Errors
    /// See [`RackError`]; nothing has changed then.
    pub fn allocate(&mut self, request: &Request) -> Result<&Grant, RackError> {
        let known = self.standing.get(&request.id).map(|standing| standing.request == *request);
        match known {
            Some(true) => return Ok(&self.standing[&request.id].grant),
            Some(false) => return Err(RackError::IdInUse(request.id)),
            None => {}
        }
        let superpages = self.check(request)?;
        let (memory, path) = self.find(request, superpages, None)?;
        let addresses = &mut self.computes[request.compute.index()].addresses;
        let base = addresses.take(superpages).ok_or(RackError::NoAddress)?;
        let segment = SegmentId(self.next_segment);
        self.next_segment += 1;
        let grant = self.reserve_new(request, segment, base, superpages, memory, path);
        let standing = Box::new(Standing { request: request.clone(), grant, moving: None });
        Ok(&self.standing.entry(request.id).insert_entry(standing).into_mut().grant)
    }

    /// Takes back what the request was granted.
    ///
    /// # Errors
    /// Nothing was granted under this id.
    pub fn release(&mut self, id: RequestId) -> Result<Grant, RackError> {
        let standing = self.standing.remove(&id).ok_or(RackError::UnknownRequest(id))?;
        if let Some(moving) = &standing.moving {
            self.unreserve(moving);
        }
        self.unreserve(&standing.grant);
        self.give_addresses(&standing.grant);
        Ok(standing.grant)
    }

    /// What was granted under this id.
    #[must_use]
    pub fn grant(&self, id: RequestId) -> Option<&Grant> {
        self.standing.get(&id).map(|standing| &standing.grant)
    }

    /// Everything that stands, in no order: the request, its grant, and where it is moving to.
    pub fn grants(&self) -> impl Iterator<Item = (&Request, &Grant, Option<&Grant>)> {
        let all = self.standing.values();
        all.map(|standing| (&standing.request, &standing.grant, standing.moving.as_deref()))
    }

    /// Keeps new segments off a memory brick, or no longer.
    ///
    /// # Errors
    /// There is no such brick.
    pub fn set_draining(&mut self, memory: MemoryId, draining: bool) -> Result<(), RackError> {
        let state = self.memories.get_mut(memory.index());
        state.ok_or(RackError::UnknownMemory(memory))?.draining = draining;
        self.refresh(memory);
        Ok(())
    }

    /// Notes how much a memory brick lends at most for now. What stands above it stays; nothing new
    /// is placed until enough has left.
    ///
    /// # Errors
    /// There is no such brick.
    pub fn set_lendable(&mut self, memory: MemoryId, bytes: u64) -> Result<(), RackError> {
        let capacity = self.graph.memories().get(memory.index()).map(|brick| brick.capacity_bytes);
        let capacity = capacity.ok_or(RackError::UnknownMemory(memory))?;
        let state = &mut self.memories[memory.index()];
        // Whole superpages that fit, so rounded down.
        let fits = bytes.min(capacity) / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
        state.lendable_superpages = superpages_of(fits);
        self.refresh(memory);
        Ok(())
    }

    /// Notes the load that a memory brick reports, in thousandths; least-loaded and spread heed it.
    ///
    /// # Errors
    /// There is no such brick.
    pub fn observe_load(&mut self, memory: MemoryId, permille: u16) -> Result<(), RackError> {
        let state = self.memories.get_mut(memory.index());
        state.ok_or(RackError::UnknownMemory(memory))?.observed_permille = u32::from(permille);
        self.refresh(memory);
        Ok(())
    }

    /// Whether a memory brick has power: always, or because it is in use.
    #[must_use]
    pub fn is_powered(&self, memory: MemoryId) -> bool {
        let initial = self.graph.memories().get(memory.index()).map(|brick| brick.power);
        let used = self.memories.get(memory.index()).is_some_and(|state| state.segments > 0);
        used || initial == Some(PowerState::On)
    }

    /// Reserves for a grant that is new: pieces of the brick, path, rates. The caller has checked
    /// that all of it is free.
    fn reserve_new(
        &mut self,
        request: &Request,
        segment: SegmentId,
        base: u32,
        superpages: u32,
        memory: MemoryId,
        path: Path,
    ) -> Grant {
        let free = &mut self.memories[memory.index()].free;
        let pieces = match request.may_split {
            true => free.take_split(superpages),
            false => free.take(superpages).map(|first| vec![(first, superpages)]),
        };
        let pieces = pieces.expect("the index knows what every brick has free");
        let settings = self.network.settings(&path);
        let bytes = |superpages: u32| u64::from(superpages) * SUPERPAGE_BYTES;
        let mut client_base_bytes = FAR_BASE_BYTES + bytes(base);
        let entry = |(first, count): (u32, u32)| {
            let entry = MemPortEntry {
                client_base_bytes,
                length_bytes: bytes(count),
                port: path.ports[0],
                circuit: settings.first().map(|setting| setting.circuit),
                brick_offset_bytes: bytes(first),
            };
            client_base_bytes += bytes(count);
            entry
        };
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let grant = Grant {
            segment,
            epoch,
            compute: request.compute,
            memory,
            entries: pieces.into_iter().map(entry).collect(),
            settings,
            path,
            client_limits: request.rates,
            blade_limits: request.rates,
        };
        self.reserve_rest(&grant);
        grant
    }

    /// Reserves all of a grant but its pieces of memory and its addresses.
    fn reserve_rest(&mut self, grant: &Grant) {
        self.network.reserve(&grant.path, grant.blade_limits);
        let state = &mut self.memories[grant.memory.index()];
        state.left.read_bytes_per_s -= grant.blade_limits.read_bytes_per_s;
        state.left.write_bytes_per_s -= grant.blade_limits.write_bytes_per_s;
        state.segments += 1;
        self.count_domain(grant.compute, grant.memory, true);
        self.refresh(grant.memory);
    }

    /// Undoes everything reserved for a grant but its addresses.
    fn unreserve(&mut self, grant: &Grant) {
        self.network.release(&grant.path, grant.blade_limits);
        let state = &mut self.memories[grant.memory.index()];
        for entry in &grant.entries {
            let first = superpages_of(entry.brick_offset_bytes);
            state.free.give(first, superpages_of(entry.length_bytes));
        }
        state.left.read_bytes_per_s += grant.blade_limits.read_bytes_per_s;
        state.left.write_bytes_per_s += grant.blade_limits.write_bytes_per_s;
        state.segments -= 1;
        self.count_domain(grant.compute, grant.memory, false);
        self.refresh(grant.memory);
    }

    fn give_addresses(&mut self, grant: &Grant) {
        let first = superpages_of(grant.entries[0].client_base_bytes - FAR_BASE_BYTES);
        let count = superpages_of(grant.length_bytes());
        self.computes[grant.compute.index()].addresses.give(first, count);
    }

    fn count_domain(&mut self, compute: ComputeId, memory: MemoryId, add: bool) {
        let domain = self.graph.memories()[memory.index()].domain;
        let counts = &mut self.computes[compute.index()].per_domain;
        match (counts.binary_search_by_key(&domain, |(domain, _)| *domain), add) {
            (Ok(at), true) => counts[at].1 += 1,
            (Ok(at), false) if counts[at].1 == 1 => drop(counts.remove(at)),
            (Ok(at), false) => counts[at].1 -= 1,
            (Err(at), true) => counts.insert(at, (domain, 1)),
            (Err(_), false) => unreachable!("a domain that was counted up is there"),
        }
    }

    /// What a brick could serve over its own circuits, whether or not newcomers find a port.
    fn values(&self, memory: MemoryId) -> Best {
        let state = &self.memories[memory.index()];
        let brick = &self.graph.memories()[memory.index()];
        let left = (state.left.read_bytes_per_s, state.left.write_bytes_per_s);
        let power = if state.segments > 0 { PowerState::On } else { brick.power };
        let room = match state.draining {
            true => (0, 0),
            false => {
                let brick_superpages = superpages_of(brick.capacity_bytes);
                let used = brick_superpages - state.free.total();
                let room = state.lendable_superpages.saturating_sub(used);
                (state.free.largest().min(room), state.free.total().min(room))
            }
        };
        tree::brick_values(memory, room, left, self.load_permille(memory), power)
    }

    /// The largest of the shares taken of memory, read and write bandwidth, and of what the brick
    /// reports.
    pub(crate) fn load_permille(&self, memory: MemoryId) -> u32 {
        let state = &self.memories[memory.index()];
        let brick = &self.graph.memories()[memory.index()];
        let share = |left: u64, all: u64| {
            let used = all - left;
            let share = match used.checked_mul(1000) {
                Some(thousandfold) => thousandfold / all,
                None => used / (all / 1000),
            };
            u32::try_from(share.min(1000)).expect("a share of 1000")
        };
        let free = u64::from(state.free.total()) * SUPERPAGE_BYTES;
        share(free, brick.capacity_bytes)
            .max(share(state.left.read_bytes_per_s, brick.read_limit_bytes_per_s))
            .max(share(state.left.write_bytes_per_s, brick.write_limit_bytes_per_s))
            .max(state.observed_permille)
    }

    /// Bytes free on a memory brick.
    pub(crate) fn free_bytes(&self, memory: MemoryId) -> u64 {
        u64::from(self.memories[memory.index()].free.total()) * SUPERPAGE_BYTES
    }

    /// Segments on a memory brick.
    pub(crate) fn segments_on(&self, memory: MemoryId) -> u32 {
        self.memories[memory.index()].segments
    }

    /// Brings the index up to date with a brick.
    fn refresh(&mut self, memory: MemoryId) {
        let values = self.values(memory);
        let ports = &self.graph.memories()[memory.index()].ports;
        let value = match self.network.port_room(ports) {
            Some((read, write)) => Best {
                read_left: values.read_left.min(read),
                write_left: values.write_left.min(write),
                ..values
            },
            None => values.closed(),
        };
        self.tree.update(memory, value);
    }
}
