//! Encoding keys and values: both are functions of the key's number.

use crate::workload::{KeyNumber, mix};

/// Bits of a key's number per letter.
const LETTER_BITS: u32 = 5;
const LETTERS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";

/// Appends a key of `bytes` letters: `k`, then the number in base 32.
pub fn push_key(out: &mut Vec<u8>, key: KeyNumber, bytes: usize) {
    let start = out.len();
    out.resize(start + bytes, b'0');
    out[start] = b'k';
    let mut left = key.0;
    for letter in out[start + 1..].iter_mut().rev() {
        if left == 0 {
            break;
        }
        *letter = LETTERS[(left & ((1 << LETTER_BITS) - 1)) as usize];
        left >>= LETTER_BITS;
    }
}

/// The eight bytes that a key's value repeats.
fn pattern(key: KeyNumber, bytes: usize) -> [u8; 8] {
    mix(key.0, bytes as u64).to_le_bytes()
}

/// Appends a key's value of `bytes` bytes.
pub fn push_value(out: &mut Vec<u8>, key: KeyNumber, bytes: usize) {
    let pattern = pattern(key, bytes);
    let start = out.len();
    out.resize(start + bytes, 0);
    for chunk in out[start..].chunks_mut(8) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
}

/// Whether `value` is the key's value of `bytes` bytes.
#[must_use]
pub fn is_right(value: &[u8], key: KeyNumber, bytes: usize) -> bool {
    let pattern = pattern(key, bytes);
    let (chunks, rest) = value.as_chunks::<8>();
    value.len() == bytes
        && chunks.iter().all(|chunk| *chunk == pattern)
        && *rest == pattern[..rest.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_values_are_checked_to_the_byte() {
        let mut seen = std::collections::HashSet::new();
        for number in (0..100_000).chain(1 << 34..(1 << 34) + 1000) {
            let mut key = Vec::new();
            push_key(&mut key, KeyNumber(number), 8);
            assert_eq!(key.len(), 8);
            assert!(seen.insert(key));
        }
        for bytes in [1, 7, 8, 9, 64, 1000] {
            let mut value = Vec::new();
            push_value(&mut value, KeyNumber(7), bytes);
            assert!(is_right(&value, KeyNumber(7), bytes));
            assert!(!is_right(&value, KeyNumber(8), bytes));
            for at in 0..bytes {
                value[at] ^= 1;
                assert!(!is_right(&value, KeyNumber(7), bytes), "byte {at} of {bytes}");
                value[at] ^= 1;
            }
        }
    }
}
