//! What an operator sets for a node.
//!
//! Invariant: a checked [`Config`] has valid ids and times that are long enough; see
//! [`Config::check`].

use std::net::SocketAddr;
use std::time::Duration;

use thiserror::Error;

use crate::arbitration::Arbitration;
use crate::classify::Thresholds;
use crate::ids::{ANY_LIFE, ClusterId, Incarnation, NodeId, Zone};
use crate::limits::{LEASE_MARGIN, TICK};
use crate::rack_key::RackKeys;

/// Time after which a grant without a renewal ends, milliseconds: long enough for a client to
/// survive some lost datagrams and a switch's restart, short enough that a dead client's memory is
/// soon lent again.
pub const LEASE_MS: u32 = 10_000;
/// Shortest lease: three renewals must fit, each true to a tick only, so that two may be lost
/// (`Config::renew_every`).
pub const LEASE_MS_MIN: u32 = 1_000;
/// Time from RECLAIM to revocation, milliseconds: the paper's client took 10 s to move 1 Gbit/s
/// worth of data back (section 6.1, Figure 6).
pub const RECLAIM_DEADLINE_MS: u32 = 10_000;
/// Shortest reclaim deadline: a few repetitions of RECLAIM must fit.
pub const RECLAIM_DEADLINE_MS_MIN: u32 = 1_000;

/// The most that one borrower may have of a server, percent of what the server would lend in all:
/// two nodes alone still share most of their memory, and no borrower leaves nothing to others.
pub const BORROWER_PERCENT: u8 = 75;
/// Time after which lent memory that holds no data is taken back, milliseconds: a program that has
/// asked for memory and uses none for five minutes can ask again.
pub const UNUSED_MS: u32 = 300_000;
/// Shortest such time: a borrower must be able to connect and write.
pub const UNUSED_MS_MIN: u32 = 1_000;

/// A node's settings.
#[derive(Clone, Debug)]
pub struct Config {
    /// The cluster.
    pub cluster: ClusterId,
    /// This node.
    pub node: NodeId,
    /// This life of the node: larger than every earlier one.
    pub incarnation: Incarnation,
    /// Where other nodes send datagrams for this node.
    pub addr: SocketAddr,
    /// Where this node's blade serves lent memory.
    pub blade: SocketAddr,
    /// The node's zone.
    pub zone: Zone,
    /// Memory use at which it is a client, neutral or a server.
    pub thresholds: Thresholds,
    /// How it chooses among competing nodes.
    pub arbitration: Arbitration,
    /// Length of a lease, milliseconds.
    pub lease_ms: u32,
    /// Time a client has to move out, milliseconds.
    pub reclaim_deadline_ms: u32,
    /// The most that one borrower may have, percent of what this node would lend in all.
    pub borrower_percent: u8,
    /// Time after which lent memory that holds no data is taken back, milliseconds.
    pub unused_ms: u32,
    /// Seed of all randomness: from the kernel in production. The first eight bytes are for choices
    /// that others may predict, the other 24 for the keys and epochs of grants and nothing else.
    pub seed: [u8; 32],
    /// The keys that datagrams are signed with. All nodes of the cluster must have the first one.
    pub keys: RackKeys,
    /// Number of the first datagram: above those of an earlier start in the same life.
    pub first_number: u64,
}

/// Why a configuration was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum ConfigError {
    /// 0 means anyone.
    #[error("node id 0 stands for \"anyone\": give another")]
    Node,
    /// 0 means any life.
    #[error("incarnation 0 stands for \"any life\": begin with 1")]
    Incarnation,
    /// Too short.
    #[error("lease of {0} ms is below {LEASE_MS_MIN} ms")]
    Lease(u32),
    /// Too short.
    #[error("reclaim deadline of {0} ms is below {RECLAIM_DEADLINE_MS_MIN} ms")]
    Deadline(u32),
    /// Nothing, or more than all.
    #[error("a borrower's share of {0} % is not within 1 to 100 %")]
    Borrower(u8),
    /// Too short.
    #[error("unused memory comes back after {0} ms, which is below {UNUSED_MS_MIN} ms")]
    Unused(u32),
}

impl Config {
    /// Creates the default settings.
    #[must_use]
    pub fn new(
        cluster: ClusterId,
        node: NodeId,
        incarnation: Incarnation,
        addr: SocketAddr,
    ) -> Self {
        // Not a secret: a node in production replaces it by one from the kernel.
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&(node.0 ^ u64::from(incarnation.0) << 32).to_le_bytes());
        seed[8..16].copy_from_slice(&node.0.to_le_bytes());
        seed[16..20].copy_from_slice(&incarnation.0.to_le_bytes());
        Self {
            cluster,
            node,
            incarnation,
            addr,
            blade: addr,
            zone: Zone(0),
            thresholds: Thresholds::default(),
            arbitration: Arbitration::default(),
            lease_ms: LEASE_MS,
            reclaim_deadline_ms: RECLAIM_DEADLINE_MS,
            borrower_percent: BORROWER_PERCENT,
            unused_ms: UNUSED_MS,
            seed,
            keys: RackKeys::none(),
            first_number: 1,
        }
    }

    /// Checks that a node can run with these settings.
    ///
    /// # Errors
    /// Names the setting that cannot be used.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.node == NodeId::ANYONE {
            return Err(ConfigError::Node);
        }
        if self.incarnation == ANY_LIFE {
            return Err(ConfigError::Incarnation);
        }
        if self.lease_ms < LEASE_MS_MIN {
            return Err(ConfigError::Lease(self.lease_ms));
        }
        if self.reclaim_deadline_ms < RECLAIM_DEADLINE_MS_MIN {
            return Err(ConfigError::Deadline(self.reclaim_deadline_ms));
        }
        if !(1..=100).contains(&self.borrower_percent) {
            return Err(ConfigError::Borrower(self.borrower_percent));
        }
        if self.unused_ms < UNUSED_MS_MIN {
            return Err(ConfigError::Unused(self.unused_ms));
        }
        Ok(())
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.lease_ms))
    }

    /// Time between two renewals: three of them, each up to a tick late, arrive before the client
    /// has to stop using a grant.
    pub(crate) fn renew_every(&self) -> Duration {
        (self.lease().saturating_sub(LEASE_MARGIN) / 3).saturating_sub(TICK)
    }

    pub(crate) fn unused(&self) -> Duration {
        Duration::from_millis(u64::from(self.unused_ms))
    }

    pub(crate) fn reclaim_deadline(&self) -> Duration {
        Duration::from_millis(u64::from(self.reclaim_deadline_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use farpool_units::exactly;

    #[test]
    fn of_every_lease_two_renewals_may_be_lost() {
        let addr = ([127, 0, 0, 1], 7070).into();
        let mut config = Config::new(ClusterId(1), NodeId(1), Incarnation(1), addr);
        for lease_ms in (LEASE_MS_MIN..60_000).step_by(37) {
            config.lease_ms = lease_ms;
            // A timer is seen at the first tick after it.
            let ticks = |time: Duration| {
                TICK * exactly::<u32, _>(time.as_millis().div_ceil(TICK.as_millis()))
            };
            let third = ticks(config.renew_every()) * 3;
            assert!(third <= config.lease() - LEASE_MARGIN, "{lease_ms} ms: {third:?}");
        }
    }
}
