//! The server's clock: whole seconds since a little before the start, and the conversion of
//! clients' expiry times into them.
//!
//! As in memcached, an expiry of up to 30 days is relative to now, a larger one is a Unix time, 0
//! means never and a negative one has already passed.

use farpool_units::at_most;

/// Expiry times up to this many seconds are relative to now.
const RELATIVE_MAX_S: i64 = 60 * 60 * 24 * 30;
/// The clock's reading at the start: an expiry of 1 has passed by then.
pub const START_S: u32 = 62;

/// Converts between the server's clock and Unix time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Unix time at which the clock would have read 0.
    zero_unix_s: i64,
    start_s: u32,
    now_s: u32,
}

impl Clock {
    /// A clock that starts at this Unix time.
    #[must_use]
    pub fn start(unix_s: i64) -> Self {
        Self { zero_unix_s: unix_s - i64::from(START_S), start_s: START_S, now_s: START_S }
    }

    /// A clock that continues where an earlier one stopped, so that its expiry times stay right:
    /// `zero_unix_s` is that clock's zero, `last_s` its last known reading. It never goes back,
    /// even if Unix time did: then it gets a new zero, so that Unix times are again what clients
    /// expect.
    #[must_use]
    pub fn resume(zero_unix_s: i64, last_s: u32, unix_s: i64) -> Self {
        let passed_s: u32 = at_most(unix_s.saturating_sub(zero_unix_s));
        let now_s = passed_s.max(START_S).max(last_s);
        Self { zero_unix_s: unix_s - i64::from(now_s), start_s: now_s, now_s }
    }

    /// Sets the time since the start, measured by a clock that does not jump.
    pub fn set_uptime(&mut self, uptime_s: u32) {
        self.now_s = self.start_s.saturating_add(uptime_s);
    }

    /// Unix time at which the clock would have read 0.
    #[must_use]
    pub const fn zero_unix_s(&self) -> i64 {
        self.zero_unix_s
    }

    #[inline]
    #[must_use]
    pub const fn now_s(&self) -> u32 {
        self.now_s
    }

    #[must_use]
    pub const fn uptime_s(&self) -> u32 {
        self.now_s - self.start_s
    }

    /// The present Unix time according to this clock.
    #[must_use]
    pub fn unix_s(&self) -> i64 {
        self.unix_s_of(self.now_s)
    }

    /// Converts a second of this clock to Unix time.
    #[must_use]
    pub fn unix_s_of(&self, clock_s: u32) -> i64 {
        self.zero_unix_s + i64::from(clock_s)
    }

    /// Converts a client's expiry time to seconds of this clock; 0 = never.
    #[inline]
    #[must_use]
    pub fn expiry_s(&self, exptime: i32) -> u32 {
        self.expiry_of_s(exptime.into())
    }

    /// As [`Self::expiry_s`], for an expiry time of any width.
    #[inline]
    #[must_use]
    pub fn expiry_of_s(&self, exptime: i64) -> u32 {
        if exptime == 0 {
            return 0;
        }
        // In the past, or at or before the start: 1, because 0 would mean never.
        let expiry = match exptime {
            ..=-1 => 1,
            1..=RELATIVE_MAX_S => i64::from(self.now_s) + exptime,
            _ => (exptime - self.zero_unix_s).max(1),
        };
        at_most(expiry)
    }

    /// For `flush_all` with this delay or Unix time: items stored by that second are flushed, once
    /// it has come. None without one: all present items are, at once.
    #[must_use]
    pub fn flush_s(&self, exptime: i64) -> Option<u32> {
        // As in memcached those stored at least a second before the given time.
        (exptime > 0).then(|| self.expiry_of_s(exptime) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_times_are_memcacheds() {
        let mut clock = Clock::start(1_700_000_000);
        clock.set_uptime(100);
        assert_eq!(clock.now_s(), 162);
        assert_eq!(clock.expiry_s(0), 0);
        assert_eq!(clock.expiry_s(-1), 1);
        assert_eq!(clock.expiry_s(10), 172);
        assert_eq!(clock.expiry_s(60 * 60 * 24 * 30), 162 + 2_592_000);
        assert_eq!(clock.expiry_s(1_700_000_200), 262);
        assert_eq!(clock.expiry_s(60 * 60 * 24 * 30 + 1), 1, "a Unix time long ago");
        assert_eq!(clock.unix_s(), 1_700_000_100);
        assert_eq!([-1, 0].map(|exptime| clock.flush_s(exptime)), [None, None]);
        assert_eq!(clock.flush_s(10), Some(171));
        assert_eq!(clock.flush_s(3_000_000), Some(0), "before anything was stored");
    }

    #[test]
    fn a_clock_that_goes_on_keeps_expiry_times() {
        let before = Clock::start(1_700_000_000);
        let expiry_s = before.expiry_s(1000);
        let mut after = Clock::resume(1_700_000_000 - i64::from(START_S), 70, 1_700_000_500);
        assert_eq!((after.uptime_s(), expiry_s - after.now_s()), (0, 500));
        after.set_uptime(10);
        assert_eq!((after.uptime_s(), expiry_s - after.now_s()), (10, 490));
        let set_back = Clock::resume(1_700_000_000 - i64::from(START_S), 570, 1_600_000_000);
        assert_eq!((set_back.now_s(), set_back.unix_s()), (570, 1_600_000_000));
        assert_eq!(set_back.expiry_s(1_600_000_100), 670, "as the world's clock says now");
        assert_eq!(set_back.zero_unix_s(), 1_600_000_000 - 570);
    }
}
