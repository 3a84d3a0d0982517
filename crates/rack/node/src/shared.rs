//! What the daemon's threads share: what they have to do, and how much may be lent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use farpool_kernel::lock;

/// What the threads have to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Wish {
    /// Lend.
    Run,
    /// Drain the node, and end when it is empty or at this time.
    Drain {
        /// The latest time to end.
        until: Instant,
    },
    /// End.
    Stop,
}

#[derive(Debug)]
pub(crate) struct Shared {
    wish: Mutex<Wish>,
    wished: Condvar,
    lendable_bytes: AtomicU64,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self {
            wish: Mutex::new(Wish::Run),
            wished: Condvar::new(),
            lendable_bytes: AtomicU64::new(0),
        }
    }

    pub(crate) fn wish(&self) -> Wish {
        *lock(&self.wish)
    }

    /// Sets the wish. A stop is never taken back, and the first drain's time stays.
    pub(crate) fn set_wish(&self, wish: Wish) {
        let mut current = lock(&self.wish);
        if matches!((*current, wish), (Wish::Run, _) | (_, Wish::Stop)) {
            *current = wish;
        }
        self.wished.notify_all();
    }

    /// Waits until the wish differs from `known` or `at_most` has passed.
    pub(crate) fn pause(&self, at_most: Duration, known: Wish) {
        let current = lock(&self.wish);
        let same = |current: &mut Wish| *current == known;
        // The caller reads the wish again in any case.
        let _unused = self.wished.wait_timeout_while(current, at_most, same);
    }

    pub(crate) fn lendable_bytes(&self) -> u64 {
        self.lendable_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_lendable_bytes(&self, bytes: u64) {
        self.lendable_bytes.store(bytes, Ordering::Relaxed);
    }
}
