//! Segments that change their size where they lie.
//!
//! The segment keeps its brick, its path, its rates and its epoch. Memory is added behind its last
//! piece if that is free, else as a further piece if it may have several; it is taken from its end.
//! Its client addresses stay where they are unless another segment is in the way.

use farpool_units::SUPERPAGE_BYTES;

use crate::ids::RequestId;

use super::Allocator;
use super::extents::Pieces;
use super::grant::{Grant, RackError, Request};
use super::standing::Place;

impl Allocator {
    /// Changes the size of a segment; its grant keeps its epoch.
    ///
    /// # Errors
    /// No such request, a move is under way, or its brick has no room for it; nothing has changed
    /// then.
    pub fn resize(&mut self, id: RequestId, bytes: u64) -> Result<Grant, RackError> {
        let standing = self.standing.get(id).ok_or(RackError::UnknownRequest(id))?;
        if standing.moving().is_some() {
            return Err(RackError::Moving(id));
        }
        let request = Request { bytes, ..standing.request() };
        let old = standing.place.clone();
        let wanted = self.check(&request)?;
        let has = old.superpages();
        let place = match wanted.checked_sub(has) {
            Some(0) => old,
            Some(extra) => self.grown(&request, old, extra)?,
            None => self.shrunk(&request, old, has - wanted),
        };
        self.refresh(place.memory);
        let standing = self.standing.get_mut(id).ok_or(RackError::UnknownRequest(id))?;
        standing.set_size(bytes, place);
        Ok(standing.grant(&standing.place, &self.network))
    }

    fn grown(
        &mut self,
        request: &Request,
        mut place: Place,
        extra: u32,
    ) -> Result<Place, RackError> {
        let no_room = RackError::NoCapacity { bytes: u64::from(extra) * SUPERPAGE_BYTES };
        let state = &mut self.memories[place.memory.index()];
        // Not beyond what the brick lends now, and nothing new on one that is drained.
        if state.values().total_superpages < extra {
            return Err(no_room);
        }
        let has = place.superpages();
        let end = place.pieces.last().map_or(0, |(first, count)| first + count);
        let more: Pieces = if state.free.take_at(end, extra) {
            Pieces::from_iter([(end, extra)])
        } else if request.may_split {
            state.free.take_split(extra).ok_or(no_room)?
        } else {
            return Err(no_room);
        };
        let addresses = &mut self.computes[request.compute.index()].addresses;
        if !addresses.take_at(place.base + has, extra) {
            let Some(base) = addresses.take(has + extra) else {
                let free = &mut self.memories[place.memory.index()].free;
                more.iter().for_each(|(first, count)| free.give(*first, *count));
                return Err(RackError::NoAddress);
            };
            addresses.give(place.base, has);
            place.base = base;
        }
        for (first, count) in more {
            match place.pieces.last_mut().filter(|last| last.0 + last.1 == first) {
                Some(last) => last.1 += count,
                None => place.pieces.push((first, count)),
            }
        }
        Ok(place)
    }

    fn shrunk(&mut self, request: &Request, mut place: Place, less: u32) -> Place {
        let has = place.superpages();
        assert!(less < has, "a segment has at least one superpage");
        let free = &mut self.memories[place.memory.index()].free;
        let mut left = less;
        while left > 0 {
            let (first, count) = place.pieces.pop().expect("more than is taken away is there");
            let taken = count.min(left);
            free.give(first + count - taken, taken);
            if taken < count {
                place.pieces.push((first, count - taken));
            }
            left -= taken;
        }
        let addresses = &mut self.computes[request.compute.index()].addresses;
        addresses.give(place.base + has - less, less);
        place
    }
}
