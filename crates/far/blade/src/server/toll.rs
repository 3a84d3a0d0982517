//! What control requests, all but reads and writes, cost, and how much of them a blade carries out
//! for one client, and for all who ask together under one grant or, without one, from one host or
//! user: so that who has more connections or more clients may not ask for more.
//!
//! A request counts units, since one can be as much work as a thousand others. A unit takes a
//! thread at most about 5 us (`control_flood`, with the costs of each kind); so the rates bound the
//! processor time that anybody's control requests can take, and do not depend on how long something
//! took just then. A request over the rate waits ([`super::pace`]).

use farpool_policy::{Bucket, RateLimit, WaitNs};
use farpool_wire::Request;
use std::sync::atomic::AtomicU64;

/// Superpages to allocate or free, or extents to discard, that count one unit: 0.2 to 0.3 us each.
const ITEMS_PER_UNIT: u64 = 16;
/// Units of an answer with a list of superpages: 18 us if it is full.
const LIST_UNITS: u64 = 4;
/// Units of a stat: 18 us for 300 clients, and some more for those it skips.
const STAT_UNITS: u64 = 8;
/// Units of a segment's memory as a descriptor: a file is made, opened anew and marked.
const SHM_MAP_UNITS: u64 = 4;
/// Units of a hello: 43 us with the connection's beginning and end.
const HELLO_UNITS: u64 = 8;
/// A bucket's burst as time, in parts of a second (1/20, so 50 ms). It must cover the whole
/// milliseconds of a worker's timer, and what a program asks for when it starts or forks; and a
/// worker does not turn to its other connections before a burst is over: 5 ms at the default rate.
const BURST_PARTS_OF_A_SECOND: u64 = 20;
/// One client has this part of what all together have, so that one does not keep the others of its
/// grant or host waiting.
const CLIENT_PARTS: u64 = 2;

/// The rates of control requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    client: RateLimit,
    group: RateLimit,
}

/// Who pays for a connection's control requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Payers<'a> {
    /// The client, once it is known.
    pub(super) client: Option<&'a Bucket>,
    /// All under the same grant; without one, all of the same host or user.
    pub(super) group: &'a Bucket,
    /// Where the time is counted for which requests are held back: of the grant, of the blade.
    pub(super) throttled_ns: [Option<&'a AtomicU64>; 2],
}

impl Rates {
    /// All under one grant, or of one host or user, may ask for this much together.
    pub(super) fn new(units_per_s: u64) -> Rates {
        // A bucket counts whatever it is given: here units.
        let limit = |units_per_s: u64| RateLimit {
            bytes_per_s: units_per_s,
            burst_bytes: units_per_s / BURST_PARTS_OF_A_SECOND,
        };
        if units_per_s == RateLimit::UNLIMITED_BYTES_PER_S {
            return Rates { client: RateLimit::UNLIMITED, group: RateLimit::UNLIMITED };
        }
        // With 0 nobody could ever greet.
        Rates {
            client: limit((units_per_s / CLIENT_PARTS).max(1)),
            group: limit(units_per_s.max(1)),
        }
    }

    pub(super) fn are_unlimited(&self) -> bool {
        self.group.is_unlimited()
    }
}

impl Payers<'_> {
    /// Takes the units. Returns the time to wait for them, in nanoseconds.
    pub(super) fn charge(&self, units: u64, rates: &Rates, now_ns: u64) -> u64 {
        let WaitNs(of_group_ns) = self.group.charge(units, now_ns, &rates.group);
        let of_client = self.client.map(|bucket| bucket.charge(units, now_ns, &rates.client));
        of_client.map_or(of_group_ns, |WaitNs(of_client_ns)| of_client_ns.max(of_group_ns))
    }

    /// Gives back the units of a request that will not be carried out. Otherwise whoever connects,
    /// asks and leaves, again and again, would run up a debt for others to wait for.
    pub(super) fn give_back(&self, units: u64, rates: &Rates) {
        self.group.give_back(units, &rates.group);
        if let Some(bucket) = self.client {
            bucket.give_back(units, &rates.client);
        }
    }
}

/// Returns the units of a request; `None` for reads and writes, which have rates of their own.
pub(super) fn units_of(request: &Request<'_>) -> Option<u64> {
    let of_items = |items: u64| Some(1 + items / ITEMS_PER_UNIT);
    match request {
        Request::Read { .. } | Request::Write { .. } => None,
        Request::AllocateSuperpages { count, .. } | Request::FreeSuperpages { count, .. } => {
            of_items(u64::from(*count))
        }
        Request::Discard { extents, .. } => of_items(extents.len() as u64),
        Request::ListSuperpages { .. } | Request::Attach { .. } => Some(LIST_UNITS),
        Request::Stat { .. } => Some(STAT_UNITS),
        Request::ShmMap { .. } => Some(SHM_MAP_UNITS),
        Request::Hello(_) => Some(HELLO_UNITS),
        Request::CreateSegment { .. }
        | Request::Freeze { .. }
        | Request::Thaw { .. }
        | Request::Detach { .. }
        | Request::Ping
        | Request::Goodbye
        | Request::Report { .. } => Some(1),
    }
}
