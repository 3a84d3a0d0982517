//! One node of the collaboration: its class, what it sends, lends and borrows.
//!
//! Invariants:
//! - Time never goes back: an earlier `now` is taken as the latest one seen.
//! - A datagram for another node, another life or another cluster, or from a sender's earlier life,
//!   changes nothing.

use std::cmp::Ordering;
use std::time::Duration;

use farpool_units::{SUPERPAGE_BYTES, at_most};

use crate::borrower::{Borrower, Offered};
use crate::broadcast_timing::{AskClock, OfferClock};
use crate::classify::{Class, MemoryUse};
use crate::config::Config;
use crate::harvest::{ceiling_bytes, lend_limit_bytes, next_harvest};
use crate::ids::{Epoch, GrantId, Incarnation, NodeId, Peer};
use crate::lender::Lender;
use crate::limits::{
    BROADCAST_PERIOD, LIFE_AHEAD, LIFE_AHEAD_UNSIGNED, REPLIES_WANTED, ROUND, ROUND_FANOUT,
    ROUND_FANOUT_IDLE, TICK, VALID_PERIODS, WANT_ROOM_PERMILLE,
};
use crate::message::{Message, Rumour, RumourKind};
use crate::outbox::{Action, Outbox};
use crate::peers::Peers;
use crate::ratio::{Ratio, Side};
use crate::rng::{Keys, Rng};
use crate::rumours::Rumours;

/// The collaboration's state machine, without membership.
#[derive(Debug)]
pub(crate) struct AcmsNode {
    pub(crate) config: Config,
    pub(crate) out: Outbox,
    pub(crate) rng: Rng,
    keys: Keys,
    pub(crate) peers: Peers,
    pub(crate) class: Class,
    pub(crate) usage: Option<MemoryUse>,
    demand_bytes: Option<u64>,
    /// The node has to stop lending, whatever its class.
    lends_no_more: bool,
    pub(crate) ratio: Ratio,
    pub(crate) rumours: Rumours,
    pub(crate) lender: Lender,
    pub(crate) borrower: Borrower,
    offer_clock: OfferClock,
    ask_clock: AskClock,
    /// When this life began here.
    began: Duration,
    now: Duration,
    tick_at: Duration,
    round_at: Duration,
}

impl AcmsNode {
    pub(crate) fn new(config: Config, now: Duration) -> Self {
        let (mut rng, keys) = (Rng::of_seed(&config.seed), Keys::of_seed(&config.seed));
        let out = Outbox::new(&config);
        // Nodes that start together must not send together.
        let round_at = now + Duration::from_millis(rng.below(200));
        Self {
            config,
            out,
            rng,
            keys,
            peers: Peers::default(),
            class: Class::Neutral,
            usage: None,
            demand_bytes: None,
            lends_no_more: false,
            ratio: Ratio::new(),
            rumours: Rumours::default(),
            lender: Lender::new(),
            borrower: Borrower::new(),
            offer_clock: OfferClock::new(),
            ask_clock: AskClock::new(),
            began: now,
            now,
            tick_at: now,
            round_at,
        }
    }

    pub(crate) fn clock(&mut self, now: Duration) -> Duration {
        self.now = self.now.max(now);
        self.now
    }

    pub(crate) fn next_wakeup(&self) -> Duration {
        let waits =
            !self.lender.is_idle() || !self.borrower.is_idle() || self.class == Class::Server;
        if waits { self.tick_at.min(self.round_at) } else { self.round_at }
    }

    pub(crate) fn on_usage(&mut self, usage: MemoryUse, now: Duration) {
        let now = self.clock(now);
        self.usage = Some(usage);
        let class = self.config.thresholds.next(self.class, &usage);
        if class != self.class {
            self.out.act(Action::ClassChanged { from: self.class, to: class });
            self.class = class;
        }
        self.update_lending(now);
        self.update_wanted(now);
    }

    pub(crate) fn on_demand(&mut self, bytes: Option<u64>, now: Duration) {
        let now = self.clock(now);
        self.demand_bytes = bytes;
        self.update_wanted(now);
    }

    pub(crate) fn on_evacuated(&mut self, grant: GrantId, now: Duration) {
        let now = self.clock(now);
        self.borrower.on_evacuated(grant, now, &mut self.out);
    }

    pub(crate) fn lend_no_more(&mut self, now: Duration) {
        let now = self.clock(now);
        self.lends_no_more = true;
        self.update_lending(now);
    }

    pub(crate) fn on_lent_use(&mut self, used: &[(Epoch, u64)], now: Duration) {
        let now = self.clock(now);
        self.lender.on_lent_use(used, now);
    }

    fn update_lending(&mut self, now: Duration) {
        let Some(usage) = self.usage else { return };
        let limit = match self.lends_no_more {
            true => 0,
            false => lend_limit_bytes(&self.config.thresholds, self.class, &usage),
        };
        self.lender.ceiling_bytes = ceiling_bytes(limit, usage.total_bytes);
        self.lender.harvest = next_harvest(self.lender.harvest, limit, usage.total_bytes, now);
        self.lender.shrink(limit, &self.config, now, &mut self.out);
    }

