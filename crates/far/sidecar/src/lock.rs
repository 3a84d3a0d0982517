//! The only lock of the memory code: it works before the C library's thread-local storage is set
//! up, and it neither allocates nor touches errno.
//!
//! Invariant: the value is reached only while `held` is set by this thread.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Spins before the processor is yielded; the critical sections here are shorter than that unless
/// the holder was preempted.
const SPINS_BEFORE_YIELD: u32 = 128;

/// A spinlock around a value.
pub struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `with` gives the value to one thread at a time, so only moving it between threads (Send)
// is required of it.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value while no other thread can reach it. Not reentrant.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let mut spins = 0;
        while self
            .held
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            spins += 1;
            if spins % SPINS_BEFORE_YIELD == 0 {
                // Never fails, so the C library touches no errno, which a thread may not have yet.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // SAFETY: `held` went from false to true in this thread, so no other reference exists until
        // it is cleared below; panics abort, so unwinding cannot leave it set.
        let result = work(unsafe { &mut *self.value.get() });
        self.held.store(false, Ordering::Release);
        result
    }
}
