//! The blade's table: which client has which superpages, and what each may do. Pure: no I/O, no
//! clock; `now` is the time since the blade started.
//!
//! It is generic over `M`, the handle of a segment's memory, which it keeps and returns but never
//! inspects.
//!
//! Invariants:
//! - A segment exists as long as it has a user. A writable segment has exactly one user with one
//!   use: its owner.
//! - An RMMA superpage of a segment belongs to at most one SMA superpage, and is not handed out
//!   again before [`Table::scrubbed`] says that it is zero.
//! - `used_superpages` counts superpages with memory and those waiting to be scrubbed; it is above
//!   capacity only after that was lowered, and then nothing more is handed out.
//! - Each segment is charged to exactly one of its users: its owner, or after the owner has left
//!   the oldest of the others. A charge that moves may lift a client over its quota; it then gets
//!   nothing more.
//! - A refused operation changes nothing.

mod access;
mod client;
mod grant;
#[cfg(test)]
mod grant_tests;
#[cfg(test)]
mod identity_tests;
mod image;
#[cfg(test)]
mod image_tests;
mod segment;
#[cfg(test)]
mod tests;

pub use access::{Access, Permit, Run, WriteGuard};
pub use client::{ClientCounters, ClientNumber, ClientView, Connected, Origin};
pub use image::{ClientRow, GrantRow, Image, ImageError, Row, SegmentImage, SegmentRow};

pub use grant::{
    ENDED_LIMIT, GRANTS_LIMIT, GrantError, GrantId, GrantPass, GrantSpec, GrantStat, GrantTraffic,
};

use client::Client;
use farpool_units::{SUPERPAGE_BYTES, exactly};
use farpool_wire::{ClientId, ErrorCode, SPAN_LIMIT_SUPERPAGES, SegmentId, SegmentToken};
use grant::Grants;
use segment::Segment;
pub use segment::SegmentView;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Why an operation was refused: the content of the error response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// The reason.
    pub code: ErrorCode,
    /// Its detail; see the code.
    pub detail: u64,
}

impl Refused {
    /// A refusal.
    pub fn new(code: ErrorCode, detail: u64) -> Self {
        Refused { code, detail }
    }
}

/// The limits a table keeps.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Superpages there are, and most that [`Table::set_capacity`] may set.
    pub capacity_superpages: u32,
    /// Quota of a client that asks for none.
    pub quota_default_superpages: u32,
    /// Most a client may have.
    pub quota_limit_superpages: u32,
    /// Most a client of another host may have that shows no grant.
    pub quota_stranger_superpages: u32,
    /// How long a client is kept without a connection.
    pub lease: Duration,
    /// Most clients.
    pub clients: usize,
    /// Most segments of all clients together.
    pub segments: usize,
    /// Whether a client needs a grant.
    pub require_grants: bool,
}

/// Memory that is to be zeroed, after which [`Table::scrubbed`] must be called.
#[derive(Debug)]
pub struct Scrub<M> {
    /// The segment's memory.
    pub memory: M,
    /// Which part of it.
    pub part: ScrubPart,
}

/// Which part of a segment's memory is to be zeroed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScrubPart {
    /// Some superpages of a segment that lives on, unless it is dropped meanwhile.
    Superpages {
        /// The segment.
        segment: SegmentId,
        /// Its RMMA superpages.
        rmmas: Vec<u32>,
    },
    /// Everything; the segment is gone.
    Whole {
        /// How many of its superpages had memory.
        superpages: u32,
    },
}

impl ScrubPart {
    /// The number of superpages.
    pub fn superpages(&self) -> u32 {
        match self {
            ScrubPart::Whole { superpages } => *superpages,
            ScrubPart::Superpages { rmmas, .. } => count_u32(rmmas.len()),
        }
    }
}

