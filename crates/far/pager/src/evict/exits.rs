//! Pages that the end of a thread writes to: they stay local.
//!
//! When a thread ends the kernel clears the word that its joiner waits for (clone's
//! CLONE_CHILD_CLEARTID), and marks the robust mutexes that it holds. It does so without a
//! userfaultfd event: if the page is far the write is lost, and the joiner waits for ever. glibc
//! has both in the thread's descriptor, at the upper end of the mapping that is its stack; on
//! x86-64 it begins with its own address. The kernel could tell (get_robust_list), but not a
//! sidecar, which has fewer rights than a program of root. The preloaded library keeps stacks local
//! as a whole.
//!
//! So a page at the end of a mapping is checked before it is moved out for the first time, twice if
//! need be: a thread that is being made touches the page before it writes that first word. A check
//! fails if the program has dropped the page meanwhile.

use std::ops::Range;
use std::time::Instant;

use farpool_units::PAGE_BYTES;

use crate::core::Core;
use crate::space::moves;
use crate::space::registry::{Registry, Tail, is_settled};
use crate::space::units::{CHUNK_BYTES, chunk_bits};
use crate::sys;

/// A descriptor begins at a multiple of this.
const ALIGN_BYTES: usize = 64;
const WORD_BYTES: usize = 8;
const PAGE_WORDS: usize = PAGE_BYTES / WORD_BYTES;

/// What is known of the ends of the mappings in a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tails {
    /// These pages hold descriptors, or may soon, one bit each.
    Known(u64),
    /// This end has to be checked first.
    Unknown(Range<usize>),
}

/// What is known of the ends of the mappings that `pages` of the chunk at `start` belong to. Pure.
pub(crate) fn tails(registry: &Registry, start: usize, pages: u64, now: Instant) -> Tails {
    let mut held = 0;
    for part in registry.overlapping(start, start + CHUNK_BYTES) {
        let Some(region) = registry.containing(part.start) else { continue };
        let tail = region.tail_range();
        let bits = chunk_bits(&tail, start);
        match region.tail {
            _ if bits & pages == 0 => {}
            Tail::Unsettled(since) if is_settled(since, now) => return Tails::Unknown(tail),
            Tail::Unknown => return Tails::Unknown(tail),
            Tail::Unsettled(_) | Tail::Descriptor => held |= bits,
            Tail::Plain => {}
        }
    }
    Tails::Known(held)
}

/// Whether the end of a mapping holds a thread's descriptor. None: no page of it is present, or one
/// has gone meanwhile.
pub(crate) fn look(core: &Core, tail: &Range<usize>) -> Option<bool> {
    let pages = tail.len() / PAGE_BYTES;
    let there = moves::occupied(&core.pagemap, tail.start, pages);
    let at = |page: usize| tail.start + page * PAGE_BYTES;
    let present = (0..pages).filter(|page| there & (1 << page) != 0);
    let found = present.map(|page| holds_descriptor(core, at(page))).collect::<Option<Vec<bool>>>();
    found.filter(|found| !found.is_empty()).map(|found| found.contains(&true))
}

fn holds_descriptor(core: &Core, page: usize) -> Option<bool> {
    let mut words = [0_usize; PAGE_WORDS];
    let read = sys::read_program(&core.memory, page, words.as_mut_ptr() as usize, 1);
    (read == 1).then(|| begins_descriptor(&words, page))
}

/// Whether a word at a multiple of 64 bytes is its own address. Pure.
fn begins_descriptor(words: &[usize], from: usize) -> bool {
    let mut places = words.iter().enumerate().step_by(ALIGN_BYTES / WORD_BYTES);
    places.any(|(at, word)| *word == from + at * WORD_BYTES)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_descriptor_begins_with_its_own_address() {
        let (from, mut words) = (7 << 20, [0; PAGE_WORDS]);
        assert!(!begins_descriptor(&words, from));
        words[9] = from + 9 * WORD_BYTES;
        assert!(!begins_descriptor(&words, from), "not aligned");
        words[16] = from + 16 * WORD_BYTES;
        assert!(begins_descriptor(&words, from));
        assert!(!begins_descriptor(&words[..16], from));
    }

    #[test]
    fn the_end_of_a_mapping_may_lie_in_two_chunks() {
        let chunk = 5 * CHUNK_BYTES;
        let range = chunk - PAGE_BYTES..chunk + PAGE_BYTES;
        assert_eq!(chunk_bits(&range, chunk), 1);
        assert_eq!(chunk_bits(&range, chunk - CHUNK_BYTES), 1 << 63);
        assert_eq!(chunk_bits(&range, chunk + CHUNK_BYTES), 0);
    }

    #[test]
    fn an_end_is_looked_at_before_pages_of_it_go() {
        let (start, mut registry, now) = (5 * CHUNK_BYTES, Registry::default(), Instant::now());
        registry.add(start, start + 8 * PAGE_BYTES);
        let ends = |registry: &Registry, pages| tails(registry, start, pages, now);
        assert_eq!(ends(&registry, 0b11_1111), Tails::Known(0), "none of its end");
        let end = start + 6 * PAGE_BYTES..start + 8 * PAGE_BYTES;
        assert_eq!(ends(&registry, 0b1000_0000), Tails::Unknown(end.clone()));
        registry.see_tail(end.end, true, now);
        assert_eq!(ends(&registry, u64::MAX), Tails::Known(0b1100_0000));
        // The remaining part ends elsewhere.
        registry.remove(start + 4 * PAGE_BYTES, start + 5 * PAGE_BYTES);
        let left = start + 2 * PAGE_BYTES..start + 4 * PAGE_BYTES;
        assert_eq!(ends(&registry, 0b1000), Tails::Unknown(left));
        assert_eq!(ends(&registry, 0b1110_0000), Tails::Known(0b1100_0000));
    }

    #[test]
    fn an_end_without_a_descriptor_is_looked_at_twice() {
        let (start, mut registry, now) = (5 * CHUNK_BYTES, Registry::default(), Instant::now());
        registry.add(start, start + 8 * PAGE_BYTES);
        let end = start + 6 * PAGE_BYTES..start + 8 * PAGE_BYTES;
        let later = now + Duration::from_secs(1);
        registry.see_tail(end.end, false, now);
        assert_eq!(tails(&registry, start, u64::MAX, now), Tails::Known(0b1100_0000));
        assert_eq!(tails(&registry, start, u64::MAX, later), Tails::Unknown(end.clone()));
        // It was being made.
        let mut of_a_thread = registry.clone();
        of_a_thread.see_tail(end.end, true, later);
        assert_eq!(tails(&of_a_thread, start, u64::MAX, later), Tails::Known(0b1100_0000));
        registry.see_tail(end.end, false, later);
        assert_eq!(tails(&registry, start, u64::MAX, later), Tails::Known(0));
    }
}
