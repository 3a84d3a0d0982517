//! Helpers for several tables of the board: texts and numbers of 128 bits.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use farpool_units::exactly;

/// The lower and the upper half.
pub(crate) fn halves(value: u128) -> [u64; 2] {
    let [a, b] = [value & u128::from(u64::MAX), value >> 64];
    [exactly(a), exactly(b)]
}

pub(crate) fn load_wide(words: &[AtomicU64; 2]) -> u128 {
    u128::from(words[1].load(Relaxed)) << 64 | u128::from(words[0].load(Relaxed))
}

pub(crate) fn store_wide(words: &[AtomicU64; 2], value: u128) {
    let [low, high] = halves(value);
    words[0].store(low, Relaxed);
    words[1].store(high, Relaxed);
}

pub(crate) fn store_text(field: &[AtomicU8], text: &[u8]) {
    let last = field.len() - 1;
    for (index, byte) in field.iter().enumerate() {
        let value = if index < last { text.get(index).copied().unwrap_or(0) } else { 0 };
        byte.store(value, Relaxed);
    }
}

pub(crate) fn load_text(field: &[AtomicU8]) -> String {
    let bytes: Vec<u8> =
        field.iter().map(|byte| byte.load(Relaxed)).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Entries of the table: as many blades as a pool has slots. More are refused.
pub const BLADE_ENTRIES: usize = 8;
/// The bit beyond those of the entries: groups with parity find no room where they would be apart.
pub const GROUPS_CROWDED: u32 = 1 << BLADE_ENTRIES;
