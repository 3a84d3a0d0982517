//! Holds a connection to its grant's rate, to what the blade serves to all together, and to the
//! rates of control requests ([`super::toll`]): which request must wait, and until when.
//!
//! A request that may not pass yet stays in the input, where it is found again when its time has
//! come; meanwhile the connection is not read, so its client's socket fills up and other clients do
//! not wait. Its cost was charged when it arrived, so requests of all connections under the grant
//! pass in order of arrival, and small ones cannot overtake a large one for ever.

use super::toll::{Payers, Rates};
use crate::donor_protection::DonorProtection;
use crate::table::{Access, GrantTraffic};
use farpool_policy::WaitNs;
use farpool_units::PAGE_BYTES;
use farpool_wire::{Request, pages_in};
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest pause before a connection checks again, in nanoseconds: how long a grant whose rate was
/// raised still waits by the old one. A paused connection costs four wake-ups a second.
const ASK_AGAIN_NS: u64 = 250_000_000;

/// Most units of a control request that are charged at once. A larger one pays this much, waits for
/// it with all others, and is then charged the next: so whoever asks for little waits for one
/// instalment of each connection that asks for much, and not for all of it. With as many
/// connections as one host may have that is 3 s at the default rate, within a client's deadline.
const INSTALMENT_UNITS: u64 = 8;

/// What holds a connection back now.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Nothing may pass before this; 0 if nothing is held back.
    until_ns: u64,
    /// The next request was charged, by rates of this version, and may pass at this time.
    charged: Option<Charged>,
    /// The next request is a control request, and has not been paid for.
    asked: Option<Asked>,
}

#[derive(Clone, Copy, Debug)]
struct Charged {
    passes_ns: u64,
    rates_version: u64,
}

