//! Limits what a blade serves to all clients on other hosts together, so that it leaves its own
//! host's programs their processors. A client on the same host, on a unix socket, is one of those
//! programs.

use crate::Blade;
use farpool_kernel::lock;
use farpool_policy::donor_protection::{self, ProcessorSight};
use farpool_policy::{Meter, RateLimit};
use farpool_units::at_most;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The shared limit of all connections from other hosts.
#[derive(Debug, Default)]
pub(crate) struct DonorProtection {
    /// Counts pages in both directions.
    pub(crate) meter: Meter,
    /// Changes with the rate, so that a connection waiting by the old one checks again.
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
    /// Takes the recent use of the host's processors: while all are busy the blade serves
    /// `bytes_per_s` for each of them. To be called every second or so.
    pub fn consider(&self, sight: &ProcessorSight, bytes_per_s: u64) {
        let mut decision = lock(&self.donor_protection.decision);
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

    /// Holds all connections from other hosts (TCP) together to a rate, counting pages in both
    /// directions, until it is set anew.
    pub fn set_donor_protection(&self, limit: RateLimit) {
        let now_ns = at_most(self.now().as_nanos());
        self.donor_protection.set_limit(now_ns, limit);
    }

    /// The rate that connections from other hosts are held to, if any.
    pub fn donor_protection(&self) -> Option<RateLimit> {
        self.donor_protection.meter.limit()
    }
}
