//! Which nodes are alive: the crate foca (SWIM with suspicion, sans-I/O) behind this crate's
//! datagrams, and [`Member`], which handles membership and protocol.
//!
//! Invariants: foca's bytes travel only inside a checked datagram; its timers fire in order,
//! perhaps late, never early.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU8, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use foca::{AccumulatingRuntime, Foca, OwnedNotification, PeriodicParams, Timer};

use crate::classify::{Class, MemoryUse};
use crate::config::{Config, ConfigError};
use crate::datagram::DecodeError;
use crate::identity::{Codec, Identity};
use crate::ids::{ANY_LIFE, Epoch, GrantId, GrantKey, NodeId, Peer};
use crate::message::{GOSSIP_BYTES_MAX, Header, Message};
use crate::node::AcmsNode;
use crate::outbox::{Action, Output};
use crate::rack_key::RackKeys;
use crate::ratio::Side;
use crate::rng::Rng;

/// Time between two probes of SWIM. With the suspicion below, a dead node is detected after about
/// 6 s.
const PROBE_PERIOD: Duration = Duration::from_millis(1_000);
/// Time after which an unanswered probe is sent through other nodes.
const PROBE_RTT: Duration = Duration::from_millis(300);
/// Other nodes asked to probe.
const INDIRECT_PROBES: usize = 3;
/// Time in which a suspected node can prove that it is alive.
const SUSPICION: Duration = Duration::from_secs(4);
/// How long a dead identity is remembered: a day, as foca advises; a node that comes back has a
/// new identity.
const REMEMBER_DEAD: Duration = Duration::from_secs(24 * 60 * 60);
/// Times an update of membership is passed on; enough for 1,000,000 nodes (foca: 4 log10 N).
const UPDATE_SENDS: u8 = 24;
/// Time between two datagrams of membership updates, sent only while there are some.
const UPDATE_PERIOD: Duration = Duration::from_millis(200);
/// Time between two requests for a peer's list of nodes.
const ANNOUNCE_PERIOD: Duration = Duration::from_secs(10);
/// Time between two attempts to reach nodes believed dead; these heal a partition.
const ANNOUNCE_DEAD_PERIOD: Duration = Duration::from_secs(5);
/// Time between two greetings of the contacts while no node is known.
const HELLO_PERIOD: Duration = Duration::from_millis(1_000);
/// Time between two greetings while some nodes are known: a contact that is not among them may be
/// on the other side of a partition that both sides have forgotten.
const HELLO_PERIOD_SLOW: Duration = Duration::from_secs(10);
/// Contacts greeted at once.
const HELLO_FANOUT: usize = 3;

/// A node's counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Datagrams sent.
    pub sent: u64,
    /// Bytes of the datagrams sent.
    pub sent_bytes: u64,
    /// Datagrams received.
    pub received: u64,
    /// Datagrams that could not be read.
    pub damaged: u64,
    /// Datagrams of another version.
    pub other_version: u64,
    /// Datagrams that were not made with one of this node's rack keys.
    pub unauthentic: u64,
    /// Signed datagrams that were received before, or are too old to tell.
    pub replayed: u64,
    /// Datagrams of a life that begins in the future.
    pub ahead: u64,
    /// Datagrams for another node, life or cluster, or of an earlier life.
    pub misdirected: u64,
    /// Datagrams and timers that membership refused.
    pub membership_errors: u64,
}

/// A node of the collaboration: membership and protocol behind one interface.
///
/// Pure: the caller provides time (monotonic since any fixed moment), datagrams and memory use, and
/// takes outputs until [`Member::poll_output`] returns None.
pub struct Member {
    node: AcmsNode,
    foca: Foca<Identity, Codec, Rng, foca::NoCustomBroadcast>,
    /// The latest life that membership's bytes may name; foca's codec reads it.
    latest_life: Arc<AtomicU32>,
    runtime: AccumulatingRuntime<Identity>,
    timers: BTreeMap<(Duration, u64), Timer<Identity>>,
    timer_count: u64,
    contacts: Vec<SocketAddr>,
    hello_at: Duration,
    counters: Counters,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("node", &self.node)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

fn foca_config() -> foca::Config {
    let count = |count: usize| NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN);
    let every =
        |frequency, members| Some(PeriodicParams { frequency, num_members: count(members) });
    foca::Config {
        probe_period: PROBE_PERIOD,
        probe_rtt: PROBE_RTT,
        num_indirect_probes: count(INDIRECT_PROBES),
        max_transmissions: NonZeroU8::new(UPDATE_SENDS).unwrap_or(NonZeroU8::MIN),
        suspect_to_down_after: SUSPICION,
        remove_down_after: Some(REMEMBER_DEAD),
        max_packet_size: count(GOSSIP_BYTES_MAX),
        notify_down_members: true,
        periodic_announce: every(ANNOUNCE_PERIOD, 1),
        periodic_announce_to_down_members: every(ANNOUNCE_DEAD_PERIOD, 1),
        periodic_gossip: every(UPDATE_PERIOD, 1),
    }
}

