//! The blades of a pool: they are added, drained and removed; some are lost.
//!
//! Invariants:
//! - A slot is filled while the blade's account exists; both change under the ledger's lock.
//! - A blade is removed only when no superpage of a live segment lies on it, or is half moved to
//!   it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farpool_fabric::{ClientId, Control, Met, Session, Spare};
use farpool_wire::{Address, Purpose};

use crate::account::Account;
use crate::map::Place;
use crate::shared::{Blade, SegmentState, Shared};
use crate::types::{CONTROL_SLOT, LAPSED, blade_index};
use crate::{BladeIndex, BladeSpec, LostBlade, MAX_BLADES, Pool, PoolError, Redundancy};

/// The same, where we still hold the memory.
const LAPSED_BUT_HELD: &str =
    "this client's lease ran out there; its pages stay, but it gets no more memory";

impl Pool {
    /// Connects to one more blade, from which memory is taken from then on as from the others.
    /// # Errors
    /// There are [`MAX_BLADES`] already, TCP to another host without permission, or the blade does
    /// not answer.
    pub fn add_blade(&self, spec: &BladeSpec) -> Result<BladeIndex, PoolError> {
        let free = self.ledger().accounts.iter().position(Option::is_none);
        let full = PoolError::BladeCount { given: MAX_BLADES + 1, limit: MAX_BLADES };
        let blade = blade_index(free.ok_or(full)?);
        self.add_blade_at(blade, spec)?;
        Ok(blade)
    }

    /// The same, into a slot of the caller's choice, which must be empty.
    ///
    /// # Errors
    /// As for [`Pool::add_blade`], or a blade is in the slot.
    pub fn add_blade_at(&self, at: BladeIndex, spec: &BladeSpec) -> Result<(), PoolError> {
        let number = usize::from(at.0);
        let blades = &self.shared.blades;
        let slot = blades.get(number).ok_or(PoolError::NoSuchBlade(at))?;
        // The very first has the configuration's name. All others connect as new clients: a blade
        // may be in several slots, and what it remembers of an earlier time does not matter.
        let is_first = number == 0 && slot.generation.load(Ordering::Acquire) == 0;
        let client = if is_first { self.shared.config.client } else { crate::fresh_client()? };
        let blade = Blade::new(&self.shared, spec, client);
        let control = Control::connect(Arc::clone(&blade.session), CONTROL_SLOT)?;
        let mut ledger = self.ledger();
        if ledger.accounts[number].is_some() {
            return Err(PoolError::SlotInUse(at));
        }
        ledger.accounts[number] = Some(Account::new(control, spec, Arc::clone(&blade.domains)));
        slot.fill(blade);
        Ok(())
    }

    /// Sets whether the blade is to be left: no new memory is taken from it, and a
    /// [`Mover`](crate::Mover) moves away what lies there.
    pub fn set_leaving(&self, blade: BladeIndex, leaving: bool) {
        if let Some(account) = self.ledger().account_of(blade) {
            account.is_leaving = leaving;
        }
    }

    /// Marks a blade that gives memory but takes no pages: others are asked for memory first.
    pub fn set_refusing(&self, blade: BladeIndex) {
        if let Some(account) = self.ledger().account_of(blade) {
            account.is_full = true;
        }
    }

