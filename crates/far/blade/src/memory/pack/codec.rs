//! What a page is packed to, and back. Pure.

use farpool_units::PAGE_BYTES;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use std::fmt;
use twox_hash::XxHash3_64;

/// Compressed to more than this a page stays as it is: it would save less than a quarter, and each
/// read would have to decompress it.
pub(super) const COMPRESSED_LIMIT_BYTES: usize = PAGE_BYTES / 4 * 3;
/// Room that the compressor asks for, whatever comes out.
const OUTPUT_BYTES: usize = get_maximum_output_size(PAGE_BYTES);

/// Compresses pages, one after the other.
pub(super) struct Codec {
    table: CompressTable,
    output: Box<[u8; OUTPUT_BYTES]>,
}

impl fmt::Debug for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Codec").finish_non_exhaustive()
    }
}

impl Codec {
    pub(super) fn new() -> Codec {
        Codec { table: CompressTable::small(), output: Box::new([0; OUTPUT_BYTES]) }
    }

    /// The page's bytes, compressed; None if that saves too little.
    pub(super) fn compress(&mut self, page: &[u8; PAGE_BYTES]) -> Option<&[u8]> {
        let output = self.output.as_mut_slice();
        // With so much room it cannot fail.
        let bytes = compress_into_with_table(page, output, &mut self.table).ok()?;
        (bytes <= COMPRESSED_LIMIT_BYTES).then(|| &self.output[..bytes])
    }
}

/// The word that fills the page, if one does.
pub(super) fn filled_with(page: &[u8; PAGE_BYTES]) -> Option<u32> {
    let (words, _) = page.as_chunks::<4>();
    let first = words[0];
    words.iter().all(|word| *word == first).then(|| u32::from_le_bytes(first))
}

/// Fills a page with a word.
pub(super) fn fill(word: u32, page: &mut [u8; PAGE_BYTES]) {
    let (words, _) = page.as_chunks_mut::<4>();
    words.fill(word.to_le_bytes());
}

/// Decompresses a page. False if it is not one that was compressed.
#[must_use]
pub(super) fn decompress(bytes: &[u8], page: &mut [u8; PAGE_BYTES]) -> bool {
    decompress_into(bytes, page).is_ok_and(|count| count == PAGE_BYTES)
}

/// What a page is recognized by. The seed is a blade's secret: who does not know it cannot make
/// pages whose digests are equal, which would have to be compared in vain.
pub(super) fn digest_of(page: &[u8; PAGE_BYTES], seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pages of all kinds: random bytes up to some place, then a pattern.
    fn any_page() -> impl Strategy<Value = Box<[u8; PAGE_BYTES]>> {
        let parts = (0..=PAGE_BYTES, prop::collection::vec(any::<u8>(), PAGE_BYTES), any::<u32>());
        parts.prop_map(|(random_bytes, random, word)| {
            let mut page = Box::new([0; PAGE_BYTES]);
            fill(word, &mut page);
            page[..random_bytes].copy_from_slice(&random[..random_bytes]);
            page
        })
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(page in any_page()) {
            let mut back = Box::new([1; PAGE_BYTES]);
            if let Some(word) = filled_with(&page) {
                fill(word, &mut back);
                prop_assert_eq!(&page, &back);
            }
            if let Some(bytes) = Codec::new().compress(&page) {
                prop_assert!(decompress(bytes, &mut back));
                prop_assert_eq!(page, back);
            }
        }

        #[test]
        fn garbage_never_panics(garbage in prop::collection::vec(any::<u8>(), 0..4096)) {
            let mut page = [0; PAGE_BYTES];
            let _either = decompress(&garbage, &mut page);
        }
    }

    #[test]
    fn pages_of_each_kind_are_told_apart() {
        let mut codec = Codec::new();
        let mut page = [0; PAGE_BYTES];
        assert_eq!(filled_with(&page), Some(0));
        page.fill(7);
        assert_eq!(filled_with(&page), Some(0x0707_0707));
        page[4095] = 8;
        assert_eq!(filled_with(&page), None);
        assert!(codec.compress(&page).unwrap().len() < 64);
        farpool_kernel::fill_random(&mut page).unwrap();
        assert_eq!(codec.compress(&page), None);
    }
}
