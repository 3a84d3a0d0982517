//! Chunks of which the kernel moves nothing: locked (mlock), of rights that have changed, with a
//! protection key. Nothing reports when that ends, so they are retried, ever more rarely. Pure:
//! time is an argument.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a chunk of which nothing could be moved is passed over; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Up to 3.2 s: memory that becomes movable again is found within that time.
const MOST_DOUBLINGS: u32 = 5;
/// The most chunks that are remembered (4 GiB); beyond that all are tried again.
const MOST_CHUNKS: usize = 1 << 14;

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Stubborn {
    /// Until when each chunk is passed over, and how often it was tried.
    chunks: HashMap<usize, (Instant, u32)>,
}

impl Stubborn {
    pub(super) fn is_passed_over(&self, chunk: usize, now: Instant) -> bool {
        self.chunks.get(&chunk).is_some_and(|(until, _)| now < *until)
    }

    /// Notes that nothing of the chunk could be moved.
    pub(super) fn note(&mut self, chunk: usize, now: Instant) {
        if self.chunks.len() >= MOST_CHUNKS {
            self.chunks.clear();
        }
        let tries = self.chunks.get(&chunk).map_or(0, |(_, tries)| *tries);
        let pause = FIRST_PAUSE * (1 << tries.min(MOST_DOUBLINGS));
        self.chunks.insert(chunk, (now + pause, tries + 1));
    }

    /// Notes that something of the chunk was moved.
    pub(super) fn forget(&mut self, chunk: usize) {
        if !self.chunks.is_empty() {
            self.chunks.remove(&chunk);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_move_is_tried_ever_more_seldom() {
        let (mut stubborn, mut now) = (Stubborn::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(!stubborn.is_passed_over(7, now));
            stubborn.note(7, now);
            let began = now;
            while stubborn.is_passed_over(7, now) {
                now += FIRST_PAUSE / 2;
            }
            pauses.push((now - began).as_millis());
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 3200, 3200]);
        stubborn.note(7, now);
        stubborn.forget(7);
        assert!(!stubborn.is_passed_over(7, now));
    }

    #[test]
    fn not_more_is_remembered_than_there_is_room_for() {
        let (mut stubborn, now) = (Stubborn::default(), Instant::now());
        (0..3 * MOST_CHUNKS).for_each(|chunk| stubborn.note(chunk, now));
        assert!(stubborn.chunks.len() <= MOST_CHUNKS);
        assert!(stubborn.is_passed_over(3 * MOST_CHUNKS - 1, now));
    }
}
