//! Segments that change place or owner.
//!
//! A move has two steps, because data is copied in between: [`Allocator::begin_move`] reserves the
//! new place beside the old, [`Allocator::finish_move`] lets go of the old one (or
//! [`Allocator::abort_move`] of the new). The client's addresses and the segment's id stay.

use crate::SUPERPAGE_BYTES;
use crate::ids::{ComputeId, DomainId, Epoch, MemoryId, RequestId};

use super::grant::{Grant, Path, RackError, RateLimits, Request};
use super::network::Connection;
use super::policy::PlacementPolicy;
use super::{Allocator, FAR_BASE_BYTES, superpages_of};

impl Allocator {
    /// Reserves another brick for a segment; the grant returned has a new epoch and takes effect
    /// with [`finish_move`](Self::finish_move).
    ///
    /// # Errors
    /// No such request, a move is under way, or there is no other place; nothing has changed then.
    pub fn begin_move(
        &mut self,
        id: RequestId,
        policy: PlacementPolicy,
        avoid: &[DomainId],
    ) -> Result<&Grant, RackError> {
        let standing = self.standing.get(&id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving.is_some() {
            return Err(RackError::Moving(id));
        }
        let wish = Request { policy, avoid: avoid.to_vec(), ..standing.request.clone() };
        let (segment, now) = (standing.grant.segment, standing.grant.memory);
        let base = superpages_of(standing.grant.entries[0].client_base_bytes - FAR_BASE_BYTES);
        let superpages = self.check(&wish)?;
        let (memory, path) = self.find(&wish, superpages, Some(now))?;
        let grant = self.reserve_new(&wish, segment, base, superpages, memory, path);
        let standing = self.standing.get_mut(&id).ok_or(RackError::UnknownRequest(id))?;
        Ok(standing.moving.insert(Box::new(grant)))
    }

    /// Lets go of the old place of a segment that was moved; returns its old grant.
    ///
    /// # Errors
    /// No such request, or no move is under way.
    pub fn finish_move(&mut self, id: RequestId) -> Result<Grant, RackError> {
        let standing = self.standing.get_mut(&id).ok_or(RackError::UnknownRequest(id))?;
        let new = standing.moving.take().ok_or(RackError::NotMoving(id))?;
        let old = std::mem::replace(&mut standing.grant, *new);
        self.unreserve(&old);
        Ok(old)
    }

    /// Lets go of the new place of a segment; it stays where it was.
    ///
    /// # Errors
    /// No such request, or no move is under way.
    pub fn abort_move(&mut self, id: RequestId) -> Result<Grant, RackError> {
        let standing = self.standing.get_mut(&id).ok_or(RackError::UnknownRequest(id))?;
        let new = standing.moving.take().ok_or(RackError::NotMoving(id))?;
        self.unreserve(&new);
        Ok(*new)
    }

    /// Gives a segment to another compute brick; memory stays where it is, the epoch is new.
    ///
    /// # Errors
    /// Unknown ids, a move is under way, or no way from the new owner to the brick; nothing has
    /// changed then.
    pub fn change_owner(&mut self, id: RequestId, compute: ComputeId) -> Result<&Grant, RackError> {
        if compute.index() >= self.computes.len() {
            return Err(RackError::UnknownCompute(compute));
        }
        let standing = self.standing.get(&id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving.is_some() {
            return Err(RackError::Moving(id));
        }
        let old = standing.grant.clone();
        let superpages = superpages_of(old.length_bytes());
        if self.computes[compute.index()].addresses.largest() < superpages {
            return Err(RackError::NoAddress);
        }
        // The old way must be free before the new one is sought: both may need the same port.
        self.network.release(&old.path, old.blade_limits);
        let Some(path) = self.way(compute, old.memory, old.blade_limits) else {
            let any_way = self.way(compute, old.memory, RateLimits::default()).is_some();
            self.network.reserve(&old.path, old.blade_limits);
            return Err(if any_way { RackError::NoBandwidth } else { RackError::NoCircuit });
        };
        let addresses = &mut self.computes[compute.index()].addresses;
        let base = addresses.take(superpages).expect("the largest run was looked at");
        self.network.reserve(&path, old.blade_limits);
        self.give_addresses(&old);
        self.count_domain(old.compute, old.memory, false);
        self.count_domain(compute, old.memory, true);
        let mut new = Grant { epoch: Epoch(self.next_epoch), compute, ..old };
        self.next_epoch += 1;
        new.settings = self.network.settings(&path);
        let mut client_base_bytes = FAR_BASE_BYTES + u64::from(base) * SUPERPAGE_BYTES;
        for entry in &mut new.entries {
            entry.client_base_bytes = client_base_bytes;
            entry.port = path.ports[0];
            entry.circuit = new.settings.first().map(|setting| setting.circuit);
            client_base_bytes += entry.length_bytes;
        }
        new.path = path;
        self.refresh(new.memory);
        let standing = self.standing.get_mut(&id).ok_or(RackError::UnknownRequest(id))?;
        standing.request.compute = compute;
        standing.grant = new;
        Ok(&standing.grant)
    }

    fn way(&mut self, compute: ComputeId, memory: MemoryId, rates: RateLimits) -> Option<Path> {
        let ports = &self.graph.computes()[compute.index()].ports;
        self.network.begin(ports, rates);
        let ports = &self.graph.memories()[memory.index()].ports;
        match self.network.connect(memory, ports, usize::MAX) {
            Connection::Found(path) => Some(path),
            Connection::None(_) => None,
        }
    }
}
