//! The lending half of a node: reservations, grants, leases, reclaims (ACMS, section 4.3).
//!
//! Invariants:
//! - Reserved and bound bytes together never exceed what was offered when they were reserved.
//! - Only an ACK from the client for which a reservation was made binds it, and only while the
//!   reservation stands; a late ACK is refused, so no byte has two owners.
//! - A grant that has ended never returns: its epoch is not used again, and nobody can guess one.
//! - A reclaimed grant ends at its deadline at the latest, whatever the client does.
//! - A client never gets more than its share, and does not keep what it does not use.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use farpool_units::{SUPERPAGE_BYTES, at_most};

use crate::arbitration::{Arbitration, Candidate};
use crate::config::Config;
use crate::harvest::Harvest;
use crate::ids::{Epoch, GrantId, GrantKey, Incarnation, NodeId, Peer, RequestNo, Zone};
use crate::limits::{GRANTS_MAX, HOLD, QUEUE_MAX, REMEMBERED_MAX, REPEAT, UNUSED_HOLD};
use crate::message::{Message, NackReason};
use crate::outbox::{Action, Outbox, RevokeReason};
use crate::rng::Keys;

/// How far a grant has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Reserved { until: Duration },
    Bound { lease_until: Duration },
    Reclaiming { lease_until: Duration, deadline: Duration, say_at: Duration },
}

#[derive(Clone, Debug)]
struct Lent {
    client: Peer,
    request: RequestNo,
    /// Which grant of this life it is.
    count: u32,
    bytes: u64,
    key: GrantKey,
    state: State,
    /// Since when it is known to hold no data.
    unused_since: Option<Duration>,
    /// It is reclaimed because it holds no data.
    left_unused: bool,
}

impl Lent {
    fn is_bound(&self) -> bool {
        !matches!(self.state, State::Reserved { .. })
    }

    /// Extends the lease: it must last here at least as long as was confirmed to the client.
    fn extend(&mut self, until: Duration) {
        assert!(self.is_bound(), "a lease is of a grant that is bound");
        if let State::Bound { lease_until } | State::Reclaiming { lease_until, .. } =
            &mut self.state
        {
            *lease_until = until.max(*lease_until);
        }
    }

    fn reclaim(&mut self, config: &Config, now: Duration) {
        if let State::Bound { lease_until } = self.state {
            let deadline = now + config.reclaim_deadline();
            self.state = State::Reclaiming { lease_until, deadline, say_at: now };
        }
    }

    fn is_reclaiming(&self) -> bool {
        matches!(self.state, State::Reclaiming { .. })
    }
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    client: Peer,
    request: RequestNo,
    bytes: u64,
    zone: Zone,
    /// The request was broadcast. It is not refused: the client asked no node in particular.
    broadcast: bool,
}

/// The lending half.
#[derive(Debug)]
pub(crate) struct Lender {
    pub(crate) harvest: Harvest,
    /// What the node would lend in all, once the offer has risen.
    pub(crate) ceiling_bytes: u64,
    /// Grants taken back because they were not used.
    pub(crate) unused_count: u64,
    /// Grants made in this life.
    count: u32,
    lent: BTreeMap<Epoch, Lent>,
    queue: VecDeque<Asked>,
    last_served: NodeId,
    remembered: BTreeMap<NodeId, (Incarnation, RequestNo)>,
    /// Clients that have left memory unused, and until when they get none.
    held_off: BTreeMap<NodeId, Duration>,
}

impl Lender {
    pub(crate) fn new() -> Self {
        Self {
            harvest: Harvest::default(),
            ceiling_bytes: 0,
            unused_count: 0,
            count: 0,
            lent: BTreeMap::new(),
            queue: VecDeque::new(),
            last_served: NodeId(0),
            remembered: BTreeMap::new(),
            held_off: BTreeMap::new(),
        }
    }

