//! The ledger of the simulated world, kept from the actions that nodes request from their shells,
//! never from the nodes' own state. A broken rule panics with the seed.
//!
//! Rules:
//! - A grant is made once, under a key of its own; the memory granted fits below the server's
//!   limit.
//! - A grant becomes usable only while it stands on its server, for this client, with this key.
//! - A server revokes a grant that a client still uses only at a reclaim's deadline (with clocks
//!   that run evenly).
//! - A server never lends more than the highest of its limits within the last deadline.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::ids::{GrantId, GrantKey, NodeId};
use crate::limits::TICK;
use crate::outbox::RevokeReason;

#[derive(Clone, Copy, Debug)]
struct Standing {
    client: NodeId,
    bytes: u64,
    key: GrantKey,
}

/// How long a client waited for all it wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    /// The client.
    pub client: NodeId,
    /// Time from wanting more to having all of it.
    pub wait: Duration,
}

/// The ledger.
#[derive(Debug, Default)]
pub struct Ledger {
    seed: u64,
    /// Clocks run evenly, so that a client's lease ends before the server's.
    pub even_clocks: bool,
    standing: BTreeMap<GrantId, Standing>,
    lent: BTreeMap<NodeId, u64>,
    keys: BTreeSet<GrantKey>,
    made: BTreeSet<GrantId>,
    usable: BTreeSet<(NodeId, GrantId)>,
    died: BTreeSet<GrantId>,
    limits: BTreeMap<NodeId, VecDeque<(Duration, u64)>>,
    waiting_since: BTreeMap<NodeId, Duration>,
    /// Clients served, in order.
    pub served: Vec<Served>,
}

impl Ledger {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, even_clocks: true, ..Self::default() }
    }

    fn rule(&self, holds: bool, now: Duration, broken: impl Fn() -> String) {
        assert!(holds, "at {now:?}: {}; repeat with FARPOOL_SEED={}", broken(), self.seed);
    }

    /// Bytes of grants that stand on a server.
    #[must_use]
    pub fn lent_bytes(&self, server: NodeId) -> u64 {
        self.lent.get(&server).copied().unwrap_or(0)
    }

    /// Grants that stand, anywhere.
    #[must_use]
    pub fn standing(&self) -> usize {
        self.standing.len()
    }

    pub(crate) fn made(
        &mut self,
        grant: GrantId,
        (client, bytes, key): (NodeId, u64, GrantKey),
        limit_bytes: u64,
        now: Duration,
    ) {
        let news = self.made.insert(grant);
        self.rule(news, now, || format!("grant {grant} made twice"));
        let fresh = self.keys.insert(key);
        self.rule(fresh, now, || format!("key of {grant} used before"));
        self.standing.insert(grant, Standing { client, bytes, key });
        *self.lent.entry(grant.server).or_default() += bytes;
        let lent = self.lent_bytes(grant.server);
        self.rule(lent <= limit_bytes, now, || {
            format!("{:?} lends {lent} with a limit of {limit_bytes}", grant.server)
        });
    }

    pub(crate) fn usable(
        &mut self,
        client: NodeId,
        grant: GrantId,
        (bytes, key): (u64, GrantKey),
        now: Duration,
    ) {
        let standing = self.standing.get(&grant).copied();
        let holds = standing
            .is_some_and(|one| one.client == client && one.key == key && one.bytes >= bytes);
        // With uneven clocks the server may have ended the lease before the client saw it begin;
        // and a server may die with its confirmation on the way.
        let excused = !self.even_clocks || self.died.contains(&grant);
        let holds = holds || (excused && standing.is_none());
        self.rule(holds, now, || format!("{client:?} uses {grant}, which is {standing:?}"));
        let news = self.usable.insert((client, grant));
        self.rule(news, now, || format!("{client:?} heard twice that {grant} is usable"));
    }

    pub(crate) fn unused(&mut self, client: NodeId, grant: GrantId) {
        self.usable.remove(&(client, grant));
    }

    pub(crate) fn revoked(&mut self, grant: GrantId, reason: RevokeReason, now: Duration) {
        let standing = self.standing.remove(&grant);
        let Some(Standing { client, bytes, .. }) = standing else {
            self.rule(false, now, || format!("{grant} revoked but does not stand"));
            return;
        };
        if let Some(lent) = self.lent.get_mut(&grant.server) {
            *lent -= bytes;
        }
        let in_use = self.usable.contains(&(client, grant));
        let may = reason == RevokeReason::Deadline || !self.even_clocks;
        self.rule(!in_use || may, now, || {
            format!("{grant} revoked ({reason:?}) while {client:?} uses it")
        });
    }

    /// Removes a node whose process is gone: its grants and its use of others' grants.
    pub(crate) fn crashed(&mut self, node: NodeId) {
        let dies = |grant: &GrantId| grant.server == node;
        self.died.extend(self.standing.keys().copied().filter(dies));
        self.standing.retain(|grant, _| !dies(grant));
        self.lent.remove(&node);
        self.usable.retain(|(client, _)| *client != node);
        self.limits.remove(&node);
        self.waiting_since.remove(&node);
    }

    /// Checks what a server lends against its limits; `limit_bytes` follows from its last observed
    /// use.
    pub(crate) fn look(
        &mut self,
        server: NodeId,
        limit_bytes: u64,
        deadline: Duration,
        now: Duration,
    ) {
        // Two ticks: one by which the deadline is enforced, one by which this check is late.
        let window = now.saturating_sub(deadline + 2 * TICK);
        let limits = self.limits.entry(server).or_default();
        if limits.back().is_none_or(|(_, last)| *last != limit_bytes) {
            limits.push_back((now, limit_bytes));
        }
        while limits.get(1).is_some_and(|(since, _)| *since <= window) {
            limits.pop_front();
        }
        let highest = limits.iter().map(|(_, limit)| *limit).max().unwrap_or(0);
        let lent = self.lent_bytes(server);
        self.rule(lent <= highest || !self.even_clocks, now, || {
            format!(
                "{server:?} still lends {lent}, its limit was at most {highest} for {deadline:?}"
            )
        });
    }

    /// Notes whether a client has all that it wants.
    pub(crate) fn look_client(&mut self, client: NodeId, has_all: bool, now: Duration) {
        if !has_all {
            self.waiting_since.entry(client).or_insert(now);
        } else if let Some(since) = self.waiting_since.remove(&client) {
            self.served.push(Served { client, wait: now.saturating_sub(since) });
        }
    }

    /// Clients that still wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting_since.len()
    }

    /// Checks that both sides agree on every grant: what stands is used, what is used stands.
    ///
    /// # Panics
    /// If they do not agree.
    pub fn check_agreement(&self, now: Duration) {
        for (grant, one) in &self.standing {
            self.rule(self.usable.contains(&(one.client, *grant)), now, || {
                format!("{grant} stands for {:?}, which does not use it", one.client)
            });
        }
        for (client, grant) in &self.usable {
            self.rule(self.standing.contains_key(grant), now, || {
                format!("{client:?} uses {grant}, which does not stand")
            });
        }
    }
}
