//! Holds a connection to its grant's rate, and to what the blade serves to all together: which
//! request must wait, and until when.
//!
//! A request that may not pass yet stays in the input, where it is found again when its time has
//! come; meanwhile the connection is not read, so its client's socket fills up and other clients do
//! not wait. Its cost was charged when it arrived, so requests of all connections under the grant
//! pass in order of arrival, and small ones cannot overtake a large one for ever.

use crate::donor_protection::DonorProtection;
use crate::table::{Access, GrantTraffic};
use farpool_policy::WaitNs;
use farpool_units::PAGE_BYTES;
use farpool_wire::{Request, pages_in};
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest pause before a connection checks again, in nanoseconds: how long a grant whose rate was
/// raised still waits by the old one. A paused connection costs four wake-ups a second.
const ASK_AGAIN_NS: u64 = 250_000_000;

/// What holds a connection back now.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Nothing may pass before this; 0 if nothing is held back.
    until_ns: u64,
    /// The next request was charged, by rates of this version, and may pass at this time.
    charged: Option<Charged>,
}

#[derive(Clone, Copy, Debug)]
struct Charged {
    passes_ns: u64,
    rates_version: u64,
}

impl Pace {
    /// When the connection is to work again, if it is paused.
    pub(super) fn wakes_ns(&self) -> Option<u64> {
        (self.until_ns > 0).then_some(self.until_ns)
    }

    /// True while the pause lasts; calls `now_ns` only if there is a pause.
    pub(super) fn is_pausing(&mut self, now_ns: impl FnOnce() -> u64) -> bool {
        if self.until_ns == 0 {
            return false;
        }
        if now_ns() < self.until_ns {
            return true;
        }
        self.until_ns = 0;
        false
    }

