//! What the pool has on each blade, under its lock: the control connection, and the parts of
//! segments that lie there.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::{Answer, CallError, ConnectError, Control, Descriptor};
use farpool_units::exactly;
use farpool_wire::{
    Address, ErrorCode, FailureDomain, Request, Response, SPAN_LIMIT_SUPERPAGES, SegmentId,
    SegmentState, SegmentToken, SuperpageNumber,
};

use crate::copies::ALL_SEGMENTS;
use crate::types::BladeToken;
use crate::types::PARTS_PER_BLADE;
use crate::{BladeSpec, PoolError, SegmentHandle};

/// Number given for "no descriptor".
const NO_FILE: RawFd = -1;

/// One blade's account.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) control: Control,
    pub(crate) address: Address,
    /// All that it fails with.
    pub(crate) domains: Arc<[FailureDomain]>,
    /// Whether the client itself serves it: other memory is taken first.
    pub(crate) is_of_client: bool,
    /// By [`PartKey`].
    parts: Box<[Option<Part>]>,
    /// Replaced descriptors, which a lane may still be using.
    retired: Vec<SharedFile>,
    /// Superpages that this pool got from it, to spread evenly.
    pub(crate) allocated_superpages: u64,
    /// It refused an allocation for lack of memory, and nothing was freed since.
    pub(crate) is_full: bool,
    /// No new memory is taken from it.
    pub(crate) is_leaving: bool,
    /// Reconnections of the control connection after which our segments were found to be still
    /// there.
    reconnects_checked: u64,
}

/// A part of a segment on this blade: one segment of the blade's own.
#[derive(Debug)]
struct Part {
    id: SegmentId,
    token: SegmentToken,
    file: Option<SharedFile>,
    role: PartRole,
}

/// The role of a part while frozen memory moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartRole {
    /// The part itself.
    Own,
    /// An incomplete copy of a frozen part on another blade.
    Filling,
    /// The original of a complete copy: given up as soon as no process can ask for it any more.
    Superseded,
}

#[derive(Debug)]
struct SharedFile {
    descriptor: Descriptor,
    writable: bool,
}

/// One of the parts that a segment may have on a blade. Usually there is only the first; the others
/// come from frozen memory that moved to a blade where the segment had a part already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartKey(usize);

impl PartKey {
    pub(crate) fn of(segment: SegmentHandle, which: u8) -> Self {
        let which = usize::from(which);
        assert!(which < PARTS_PER_BLADE, "part {which} of a segment on one blade");
        PartKey(segment.index() + ALL_SEGMENTS * which)
    }

    pub(crate) fn all(segment: SegmentHandle) -> impl Iterator<Item = PartKey> {
        parts().map(move |which| PartKey::of(segment, which))
    }
}

/// The numbers of a segment's parts on one blade.
pub(crate) fn parts() -> impl Iterator<Item = u8> {
    (0_u8..).take(PARTS_PER_BLADE)
}

/// The result of thawing on one blade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thawed {
    Writable,
    StillShared,
}

impl Account {
    pub(crate) fn new(control: Control, spec: &BladeSpec, domains: Arc<[FailureDomain]>) -> Self {
        Account {
            control,
            address: spec.address.clone(),
            domains,
            is_of_client: spec.is_of_client,
            parts: (0..ALL_SEGMENTS * PARTS_PER_BLADE).map(|_| None).collect(),
            retired: Vec::new(),
            allocated_superpages: 0,
            is_full: false,
            is_leaving: false,
            reconnects_checked: 0,
        }
    }

    /// The number that the blade's process made itself when it started.
    pub(crate) fn blade_id(&self) -> u64 {
        self.control.hello().blade_id
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.control.hello().capacity_bytes
    }

    /// Why it takes no more requests, without its address.
    pub(crate) fn loss(&self) -> Option<String> {
        self.control.loss().map(|loss| match loss {
            ConnectError::Lost { reason, .. } => reason.clone(),
            other => other.to_string(),
        })
    }

