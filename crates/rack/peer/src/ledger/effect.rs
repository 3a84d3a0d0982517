//! Actions that the ledger requests, and why it refuses something.

use farpool_acms::{GrantId, GrantKey};
use farpool_api::{ClientId, ProblemKind, SegmentId};
use thiserror::Error;

use super::{CLIENTS_MAX, LEASE_RANGE_MS, WISH_LIMIT_BYTES};

/// An action that the caller has to carry out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// No program uses this grant of another node: the protocol must be told.
    Evacuated(GrantId),
    /// This node's blade must serve this grant.
    GiveHere {
        /// The grant.
        grant: GrantId,
        /// The key that opens it.
        key: GrantKey,
        /// Its size in bytes.
        bytes: u64,
    },
    /// This node's blade must take this grant back.
    EndHere(GrantId),
    /// This client sent nothing for the length of its lease, and was ended.
    Silent(ClientId),
}

/// A wish that was accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wished {
    /// The client that wishes.
    pub client: ClientId,
    /// The memory wished for, in bytes: whole superpages.
    pub bytes: u64,
    /// False if the wish is a repetition.
    pub is_new: bool,
}

/// Why something was refused. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LedgerError {
    /// No such client.
    #[error("there is no client {0}; register it first")]
    NoSuchClient(ClientId),
    /// A program speaks for another tenant than its own.
    #[error("a program of tenant {tenant} may not ask about {what}: it is another's")]
    Foreign {
        /// The program's tenant.
        tenant: String,
        /// What it asked about.
        what: String,
    },
    /// The segment is for a host instead of a client.
    #[error(
        "a segment must be a client's: a node without a controller serves its own programs only"
    )]
    NoClient,
    /// The segment is for copies.
    #[error(
        "nodes without a controller do not keep copies apart: --redundancy needs a rack with a \
         controller, or blades given with --blade"
    )]
    Apart,
    /// The size is zero, or above the limit.
    #[error("{bytes} bytes are no segment; ask for 1 to {WISH_LIMIT_BYTES}")]
    Size {
        /// The bytes asked for.
        bytes: u64,
    },
    /// The id was used before with another size.
    #[error("segment {0} was asked for with another size before; take another id")]
    Changed(SegmentId),
    /// A name is empty, too long, or has characters that a terminal would obey.
    #[error("the {what} must have 1 to {limit} bytes, and no control characters")]
    Name {
        /// Which name.
        what: &'static str,
        /// Its longest length in bytes.
        limit: usize,
    },
    /// The lease is outside the permitted range.
    #[error("a lease of {0} ms is not within {min} to {max} ms",
        min = LEASE_RANGE_MS.start(), max = LEASE_RANGE_MS.end())]
    Lease(u64),
    /// There are as many programs as permitted.
    #[error("{CLIENTS_MAX} programs use this node's memory already, as many as may")]
    TooManyClients,
    /// The program has as many grants as it can use.
    #[error("the program has {limit} grants, as many as it can use")]
    Full {
        /// How many grants a program can use.
        limit: usize,
    },
    /// No node has memory to lend.
    #[error(
        "nobody has memory to lend for now: {missing_bytes} of the {wanted_bytes} bytes wanted are \
         missing and will be taken as soon as somebody has them"
    )]
    NoRoom {
        /// The bytes that are missing.
        missing_bytes: u64,
        /// The bytes wanted in all.
        wanted_bytes: u64,
    },
}

impl LedgerError {
    /// Returns the kind of problem that the REST interface answers with.
    #[must_use]
    pub fn kind(&self) -> ProblemKind {
        match self {
            Self::NoSuchClient(_) => ProblemKind::NotFound,
            Self::Foreign { .. } => ProblemKind::Forbidden,
            Self::NoClient
            | Self::Apart
            | Self::Size { .. }
            | Self::Name { .. }
            | Self::Lease(_) => ProblemKind::Invalid,
            Self::Changed(_) => ProblemKind::Conflict,
            Self::TooManyClients | Self::Full { .. } | Self::NoRoom { .. } => ProblemKind::NoRoom,
        }
    }
}
