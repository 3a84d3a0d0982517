//! Segments that change place or owner.
//!
//! A move has two steps, because data is copied in between: [`Allocator::begin_move`] reserves the
//! new place beside the old, [`Allocator::finish_move`] releases the old one (or
//! [`Allocator::abort_move`] the new one). The client's addresses and the segment's id stay.

use crate::ids::{ComputeId, DomainId, Epoch, MemoryId, RequestId};

use super::Allocator;
use super::grant::{Grant, RackError, RateLimits, Request};
use super::network::{Connection, Hops};
use super::policy::PlacementPolicy;
use super::standing::{Place, Standing};

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
    ) -> Result<Grant, RackError> {
        let standing = self.standing.get(id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving().is_some() {
            return Err(RackError::Moving(id));
        }
        let wish = Request { policy, avoid: avoid.to_vec(), ..standing.request() };
        let (now, base) = (standing.place.memory, standing.place.base);
        let superpages = self.check(&wish)?;
        let (memory, hops) = self.find(&wish, superpages, Some(now))?;
        let place = self.reserve_new(&wish, base, superpages, memory, hops);
        let standing = self.standing.get_mut(id).ok_or(RackError::UnknownRequest(id))?;
        let grant = standing.grant(&place, &self.network);
        standing.set_moving(place);
        Ok(grant)
    }

    /// Releases the old place of a segment that was moved. Returns its old grant.
    ///
    /// # Errors
    /// No such request, or no move is under way.
    pub fn finish_move(&mut self, id: RequestId) -> Result<Grant, RackError> {
        self.end_move(id, |standing, new| std::mem::replace(&mut standing.place, new))
    }

    /// Releases the new place of a segment, which stays where it was. Returns the grant of the new
    /// place.
    ///
    /// # Errors
    /// No such request, or no move is under way.
    pub fn abort_move(&mut self, id: RequestId) -> Result<Grant, RackError> {
        self.end_move(id, |_, new| new)
    }

    /// Releases the place that `which` returns when it is given the new one. Returns the grant of
    /// that place.
    fn end_move(
        &mut self,
        id: RequestId,
        which: impl FnOnce(&mut Standing, Place) -> Place,
    ) -> Result<Grant, RackError> {
        let standing = self.standing.get_mut(id).ok_or(RackError::UnknownRequest(id))?;
        let new = standing.take_moving().ok_or(RackError::NotMoving(id))?;
        let gone = which(standing, new);
        let is_other = gone.epoch != standing.place.epoch && gone.base == standing.place.base;
        assert!(is_other, "a move changes the epoch and leaves the addresses");
        let grant = standing.grant(&gone, &self.network);
        let (compute, rates) = (standing.compute, standing.rates);
        self.unreserve(compute, rates, &gone);
        Ok(grant)
    }

    /// Gives a segment to another compute brick; memory stays where it is, the epoch is new.
    ///
    /// # Errors
    /// Unknown ids, a move is under way, or no way from the new owner to the brick; nothing has
    /// changed then.
    pub fn change_owner(&mut self, id: RequestId, compute: ComputeId) -> Result<Grant, RackError> {
        if compute.index() >= self.computes.len() {
            return Err(RackError::UnknownCompute(compute));
        }
        let standing = self.standing.get(id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving().is_some() {
            return Err(RackError::Moving(id));
        }
        let (old, owner, rates) = (standing.place.clone(), standing.compute, standing.rates);
        let superpages = old.superpages();
        if self.computes[compute.index()].addresses.largest() < superpages {
            return Err(RackError::NoAddress);
        }
        // The old path must be released before the new one is searched: both may need the same
        // port.
        self.network.release(&old.hops, rates);
        let Some(hops) = self.way(compute, old.memory, rates) else {
            let any_way = self.way(compute, old.memory, RateLimits::default()).is_some();
            self.network.reserve(&old.hops, rates);
            return Err(if any_way { RackError::NoBandwidth } else { RackError::NoCircuit });
        };
        let addresses = &mut self.computes[compute.index()].addresses;
        let base = addresses.take(superpages).expect("the largest run was looked at");
        self.network.reserve(&hops, rates);
        self.computes[owner.index()].addresses.give(old.base, superpages);
        let domain = self.memories[old.memory.index()].domain;
        self.computes[owner.index()].remove_segment(domain);
        self.computes[compute.index()].add_segment(domain);
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        self.refresh(old.memory);
        let standing = self.standing.get_mut(id).ok_or(RackError::UnknownRequest(id))?;
        standing.compute = compute;
        standing.place = Place { epoch, base, hops, ..old };
        Ok(standing.grant(&standing.place, &self.network))
    }

    fn way(&mut self, compute: ComputeId, memory: MemoryId, rates: RateLimits) -> Option<Hops> {
        self.network.begin(&self.computes[compute.index()].ends, rates);
        let ends = &self.memories[memory.index()].ends;
        match self.network.connect(memory, ends, usize::MAX) {
            Connection::Found(hops) => Some(hops),
            Connection::None(_) => None,
        }
    }
}
