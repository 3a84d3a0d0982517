//! A queue of sealed segments, oldest first, linked through the segments themselves so that one can
//! be removed from the middle.

use super::arena::{Arena, SegmentId};

/// A FIFO queue of sealed segments.
#[derive(Debug, Default, Clone, Copy)]
pub struct SegmentQueue {
    oldest: Option<SegmentId>,
    newest: Option<SegmentId>,
}

impl SegmentQueue {
    #[must_use]
    pub const fn oldest(&self) -> Option<SegmentId> {
        self.oldest
    }

    /// Seals the segment and puts it at the end.
    pub fn push(&mut self, arena: &mut Arena, id: SegmentId) {
        let segment = arena.segment_mut(id);
        assert!(!segment.is_sealed, "a segment is sealed once");
        segment.is_sealed = true;
        segment.older = self.newest;
        segment.newer = None;
        match self.newest {
            Some(newest) => arena.segment_mut(newest).newer = Some(id),
            None => self.oldest = Some(id),
        }
        self.newest = Some(id);
    }

    /// Removes a sealed segment from any position.
    pub fn remove(&mut self, arena: &mut Arena, id: SegmentId) {
        let segment = arena.segment_mut(id);
        assert!(segment.is_sealed, "only sealed segments stand in a queue");
        segment.is_sealed = false;
        let (older, newer) = (segment.older.take(), segment.newer.take());
        match older {
            Some(older) => arena.segment_mut(older).newer = newer,
            None => {
                assert!(self.oldest == Some(id), "who has no older one is this queue's oldest");
                self.oldest = newer;
            }
        }
        match newer {
            Some(newer) => arena.segment_mut(newer).older = older,
            None => {
                assert!(self.newest == Some(id), "who has no newer one is this queue's newest");
                self.newest = older;
            }
        }
    }
}
