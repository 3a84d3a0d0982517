//! Where threads of the program wait before they make it grow.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::sys::Latch;

/// See the module's description.
#[derive(Debug, Default)]
pub struct GrowthDoor {
    /// The program has started a thread. Until then no further check is needed.
    pub(super) has_threads: AtomicBool,
    pub(super) is_awaited: AtomicBool,
    pub(super) registered: Latch,
}

impl GrowthDoor {
    /// Lets waiting threads continue, now that memory is registered.
    pub fn open(&self) {
        self.registered.open();
    }

    /// Resets the door in a child of fork, which has one thread and no waiters.
    pub fn reset(&self) {
        self.has_threads.store(false, SeqCst);
        self.is_awaited.store(false, SeqCst);
    }
}
