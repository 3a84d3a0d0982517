//! The virtual clock of this thread. It moves only when [`crate::world`] says so.

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    static BASE: Instant = Instant::now();
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
    static IS_TOLD: Cell<bool> = const { Cell::new(false) };
}

/// Prints what happens in this thread's trials to stderr, with the time.
pub fn tell(is_told: bool) {
    IS_TOLD.set(is_told);
}

/// Something happened.
pub fn note(what: impl FnOnce() -> String) {
    if IS_TOLD.get() {
        eprintln!("{:>14} us  {}", now_ns() / 1000, what());
    }
}

/// Begins a trial at time 0.
pub fn reset() {
    NOW_NS.set(0);
}

/// Nanoseconds since the trial began.
#[must_use]
pub fn now_ns() -> u64 {
    NOW_NS.get()
}

/// The same as an instant, for the product's code.
#[must_use]
pub fn now() -> Instant {
    BASE.with(|base| *base) + Duration::from_nanos(now_ns())
}

/// Moves on.
///
/// # Panics
/// Time would go back.
pub fn set(at_ns: u64) {
    assert!(at_ns >= now_ns(), "time goes forward: from {} to {at_ns}", now_ns());
    NOW_NS.set(at_ns);
}
