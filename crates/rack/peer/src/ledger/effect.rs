//! What the ledger wants done, and why it refuses something.

use farpool_acms::{GrantId, GrantKey};
use farpool_api::{ClientId, ProblemKind, SegmentId};
use thiserror::Error;

use super::{CLIENTS_MAX, LEASE_RANGE_MS, WISH_LIMIT_BYTES};

/// What the shell has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Nobody uses this grant of another node: tell the protocol.
    Evacuated(GrantId),
    /// The own blade shall serve this grant.
    GiveHere {
        /// The grant.
        grant: GrantId,
        /// The key that opens it.
        key: GrantKey,
        /// How much.
        bytes: u64,
    },
    /// The own blade shall take this grant back.
    EndHere(GrantId),
    /// This client said nothing for the length of its lease, and is ended.
    Silent(ClientId),
}

/// A wish that was heard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wished {
    /// Whose.
    pub client: ClientId,
    /// In whole superpages.
    pub bytes: u64,
    /// Not a repetition.
    pub is_new: bool,
}

/// Why something was refused. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LedgerError {
    /// No such client.
    #[error("there is no client {0}; register it first")]
    NoSuchClient(ClientId),
    /// A segment for a host.
    #[error(
        "a segment must be a client's: a node without a controller serves its own programs only"
    )]
    NoClient,
    /// Nothing, or more than there can be.
    #[error("{bytes} bytes are no segment; ask for 1 to {WISH_LIMIT_BYTES}")]
    Size {
        /// The bytes asked for.
        bytes: u64,
    },
    /// Same id, other size.
    #[error("segment {0} was asked for with another size before; take another id")]
    Changed(SegmentId),
    /// A name that is none.
    #[error("the {what} must have 1 to {limit} bytes")]
    Name {
        /// Which.
        what: &'static str,
        /// How long it may be.
        limit: usize,
    },
    /// A lease that is none.
    #[error("a lease of {0} ms is not within {min} to {max} ms",
        min = LEASE_RANGE_MS.start(), max = LEASE_RANGE_MS.end())]
    Lease(u64),
    /// As many as may be.
    #[error("{CLIENTS_MAX} programs use this node's memory already, as many as may")]
    TooManyClients,
    /// As many grants as may be.
    #[error("the program has {limit} grants, as many as it can use")]
    Full {
        /// How many.
        limit: usize,
    },
    /// Nobody lends.
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
    /// How the interface calls it.
    #[must_use]
    pub fn kind(&self) -> ProblemKind {
        match self {
            Self::NoSuchClient(_) => ProblemKind::NotFound,
            Self::NoClient | Self::Size { .. } | Self::Name { .. } | Self::Lease(_) => {
                ProblemKind::Invalid
            }
            Self::Changed(_) => ProblemKind::Conflict,
            Self::TooManyClients | Self::Full { .. } | Self::NoRoom { .. } => ProblemKind::NoRoom,
        }
    }
}