impl Member {
    /// Creates a node that knows no others yet.
    ///
    /// # Errors
    /// Says which setting cannot be used.
    pub fn new(config: Config, now: Duration) -> Result<Self, ConfigError> {
        config.check()?;
        let peer = Peer { node: config.node, incarnation: config.incarnation, addr: config.addr };
        let mut node = AcmsNode::new(config, now);
        let rng = Rng::new(node.rng.bits());
        let latest_life = Arc::new(AtomicU32::new(u32::MAX));
        let codec = Codec { latest_life: Arc::clone(&latest_life) };
        let foca = Foca::new(Identity { peer, bump: 0 }, foca_config(), rng, codec);
        Ok(Self {
            node,
            foca,
            latest_life,
            runtime: AccumulatingRuntime::new(),
            timers: BTreeMap::new(),
            timer_count: 0,
            contacts: Vec::new(),
            hello_at: now,
            counters: Counters::default(),
        })
    }

    /// Sets the addresses to greet while no node there is known, a few at a time, less often once
    /// some nodes are known. If none is known, the first are greeted at the next tick.
    pub fn join(&mut self, contacts: Vec<SocketAddr>) {
        self.contacts = contacts;
        if self.is_alone() {
            self.hello_at = Duration::ZERO;
        }
    }

    /// Adds nodes known from an earlier life or a list, without greeting them.
    pub fn know(&mut self, peers: &[Peer], now: Duration) {
        let now = self.node.clock(now);
        let alive = peers.iter().map(|peer| foca::Member::alive(Identity { peer: *peer, bump: 0 }));
        let result = self.foca.apply_many(alive, false, &mut self.runtime);
        self.count(result);
        self.drain(now);
    }

    /// Takes an observation of this node's memory; call it about every second.
    pub fn on_usage(&mut self, usage: MemoryUse, now: Duration) {
        self.node.on_usage(usage, now);
    }

    /// Takes how many bytes of data the grants hold that this node lends; call it about every
    /// second. A grant that is not named stays as it was last seen.
    pub fn on_lent_use(&mut self, used: &[(Epoch, u64)], now: Duration) {
        self.node.on_lent_use(used, now);
    }

    /// Sets the bytes wanted from other nodes in all, instead of the figure derived from memory
    /// use; `None` returns to that. A node that is a server wants nothing.
    pub fn on_demand(&mut self, wanted_bytes: Option<u64>, now: Duration) {
        self.node.on_demand(wanted_bytes, now);
    }

    /// Stops lending because the node is about to end: nothing is offered any more, and what is
    /// lent is reclaimed with the usual deadline. [`Member::bound_bytes`] is 0 once all of it has
    /// been returned.
    pub fn lend_no_more(&mut self, now: Duration) {
        self.node.lend_no_more(now);
    }

    /// Tells some nodes that this one ends, so that others need not find out by probing. Call it
    /// last.
    pub fn leave(&mut self, now: Duration) {
        let now = self.node.clock(now);
        let result = self.foca.leave_cluster(&mut self.runtime);
        self.count(result);
        self.drain(now);
    }

    /// Notes that the shell has moved everything out of `grant`.
    pub fn on_evacuated(&mut self, grant: GrantId, now: Duration) {
        self.node.on_evacuated(grant, now);
    }

    /// Runs what is due; call it at [`Member::next_wakeup`] or at any other time.
    pub fn on_tick(&mut self, now: Duration) {
        let now = self.node.clock(now);
        while let Some(entry) = self.timers.first_entry()
            && entry.key().0 <= now
        {
            let timer = entry.remove();
            let result = self.foca.handle_timer(timer, &mut self.runtime);
            self.count(result);
            self.drain(now);
        }
        if now >= self.hello_at {
            self.greet(now);
        }
        self.node.on_tick(now);
    }

