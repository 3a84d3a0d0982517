//! Protocol, ledger and blade behind one lock; their actions are carried out in order.
//!
//! Every change is made through [`Core::with`]. Before the lock is released, all its consequences
//! have been carried out: datagrams sent, grants set, programs' versions raised. Only taking a
//! grant back is left to a thread of its own, because the blade zeroes its memory first. Nothing
//! has to wait for that, because the grant's epoch is never used again.

use std::collections::{BTreeMap, VecDeque};
use std::net::UdpSocket;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use farpool_acms::{
    Action, Class, Epoch, GrantId, GrantKey, Member, MemoryUse, MoveReason, NodeId, Output, Peer,
    RevokeReason,
};
use farpool_api::Event;
use farpool_blade::{Blade, GrantSpec};
use farpool_kernel::{fill_random, lock};
use farpool_units::{SUPERPAGE_BYTES, at_most};
use tokio::sync::watch;

use crate::Observation;
use crate::ledger::{Effect, HerePlace, Ledger, Placement, Surroundings};

/// Events kept for later readers; older ones are dropped.
const EVENTS_LIMIT: usize = 1_000;
/// Most rounds in which protocol and ledger react to each other before the rest waits for the next
/// change: more than two have never been seen.
const ROUNDS_MAX: usize = 16;

/// A grant this node lends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lent {
    pub client: NodeId,
    pub bytes: u64,
}

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub grants_made: u64,
    pub grants_used: u64,
    pub grants_revoked: u64,
    pub grants_cut_off: u64,
    pub moves: u64,
    pub grants_lost: u64,
    pub class_changes: u64,
    pub sends_failed: u64,
    pub looks_failed: u64,
}

/// What the lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub member: Member,
    pub ledger: Ledger,
    pub usage: Option<MemoryUse>,
    pub lent: BTreeMap<GrantId, Lent>,
    /// Bytes of this node's blade that others used at the last sample.
    pub lent_used_bytes: u64,
    /// What programs of this node used of it then, as far as memory stood behind it.
    pub here_backed_bytes: u64,
    pub counts: Counts,
    pub is_ending: bool,
    events: VecDeque<Event>,
    event_count: u64,
    /// Time of the change under way.
    now: Duration,
    demand_bytes: Option<u64>,
    capacity_bytes: Option<u64>,
}

/// An order to the thread that takes grants back: id and epoch of a grant.
pub(crate) type Revocation = (farpool_blade::GrantId, u64);

/// The node.
#[derive(Debug)]
pub(crate) struct Core {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    socket: UdpSocket,
    blade: Arc<Blade>,
    revocations: Sender<Revocation>,
    started: Instant,
    pub here: HerePlace,
}

impl Core {
    pub(crate) fn new(
        member: Member,
        socket: UdpSocket,
        blade: Arc<Blade>,
        revocations: Sender<Revocation>,
        started: Instant,
        here: HerePlace,
    ) -> Self {
        let ledger = Ledger::new(member.config().incarnation);
        let state = State {
            member,
            ledger,
            usage: None,
            lent: BTreeMap::new(),
            lent_used_bytes: 0,
            here_backed_bytes: 0,
            counts: Counts::default(),
            is_ending: false,
            events: VecDeque::new(),
            event_count: 0,
            now: Duration::ZERO,
            demand_bytes: None,
            capacity_bytes: None,
        };
        let changed = watch::channel(0).0;
        Self { state: Mutex::new(state), changed, socket, blade, revocations, started, here }
    }