    /// Sets what the node wants: a server nothing; another node the demand, if one is set. Without
    /// one, a client wants its use beyond MEM_MAX_LOW with some room, and a neutral node nothing.
    fn update_wanted(&mut self, now: Duration) {
        let derived = match (self.class, self.usage) {
            (Class::Client, Some(usage)) => {
                let fits = self.config.thresholds.max_low_bytes(usage.total_bytes);
                let need = usage.used_bytes.saturating_sub(fits);
                steady_want(self.borrower.wanted_bytes(), need, usage.total_bytes)
            }
            _ => 0,
        };
        let wanted = match (self.demand_bytes, self.class) {
            (_, Class::Server) => 0,
            (Some(bytes), _) => bytes,
            (None, _) => derived,
        };
        self.borrower.want(wanted, now, &mut self.out);
    }

    pub(crate) fn on_tick(&mut self, now: Duration) {
        let now = self.clock(now);
        if now >= self.tick_at {
            self.tick_at = now + TICK;
            self.tick(now);
        }
        if now >= self.round_at {
            self.round_at = now + ROUND;
            self.round(now);
        }
    }

    fn tick(&mut self, now: Duration) {
        self.update_lending(now);
        self.lender.on_tick(&self.config, now, &mut self.out);
        self.lender.serve(&self.config, now, &mut self.keys, &mut self.out);
        for silent in self.borrower.on_tick(&self.config, now, &mut self.out) {
            self.rumours.drop_offer(silent);
        }
        self.seek(now);
        self.offer(now);
    }

    /// Sends one round of rumours: a bounded number of datagrams to random nodes.
    fn round(&mut self, now: Duration) {
        self.rumours.expire(now);
        let fanout = if self.rumours.has_news() { ROUND_FANOUT } else { ROUND_FANOUT_IDLE };
        for peer in self.peers.sample(fanout, &mut self.rng) {
            let rumours = self.rumours.choose(now);
            self.out.send(&peer, &Message::Rumours(self.ratio.mood(self.class), rumours));
        }
    }

    /// The servers' side of broadcasting: OFFERING_MEM. Offers are withdrawn whichever side
    /// broadcasts.
    fn offer(&mut self, now: Duration) {
        let lends = self.class == Class::Server && self.ratio.side() == Side::Servers;
        let free = if lends { self.lender.unbound_bytes() } else { 0 };
        if let Some(period) = self.offer_clock.poll(free, now) {
            let bytes = if free < SUPERPAGE_BYTES { 0 } else { free };
            let valid = period * 2 * VALID_PERIODS;
            self.say(RumourKind::Offer, self.offer_clock.seq, bytes, valid, 0, now);
        }
    }

    /// The client's side: asks servers whose offers are known, or else broadcasts REQUESTING_MEM.
    fn seek(&mut self, now: Duration) {
        if self.borrower.shortfall_bytes() == 0 {
            self.ask_clock.served();
            if std::mem::take(&mut self.ask_clock.is_out) {
                self.request(0, BROADCAST_PERIOD, 0, now);
            }
            return;
        }
        if !self.borrower.is_free_to_ask() || !self.ask_clock.may_ask(now) {
            return;
        }
        let Self { borrower, rumours, config, rng, out, .. } = self;
        if borrower.ask(rumours, config, now, rng, out) {
            self.ask_clock.asked(now, &mut self.rng);
            return;
        }
        let patience = match self.ratio.side() {
            Side::Clients => Duration::ZERO,
            Side::Servers => BROADCAST_PERIOD,
        };
        if let Some((attempt, period)) = self.ask_clock.poll_broadcast(patience, now) {
            self.request(self.borrower.shortfall_bytes(), period, attempt, now);
        }
    }

    fn request(&mut self, bytes: u64, period: Duration, attempt: u8, now: Duration) {
        let number = self.borrower.next_request();
        self.say(RumourKind::Request, number.0, bytes, period * 2, attempt, now);
    }

    fn say(
        &mut self,
        kind: RumourKind,
        seq: u32,
        bytes: u64,
        valid: Duration,
        attempt: u8,
        now: Duration,
    ) {
        let valid_ms = at_most(valid.as_millis());
        let Config { node: origin, incarnation, zone, addr, .. } = self.config;
        let rumour = Rumour {
            kind,
            origin,
            incarnation,
            seq,
            bytes,
            zone,
            age_ms: 0,
            valid_ms,
            attempt,
            addr,
        };
        self.rumours.hear(rumour, now);
    }

    /// The latest life that any node can be in, by this node's own life and the time since. The
    /// clocks of two nodes differ, but not by more than a limit.
    pub(crate) fn latest_life(&self, now: Duration) -> u32 {
        let ahead = match self.config.keys.is_empty() {
            true => LIFE_AHEAD_UNSIGNED,
            false => LIFE_AHEAD,
        };
        let since = now.saturating_sub(self.began) + ahead;
        at_most(u64::from(self.config.incarnation.0).saturating_add(since.as_secs()))
    }