    /// When [`Member::on_tick`] has something to do next.
    #[must_use]
    pub fn next_wakeup(&self) -> Duration {
        let timer = self.timers.first_key_value().map_or(Duration::MAX, |((at, _), _)| *at);
        let hello = if self.contacts.is_empty() { Duration::MAX } else { self.hello_at };
        self.node.next_wakeup().min(timer).min(hello)
    }

    /// Returns the next datagram to send or action to carry out.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.node.out.pop()?;
        if let Output::Send { bytes, .. } = &output {
            self.counters.sent += 1;
            self.counters.sent_bytes += bytes.len() as u64;
        }
        Some(output)
    }

    /// Replaces the keys. Datagrams that wait to be sent keep their MAC.
    pub fn set_keys(&mut self, keys: RackKeys) {
        self.node.config.keys = keys.clone();
        self.node.out.keys = keys;
    }

    /// Handles a datagram.
    ///
    /// # Errors
    /// The datagram was refused; it changed nothing and was counted.
    pub fn on_datagram(
        &mut self,
        from: SocketAddr,
        bytes: &[u8],
        now: Duration,
    ) -> Result<(), DecodeError> {
        let now = self.node.clock(now);
        self.counters.received += 1;
        let read = Message::decode(bytes, &self.node.out.keys);
        let (header, message) = read.inspect_err(|error| self.count_refused(*error))?;
        if !self.is_for_us(&header) {
            self.counters.misdirected += 1;
            return Ok(());
        }
        let is_new = self.take(&header, now).inspect_err(|error| self.count_refused(*error))?;
        if !is_new {
            return Ok(());
        }
        let peer = Peer { node: header.from, incarnation: header.from_incarnation, addr: from };
        match message {
            Message::Hello => self.node.out.send(&peer, &Message::Welcome),
            Message::Welcome => self.on_welcome(peer, now),
            Message::Gossip(bytes) => {
                self.latest_life.store(self.node.latest_life(now), Ordering::Relaxed);
                let result = self.foca.handle_data(&bytes, &mut self.runtime);
                self.count(result);
                self.drain(now);
            }
            other => self.node.on_message(peer, other, now),
        }
        Ok(())
    }

    fn count_refused(&mut self, error: DecodeError) {
        let count = match error {
            DecodeError::Version(_) => &mut self.counters.other_version,
            DecodeError::Unsigned
            | DecodeError::Signed
            | DecodeError::UnknownKey(_)
            | DecodeError::Forged => &mut self.counters.unauthentic,
            DecodeError::Ahead(_) => &mut self.counters.ahead,
            _ => &mut self.counters.damaged,
        };
        *count += 1;
    }

    /// Notes the life and number of a datagram for this node. Returns false if the life is over or
    /// the datagram was received before.
    fn take(&mut self, header: &Header, now: Duration) -> Result<bool, DecodeError> {
        let (from, life) = (header.from, header.from_incarnation);
        if let Some(ahead_s) = self.node.ahead_s(life, now) {
            return Err(DecodeError::Ahead(ahead_s));
        }
        if !self.node.note_life(from, life) {
            self.counters.misdirected += 1;
            return Ok(false);
        }
        // Without a key anyone could use up the numbers of others.
        let is_new = self.node.out.keys.is_empty() || self.node.peers.take(from, header.number);
        self.counters.replayed += u64::from(!is_new);
        Ok(is_new)
    }

    fn is_for_us(&self, header: &Header) -> bool {
        let config = &self.node.config;
        let any_life = header.to_incarnation == ANY_LIFE;
        let to_us = header.to == NodeId::ANYONE
            || (header.to == config.node
                && (any_life || header.to_incarnation == config.incarnation));
        header.cluster == config.cluster && header.from != config.node && to_us
    }

    fn on_welcome(&mut self, peer: Peer, now: Duration) {
        if self.node.peers.list().iter().any(|known| known.addr == peer.addr) {
            return;
        }
        let result = self.foca.announce(Identity { peer, bump: 0 }, &mut self.runtime);
        self.count(result);
        self.drain(now);
    }

    fn is_alone(&self) -> bool {
        self.foca.num_members() == 0 && !self.contacts.is_empty()
    }

    /// Greets contacts that are not known to be alive.
    fn greet(&mut self, now: Duration) {
        self.hello_at = now + if self.is_alone() { HELLO_PERIOD } else { HELLO_PERIOD_SLOW };
        let known = |addr: &SocketAddr| self.node.peers.list().iter().any(|p| p.addr == *addr);
        let strange: Vec<SocketAddr> =
            self.contacts.iter().filter(|addr| !known(addr)).copied().collect();
        for _ in 0..HELLO_FANOUT.min(strange.len()) {
            let contact = strange[self.node.rng.index(strange.len())];
            self.node.out.send_anyone(contact, &Message::Hello);
        }
    }

    fn count(&mut self, result: Result<(), foca::Error>) {
        self.counters.membership_errors += u64::from(result.is_err());
    }

    /// Takes foca's datagrams to send, timers to set and notifications.
    fn drain(&mut self, now: Duration) {
        while let Some((to, bytes)) = self.runtime.to_send() {
            // Any life: a node that restarted behind a partition is reached under its old name.
            let to = Peer { incarnation: ANY_LIFE, ..to.peer };
            self.node.out.send(&to, &Message::Gossip(bytes.to_vec()));
        }
        while let Some((after, timer)) = self.runtime.to_schedule() {
            self.timer_count += 1;
            self.timers.insert((now + after, self.timer_count), timer);
        }
        let mut renamed = false;
        while let Some(notification) = self.runtime.to_notify() {
            match notification {
                OwnedNotification::Rejoin(_) => renamed = true,
                OwnedNotification::MemberUp(id) => self.up(id.peer),
                OwnedNotification::MemberDown(id) => {
                    self.node.peers.down(id.peer.node);
                    self.node.out.act(Action::PeerDown(id.peer.node));
                }
                OwnedNotification::Rename(_, id) => self.renamed(id.peer),
                _ => {}
            }
        }
        if renamed {
            self.resume(now);
        }
    }

    /// Restarts foca's timers. Foca stops all of them when this node takes a new name, and starts
    /// them again only when a node that it believes alive sends something. If all such nodes have
    /// restarted meanwhile, nothing ever arrives: they do not know this node, and it never detects
    /// that they are dead. Applying updates, even an empty list, makes foca check its members.
    fn resume(&mut self, now: Duration) {
        let result = self.foca.apply_many(std::iter::empty(), false, &mut self.runtime);
        self.count(result);
        self.drain(now);
    }

    fn up(&mut self, peer: Peer) {
        self.node.note_life(peer.node, peer.incarnation);
        self.node.peers.up(peer);
        self.node.out.act(Action::PeerUp(peer));
    }

    /// Notes a node's new name. Foca reports one even for nodes that it believes dead.
    fn renamed(&mut self, peer: Peer) {
        self.node.note_life(peer.node, peer.incarnation);
        if self.node.peers.list().iter().any(|known| known.node == peer.node) {
            self.node.peers.up(peer);
        }
    }

    /// The node's class.
    #[must_use]
    pub fn class(&self) -> Class {
        self.node.class
    }

    /// Which side broadcasts, by this node's estimate.
    #[must_use]
    pub fn side(&self) -> Side {
        self.node.ratio.side()
    }

    /// The node's settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.node.config
    }

    /// The node's counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Nodes known to be alive, this one not included.
    #[must_use]
    pub fn peers(&self) -> &[Peer] {
        self.node.peers.list()
    }

    /// Numbers of offers and of requests kept.
    #[must_use]
    pub fn heard(&self) -> (usize, usize) {
        self.node.rumours.len()
    }

    /// The known offers of other nodes.
    pub fn offers(&self, now: Duration) -> impl Iterator<Item = (NodeId, u64)> {
        self.node.rumours.offers(now).map(|offer| (offer.origin, offer.bytes))
    }

    /// Lender: bytes that may be lent in all.
    #[must_use]
    pub fn offered_bytes(&self) -> u64 {
        self.node.lender.harvest.offered_bytes
    }

    /// Lender: bytes reserved or bound.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.node.lender.held_bytes()
    }

    /// Lender: bytes bound.
    #[must_use]
    pub fn bound_bytes(&self) -> u64 {
        self.node.lender.bound_bytes()
    }

    /// Lender: bound bytes that are being reclaimed.
    #[must_use]
    pub fn reclaiming_bytes(&self) -> u64 {
        self.node.lender.reclaiming_bytes()
    }

    /// Lender: bytes that one borrower could be granted beyond those it has, whatever is free.
    #[must_use]
    pub fn share_left_bytes(&self, borrower: NodeId) -> u64 {
        self.node.lender.share_left_bytes(borrower, &self.node.config)
    }

    /// Lender: grants taken back because they were not used.
    #[must_use]
    pub fn unused_count(&self) -> u64 {
        self.node.lender.unused_count
    }

    /// Lender: the bound grants, their clients and sizes.
    pub fn bound(&self) -> impl Iterator<Item = (GrantId, NodeId, u64)> {
        let server = self.node.config.node;
        self.node
            .lender
            .bound()
            .map(move |(epoch, client, bytes)| (GrantId { server, epoch }, client, bytes))
    }

    /// Borrower: bytes that it wants from others in all.
    #[must_use]
    pub fn wanted_bytes(&self) -> u64 {
        self.node.borrower.wanted_bytes()
    }

    /// Borrower: bytes that it may use and is not moving out of.
    #[must_use]
    pub fn usable_bytes(&self) -> u64 {
        self.node.borrower.usable_bytes()
    }

    /// Borrower: the grants that may still hold its data.
    pub fn in_use(&self) -> impl Iterator<Item = (GrantId, GrantKey)> {
        self.node.borrower.in_use()
    }
}