    /// True if the request may pass now; if not, the connection pauses.
    pub(super) fn may_pass(
        &mut self,
        request: &Request<'_>,
        traffic: Option<&GrantTraffic>,
        donor_protection: Option<&DonorProtection>,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        let (pages, access) = match request {
            Request::Read { extents, .. } => (pages_in(extents), Access::Read),
            Request::Write { extents, .. } => (pages_in(extents), Access::Write),
            _ => return true,
        };
        let version = |version: &AtomicU64| version.load(Ordering::Acquire);
        let rates_version =
            traffic.map_or(0, |traffic| version(&traffic.rates_version)).wrapping_add(
                donor_protection.map_or(0, |donor_protection| version(&donor_protection.version)),
            );
        let of_grant = traffic.map(|traffic| match access {
            Access::Read => (&traffic.read, &traffic.read_throttled_ns),
            Access::Write => (&traffic.write, &traffic.write_throttled_ns),
        });
        let meters = [
            of_grant.map(|(meter, _)| meter),
            donor_protection.map(|donor_protection| &donor_protection.meter),
        ];
        let limited = meters.map(|meter| Some((meter?, meter?.limit()?)));
        if limited.iter().all(Option::is_none) {
            self.charged = None;
            return true;
        }
        let now_ns = now_ns();
        let charged = self.charged.filter(|charged| charged.rates_version == rates_version);
        let charged = charged.unwrap_or_else(|| {
            let bytes = pages * PAGE_BYTES as u64;
            let waits = limited.iter().flatten().map(|(meter, limit)| {
                let WaitNs(wait_ns) = meter.bucket().charge(bytes, now_ns, limit);
                wait_ns
            });
            let wait_ns = waits.max().unwrap_or(0);
            Charged { passes_ns: now_ns.saturating_add(wait_ns), rates_version }
        });
        if charged.passes_ns <= now_ns {
            self.charged = None;
            return true;
        }
        self.charged = Some(charged);
        let wait_ns = (charged.passes_ns - now_ns).min(ASK_AGAIN_NS);
        if let Some((_, throttled_ns)) = of_grant {
            throttled_ns.fetch_add(wait_ns, Ordering::Relaxed);
        }
        self.until_ns = now_ns.saturating_add(wait_ns);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_policy::RateLimit;
    use farpool_wire::{Extent, PageNumber, SegmentId};

    const PAGES: u32 = 256;

    fn limited() -> GrantTraffic {
        let traffic = GrantTraffic::default();
        traffic.read.set_limit(0, RateLimit { bytes_per_s: 1 << 20, burst_bytes: 1 << 20 });
        traffic
    }

    fn may_pass(pace: &mut Pace, traffic: &GrantTraffic, now_ns: u64) -> bool {
        let extents = [Extent::new(PageNumber(0), PAGES)];
        let request = Request::Read { segment: SegmentId(1), extents: &extents };
        pace.may_pass(&request, Some(traffic), None, || now_ns)
    }

    #[test]
    fn who_comes_first_passes_first_and_nobody_pays_twice() {
        let (traffic, second_ns) = (limited(), 1_000_000_000);
        let (mut one, mut two) = (Pace::default(), Pace::default());
        assert!(may_pass(&mut one, &traffic, 0), "the burst");
        assert!(!may_pass(&mut one, &traffic, 0));
        assert!(!may_pass(&mut two, &traffic, 0));
        assert!(one.is_pausing(|| ASK_AGAIN_NS - 1) && !one.is_pausing(|| ASK_AGAIN_NS));
        assert!(!may_pass(&mut two, &traffic, second_ns), "not before the first");
        assert!(may_pass(&mut one, &traffic, second_ns));
        assert!(may_pass(&mut two, &traffic, 2 * second_ns));
        assert_eq!(traffic.read_throttled_ns.load(Ordering::Relaxed), 3 * ASK_AGAIN_NS);
    }

    #[test]
    fn a_raised_rate_counts_at_once_and_a_lifted_one_lets_through() {
        let traffic = limited();
        traffic.read.set_limit(0, RateLimit { bytes_per_s: 0, burst_bytes: 0 });
        let mut pace = Pace::default();
        assert!(!may_pass(&mut pace, &traffic, 0));
        assert!(!may_pass(&mut pace, &traffic, u64::MAX / 2), "never");
        traffic.read.set_limit(0, RateLimit { bytes_per_s: 1 << 30, burst_bytes: 1 << 20 });
        traffic.rates_version.fetch_add(1, Ordering::Release);
        assert!(may_pass(&mut pace, &traffic, 1));
        assert!(!may_pass(&mut pace, &traffic, 1));
        traffic.read.set_limit(1, RateLimit::UNLIMITED);
        assert!(may_pass(&mut pace, &traffic, 1));
    }
    #[test]
    fn all_connections_together_are_held_to_what_the_blade_serves() {
        let extents = [Extent::new(PageNumber(0), PAGES)];
        let request = Request::Write { segment: SegmentId(1), extents: &extents };
        let (donor_protection, second_ns) = (DonorProtection::default(), 1_000_000_000);
        let (mut one, mut two) = (Pace::default(), Pace::default());
        let traffic = GrantTraffic::default();
        donor_protection.set_limit(0, RateLimit { bytes_per_s: 1 << 20, burst_bytes: 1 << 20 });
        assert!(one.may_pass(&request, Some(&traffic), Some(&donor_protection), || 0), "the burst");
        assert!(
            !two.may_pass(&request, None, Some(&donor_protection), || 0),
            "without a grant, too"
        );
        assert!(
            !one.may_pass(&request, Some(&traffic), Some(&donor_protection), || second_ns),
            "the other first"
        );
        assert!(two.may_pass(&request, None, Some(&donor_protection), || second_ns));
        assert_eq!(traffic.write_throttled_ns.load(Ordering::Relaxed), ASK_AGAIN_NS);
        donor_protection.set_limit(second_ns, RateLimit::UNLIMITED);
        assert!(
            one.may_pass(&request, Some(&traffic), Some(&donor_protection), || second_ns),
            "lifted"
        );
    }
}