    /// Bytes reserved and bound.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.lent.values().map(|lent| lent.bytes).sum()
    }

    /// Bytes bound, including those being reclaimed.
    pub(crate) fn bound_bytes(&self) -> u64 {
        self.lent.values().filter(|lent| lent.is_bound()).map(|lent| lent.bytes).sum()
    }

    /// Bytes that are being reclaimed.
    pub(crate) fn reclaiming_bytes(&self) -> u64 {
        self.lent.values().filter(|lent| lent.is_reclaiming()).map(|lent| lent.bytes).sum()
    }

    /// Bytes that could be granted now.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.harvest.offered_bytes.saturating_sub(self.held_bytes())
    }

    /// Bytes that could be granted if no reservation were taken up. Offers and refusals give this
    /// figure: most reservations are declined within a round trip, and a refusal that said 0 would
    /// turn every client away from a server that has memory.
    pub(crate) fn unbound_bytes(&self) -> u64 {
        self.harvest.offered_bytes.saturating_sub(self.bound_bytes())
    }

    /// Bytes that one client could be granted beyond those it has, whatever is free.
    pub(crate) fn share_left_bytes(&self, client: NodeId, config: &Config) -> u64 {
        if self.held_off.contains_key(&client) {
            return 0;
        }
        let share = self.ceiling_bytes / 100 * u64::from(config.borrower_percent);
        let whole = share / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
        let most = whole.max(SUPERPAGE_BYTES).min(self.ceiling_bytes);
        let its = self.lent.values().filter(|lent| lent.client.node == client);
        most.saturating_sub(its.map(|lent| lent.bytes).sum())
    }

    /// True if there is no grant and no request for which a timer has to run.
    pub(crate) fn is_idle(&self) -> bool {
        self.lent.is_empty() && self.queue.is_empty()
    }

    /// The bound grants, with client and bytes.
    pub(crate) fn bound(&self) -> impl Iterator<Item = (Epoch, NodeId, u64)> {
        let bound = self.lent.iter().filter(|(_, lent)| lent.is_bound());
        bound.map(|(epoch, lent)| (*epoch, lent.client.node, lent.bytes))
    }

    /// Handles a request, sent to this server or broadcast.
    pub(crate) fn on_request(
        &mut self,
        client: Peer,
        request: RequestNo,
        (bytes, zone, broadcast): (u64, Zone, bool),
        (config, now): (&Config, Duration),
        out: &mut Outbox,
    ) {
        let same = |lent: &Lent| same_life(&lent.client, &client) && lent.request == request;
        if let Some((epoch, lent)) = self.lent.iter().find(|(_, lent)| same(lent)) {
            if let Some(message) = grant_message(*epoch, lent, config, now) {
                out.send(&client, &message);
            }
            return;
        }
        let queued = |asked: &Asked| asked.client == client && asked.request == request;
        if self.queue.iter().any(queued) || self.is_replay(&client, request) {
            return;
        }
        if self.queue.len() >= QUEUE_MAX || bytes == 0 {
            if !broadcast {
                self.refuse(&client, request, config, out);
            }
            return;
        }
        self.queue.push_back(Asked { client, request, bytes, zone, broadcast });
    }

    fn is_replay(&self, client: &Peer, request: RequestNo) -> bool {
        let heard = (client.incarnation, request);
        self.remembered.get(&client.node).is_some_and(|last| *last >= heard)
    }

    fn remember(&mut self, client: &Peer, request: RequestNo) {
        self.remembered.insert(client.node, (client.incarnation, request));
        if self.remembered.len() > REMEMBERED_MAX {
            self.remembered.pop_first();
        }
    }

    fn refuse(&self, client: &Peer, request: RequestNo, config: &Config, out: &mut Outbox) {
        let left_bytes = self.left_bytes(client.node, config);
        let reason = NackReason::NoMemory;
        out.send(client, &Message::Nack { reason, request, epoch: Epoch(0), left_bytes });
    }

    /// The figure of refusals: what the client could get if no reservation were taken up.
    fn left_bytes(&self, client: NodeId, config: &Config) -> u64 {
        self.unbound_bytes().min(self.share_left_bytes(client, config))
    }

    /// Serves the requests that wait, in the policy's order.
    pub(crate) fn serve(
        &mut self,
        config: &Config,
        now: Duration,
        keys: &mut Keys,
        out: &mut Outbox,
    ) {
        while let Some(index) = self.next_in_queue(config.arbitration, config.zone) {
            let Some(asked) = self.queue.remove(index) else { return };
            self.last_served = asked.client.node;
            // Bounded before it is rounded up: any number may be asked for.
            let free_bytes = self.free_bytes() / SUPERPAGE_BYTES * SUPERPAGE_BYTES;
            let may_bytes = free_bytes.min(self.share_left_bytes(asked.client.node, config));
            let bytes = asked.bytes.min(may_bytes).next_multiple_of(SUPERPAGE_BYTES);
            if bytes > 0 && self.lent.len() < GRANTS_MAX {
                self.reserve(&asked, bytes, config, now, keys, out);
            } else if !asked.broadcast {
                self.refuse(&asked.client, asked.request, config, out);
            }
        }
    }

    fn next_in_queue(&self, policy: Arbitration, own: Zone) -> Option<usize> {
        let candidate = |asked: &Asked| Candidate {
            node: asked.client.node,
            bytes: asked.bytes,
            zone: asked.zone,
        };
        if policy == Arbitration::Fcfs {
            return (!self.queue.is_empty()).then_some(0);
        }
        let candidates: Vec<_> = self.queue.iter().map(candidate).collect();
        policy.first(&candidates, own, self.last_served)
    }

    fn reserve(
        &mut self,
        asked: &Asked,
        bytes: u64,
        config: &Config,
        now: Duration,
        keys: &mut Keys,
        out: &mut Outbox,
    ) {
        assert!(bytes <= self.free_bytes(), "more is lent than was offered");
        // After 2^32 grants a life makes no more: better no grant than two of one count.
        let Some(count) = self.count.checked_add(1) else { return };
        let epoch = keys.epoch();
        if self.lent.contains_key(&epoch) {
            return; // as good as impossible; the client asks again
        }
        self.count = count;
        let key = keys.key();
        let state = State::Reserved { until: now + HOLD };
        let (client, request) = (asked.client, asked.request);
        let lent = Lent {
            client,
            request,
            count,
            bytes,
            key,
            state,
            unused_since: None,
            left_unused: false,
        };
        if let Some(message) = grant_message(epoch, &lent, config, now) {
            out.send(&asked.client, &message);
        }
        let before = self.lent.insert(epoch, lent);
        assert!(before.is_none(), "an epoch is used once");
        self.remember(&asked.client, asked.request);
    }

    /// Handles an ACK: the client takes the grant, or repeats that it did.
    pub(crate) fn on_ack(
        &mut self,
        client: &Peer,
        (epoch, bytes, sent_ms): (Epoch, u64, u64),
        config: &Config,
        now: Duration,
        out: &mut Outbox,
    ) {
        let grant = GrantId { server: out.node, epoch };
        let lease_until = now + config.lease();
        match self.lent.get_mut(&epoch) {
            Some(lent) if same_life(&lent.client, client) => {
                if !lent.is_bound() {
                    // Bounded before it is rounded up: the borrower may have sent any number.
                    let taken = bytes.clamp(1, lent.bytes).next_multiple_of(SUPERPAGE_BYTES);
                    lent.bytes = taken;
                    lent.state = State::Bound { lease_until };
                    lent.client = *client;
                    let (bytes, key, client) = (lent.bytes, lent.key, lent.client);
                    out.act(Action::GrantMade { grant, client, bytes, key });
                }
                lent.extend(lease_until);
                let lease_ms = config.lease_ms;
                out.send(client, &Message::Lease { sent_ms, lease_ms, epochs: vec![epoch] });
            }
            _ => self.no_such_grant(client, epoch, config, out),
        }
    }

    fn no_such_grant(&self, client: &Peer, epoch: Epoch, config: &Config, out: &mut Outbox) {
        let (reason, request) = (NackReason::NoSuchGrant, RequestNo(0));
        let left_bytes = self.left_bytes(client.node, config);
        out.send(client, &Message::Nack { reason, request, epoch, left_bytes });
    }

    /// Handles a RENEW: the client still uses these grants.
    pub(crate) fn on_renew(
        &mut self,
        client: &Peer,
        (sent_ms, epochs): (u64, &[Epoch]),
        config: &Config,
        now: Duration,
        out: &mut Outbox,
    ) {
        let mut standing = Vec::new();
        for epoch in epochs {
            match self.lent.get_mut(epoch) {
                Some(lent) if same_life(&lent.client, client) && lent.is_bound() => {
                    lent.client = *client;
                    lent.extend(now + config.lease());
                    standing.push(*epoch);
                }
                // Not bound: it must be acknowledged, not renewed.
                Some(lent) if same_life(&lent.client, client) => {}
                _ => self.no_such_grant(client, *epoch, config, out),
            }
        }
        if !standing.is_empty() {
            let lease_ms = config.lease_ms;
            out.send(client, &Message::Lease { sent_ms, lease_ms, epochs: standing });
        }
    }

    /// Handles a RELEASED: the client no longer uses a grant, or gave it up before it was usable.
    pub(crate) fn on_released(&mut self, client: &Peer, epoch: Epoch, out: &mut Outbox) {
        match self.lent.get(&epoch) {
            Some(lent) if !same_life(&lent.client, client) => return,
            Some(_) => self.end(epoch, RevokeReason::Released, out),
            None => {}
        }
        out.send(client, &Message::Freed { epoch });
    }

    /// Handles a NACK: the client declines the grant.
    pub(crate) fn on_declined(&mut self, client: &Peer, epoch: Epoch) {
        if self.lent.get(&epoch).is_some_and(|l| same_life(&l.client, client) && !l.is_bound()) {
            self.lent.remove(&epoch);
        }
    }

    /// Notes how many bytes of data each grant holds.
    pub(crate) fn on_lent_use(&mut self, used: &[(Epoch, u64)], now: Duration) {
        for (epoch, used_bytes) in used {
            if let Some(lent) = self.lent.get_mut(epoch) {
                lent.unused_since = match *used_bytes {
                    0 => lent.unused_since.or(Some(now)),
                    _ => None,
                };
            }
        }
    }

    /// Reclaims what has been bound for long and holds no data.
    fn reclaim_unused(&mut self, config: &Config, now: Duration) {
        self.held_off.retain(|_, until| now < *until);
        for lent in self.lent.values_mut() {
            let since = lent.unused_since.filter(|_| matches!(lent.state, State::Bound { .. }));
            if since.is_some_and(|since| now >= since + config.unused()) {
                lent.reclaim(config, now);
                lent.left_unused = true;
                self.unused_count += 1;
            }
            if lent.left_unused {
                // Until it has come back, and a little longer.
                self.held_off.insert(lent.client.node, now + UNUSED_HOLD);
            }
        }
    }

    /// Notes that a node is in the life `life`: what it used in earlier ones is free.
    pub(crate) fn on_incarnation(&mut self, node: NodeId, life: Incarnation, out: &mut Outbox) {
        let stale = |lent: &Lent| lent.client.node == node && lent.client.incarnation < life;
        let ended: Vec<Epoch> =
            self.lent.iter().filter(|(_, lent)| stale(lent)).map(|(epoch, _)| *epoch).collect();
        for epoch in ended {
            self.end(epoch, RevokeReason::ClientRestarted, out);
        }
        self.queue.retain(|asked| asked.client.node != node || asked.client.incarnation >= life);
    }

    fn end(&mut self, epoch: Epoch, reason: RevokeReason, out: &mut Outbox) {
        if self.lent.remove(&epoch).is_some_and(|lent| lent.is_bound()) {
            out.act(Action::Revoke { grant: GrantId { server: out.node, epoch }, reason });
        }
    }

    /// Withdraws and reclaims, newest first, until what stays fits under `limit_bytes`.
    pub(crate) fn shrink(
        &mut self,
        limit_bytes: u64,
        config: &Config,
        now: Duration,
        out: &mut Outbox,
    ) {
        let staying = |lent: &Lent| if lent.is_reclaiming() { 0 } else { lent.bytes };
        let mut stays: u64 = self.lent.values().map(staying).sum();
        if stays <= limit_bytes {
            return;
        }
        let left_bytes = 0;
        let mut withdrawn = Vec::new();
        let mut newest_first: Vec<(&Epoch, &mut Lent)> = self.lent.iter_mut().collect();
        newest_first.sort_unstable_by_key(|(_, lent)| std::cmp::Reverse(lent.count));
        for (epoch, lent) in newest_first {
            if stays <= limit_bytes {
                break;
            }
            match lent.state {
                State::Reserved { .. } => withdrawn.push(*epoch),
                State::Bound { .. } => lent.reclaim(config, now),
                State::Reclaiming { .. } => continue,
            }
            stays -= lent.bytes;
        }
        for epoch in withdrawn {
            if let Some(lent) = self.lent.remove(&epoch) {
                let (reason, request) = (NackReason::Withdrawn, lent.request);
                out.send(&lent.client, &Message::Nack { reason, request, epoch, left_bytes });
            }
        }
        self.remind(now, out);
    }

    /// Runs the timers of reservations, leases, deadlines and repeated reclaims.
    pub(crate) fn on_tick(&mut self, config: &Config, now: Duration, out: &mut Outbox) {
        self.reclaim_unused(config, now);
        let mut ended = Vec::new();
        for (epoch, lent) in &self.lent {
            match lent.state {
                State::Reserved { until } if now >= until => ended.push((*epoch, None)),
                State::Reclaiming { deadline, .. } if now >= deadline => {
                    ended.push((*epoch, Some(RevokeReason::Deadline)));
                }
                State::Bound { lease_until } | State::Reclaiming { lease_until, .. }
                    if now >= lease_until =>
                {
                    ended.push((*epoch, Some(RevokeReason::LeaseEnded)));
                }
                _ => {}
            }
        }
        for (epoch, reason) in ended {
            match reason {
                Some(reason) => self.end(epoch, reason, out),
                None => {
                    self.lent.remove(&epoch);
                }
            }
        }
        self.remind(now, out);
    }

    fn remind(&mut self, now: Duration, out: &mut Outbox) {
        for (epoch, lent) in &mut self.lent {
            if let State::Reclaiming { deadline, say_at, .. } = &mut lent.state
                && now >= *say_at
            {
                *say_at = now + REPEAT;
                let left = deadline.saturating_sub(now).as_millis();
                let left_ms = at_most(left);
                out.send(&lent.client, &Message::Reclaim { epoch: *epoch, left_ms });
            }
        }
    }
}

fn same_life(one: &Peer, other: &Peer) -> bool {
    one.node == other.node && one.incarnation == other.incarnation
}

/// Returns the GRANT of a reservation, or None once it is bound.
fn grant_message(epoch: Epoch, lent: &Lent, config: &Config, now: Duration) -> Option<Message> {
    let State::Reserved { until } = lent.state else { return None };
    let hold_ms = at_most(until.saturating_sub(now).as_millis());
    let Lent { request, count, bytes, key, .. } = *lent;
    let (zone, blade) = (config.zone, config.blade);
    Some(Message::Grant { request, epoch, count, bytes, key, hold_ms, zone, blade })
}
