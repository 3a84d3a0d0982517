//! Limits the processor time that the evictor spends on memory that hardly moves. Pure.
//!
//! Memory that cannot be moved (locked, executable, shared after a fork, the program's files) may
//! be most of what a process has. The evictor then goes round and finds little: pages that have
//! just come in and are soon wanted again.

use std::time::Duration;

/// Rounds are judged together once they have used this much processor time.
const JUDGED_AT: Duration = Duration::from_millis(1);
/// Rounds that moved fewer pages per millisecond of processor time have found little: those that
/// find enough move more than a hundred.
const FEW_PAGES_PER_MS: u128 = 8;
/// Rest for each part of work: 2 % of a processor is used when nothing was found, 10 % when little
/// was.
const REST_AFTER_NOTHING: u32 = 49;
const REST_AFTER_LITTLE: u32 = 9;
/// The longest rest; no thread waits for free memory meanwhile.
const MOST_REST: Duration = Duration::from_millis(200);

/// Time and pages of the rounds that are not judged yet.
#[derive(Debug, Default)]
pub struct Effort {
    worked: Duration,
    moved_pages: u64,
}

impl Effort {
    /// Records a round: its processor time and the pages that it moved. Returns how long to rest,
    /// if at all.
    pub fn note(&mut self, worked: Duration, moved_pages: u64) -> Option<Duration> {
        self.worked += worked;
        self.moved_pages += moved_pages;
        if self.worked < JUDGED_AT {
            return None;
        }
        let Effort { worked, moved_pages } = std::mem::take(self);
        let enough = FEW_PAGES_PER_MS * worked.as_millis();
        if u128::from(moved_pages) >= enough {
            return None;
        }
        let times = if moved_pages == 0 { REST_AFTER_NOTHING } else { REST_AFTER_LITTLE };
        Some(worked.saturating_mul(times).min(MOST_REST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn rounds_that_find_enough_go_on() {
        let mut effort = Effort::default();
        assert_eq!(effort.note(2 * MS, 400), None);
        assert_eq!(effort.note(2 * MS, 16), None);
    }

    #[test]
    fn the_less_is_found_the_longer_the_rest() {
        let mut effort = Effort::default();
        assert_eq!(effort.note(2 * MS, 15), Some(18 * MS));
        assert_eq!(effort.note(2 * MS, 0), Some(98 * MS));
        assert_eq!(effort.note(100 * MS, 0), Some(MOST_REST));
    }

    #[test]
    fn small_rounds_are_judged_together() {
        let mut effort = Effort::default();
        assert_eq!(effort.note(MS / 2, 3), None);
        assert_eq!(effort.note(MS / 2, 3), Some(9 * MS));
        assert_eq!(effort.note(MS / 2, 100), None);
        assert_eq!(effort.note(MS / 2, 0), None);
    }
}
