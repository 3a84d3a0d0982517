//! The standing requests and what each was granted, in records so small that a million of them are
//! quick.
//!
//! A release of a random segment finds none of its data in a cache, so its whole cost is the number
//! of lines that it touches: one of the table of ids and the two of its [`Standing`]. Everything
//! else in a [`Grant`] follows from the graph and is computed on request.
//!
//! The hash is the standard library's keyed one: clients choose request ids, and must not be able
//! to choose ids that share a slot.

use std::hash::{BuildHasher, RandomState};

use farpool_units::SUPERPAGE_BYTES;
use smallvec::SmallVec;

use crate::ids::{ComputeId, DomainId, Epoch, MemoryId, RequestId, SegmentId};

use super::extents::Pieces;
use super::grant::{Grant, MemPortEntry, RateLimits, Request};
use super::network::{Hops, Network};
use super::policy::PlacementPolicy;
use super::table::Table;
use super::{FAR_BASE_BYTES, superpages_of};

/// Where a segment lies, or where it is moving to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) epoch: Epoch,
    pub(super) memory: MemoryId,
    /// First superpage in the compute brick's window of far addresses.
    pub(super) base: u32,
    pub(super) hops: Hops,
    pub(super) pieces: Pieces,
}

impl Place {
    /// Superpages of the segment.
    pub(super) fn superpages(&self) -> u32 {
        self.pieces.iter().map(|(_, count)| count).sum()
    }
}

/// Fields that most requests do not use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Rare {
    avoid: Vec<DomainId>,
    moving: Option<Place>,
}

/// A request that was granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Standing {
    id: RequestId,
    pub(super) segment: SegmentId,
    bytes: u64,
    pub(super) rates: RateLimits,
    pub(super) place: Place,
    rare: Option<Box<Rare>>,
    pub(super) compute: ComputeId,
    policy: PlacementPolicy,
    may_split: bool,
}

const _: () = assert!(size_of::<Standing>() == 128, "a grant that stands is two cache lines");

impl Standing {
    pub(super) fn new(request: &Request, segment: SegmentId, place: Place) -> Self {
        let rare = || Box::new(Rare { avoid: request.avoid.clone(), moving: None });
        Self {
            id: request.id,
            segment,
            bytes: request.bytes,
            rates: request.rates,
            place,
            rare: (!request.avoid.is_empty()).then(rare),
            compute: request.compute,
            policy: request.policy,
            may_split: request.may_split,
        }
    }

    /// The content of an unused slot.
    fn vacant() -> Self {
        let rates = RateLimits::default();
        let request = Request::new(RequestId(0), ComputeId(0), 0, rates, PlacementPolicy::FirstFit);
        let (hops, pieces) = (SmallVec::new(), SmallVec::new());
        let place = Place { epoch: Epoch(0), memory: MemoryId(0), base: 0, hops, pieces };
        Self::new(&request, SegmentId(0), place)
    }

    pub(super) fn id(&self) -> RequestId {
        self.id
    }

    fn is_vacant(&self) -> bool {
        self.place.hops.is_empty()
    }

    fn avoid(&self) -> &[DomainId] {
        self.rare.as_ref().map_or(&[], |rare| &rare.avoid)
    }

    /// Where the segment is being moved to.
    pub(super) fn moving(&self) -> Option<&Place> {
        self.rare.as_ref()?.moving.as_ref()
    }

    pub(super) fn set_moving(&mut self, place: Place) {
        let before = self.rare.get_or_insert_default().moving.replace(place);
        assert!(before.is_none(), "a segment moves to one place");
    }

    pub(super) fn take_moving(&mut self) -> Option<Place> {
        let moving = self.rare.as_mut()?.moving.take();
        if self.avoid().is_empty() {
            self.rare = None;
        }
        moving
    }

    /// Sets another size, and the place that has it.
    pub(super) fn set_size(&mut self, bytes: u64, place: Place) {
        (self.bytes, self.place) = (bytes, place);
    }

