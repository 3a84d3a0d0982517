//! The reservations of each brick, together with all that an allocation must know about the brick,
//! so that one brick is one place in memory: the graph's own records keep names and lists
//! elsewhere.

use farpool_units::SUPERPAGE_BYTES;
use smallvec::SmallVec;

use crate::graph::{ComputeBrick, Graph, MemoryBrick, PowerState};
use crate::ids::{DomainId, MemoryId};

use super::extents::Extents;
use super::grant::RateLimits;
use super::network::{Ends, Network};
use super::tree::{Tree, Values};
use super::{FAR_WINDOW_SUPERPAGES, superpages_of};

/// A memory brick.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(align(64))]
pub(super) struct MemoryState {
    pub(super) free: Extents,
    pub(super) left: RateLimits,
    pub(super) segments: u32,
    pub(super) observed_permille: u32,
    /// The most that the brick's server lends now: its capacity unless the server reports less.
    pub(super) lendable_superpages: u32,
    pub(super) draining: bool,
    /// The power state of an unused brick. This field and those below never change.
    initial_power: PowerState,
    pub(super) domain: DomainId,
    /// Its place in the index.
    pub(super) leaf: u32,
    pub(super) cabling: u32,
    superpages: u32,
    limits: RateLimits,
    pub(super) ends: Ends,
}

impl MemoryState {
    pub(super) fn new(brick: &MemoryBrick, network: &Network, leaf: usize, cabling: u32) -> Self {
        let superpages = superpages_of(brick.capacity_bytes);
        let limits = RateLimits {
            read_bytes_per_s: brick.read_limit_bytes_per_s,
            write_bytes_per_s: brick.write_limit_bytes_per_s,
        };
        Self {
            free: Extents::new(superpages),
            left: limits,
            segments: 0,
            observed_permille: u32::from(brick.load_permille),
            lendable_superpages: superpages,
            draining: false,
            initial_power: brick.power,
            domain: brick.domain,
            leaf: MemoryId::at(leaf).0,
            cabling,
            superpages,
            limits,
            ends: network.ends(&brick.ports),
        }
    }

    /// Reserves bandwidth for one more segment.
    pub(super) fn reserve(&mut self, rates: RateLimits) {
        let RateLimits { read_bytes_per_s: read, write_bytes_per_s: write } = self.left;
        let is_there = rates.read_bytes_per_s <= read && rates.write_bytes_per_s <= write;
        assert!(is_there, "a brick is promised more than it serves");
        self.left.read_bytes_per_s -= rates.read_bytes_per_s;
        self.left.write_bytes_per_s -= rates.write_bytes_per_s;
        self.segments += 1;
    }

    /// Undoes [`reserve`](Self::reserve).
    pub(super) fn release(&mut self, rates: RateLimits) {
        assert_ne!(self.segments, 0, "a brick gives up more segments than it had");
        self.segments -= 1;
        self.left.read_bytes_per_s += rates.read_bytes_per_s;
        self.left.write_bytes_per_s += rates.write_bytes_per_s;
        let RateLimits { read_bytes_per_s: read, write_bytes_per_s: write } = self.limits;
        let is_right = self.left.read_bytes_per_s <= read && self.left.write_bytes_per_s <= write;
        assert!(is_right, "a brick got back more than it serves");
    }

    /// Bytes free.
    pub(super) fn free_bytes(&self) -> u64 {
        u64::from(self.free.total()) * SUPERPAGE_BYTES
    }

    pub(super) fn power(&self) -> PowerState {
        if self.segments > 0 { PowerState::On } else { self.initial_power }
    }

    /// Returns what the brick could serve over its standing circuits, whether or not other compute
    /// bricks find a free port.
    pub(super) fn values(&self) -> Values {
        let room = match self.draining {
            true => 0,
            false => {
                let used = self.superpages - self.free.total();
                self.lendable_superpages.saturating_sub(used)
            }
        };
        Values {
            largest_superpages: self.free.largest().min(room),
            total_superpages: self.free.total().min(room),
            read_left: self.left.read_bytes_per_s,
            write_left: self.left.write_bytes_per_s,
            load_permille: self.load_permille(),
            power: self.power(),
            is_open: true,
        }
    }

    /// Returns the load in thousandths: the largest of the shares taken of memory, of read and of
    /// write bandwidth, and of the load that the brick reports.
    pub(super) fn load_permille(&self) -> u32 {
        let share = |left: u64, all: u64| {
            let used = all - left;
            let share = match used.checked_mul(1000) {
                Some(thousandfold) => thousandfold / all,
                None => used / (all / 1000),
            };
            u32::try_from(share.min(1000)).expect("a share of 1000")
        };
        share(u64::from(self.free.total()), u64::from(self.superpages))
            .max(share(self.left.read_bytes_per_s, self.limits.read_bytes_per_s))
            .max(share(self.left.write_bytes_per_s, self.limits.write_bytes_per_s))
            .max(self.observed_permille)
    }
}

/// Segments per failure domain of their brick, sorted. Domains without segments are left out.
pub(super) type PerDomain = SmallVec<[(DomainId, u32); 12]>;

/// A compute brick.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(align(64))]
pub(super) struct ComputeState {
    pub(super) ends: Ends,
    pub(super) rack: u32,
    pub(super) tray: u32,
    pub(super) addresses: Extents,
    pub(super) per_domain: PerDomain,
}

impl ComputeState {
    pub(super) fn new(brick: &ComputeBrick, graph: &Graph, network: &Network) -> Self {
        Self {
            ends: network.ends(&brick.ports),
            rack: graph.trays()[brick.tray.index()].rack.0,
            tray: brick.tray.0,
            addresses: Extents::new(FAR_WINDOW_SUPERPAGES),
            per_domain: PerDomain::new(),
        }
    }

    /// Counts a segment in `domain`.
    pub(super) fn add_segment(&mut self, domain: DomainId) {
        match self.place_of(domain) {
            Ok(at) => self.per_domain[at].1 += 1,
            Err(at) => self.per_domain.insert(at, (domain, 1)),
        }
    }

    /// Undoes [`add_segment`](Self::add_segment).
    pub(super) fn remove_segment(&mut self, domain: DomainId) {
        let at = self.place_of(domain).expect("a domain that was counted up is there");
        self.per_domain[at].1 -= 1;
        if self.per_domain[at].1 == 0 {
            self.per_domain.remove(at);
        }
    }

    fn place_of(&self, domain: DomainId) -> Result<usize, usize> {
        self.per_domain.binary_search_by_key(&domain, |(domain, _)| *domain)
    }
}

/// The records of all memory bricks.
pub(super) fn memory_states(
    graph: &Graph,
    network: &Network,
    tree: &Tree,
    cabling: &[u32],
) -> Vec<MemoryState> {
    let all = graph.memories().iter().zip(cabling).enumerate();
    let state = |(index, (brick, cabling)): (usize, (&MemoryBrick, &u32))| {
        MemoryState::new(brick, network, tree.leaf(MemoryId::at(index)), *cabling)
    };
    all.map(state).collect()
}
