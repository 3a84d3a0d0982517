//! Sizes of the tiles that the program's addresses are cut into, and words with a bit for each page
//! of a chunk. Pure.

use std::ops::Range;

use farpool_units::PAGE_BYTES;

/// Bytes of a superpage, the blade's unit of allocation.
pub const SUPERPAGE_BYTES: usize = SUPERPAGE_PAGES * PAGE_BYTES;
/// Pages of a superpage.
pub const SUPERPAGE_PAGES: usize = farpool_units::PAGES_PER_SUPERPAGE as usize;
/// Pages of a chunk, the unit of eviction: one UFFDIO_MOVE, one machine word of page bits.
pub const CHUNK_PAGES: usize = 64;
/// Bytes of a chunk.
pub const CHUNK_BYTES: usize = CHUNK_PAGES * PAGE_BYTES;
/// Chunks of a superpage.
pub const CHUNKS: usize = SUPERPAGE_PAGES / CHUNK_PAGES;
/// Far superpages of one process: 4 TiB. Memory beyond stays local.
pub const MAX_SUPERPAGES: usize = 1 << 18;
/// [`crate::space::superpage::Superpage::trays`] of a chunk with no page in the victim buffer.
pub const NO_TRAY: u16 = u16::MAX;

/// The numbers of the set bits, lowest first.
pub fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(index)
    })
}

/// The runs of set bits as (first, count), lowest first.
pub fn runs(mut word: u64) -> impl Iterator<Item = (usize, usize)> {
    std::iter::from_fn(move || {
        let first = (word != 0).then(|| word.trailing_zeros())?;
        let count = (word >> first).trailing_ones();
        let mask = if count == 64 { u64::MAX } else { ((1_u64 << count) - 1) << first };
        word &= !mask;
        Some((first as usize, count as usize))
    })
}

/// The pages of a range that are in the chunk at `start`, one bit each.
pub fn chunk_bits(range: &Range<usize>, start: usize) -> u64 {
    let page = |address: usize| (address.saturating_sub(start) / PAGE_BYTES).min(CHUNK_PAGES);
    (page(range.start)..page(range.end)).fold(0, |bits, page| bits | 1 << page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_and_bits_agree(word: u64) {
            let from_runs: Vec<usize> =
                runs(word).flat_map(|(first, count)| first..first + count).collect();
            let from_bits: Vec<usize> = bits(word).collect();
            prop_assert_eq!(from_runs, from_bits);
        }
    }
}
