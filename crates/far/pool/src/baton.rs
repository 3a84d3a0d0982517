//! A baton: what only one of two clients may have, such as the right to run a guest.
//!
//! It is a segment without memory on one blade, and that blade decides who has it by what it does
//! with any segment:
//! 1. its first owner makes and freezes it, and gives the token away ([`Pool::offer`]);
//! 2. the receiver attaches it, and has no right yet ([`Pool::accept`]);
//! 3. the owner detaches it ([`Pool::let_go`]): from here on it has no right any more;
//! 4. the receiver thaws it ([`Pool::take`]), which a blade allows to the only user, so never
//!    before 3. It owns the baton now, and what the blade has thawed nobody can attach.
//!
//! Between 3 and 4 the owner can attach it again ([`Pool::revoke`]); then the receiver can never
//! thaw it. Each step is one request that a blade carries out or not, so at no time there are two
//! owners. A client that ends, or whose lease ends, has let go.

use farpool_fabric::CallError;
use farpool_wire::{ErrorCode, Request, Response, SegmentId, SegmentToken};

use crate::account::{Account, done};
use crate::types::{BladeToken, blade_index};
use crate::{BladeIndex, MAX_BLADES, Pool, PoolError};

/// One client's share in a baton.
#[derive(Clone, Copy, Debug)]
pub struct Baton {
    blade: BladeIndex,
    token: BladeToken,
    segment: SegmentId,
}

/// What came of an attempt to have a baton back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revoked {
    /// It is the caller's again, and the receiver cannot take it any more.
    Back,
    /// The receiver has taken it.
    Taken,
    /// Nobody has it any more: the receiver has ended, before or after it took it.
    Gone,
}

impl Baton {
    /// What the receiver needs: the blade's id, and what opens the baton there.
    pub fn token(&self) -> (u64, u128) {
        (self.token.blade_id, self.token.token.0)
    }
}

impl Pool {
    /// Makes a baton, which the caller owns, on the first blade that makes one.
    ///
    /// # Errors
    /// No blade does; the error is the last one's.
    pub fn offer(&self) -> Result<Baton, PoolError> {
        let mut ledger = self.ledger();
        let mut last = PoolError::NoBlade;
        for number in 0..MAX_BLADES {
            let Some(account) = &mut ledger.accounts[number] else { continue };
            if account.is_of_client || account.is_leaving {
                continue;
            }
            let made = account.make_baton(blade_index(number));
            self.note_loss(number, account);
            match made {
                Ok(baton) => return Ok(baton),
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    /// Becomes the receiver of another client's baton.
    ///
    /// # Errors
    /// Its blade is none of this pool's or is lost, or the owner has ended.
    pub fn accept(&self, (blade_id, token): (u64, u128)) -> Result<Baton, PoolError> {
        let blade = self.blade_with_id(blade_id)?;
        let token = BladeToken { blade_id, token: SegmentToken(token) };
        let segment = self.at_blade(blade, |account| account.attach_baton(token.token))??;
        Ok(Baton { blade, token, segment })
    }

    /// Gives up the caller's share: an owner is none from here on, a receiver takes nothing.
    ///
    /// # Errors
    /// The blade is lost. Whether it has heard of it is not known: the caller must act as if it
    /// had.
    pub fn let_go(&self, baton: Baton) -> Result<(), PoolError> {
        Ok(self.at_blade(baton.blade, |account| account.detach_baton(baton.segment))??)
    }

    /// Takes a baton that its owner has let go of; who has taken it has. False: the owner has not.
    ///
    /// # Errors
    /// The blade is lost, or does not know the baton any more, because the lease has ended.
    pub fn take(&self, baton: &Baton) -> Result<bool, PoolError> {
        Ok(self.at_blade(baton.blade, |account| account.take_baton(baton.segment))??)
    }

    /// Tries to become the owner again, having let go. `baton` is the share that was.
    ///
    /// # Errors
    /// The blade is lost: it is not known who owns it.
    pub fn revoke(&self, baton: &mut Baton) -> Result<Revoked, PoolError> {
        let token = baton.token.token;
        match self.at_blade(baton.blade, |account| account.attach_baton(token))? {
            Ok(segment) => {
                baton.segment = segment;
                Ok(Revoked::Back)
            }
            Err(CallError::Refused { code: ErrorCode::NotFrozen, .. }) => Ok(Revoked::Taken),
            Err(CallError::Refused { code: ErrorCode::UnknownSegment, .. }) => Ok(Revoked::Gone),
            Err(error) => Err(error.into()),
        }
    }

    fn at_blade<T>(
        &self,
        blade: BladeIndex,
        act: impl FnOnce(&mut Account) -> T,
    ) -> Result<T, PoolError> {
        let mut ledger = self.ledger();
        let account = ledger.account_of(blade).ok_or(PoolError::NoSuchBlade(blade))?;
        let outcome = act(account);
        self.note_loss(blade.0.into(), account);
        Ok(outcome)
    }
}

impl Account {
    fn make_baton(&mut self, blade: BladeIndex) -> Result<Baton, CallError> {
        // It never gets memory.
        let request = Request::CreateSegment { span_superpages: 1 };
        let Response::SegmentCreated { segment, token } = self.control.call(&request)?.response
        else {
            return Err(self.nonsense());
        };
        done(self.control.call(&Request::Freeze { segment }), ErrorCode::Frozen)?;
        Ok(Baton { blade, token: BladeToken { blade_id: self.blade_id(), token }, segment })
    }

    /// A request that had to be repeated may have attached it twice, and gives up one share too few
    /// then: the other side cannot take it, which is safe, until this client ends.
    fn attach_baton(&mut self, token: SegmentToken) -> Result<SegmentId, CallError> {
        match self.control.call(&Request::Attach { token })?.response {
            Response::Attached(list) => Ok(list.segment),
            _ => Err(self.nonsense()),
        }
    }

    fn detach_baton(&mut self, segment: SegmentId) -> Result<(), CallError> {
        done(self.control.call(&Request::Detach { segment }), ErrorCode::UnknownSegment)
    }

    fn take_baton(&mut self, segment: SegmentId) -> Result<bool, CallError> {
        match self.control.call(&Request::Thaw { segment }) {
            // Nobody else could have thawed it.
            Ok(_) | Err(CallError::Refused { code: ErrorCode::NotFrozen, .. }) => Ok(true),
            Err(CallError::Refused { code: ErrorCode::InUse, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
