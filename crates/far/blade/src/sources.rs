//! Who connects, and how many connections each may have: one host or user must not keep the others
//! out, and who does not say who it is must not wait here by the thousands.
//!
//! Invariant: a source is counted as long as a [`Presence`] of it lives. What it may ask for
//! ([`Presence::control`]) is remembered longer: else whoever leaves and comes back could begin
//! with a full bucket each time.

use crate::table::Origin;
use farpool_kernel::lock;
use farpool_policy::Bucket;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use thiserror::Error;

/// Most connections of one source that have not sent a hello. A client sends it at once, so that
/// even a thousand programs which all come back at the same moment pass.
const SILENT_LIMIT: usize = 1024;
/// Sources without a connection that are remembered, some 100 bytes each; beyond that, the one that
/// left first is forgotten, and would begin with a full bucket.
const GONE_LIMIT: usize = 1024;
/// The prefix of an IPv6 address that one host has for itself, in bits.
const HOST_PREFIX_BITS: u32 = 64;

/// Where a connection comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// A user of this host, over a unix socket.
    User(u32),
    /// A host, over TCP.
    Host(IpAddr),
}

/// Why a connection is turned away.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub(crate) enum TurnedAway {
    #[error("there are {limit} connections, as many as allowed")]
    Full { limit: usize },
    #[error("{source_of} has {limit} connections, as many as one host or user may have")]
    TooMany { source_of: Source, limit: usize },
    #[error("{source_of} has {limit} connections that have not said whose they are")]
    TooManySilent { source_of: Source, limit: usize },
}

/// The connections of all sources.
#[derive(Debug)]
pub(crate) struct Sources {
    limit: usize,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    of: HashMap<Source, Count>,
    /// Those in `of` without a connection, in the order in which they left.
    gone: VecDeque<Source>,
}

#[derive(Debug, Default)]
struct Count {
    all: usize,
    silent: usize,
    control: Arc<Bucket>,
}

/// A connection, as long as it is there.
#[derive(Debug)]
pub(crate) struct Presence {
    sources: Arc<Sources>,
    source: Source,
    control: Arc<Bucket>,
    is_silent: bool,
}

impl Source {
    /// The host with this address. All addresses of an IPv6 network are one host's, which can
    /// choose among them.
    pub(crate) fn host(address: IpAddr) -> Source {
        Source::Host(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = address.to_bits() & (u128::MAX << (128 - HOST_PREFIX_BITS));
                IpAddr::V6(Ipv6Addr::from_bits(network))
            }
            address => address,
        })
    }

    pub(crate) fn is_unix(self) -> bool {
        matches!(self, Source::User(_))
    }

    /// The same to the table.
    pub(crate) fn origin(self) -> Origin {
        match self {
            Source::User(user) => Origin::User(user),
            Source::Host(address) if address.is_loopback() => Origin::Loopback,
            Source::Host(_) => Origin::Network,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::User(user) => write!(f, "user {user}"),
            Source::Host(IpAddr::V6(network)) => write!(f, "host {network}/{HOST_PREFIX_BITS}"),
            Source::Host(address) => write!(f, "host {address}"),
        }
    }
}

impl Sources {
    /// At most `limit` connections, half of them of one source.
    pub(crate) fn new(limit: usize) -> Sources {
        Sources { limit, counts: Mutex::default() }
    }

    /// Counts a new connection, which is silent at first.
    pub(crate) fn arrive(self: &Arc<Self>, source: Source) -> Result<Presence, TurnedAway> {
        let mut counts = lock(&self.counts);
        let limit = self.limit;
        if counts.all >= limit {
            return Err(TurnedAway::Full { limit });
        }
        let (limit, source_of) = (limit.div_ceil(2), source);
        let (all, silent) = counts.of.get(&source).map_or((0, 0), |it| (it.all, it.silent));
        if all >= limit {
            return Err(TurnedAway::TooMany { source_of, limit });
        }
        if silent >= SILENT_LIMIT {
            return Err(TurnedAway::TooManySilent { source_of, limit: SILENT_LIMIT });
        }
        Ok(Presence {
            control: counts.arrive(source),
            sources: Arc::clone(self),
            source,
            is_silent: true,
        })
    }

    /// The connections that there are.
    pub(crate) fn count(&self) -> usize {
        lock(&self.counts).all
    }
}

impl Counts {
    fn arrive(&mut self, source: Source) -> Arc<Bucket> {
        self.all += 1;
        let count = self.of.entry(source).or_default();
        if count.all == 0 {
            self.gone.retain(|gone| *gone != source);
        }
        count.all += 1;
        count.silent += 1;
        Arc::clone(&count.control)
    }

