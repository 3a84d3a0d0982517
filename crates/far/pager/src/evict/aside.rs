//! Chunks that are put aside until the next standstill of the program.

use std::time::{Duration, Instant};

use crate::space::Superpage;
use crate::space::maps::Eligible;
use crate::sys::standstill::PAUSE_PARTS;

/// The most chunks that are put aside (16 MiB): the program then stands still for some 5 ms.
pub(super) const MOST_CHUNKS: usize = 64;
/// Fewer pages than this (1 MiB) are not worth a standstill.
const LEAST_PAGES: u64 = 256;
/// The longest that chunks stay put aside, if they are worth a standstill.
const PATIENCE: Duration = Duration::from_secs(1);
/// Used instead of [`PAUSE_PARTS`] while more than [`MUCH_PAGES`] (16 MiB) have to go: the program
/// then loses a fifth of its time.
const SHORT_PAUSE_PARTS: u32 = 4;
const MUCH_PAGES: i64 = 4096;
/// The pause after a standstill that did not come about, or in which nothing could be moved;
/// doubled after each further one, up to 32 s.
const VAIN_PAUSE: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 6;

/// The chunks that are put aside.
#[derive(Debug)]
pub(super) struct Aside {
    pub(super) chunks: Vec<usize>,
    pub(super) pages: u64,
    pub(super) since: Instant,
    /// No standstill before this time.
    not_before: Instant,
    /// Standstills since the last one in which something was moved.
    in_vain: u32,
    /// Pages that were moved out at the standstill and are still to be written.
    pub(super) moved: Vec<Moved>,
    /// The mappings at the standstill that may not be written to, by address.
    pub(super) mappings: Vec<Eligible>,
    pub(super) began: Instant,
}

impl Aside {
    pub(super) fn new() -> Aside {
        let now = Instant::now();
        Aside {
            chunks: Vec::with_capacity(MOST_CHUNKS),
            pages: 0,
            since: now,
            not_before: now,
            in_vain: 0,
            moved: Vec::with_capacity(MOST_CHUNKS),
            mappings: Vec::new(),
            began: now,
        }
    }

    /// Puts aside a chunk of which `pages` pages could be moved out.
    pub(super) fn put(&mut self, number: usize, pages: u64) {
        if self.chunks.is_empty() {
            self.since = Instant::now();
        }
        if self.chunks.len() < MOST_CHUNKS && !self.chunks.contains(&number) {
            self.chunks.push(number);
            self.pages += pages;
        }
    }

    /// Whether the program should be stopped now. `is_barren`: nothing else can be moved out.
    pub(super) fn is_due(&self, is_barren: bool) -> bool {
        if self.pages < LEAST_PAGES {
            return false;
        }
        let now = Instant::now();
        let is_enough = is_barren
            || self.chunks.len() == MOST_CHUNKS
            || now.saturating_duration_since(self.since) >= PATIENCE;
        is_enough && now >= self.not_before
    }

    pub(super) fn take(&mut self) -> Vec<usize> {
        self.pages = 0;
        std::mem::take(&mut self.chunks)
    }

    /// Lets the program run for a while after a standstill in which `moved` pages were moved out
    /// and `left` still have to go.
    pub(super) fn rest(&mut self, moved: i64, left: i64) {
        let now = Instant::now();
        let pause = if moved > 0 {
            self.in_vain = 0;
            let parts = if left > MUCH_PAGES { SHORT_PAUSE_PARTS } else { PAUSE_PARTS };
            now.saturating_duration_since(self.began) * parts
        } else {
            self.in_vain = (self.in_vain + 1).min(MOST_DOUBLINGS);
            VAIN_PAUSE * (1 << (self.in_vain - 1))
        };
        self.not_before = now + pause;
    }

    pub(super) fn keep(&mut self, moved: Moved) {
        self.moved.push(moved);
    }
}

/// Pages of a chunk that are in a tray.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) superpage: &'static Superpage,
    pub(super) tray: u16,
    pub(super) layer: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_no_reason_to_stop_the_program() {
        let mut aside = Aside::new();
        aside.put(1, LEAST_PAGES - 1);
        assert!(!aside.is_due(true));
        aside.put(1, 5);
        assert!(!aside.is_due(true), "the same chunk");
        aside.put(2, 5);
        assert!(aside.is_due(true) && !aside.is_due(false));
        (3..).take(MOST_CHUNKS).for_each(|number| aside.put(number, 64));
        assert!(aside.is_due(false));
        aside.rest(0, 0);
        assert!(!aside.is_due(true), "it must run for a while");
        assert_eq!(aside.take().len(), MOST_CHUNKS);
        assert_eq!(aside.pages, 0);
    }
}