/// A control request that pays in instalments.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// When what it was charged has passed.
    passes_ns: u64,
    /// Its last instalment, in units.
    instalment: u64,
    /// Units that it has not been charged yet.
    left: u64,
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

    /// True if a control request of this many units may pass now; if not, the connection pauses.
    pub(super) fn may_ask(
        &mut self,
        units: u64,
        payers: &Payers<'_>,
        rates: &Rates,
        now_ns: impl FnOnce() -> u64,
    ) -> bool {
        if rates.are_unlimited() {
            return true;
        }
        let now_ns = now_ns();
        let begun = Asked { passes_ns: 0, instalment: 0, left: units };
        let mut asked = self.asked.take().unwrap_or(begun);
        while asked.passes_ns <= now_ns {
            if asked.left == 0 {
                return true;
            }
            asked.instalment = asked.left.min(INSTALMENT_UNITS);
            asked.left -= asked.instalment;
            let wait_ns = payers.charge(asked.instalment, rates, now_ns);
            asked.passes_ns = now_ns.saturating_add(wait_ns);
        }
        self.asked = Some(asked);
        self.pause(asked.passes_ns, now_ns, payers.throttled_ns.into_iter().flatten());
        false
    }

    /// To be called when the connection closes: gives back what a control request was charged that
    /// has not passed.
    pub(super) fn give_back(&mut self, payers: &Payers<'_>, rates: &Rates) {
        if let Some(asked) = self.asked.take() {
            payers.give_back(asked.instalment, rates);
        }
    }

    /// True if the page request may pass now; if not, the connection pauses.
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
        self.pause(charged.passes_ns, now_ns, of_grant.map(|(_, throttled_ns)| throttled_ns));
        false
    }

    /// Pauses until `passes_ns`, or until it is time to check again.
    fn pause<'a>(
        &mut self,
        passes_ns: u64,
        now_ns: u64,
        throttled_ns: impl IntoIterator<Item = &'a AtomicU64>,
    ) {
        let wait_ns = passes_ns.saturating_sub(now_ns).min(ASK_AGAIN_NS);
        for counter in throttled_ns {
            counter.fetch_add(wait_ns, Ordering::Relaxed);
        }
        self.until_ns = now_ns.saturating_add(wait_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_policy::{Bucket, RateLimit};
    use farpool_wire::{Extent, PageNumber, SegmentId};
    use proptest::prelude::*;

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

    /// Connections of two groups: all of three clients in the first, and one in the second.
    const CLIENT_OF: [usize; 7] = [0, 0, 0, 1, 1, 2, 3];

    struct Group {
        clients: [Bucket; 4],
        groups: [Bucket; 2],
        paces: [Pace; 7],
        rates: Rates,
        /// When a connection's request passed, whose, and its units.
        passed: Vec<(u64, usize, u64)>,
    }

    impl Group {
        fn of(client: usize) -> usize {
            usize::from(client == 3)
        }

        fn new(units_per_s: u64) -> Group {
            Group {
                clients: Default::default(),
                groups: Default::default(),
                paces: Default::default(),
                rates: Rates::new(units_per_s),
                passed: Vec::new(),
            }
        }

        fn with<T>(
            &mut self,
            at: usize,
            what: impl FnOnce(&mut Pace, &Payers<'_>, &Rates) -> T,
        ) -> T {
            let client = CLIENT_OF[at];
            let group = &self.groups[Self::of(client)];
            let client = Some(&self.clients[client]);
            let payers = Payers { client, group, throttled_ns: [None; 2] };
            what(&mut self.paces[at], &payers, &self.rates)
        }

        fn ask(&mut self, at: usize, units: u64, now_ns: u64) -> bool {
            let passes = self.with(at, |pace, payers, rates| {
                !pace.is_pausing(|| now_ns) && pace.may_ask(units, payers, rates, || now_ns)
            });
            if passes {
                self.passed.push((now_ns, at, units));
            }
            passes
        }

        /// Checks that in any span those for whom `is_of` holds had no more than the burst and what
        /// the rate allows, and what a request of each connection had paid before.
        fn check(
            &self,
            is_of: impl Fn(usize) -> bool,
            units_per_s: u64,
        ) -> Result<(), TestCaseError> {
            let passed = || self.passed.iter().filter(|(_, at, _)| is_of(*at));
            let largest = passed().map(|(.., units)| *units).max().unwrap_or(0);
            let slack = largest * CLIENT_OF.len() as u64 + units_per_s / 20;
            for (from, (start_ns, ..)) in passed().enumerate() {
                let mut units = 0;
                for (at_ns, _, more) in passed().skip(from) {
                    units += more;
                    let earned = (at_ns - start_ns) * units_per_s / 1_000_000_000;
                    prop_assert!(units <= slack + earned, "{units} in {} ns", at_ns - start_ns);
                }
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn neither_connections_nor_clients_nor_large_requests_get_more(
            units_per_s in 1_000..40_000u64,
            steps in prop::collection::vec((0..7usize, 0..300u64, 0..20_000_000u64, 0..20u8), 1..200),
        ) {
            let (mut group, mut now_ns) = (Group::new(units_per_s), 0);
            let mut waiting = [None; 7];
            for (at, units, pause_ns, dice) in steps {
                now_ns += pause_ns;
                // Some leave while they wait, and others come in their place.
                if dice == 0 && waiting[at].take().is_some() {
                    group.with(at, |pace, payers, rates| pace.give_back(payers, rates));
                    group.paces[at] = Pace::default();
                }
                let units = waiting[at].unwrap_or(units);
                waiting[at] = (!group.ask(at, units, now_ns)).then_some(units);
            }
            group.check(|at| Group::of(CLIENT_OF[at]) == 0, units_per_s)?;
            for client in 0..4 {
                group.check(|at| CLIENT_OF[at] == client, units_per_s / 2)?;
            }
            // Whatever they asked for, all pass in the end, and then the buckets fill up.
            for (at, units) in waiting.iter().enumerate().filter_map(|(at, it)| Some((at, (*it)?))) {
                for _ in 0.. {
                    if group.ask(at, units, now_ns) {
                        break;
                    }
                    now_ns = group.paces[at].wakes_ns().expect("it waits");
                }
            }
            now_ns += 1_000_000_000;
            for at in 0..CLIENT_OF.len() {
                prop_assert!(group.ask(at, 1, now_ns), "nobody left a debt");
            }
        }
    }

    #[test]
    fn who_asks_for_little_does_not_wait_for_all_that_others_ask_for() {
        let (mut group, mut longest_ns, mut asked_ns) = (Group::new(2_000), 0, 0);
        for now_ns in (0..3_000_000_000).step_by(1_000_000) {
            for at in 0..5 {
                group.ask(at, 251, now_ns);
            }
            if group.ask(5, 1, now_ns) {
                longest_ns = longest_ns.max(now_ns - asked_ns);
                asked_ns = now_ns;
            }
        }
        let of_others = group.passed.iter().filter(|(_, at, _)| *at < 5).count();
        assert!(of_others >= 3_000 / 251, "they take what there is: {of_others}");
        // Eight units of each, and a timer's two milliseconds; all together had asked for 0.6 s.
        let most_ns = 5 * 8 * 1_000_000_000 / 2_000 + 2_000_000;
        assert!((1_000_000..=most_ns).contains(&longest_ns), "{longest_ns} ns");
    }

    #[test]
    fn who_leaves_while_it_waits_leaves_no_debt_to_others() {
        let mut group = Group::new(1_000);
        while group.ask(0, 1, 0) {}
        while group.ask(5, 1, 0) {}
        for _ in 0..100_000 {
            group.with(0, |pace, payers, rates| pace.give_back(payers, rates));
            group.paces[0] = Pace::default();
            assert!(!group.ask(0, 8, 0));
        }
        let wait_ns = group.paces[5].wakes_ns().expect("it waits");
        assert!(group.ask(5, 1, wait_ns), "as if nobody else were there");
        assert!(!group.ask(3, 1, wait_ns));
        assert!(group.ask(3, 1, wait_ns + 10_000_000), "eight units and one are owed");
    }

    #[test]
    fn no_time_is_too_late_to_wait_from() {
        let mut group = Group::new(1);
        for now_ns in [0, u64::MAX - 1, u64::MAX] {
            for at in 0..CLIENT_OF.len() {
                assert!(group.ask(at, 251, now_ns) || group.paces[at].wakes_ns().is_some());
            }
        }
        let mut group = Group::new(u64::MAX);
        assert!(group.ask(0, u64::MAX, 0) && group.ask(0, u64::MAX, u64::MAX), "without a limit");
    }
}
