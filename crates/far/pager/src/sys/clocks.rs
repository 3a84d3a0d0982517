//! Processor time, clocks that all processes share, and a short sleep.

use std::time::Duration;

use farpool_units::at_most;

/// The processor time that the calling thread has used.
pub fn processor_time() -> Duration {
    time_of(rustix::time::ClockId::ThreadCPUTime)
}

/// CPU time that the process has used, with all its threads.
pub fn process_cpu_time() -> Duration {
    time_of(rustix::time::ClockId::ProcessCPUTime)
}

fn time_of(clock: rustix::time::ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(at_most(time.tv_sec), at_most(time.tv_nsec))
}

/// Milliseconds of a clock that all processes of the machine share; wraps.
pub fn shared_clock_ms() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec.wrapping_mul(1000).wrapping_add(now.tv_nsec / 1_000_000);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // It wraps.
    let wrapped = ms as u32;
    wrapped
}

/// Nanoseconds of a clock that all processes of the machine share.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
    ns.unsigned_abs()
}

/// Sleeps for a moment, so that a thread under SCHED_IDLE gets to what it is waited for.
pub fn pause() {
    std::thread::sleep(Duration::from_micros(20));
}
