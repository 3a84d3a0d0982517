//! Grants taken over from a store, also such with a move under way.
//!
//! Adopting reserves exactly what a grant says, or nothing. In ascending order of segment ids it
//! costs the same for every grant; in any other order each looks at all that stand.

use crate::ids::{Epoch, RequestId, SegmentId};
use crate::{SUPERPAGE_BYTES, Vertex};

use super::grant::{Grant, RackError, Request};
use super::{Allocator, FAR_BASE_BYTES, FAR_WINDOW_SUPERPAGES, Standing, superpages_of};

impl Allocator {
    /// Takes over a grant from a store: reserves exactly what it says. Ids and epochs given later
    /// are higher than all adopted ones.
    ///
    /// # Errors
    /// The id is in use, or the grant does not fit; nothing has changed then.
    pub fn adopt(&mut self, request: &Request, grant: &Grant) -> Result<(), RackError> {
        if self.standing.contains_key(&request.id) {
            return Err(RackError::IdInUse(request.id));
        }
        let superpages = self.check(request)?;
        self.check_grant(request, grant, superpages)
            .map_err(|reason| RackError::Conflict { segment: grant.segment, reason })?;
        let conflict = |reason| RackError::Conflict { segment: grant.segment, reason };
        // A grant can only share its number with another one if that number was given before.
        let may_be_known = grant.segment.0 < self.next_segment;
        let has_number = |standing: &Standing| standing.grant.segment == grant.segment;
        if may_be_known && self.standing.values().any(|standing| has_number(standing)) {
            return Err(conflict("its segment id has another owner"));
        }
        let base = superpages_of(grant.entries[0].client_base_bytes - FAR_BASE_BYTES);
        if !self.computes[grant.compute.index()].addresses.take_at(base, superpages) {
            return Err(conflict("its client addresses are in use"));
        }
        if let Err(reason) = self.take_pieces(grant) {
            self.computes[grant.compute.index()].addresses.give(base, superpages);
            return Err(conflict(reason));
        }
        self.reserve_rest(grant);
        self.raise_ids(SegmentId(grant.segment.0), grant.epoch);
        let (request, grant) = (request.clone(), grant.clone());
        let standing = Standing { request, grant, moving: None };
        self.standing.insert(standing.request.id, Box::new(standing));
        Ok(())
    }

    /// Takes over the move of an adopted segment: `grant` is where it is moving to, as
    /// [`begin_move`](Self::begin_move) gave it.
    ///
    /// # Errors
    /// No such request, a move is under way, or the grant does not fit; nothing has changed then.
    pub fn adopt_move(&mut self, id: RequestId, grant: &Grant) -> Result<(), RackError> {
        let standing = self.standing.get(&id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving.is_some() {
            return Err(RackError::Moving(id));
        }
        let conflict = |reason| RackError::Conflict { segment: grant.segment, reason };
        let old = &standing.grant;
        if grant.segment != old.segment
            || grant.epoch <= old.epoch
            || grant.memory == old.memory
            || grant.entries.first().map(|entry| entry.client_base_bytes)
                != old.entries.first().map(|entry| entry.client_base_bytes)
        {
            return Err(conflict("it is no move of the segment that stands"));
        }
        let superpages = superpages_of(old.length_bytes());
        self.check_grant(&standing.request, grant, superpages).map_err(conflict)?;
        self.take_pieces(grant).map_err(conflict)?;
        self.reserve_rest(grant);
        self.raise_ids(grant.segment, grant.epoch);
        let standing = self.standing.get_mut(&id).ok_or(RackError::UnknownRequest(id))?;
        standing.moving = Some(Box::new(grant.clone()));
        Ok(())
    }

    /// Segment ids and epochs given from now on are above these. A controller that starts again
    /// says so, because the highest may have been released before.
    pub fn raise_ids(&mut self, segment: SegmentId, epoch: Epoch) {
        self.next_segment = self.next_segment.max(segment.0.saturating_add(1));
        self.next_epoch = self.next_epoch.max(epoch.0.saturating_add(1));
    }

    /// The highest segment id and epoch given or adopted so far; zero before the first.
    #[must_use]
    pub fn highest_ids(&self) -> (SegmentId, Epoch) {
        (SegmentId(self.next_segment - 1), Epoch(self.next_epoch - 1))
    }

    /// Takes exactly the superpages that the grant names, or none.
    fn take_pieces(&mut self, grant: &Grant) -> Result<(), &'static str> {
        let free = &mut self.memories[grant.memory.index()].free;
        for (index, entry) in grant.entries.iter().enumerate() {
            let first = superpages_of(entry.brick_offset_bytes);
            if free.take_at(first, superpages_of(entry.length_bytes)) {
                continue;
            }
            for entry in &grant.entries[..index] {
                let first = superpages_of(entry.brick_offset_bytes);
                free.give(first, superpages_of(entry.length_bytes));
            }
            return Err("its memory has another owner");
        }
        Ok(())
    }

    /// Everything of a stored grant that can be checked without reserving.
    fn check_grant(
        &self,
        request: &Request,
        grant: &Grant,
        superpages: u32,
    ) -> Result<(), &'static str> {
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
        if !self.network.admits(&grant.path, rates) {
            return Err("its path is not there or not free");
        }
        let owners = grant.path.ends().map(|port| self.graph.ports()[port.index()].owner);
        if owners != [Vertex::Compute(grant.compute), Vertex::Memory(grant.memory)] {
            return Err("its path joins other bricks");
        }
        if grant.segment == SegmentId(0) {
            return Err("segment ids start at 1");
        }
        Ok(())
    }
}
