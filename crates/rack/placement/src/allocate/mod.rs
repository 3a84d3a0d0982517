//! Allocation: grants, release, moves, and the standing grants.
//!
//! [`Allocator::allocate`] takes a brick by policy from the index (`tree`), a path from the network
//! (`network`), pieces of memory (`extents`), and reserves all of it or nothing. A standing grant
//! records everything that was reserved for it (`standing`), so release reads it back from there,
//! and a restarted controller gives its stored grants to [`Allocator::adopt`].

mod adopt;
mod bricks;
mod extents;
mod find;
mod grant;
mod moves;
mod network;
mod policy;
mod resize;
mod standing;
mod state;
mod table;
mod tree;

use crate::graph::{Graph, PowerState};
use crate::ids::{ComputeId, Epoch, MemoryId, RequestId, SegmentId};

use bricks::{ComputeState, MemoryState};
use extents::Pieces;
use farpool_units::SUPERPAGE_BYTES;
use find::Scratch;
use network::{Hops, Network};
use standing::{Book, Place, Standing};
use tree::{Tree, Values};

pub use grant::{Grant, MemPortEntry, Path, RackError, RateLimits, Request, SwitchSetting};
pub use policy::{PlacementPolicy, UnknownPlacementPolicy};
pub use state::Snapshot;

/// Start of a compute brick's window of far addresses: above the local memory of any machine today.
pub(crate) const FAR_BASE_BYTES: u64 = 1 << 44;
/// Superpages of that window (16 TiB); a compute brick that uses them all is refused more.
pub(crate) const FAR_WINDOW_SUPERPAGES: u32 = 1 << 20;

/// The rack's reservations. Methods either succeed or change nothing.
#[derive(Clone, Debug)]
pub struct Allocator {
    graph: Graph,
    network: Network,
    tree: Tree,
    scratch: Scratch,
    memories: Vec<MemoryState>,
    computes: Vec<ComputeState>,
    standing: Book,
    pool_bytes: u64,
    largest_brick_bytes: u64,
    next_segment: u64,
    next_epoch: u64,
}

/// Returns the superpages that hold `bytes`, rounded up. The caller has bounded `bytes` by a
/// brick's capacity or by the window of far addresses.
fn superpages_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(SUPERPAGE_BYTES)).expect("no brick has 2^31 superpages")
}

impl Allocator {
    /// Makes an allocator with all of `graph` free.
    #[must_use]
    pub fn new(graph: Graph) -> Self {
        let network = Network::new(&graph);
        let (scratch, cabling) = Scratch::new(&graph);
        let tree = Tree::new(&graph, &cabling);
        let compute = |brick| ComputeState::new(brick, &graph, &network);
        let capacities = || graph.memories().iter().map(|brick| brick.capacity_bytes);
        let mut rack = Self {
            pool_bytes: capacities().fold(0, u64::saturating_add),
            largest_brick_bytes: capacities().max().unwrap_or(0),
            memories: bricks::memory_states(&graph, &network, &tree, &cabling),
            computes: graph.computes().iter().map(compute).collect(),
            tree,
            graph,
            network,
            scratch,
            standing: Book::default(),
            next_segment: 1,
            next_epoch: 1,
        };
        rack.scratch.index_leaves(&rack.graph, &rack.tree);
        for index in 0..rack.memories.len() {
            rack.refresh(MemoryId::at(index));
        }
        rack
    }

    /// The graph that it allocates from.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Grants the request, or returns the grant it has already.
    ///
    /// # Errors
    /// See [`RackError`]; nothing has changed then.
    pub fn allocate(&mut self, request: &Request) -> Result<Grant, RackError> {
        if let Some(standing) = self.standing.get(request.id) {
            return match standing.is_of(request) {
                true => Ok(standing.grant(&standing.place, &self.network)),
                false => Err(RackError::IdInUse(request.id)),
            };
        }
        let superpages = self.check(request)?;
        let (memory, hops) = self.find(request, superpages, None)?;
        let addresses = &mut self.computes[request.compute.index()].addresses;
        let base = addresses.take(superpages).ok_or(RackError::NoAddress)?;
        let segment = SegmentId(self.next_segment);
        self.next_segment += 1;
        let place = self.reserve_new(request, base, superpages, memory, hops);
        let standing = Standing::new(request, segment, place);
        let grant = standing.grant(&standing.place, &self.network);
        self.standing.insert(standing);
        Ok(grant)
    }

    /// Whether the request would be granted if these others had been released. Nothing changes: it
    /// is tried on a copy, which costs as much as the rack is large.
    ///
    /// # Errors
    /// Why it would not be.
    pub fn try_without(
        &self,
        request: &Request,
        released: impl IntoIterator<Item = RequestId>,
    ) -> Result<(), RackError> {
        let mut copy = self.clone();
        for id in released {
            // What stands no more is free already.
            let _ = copy.release(id);
        }
        copy.allocate(request).map(drop)
    }

