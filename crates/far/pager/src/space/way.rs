//! How memory is moved out, by what the program may do with it. Pure.

use crate::space::frames::Zone;
use crate::sys::Protection;

/// How pages are moved out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Into frames of the same rights, while the program runs.
    Move(Zone),
    /// The kernel moves no page that may not be written to: the program stands still, and the
    /// memory has other rights for that moment ([`crate::sys::standstill`]).
    Standstill,
    /// They stay.
    Nowhere,
}

impl Protection {
    /// `may_execute`: this process can give memory the right to be executed.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
