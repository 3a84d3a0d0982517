//! Walking over all items in memory, one segment at a time.
//!
//! Between two segments the store may change: items that move meanwhile may be met twice or not at
//! all, items that stay are met once. A segment is walked in one call, so no place has to stay
//! valid for longer.

use super::index::Tier;
use super::item::ItemView;
use super::{Found, Store};

/// An item met on the walk.
#[derive(Debug)]
pub struct Walked<'a> {
    pub view: ItemView<'a>,
    pub cas: u64,
    /// When it was last touched, in seconds of the server's clock.
    pub accessed_s: u32,
}

impl Store {
    /// Shows `each` the live items of the first segment in use numbered at least `from`, until it
    /// returns false. Returns the number to continue from, or None if there is no further segment.
    pub fn walk_segment(
        &self,
        from: usize,
        mut each: impl FnMut(Walked<'_>) -> bool,
    ) -> Option<usize> {
        let (number, id) = self.arena.first_in_use(from)?;
        let mut next = self.arena.first(id);
        while let Some(place) = next {
            let view = self.arena.item(place);
            let hash = self.hash_of(view.key());
            let entry =
                self.index.find(hash, |it| it.tier() == Tier::Memory && it.place() == place);
            let expires_s = view.expires_s();
            let is_live = (expires_s == 0 || expires_s > self.now_s)
                && (self.flushed_cas == 0 || !self.is_flushed(place));
            if let Some((at, _)) = entry
                && is_live
            {
                let found = Found { at, place };
                let (cas, accessed_s) = (self.cas(found), self.accessed_s(found));
                if !each(Walked { view, cas, accessed_s }) {
                    break;
                }
            }
            next = self.arena.next(place);
        }
        Some(number + 1)
    }
}