    /// The blades to which pages can be written, as far as is known. Lock-free except for slots
    /// that are changing.
    pub fn usable_blades(&self) -> impl Iterator<Item = BladeIndex> + '_ {
        let slots = self.shared.blades.iter().enumerate();
        slots.filter(|(_, slot)| slot.is_filled() && !slot.is_lost()).map(|(at, _)| blade_index(at))
    }

    /// Ends all use of a blade on which nothing is left.
    ///
    /// # Errors
    /// A superpage is still there: [`PoolError::InUse`].
    pub fn remove_blade(&self, blade: BladeIndex) -> Result<(), PoolError> {
        let _still = self.hold_still();
        let mut ledger = self.ledger();
        let number = usize::from(blade.0);
        if number >= MAX_BLADES {
            return Err(PoolError::NoSuchBlade(blade));
        }
        let superpages = self.superpages_on(blade);
        if superpages > 0 {
            return Err(PoolError::InUse { address: self.describe(blade), superpages });
        }
        let moved = ledger.moved(number);
        ledger.unfreed.retain(|(_, _, place)| place.blade != blade);
        if let Some(mut account) = ledger.accounts[number].take() {
            account.goodbye(moved);
            self.shared.blades[number].empty();
        }
        Ok(())
    }

    /// Superpages of live segments that lie on the blade, or would be lost with it.
    pub fn superpages_on(&self, blade: BladeIndex) -> u64 {
        let live = self.shared.segments.iter().filter(|it| it.state() != SegmentState::Free);
        let is_there = |(_, place): &(u32, Place)| self.is_on(*place, blade);
        live.map(|it| it.map().iter().filter(is_there).count() as u64).sum()
    }

    /// Superpages of live segments, those of several copies for each.
    pub fn superpages_in_all(&self) -> u64 {
        let live = self.shared.segments.iter().filter(|it| it.state() != SegmentState::Free);
        live.map(|it| it.map().iter().count() as u64).sum()
    }

    /// True if what is at this place is on the blade, or a part of it is: it was half moved there.
    pub(crate) fn is_on(&self, place: Place, blade: BladeIndex) -> bool {
        let record = place.record.map(|it| &self.shared.records()[usize::from(it)]);
        let target = record.and_then(|record| record.target());
        place.blade == blade || target.is_some_and(|target| target.blade == blade)
    }

    /// The blade's address, for messages.
    pub fn describe(&self, blade: BladeIndex) -> String {
        let slot = self.shared.blades.get(usize::from(blade.0));
        slot.and_then(|slot| slot.get())
            .map_or_else(|| "unknown".into(), |it| it.description.clone())
    }

    /// The blades that are lost, with the reason. A blade on this host that takes no more requests
    /// is listed too, though pages stored there can still be read and written.
    pub fn lost(&self) -> Vec<LostBlade> {
        let numbered = self.shared.blades.iter().enumerate();
        let lost = numbered.filter_map(|(number, slot)| {
            let blade = slot.get()?;
            let reason = blade.data_loss.get().or_else(|| blade.control_loss.get())?.clone();
            let address = blade.description.clone();
            Some(LostBlade { blade: blade_index(number), address, reason })
        });
        lost.collect()
    }

    /// The shortest lease of any blade: how long it keeps our memory after our last connection has
    /// closed.
    pub fn lease(&self) -> Duration {
        let ledger = self.ledger();
        ledger.accounts.iter().flatten().map(Account::lease).min().unwrap_or(Duration::MAX)
    }

    /// Ensures that every blade still has a connection of ours; to be called about every third of
    /// [`Pool::lease`] by a thread that may wait. Otherwise a break of the only connection to a
    /// blade on this host goes unnoticed. A blade that let the lease expire and forgot us counts as
    /// lost from then on. Over sockets that ends its pages. Over shared memory they stay as they
    /// are, because the blade leaves memory alone whose descriptor we hold: the pager reports
    /// [`Pool::lost`] and goes on, but without new memory for its segments from there.
    pub fn keep_alive(&self) {
        let mut ledger = self.ledger();
        for blade in 0..MAX_BLADES {
            let moved = ledger.moved(blade);
            let Some(account) = &mut ledger.accounts[blade] else { continue };
            if let Ok(false) = account.keep_alive(moved) {
                match account.address {
                    Address::Shm(_) => self.lose_control(blade, LAPSED_BUT_HELD),
                    _ => self.shared.lose(blade, LAPSED),
                }
            }
            self.note_loss(blade, account);
        }
    }

    /// Notes that a blade takes no more requests. If everything on it has other copies, these are
    /// used from now on.
    pub(crate) fn note_loss(&self, blade: usize, account: &Account) {
        let at = blade_index(blade);
        let Some(reason) = account.loss() else { return };
        self.lose_control(blade, &reason);
        let survives = self.shared.config.redundancy.survives_a_blade();
        if survives && !self.is_lost(at) && self.superpages_only_on(at) == 0 {
            self.shared.lose(blade, &reason);
        }
    }

    fn lose_control(&self, blade: usize, reason: &str) {
        if let Some(known) = self.shared.blades[blade].get() {
            known.control_loss.get_or_init(|| reason.to_owned());
        }
    }
}

impl Blade {
    fn new(shared: &Shared, spec: &BladeSpec, client: ClientId) -> Self {
        let config = &shared.config;
        let session = Session {
            address: spec.address.clone(),
            client,
            grant: spec.grant,
            limits: spec.limits.clone(),
            client_name: config.client_name.clone(),
            purpose: Purpose::Client,
            quota_bytes: config.quota_bytes,
            sharing_group: config.sharing_group,
            deadline: config.deadline,
            spare: if spec.is_of_client { Spare::default() } else { shared.spare.clone() },
            allow_remote_tcp: config.allow_remote_tcp,
            secures_tcp: config.secures_tcp,
            asks: config.asks.clone(),
            time: config.time,
            descriptors: Arc::clone(&shared.descriptors),
            met: if spec.is_met { Met::by_parent() } else { Met::default() },
        };
        let domains = std::iter::once(spec.address.failure_domain()).chain(spec.domain.clone());
        // Copies beside each other in memory of one's own would be of no use.
        let is_apart_from_all = spec.is_of_client && config.redundancy == Redundancy::Parity;
        Blade {
            session: Arc::new(session),
            description: spec.address.to_string(),
            domains: domains.filter(|_| !is_apart_from_all).collect(),
            data_loss: OnceLock::new(),
            control_loss: OnceLock::new(),
        }
    }
}
