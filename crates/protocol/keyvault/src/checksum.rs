//! CRC-32C of one frame: the checksummed part of its header, and its body.
//!
//! Most frames are a few dozen bytes, begin anywhere, and each is summed twice. For those the
//! library's way (bytes up to an aligned address, tables for three streams) costs more than the
//! sum; long bodies are left to it.

/// From this length on three streams at once are faster than one: the library's own threshold.
#[cfg(any(target_arch = "x86_64", test))]
const LONG_BYTES: usize = 768;

/// Returns the checksum of a frame: `head` is the first 8 bytes of its header, `request` the next
/// 4, little-endian.
#[inline]
#[must_use]
pub(crate) fn checksum(head: u64, request: u32, body: [&[u8]; 2]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if body[0].len() + body[1].len() < LONG_BYTES && is_x86_feature_detected!("sse4.2") {
        // SAFETY: the processor was checked for SSE 4.2, which is all that the function needs.
        return unsafe { short(head, request, body) };
    }
    let sum = crc32c::crc32c_append(crc32c::crc32c(&head.to_le_bytes()), &request.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(sum, body[0]), body[1])
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn short(head: u64, request: u32, body: [&[u8]; 2]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u32, _mm_crc32_u64};
    let sum = low(_mm_crc32_u64(u64::from(u32::MAX), head));
    let sum = _mm_crc32_u32(sum, request);
    !append(append(sum, body[0]), body[1])
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
#[inline]
fn append(sum: u32, bytes: &[u8]) -> u32 {
    use std::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};
    let (words, mut rest) = bytes.as_chunks::<8>();
    let add = |sum, word: &[u8; 8]| _mm_crc32_u64(sum, u64::from_le_bytes(*word));
    let mut sum = low(words.iter().fold(u64::from(sum), add));
    if let Some((four, tail)) = rest.split_first_chunk() {
        sum = _mm_crc32_u32(sum, u32::from_le_bytes(*four));
        rest = tail;
    }
    if let Some((two, tail)) = rest.split_first_chunk() {
        sum = _mm_crc32_u16(sum, u16::from_le_bytes(*two));
        rest = tail;
    }
    match rest.first() {
        Some(&one) => _mm_crc32_u8(sum, one),
        None => sum,
    }
}

/// The instruction for 8 bytes leaves the upper half of its result 0.
#[cfg(target_arch = "x86_64")]
#[inline]
const fn low(sum: u64) -> u32 {
    (sum & 0xffff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_crc32c_at_every_length(
            head: u64,
            request: u32,
            body in prop::collection::vec(any::<u8>(), 0..2 * LONG_BYTES),
            cut: prop::sample::Index,
            skip in 0usize..8,
        ) {
            let body = &body[skip.min(body.len())..];
            let (first, second) = body.split_at(cut.index(body.len() + 1));
            let whole = [&head.to_le_bytes()[..], &request.to_le_bytes(), body].concat();
            prop_assert_eq!(checksum(head, request, [first, second]), crc32c::crc32c(&whole));
        }
    }
}
