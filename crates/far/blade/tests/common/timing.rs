//! What benches of single pages share.

use std::time::Duration;

/// Numbers below `count`, all over it.
pub(crate) fn scattered(round: u32, count: u32) -> u32 {
    let mixed = u64::from(round).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    u32::try_from(mixed % u64::from(count)).unwrap()
}

/// The middle of times, in microseconds.
pub(crate) fn middle(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}