    /// True if the blade is not used any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.control.is_given_up()
    }

    /// The part's number on the blade and the descriptor of its memory.
    pub(crate) fn part(&self, key: PartKey) -> Option<(SegmentId, RawFd)> {
        let part = self.parts[key.0].as_ref()?;
        let file = part.file.as_ref().map_or(NO_FILE, |it| it.descriptor.as_fd().as_raw_fd());
        Some((part.id, file))
    }

    pub(crate) fn has_part(&self, key: PartKey) -> bool {
        self.parts[key.0].is_some()
    }

    /// The part that a copy of frozen memory goes into: an incomplete one, else a free one.
    pub(crate) fn filling_part(&self, segment: SegmentHandle) -> Option<u8> {
        let is = |which: &u8, wanted: fn(&Option<Part>) -> bool| {
            wanted(&self.parts[PartKey::of(segment, *which).0])
        };
        let is_filling =
            |part: &Option<Part>| part.as_ref().is_some_and(|part| part.role == PartRole::Filling);
        parts()
            .find(|which| is(which, is_filling))
            .or_else(|| parts().find(|it| is(it, Option::is_none)))
    }

    /// True if the part is an incomplete copy.
    pub(crate) fn is_filling(&self, key: PartKey) -> bool {
        self.parts[key.0].as_ref().is_some_and(|part| part.role == PartRole::Filling)
    }

    pub(crate) fn set_role(&mut self, key: PartKey, role: PartRole) {
        if let Some(part) = &mut self.parts[key.0] {
            part.role = role;
        }
    }

    /// The token that opens the part to others, if it may be handed on.
    pub(crate) fn token(&self, key: PartKey) -> Option<BladeToken> {
        let is_own = self.parts[key.0].as_ref().is_some_and(|part| part.role == PartRole::Own);
        self.any_token(key).filter(|_| is_own)
    }

    /// The token that opens the part, whatever its role.
    pub(crate) fn any_token(&self, key: PartKey) -> Option<BladeToken> {
        let part = self.parts[key.0].as_ref()?;
        Some(BladeToken { blade_id: self.blade_id(), token: part.token })
    }

    fn id(&self, key: PartKey) -> Option<SegmentId> {
        self.parts[key.0].as_ref().map(|part| part.id)
    }

    /// Allocates one superpage of the segment here. Returns its place in the segment's memory.
    pub(crate) fn allocate(&mut self, key: PartKey, sma: u32) -> Result<u32, CallError> {
        let id = match self.id(key) {
            Some(id) => id,
            None => self.create(key)?,
        };
        let request =
            Request::AllocateSuperpages { segment: id, first: SuperpageNumber(sma), count: 1 };
        let rmma = match self.control.call(&request) {
            Ok(answer) => rmma_of(&answer, sma),
            Err(error) if already(&error, ErrorCode::AlreadyAllocated) => None,
            Err(error) => return Err(error),
        };
        let rmma = match rmma {
            Some(rmma) => rmma,
            None => self.look_up(id, sma)?,
        };
        self.share(key, true)?;
        self.allocated_superpages += 1;
        Ok(rmma)
    }

    fn create(&mut self, key: PartKey) -> Result<SegmentId, CallError> {
        let request = Request::CreateSegment { span_superpages: SPAN_LIMIT_SUPERPAGES };
        match self.control.call(&request)?.response {
            Response::SegmentCreated { segment: id, token } => {
                self.parts[key.0] = Some(Part { id, token, file: None, role: PartRole::Own });
                Ok(id)
            }
            _ => Err(self.nonsense()),
        }
    }

    /// Finds the superpage in the blade's own list.
    fn look_up(&mut self, id: SegmentId, sma: u32) -> Result<u32, CallError> {
        let mut found = None;
        self.list(id, 0, |at, rmma| {
            if at == sma {
                found = Some(rmma);
            }
        })?;
        found.ok_or_else(|| self.nonsense())
    }

    /// Calls `each` for every superpage of the segment from the `skip`th on.
    fn list(
        &mut self,
        segment: SegmentId,
        skip: u32,
        mut each: impl FnMut(u32, u32),
    ) -> Result<(), CallError> {
        let mut skip = skip;
        loop {
            let answer = self.control.call(&Request::ListSuperpages { segment, skip })?;
            let Response::Attached(list) = answer.response else {
                return Err(self.nonsense());
            };
            list.superpages.iter().for_each(|pair| each(pair.sma().0, pair.rmma().0));
            let told = exactly(list.superpages.len());
            skip = skip.saturating_add(told);
            if told == 0 || skip >= list.allocated_superpages {
                return Ok(());
            }
        }
    }

    /// Gets the descriptor of the part's memory, if the transport has one and it is not held yet.
    fn share(&mut self, key: PartKey, writable: bool) -> Result<(), CallError> {
        if !matches!(self.address, Address::Shm(_)) {
            return Ok(());
        }
        let Some(part) = &self.parts[key.0] else {
            return Ok(());
        };
        if part.file.as_ref().is_some_and(|file| file.writable || !writable) {
            return Ok(());
        }
        let answer = self.control.call(&Request::ShmMap { segment: part.id })?;
        let (Response::ShmMapped { writable: is_writable, .. }, Some(descriptor)) =
            (answer.response, answer.file)
        else {
            return Err(self.nonsense());
        };
        let file = SharedFile { descriptor, writable: is_writable };
        if let Some(part) = &mut self.parts[key.0] {
            self.retired.extend(part.file.replace(file));
        }
        Ok(())
    }

    /// Frees a superpage's memory. A blade that refuses keeps it; a lost one has nothing any more.
    pub(crate) fn free(&mut self, key: PartKey, sma: u32) -> Result<(), CallError> {
        let Some(segment) = self.id(key) else {
            return Ok(());
        };
        let request = Request::FreeSuperpages { segment, first: SuperpageNumber(sma), count: 1 };
        let freed = done(self.control.call(&request), ErrorCode::NotAllocated);
        if !matches!(freed, Err(CallError::Refused { .. })) {
            self.allocated_superpages = self.allocated_superpages.saturating_sub(1);
            self.is_full = false;
        }
        freed
    }

    pub(crate) fn freeze(&mut self, key: PartKey) -> Result<(), CallError> {
        match self.id(key) {
            Some(segment) => {
                done(self.control.call(&Request::Freeze { segment }), ErrorCode::Frozen)
            }
            None => Ok(()),
        }
    }

    pub(crate) fn thaw(&mut self, key: PartKey) -> Result<Thawed, CallError> {
        let Some(id) = self.id(key) else {
            return Ok(Thawed::Writable);
        };
        let answer = self.control.call(&Request::Thaw { segment: id });
        match done(answer, ErrorCode::NotFrozen) {
            Ok(()) => {
                self.share(key, true)?;
                Ok(Thawed::Writable)
            }
            Err(CallError::Refused { code: ErrorCode::InUse, .. }) => Ok(Thawed::StillShared),
            Err(error) => Err(error),
        }
    }

    /// Becomes a user of the frozen part that the token opens. Calls `each` with each superpage and
    /// its place.
    pub(crate) fn attach(
        &mut self,
        key: PartKey,
        token: BladeToken,
        mut each: impl FnMut(u32, u32),
    ) -> Result<(), PoolError> {
        if token.blade_id != self.blade_id() {
            return Err(PoolError::OtherBlade { address: self.address.to_string() });
        }
        let answer = self.control.call(&Request::Attach { token: token.token })?;
        let Response::Attached(list) = answer.response else {
            return Err(self.nonsense().into());
        };
        let (id, state, all) = (list.segment, list.state, list.allocated_superpages);
        list.superpages.iter().for_each(|pair| each(pair.sma().0, pair.rmma().0));
        let told = exactly(list.superpages.len());
        self.parts[key.0] = Some(Part { id, token: token.token, file: None, role: PartRole::Own });
        if state != SegmentState::Frozen {
            return Err(self.nonsense().into());
        }
        if told < all {
            self.list(id, told, each)?;
        }
        Ok(self.share(key, false)?)
    }

    /// Gives the part up, whether or not the request succeeds.
    pub(crate) fn detach(&mut self, key: PartKey) -> Result<(), CallError> {
        let Some(part) = self.parts[key.0].take() else {
            return Ok(());
        };
        self.is_full = false;
        let request = Request::Detach { segment: part.id };
        done(self.control.call(&request), ErrorCode::UnknownSegment)
    }

    /// Subtracts superpages that were freed with their parts.
    pub(crate) fn give_back(&mut self, superpages: u64) {
        self.allocated_superpages = self.allocated_superpages.saturating_sub(superpages);
    }

    /// Closes replaced descriptors; every lane has been outside since the new ones were published.
    pub(crate) fn close_retired(&mut self) {
        self.retired.clear();
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.control.hello().lease_ms))
    }

    /// Ensures that a connection stands, and reports what was moved through shared memory. After a
    /// reconnection, asks whether the blade still knows our segments. False if it does not, because
    /// the lease expired.
    pub(crate) fn keep_alive(&mut self, moved: (u64, u64)) -> Result<bool, CallError> {
        self.report(moved)?;
        if self.control.reconnects() == self.reconnects_checked {
            return Ok(true);
        }
        let ids: Vec<SegmentId> = self.parts.iter().flatten().map(|part| part.id).collect();
        for segment in ids {
            let skip = u32::MAX;
            match self.control.call(&Request::ListSuperpages { segment, skip }) {
                Ok(_) => {}
                Err(CallError::Refused { code: ErrorCode::UnknownSegment, .. }) => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        self.reconnects_checked = self.control.reconnects();
        Ok(true)
    }

    /// Reports to the blade what it cannot see itself, and nothing else.
    fn report(&mut self, (pages_read, pages_written): (u64, u64)) -> Result<(), CallError> {
        let request = match self.address {
            Address::Shm(_) => Request::Report { pages_read, pages_written },
            _ => Request::Ping,
        };
        self.control.call(&request)?;
        Ok(())
    }

    pub(crate) fn goodbye(&mut self, moved: (u64, u64)) {
        // A blade that cannot be told notices when the lease expires.
        let _ = self.report(moved);
        let _ = self.control.call(&Request::Goodbye);
    }

    /// The error for an answer that is well-formed but impossible.
    pub(crate) fn nonsense(&self) -> CallError {
        CallError::Refused {
            address: self.address.to_string(),
            code: ErrorCode::BadFrame,
            detail: 0,
            repeated: false,
        }
    }
}

fn rmma_of(answer: &Answer<'_>, sma: u32) -> Option<u32> {
    match answer.response {
        Response::Allocated { superpages: [pair] } if pair.sma().0 == sma => Some(pair.rmma().0),
        _ => None,
    }
}

/// True if a repeated request was refused because its first copy was carried out.
fn already(error: &CallError, by: ErrorCode) -> bool {
    matches!(error, CallError::Refused { code, repeated: true, .. } if *code == by)
}

pub(crate) fn done(
    answer: Result<Answer<'_>, CallError>,
    already_done: ErrorCode,
) -> Result<(), CallError> {
    match answer {
        Ok(_) => Ok(()),
        Err(error) if already(&error, already_done) => Ok(()),
        Err(error) => Err(error),
    }
}
