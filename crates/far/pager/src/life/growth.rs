//! Where threads of the program wait before they make it grow.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::sys::Latch;

/// Where threads of the program wait before they make it grow.
#[derive(Debug, Default)]
pub struct GrowthDoor {
    /// The program has started a thread. Without, nobody has to look further.
    pub(super) has_threads: AtomicBool,
    pub(super) is_awaited: AtomicBool,
    pub(super) registered: Latch,
}

impl GrowthDoor {
    /// Memory is registered: who waits may go on.
    pub fn open(&self) {
        self.registered.open();
    }

    /// In a child of fork there is one thread, and nobody waits.
    pub fn reset(&self) {
        self.has_threads.store(false, SeqCst);
        self.is_awaited.store(false, SeqCst);
    }
}
