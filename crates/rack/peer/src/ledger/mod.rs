//! Which program of this node has which grant, and how much is to be borrowed; pure.
//!
//! A program's *wish* raises its demand. Nothing is granted at once: [`Ledger::demand_bytes`] is
//! what all programs together want from other nodes, and each grant that becomes usable goes to one
//! of them, whole. A node that is a server borrows nothing, so its programs get grants on its own
//! blade ("here") while it has memory.
//!
//! Invariants:
//! - A grant belongs to one program for ever: the blade holds that program's data there. When the
//!   program ends, or has left the grant, the grant goes back.
//! - Each grant goes back once ([`Effect`]); a lost grant never does.
//! - Grants here never exceed the limit at the time they were made.
//! - The demand from others is never less than the borrowed memory in use, so that a falling demand
//!   takes no memory from a program that stays.

mod book;
mod effect;
mod views;

use std::collections::BTreeMap;
use std::time::Duration;

use farpool_acms::{Class, Epoch, GrantId, GrantKey, Incarnation, NodeId};
use farpool_api::{ClientId, ClientReport, ClientSpec, DEFAULT_TENANT, SegmentId, SegmentSpec};
use farpool_units::{SUPERPAGE_BYTES, is_unprintable};

use book::{Account, Program};
pub use book::{Holding, HoldingState, Placement};
pub use effect::{Effect, LedgerError, Wished};
pub use views::{HerePlace, grant_of, segment_of};

/// Most programs at once; a further one is refused. Each costs a few hundred bytes.
pub const CLIENTS_MAX: usize = 1_024;
/// Longest name of a host or a program, in bytes; a longer one is refused.
pub const NAME_LIMIT_BYTES: usize = 256;
/// Largest wish, in bytes; a larger one is a mistake, and is refused.
pub const WISH_LIMIT_BYTES: u64 = 1 << 44;
/// Wishes of a program that are remembered, so that a repeated one counts once.
pub const WISHES_KEPT: usize = 16;
/// Most grants that a program uses at once: as many as a run requests by itself (its board has
/// eight places).
pub const GRANTS_IN_USE_MAX: usize = 6;
/// Most grants of a program including those being left: one place stays free for memory that must
/// be spilled.
pub const GRANTS_HELD_MAX: usize = 7;
/// A wish is refused if the previous one has waited in vain for this long; the missing memory stays
/// wanted.
pub const WISH_PATIENCE: Duration = Duration::from_secs(5);
/// How long a node that is neither server nor client waits for other nodes before it serves its own
/// programs from its own memory.
pub const HERE_PATIENCE: Duration = Duration::from_secs(3);
/// Smallest grant here, in bytes, unless less is missing: a program has few places for grants.
pub const HERE_MIN_BYTES: u64 = 64 << 20;
/// Shortest and longest lease of a client in ms, as at the controller.
pub const LEASE_RANGE_MS: std::ops::RangeInclusive<u64> = 1_000..=3_600_000;

/// What the ledger needs to know about the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Surroundings {
    /// The node's present class.
    pub class: Class,
    /// Limit of all grants here, in bytes: the memory below MEM_MAX_LOW that the node's own use and
    /// lending leave.
    pub here_limit_bytes: u64,
}

/// All programs of the node and the grants they have.
#[derive(Debug)]
pub struct Ledger {
    book: BTreeMap<ClientId, Account>,
    holdings: BTreeMap<GrantId, Holding>,
    around: Surroundings,
    incarnation: Incarnation,
    here_count: u32,
    change_count: u64,
    effects: std::collections::VecDeque<Effect>,
}