/// The table.
#[derive(Debug)]
pub struct Table<M> {
    limits: Limits,
    clients: BTreeMap<ClientNumber, Client>,
    numbers: HashMap<ClientId, ClientNumber>,
    segments: HashMap<SegmentId, Segment<M>>,
    tokens: HashMap<SegmentToken, SegmentId>,
    grants: Grants,
    /// The superpages that may be lent now.
    capacity_superpages: u32,
    used_superpages: u32,
    next_client: u64,
    next_segment: u64,
    leases_expired: u64,
    /// What has changed, if somebody keeps it.
    changes: Option<Vec<Row>>,
}

/// Sizes of the table as of now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Superpages with memory or waiting to be scrubbed.
    pub used_superpages: u32,
    /// Clients, connected or not.
    pub clients: usize,
    /// Segments.
    pub segments: usize,
    /// Clients whose lease has expired since the start.
    pub leases_expired: u64,
}

impl<M: Clone> Table<M> {
    /// An empty table.
    pub fn new(limits: Limits) -> Self {
        Table {
            limits,
            clients: BTreeMap::new(),
            numbers: HashMap::new(),
            segments: HashMap::new(),
            tokens: HashMap::new(),
            grants: Grants::default(),
            capacity_superpages: limits.capacity_superpages,
            used_superpages: 0,
            next_client: 1,
            next_segment: 1,
            leases_expired: 0,
            changes: None,
        }
    }

    /// Sizes as of now.
    pub fn sizes(&self) -> Sizes {
        Sizes {
            used_superpages: self.used_superpages,
            clients: self.clients.len(),
            segments: self.segments.len(),
            leases_expired: self.leases_expired,
        }
    }

    /// Changes how much may be lent; below what is used, it only stops further allocation. Quotas
    /// do not depend on it.
    pub fn set_capacity(&mut self, superpages: u32) {
        self.capacity_superpages = superpages.min(self.limits.capacity_superpages);
    }

    /// Makes what a [`Scrub`] named available again, now that it is zero.
    pub fn scrubbed(&mut self, part: ScrubPart) {
        let count = part.superpages();
        if let ScrubPart::Superpages { segment, rmmas } = part
            && let Some(segment) = self.segments.get_mut(&segment)
        {
            segment.give_back(&rmmas);
        }
        assert!(count <= self.used_superpages, "more memory scrubbed than was in use");
        self.used_superpages -= count;
    }

    /// The segment, if this client uses it. For all others it does not exist.
    fn segment_of(&self, client: ClientNumber, segment: SegmentId) -> Result<&Segment<M>, Refused> {
        self.segments
            .get(&segment)
            .filter(|s| s.users.contains_key(&client))
            .ok_or(Refused::new(ErrorCode::UnknownSegment, segment.0))
    }

    fn segment_of_mut(
        &mut self,
        client: ClientNumber,
        segment: SegmentId,
    ) -> Result<&mut Segment<M>, Refused> {
        self.segments
            .get_mut(&segment)
            .filter(|s| s.users.contains_key(&client))
            .ok_or(Refused::new(ErrorCode::UnknownSegment, segment.0))
    }

    fn client(&self, client: ClientNumber) -> Result<&Client, Refused> {
        self.clients.get(&client).ok_or(Refused::new(ErrorCode::NotPermitted, 0))
    }
}

impl Limits {
    /// The quota of a client that asks for `wanted_bytes` (0: the default).
    fn quota_superpages(&self, wanted_bytes: u64, is_stranger: bool) -> u32 {
        let wanted = match wanted_bytes {
            0 => self.quota_default_superpages,
            bytes => superpages_of(bytes),
        };
        let limit = match is_stranger {
            true => self.quota_limit_superpages.min(self.quota_stranger_superpages),
            false => self.quota_limit_superpages,
        };
        wanted.min(limit).min(self.capacity_superpages)
    }
}

/// Superpages that hold `bytes`, at most as many as a segment can span.
pub fn superpages_of(bytes: u64) -> u32 {
    let superpages = bytes.div_ceil(SUPERPAGE_BYTES).min(u64::from(SPAN_LIMIT_SUPERPAGES));
    exactly(superpages)
}

/// Length of a list that the protocol's limits keep far below 2^32.
fn count_u32(length: usize) -> u32 {
    exactly(length)
}