    /// Time since the start: the protocol's clock.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn blade(&self) -> &Blade {
        &self.blade
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Returns a receiver that is told when something may have changed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic ends the process (panic = "abort"), so a poisoned lock is seen in tests only.
        lock(&self.state)
    }

    /// Reads the state without changing anything.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&State, Duration) -> T) -> T {
        look(&self.lock(), self.now())
    }

    /// Changes the state, and carries out all consequences.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut State, Duration) -> T) -> T {
        let mut state = self.lock();
        let now = self.now();
        state.now = now;
        let before = state.change_counts();
        let result = change(&mut state, now);
        self.settle(&mut state, now);
        if state.change_counts() != before {
            self.changed.send_modify(|count| *count += 1);
        }
        result
    }

    /// Takes a sample of the memory into account.
    ///
    /// # Errors
    /// The system does not say how much memory stands behind what the blade lends.
    pub(crate) fn observe(&self, seen: Observation) -> std::io::Result<()> {
        let grants = self.blade.grants();
        let lent = grants.iter().filter(|grant| !is_here_grant(grant.id));
        let lent: Vec<(Epoch, u64)> =
            lent.map(|grant| (Epoch(grant.epoch), grant.used_bytes)).collect();
        let backed = |is_here: bool| self.blade.backed_bytes_of(|id| is_here_grant(id) == is_here);
        let (lent_backed_bytes, here_backed_bytes) = (backed(false)?, backed(true)?);
        self.with(|state, now| {
            state.member.on_lent_use(&lent, now);
            state.lent_used_bytes = lent.iter().map(|(_, used_bytes)| used_bytes).sum();
            state.here_backed_bytes = here_backed_bytes;
            let taken = seen.total_bytes.saturating_sub(seen.available_bytes);
            // Memory that others hold here is not this node's need; memory that its programs hold
            // elsewhere is.
            let own = taken.saturating_sub(lent_backed_bytes);
            let usage = MemoryUse {
                used_bytes: own.saturating_add(state.ledger.far_bytes()),
                total_bytes: seen.total_bytes,
                pressure_permille: seen.pressure_permille,
            };
            state.usage = Some(usage);
            state.member.on_usage(usage, now);
        });
        Ok(())
    }

    /// Notes that the memory could not be sampled: nothing is lent on doubtful numbers.
    pub(crate) fn observe_failed(&self, error: &std::io::Error) {
        self.with(|state, now| {
            if state.counts.looks_failed == 0 {
                tracing::error!(%error, "the node's memory cannot be looked at; nothing is lent");
            }
            state.counts.looks_failed += 1;
            if let Some(usage) = &mut state.usage {
                usage.pressure_permille = Some(1_000);
                let usage = *usage;
                state.member.on_usage(usage, now);
            }
        });
    }

    /// Carries out all consequences of a change.
    fn settle(&self, state: &mut State, now: Duration) {
        for _ in 0..ROUNDS_MAX {
            let mut is_quiet = true;
            while let Some(output) = state.member.poll_output() {
                match output {
                    Output::Send { to, bytes } => {
                        let sent = self.socket.send_to(&bytes, to);
                        state.counts.sends_failed += u64::from(sent.is_err());
                    }
                    Output::Act(action) => {
                        is_quiet = false;
                        self.act(state, action, now);
                    }
                }
            }
            let around = state.surroundings();
            state.ledger.settle(around, now, &mut random_key);
            while let Some(effect) = state.ledger.poll_effect() {
                is_quiet = false;
                self.carry_out(state, effect, now);
            }
            let demand = state.ledger.demand_bytes();
            if state.demand_bytes != Some(demand) {
                is_quiet = false;
                state.demand_bytes = Some(demand);
                state.member.on_demand(Some(demand), now);
            }
            if is_quiet {
                break;
            }
        }
        self.set_capacity(state);
    }

    fn act(&self, state: &mut State, action: Action, now: Duration) {
        match action {
            Action::GrantMade { grant, client, bytes, key } => {
                self.lend(state, grant, client, bytes, key);
            }
            Action::Revoke { grant, reason } => self.revoke(state, grant, reason),
            Action::GrantUsable { grant, blade, key, bytes } => {
                let placement = Placement { blade: Some(blade), key, bytes };
                state.counts.grants_used += 1;
                match state.ledger.usable(grant, placement, now) {
                    Some(client) => {
                        tracing::info!(%grant, %blade, bytes, %client, "memory borrowed");
                        state.tell("grant-usable", blade, format!("{bytes} bytes for {client}"));
                    }
                    None => tracing::debug!(%grant, bytes, "borrowed memory is not needed"),
                }
            }
            Action::MoveOut { grant, deadline, reason } => {
                let left_ms = deadline.map(|at| at.saturating_sub(now).as_millis());
                tracing::info!(%grant, ?reason, ?left_ms, "borrowed memory is being left");
                state.counts.moves += 1;
                let why = match reason {
                    MoveReason::Reclaimed => "its server needs it",
                    MoveReason::NotNeeded => "it is not needed any more",
                };
                state.tell("grant-moving", grant, why.to_owned());
                state.ledger.move_out(grant, deadline);
            }
            Action::GrantLost { grant } => {
                state.counts.grants_lost += 1;
                match state.ledger.lost(grant) {
                    Some(client) => {
                        tracing::error!(%grant, %client, "borrowed memory is gone, with what was \
                            on it");
                        state.tell("grant-lost", grant, format!("it was of {client}"));
                    }
                    None => tracing::debug!(%grant, "borrowed memory that nobody had is gone"),
                }
            }
            Action::ClassChanged { from, to } => {
                state.counts.class_changes += 1;
                tracing::info!(from = class_name(from), to = class_name(to), "the node's class");
                let detail = format!("was {}", class_name(from));
                state.tell("class-changed", class_name(to), detail);
            }
            Action::SideChanged { side } => tracing::info!(?side, "who broadcasts"),
            Action::PeerUp(peer) => {
                tracing::info!(node = %peer.addr, "a node is there");
                state.tell("node-up", peer.addr, format!("node {:016x}", peer.node.0));
            }
            Action::PeerDown(node) => {
                tracing::info!(node = %format_args!("{:016x}", node.0), "a node is gone");
                state.tell("node-down", format_args!("{:016x}", node.0), String::new());
            }
        }
    }

    fn lend(&self, state: &mut State, grant: GrantId, client: Peer, bytes: u64, key: GrantKey) {
        match self.blade.set_grant(&grant_spec(grant, key, bytes)) {
            Ok(()) => {
                tracing::info!(%grant, client = %client.addr, bytes, "memory lent");
                state.counts.grants_made += 1;
                state.lent.insert(grant, Lent { client: client.node, bytes });
                state.tell("grant-made", client.addr, format!("{bytes} bytes"));
            }
            // The blade refuses the client, which loses the grant with its lease; no data is on it.
            Err(error) => tracing::error!(%grant, %error, "the blade does not lend"),
        }
    }

    fn revoke(&self, state: &mut State, grant: GrantId, reason: RevokeReason) {
        let why = match reason {
            RevokeReason::Released => "released",
            RevokeReason::Deadline => "deadline",
            RevokeReason::LeaseEnded => "lease ended",
            RevokeReason::ClientRestarted => "client restarted",
        };
        tracing::info!(%grant, why, "lent memory comes back");
        state.counts.grants_revoked += 1;
        state.counts.grants_cut_off += u64::from(reason != RevokeReason::Released);
        state.lent.remove(&grant);
        state.tell("grant-revoked", grant, why.to_owned());
        self.order_back(grant);
    }

    /// Orders a grant to be taken back. The thread that does so lives as long as this node.
    fn order_back(&self, grant: GrantId) {
        let _ends_with_us = self.revocations.send((blade_id(grant), grant.epoch.0));
    }

    fn carry_out(&self, state: &mut State, effect: Effect, now: Duration) {
        match effect {
            Effect::Evacuated(grant) => state.member.on_evacuated(grant, now),
            Effect::EndHere(grant) => self.order_back(grant),
            Effect::GiveHere { grant, key, bytes } => {
                match self.blade.set_grant(&grant_spec(grant, key, bytes)) {
                    Ok(()) => {
                        tracing::info!(%grant, bytes, "own memory for an own program");
                        state.tell("grant-here", grant, format!("{bytes} bytes"));
                    }
                    Err(error) => {
                        tracing::error!(%grant, %error, "the blade gives nothing");
                        state.ledger.lost(grant);
                    }
                }
            }
            Effect::Silent(client) => {
                tracing::info!(%client, "a program said nothing for its lease, and is ended");
                state.tell("client-silent", client, "its lease is over".to_owned());
            }
        }
    }

    /// Sets the blade's capacity: what is lent or offered and what own programs have, but no more
    /// than it was set up with.
    fn set_capacity(&self, state: &mut State) {
        let member = &state.member;
        let staying = member.bound_bytes().saturating_sub(member.reclaiming_bytes());
        let lends = member.offered_bytes().max(staying);
        let wanted = lends.saturating_add(state.ledger.here_bytes());
        let bytes = wanted.min(self.blade.config().memory_bytes);
        if state.capacity_bytes != Some(bytes) && self.blade.set_capacity(bytes).is_ok() {
            state.capacity_bytes = Some(bytes);
        }
    }
}

