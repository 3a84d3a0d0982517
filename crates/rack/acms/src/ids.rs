//! Names of things as types: nodes, their lives, grants and keys.
//!
//! Invariant: a [`GrantId`] names one grant. Its epoch is 64 random bits, so nobody can guess the
//! grants of others, and a server that restarted does not make the same one again.

use std::fmt;
use std::net::SocketAddr;

/// The cluster; datagrams from another cluster are ignored. Derive it from a name that people
/// choose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClusterId(pub u64);

/// A node, unchanged across restarts. 0 stands for "anyone" on the wire and names no node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The addressee of messages for any receiver.
    pub const ANYONE: Self = Self(0);
}

/// One life of a node's daemon: larger after every start (seconds of the wall clock at the start
/// will do). Memory lent or used in an earlier life is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Incarnation(pub u32);

/// Addresses a node in any life; names no life.
pub(crate) const ANY_LIFE: Incarnation = Incarnation(0);

/// Where a node stands, for "nearest first": the more leading bits two zones share, the nearer
/// they are. Put the row in the upper bits and the rack in the lower.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Zone(pub u32);

impl Zone {
    /// 0 in the same zone, up to 32 where the first bit differs.
    #[must_use]
    pub fn distance(self, other: Self) -> u32 {
        u32::BITS - (self.0 ^ other.0).leading_zeros()
    }
}

/// Number of a client's request, rising within an incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestNo(pub u32);

/// Fencing number of a grant: random, so that who has not received it cannot speak of the grant. A
/// blade refuses every epoch but the current one. 0 stands for no grant on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Epoch(pub u64);

/// One grant of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GrantId {
    /// The lender.
    pub server: NodeId,
    /// Which of the lender's grants.
    pub epoch: Epoch,
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}/{:x}", self.server.0, self.epoch.0)
    }
}

/// The key that the client presents to the blade with the epoch; random, new for every grant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantKey(pub u128);

impl fmt::Debug for GrantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantKey(..)")
    }
}

/// A node, and how others reach it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Peer {
    /// The node.
    pub node: NodeId,
    /// The node's life.
    pub incarnation: Incarnation,
    /// Where datagrams for it are sent.
    pub addr: SocketAddr,
}
