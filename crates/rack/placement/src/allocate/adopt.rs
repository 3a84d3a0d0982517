//! Takes over grants from a store, including those with a move under way.
//!
//! Adopting reserves exactly what a grant says, or nothing. In ascending order of segment ids the
//! cost is the same for every grant; in any other order each adoption searches all standing grants.

use farpool_units::SUPERPAGE_BYTES;

use crate::Vertex;
use crate::ids::{Epoch, RequestId, SegmentId};

use super::grant::{Grant, RackError, Request};
use super::standing::{Place, Standing, place_of};
use super::{Allocator, FAR_BASE_BYTES, FAR_WINDOW_SUPERPAGES};

impl Allocator {
    /// Takes over a grant from a store: reserves exactly what it says. Ids and epochs given later
    /// are higher than all adopted ones.
    ///
    /// # Errors
    /// The id is in use, or the grant does not fit; nothing has changed then.
    pub fn adopt(&mut self, request: &Request, grant: &Grant) -> Result<(), RackError> {
        if self.standing.get(request.id).is_some() {
            return Err(RackError::IdInUse(request.id));
        }
        let superpages = self.check(request)?;
        let conflict = |reason| RackError::Conflict { segment: grant.segment, reason };
        let place = self.check_grant(request, grant, superpages).map_err(conflict)?;
        // Another grant can have this segment id only if the id was given before.
        let may_be_known = grant.segment.0 < self.next_segment;
        if may_be_known && self.standing.iter().any(|other| other.segment == grant.segment) {
            return Err(conflict("its segment id has another owner"));
        }
        if !self.computes[grant.compute.index()].addresses.take_at(place.base, superpages) {
            return Err(conflict("its client addresses are in use"));
        }
        if let Err(reason) = self.take_pieces(&place) {
            self.computes[grant.compute.index()].addresses.give(place.base, superpages);
            return Err(conflict(reason));
        }
        self.reserve_rest(request.compute, request.rates, &place);
        self.raise_ids(grant.segment, grant.epoch);
        self.standing.insert(Standing::new(request, grant.segment, place));
        Ok(())
    }

    /// Takes over the move of an adopted segment: `grant` is where it is moving to, as
    /// [`begin_move`](Self::begin_move) gave it.
    ///
    /// # Errors
    /// No such request, a move is under way, or the grant does not fit; nothing has changed then.
    pub fn adopt_move(&mut self, id: RequestId, grant: &Grant) -> Result<(), RackError> {
        let standing = self.standing.get(id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving().is_some() {
            return Err(RackError::Moving(id));
        }
        let conflict = |reason| RackError::Conflict { segment: grant.segment, reason };
        let old = &standing.place;
        let request = standing.request();
        let superpages = old.superpages();
        let (segment, old) = (standing.segment, (old.epoch, old.memory, old.base));
        let place = self.check_grant(&request, grant, superpages).map_err(conflict)?;
        if grant.segment != segment
            || place.epoch <= old.0
            || place.memory == old.1
            || place.base != old.2
        {
            return Err(conflict("it is no move of the segment that stands"));
        }
        self.take_pieces(&place).map_err(conflict)?;
        self.reserve_rest(request.compute, request.rates, &place);
        self.raise_ids(grant.segment, grant.epoch);
        let standing = self.standing.get_mut(id).ok_or(RackError::UnknownRequest(id))?;
        standing.set_moving(place);
        Ok(())
    }

    /// Makes all segment ids and epochs given from now on higher than these. A restarted controller
    /// calls this, because the highest may have been released before.
    pub fn raise_ids(&mut self, segment: SegmentId, epoch: Epoch) {
        self.next_segment = self.next_segment.max(segment.0.saturating_add(1));
        self.next_epoch = self.next_epoch.max(epoch.0.saturating_add(1));
    }

    /// Returns the highest segment id and epoch given or adopted so far. Both are zero before the
    /// first.
    #[must_use]
    pub fn highest_ids(&self) -> (SegmentId, Epoch) {
        (SegmentId(self.next_segment - 1), Epoch(self.next_epoch - 1))
    }

    /// Takes exactly the superpages that the place names, or none.
    fn take_pieces(&mut self, place: &Place) -> Result<(), &'static str> {
        let free = &mut self.memories[place.memory.index()].free;
        for (index, (first, count)) in place.pieces.iter().enumerate() {
            if free.take_at(*first, *count) {
                continue;
            }
            for (first, count) in &place.pieces[..index] {
                free.give(*first, *count);
            }
            return Err("its memory has another owner");
        }
        Ok(())
    }

    /// Returns the place of a stored grant after every check that needs no reservation.
    fn check_grant(
        &self,
        request: &Request,
        grant: &Grant,
        superpages: u32,
    ) -> Result<Place, &'static str> {
        let Some(state) = self.memories.get(grant.memory.index()) else {
            return Err("there is no such memory brick");
        };
        let rates = grant.blade_limits;
        if grant.compute != request.compute
            || rates != request.rates
            || grant.client_limits != rates
        {
            return Err("it is not what was requested");
        }
        let mut expected_base = grant.entries.first().map_or(0, |entry| entry.client_base_bytes);
        let window_bytes = u64::from(FAR_WINDOW_SUPERPAGES) * SUPERPAGE_BYTES;
        if !(FAR_BASE_BYTES..FAR_BASE_BYTES + window_bytes).contains(&expected_base) {
            return Err("its client addresses are outside the window of far addresses");
        }
        let mut bytes = 0_u64;
        for entry in &grant.entries {
            let aligned = [entry.length_bytes, entry.brick_offset_bytes, entry.client_base_bytes]
                .iter()
                .all(|value| value.is_multiple_of(SUPERPAGE_BYTES));
            let brick_bytes = self.graph.memories()[grant.memory.index()].capacity_bytes;
            let inside = entry.length_bytes > 0
                && entry.length_bytes <= brick_bytes
                && entry.brick_offset_bytes <= brick_bytes - entry.length_bytes;
            if !aligned || !inside || entry.client_base_bytes != expected_base {
                return Err("its entries are not runs of superpages one after the other");
            }
            expected_base += entry.length_bytes;
            bytes += entry.length_bytes;
        }
        if bytes != u64::from(superpages) * SUPERPAGE_BYTES {
            return Err("its entries are not what was requested");
        }
        if rates.read_bytes_per_s > state.left.read_bytes_per_s
            || rates.write_bytes_per_s > state.left.write_bytes_per_s
        {
            return Err("the memory brick does not serve that much bandwidth");
        }
        let Some(hops) = self.network.admits(&grant.path, rates) else {
            return Err("its path is not there or not free");
        };
        let owners = grant.path.ends().map(|port| self.graph.ports()[port.index()].owner);
        if owners != [Vertex::Compute(grant.compute), Vertex::Memory(grant.memory)] {
            return Err("its path joins other bricks");
        }
        if grant.segment == SegmentId(0) {
            return Err("segment ids start at 1");
        }
        let place = place_of(grant, hops);
        let whole = Standing::new(request, grant.segment, place.clone());
        if whole.grant(&place, &self.network) != *grant {
            return Err("its entries or switch settings do not follow from its path");
        }
        Ok(place)
    }
}
