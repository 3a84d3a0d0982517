//! Clocks of the kernel.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farpool_units::at_most;
use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock, which is the same for all processes; 0 is its start.
#[inline]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
    ns.unsigned_abs()
}

/// Milliseconds of the machine's clock since 1970; 0 if it stands before that, as without a
/// battery. It may jump.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| at_most(since.as_millis()))
}

/// What the calling thread has used of processors.
#[inline]
pub fn thread_cpu_time() -> Duration {
    time_of(ClockId::ThreadCPUTime)
}

/// What this process has used of processors, with all its threads.
#[inline]
pub fn process_cpu_time() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

#[inline]
fn time_of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(at_most(time.tv_sec), at_most(time.tv_nsec))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_clocks_go_forward() {
        let (began, used) = (monotonic_ns(), thread_cpu_time());
        while thread_cpu_time() <= used {}
        assert!(monotonic_ns() > began);
        assert!(process_cpu_time() > used, "a process has used what its threads have");
    }
}
