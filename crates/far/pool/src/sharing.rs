//! Sharing of segments: a process freezes one, its children attach it, and who uses it alone at
//! last thaws it.

use std::sync::Arc;

use crate::account::{Account, PartKey, Thawed};
use crate::map::Place;
use crate::pool::{Ledger, Still};
use crate::seals::Seals;
use crate::shared::SegmentState;
use crate::types::Strands;
use crate::types::{BladeToken, LAPSED, TokenPart, blade_index};
use crate::{BladeIndex, FrozenToken, MAX_BLADES, Pool, PoolError, Redundancy, SegmentHandle};

impl Pool {
    /// Makes the segment immutable, so that a child may share it. No write to it may be in flight.
    /// Freezing a frozen segment returns another token.
    ///
    /// # Errors
    /// A blade refuses or is lost; the segment is then as before.
    pub fn freeze(&self, s: SegmentHandle) -> Result<FrozenToken, PoolError> {
        self.freeze_still(&self.hold_still(), s)
    }

    /// The same while nothing moves: what the token opens is not given up before `still` is
    /// dropped.
    ///
    /// # Errors
    /// As for [`Pool::freeze`].
    pub fn freeze_still(
        &self,
        _still: &Still<'_>,
        s: SegmentHandle,
    ) -> Result<FrozenToken, PoolError> {
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Frozen {
            return Ok(ledger.token(s));
        }
        self.expect_state(s, SegmentState::Writable)?;
        // A place that a superpage has left must not be frozen with the rest: others would find the
        // superpage twice. No write is in flight, so its blade frees it now.
        ledger.free_rest();
        if ledger.unfreed.iter().any(|(handle, ..)| handle.first() == s) {
            return Err(PoolError::Moving);
        }
        self.set_state(s, SegmentState::Frozen);
        ledger.wait_for_lanes();
        for blade in 0..MAX_BLADES {
            let Some(account) = &mut ledger.accounts[blade] else { continue };
            if let Err(error) = self.keys(s).try_for_each(|key| account.freeze(key)) {
                self.note_loss(blade, account);
                if self.can_do_without(account, s, blade) {
                    self.do_without(&mut ledger, s, blade);
                    continue;
                }
                for account in ledger.accounts[..=blade].iter_mut().flatten() {
                    // What cannot be undone shows as refused writes, never as wrong data.
                    self.keys(s).for_each(|key| drop(account.thaw(key)));
                }
                self.set_state(s, SegmentState::Writable);
                return Err(error.into());
            }
        }
        Ok(ledger.token(s))
    }

