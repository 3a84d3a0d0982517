//! The borrowing half of a node: requests, the choice among grants, leases, moving out (ACMS,
//! section 4.3).
//!
//! Invariants:
//! - A grant is usable only after the server confirmed the ACK, and no longer than its lease by
//!   this node's clock, counted from the *sending* of what was confirmed: the client stops first.
//! - A grant is taken for no more bytes than are still wanted then; each of the servers asked is
//!   asked for all of them.
//! - The shell receives GrantUsable at most once for a grant, and GrantLost at most once after it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use farpool_units::{SUPERPAGE_BYTES, at_most};

use crate::arbitration::Candidate;
use crate::config::Config;
use crate::ids::{Epoch, GrantId, GrantKey, Incarnation, NodeId, Peer, RequestNo, Zone};
use crate::limits::{
    ASK_FANOUT, ASK_TIMEOUT, CHOOSE_WINDOW, DEADLINE_MARGIN_PART, HOLD, LEASE_MARGIN,
    RELEASE_TRIES_MAX, REMEMBERED_MAX, REPEAT, USED_GRANTS_MAX,
};
use crate::message::{EPOCHS_MAX, Message, NackReason};
use crate::outbox::{Action, MoveReason, Outbox};
use crate::rng::Rng;
use crate::rumours::Rumours;

/// How far a grant has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// ACK sent, not yet confirmed.
    Acked { until: Duration, say_at: Duration },
    /// Confirmed.
    Usable,
    /// The shell is moving data out.
    Moving { deadline: Option<Duration> },
    /// Moved out; the server does not know yet.
    Released { say_at: Duration, tries: u8 },
}

#[derive(Clone, Debug)]
struct Used {
    server: Peer,
    bytes: u64,
    key: GrantKey,
    blade: SocketAddr,
    lease_until: Duration,
    state: State,
}

/// A GRANT as received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offered {
    pub(crate) server: Peer,
    pub(crate) request: RequestNo,
    pub(crate) epoch: Epoch,
    /// Which of its server's grants it is.
    pub(crate) count: u32,
    pub(crate) bytes: u64,
    pub(crate) key: GrantKey,
    pub(crate) zone: Zone,
    pub(crate) blade: SocketAddr,
}

/// The borrowing half.
#[derive(Debug)]
pub(crate) struct Borrower {
    wanted_bytes: u64,
    used: BTreeMap<GrantId, Used>,
    asks: BTreeMap<NodeId, (RequestNo, Duration)>,
    offered: Vec<Offered>,
    /// The newest grant seen from each server; only a newer one is taken, so a GRANT and a LEASE
    /// that arrive again cannot bring an ended grant back.
    newest: BTreeMap<NodeId, (Incarnation, u32)>,
    choose_at: Option<Duration>,
    last_request: u32,
    last_server: NodeId,
    renew_at: Duration,
}

impl Borrower {
    pub(crate) fn new() -> Self {
        Self {
            wanted_bytes: 0,
            used: BTreeMap::new(),
            asks: BTreeMap::new(),
            offered: Vec::new(),
            newest: BTreeMap::new(),
            choose_at: None,
            last_request: 0,
            last_server: NodeId(0),
            renew_at: Duration::ZERO,
        }
    }