    /// Whether `request` is the one that was granted.
    pub(super) fn is_of(&self, request: &Request) -> bool {
        let Request { id, compute, bytes, rates, policy, avoid, may_split } = request;
        (self.id, self.compute, self.bytes, self.rates) == (*id, *compute, *bytes, *rates)
            && (self.policy, self.may_split) == (*policy, *may_split)
            && self.avoid() == avoid
    }

    /// The request.
    pub(super) fn request(&self) -> Request {
        Request {
            id: self.id,
            compute: self.compute,
            bytes: self.bytes,
            rates: self.rates,
            policy: self.policy,
            avoid: self.avoid().to_vec(),
            may_split: self.may_split,
        }
    }

    /// Returns the whole grant for `place`, which is one of this request's places.
    pub(super) fn grant(&self, place: &Place, network: &Network) -> Grant {
        let path = network.path(&place.hops);
        let settings = network.settings(&place.hops);
        let bytes = |superpages: u32| u64::from(superpages) * SUPERPAGE_BYTES;
        let mut client_base_bytes = FAR_BASE_BYTES + bytes(place.base);
        let entry = |(first, count): &(u32, u32)| {
            let entry = MemPortEntry {
                client_base_bytes,
                length_bytes: bytes(*count),
                port: path.ports[0],
                circuit: settings.first().map(|setting| setting.circuit),
                brick_offset_bytes: bytes(*first),
            };
            client_base_bytes += bytes(*count);
            entry
        };
        Grant {
            segment: self.segment,
            epoch: place.epoch,
            compute: self.compute,
            memory: place.memory,
            entries: place.pieces.iter().map(entry).collect(),
            path,
            settings,
            client_limits: self.rates,
            blade_limits: self.rates,
        }
    }
}

/// Returns the place that a stored grant names; `hops` is its path. The caller has checked the
/// grant.
pub(super) fn place_of(grant: &Grant, hops: Hops) -> Place {
    let base = superpages_of(grant.entries[0].client_base_bytes - FAR_BASE_BYTES);
    let piece = |entry: &MemPortEntry| {
        (superpages_of(entry.brick_offset_bytes), superpages_of(entry.length_bytes))
    };
    let pieces = grant.entries.iter().map(piece).collect();
    Place { epoch: grant.epoch, memory: grant.memory, base, hops, pieces }
}

/// All standing requests, by request id.
#[derive(Clone, Debug, Default)]
pub(super) struct Book {
    slots: Vec<Standing>,
    /// Unused slots; the one freed last is in a cache and is used first.
    vacant: Vec<u32>,
    table: Table,
    hasher: RandomState,
}

impl Book {
    /// Returns half of the hash, which is enough: the table has fewer than 2^32 entries.
    fn hash(&self, id: RequestId) -> u32 {
        u32::try_from(self.hasher.hash_one(id) >> 32).expect("half of 64 bits")
    }

    fn slot(&self, id: RequestId) -> Option<usize> {
        let slot = self.table.find(self.hash(id), |slot| self.slots[slot as usize].id == id);
        slot.map(|slot| slot as usize)
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Standing> {
        self.slot(id).map(|slot| &self.slots[slot])
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut Standing> {
        self.slot(id).map(|slot| &mut self.slots[slot])
    }

    /// All standing requests, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Standing> {
        self.slots.iter().filter(|standing| !standing.is_vacant())
    }

    /// Adds a request whose id is not in the book.
    ///
    /// # Panics
    /// If there are 2^32 standing requests: their records alone would be 512 GiB.
    pub(super) fn insert(&mut self, standing: Standing) {
        assert!(!standing.is_vacant(), "what stands has a path");
        let hash = self.hash(standing.id);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                let before = std::mem::replace(&mut self.slots[slot as usize], standing);
                assert!(before.is_vacant(), "slot {slot} is somebody's");
                slot
            }
            None => {
                self.slots.push(standing);
                u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 grants")
            }
        };
        self.table.insert(hash, slot);
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<Standing> {
        let hash = self.hash(id);
        let slot = self.table.remove(hash, |slot| self.slots[slot as usize].id == id)?;
        self.vacant.push(slot);
        Some(std::mem::replace(&mut self.slots[slot as usize], Standing::vacant()))
    }
}
