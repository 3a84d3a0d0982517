//! How memory is moved out, depending on the program's rights to it. Pure.

use crate::space::frames::Zone;
use crate::space::registry::Registry;
use crate::space::units::{CHUNK_BYTES, chunk_bits};
use crate::sys::Protection;

/// How pages are moved out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Into frames with the same rights, while the program runs.
    Move(Zone),
    /// The kernel moves no page that may not be written to: the program stands still, and the
    /// memory gets other rights for that moment ([`crate::sys::standstill`]).
    Standstill,
    /// They stay.
    Nowhere,
}

impl Protection {
    /// How memory with these rights is moved out. `may_execute`: this process can make memory
    /// executable.
    pub fn way(self, may_execute: bool) -> Way {
        match (self.can_read, self.can_write, self.can_execute) {
            (_, _, true) if !may_execute => Way::Nowhere,
            (_, false, _) => Way::Standstill,
            (true, true, false) => Way::Move(Zone::ReadWrite),
            (false, true, false) => Way::Move(Zone::Write),
            (true, true, true) => Way::Move(Zone::ReadWriteExecute),
            (false, true, true) => Way::Move(Zone::WriteExecute),
        }
    }
}

/// The way in which pages of the chunk at `start` are moved out next, and which of `pages` go that
/// way: pages that move while the program runs come first. Pure.
pub(crate) fn next_way(
    registry: &Registry,
    start: usize,
    pages: u64,
    way_of: impl Fn(Protection) -> Way,
) -> (Way, u64) {
    let mut next = (Way::Nowhere, 0);
    for part in registry.overlapping(start, start + CHUNK_BYTES) {
        let bits = chunk_bits(&(part.start..part.end), start) & pages;
        let way = way_of(part.protection);
        match (next.0, way) {
            _ if bits == 0 || way == Way::Nowhere => {}
            (before, _) if before == way => next.1 |= bits,
            (Way::Nowhere | Way::Standstill, Way::Move(_)) | (Way::Nowhere, Way::Standstill) => {
                next = (way, bits);
            }
            _ => {}
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::registry::Region;
    use farpool_units::PAGE_BYTES;

    #[test]
    fn what_may_be_written_to_moves_into_equal_frames_and_the_rest_at_a_standstill() {
        let of = |bits: u8| Protection {
            can_read: bits & 4 != 0,
            can_write: bits & 2 != 0,
            can_execute: bits & 1 != 0,
        };
        for bits in 0..8 {
            let (protection, can_execute) = (of(bits), bits & 1 != 0);
            assert_eq!(protection.is_some(), bits != 0);
            let way = protection.way(true);
            match way {
                Way::Move(zone) => assert_eq!(zone.protection(), protection),
                Way::Standstill => assert!(!protection.can_write),
                Way::Nowhere => panic!("{protection:?} stays"),
            }
            let expected = if can_execute { Way::Nowhere } else { way };
            assert_eq!(protection.way(false), expected);
        }
    }

    #[test]
    fn what_moves_while_the_program_runs_comes_first() {
        let start = 8 * CHUNK_BYTES;
        let mut registry = Registry::default();
        let mut add = |pages: std::ops::Range<usize>, can_write, can_execute| {
            let protection = Protection { can_write, can_execute, ..Protection::READ_WRITE };
            let (start, end) = (start + pages.start * PAGE_BYTES, start + pages.end * PAGE_BYTES);
            registry.insert(Region { start, end, protection, ..Region::default() });
        };
        add(0..4, false, false);
        add(4..8, true, false);
        add(8..12, true, true);
        add(12..70, false, true);
        let next = |pages, may_execute| {
            next_way(&registry, start, pages, |protection| protection.way(may_execute))
        };
        assert_eq!(next(u64::MAX, true), (Way::Move(Zone::ReadWrite), 0xf0));
        assert_eq!(next(!0xf0, true), (Way::Move(Zone::ReadWriteExecute), 0xf00));
        assert_eq!(next(!0xff0, true), (Way::Standstill, !0xff0));
        assert_eq!(next(!0xff0, false), (Way::Standstill, 0xf));
        assert_eq!(next(!0xfff, false), (Way::Nowhere, 0));
        assert_eq!(next(0, true), (Way::Nowhere, 0));
    }
}
