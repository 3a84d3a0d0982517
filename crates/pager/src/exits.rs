//! Pages that the end of a thread writes to: they stay local.
//!
//! When a thread ends the kernel clears the word that whoever joins it waits for (clone's
//! CLONE_CHILD_CLEARTID), and marks the robust mutexes that it holds. It asks no userfaultfd for
//! that: if the page is far the write is lost, and the joiner waits for ever. C libraries have both
//! in the thread's descriptor, at the upper end of the mapping that is its stack; on x86-64 it
//! begins with its own address. The kernel could tell (get_robust_list), but not a sidecar, which
//! has fewer rights than a program of root.

use farpool_uffd::PAGE_BYTES;

use crate::core::Core;
use crate::evict::CHUNK_BYTES;
use crate::registry::Registry;
use crate::sys;

/// The descriptor and static thread-local storage are looked for in so many pages.
const END_PAGES: usize = 2;
/// A descriptor begins at a multiple of this.
const ALIGN_BYTES: usize = 64;
const WORD_BYTES: usize = 8;
const END_WORDS: usize = END_PAGES * PAGE_BYTES / WORD_BYTES;

/// Which of the pages of the chunk at `start` hold the descriptor of a thread, or part of one.
pub(crate) fn descriptor_pages(core: &Core, registry: &Registry, start: usize, pages: u64) -> u64 {
    let mut found = 0;
    for part in registry.overlapping(start, start + CHUNK_BYTES) {
        let Some(region) = registry.containing(part.start) else { continue };
        let from = region.end.saturating_sub(END_PAGES * PAGE_BYTES).max(region.start);
        let bits = bits_of(from..region.end, start);
        if bits & pages != 0 && holds_descriptor(core, from, (region.end - from) / PAGE_BYTES) {
            found |= bits;
        }
    }
    found
}

fn holds_descriptor(core: &Core, from: usize, pages: usize) -> bool {
    let mut words = [0_usize; END_WORDS];
    let read = sys::read_program(&core.memory, from, words.as_mut_ptr() as usize, pages);
    begins_descriptor(&words[..read * PAGE_BYTES / WORD_BYTES], from)
}

/// Whether a word at the beginning of some 64 bytes is its own address. Pure.
fn begins_descriptor(words: &[usize], from: usize) -> bool {
    let mut places = words.iter().enumerate().step_by(ALIGN_BYTES / WORD_BYTES);
    places.any(|(at, word)| *word == from + at * WORD_BYTES)
}

/// The pages of a range that lie in the chunk at `start`, one bit each. Pure.
fn bits_of(range: std::ops::Range<usize>, start: usize) -> u64 {
    let in_chunk =
        range.step_by(PAGE_BYTES).filter(|page| (start..start + CHUNK_BYTES).contains(page));
    in_chunk.fold(0, |bits, page| bits | 1 << ((page - start) / PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_begins_with_its_own_address() {
        let (from, mut words) = (7 << 20, [0; END_WORDS]);
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
        assert_eq!(bits_of(range.clone(), chunk), 1);
        assert_eq!(bits_of(range.clone(), chunk - CHUNK_BYTES), 1 << 63);
        assert_eq!(bits_of(range, chunk + CHUNK_BYTES), 0);
    }
}