impl State {
    /// Returns what the ledger needs to know. Grants here may take the memory below MEM_MAX_LOW
    /// that is neither used nor lent. Their present use is part of the node's use, and is
    /// subtracted.
    fn surroundings(&self) -> Surroundings {
        let limit = self.usage.map_or(0, |usage| {
            let most = self.member.config().thresholds.max_low_bytes(usage.total_bytes);
            let taken = usage.used_bytes.saturating_sub(self.here_backed_bytes);
            most.saturating_sub(taken).saturating_sub(self.member.bound_bytes())
        });
        let here_limit_bytes = if self.is_ending { 0 } else { limit };
        Surroundings { class: self.member.class(), here_limit_bytes }
    }

    /// Returns the counts that waiting requests depend on: of events, and of changed answers to
    /// programs.
    fn change_counts(&self) -> (u64, u64) {
        (self.event_count, self.ledger.change_count())
    }

    /// Records an event.
    pub(crate) fn tell(&mut self, kind: &str, subject: impl std::fmt::Display, detail: String) {
        self.event_count += 1;
        let event = Event {
            id: self.event_count,
            kind: kind.to_owned(),
            subject: subject.to_string(),
            detail,
            uptime_ms: at_most(self.now.as_millis()),
            time_unix_ms: farpool_kernel::unix_ms(),
        };
        self.events.push_back(event);
        if self.events.len() > EVENTS_LIMIT {
            self.events.pop_front();
        }
    }

