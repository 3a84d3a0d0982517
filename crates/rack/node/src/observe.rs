//! What the node reports about itself to the controller, from the blade's counters.

use std::time::Duration;

use farpool_api::{NodeGrantUse, SegmentId};
use farpool_blade::{Blade, GrantStat};
use farpool_units::{PAGE_BYTES, exactly};

/// Shortest span over which a load is measured; a shorter one could contain only a single burst.
const LOAD_SPAN: Duration = Duration::from_millis(400);

/// Bytes moved since the blade started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

/// Measures the blade's load as a share of the rate that its memory can serve.
#[derive(Debug)]
pub(crate) struct LoadMeter {
    read_bytes_per_s: u64,
    write_bytes_per_s: u64,
    since: Duration,
    before: Traffic,
    permille: u16,
}

impl LoadMeter {
    pub(crate) fn new(read_bytes_per_s: u64, write_bytes_per_s: u64) -> Self {
        let before = Traffic::default();
        Self { read_bytes_per_s, write_bytes_per_s, since: Duration::ZERO, before, permille: 0 }
    }

    /// Returns the load of the busier direction, thousandths; `now` is the time since the blade
    /// started.
    pub(crate) fn permille(&mut self, traffic: Traffic, now: Duration) -> u16 {
        let span = now.saturating_sub(self.since);
        if span < LOAD_SPAN {
            return self.permille;
        }
        let share = |bytes: u64, served: u64| {
            let most = u128::from(served.max(1)) * span.as_millis();
            let permille = u128::from(bytes) * 1_000_000 / most;
            exactly::<u16, _>(permille.min(1000))
        };
        let read = traffic.read_bytes.saturating_sub(self.before.read_bytes);
        let written = traffic.written_bytes.saturating_sub(self.before.written_bytes);
        self.permille =
            share(read, self.read_bytes_per_s).max(share(written, self.write_bytes_per_s));
        (self.since, self.before) = (now, traffic);
        self.permille
    }
}

/// Returns the blade's used bytes and its traffic.
pub(crate) fn totals_of(blade: &Blade) -> (u64, Traffic) {
    let totals = blade.stat(blade.now()).totals;
    let bytes_of = |pages: u64| pages.saturating_mul(PAGE_BYTES as u64);
    let traffic = Traffic {
        read_bytes: bytes_of(totals.pages_read.get()),
        written_bytes: bytes_of(totals.pages_written.get()),
    };
    (totals.used_bytes.get(), traffic)
}

/// Returns the grants that stand, as the blade itself lists them.
pub(crate) fn grants_of(blade: &Blade) -> Vec<NodeGrantUse> {
    let of = |grant: GrantStat| NodeGrantUse {
        segment: SegmentId::from_u128(grant.id.0),
        epoch: grant.epoch,
        bytes: Some(grant.granted_bytes),
        used_bytes: grant.used_bytes,
        connections: grant.connections,
    };
    blade.grants().into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_that_of_the_busier_direction() {
        let mut meter = LoadMeter::new(1000, 500);
        let second = Duration::from_secs(1);
        let at = |read_bytes, written_bytes| Traffic { read_bytes, written_bytes };
        assert_eq!(meter.permille(at(100, 10), second), 100);
        assert_eq!(meter.permille(at(200, 260), second * 2), 500);
        // Too soon for a new value.
        assert_eq!(meter.permille(at(900, 260), second * 2 + LOAD_SPAN / 2), 500);
        assert_eq!(meter.permille(at(200, 260), second * 3), 0);
        assert_eq!(meter.permille(at(u64::MAX, 260), second * 4), 1000);
    }
}
