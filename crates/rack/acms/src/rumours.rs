//! Broadcasts that are passed from node to node: the offers and requests that a node has heard, and
//! which of them it passes on next.
//!
//! "Broadcast" (ACMS, section 4.3) cannot be one datagram per node at 1,000 nodes. Each node sends
//! a few datagrams a round to random others, each filled with the rumours it has passed on least,
//! newest first. Messages per node stay flat; with more rumours than the budget carries, each
//! reaches a random part of the nodes, which is enough: a client needs a few good servers.
//!
//! Invariants: only the newest rumour of an origin and kind is kept; the tables are bounded; a
//! rumour is passed on [`RUMOUR_SENDS_MAX`] times at most and forgotten when its time is over.

use std::collections::BTreeMap;
use std::time::Duration;

use farpool_units::at_most;

use crate::ids::{Incarnation, NodeId};
use crate::limits::{RUMOUR_SENDS_MAX, RUMOUR_VALID_MAX, RUMOURS_KEPT_MAX};
use crate::message::{RUMOURS_MAX, Rumour, RumourKind};

/// A rumour, and when it was heard and how often passed on here.
#[derive(Clone, Debug)]
struct Heard {
    rumour: Rumour,
    at: Duration,
    sends: u8,
}

impl Heard {
    fn age(&self, now: Duration) -> Duration {
        Duration::from_millis(u64::from(self.rumour.age_ms)) + now.saturating_sub(self.at)
    }

    fn is_valid(&self, now: Duration) -> bool {
        self.age(now) < Duration::from_millis(u64::from(self.rumour.valid_ms))
    }
}

/// The rumours that a node has heard.
#[derive(Debug, Default)]
pub(crate) struct Rumours {
    offers: BTreeMap<NodeId, Heard>,
    requests: BTreeMap<NodeId, Heard>,
}

impl Rumours {
    fn table(&mut self, kind: RumourKind) -> &mut BTreeMap<NodeId, Heard> {
        match kind {
            RumourKind::Offer => &mut self.offers,
            RumourKind::Request => &mut self.requests,
        }
    }

    /// Stores a rumour. Returns true if it is new and still valid.
    pub(crate) fn hear(&mut self, mut rumour: Rumour, now: Duration) -> bool {
        let longest = at_most(RUMOUR_VALID_MAX.as_millis());
        rumour.valid_ms = rumour.valid_ms.min(longest);
        let heard = Heard { rumour, at: now, sends: 0 };
        if !heard.is_valid(now) {
            return false;
        }
        let table = self.table(rumour.kind);
        if let Some(old) = table.get(&rumour.origin)
            && (old.rumour.incarnation, old.rumour.seq) >= (rumour.incarnation, rumour.seq)
        {
            return false;
        }
        table.insert(rumour.origin, heard);
        if table.len() > RUMOURS_KEPT_MAX
            && let Some(oldest) =
                table.iter().min_by_key(|(node, heard)| (heard.at, **node)).map(|(node, _)| *node)
        {
            table.remove(&oldest);
        }
        true
    }

    /// Forgets rumours that are not valid any more.
    pub(crate) fn expire(&mut self, now: Duration) {
        self.offers.retain(|_, heard| heard.is_valid(now));
        self.requests.retain(|_, heard| heard.is_valid(now));
    }

    /// Forgets a node's rumours of lives before `incarnation`.
    pub(crate) fn forget_before(&mut self, node: NodeId, incarnation: Incarnation) {
        for table in [&mut self.offers, &mut self.requests] {
            if table.get(&node).is_some_and(|heard| heard.rumour.incarnation < incarnation) {
                table.remove(&node);
            }
        }
    }

    /// Whether there is a rumour to pass on.
    pub(crate) fn has_news(&self) -> bool {
        let mut all = self.offers.values().chain(self.requests.values());
        all.any(|heard| heard.sends < RUMOUR_SENDS_MAX)
    }

    /// The rumours for one datagram: least sent first, then newest.
    pub(crate) fn choose(&mut self, now: Duration) -> Vec<Rumour> {
        let all = self.offers.values_mut().chain(self.requests.values_mut());
        let mut fresh: Vec<&mut Heard> =
            all.filter(|heard| heard.sends < RUMOUR_SENDS_MAX && heard.is_valid(now)).collect();
        fresh.sort_by_key(|heard| (heard.sends, std::cmp::Reverse(heard.at)));
        fresh.truncate(RUMOURS_MAX);
        fresh
            .into_iter()
            .map(|heard| {
                heard.sends += 1;
                let age_ms = at_most(heard.age(now).as_millis());
                Rumour { age_ms, ..heard.rumour }
            })
            .collect()
    }

    /// Returns the offers that are valid and not withdrawn, `origin` ascending.
    pub(crate) fn offers(&self, now: Duration) -> impl Iterator<Item = &Rumour> {
        self.offers
            .values()
            .filter(move |heard| heard.is_valid(now) && heard.rumour.bytes > 0)
            .map(|heard| &heard.rumour)
    }

    /// Corrects an offer to what its server reported directly.
    pub(crate) fn set_left(&mut self, server: NodeId, life: Incarnation, left_bytes: u64) {
        if let Some(heard) = self.offers.get_mut(&server)
            && heard.rumour.incarnation == life
        {
            heard.rumour.bytes = left_bytes;
            // Only a server broadcasts its own offer: a correction made here is not passed on.
            heard.sends = RUMOUR_SENDS_MAX;
        }
    }

    /// Removes an offer whose server did not answer.
    pub(crate) fn drop_offer(&mut self, server: NodeId) {
        if let Some(heard) = self.offers.get_mut(&server) {
            heard.rumour.bytes = 0;
            heard.sends = RUMOUR_SENDS_MAX;
        }
    }

    /// Numbers of offers and of requests kept.
    pub(crate) fn len(&self) -> (usize, usize) {
        (self.offers.len(), self.requests.len())
    }
}
