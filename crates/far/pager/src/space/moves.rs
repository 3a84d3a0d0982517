//! Moves frames with UFFDIO_MOVE, and finds out which of them really moved.
//!
//! On Linux 6.18 a move that meets a page under migration (compaction, NUMA balancing, huge pages)
//! moves pages that it does not count: it keeps the EAGAIN of the page it waited for, moves that
//! page and the following ones, restarts at the same place, and finds it taken. The caller sees a
//! short count with EAGAIN, then EEXIST, though the pages have moved. So after every answer but a
//! plain success the source's page map tells where the pages are. A page of the source belongs to
//! the caller, so nothing but the move can have taken it away.
//!
//! Invariant: a page is reported as gone if and only if the source has no page there any more.

use farpool_uffd::{Outcome, PageRange, Pagemap, category};
use farpool_units::PAGE_BYTES;

use crate::abort::fail_closed;

/// The most pages of one call: the bits of a word.
pub const MAX_PAGES: usize = u64::BITS as usize;

/// The outcome of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The pages that have left the source: bit n stands for the n-th.
    pub gone: u64,
    /// Why the first page that stayed was not moved.
    pub errno: Option<i32>,
}

impl Moved {
    /// Whether the n-th page has left the source.
    pub fn has_gone(self, page: usize) -> bool {
        self.gone & (1 << page) != 0
    }
}

/// The pages of `[start, start + count)` that are present. Ends the process if the kernel does not
/// say.
pub fn occupied(pagemap: &Pagemap, start: usize, count: usize) -> u64 {
    pagemap
        .occupied_pages(start, count)
        .unwrap_or_else(|error| fail_closed(&format!("the page map cannot be read: {error}")))
}

/// The first present page of a range. Ends the process if the kernel does not say.
pub fn first_occupied(pagemap: &Pagemap, start: usize, end: usize) -> Option<usize> {
    let mut first = [PageRange::default(); 1];
    match pagemap.scan(start, end, category::OCCUPIED, &mut first) {
        Ok((found, _)) => found.first().map(PageRange::first),
        Err(error) => fail_closed(&format!("the page map cannot be read: {error}")),
    }
}

/// Moves `count` pages. `move_from` tries to move all pages from the n-th on, `again` is called
/// before a retry, `there` returns the pages that the source still has.
pub(crate) fn settle_moves(
    count: usize,
    mut move_from: impl FnMut(usize) -> Outcome,
    again: impl Fn(),
    there: impl Fn() -> u64,
) -> Moved {
    debug_assert!((1..=MAX_PAGES).contains(&count), "a move of {count} pages");
    let all = u64::MAX >> (MAX_PAGES - count);
    let mut next = 0;
    loop {
        let outcome = move_from(next);
        let counted_end = next + outcome.done_bytes / PAGE_BYTES;
        let Some(errno) = outcome.errno else {
            if counted_end != count {
                fail_closed(&format!("a move of {count} pages ended well after {counted_end}"));
            }
            return Moved { gone: all, errno: None };
        };
        let stayed = there() & all;
        if stayed == 0 {
            return Moved { gone: all, errno: None };
        }
        let first = stayed.trailing_zeros() as usize;
        if first < counted_end {
            fail_closed(&format!(
                "page {first} of a move stayed, of which {counted_end} were counted"
            ));
        }
        let has_progressed = first > next;
        next = first;
        if errno == libc::EAGAIN {
            again();
        } else if !has_progressed {
            return Moved { gone: all & !stayed, errno: Some(errno) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;

    /// A kernel that does not count all pages it moves.
    struct Kernel {
        source: u64,
        count: usize,
        /// How many pages the next calls move and how many of these they count.
        script: Vec<(usize, usize)>,
        /// A page that cannot be moved.
        stuck: Option<usize>,
    }

    impl Kernel {
        fn move_from(&mut self, next: usize) -> Outcome {
            let short = |done_bytes, errno| Outcome { done_bytes, errno: Some(errno) };
            if self.source & (1 << next) == 0 {
                return short(0, libc::EEXIST);
            }
            let end = self.stuck.map_or(self.count, |stuck| stuck.max(next));
            let (moved, counted) = self.script.pop().unwrap_or((usize::MAX, usize::MAX));
            let moved = moved.min(end - next);
            let counted = counted.min(moved);
            (next..next + moved).for_each(|page| self.source &= !(1 << page));
            if counted == self.count - next {
                return Outcome { done_bytes: counted * PAGE_BYTES, errno: None };
            }
            let errno = match (counted, next == end) {
                (0, true) => libc::EBUSY,
                (0, false) if moved > 0 => libc::EEXIST,
                _ => libc::EAGAIN,
            };
            short(counted * PAGE_BYTES, errno)
        }
    }

    proptest! {
        #[test]
        fn what_is_gone_is_what_left_the_source(
            count in 1_usize..=MAX_PAGES,
            stuck in proptest::option::of(0_usize..MAX_PAGES),
            script in proptest::collection::vec((0_usize..9, 0_usize..9), 0..12),
        ) {
            let all = u64::MAX >> (MAX_PAGES - count);
            let stuck = stuck.filter(|stuck| *stuck < count);
            let kernel = RefCell::new(Kernel { source: all, count, script, stuck });
            let moved = settle_moves(
                count,
                |next| kernel.borrow_mut().move_from(next),
                || {},
                || kernel.borrow().source,
            );
            prop_assert_eq!(moved.gone, all & !kernel.borrow().source);
            prop_assert_eq!(moved.errno, stuck.map(|_| libc::EBUSY));
            prop_assert_eq!(moved.gone.count_ones() as usize, stuck.unwrap_or(count));
        }
    }
}