    /// Takes back what the request was granted.
    ///
    /// # Errors
    /// Nothing was granted under this id.
    pub fn release(&mut self, id: RequestId) -> Result<Grant, RackError> {
        let standing = self.standing.remove(id).ok_or(RackError::UnknownRequest(id))?;
        let (compute, rates) = (standing.compute, standing.rates);
        if let Some(moving) = standing.moving() {
            self.unreserve(compute, rates, moving);
        }
        let place = &standing.place;
        self.unreserve(compute, rates, place);
        self.computes[compute.index()].addresses.give(place.base, place.superpages());
        Ok(standing.grant(place, &self.network))
    }

    /// The grant under this id.
    #[must_use]
    pub fn grant(&self, id: RequestId) -> Option<Grant> {
        let standing = self.standing.get(id)?;
        Some(standing.grant(&standing.place, &self.network))
    }

    /// Returns everything that stands, in no order: the request, its grant, and the grant that it
    /// is moving to.
    pub fn grants(&self) -> impl Iterator<Item = (Request, Grant, Option<Grant>)> {
        self.standing.iter().map(|standing| {
            let grant = |place| standing.grant(place, &self.network);
            (standing.request(), grant(&standing.place), standing.moving().map(grant))
        })
    }

    /// Sets whether new segments are kept off a memory brick.
    ///
    /// # Errors
    /// There is no such brick.
    pub fn set_draining(&mut self, memory: MemoryId, draining: bool) -> Result<(), RackError> {
        let state = self.memories.get_mut(memory.index());
        state.ok_or(RackError::UnknownMemory(memory))?.draining = draining;
        self.refresh(memory);
        Ok(())
    }

    /// Records the most that a memory brick lends for now. Grants above it stay, and nothing new is
    /// placed until enough has been released.
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

    /// Records the load that a memory brick reports, in thousandths. The policies least-loaded and
    /// spread use it.
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
        let state = self.memories.get(memory.index());
        state.is_some_and(|state| state.power() == PowerState::On)
    }

    /// Reserves pieces of the brick, path and rates for a new grant. The caller has checked that
    /// all of it is free.
    fn reserve_new(
        &mut self,
        request: &Request,
        base: u32,
        superpages: u32,
        memory: MemoryId,
        hops: Hops,
    ) -> Place {
        let free = &mut self.memories[memory.index()].free;
        let pieces = match request.may_split {
            true => free.take_split(superpages),
            false => free.take(superpages).map(|first| Pieces::from_iter([(first, superpages)])),
        };
        let pieces = pieces.expect("the index knows what every brick has free");
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let place = Place { epoch, memory, base, hops, pieces };
        self.reserve_rest(request.compute, request.rates, &place);
        place
    }

    /// Reserves all of a place but its pieces of memory and its addresses.
    fn reserve_rest(&mut self, compute: ComputeId, rates: RateLimits, place: &Place) {
        self.network.reserve(&place.hops, rates);
        let state = &mut self.memories[place.memory.index()];
        state.reserve(rates);
        self.computes[compute.index()].add_segment(state.domain);
        self.refresh(place.memory);
    }

    /// Undoes everything reserved for a place but its addresses.
    fn unreserve(&mut self, compute: ComputeId, rates: RateLimits, place: &Place) {
        self.network.release(&place.hops, rates);
        let state = &mut self.memories[place.memory.index()];
        for (first, count) in &place.pieces {
            state.free.give(*first, *count);
        }
        state.release(rates);
        self.computes[compute.index()].remove_segment(state.domain);
        self.refresh(place.memory);
    }

    /// The load of a memory brick in thousandths: the largest of the shares taken and of the load
    /// that it reports.
    pub(crate) fn load_permille(&self, memory: MemoryId) -> u32 {
        self.memories[memory.index()].load_permille()
    }

    /// Bytes free on a memory brick.
    pub(crate) fn free_bytes(&self, memory: MemoryId) -> u64 {
        self.memories[memory.index()].free_bytes()
    }

    /// Segments on a memory brick.
    pub(crate) fn segments_on(&self, memory: MemoryId) -> u32 {
        self.memories[memory.index()].segments
    }

    /// Brings the index up to date with a brick.
    fn refresh(&mut self, memory: MemoryId) {
        let state = &self.memories[memory.index()];
        let values = state.values();
        let values = match self.network.port_room(&state.ends) {
            Some((read, write)) => Values {
                read_left: values.read_left.min(read),
                write_left: values.write_left.min(write),
                ..values
            },
            None => Values { is_open: false, ..values },
        };
        self.tree.update(state.leaf as usize, &values);
    }
}