    /// Returns the events after the one with this id.
    pub(crate) fn events_after(&self, after: u64) -> Vec<Event> {
        self.events.iter().filter(|event| event.id > after).cloned().collect()
    }
}

/// The name of a class.
pub(crate) fn class_name(class: Class) -> &'static str {
    match class {
        Class::Server => "server",
        Class::Neutral => "neutral",
        Class::Client => "client",
    }
}

/// Returns a grant's id at the blade: its server's id, 0 for own programs, and its epoch.
fn blade_id(grant: GrantId) -> farpool_blade::GrantId {
    farpool_blade::GrantId(u128::from(grant.server.0) << 64 | u128::from(grant.epoch.0))
}

fn is_here_grant(id: farpool_blade::GrantId) -> bool {
    id.0 >> 64 == u128::from(NodeId::ANYONE.0)
}

fn grant_spec(grant: GrantId, key: GrantKey, bytes: u64) -> GrantSpec {
    GrantSpec {
        id: blade_id(grant),
        epoch: grant.epoch.0,
        key: farpool_blade::GrantKey(key.0),
        bytes: bytes.next_multiple_of(SUPERPAGE_BYTES),
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    }
}

/// Returns random bits from the kernel.
pub(crate) fn random_bits() -> u128 {
    let mut bytes = [0; 16];
    // Without the flags that make it fail, the kernel always gives some.
    while fill_random(&mut bytes).is_err() {}
    u128::from_le_bytes(bytes)
}

fn random_key() -> GrantKey {
    // 0 is no key.
    GrantKey(random_bits().max(1))
}