#[cfg(test)]
mod tests {
    use foca::Codec as _;

    use super::*;
    use crate::ids::{ClusterId, Incarnation};

    fn peer(node: u64) -> Peer {
        let last = u8::try_from(node).unwrap();
        let addr = ([10, 0, 0, last], 7070).into();
        Peer { node: NodeId(node), incarnation: Incarnation(1), addr }
    }

    /// Membership's bytes that say that this identity lives.
    fn gossip_of(id: Identity, to: Identity) -> Vec<u8> {
        let mut codec = Codec { latest_life: Arc::new(AtomicU32::new(u32::MAX)) };
        let mut bytes = Vec::new();
        let message = foca::Message::Gossip;
        let header = foca::Header { src: id, src_incarnation: 0, dst: to, message };
        codec.encode_header(&header, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn membership_believes_no_life_that_begins_in_the_future() {
        let Peer { node, incarnation, addr } = peer(1);
        let config = Config::new(ClusterId(7), node, incarnation, addr);
        let mut member = Member::new(config, Duration::ZERO).unwrap();
        member.know(&[peer(2)], Duration::ZERO);
        let own = member.foca.identity().clone();
        let header = Header {
            cluster: ClusterId(7),
            from: NodeId(3),
            from_incarnation: Incarnation(1),
            to: node,
            to_incarnation: ANY_LIFE,
            number: 1,
        };
        let mut lives = |life| {
            let id = Identity { peer: Peer { incarnation: life, ..peer(2) }, bump: 0 };
            let bytes = Message::Gossip(gossip_of(id, own.clone()));
            let bytes = bytes.encode(&header, &RackKeys::none());
            member.on_datagram(peer(3).addr, &bytes, Duration::ZERO).unwrap();
            member.peers().iter().find(|it| it.node == NodeId(2)).map(|it| it.incarnation)
        };
        assert_eq!(lives(Incarnation(u32::MAX)), Some(Incarnation(1)));
        assert_eq!(lives(Incarnation(2)), Some(Incarnation(2)), "a later life is seen");
        assert_eq!(member.counters().membership_errors, 1);
    }

    #[test]
    fn a_node_that_took_a_new_name_still_finds_out_who_is_dead() {
        let Peer { node, incarnation, addr } = peer(1);
        let config = Config::new(ClusterId(7), node, incarnation, addr);
        let mut member = Member::new(config, Duration::ZERO).unwrap();
        member.know(&[peer(2)], Duration::ZERO);
        let mut bytes = Vec::new();
        let header = foca::Header {
            src: Identity { peer: peer(2), bump: 0 },
            src_incarnation: 0,
            dst: member.foca.identity().clone(),
            message: foca::Message::TurnUndead,
        };
        let mut codec = Codec { latest_life: Arc::new(AtomicU32::new(u32::MAX)) };
        codec.encode_header(&header, &mut bytes).unwrap();
        member.foca.handle_data(&bytes, &mut member.runtime).unwrap();
        member.drain(Duration::ZERO);
        assert_eq!(member.foca.identity().bump, 1, "it was told that it is dead");
        assert_eq!(member.peers(), [peer(2)]);
        // The other node dies without sending anything more.
        for second in 1..20 {
            member.on_tick(Duration::from_secs(second));
        }
        assert_eq!(member.peers(), [], "it was probed and did not answer");
    }
}
