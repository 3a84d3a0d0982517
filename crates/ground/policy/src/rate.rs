//! How fast bytes may pass: a token bucket that many threads and processes may use at once.
//!
//! The bucket is GCRA (the leaky bucket as a meter): all of its state is one number, the time in
//! nanoseconds at which everything let through so far would have passed at the limit's rate, had it
//! arrived at that rate. The bucket is full when that time is not in the future, and empty when it
//! lies one burst ahead. So it needs no timer, no lock, and no more than one compare-and-swap.
//!
//! Invariants:
//! - Over any span of time no more passes than the burst, or the largest single request if that is
//!   larger, plus what the rate allows in that time. Times are rounded against the taker.
//!   What is given back ([`Bucket::give_back`]) may pass in addition.
//! - A request that the bucket covers is never refused, except for rounding: each request costs up
//!   to 1 ns more than its bytes take.
//! - Memory full of zeros is a full [`Bucket`] and a [`Meter`] without limit, so both may be in
//!   shared memory that was not initialised. Nothing in that memory can make this code panic.
//! - `now_ns` is from one clock that all users share (`CLOCK_MONOTONIC`). Should it go back, no
//!   more passes than before; waiting requests wait until the clock has caught up.

use std::sync::atomic::{AtomicU64, Ordering};

use farpool_units::at_most;

const NS_PER_S: u64 = 1_000_000_000;
/// A [`RateLimit::paced`] limit's burst as time, in parts of a second (1/50, so 20 ms): longer than
/// the delays of millisecond timers and of processes waiting for a processor, so that the rate is
/// still reached; short enough that other users do not notice.
const BURST_PARTS_OF_A_SECOND: u64 = 50;
/// The least burst of a [`RateLimit::paced`] limit, in bytes: the largest request that a blade
/// accepts by default. A larger request passes when the bucket is full, and leaves a debt.
const BURST_LEAST_BYTES: u64 = 1 << 20;

/// A rate, and the burst that may pass at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimit {
    /// Bytes per second: [`RateLimit::UNLIMITED_BYTES_PER_S`] is no limit, and with 0 nothing ever
    /// passes, whatever the burst.
    pub bytes_per_s: u64,
    /// Bytes that a full bucket holds. With 0 requests pass one by one, each after the time that
    /// the previous one takes at the rate.
    pub burst_bytes: u64,
}

/// A time to wait, in nanoseconds. `u64::MAX` means for ever.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WaitNs(pub u64);

impl RateLimit {
    /// The rate that means no limit.
    pub const UNLIMITED_BYTES_PER_S: u64 = u64::MAX;
    /// No limit.
    pub const UNLIMITED: RateLimit =
        RateLimit { bytes_per_s: Self::UNLIMITED_BYTES_PER_S, burst_bytes: u64::MAX };

    /// Returns the rate with a burst that suits page traffic: 20 ms of it, and at least 1 MiB.
    pub fn paced(bytes_per_s: u64) -> RateLimit {
        if bytes_per_s == Self::UNLIMITED_BYTES_PER_S {
            return Self::UNLIMITED;
        }
        let burst_bytes = (bytes_per_s / BURST_PARTS_OF_A_SECOND).max(BURST_LEAST_BYTES);
        RateLimit { bytes_per_s, burst_bytes }
    }

    /// True if there is no limit.
    pub fn is_unlimited(&self) -> bool {
        self.bytes_per_s == Self::UNLIMITED_BYTES_PER_S
    }

    /// Returns the time that `bytes` take, rounded up.
    fn cost_ns(&self, bytes: u64) -> u64 {
        match bytes.checked_mul(NS_PER_S) {
            Some(scaled) => scaled.div_ceil(self.bytes_per_s),
            None => {
                let scaled = u128::from(bytes) * u128::from(NS_PER_S);
                let cost = scaled.div_ceil(u128::from(self.bytes_per_s));
                at_most(cost)
            }
        }
    }

    /// Returns how far ahead of the clock an empty bucket is: the burst as time, rounded down.
    fn depth_ns(&self) -> u64 {
        let scaled = u128::from(self.burst_bytes) * u128::from(NS_PER_S);
        at_most(scaled / u128::from(self.bytes_per_s))
    }

    /// Returns the limit's answer if it does not depend on the bucket.
    fn verdict(&self) -> Option<Result<(), WaitNs>> {
        match self.bytes_per_s {
            Self::UNLIMITED_BYTES_PER_S => Some(Ok(())),
            0 => Some(Err(WaitNs(u64::MAX))),
            _ => None,
        }
    }
}

/// A token bucket. It does not store its limit: each caller passes it, so the limit may change at
/// any time ([`Bucket::rate_changed`]).
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Bucket {
    /// When everything let through so far has passed at the rate (theoretical arrival time).
    passed_at_ns: AtomicU64,
}

impl Bucket {
    /// Creates a full bucket.
    pub const fn new() -> Bucket {
        Bucket { passed_at_ns: AtomicU64::new(0) }
    }

    /// Takes `bytes`, all of them or none. More than the burst is let through when the bucket is
    /// full; later requests then wait until the debt is paid.
    ///
    /// # Errors
    /// Not now: a retry after this wait succeeds if no other request takes any meanwhile.
    pub fn take(&self, bytes: u64, now_ns: u64, limit: &RateLimit) -> Result<(), WaitNs> {
        if let Some(verdict) = limit.verdict() {
            return verdict;
        }
        let (cost_ns, depth_ns) = (limit.cost_ns(bytes), limit.depth_ns());
        let mut passed_at_ns = self.passed_at_ns.load(Ordering::Relaxed);
        loop {
            let wait_ns = wait_ns(passed_at_ns, now_ns, cost_ns, depth_ns);
            if wait_ns > 0 {
                return Err(WaitNs(wait_ns));
            }
            let after = passed_at_ns.max(now_ns).saturating_add(cost_ns);
            let ordering = Ordering::Relaxed; // the number guards no other memory
            let swapped =
                self.passed_at_ns.compare_exchange_weak(passed_at_ns, after, ordering, ordering);
            match swapped {
                Ok(_) => return Ok(()),
                Err(found) => passed_at_ns = found,
            }
        }
    }

