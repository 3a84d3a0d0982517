//! How long something took, by the processor's own counter where it may be read.
//!
//! A sidecar must not call the vDSO, which the program may unmap, and a system call for the time
//! costs ten times as much (361 instead of 36 ns on the machine of docs/contributors/sidecar.md).
//! So what is measured at every fault is counted in the processor's ticks. They are for statistics
//! only: waits and decisions by time use the clock.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The length of a tick is known well enough after this time: both ends are read to about 1 us.
const LEAST_SPAN: Duration = Duration::from_millis(20);
/// How often the counter and the clock are read together; the fastest reading counts.
const READINGS: u32 = 5;
/// Fractional bits of [`SCALE`].
const SCALE_BITS: u32 = 32;

/// The reading that ticks are counted from, if they may be.
static BASE: OnceLock<Reading> = OnceLock::new();
/// Nanoseconds of a tick; 0: unknown, the clock is used.
static SCALE: AtomicU64 = AtomicU64::new(0);

/// The counter and the clock at one instant.
#[derive(Clone, Copy, Debug)]
struct Reading {
    ticks: u64,
    time: Instant,
}

/// An instant, for [`Stamp::elapsed_ns`].
#[derive(Clone, Copy, Debug)]
pub enum Stamp {
    Clock(Instant),
    Ticks(u64),
}

impl Stamp {
    pub fn now() -> Stamp {
        if SCALE.load(Relaxed) == 0 { Stamp::Clock(Instant::now()) } else { Stamp::Ticks(ticks()) }
    }

    /// The time since then. None: it does not fit, so it is no time that has passed.
    pub fn elapsed_ns(self) -> Option<u64> {
        match self {
            Stamp::Clock(then) => u64::try_from(then.elapsed().as_nanos()).ok(),
            // A thread that has changed its processor may be some ticks behind: no time has passed
            // then.
            Stamp::Ticks(then) => scaled(ticks().saturating_sub(then), SCALE.load(Relaxed)),
        }
    }
}

/// For a process that may not use the vDSO: begins to count ticks, if the processor has an
/// invariant counter.
pub fn begin_to_count_ticks() {
    if may_count_ticks() {
        let _ = BASE.set(read_both());
    }
}

/// Measures the length of a tick, once enough time has passed; to be called now and then.
pub fn measure_ticks() {
    let Some(base) = BASE.get() else { return };
    if SCALE.load(Relaxed) == 0 && base.time.elapsed() >= LEAST_SPAN {
        let now = read_both();
        let ns = now.time.duration_since(base.time).as_nanos();
        SCALE.store(scale(ns, now.ticks.saturating_sub(base.ticks)), Relaxed);
    }
}

/// Nanoseconds of a tick; 0 if they cannot be computed. Pure.
fn scale(ns: u128, ticks: u64) -> u64 {
    let scale = (ns << SCALE_BITS).checked_div(u128::from(ticks));
    scale.and_then(|scale| u64::try_from(scale).ok()).unwrap_or(0)
}

/// Ticks in nanoseconds. Pure.
fn scaled(ticks: u64, scale: u64) -> Option<u64> {
    let ns = (u128::from(ticks) * u128::from(scale)) >> SCALE_BITS;
    u64::try_from(ns).ok()
}

/// Reads both at one instant. Of several readings, because this thread may lose its processor
/// between the two.
fn read_both() -> Reading {
    let read = |_| {
        let (before, time, after) = (ticks(), Instant::now(), ticks());
        let took = after.wrapping_sub(before);
        (took, Reading { ticks: before.wrapping_add(took / 2), time })
    };
    let readings = (0..READINGS).map(read).min_by_key(|(took, _)| *took);
    readings.map_or_else(|| read(0).1, |(_, reading)| reading)
}

/// Whether the counter may be read, and runs at a constant rate whatever the processor does. A
/// process that forbids reading it (PR_SET_TSC) forbids it to all that it starts.
#[cfg(target_arch = "x86_64")]
fn may_count_ticks() -> bool {
    const POWER: u32 = 0x8000_0007;
    const IS_INVARIANT: u32 = 1 << 8;
    let mut mode = 0;
    // SAFETY: the kernel writes one number to `mode`.
    let asked = unsafe { libc::prctl(libc::PR_GET_TSC, &raw mut mode) };
    if asked != 0 || mode != libc::PR_TSC_ENABLE {
        return false;
    }
    let leaf = std::arch::x86_64::__cpuid;
    leaf(0x8000_0000).eax >= POWER && leaf(POWER).edx & IS_INVARIANT != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn may_count_ticks() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: the instruction has no operands; that it may be used was checked before.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Never called.
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_nanoseconds() {
        // 2.5 GHz, for a second and for a century.
        let scale_of = scale(1_000_000_000, 2_500_000_000);
        assert_eq!(scaled(2_500, scale_of), Some(999));
        assert!(scaled(u64::MAX, scale_of) > Some(7_000_000_000_000_000_000));
        assert_eq!(scaled(u64::MAX, u64::MAX), None);
        assert_eq!((scale(5, 0), scaled(7, 0)), (0, Some(0)));
    }

    #[test]
    fn a_stamp_agrees_with_the_clock() {
        begin_to_count_ticks();
        if BASE.get().is_none() {
            println!("SKIPPED: this processor has no counter that goes on at one pace");
            return;
        }
        while SCALE.load(Relaxed) == 0 {
            std::thread::sleep(LEAST_SPAN);
            measure_ticks();
        }
        let (clock, stamp) = (Instant::now(), Stamp::now());
        assert!(matches!(stamp, Stamp::Ticks(_)));
        std::thread::sleep(LEAST_SPAN);
        let least = LEAST_SPAN.as_nanos() * 99 / 100;
        let ns = u128::from(stamp.elapsed_ns().expect("a number"));
        assert!(ns >= least && ns <= clock.elapsed().as_nanos() * 101 / 100, "{ns} ns");
    }
}
