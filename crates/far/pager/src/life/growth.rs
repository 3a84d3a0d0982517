//! Where threads of the program wait before they make it grow.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::sys::Latch;

/// Where threads of the program wait before they make it grow.
#[derive(Debug, Default)]
pub struct GrowthDoor {
    /// The program has started a thread. Until then no further check is needed.
    pub(super) has_threads: AtomicBool,
    pub(super) is_awaited: AtomicBool,
    pub(super) registered: Latch,
}

impl GrowthDoor {
    /// Memory is registered: who waits may go on.
    pub fn open(&self) {
        self.registered.open();
    }

    /// A child of fork has one thread, and none that waits.
    pub fn reset(&self) {
        self.has_threads.store(false, SeqCst);
        self.is_awaited.store(false, SeqCst);
    }
}
