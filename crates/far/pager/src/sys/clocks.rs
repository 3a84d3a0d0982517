//! A clock that all processes share, and a short sleep.

use std::time::Duration;

/// Milliseconds of a clock that all processes of the machine share; wraps.
pub fn shared_clock_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // It wraps.
    let wrapped = ms as u32;
    wrapped
}

/// Sleeps for a moment, so that a thread under SCHED_IDLE gets to what it is waited for.
pub fn pause() {
    std::thread::sleep(Duration::from_micros(20));
}