    pub(crate) fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes
    }

    /// Bytes of the grants that are usable and not being moved out of.
    pub(crate) fn usable_bytes(&self) -> u64 {
        let usable = self.used.values().filter(|used| used.state == State::Usable);
        usable.map(|used| used.bytes).sum()
    }

    /// Grants whose memory the shell may still be using.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = (GrantId, GrantKey)> {
        let live = |used: &Used| matches!(used.state, State::Usable | State::Moving { .. });
        self.used.iter().filter(move |(_, used)| live(used)).map(|(grant, used)| (*grant, used.key))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.used.is_empty() && self.asks.is_empty() && self.shortfall_bytes() == 0
    }

    /// Wanted bytes beyond the grants that are taken and not being moved out of.
    pub(crate) fn shortfall_bytes(&self) -> u64 {
        let counts = |used: &&Used| matches!(used.state, State::Usable | State::Acked { .. });
        let have: u64 = self.used.values().filter(counts).map(|used| used.bytes).sum();
        self.wanted_bytes.saturating_sub(have)
    }

    /// True if no request is unanswered, no GRANT undecided and another grant may be held.
    pub(crate) fn is_free_to_ask(&self) -> bool {
        self.asks.is_empty() && self.offered.is_empty() && self.used.len() < USED_GRANTS_MAX
    }

    /// Returns the next request's number.
    pub(crate) fn next_request(&mut self) -> RequestNo {
        self.last_request = self.last_request.saturating_add(1);
        RequestNo(self.last_request)
    }

    /// Sets the bytes that the node wants from others in all.
    pub(crate) fn want(&mut self, bytes: u64, now: Duration, out: &mut Outbox) {
        self.wanted_bytes = bytes.next_multiple_of(SUPERPAGE_BYTES);
        let usable: Vec<(GrantId, u64)> = (self.used.iter())
            .filter(|(_, used)| used.state == State::Usable)
            .map(|(grant, used)| (*grant, used.bytes))
            .collect();
        let mut excess = self.usable_bytes().saturating_sub(self.wanted_bytes);
        for (grant, bytes) in usable.into_iter().rev() {
            if bytes <= excess {
                excess -= bytes;
                self.move_out(grant, None, MoveReason::NotNeeded, out);
            }
        }
        if self.wanted_bytes == 0 {
            self.decline_all(now, out);
        }
    }

    /// Asks servers whose offers are known. Returns false if none is worth asking.
    pub(crate) fn ask(
        &mut self,
        rumours: &Rumours,
        config: &Config,
        now: Duration,
        rng: &mut Rng,
        out: &mut Outbox,
    ) -> bool {
        let want = self.shortfall_bytes();
        let mut offers: Vec<(Candidate, Peer)> = rumours
            .offers(now)
            .filter(|offer| offer.bytes >= SUPERPAGE_BYTES && offer.origin != out.node)
            .map(|offer| {
                let (node, incarnation) = (offer.origin, offer.incarnation);
                let candidate = Candidate { node, bytes: offer.bytes, zone: offer.zone };
                (candidate, Peer { node, incarnation, addr: offer.addr })
            })
            .collect();
        let mut asked = false;
        for _ in 0..ASK_FANOUT {
            let candidates: Vec<Candidate> = offers.iter().map(|(one, _)| *one).collect();
            let policy = config.arbitration;
            let Some(index) = policy.ask(&candidates, want, config.zone, self.last_server, rng)
            else {
                break;
            };
            let (_, peer) = offers.swap_remove(index);
            let (request, zone) = (self.next_request(), config.zone);
            self.asks.insert(peer.node, (request, now + ASK_TIMEOUT));
            self.last_server = peer.node;
            out.send(&peer, &Message::Request { request, bytes: want, zone });
            asked = true;
        }
        asked
    }

    /// Handles a GRANT.
    pub(crate) fn on_grant(
        &mut self,
        offered: Offered,
        config: &Config,
        now: Duration,
        out: &mut Outbox,
    ) {
        let grant = GrantId { server: offered.server.node, epoch: offered.epoch };
        let which = (offered.server.incarnation, offered.count);
        if self.newest.get(&grant.server).is_some_and(|newest| *newest >= which) {
            return;
        }
        self.newest.insert(grant.server, which);
        if self.newest.len() > REMEMBERED_MAX {
            let oldest = self.newest.keys().find(|server| **server != grant.server).copied();
            oldest.and_then(|server| self.newest.remove(&server));
        }
        if self.asks.get(&grant.server).is_some_and(|(request, _)| *request == offered.request) {
            self.asks.remove(&grant.server);
        }
        if self.shortfall_bytes() == 0 || self.used.len() >= USED_GRANTS_MAX {
            decline(&offered, out);
            return;
        }
        self.offered.push(offered);
        if config.arbitration == crate::Arbitration::Fcfs {
            self.choose(config, now, out);
        } else {
            self.choose_at.get_or_insert(now + CHOOSE_WINDOW);
        }
    }

    /// Takes the best of the grants received and declines the rest.
    fn choose(&mut self, config: &Config, now: Duration, out: &mut Outbox) {
        self.choose_at = None;
        while !self.offered.is_empty() && self.shortfall_bytes() > 0 {
            let candidate = |one: &Offered| Candidate {
                node: one.server.node,
                bytes: one.bytes,
                zone: one.zone,
            };
            let candidates: Vec<_> = self.offered.iter().map(candidate).collect();
            let Some(index) = config.arbitration.first(&candidates, config.zone, self.last_server)
            else {
                break;
            };
            let taken = self.offered.remove(index);
            self.last_server = taken.server.node;
            self.take(taken, now, out);
        }
        for rest in std::mem::take(&mut self.offered) {
            decline(&rest, out);
        }
    }

    fn take(&mut self, taken: Offered, now: Duration, out: &mut Outbox) {
        let grant = GrantId { server: taken.server.node, epoch: taken.epoch };
        let bytes = taken.bytes.min(self.shortfall_bytes());
        let state = State::Acked { until: now + HOLD, say_at: now + REPEAT };
        let lease_until = Duration::ZERO;
        let Offered { server, key, blade, .. } = taken;
        self.used.insert(grant, Used { server, bytes, key, blade, lease_until, state });
        let sent_ms = millis(now);
        out.send(&server, &Message::Ack { epoch: taken.epoch, bytes, sent_ms });
    }

    /// Handles a LEASE: a server confirms grants.
    pub(crate) fn on_lease(
        &mut self,
        server: &Peer,
        (sent_ms, lease_ms, epochs): (u64, u32, &[Epoch]),
        now: Duration,
        out: &mut Outbox,
    ) {
        // A server cannot confirm what was not yet sent.
        let sent = Duration::from_millis(sent_ms.min(millis(now)));
        let lease = Duration::from_millis(u64::from(lease_ms));
        let until = sent + lease.saturating_sub(LEASE_MARGIN);
        for epoch in epochs {
            let grant = GrantId { server: server.node, epoch: *epoch };
            let Some(used) = self.used.get_mut(&grant) else {
                // Given up before: the server shall not have to wait until the lease ends.
                out.send(server, &Message::Released { epoch: *epoch });
                continue;
            };
            used.lease_until = used.lease_until.max(until);
            if matches!(used.state, State::Acked { .. }) && until > now {
                used.state = State::Usable;
                let Used { blade, key, bytes, .. } = *used;
                out.act(Action::GrantUsable { grant, blade, key, bytes });
            }
        }
    }

    /// Handles a NACK from a server.
    pub(crate) fn on_nack(
        &mut self,
        server: &Peer,
        reason: NackReason,
        (request, epoch): (RequestNo, Epoch),
        out: &mut Outbox,
    ) {
        let grant = GrantId { server: server.node, epoch };
        match reason {
            NackReason::NoMemory => {
                if self.asks.get(&server.node).is_some_and(|(asked, _)| *asked == request) {
                    self.asks.remove(&server.node);
                }
            }
            NackReason::NoSuchGrant | NackReason::Withdrawn => {
                self.offered.retain(|o| (o.server.node, o.epoch) != (grant.server, epoch));
                self.lose(grant, out);
            }
            NackReason::Declined => {}
        }
    }

    /// Handles a RECLAIM: the server wants its memory back.
    pub(crate) fn on_reclaim(
        &mut self,
        server: &Peer,
        (epoch, left_ms): (Epoch, u32),
        now: Duration,
        out: &mut Outbox,
    ) {
        let grant = GrantId { server: server.node, epoch };
        let left = Duration::from_millis(u64::from(left_ms));
        let deadline = now + (left - left / DEADLINE_MARGIN_PART);
        match self.used.get(&grant).map(|used| used.state) {
            Some(State::Usable) => {
                self.move_out(grant, Some(deadline), MoveReason::Reclaimed, out);
            }
            Some(State::Moving { deadline: None }) => {
                self.move_out(grant, Some(deadline), MoveReason::Reclaimed, out);
            }
            Some(State::Moving { .. }) => {}
            Some(State::Acked { .. } | State::Released { .. }) | None => {
                self.used.remove(&grant);
                out.send(server, &Message::Released { epoch });
            }
        }
    }

    fn move_out(
        &mut self,
        grant: GrantId,
        deadline: Option<Duration>,
        reason: MoveReason,
        out: &mut Outbox,
    ) {
        if let Some(used) = self.used.get_mut(&grant) {
            let may_move = matches!(used.state, State::Usable | State::Moving { deadline: None });
            assert!(may_move, "only what is used is moved out");
            used.state = State::Moving { deadline };
            out.act(Action::MoveOut { grant, deadline, reason });
        }
    }

    /// The shell has moved everything out of the grant.
    pub(crate) fn on_evacuated(&mut self, grant: GrantId, now: Duration, out: &mut Outbox) {
        let state = self.used.get(&grant).map(|used| used.state);
        if matches!(state, Some(State::Usable | State::Moving { .. })) {
            self.release(grant, now, out);
        }
    }

    /// Handles a FREED: the server knows that the grant has ended.
    pub(crate) fn on_freed(&mut self, server: &Peer, epoch: Epoch) {
        let grant = GrantId { server: server.node, epoch };
        if matches!(self.used.get(&grant), Some(Used { state: State::Released { .. }, .. })) {
            self.used.remove(&grant);
        }
    }

    /// Notes that a server is in the life `life`: what it lent in earlier ones is gone.
    pub(crate) fn on_incarnation(&mut self, node: NodeId, life: Incarnation, out: &mut Outbox) {
        let stale = |used: &Used| used.server.node == node && used.server.incarnation < life;
        let gone: Vec<GrantId> =
            self.used.iter().filter(|(_, used)| stale(used)).map(|(grant, _)| *grant).collect();
        for grant in gone {
            self.lose(grant, out);
        }
        self.offered.retain(|one| one.server.node != node || one.server.incarnation >= life);
    }

    fn lose(&mut self, grant: GrantId, out: &mut Outbox) {
        if let Some(used) = self.used.remove(&grant)
            && matches!(used.state, State::Usable | State::Moving { .. })
        {
            out.act(Action::GrantLost { grant });
        }
    }

    fn decline_all(&mut self, now: Duration, out: &mut Outbox) {
        self.choose_at = None;
        self.asks.clear();
        for rest in std::mem::take(&mut self.offered) {
            decline(&rest, out);
        }
        let acked = |used: &Used| matches!(used.state, State::Acked { .. });
        let open: Vec<GrantId> =
            self.used.iter().filter(|(_, used)| acked(used)).map(|(grant, _)| *grant).collect();
        for grant in open {
            self.release(grant, now, out);
        }
    }

    /// Runs the timers. Returns the servers that did not answer in time, so that their offers are
    /// dropped.
    pub(crate) fn on_tick(
        &mut self,
        config: &Config,
        now: Duration,
        out: &mut Outbox,
    ) -> Vec<NodeId> {
        if self.choose_at.is_some_and(|at| now >= at) {
            self.choose(config, now, out);
        }
        let silent: Vec<NodeId> = (self.asks.iter())
            .filter(|(_, (_, until))| now >= *until)
            .map(|(node, _)| *node)
            .collect();
        for node in &silent {
            self.asks.remove(node);
        }
        self.end_grants(now, out);
        self.repeat(now, out);
        if now >= self.renew_at {
            self.renew_at = now + config.renew_every();
            self.renew(now, out);
        }
        silent
    }

    fn end_grants(&mut self, now: Duration, out: &mut Outbox) {
        let over = |used: &Used| match used.state {
            State::Acked { until, .. } => now >= until,
            State::Usable => now >= used.lease_until,
            State::Moving { deadline } => {
                now >= used.lease_until || deadline.is_some_and(|deadline| now >= deadline)
            }
            State::Released { tries, .. } => tries >= RELEASE_TRIES_MAX,
        };
        let ended: Vec<GrantId> =
            self.used.iter().filter(|(_, used)| over(used)).map(|(grant, _)| *grant).collect();
        for grant in ended {
            match self.used.get(&grant).map(|used| used.state) {
                // The server may have bound it: it must be told that it is not used.
                Some(State::Acked { .. }) => self.release(grant, now, out),
                _ => self.lose(grant, out),
            }
        }
    }

    fn release(&mut self, grant: GrantId, now: Duration, out: &mut Outbox) {
        if let Some(used) = self.used.get_mut(&grant) {
            assert!(!matches!(used.state, State::Released { .. }), "a grant is released once");
            used.state = State::Released { say_at: now + REPEAT, tries: 1 };
            out.send(&used.server, &Message::Released { epoch: grant.epoch });
        }
    }

    fn repeat(&mut self, now: Duration, out: &mut Outbox) {
        for (grant, used) in &mut self.used {
            let epoch = grant.epoch;
            match &mut used.state {
                State::Acked { say_at, .. } if now >= *say_at => {
                    *say_at = now + REPEAT;
                    let (bytes, sent_ms) = (used.bytes, millis(now));
                    out.send(&used.server, &Message::Ack { epoch, bytes, sent_ms });
                }
                State::Released { say_at, tries } if now >= *say_at => {
                    *say_at = now + REPEAT;
                    *tries += 1;
                    out.send(&used.server, &Message::Released { epoch });
                }
                _ => {}
            }
        }
    }

    fn renew(&mut self, now: Duration, out: &mut Outbox) {
        let mut by_server: BTreeMap<NodeId, (Peer, Vec<Epoch>)> = BTreeMap::new();
        for (grant, used) in &self.used {
            if matches!(used.state, State::Usable | State::Moving { .. }) {
                let entry = by_server.entry(grant.server);
                entry.or_insert((used.server, Vec::new())).1.push(grant.epoch);
            }
        }
        for (server, epochs) in by_server.values() {
            for part in epochs.chunks(EPOCHS_MAX) {
                let sent_ms = millis(now);
                out.send(server, &Message::Renew { sent_ms, epochs: part.to_vec() });
            }
        }
    }
}

fn decline(offered: &Offered, out: &mut Outbox) {
    let (reason, request, epoch) = (NackReason::Declined, offered.request, offered.epoch);
    out.send(&offered.server, &Message::Nack { reason, request, epoch, left_bytes: 0 });
}

fn millis(time: Duration) -> u64 {
    at_most(time.as_millis())
}
