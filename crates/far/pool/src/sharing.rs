//! Sharing of segments: a process freezes one, its children attach it, and who uses it alone at
//! last thaws it.

use std::sync::Arc;

use crate::account::{Account, PartKey, Thawed};
use crate::map::Place;
use crate::pool::{Ledger, Still};
use crate::seals::Seals;
use crate::shared::SegmentState;
use crate::types::{LAPSED, blade_index};
use crate::{BladeIndex, FrozenToken, MAX_BLADES, Pool, PoolError, SegmentHandle};

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
        if ledger.unfreed.iter().any(|(handle, ..)| *handle == s) {
            return Err(PoolError::Moving);
        }
        self.segment(s).set_state(SegmentState::Frozen);
        ledger.wait_for_lanes();
        for blade in 0..MAX_BLADES {
            let has_places = self.has_places_on(s, blade_index(blade));
            let Some(account) = &mut ledger.accounts[blade] else { continue };
            if let Err(error) = PartKey::all(s).try_for_each(|key| account.freeze(key)) {
                self.note_loss(blade, account);
                if account.loss().is_some() && !has_places {
                    // Nothing of the segment is lost with the blade, and it must not be looked for
                    // there.
                    PartKey::all(s).for_each(|key| drop(account.detach(key)));
                    continue;
                }
                for account in ledger.accounts[..=blade].iter_mut().flatten() {
                    // What cannot be undone shows as refused writes, never as wrong data.
                    PartKey::all(s).for_each(|key| drop(account.thaw(key)));
                }
                self.segment(s).set_state(SegmentState::Writable);
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
            let is_needed = self.superpages_on(blade_index(number)) > 0;
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

    fn has_places_on(&self, s: SegmentHandle, blade: BladeIndex) -> bool {
        self.segment(s).map().iter().any(|(_, place)| place.blade == blade)
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
        if ledger.is_copying(s) {
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
        ledger.charged_superpages[s.index()] = self.segment(s).map().iter().count() as u64;
        self.segment(s).set_state(SegmentState::Writable);
        Ok(true)
    }

    /// Makes all parts writable, or none.
    fn thaw_parts(&self, ledger: &mut Ledger, s: SegmentHandle) -> Result<bool, PoolError> {
        let mut thawed: Vec<(usize, PartKey)> = Vec::new();
        let mut failed = None;
        for blade in 0..MAX_BLADES {
            let Some(account) = &mut ledger.accounts[blade] else { continue };
            for key in PartKey::all(s) {
                if failed.is_some() || !account.has_part(key) {
                    continue;
                }
                match account.thaw(key) {
                    Ok(Thawed::Writable) => thawed.push((blade, key)),
                    Ok(Thawed::StillShared) => failed = Some(Ok(false)),
                    Err(error) => failed = Some(Err(error.into())),
                }
            }
            self.note_loss(blade, account);
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
        if let Err(error) = self.attach_parts(&mut ledger, handle, token) {
            self.give_up(&mut ledger, handle);
            return Err(error);
        }
        self.publish_parts(&ledger, handle);
        self.segment(handle).set_seals(seals.map(Arc::new));
        self.segment(handle).set_state(SegmentState::Frozen);
        Ok(handle)
    }

    fn attach_parts(
        &self,
        ledger: &mut Ledger,
        handle: SegmentHandle,
        token: &FrozenToken,
    ) -> Result<(), PoolError> {
        let map = self.segment(handle).map();
        for (blade, part, token) in token.iter() {
            let account = ledger.account_of(blade).ok_or(PoolError::NoSuchBlade(blade))?;
            let mut twice = None;
            account.attach(PartKey::of(handle, part), token, |sma, rmma| {
                twice = twice.or(map.get(sma).map(|_| sma));
                map.set(sma, Some(Place::at(blade, part, rmma)));
            })?;
            if let Some(superpage) = twice {
                let address = self.describe(blade);
                return Err(PoolError::OnTwoBlades { superpage, address });
            }
        }
        Ok(())
    }
}