    /// Checks that every blade that holds memory of a live segment can still share it.
    ///
    /// # Errors
    /// Such a blade is lost, or its control connection is.
    pub fn may_share(&self) -> Result<(), PoolError> {
        let mut ledger = self.ledger();
        for number in 0..MAX_BLADES {
            let moved = ledger.moved(number);
            let is_needed = self.superpages_only_on(blade_index(number)) > 0;
            let Some(account) = &mut ledger.accounts[number] else { continue };
            let answer = account.keep_alive(moved);
            self.note_loss(number, account);
            match answer {
                Ok(true) => {}
                _ if !is_needed => {}
                Ok(false) => {
                    let (address, reason) = (account.address.to_string(), LAPSED.to_owned());
                    return Err(PoolError::BladeLost { address, reason });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The keys of all strands of a segment.
    fn keys(&self, s: SegmentHandle) -> impl Iterator<Item = PartKey> + use<> {
        self.strands(s).flat_map(PartKey::all)
    }

    /// True if the blade takes no more requests, and nothing of the segment is lost with it.
    fn can_do_without(&self, account: &Account, s: SegmentHandle, blade: usize) -> bool {
        account.loss().is_some() && self.superpages_of_only_on(s, blade_index(blade)) == 0
    }

    /// Forgets what of the segment is on such a blade: it must not be looked for there.
    fn do_without(&self, ledger: &mut Ledger, s: SegmentHandle, blade: usize) {
        if let Some(account) = &mut ledger.accounts[blade] {
            self.keys(s).for_each(|key| drop(account.detach(key)));
        }
        let blade = blade_index(blade);
        if self.shared.config.redundancy == Redundancy::Parity {
            return self.forget_strips_on(ledger, s, blade);
        }
        for copy in self.copies(s) {
            self.forget_places(ledger, copy, |_, place| self.is_on(place, blade));
        }
    }

    /// Makes a frozen segment writable again if it has no other users. True if it is writable.
    ///
    /// # Errors
    /// A blade refuses or is lost, or its pages cannot be sealed under another key; the segment
    /// stays frozen.
    pub fn thaw(&self, s: SegmentHandle) -> Result<bool, PoolError> {
        let _still = self.hold_still();
        let mut ledger = self.ledger();
        if self.segment(s).state() == SegmentState::Writable {
            return Ok(true);
        }
        self.expect_state(s, SegmentState::Frozen)?;
        if self.strands(s).any(|strand| ledger.is_copying(strand)) {
            return Ok(false);
        }
        if let Some(seals) = self.segment(s).seals() {
            seals.make_own()?;
        }
        if !self.thaw_parts(&mut ledger, s)? {
            return Ok(false);
        }
        self.publish_parts(&ledger, s);
        ledger.wait_for_lanes();
        ledger.accounts.iter_mut().flatten().for_each(Account::close_retired);
        for strand in self.strands(s) {
            let places = self.segment(strand).map().iter();
            let superpages = places.filter(|(_, place)| !place.is_nowhere()).count() as u64;
            ledger.charged_superpages[strand.index()] = superpages;
        }
        self.set_state(s, SegmentState::Writable);
        Ok(true)
    }

    /// Makes all parts writable, or none.
    fn thaw_parts(&self, ledger: &mut Ledger, s: SegmentHandle) -> Result<bool, PoolError> {
        let mut thawed: Vec<(usize, PartKey)> = Vec::new();
        let mut failed = None;
        for blade in 0..MAX_BLADES {
            let Some(account) = &mut ledger.accounts[blade] else { continue };
            let mut is_without = false;
            for key in self.keys(s) {
                if failed.is_some() || is_without || !account.has_part(key) {
                    continue;
                }
                match account.thaw(key) {
                    Ok(Thawed::Writable) => thawed.push((blade, key)),
                    Ok(Thawed::StillShared) => failed = Some(Ok(false)),
                    Err(_) if self.can_do_without(account, s, blade) => is_without = true,
                    Err(error) => failed = Some(Err(error.into())),
                }
            }
            self.note_loss(blade, account);
            if is_without {
                thawed.retain(|(of, _)| *of != blade);
                self.do_without(ledger, s, blade);
            }
        }
        let Some(failed) = failed else {
            return Ok(true);
        };
        for (blade, key) in thawed {
            if let Some(account) = &mut ledger.accounts[blade] {
                account.freeze(key)?;
            }
        }
        failed
    }

    /// Whether pages are sealed before they leave this host.
    pub fn seals_pages(&self) -> bool {
        self.shared.config.seals_pages
    }

    /// The seals of a segment. None if its pages are stored as they are.
    pub fn seals(&self, s: SegmentHandle) -> Option<Arc<Seals>> {
        self.segment(s).seals()
    }

    /// Encodes the seals that a process on this host needs which shares a frozen segment and lacks
    /// these pages of it. With parity they are those of all pages: a page is made from all others
    /// of its row. None if pages are stored as they are.
    pub fn export_seals(
        &self,
        s: SegmentHandle,
        lacking: impl Iterator<Item = u32>,
    ) -> Option<Vec<u8>> {
        let seals = self.segment(s).seals()?;
        Some(match self.shared.config.redundancy {
            Redundancy::Parity => seals.export(seals.written_pages()),
            Redundancy::Copies(_) => seals.export(lacking),
        })
    }

    /// Shares another client's frozen segment, read only. `seals` are those that the other client
    /// has of it.
    ///
    /// # Errors
    /// The segment is gone, a blade is lost or replaced by another, too many segments are live, or
    /// pages are sealed here and not there, or the other way round.
    pub fn attach(
        &self,
        token: &FrozenToken,
        seals: Option<Seals>,
    ) -> Result<SegmentHandle, PoolError> {
        if seals.is_some() != self.shared.config.seals_pages {
            return Err(PoolError::OtherSeals);
        }
        let mut ledger = self.ledger();
        let handle = self.free_handle()?;
        if let Err(error) = self.attach_parts(&mut ledger, handle, token, seals.as_ref()) {
            self.give_up(&mut ledger, handle);
            return Err(error);
        }
        self.publish_parts(&ledger, handle);
        self.segment(handle).set_seals(seals.map(Arc::new));
        self.set_state(handle, SegmentState::Frozen);
        if self.degraded_superpages() > 0 {
            self.shared.spare.set(false);
        }
        Ok(handle)
    }

    /// The token of another client, which may have its blades in other slots, as it is to be for
    /// this one.
    ///
    /// # Errors
    /// Some of it is on a blade that is none of this pool's.
    pub fn translate(&self, token: &FrozenToken) -> Result<FrozenToken, PoolError> {
        let mut translated = FrozenToken::NONE;
        for (TokenPart { nth, which, .. }, token) in token.iter() {
            let blade = self.blade_with_id(token.blade_id)?;
            let slot = &mut translated.copies[nth][usize::from(blade.0)][usize::from(which)];
            if slot.replace(token).is_some() {
                // No pool has a blade in two slots: these are no token's parts.
                return Err(PoolError::NotOurBlade);
            }
        }
        Ok(translated)
    }

    /// The slot of the blade with this id.
    pub(crate) fn blade_with_id(&self, blade_id: u64) -> Result<BladeIndex, PoolError> {
        let ledger = self.ledger();
        let has_it = |account: &Option<Account>| {
            account.as_ref().is_some_and(|account| account.blade_id() == blade_id)
        };
        let found = ledger.accounts.iter().position(has_it);
        found.map(blade_index).ok_or(PoolError::NotOurBlade)
    }

    fn attach_parts(
        &self,
        ledger: &mut Ledger,
        handle: SegmentHandle,
        token: &FrozenToken,
        seals: Option<&Seals>,
    ) -> Result<(), PoolError> {
        let mut failed = None;
        for (part, token) in token.iter() {
            if part.nth >= self.shared.config.redundancy.strands() {
                return Err(PoolError::OtherCopies);
            }
            if let Err(error) = self.attach_part(ledger, handle, part, token) {
                failed.get_or_insert(error);
            }
        }
        // Of what is lost with a blade there may be other copies, or the rest of its group.
        if let Some(seals) = seals.filter(|_| self.shared.config.redundancy == Redundancy::Parity) {
            self.note_recoverable(handle, seals);
        }
        let is_there = |sma| self.has_place(handle, sma);
        match (failed, seals) {
            (None, _) => Ok(()),
            (Some(_), Some(seals)) if seals.written_superpages().all(is_there) => Ok(()),
            (Some(error), _) => Err(error),
        }
    }

    fn attach_part(
        &self,
        ledger: &mut Ledger,
        handle: SegmentHandle,
        TokenPart { nth, blade, which }: TokenPart,
        token: BladeToken,
    ) -> Result<(), PoolError> {
        let copy = handle.copy(nth);
        let map = self.segment(copy).map();
        let account = ledger.account_of(blade).ok_or(PoolError::NoSuchBlade(blade))?;
        let mut twice = None;
        account.attach(PartKey::of(copy, which), token, |sma, rmma| {
            twice = twice.or(map.get(sma).map(|_| sma));
            map.set(sma, Some(Place::at(blade, which, rmma)));
        })?;
        match twice {
            Some(superpage) => {
                let address = self.describe(blade);
                Err(PoolError::OnTwoBlades { superpage, address })
            }
            None => Ok(()),
        }
    }
}