    fn leave(&mut self, source: Source) {
        self.all = self.all.checked_sub(1).expect("a present connection is counted");
        let count = self.of.get_mut(&source).expect("a present source is counted");
        count.all = count.all.checked_sub(1).expect("a present connection is counted");
        if count.all > 0 {
            return;
        }
        self.gone.push_back(source);
        if self.gone.len() > GONE_LIMIT
            && let Some(forgotten) = self.gone.pop_front()
        {
            self.of.remove(&forgotten);
        }
    }
}

impl Presence {
    /// What all of its source may ask for together in control requests, as far as no grant says
    /// whose they are.
    pub(crate) fn control(&self) -> &Bucket {
        &self.control
    }

    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// True until it has greeted.
    pub(crate) fn is_silent(&self) -> bool {
        self.is_silent
    }

    /// Its hello was accepted.
    pub(crate) fn greeted(&mut self) {
        if std::mem::replace(&mut self.is_silent, false) {
            let mut counts = lock(&self.sources.counts);
            let count = counts.of.get_mut(&self.source).expect("a present source is counted");
            count.silent = count.silent.checked_sub(1).expect("a silent connection is counted");
        }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.greeted();
        lock(&self.sources.counts).leave(self.source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_policy::RateLimit;
    use farpool_units::exactly;

    fn host(text: &str) -> Source {
        Source::host(text.parse().expect("an address"))
    }

    #[test]
    fn one_source_has_half_of_all_connections_and_leaves_the_rest_to_others() {
        let sources = Arc::new(Sources::new(8));
        let greedy = host("192.0.2.1");
        let mut there: Vec<_> =
            (0..4).map(|_| sources.arrive(greedy).expect("below its limit")).collect();
        let refused = sources.arrive(greedy).expect_err("a fifth");
        assert_eq!(refused, TurnedAway::TooMany { source_of: greedy, limit: 4 });
        let others = [Source::User(0), Source::User(7), host("192.0.2.2"), host("2001:db8::1")];
        there.extend(others.map(|other| sources.arrive(other).expect("there is room")));
        let refused = sources.arrive(Source::User(8)).expect_err("a ninth");
        assert_eq!(refused, TurnedAway::Full { limit: 8 });
        there.remove(0);
        sources.arrive(greedy).expect("one of it has left");
        drop(there);
        assert_eq!(sources.count(), 0);
    }

    #[test]
    fn who_leaves_and_comes_back_finds_what_it_left_of_its_bucket() {
        let limit = RateLimit { bytes_per_s: 1, burst_bytes: 10 };
        let sources = Arc::new(Sources::new(usize::MAX));
        let left = |presence: &Presence| presence.control().available_bytes(0, &limit);
        for times in 0..2 * GONE_LIMIT {
            let presence = sources.arrive(Source::User(0)).expect("one at a time");
            assert_eq!(left(&presence), if times == 0 { 10 } else { 3 });
            if times == 0 {
                presence.control().take(7, 0, &limit).expect("there are ten");
            }
        }
        for user in 1..=exactly(GONE_LIMIT) {
            drop(sources.arrive(Source::User(user)).expect("one at a time"));
        }
        let presence = sources.arrive(Source::User(0)).expect("one at a time");
        assert_eq!(left(&presence), 10, "it was forgotten");
        let counts = lock(&sources.counts);
        assert_eq!((counts.of.len(), counts.gone.len()), (GONE_LIMIT + 1, GONE_LIMIT));
    }

    #[test]
    fn only_so_many_wait_without_a_hello() {
        let sources = Arc::new(Sources::new(usize::MAX));
        let from = Source::User(1000);
        let mut there: Vec<_> =
            (0..SILENT_LIMIT).map(|_| sources.arrive(from).expect("below the limit")).collect();
        let refused = sources.arrive(from).expect_err("one more");
        assert_eq!(refused, TurnedAway::TooManySilent { source_of: from, limit: SILENT_LIMIT });
        there[5].greeted();
        there[5].greeted();
        there.push(sources.arrive(from).expect("one has greeted"));
        sources.arrive(from).expect_err("no other one has");
    }

    #[test]
    fn the_addresses_of_one_network_are_one_host() {
        assert_eq!(host("2001:db8::1"), host("2001:db8::ffff:1"));
        assert_ne!(host("2001:db8::1"), host("2001:db8:0:1::1"));
        assert_ne!(host("192.0.2.1"), host("192.0.2.2"));
        assert_eq!(host("::ffff:192.0.2.1"), host("192.0.2.1"));
        assert_eq!(host("2001:db8::1").to_string(), "host 2001:db8::/64");
    }
}
