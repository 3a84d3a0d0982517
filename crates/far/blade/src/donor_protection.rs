//! What a blade serves its clients on other hosts all together, so that it leaves its own host's
//! programs their processors. Who is on the same host, on a unix socket, is one of those programs.

use crate::Blade;
use farpool_policy::donor_protection::{self, ProcessorSight};
use farpool_policy::{Meter, RateLimit};
use farpool_units::at_most;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// What all connections from elsewhere are held to.
#[derive(Debug, Default)]
pub(crate) struct DonorProtection {
    /// Pages in either direction.
    pub(crate) meter: Meter,
    /// Changes with the rate, so that who waits by the old one asks again.
    pub(crate) version: AtomicU64,
    decision: Mutex<donor_protection::DonorProtection>,
}

impl DonorProtection {
    pub(crate) fn set_limit(&self, now_ns: u64, limit: RateLimit) {
        self.meter.set_limit(now_ns, limit);
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl Blade {
    /// Takes in what the host's processors did of late: while all are in use the blade serves
    /// `bytes_per_s` for each of them. To be called every second or so.
    pub fn consider(&self, sight: &ProcessorSight, bytes_per_s: u64) {
        let mut decision =
            self.donor_protection.decision.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = decision.look(sight, bytes_per_s);
        let before = self.donor_protection().unwrap_or(RateLimit::UNLIMITED);
        if limit == before {
            return;
        }
        self.set_donor_protection(limit);
        if before.is_unlimited() {
            let bytes_per_s = limit.bytes_per_s;
            tracing::info!(bytes_per_s, "this host's programs use all processors: serving less");
        } else if limit.is_unlimited() {
            tracing::info!("there is processor time to spare: serving all that is asked for");
        }
    }

    /// Holds all connections from other hosts (TCP) together to a rate, pages in both directions
    /// counted, until it is set anew.
    pub fn set_donor_protection(&self, limit: RateLimit) {
        let now_ns = at_most(self.now().as_nanos());
        self.donor_protection.set_limit(now_ns, limit);
    }

    /// The rate that connections from other hosts are held to, if any.
    pub fn donor_protection(&self) -> Option<RateLimit> {
        self.donor_protection.meter.limit()
    }
}
