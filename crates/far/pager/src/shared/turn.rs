//! Turns for the processes of a tree that thrashes.
//!
//! When many processes fault at once and none can keep the pages it works on, each page is moved
//! out again before its process has come back to it, and all of them together get next to nothing
//! done. Then one process at a time is served: for a turn it gives nothing up and gets all free
//! memory, and the others make room for it. With its pages around it, it does in one turn what
//! would have taken minutes.
//!
//! A process asks for a turn when it went over the limit because it had nothing to move out, which
//! happens only then, or when it sees the tree thrash (`evict::thrash`). Turns are noted
//! on the board, in one word: the process whose turn it is, and until when.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// A turn: long enough to bring some ten thousand pages from a blade and to work on them.
pub const TURN_MS: u32 = 200;
/// A process that had a turn leaves the next one to others that ask within this time.
const REST_MS: u32 = 20;

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The tree does not thrash: no process has a turn.
    Nobodys,
    Mine,
    /// The turn of the process with this id.
    Anothers(u32),
}

/// A process's state between turns.
#[derive(Debug, Default)]
pub struct Turns {
    overruns_seen: u64,
}

impl Turns {
    /// Whose turn it is now. Takes a free turn if this process needs it: its count of overruns has
    /// grown, or it `wants` one. The time may start anywhere and wraps, but is the same for all
    /// processes.
    pub fn look(
        &mut self,
        word: &AtomicU64,
        pid: u32,
        now_ms: u32,
        overruns: u64,
        wants: bool,
    ) -> Turn {
        let overran = overruns > std::mem::replace(&mut self.overruns_seen, overruns);
        let needs = overran || wants;
        let noted = word.load(SeqCst);
        let (holder, until_ms) = unpack(noted);
        let over_ms = now_ms.wrapping_sub(until_ms).cast_signed();
        if holder != 0 && over_ms < 0 {
            return if holder == pid { Turn::Mine } else { Turn::Anothers(holder) };
        }
        let rests = holder == pid && over_ms < REST_MS.cast_signed();
        if !needs || rests {
            return Turn::Nobodys;
        }
        let wanted = pack(pid, now_ms.wrapping_add(TURN_MS));
        match word.compare_exchange(noted, wanted, SeqCst, SeqCst) {
            Ok(_) => Turn::Mine,
            Err(other) => Turn::Anothers(unpack(other).0),
        }
    }
}

fn pack(pid: u32, until_ms: u32) -> u64 {
    u64::from(pid) << 32 | u64::from(until_ms)
}

#[allow(clippy::cast_possible_truncation)] // It takes the halves of a word.
fn unpack(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_needs_a_turn_takes_it_and_only_one() {
        let (word, start) = (AtomicU64::new(0), u32::MAX - 50);
        let (mut first, mut second) = (Turns::default(), Turns::default());
        assert_eq!(first.look(&word, 7, start, 0, false), Turn::Nobodys);
        assert_eq!(first.look(&word, 7, start, 3, false), Turn::Mine);
        assert_eq!(second.look(&word, 8, start, 5, false), Turn::Anothers(7));
        // The clock wraps in the middle of the turn.
        let later = start.wrapping_add(TURN_MS - 1);
        assert_eq!(second.look(&word, 8, later, 9, false), Turn::Anothers(7));
        assert_eq!(first.look(&word, 7, later, 9, false), Turn::Mine);
    }

    #[test]
    fn turns_go_round() {
        let word = AtomicU64::new(0);
        let (mut first, mut second) = (Turns::default(), Turns::default());
        assert_eq!(first.look(&word, 7, 1000, 1, false), Turn::Mine);
        let end = 1000 + TURN_MS;
        assert_eq!(first.look(&word, 7, end, 2, false), Turn::Nobodys, "it rests");
        assert_eq!(second.look(&word, 8, end + 1, 1, false), Turn::Mine);
        let second_end = end + 1 + TURN_MS;
        assert_eq!(second.look(&word, 8, second_end + REST_MS, 1, false), Turn::Nobodys, "no need");
        assert_eq!(second.look(&word, 8, second_end + REST_MS, 1, true), Turn::Mine);
    }
}