impl Ledger {
    /// Returns a ledger without programs. `incarnation` is the daemon's: grants here have its
    /// epochs.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self {
            book: BTreeMap::new(),
            holdings: BTreeMap::new(),
            around: Surroundings { class: Class::Neutral, here_limit_bytes: 0 },
            incarnation,
            here_count: 0,
            change_count: 0,
            effects: std::collections::VecDeque::new(),
        }
    }

    /// Returns the next action to carry out. None if there is none.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Registers a program, or updates what it says about itself. Returns whether it is new.
    ///
    /// # Errors
    /// A name is empty or too long, the lease is out of range, or there are too many programs.
    pub fn put_client(
        &mut self,
        id: ClientId,
        spec: ClientSpec,
        now: Duration,
    ) -> Result<bool, LedgerError> {
        for (what, name) in [("host", &spec.host), ("name", &spec.name)] {
            let is_plain = !name.chars().any(is_unprintable);
            if name.is_empty() || name.len() > NAME_LIMIT_BYTES || !is_plain {
                return Err(LedgerError::Name { what, limit: NAME_LIMIT_BYTES });
            }
        }
        if !LEASE_RANGE_MS.contains(&spec.lease_ms) {
            return Err(LedgerError::Lease(spec.lease_ms));
        }
        if let Some(account) = self.book.get_mut(&id) {
            account.spec = spec;
            account.heard_at = now;
            return Ok(false);
        }
        if self.book.len() >= CLIENTS_MAX {
            return Err(LedgerError::TooManyClients);
        }
        self.book.insert(id, Account::new(spec, now));
        Ok(true)
    }

    /// Refuses if a client is not one of `tenant`, for which alone a program speaks; None speaks
    /// for all. A client that is not there is nobody's.
    ///
    /// # Errors
    /// [`LedgerError::Foreign`].
    pub fn check_owns(&self, tenant: Option<&str>, id: ClientId) -> Result<(), LedgerError> {
        let (Some(tenant), Some(account)) = (tenant, self.book.get(&id)) else { return Ok(()) };
        if account.spec.tenant.as_deref().unwrap_or(DEFAULT_TENANT) == tenant {
            return Ok(());
        }
        let what = format!("client {id}");
        Err(LedgerError::Foreign { tenant: tenant.to_owned(), what })
    }

    /// Ends a program. Its grants go back at once. Returns whether it was known.
    pub fn end_client(&mut self, id: ClientId) -> bool {
        if self.book.remove(&id).is_none() {
            return false;
        }
        self.change_count += 1;
        let had = self.holdings.extract_if(.., |_, holding| holding.client == id);
        for (grant, holding) in had {
            if holding.state != HoldingState::Lost {
                self.effects.push_back(holding.given_back(grant));
            }
        }
        true
    }

    /// Accepts a program's wish for memory.
    ///
    /// # Errors
    /// The program is not known or not given, wants copies, nothing or too much, has as many grants
    /// as it can use, has used the id for another size, or has waited in vain for its previous
    /// wish.
    pub fn wish(
        &mut self,
        id: SegmentId,
        spec: &SegmentSpec,
        now: Duration,
    ) -> Result<Wished, LedgerError> {
        let client = spec.client.ok_or(LedgerError::NoClient)?;
        if spec.apart {
            return Err(LedgerError::Apart);
        }
        if spec.bytes == 0 || spec.bytes > WISH_LIMIT_BYTES {
            return Err(LedgerError::Size { bytes: spec.bytes });
        }
        let bytes = spec.bytes.next_multiple_of(SUPERPAGE_BYTES);
        let program = self.program(client);
        let account = self.book.get_mut(&client).ok_or(LedgerError::NoSuchClient(client))?;
        if let Some((_, before)) = account.wishes.iter().find(|(wish, _)| *wish == id) {
            return match *before == bytes {
                true => Ok(Wished { client, bytes, is_new: false }),
                false => Err(LedgerError::Changed(id)),
            };
        }
        if program.is_full() {
            return Err(LedgerError::Full { limit: GRANTS_IN_USE_MAX });
        }
        let waited = account.short_since.map(|since| now.saturating_sub(since));
        if waited.is_some_and(|waited| waited >= WISH_PATIENCE) {
            let missing_bytes = account.wanted_bytes.saturating_sub(program.ready_bytes());
            return Err(LedgerError::NoRoom { missing_bytes, wanted_bytes: account.wanted_bytes });
        }
        // While a wish is open, another one raises what is missing only if it is larger: a run asks
        // again whenever it has too little.
        let missing = account.wanted_bytes.saturating_sub(program.ready_bytes());
        account.wanted_bytes = program.ready_bytes().saturating_add(missing.max(bytes));
        account.short_since.get_or_insert(now);
        account.wishes.push_back((id, bytes));
        if account.wishes.len() > WISHES_KEPT {
            account.wishes.pop_front();
        }
        Ok(Wished { client, bytes, is_new: true })
    }

    /// Takes a program's report into account.
    ///
    /// # Errors
    /// The program is not known.
    pub fn report(
        &mut self,
        id: ClientId,
        report: &ClientReport,
        now: Duration,
    ) -> Result<(), LedgerError> {
        let account = self.book.get_mut(&id).ok_or(LedgerError::NoSuchClient(id))?;
        account.heard_at = now;
        if report.sequence <= account.sequence {
            return Ok(());
        }
        account.sequence = report.sequence;
        for told in &report.segments {
            let grant = grant_of(told.id);
            let Some(holding) = self.holdings.get_mut(&grant) else { continue };
            if holding.client != id || grant.epoch.0 != told.epoch {
                continue;
            }
            let has_left = told.evacuated && holding.is_moving();
            if has_left {
                self.effects.push_back(holding.given_back(grant));
                self.holdings.remove(&grant);
                account.version += 1;
                self.change_count += 1;
            } else if holding.state != HoldingState::Lost {
                holding.used_bytes = told.used_bytes.min(holding.bytes);
            }
        }
        Ok(())
    }

    /// Gives a grant of another node that became usable to the program that misses most, or back if
    /// none misses anything. Returns the program that got it.
    pub fn usable(
        &mut self,
        grant: GrantId,
        placement: Placement,
        now: Duration,
    ) -> Option<ClientId> {
        let missing = |id: &ClientId, account: &Account| {
            self.program(*id).missing_from_others(account.wanted_bytes, self.around.class)
        };
        let most = self.book.iter().map(|(id, account)| (missing(id, account), *id));
        let most = most.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes);
        let Some((_, client)) = most else {
            self.effects.push_back(Effect::Evacuated(grant));
            return None;
        };
        self.placement(client, grant, placement, now);
        Some(client)
    }

    fn placement(&mut self, client: ClientId, grant: GrantId, placement: Placement, now: Duration) {
        self.holdings.insert(grant, Holding::new(client, placement));
        self.touch(client);
        if let Some(account) = self.book.get_mut(&client) {
            // Memory came: if the program still misses some, its wait begins again.
            account.short_since = Some(now);
        }
    }

    /// Notes that a grant must be left. A grant that no program has is released at once.
    pub fn move_out(&mut self, grant: GrantId, deadline: Option<Duration>) {
        match self.holdings.get_mut(&grant) {
            Some(holding) if holding.state != HoldingState::Lost => {
                holding.state = HoldingState::Moving { deadline };
                let client = holding.client;
                self.touch(client);
            }
            Some(_) => {}
            None => self.effects.push_back(Effect::Evacuated(grant)),
        }
    }

    /// Notes that a grant's memory is gone. Returns the program that had it.
    pub fn lost(&mut self, grant: GrantId) -> Option<ClientId> {
        let holding = self.holdings.get_mut(&grant)?;
        holding.state = HoldingState::Lost;
        holding.used_bytes = 0;
        let client = holding.client;
        self.touch(client);
        Some(client)
    }

    fn touch(&mut self, client: ClientId) {
        self.change_count += 1;
        if let Some(account) = self.book.get_mut(&client) {
            account.version += 1;
        }
    }

    /// Does what is due: ends silent programs, makes grants here, and has these left once others
    /// have replaced them.
    pub fn settle(
        &mut self,
        around: Surroundings,
        now: Duration,
        fresh_key: &mut impl FnMut() -> GrantKey,
    ) {
        self.around = around;
        let is_silent = |account: &Account| {
            now.saturating_sub(account.heard_at) > Duration::from_millis(account.spec.lease_ms)
        };
        let silent: Vec<ClientId> =
            self.book.iter().filter(|(_, it)| is_silent(it)).map(|(id, _)| *id).collect();
        for id in silent {
            self.end_client(id);
            self.effects.push_back(Effect::Silent(id));
        }
        let clients: Vec<ClientId> = self.book.keys().copied().collect();
        for client in clients {
            self.note_shortage(client, now);
            self.give_here(client, now, fresh_key);
            self.leave_here(client);
        }
    }

    fn note_shortage(&mut self, client: ClientId, now: Duration) {
        let program = self.program(client);
        let Some(account) = self.book.get_mut(&client) else { return };
        if account.wanted_bytes <= program.ready_bytes() || program.is_full() {
            account.short_since = None;
        } else {
            account.short_since.get_or_insert(now);
        }
    }

    /// Grants memory of this node if it has plenty, or if no other node has any.
    fn give_here(
        &mut self,
        client: ClientId,
        now: Duration,
        fresh_key: &mut impl FnMut() -> GrantKey,
    ) {
        let Some(account) = self.book.get(&client) else { return };
        let program = self.program(client);
        let missing = account.wanted_bytes.saturating_sub(program.ready_bytes());
        let waited = account.short_since.map(|since| now.saturating_sub(since));
        let may = match self.around.class {
            Class::Server => true,
            Class::Neutral => waited.is_some_and(|waited| waited >= HERE_PATIENCE),
            Class::Client => false,
        };
        let room = self.around.here_limit_bytes.saturating_sub(self.here_bytes());
        let bytes = missing.min(room / SUPERPAGE_BYTES * SUPERPAGE_BYTES);
        if !may || program.is_full() || bytes == 0 || bytes < missing.min(HERE_MIN_BYTES) {
            return;
        }
        // After 2^32 grants there are no more in this life: better none than one epoch twice.
        let Some(count) = self.here_count.checked_add(1) else { return };
        self.here_count = count;
        // Only for this node's blade, where a key opens it: it may be guessed.
        let epoch = Epoch(u64::from(self.incarnation.0) << 32 | u64::from(count));
        // No node has id 0, so no grant of another node has this id.
        let grant = GrantId { server: NodeId::ANYONE, epoch };
        let key = fresh_key();
        self.effects.push_back(Effect::GiveHere { grant, key, bytes });
        self.placement(client, grant, Placement { blade: None, key, bytes }, now);
    }

    /// Has a program's grants here left once grants of others hold what it wants.
    fn leave_here(&mut self, client: ClientId) {
        if self.around.class != Class::Client {
            return;
        }
        let Some(wanted) = self.book.get(&client).map(|account| account.wanted_bytes) else {
            return;
        };
        let mut ready = self.program(client).ready_bytes();
        let mut left = 0;
        for holding in self.holdings.values_mut() {
            let is_here = holding.client == client && holding.is_here();
            if is_here && holding.is_ready() && ready.saturating_sub(holding.bytes) >= wanted {
                ready -= holding.bytes;
                holding.state = HoldingState::Moving { deadline: None };
                left += 1;
            }
        }
        if left > 0 {
            self.touch(client);
        }
    }

    /// Returns the bytes that all programs together want from other nodes.
    #[must_use]
    pub fn demand_bytes(&self) -> u64 {
        let of = |(id, account): (&ClientId, &Account)| {
            let program = self.program(*id);
            let missing = program.missing_from_others(account.wanted_bytes, self.around.class);
            program.others_bytes.saturating_add(missing)
        };
        self.book.iter().map(of).fold(0, u64::saturating_add)
    }

    fn program(&self, client: ClientId) -> Program {
        Program::of(self.holdings.values().filter(|holding| holding.client == client))
    }

    /// Returns the bytes of grants here, including those being left.
    #[must_use]
    pub fn here_bytes(&self) -> u64 {
        let here =
            self.holdings.values().filter(|it| it.is_here() && it.state != HoldingState::Lost);
        here.map(|holding| holding.bytes).sum()
    }

    /// Returns the bytes that programs of this node use on other nodes, by their reports.
    #[must_use]
    pub fn far_bytes(&self) -> u64 {
        let there = self.holdings.values().filter(|holding| !holding.is_here());
        there.map(|holding| holding.used_bytes).sum()
    }

    /// Grows whenever the answer to some program changes.
    #[must_use]
    pub fn change_count(&self) -> u64 {
        self.change_count
    }

    /// Number of programs.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.book.len()
    }

    /// Returns all grants, with the programs that have them.
    pub fn holdings(&self) -> impl Iterator<Item = (GrantId, &Holding)> {
        self.holdings.iter().map(|(grant, holding)| (*grant, holding))
    }

    /// Ends all programs, because the node ends.
    pub fn end_all(&mut self) {
        let clients: Vec<ClientId> = self.book.keys().copied().collect();
        for client in clients {
            self.end_client(client);
        }
    }
}
