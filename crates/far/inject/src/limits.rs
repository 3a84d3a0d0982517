//! How much, and how long, an injection disturbs its program.

/// Longest that threads are kept stopped while others are awaited. A thread in an uninterruptible
/// wait (disk, vfork) does not stop; then all are resumed and the answer is "busy".
pub const MAX_STOP_MS: u64 = 250;

/// Most threads that are stopped. Each costs some 10 us of stopped time. More are refused.
pub const MAX_THREADS: usize = 16_384;