    /// Takes `bytes` in any case. Returns the wait before they may pass. Requests are let through
    /// in the order of their calls, whatever their size; taken bytes are not returned to the
    /// bucket. With a rate of 0 nothing is taken and the wait is for ever.
    pub fn charge(&self, bytes: u64, now_ns: u64, limit: &RateLimit) -> WaitNs {
        match limit.verdict() {
            Some(Ok(())) => return WaitNs(0),
            Some(Err(for_ever)) => return for_ever,
            None => {}
        }
        let (cost_ns, depth_ns) = (limit.cost_ns(bytes), limit.depth_ns());
        let take = |passed_at_ns: u64| Some(passed_at_ns.max(now_ns).saturating_add(cost_ns));
        let before = self.passed_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let (Ok(before) | Err(before)) = before; // the closure always takes
        WaitNs(wait_ns(before, now_ns, cost_ns, depth_ns))
    }

    /// Gives back what [`Bucket::charge`] took, with the same limit, for a request that will not
    /// pass after all. Who waits goes on waiting as long as before; who comes next waits less.
    pub fn give_back(&self, bytes: u64, limit: &RateLimit) {
        if limit.verdict().is_some() {
            return;
        }
        let cost_ns = limit.cost_ns(bytes);
        let less = |passed_at_ns: u64| Some(passed_at_ns.saturating_sub(cost_ns));
        let _always_changes =
            self.passed_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Returns the bytes available.
    pub fn available_bytes(&self, now_ns: u64, limit: &RateLimit) -> u64 {
        match limit.verdict() {
            Some(Ok(())) => return u64::MAX,
            Some(Err(_)) => return 0,
            None => {}
        }
        let ahead_ns = self.passed_at_ns.load(Ordering::Relaxed).saturating_sub(now_ns);
        let left_ns = limit.depth_ns().saturating_sub(ahead_ns);
        let bytes = u128::from(left_ns) * u128::from(limit.bytes_per_s) / u128::from(NS_PER_S);
        at_most(bytes)
    }

    /// Converts the bucket after a change of the limit, to be called once for each: earlier takes
    /// keep counting, in bytes. Otherwise a debt made at a low rate would take as long to pay at a
    /// high one.
    pub fn rate_changed(&self, now_ns: u64, before: &RateLimit, after: &RateLimit) {
        let both_count = before.verdict().is_none() && after.verdict().is_none();
        let scale = |passed_at_ns: u64| {
            let ahead_ns = if both_count { passed_at_ns.saturating_sub(now_ns) } else { 0 };
            let scaled = u128::from(ahead_ns) * u128::from(before.bytes_per_s);
            let scaled = scaled.div_ceil(u128::from(after.bytes_per_s.max(1)));
            Some(now_ns.saturating_add(at_most(scaled)))
        };
        let _always_changes =
            self.passed_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, scale);
    }
}

/// Returns the time until `cost_ns` more fits into the bucket; a cost above the depth waits until
/// the bucket is full.
fn wait_ns(passed_at_ns: u64, now_ns: u64, cost_ns: u64, depth_ns: u64) -> u64 {
    let ahead_ns = passed_at_ns.saturating_sub(now_ns);
    ahead_ns.saturating_add(cost_ns.min(depth_ns)).saturating_sub(depth_ns)
}

/// A bucket with its limit, which may be set while others take: for memory that several threads or
/// processes share. Zeroed memory is a meter without limit.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Meter {
    /// The rate plus 1, wrapping, so that 0 means no limit.
    rate: AtomicU64,
    burst_bytes: AtomicU64,
    bucket: Bucket,
}

const _: () = assert!(size_of::<Bucket>() == 8 && size_of::<Meter>() == 24);

impl Meter {
    /// Creates a meter with this limit and a full bucket.
    pub fn new(limit: RateLimit) -> Meter {
        Meter {
            rate: AtomicU64::new(limit.bytes_per_s.wrapping_add(1)),
            burst_bytes: AtomicU64::new(limit.burst_bytes),
            bucket: Bucket::new(),
        }
    }

    /// Returns the limit; None if there is none.
    pub fn limit(&self) -> Option<RateLimit> {
        match self.rate.load(Ordering::Relaxed) {
            0 => None,
            rate => Some(RateLimit {
                bytes_per_s: rate - 1,
                burst_bytes: self.burst_bytes.load(Ordering::Relaxed),
            }),
        }
    }

    /// Changes the limit; earlier takes keep counting. One caller at a time. A concurrent take may
    /// see the new rate with the old burst.
    pub fn set_limit(&self, now_ns: u64, limit: RateLimit) {
        let before = self.limit().unwrap_or(RateLimit::UNLIMITED);
        if before == limit {
            return;
        }
        self.burst_bytes.store(limit.burst_bytes, Ordering::Relaxed);
        self.rate.store(limit.bytes_per_s.wrapping_add(1), Ordering::Relaxed);
        self.bucket.rate_changed(now_ns, &before, &limit);
    }

    /// Returns the bucket.
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }
}
/// One bucket for reads and one for writes. May be in shared memory; all zeros means no limit.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Meters {
    /// The meter of reads.
    pub read: Meter,
    /// The meter of writes.
    pub write: Meter,
}

const _: () = assert!(size_of::<Meters>() == 48);
