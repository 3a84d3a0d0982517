//! Which program of this node has which grant, and how much is to be borrowed; pure.
//!
//! A program's *wish* raises its demand. Nothing is granted at once: [`Ledger::demand_bytes`] is
//! the demand of all programs together from others, and each grant that becomes usable goes to one
//! of them, whole. A node that is a server borrows nothing, so its programs get grants on its own
//! blade ("here") while it has memory.
//!
//! Invariants:
//! - A grant belongs to one program for ever: the blade holds that program's data there. When the
//!   program ends, or has left it, the grant goes back.
//! - Each grant goes back once ([`Effect`]); a lost one never does.
//! - Grants here never pass the limit that held when they were made.
//! - The demand from others is never less than the borrowed memory in use, so that a falling demand
//!   takes no memory from a program that stays.

mod book;
mod effect;
mod views;

use std::collections::BTreeMap;
use std::time::Duration;

use farpool_acms::{Class, Epoch, GrantId, GrantKey, Incarnation, NodeId};
use farpool_api::{ClientId, ClientReport, ClientSpec, SegmentId, SegmentSpec};
use farpool_units::SUPERPAGE_BYTES;

use book::{Account, Program};
pub use book::{Holding, HoldingState, Placement};
pub use effect::{Effect, LedgerError, Wished};
pub use views::{HerePlace, grant_of, segment_of};

/// Programs at once; one beyond is refused. Each costs some hundred bytes.
pub const CLIENTS_MAX: usize = 1_024;
/// Longest name of a host or a program, bytes; a longer one is refused.
pub const NAME_LIMIT_BYTES: usize = 256;
/// Largest wish; a larger one is a mistake, and is refused.
pub const WISH_LIMIT_BYTES: u64 = 1 << 44;
/// Wishes of a program that are remembered, so that one that comes again counts once.
pub const WISHES_KEPT: usize = 16;
/// Grants a program uses at once: what a run asks for of its own accord (its board has eight
/// places).
pub const GRANTS_IN_USE_MAX: usize = 6;
/// With those that are being left: one place stays free for memory that must be spilled.
pub const GRANTS_HELD_MAX: usize = 7;
/// A wish is refused when the one before has waited this long in vain; the missing memory stays
/// wanted.
pub const WISH_PATIENCE: Duration = Duration::from_secs(5);
/// A node that is neither server nor client serves its own programs from its own memory when no
/// other node has for this long.
pub const HERE_PATIENCE: Duration = Duration::from_secs(3);
/// Smallest grant here, unless less is missing: a program has few places for grants.
pub const HERE_MIN_BYTES: u64 = 64 << 20;
/// Shortest and longest lease of a client, as the controller has them.
pub const LEASE_RANGE_MS: std::ops::RangeInclusive<u64> = 1_000..=3_600_000;

/// What the ledger must know of the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Surroundings {
    /// What the node is at the moment.
    pub class: Class,
    /// The bound of grants here in all: the memory below MEM_MAX_LOW that the node's own use and
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
    /// Nobody is there yet. `incarnation` is the daemon's: grants here have its epochs.
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

    /// The next steps.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// A program comes, or tells again what it is. Whether it is new.
    ///
    /// # Errors
    /// A name is too long, the lease is none, or there are too many programs.
    pub fn put_client(
        &mut self,
        id: ClientId,
        spec: ClientSpec,
        now: Duration,
    ) -> Result<bool, LedgerError> {
        for (what, name) in [("host", &spec.host), ("name", &spec.name)] {
            if name.is_empty() || name.len() > NAME_LIMIT_BYTES {
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

    /// A program ends. What it had goes back at once. Whether it was there.
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

    /// A program wants memory.
    ///
    /// # Errors
    /// It is not known, wants nothing or too much, or the wish before has waited in vain.
    pub fn wish(
        &mut self,
        id: SegmentId,
        spec: &SegmentSpec,
        now: Duration,
    ) -> Result<Wished, LedgerError> {
        let client = spec.client.ok_or(LedgerError::NoClient)?;
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
        // A wish on top of one that is still open replaces what of it is missing: a run asks again
        // whenever it sees that it has too little.
        let missing = account.wanted_bytes.saturating_sub(program.ready_bytes());
        account.wanted_bytes = program.ready_bytes().saturating_add(missing.max(bytes));
        account.short_since.get_or_insert(now);
        account.wishes.push_back((id, bytes));
        if account.wishes.len() > WISHES_KEPT {
            account.wishes.pop_front();
        }
        Ok(Wished { client, bytes, is_new: true })
    }

    /// A program says how it stands.
    ///
    /// # Errors
    /// It is not known.
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

    /// A grant of another node may be used: it goes to the program that misses most, or back. Who
    /// got it.
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
            // Something came: programs that still miss some wait anew.
            account.short_since = Some(now);
        }
    }

    /// A grant is to be left. One that no program has is released at once.
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

    /// A grant's memory is gone. Whose it was.
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

    /// Does what is due: ends the silent, gives grants here, has them left when others took over.
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

    /// Memory of this very node, where it has plenty, or no other has.
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
        // A life with 2^32 grants is over: better none than one epoch twice.
        let Some(count) = self.here_count.checked_add(1) else { return };
        self.here_count = count;
        let epoch = Epoch::new(self.incarnation, count);
        // No node has id 0, so no grant of another is called so.
        let grant = GrantId { server: NodeId::ANYONE, epoch };
        let key = fresh_key();
        self.effects.push_back(Effect::GiveHere { grant, key, bytes });
        self.placement(client, grant, Placement { blade: None, key, bytes }, now);
    }

    /// A client's grants here are left once grants of others hold what it wants.
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

    /// What all programs together want from others.
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

    /// Bytes of grants here, those being left included.
    #[must_use]
    pub fn here_bytes(&self) -> u64 {
        let here =
            self.holdings.values().filter(|it| it.is_here() && it.state != HoldingState::Lost);
        here.map(|holding| holding.bytes).sum()
    }

    /// Bytes that programs of this node have on other nodes, by their reports.
    #[must_use]
    pub fn far_bytes(&self) -> u64 {
        let there = self.holdings.values().filter(|holding| !holding.is_here());
        there.map(|holding| holding.used_bytes).sum()
    }

    /// Grows whenever some program is to be told something else.
    #[must_use]
    pub fn change_count(&self) -> u64 {
        self.change_count
    }

    /// Programs.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.book.len()
    }

    /// All grants and who has them.
    pub fn holdings(&self) -> impl Iterator<Item = (GrantId, &Holding)> {
        self.holdings.iter().map(|(grant, holding)| (*grant, holding))
    }

    /// Ends everybody: the node ends.
    pub fn end_all(&mut self) {
        let clients: Vec<ClientId> = self.book.keys().copied().collect();
        for client in clients {
            self.end_client(client);
        }
    }
}