    /// The seconds by which a life begins later than any can, if it does.
    pub(crate) fn ahead_s(&self, life: Incarnation, now: Duration) -> Option<u64> {
        let own = u64::from(self.config.incarnation.0);
        let present = own.saturating_add(now.saturating_sub(self.began).as_secs());
        let is_ahead = life.0 > self.latest_life(now);
        is_ahead.then(|| u64::from(life.0).saturating_sub(present))
    }

    /// Notes that a node is in the life `life`. Returns false if it is known to be in a later one.
    pub(crate) fn note_life(&mut self, node: NodeId, life: Incarnation) -> bool {
        match self.peers.note_life(node, life) {
            Ordering::Less => false,
            Ordering::Equal => true,
            Ordering::Greater => {
                self.lender.on_incarnation(node, life, &mut self.out);
                self.borrower.on_incarnation(node, life, &mut self.out);
                self.rumours.forget_before(node, life);
                true
            }
        }
    }

    /// Handles one message from `from`, already checked to be for this node.
    pub(crate) fn on_message(&mut self, from: Peer, message: Message, now: Duration) {
        let now = self.clock(now);
        let Self { config, out, lender, borrower, .. } = self;
        match message {
            Message::Rumours(mood, rumours) => {
                if self.ratio.hear(&mood) {
                    self.out.act(Action::SideChanged { side: self.ratio.side() });
                }
                self.on_rumours(rumours, now);
            }
            Message::Request { request, bytes, zone } => {
                let asked = (bytes, zone, false);
                lender.on_request(from, request, asked, (config, now), out);
                self.serve_first_come(now);
            }
            Message::Grant { request, epoch, count, bytes, key, hold_ms: _, zone, blade } => {
                let offered =
                    Offered { server: from, request, epoch, count, bytes, key, zone, blade };
                borrower.on_grant(offered, config, now, out);
            }
            Message::Ack { epoch, bytes, sent_ms } => {
                lender.on_ack(&from, (epoch, bytes, sent_ms), config, now, out);
            }
            Message::Renew { sent_ms, epochs } => {
                lender.on_renew(&from, (sent_ms, &epochs), config, now, out);
            }
            Message::Lease { sent_ms, lease_ms, epochs } => {
                borrower.on_lease(&from, (sent_ms, lease_ms, &epochs), now, out);
            }
            Message::Nack { reason: crate::message::NackReason::Declined, epoch, .. } => {
                lender.on_declined(&from, epoch);
            }
            Message::Nack { reason, request, epoch, left_bytes } => {
                borrower.on_nack(&from, reason, (request, epoch), out);
                self.rumours.set_left(from.node, from.incarnation, left_bytes);
            }
            Message::Reclaim { epoch, left_ms } => {
                borrower.on_reclaim(&from, (epoch, left_ms), now, out);
            }
            Message::Released { epoch } => lender.on_released(&from, epoch, out),
            Message::Freed { epoch } => borrower.on_freed(&from, epoch),
            Message::Hello | Message::Welcome | Message::Gossip(_) => {}
        }
    }

    fn serve_first_come(&mut self, now: Duration) {
        if self.config.arbitration == crate::Arbitration::Fcfs {
            self.lender.serve(&self.config, now, &mut self.keys, &mut self.out);
        }
    }

    fn on_rumours(&mut self, rumours: Vec<Rumour>, now: Duration) {
        for rumour in rumours {
            let is_ahead = self.ahead_s(rumour.incarnation, now).is_some();
            if rumour.origin == self.config.node || is_ahead {
                continue;
            }
            let news = self.rumours.hear(rumour, now);
            if news && rumour.kind == RumourKind::Request && rumour.bytes > 0 {
                self.on_broadcast_request(&rumour, now);
            }
        }
    }

    /// Many servers hear a broadcast request; only a few, drawn at random, answer it.
    fn on_broadcast_request(&mut self, rumour: &Rumour, now: Duration) {
        if self.class != Class::Server || self.lender.free_bytes() < SUPERPAGE_BYTES {
            return;
        }
        let answers = u64::from(REPLIES_WANTED) << rumour.attempt.min(crate::limits::ATTEMPT_MAX);
        let servers = self.ratio.servers_of(self.peers.len() + 1);
        if self.rng.below(servers) >= answers {
            return;
        }
        let Rumour { origin: node, incarnation, addr, .. } = *rumour;
        let client = Peer { node, incarnation, addr };
        let asked = (rumour.bytes, rumour.zone, true);
        let number = crate::ids::RequestNo(rumour.seq);
        self.lender.on_request(client, number, asked, (&self.config, now), &mut self.out);
        self.serve_first_come(now);
    }
}

/// Returns what a client wants when it needs `need_bytes` and wanted `old_bytes`: the need and some
/// room, unchanged while the need stays in range, so that noise requests and returns no memory.
fn steady_want(old_bytes: u64, need_bytes: u64, total_bytes: u64) -> u64 {
    let room = total_bytes / 1000 * WANT_ROOM_PERMILLE;
    let keeps = need_bytes <= old_bytes && old_bytes <= need_bytes.saturating_add(2 * room);
    if keeps { old_bytes } else { need_bytes.saturating_add(room) }
}
